// Tokens in the model's dtype, token by token: the window (sink, tail, new tokens) of every cache, and pages of `formats.dense`.
//
// Each lane copies 16 bytes of each of its tokens to shared memory that only this lane uses. A key's bytes are operands already, because
// `channel_of` gives a lane eight neighbouring channels. A value's bytes need one transposition per register.
#pragma once
#include "common.cuh"

template <int D> struct Dense {
  static constexpr int SEGMENT_BYTES = 32 * D * 2;  // bytes of 32 tokens
  static constexpr int VECTORS = D / 32;

  // row(j): the address of the lane's token 4 g + j of the segment, and whether to copy it (otherwise zeros).
  template <class F> static __device__ __forceinline__ void copy(u32 target, F row, int lane) {
    const int t = lane & 3;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      bool keep;
      const u8* source = row(j, keep);
#pragma unroll
      for (int b = 0; b < VECTORS; b++)
        cp16(target + ((j * VECTORS + b) * 32 + lane) * 16, source + 64 * b + 16 * t, keep);
      if constexpr (D % 32) cp8(target + 4 * VECTORS * 512 + (j * 32 + lane) * 8, source + 64 * VECTORS + 8 * t, keep);
    }
  }

  // 32 or 16 channels of the lane's four tokens.
  static __device__ __forceinline__ void load(u32 (*x)[4], u32 segment, int b, int lane) {
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (b < VECTORS) lds<4>(x[j], segment + ((j * VECTORS + b) * 32 + lane) * 16);
      else lds<2>(x[j], segment + 4 * VECTORS * 512 + (j * 32 + lane) * 8);
  }

  // s += q . k for two operands; rows: queries in shared memory
  static __device__ __forceinline__ void scores(float (*s)[NT][4], u32 segment, u32 rows, int lane) {
    const int g = lane >> 2, t = lane & 3;
    constexpr int STRIDE = D * 2 + 16;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int n = 0; n < NT; n++) s[h][n][0] = s[h][n][1] = s[h][n][2] = s[h][n][3] = 0.f;
#pragma unroll
    for (int b = 0; b < (D + 16) / 32; b++) {
      u32 x[4][4];
      load(x, segment, b, lane);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        u32 q[4];
        if (b < VECTORS) lds<4>(q, rows + (8 * n + g) * STRIDE + 64 * b + 16 * t);
        else lds<2>(q, rows + (8 * n + g) * STRIDE + 64 * b + 8 * t);
#pragma unroll
        for (int u = 0; u < (b < VECTORS ? 2 : 1); u++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const u32 a[4] = {x[2 * h][2 * u], x[2 * h + 1][2 * u], x[2 * h][2 * u + 1], x[2 * h + 1][2 * u + 1]};
            mma<BF16>(s[h][n], a, q[2 * u], q[2 * u + 1]);
          }
      }
    }
  }

  // o += weights . v; x: exponents
  static __device__ __forceinline__ void add(float (*o)[NT][4], float (*l)[2], float (*x)[NT][4], u32 segment,
                                             int lane) {
    u32 p[2][NT][2];
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float w[4] = {};
#pragma unroll
        for (int i = 0; i < 4; i += EVERY) {
          w[i] = ex2(x[h][n][i]);
          l[n][i & 1] += w[i];
        }
        p[h][n][0] = transposed(pack_model(w[0], w[1]));
        p[h][n][1] = transposed(pack_model(w[2], w[3]));
      }
#pragma unroll
    for (int b = 0; b < (D + 16) / 32; b++) {
      u32 y[4][4];
      load(y, segment, b, lane);
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < (b < VECTORS ? 4 : 2); i++) y[j][i] = transposed(y[j][i]);
#pragma unroll
      for (int u = 0; u < (b < VECTORS ? 2 : 1); u++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const u32 a[4] = {y[2 * h][2 * u], y[2 * h][2 * u + 1], y[2 * h + 1][2 * u], y[2 * h + 1][2 * u + 1]};
#pragma unroll
          for (int n = 0; n < NT; n++) mma<BF16>(o[2 * b + u][n], a, p[h][n][0], p[h][n][1]);
        }
    }
  }
};
