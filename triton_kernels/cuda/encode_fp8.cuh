// Packs tokens as FP8 (`formats/fp8.py`) in layouts `fragment-1` / `fragment-1t`: see encode.cuh.
#pragma once
#include "e4m3.cuh"
#include "encode.cuh"

template <int D, int SCALE_AT, bool TRANSPOSED> struct Fp8Encoder {
  struct Space {
    float scale[PAGE];
  };

  // Tokens [low, high) of a page whose token 0 has index `base`.
  static __device__ void encode(u8* part, const Source& source, int low, int high, int base,
                                const WarpGroup& warp_group, void* space) {
    store(part, low, high, warp_group, *static_cast<Space*>(space),
          [&](int token, int c) { return to_float(source.token(base + token)[c]); });
  }

  // Tokens [low, high) of a page. number: channel c of a token.
  template <class F>
  static __device__ void store(u8* part, int low, int high, const WarpGroup& warp_group, Space& own, const F& number) {
    float* scale = own.scale;
    const int lane = warp_group.thread & 31;
    for (int i = low + (warp_group.thread >> 5); i < high; i += WARPS) {
      float largest = 0.f;
      for (int n = lane; n < D; n += 32) largest = fmaxf(largest, e4m3_size(number(i, n)));
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
      if (lane == 0) reinterpret_cast<float*>(part + SCALE_AT)[i] = scale[i] = e4m3_scale(largest);
    }
    warp_group.sync();
    constexpr int WORDS = D / 4;  // a lane's words of 32 tokens
    u32* words = reinterpret_cast<u32*>(part);
    for (int i = low / 32 * 32 * WORDS + warp_group.thread; i < (high + 31) / 32 * 32 * WORDS;
         i += WARP_GROUP_THREADS) {
      const int segment = i / (32 * WORDS), c = i / 128 % (D / 16), inner = i % 4, owner = i / 4 % 32, g = owner >> 2,
                t = owner & 3;
      const int h = inner >> 1, upper = inner & 1;
      u32 taken = 0, value = 0;
#pragma unroll
      for (int f = 0; f < 4; f++) {
        const int e = f & 1, odd = f >> 1;
        const int token_j = TRANSPOSED ? upper : odd, token_x = TRANSPOSED ? 2 * t + e : g,
                  channel_j = TRANSPOSED ? odd : upper, channel_x = TRANSPOSED ? g : 2 * t + e;
        const int token = segment * 32 + 4 * token_x + 2 * h + token_j;
        if (token < low || token >= high) continue;
        taken |= 0xffu << (8 * f);
        value |= to_e4m3(__fdiv_rn(number(token, channel_of<D>(c, channel_j, channel_x)), scale[token])) << (8 * f);
      }
      if (taken) words[i] = ~taken ? (words[i] & ~taken) | value : value;
    }
    warp_group.sync();
  }
};
