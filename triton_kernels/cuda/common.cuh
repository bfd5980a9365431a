// What all kernels share: types, PTX, and the geometry, which the host gives as macros (see `geometry.py`).
// NVRTC has no headers of the system; nothing is included, so that no toolkit has to be found.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

// Whether an instruction makes fp16 of e4m3.
#ifndef CONVERT
#if __CUDA_ARCH__ >= 890
#define CONVERT 1
#else
#define CONVERT 0
#endif
#endif

// What most launches do not come to, or one warp only: out of the others' way. Behind another kernel a launch finds none of its
// instructions in a cache, and waits for what it comes by.
#define COLD __device__ __noinline__

constexpr int ROWS =
    8 * NT;  // columns of products for query rows (heads x tokens), of which a team of warps attends for as many
// SPREAD: at most four query rows, in every other column. A lane then has one row's scores, where side by side half of the lanes
// had two and the others none that count. COLUMNS_USED: of a lane's two columns; EVERY: step over a lane's four numbers.
constexpr int COLUMNS_USED = SPREAD ? 1 : 2, EVERY = SPREAD ? 2 : 1;
#ifdef PAGE
// Tokens that a warp takes at a time, in two pieces; and whether not all of them need hold tokens.
constexpr int UNIT = 2 * PT;
constexpr bool PARTIAL = DIRECT || PAGE % UNIT != 0;
// Tokens from a piece's first on (`limit`): whether there is a unit at all. In one, the second piece may have none; it is copied all the same
// (from another's place), because what has no weight must be numbers.
__device__ __forceinline__ bool in_unit(int limit) { return limit > -PT; }
#endif
constexpr float LOWEST = -1e30f;  // stands for a maximum over nothing: finite, so that a difference is never NaN
constexpr float LOG2E = 1.4426950408889634f;
constexpr float TWO24 = 16777216.f;  // masked bits read as fp16 are subnormal: code x position x 2^-24
#define INF __int_as_float(0x7f800000)

// A parameter of a layer: of KV head h, `stride * h` bytes from `data` on.
struct Parameter {
  const u8* data;
  i64 stride;
};

struct Args {
  const u8 *q, *k, *v, *mask, *sinks, *pool;
  const i64* address;  // [B, pages]: bytes from pool
  const u8 *sink_k, *sink_v, *tail_k, *tail_v;
  const int *length, *paged;  // [B, H]
  u8* out;                    // [B, S, Hq, DV]
  float* partial;
  int* counters;                                                    // [row blocks, B * H], zero before and after
  i64 q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, mask_b, mask_s;  // strides in elements; of channels: 1
  int batch, heads, groups, tokens, pages, sink, tail, teams,
      split;  // split: teams of a row, less than 0: rows of a team (`even_row`), or 0
  float scaling, softcap;
  const u8* raw_k;                 // TRANSFORMED: the chunk's keys; `k` is then where they are put, transformed
  const float *q_scale, *k_scale;  // factors of channels, of KV head h at h * scale_h
  i64 raw_b, raw_h, raw_s, scale_h;
  Parameter tables[2];  // codebooks of keys and values, or null
};

#include "ptx.cuh"

// the model's dtype
__device__ __forceinline__ float to_float(u32 x) { return BF16 ? bf16_to_float(x) : half_to_float(x); }
__device__ __forceinline__ u32 pack_model(float low, float high) {
  return BF16 ? pack_bf16(low, high) : pack_half(low, high);
}

// Sum over the eight lanes that hold the same columns of an accumulator.
__device__ __forceinline__ float sum_rows(float x) {
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) x += __shfl_xor_sync(~0u, x, d);
  return x;
}
__device__ __forceinline__ float max_rows(float x) {
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

// A number rounded to eleven bits, which are what fp16 keeps of it while it is not subnormal there. By products, because what masks bits
// has to wait for the words' unpacking, which is all masks.
__device__ __forceinline__ float eleven_bits(float x) { return __fmul_rn(x, 8193.f) - x * 8192.f; }

// Channel of row or column `8 j + x` of the operands over channels 16 c and up: `formats/fragment.py`.
template <int D> __device__ __forceinline__ constexpr int channel_of(int c, int j, int x) {
  return c < D / 32 * 2 ? c / 2 * 32 + 8 * (x >> 1) + 4 * (c & 1) + 2 * j + (x & 1)
                        : D / 32 * 32 + 4 * (x >> 1) + 2 * j + (x & 1);
}

// Copy `BYTES` consecutive bytes, the warp together; or, where they are not real, nothing.
template <int BYTES> __device__ __forceinline__ void copy_linear(bool real, u32 target, const u8* source, int lane) {
  const u8* from = opaque(source + lane * 16);
#pragma unroll
  for (int at = 0; at < BYTES; at += 512)
    cp16_if(real && (at + 512 <= BYTES || at + lane * 16 < BYTES), target + at + lane * 16, from + at);
}

// Two arrays of `BYTES` bytes each, one behind the other.
template <int BYTES>
__device__ __forceinline__ void copy_pair(bool real, u32 target, const u8* first, const u8* second, int lane) {
#pragma unroll
  for (int at = 0; at < 2 * BYTES; at += 512) {
    const int mine = at + lane * 16;
    cp16_if(real && (at + 512 <= 2 * BYTES || mine < 2 * BYTES), target + mine,
            mine < BYTES ? first + mine : second + (mine - BYTES));
  }
}
