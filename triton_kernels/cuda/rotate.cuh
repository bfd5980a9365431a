// Transforms a row of keys or queries, in the registers of a warp, bit for bit as `transforms` defines it. Python passes macros: FACTORS (see
// `Factors`), ROTATED, BASE and SIGNS (the matrix that the rotation is built from), NORM_BITS (its factor).
#pragma once
#include "common.cuh"

// When channels are multiplied by their factors.
enum Factors { NO_FACTORS, FACTORS_BEFORE, FACTORS_AFTER };  // the rotation

// bit p of column c: whether entry (p, c) of the matrix of order BASE is -1
__constant__ u32 negative_entries[BASE] = {SIGNS};

// Lane `l` holds channels 64 j + 2 l and 64 j + 2 l + 1 as y[2 j] and y[2 j + 1].
template <int D> struct Rotation {
  static constexpr int WORDS = (D + 63) / 64;

  // channel `c` of the row; e: its parity
  static __device__ __forceinline__ float fetch(const float* y, int c, int e) {
    float x = __shfl_sync(~0u, y[e], c >> 1 & 31);
#pragma unroll
    for (int j = 1; j < WORDS; j++) {
      const float other = __shfl_sync(~0u, y[2 * j + e], c >> 1 & 31);
      x = c >> 6 == j ? other : x;
    }
    return x;
  }

  // a Hadamard rotation of a power of two: over neighbours, then lanes, then registers
  static __device__ __forceinline__ void butterfly(float* y, int lane) {
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
      const float low = y[2 * j], high = y[2 * j + 1];
      y[2 * j] = low + high;
      y[2 * j + 1] = low - high;
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
#pragma unroll
      for (int i = 0; i < 2 * WORDS; i++) {
        const float other = __shfl_xor_sync(~0u, y[i], step);
        y[i] = lane & step ? other - y[i] : y[i] + other;
      }
#pragma unroll
    for (int step = 2; step < 2 * WORDS; step *= 2)
#pragma unroll
      for (int i = 0; i < 2 * WORDS; i++)
        if (!(i & step)) {
          const float low = y[i], high = y[i + step];
          y[i] = low + high;
          y[i + step] = low - high;
        }
  }

  // the matrix of order BASE on each block of BASE channels, then a butterfly over the blocks
  static __device__ __forceinline__ void blocks(float* y, int lane) {
    float next[2 * WORDS];
    auto channel = [&](int i) { return min(32 * (i & ~1) + 2 * lane, D - 2) + (i & 1); };  // clamped to the last
#pragma unroll
    for (int i = 0; i < 2 * WORDS; i++) {
      const int c = channel(i);
      const u32 signs = negative_entries[c % BASE];
      float total = -0.f;  // adding to -0 changes no number, not even -0
#pragma unroll 1
      for (int p = 0; p < BASE; p += 2)
#pragma unroll
        for (int e = 0; e < 2; e++)
          total +=
              __uint_as_float(__float_as_uint(fetch(y, c / BASE * BASE + p + e, e)) ^ (signs >> (p + e) & 1) << 31);
      next[i] = total;
    }
#pragma unroll
    for (int step = 1; step < D / BASE; step *= 2) {
#pragma unroll
      for (int i = 0; i < 2 * WORDS; i++) y[i] = next[i];
#pragma unroll
      for (int i = 0; i < 2 * WORDS; i++) {
        const int c = channel(i), upper = c / BASE & step;
        const float other = fetch(y, upper ? c - step * BASE : c + step * BASE, i & 1);
        next[i] = upper ? other - y[i] : y[i] + other;
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * WORDS; i++) y[i] = next[i];
  }
};

// x: a lane's words of the row, two channels each, in the model's dtype, transformed in place. scale: factors of the channels, or unused.
template <int D> __device__ __forceinline__ void transform_row(u32* x, const float* scale, int lane) {
  using R = Rotation<D>;
  float y[2 * R::WORDS];
  auto multiply = [&](int j) {
    const int c = 64 * j + 2 * lane;
    if (c < D) {
      y[2 * j] = __fmul_rn(y[2 * j], scale[c]);
      y[2 * j + 1] = __fmul_rn(y[2 * j + 1], scale[c + 1]);
    }
  };
#pragma unroll
  for (int j = 0; j < R::WORDS; j++) {
    y[2 * j] = to_float(x[j] & 0xffff);
    y[2 * j + 1] = to_float(x[j] >> 16);
    if constexpr (FACTORS == FACTORS_BEFORE) multiply(j);
  }
  if constexpr (ROTATED) {
    if constexpr (BASE == 1) R::butterfly(y, lane);
    else R::blocks(y, lane);
#pragma unroll
    for (int i = 0; i < 2 * R::WORDS; i++) y[i] = __fmul_rn(y[i], __uint_as_float(NORM_BITS));
  }
#pragma unroll
  for (int j = 0; j < R::WORDS; j++) {
    if constexpr (FACTORS == FACTORS_AFTER) multiply(j);
    x[j] = pack_model(y[2 * j], y[2 * j + 1]);
  }
}

// Transforms a token in global memory.
template <int D> __device__ __forceinline__ void transform_token(const u8* from, u8* to, const float* scale, int lane) {
  const u32* source = reinterpret_cast<const u32*>(from);
  u32* target = reinterpret_cast<u32*>(to);
  u32 x[Rotation<D>::WORDS];
#pragma unroll
  for (int j = 0; j < Rotation<D>::WORDS; j++) x[j] = 32 * j + lane < D / 2 ? source[32 * j + lane] : 0u;
  transform_row<D>(x, scale, lane);
#pragma unroll
  for (int j = 0; j < Rotation<D>::WORDS; j++)
    if (32 * j + lane < D / 2) target[32 * j + lane] = x[j];
}
