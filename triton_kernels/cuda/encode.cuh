// A warp group packs the tokens of a page of one KV head into codes. The result equals that of `Format.encode`, bit for bit. An encoder's
// `Space` is its shared memory.
//
// A page is packed only once in PAGE tokens, so this code is simple rather than fast: a thread collects the codes of a word.
#pragma once
#include "common.cuh"
#include "warp_group.cuh"

constexpr float FP16_MAX = 65504.f;

struct Meta {
  float scale, zero;
};

// Tokens of one row (sequence x KV head) by index, not counting sink tokens. Tokens before `first` are in the tail ring. Token `first` is token
// number `skipped` of the new tokens, without padding.
struct Source {
  const u16 *tail, *new_tokens;
  const int* order;
  i64 stride;
  int size, dim, first, skipped;
  const u8* table;  // the KV head's codebook, or null
  __device__ __forceinline__ const u16* token(int i) const {
    if (i < first) return tail + (i64)(i % size) * dim;
    int number = i - first + skipped;
    if (order) number = order[number];
    return new_tokens + number * stride;
  }
};

// Stores scale and zero point of a group with values from `low` to `high`, at index `at`. levels: the largest code.
__device__ __forceinline__ void fit(u8* scales, u8* zeros, Meta* meta, int at, float low, float high, float levels) {
  const u16 s = half_bits(fminf(__fdiv_rn(high - low, levels), FP16_MAX));
  const u16 z = half_bits(fminf(fmaxf(low, -FP16_MAX), FP16_MAX) + 0.f);  // adding 0 turns -0 into 0
  reinterpret_cast<u16*>(scales)[at] = s;
  reinterpret_cast<u16*>(zeros)[at] = z;
  meta[at] = Meta{half_to_float(s), half_to_float(z)};
}

__device__ __forceinline__ u32 quantized(float x, Meta m, float levels) {
  return m.scale > 0.f ? (u32)rintf(fminf(fmaxf(__fdiv_rn(x - m.zero, m.scale), 0.f), levels)) : 0u;
}

// f(OFFSET) + f(OFFSET + STRIDE) + ... over a page, rounded after every addition. The order is that of `fold_sum`: a tree, whose last
// step adds the sum over even tokens and the sum over odd tokens.
template <int STRIDE, class F> __device__ __forceinline__ float fold(F f, int offset) {
  if constexpr (STRIDE >= PAGE) return f(offset);
  else {
    const float even = fold<2 * STRIDE>(f, offset), odd = fold<2 * STRIDE>(f, offset + STRIDE);
    return __fadd_rn(even, odd);
  }
}
