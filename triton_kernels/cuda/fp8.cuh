// FP8 in layouts `fragment-1` / `fragment-1t` (`formats/fragment.py`: e4m3), with a float32 scale per token. The two codes in half of a
// word become one register of an operand, in fp16, exactly. A key's scale multiplies its scores. A value's scale is added to the exponent of
// its weight, so fp16 weights are normalised by the contribution of a token, for any range of scales.
#pragma once
#include "affine.cuh"
#include "e4m3.cuh"

// A KV tile of keys or of values.
template <int D, int SCALE_AT> struct Fp8 {
  using C = Codes<8, D>;
  static constexpr int CODES = KV_TILE / 32 * C::BYTES, STAGE_BYTES = CODES + KV_TILE * 4,
                       PART_BYTES = SCALE_AT + PAGE * 4;
  static_assert(SCALE_AT >= PAGE * SLICES * D && C::V == 4 && C::TILES == 1, "codes, scales");

  static __device__ __forceinline__ void copy(u32 stage, const u8* part, int token, int limit, int lane) {
    C::copy(in_work_tile(limit), stage, part, token, lane);
    copy_linear<KV_TILE * 4>(in_work_tile(limit), stage + CODES, part + SCALE_AT + token * 4, lane);
  }
  // Two operands (16 tokens each) over 16 channels of a segment.
  static __device__ __forceinline__ void load(u32 (*a)[4], u32 stage, int segment, int c, int lane) {
    u32 w[4];
    lds<4>(w, stage + segment * C::BYTES + (c * 32 + lane) * 16);
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int i = 0; i < 4; i++) a[h][i] = e4m3_pair(w[2 * h + (i >> 1)], i & 1);
  }
  // Scales of the lane's four tokens of a segment, times CODE.
  static __device__ __forceinline__ void scales(float* x, u32 stage, int segment, int lane) {
    lds<4>(reinterpret_cast<u32*>(x), stage + CODES + (segment * 32 + lane / 4 * 4) * 4);
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] *= CODE;
  }
};

template <int D, int SCALE_AT> struct Fp8Keys {
  using F = Fp8<D, SCALE_AT>;
  static constexpr bool NORMALISED = true;  // needs q as fp16 of magnitude at most 1
  static constexpr int LIFT = 0, GROUPS = 1, STAGE_BYTES = F::STAGE_BYTES, SECOND_STAGE_BYTES = STAGE_BYTES,
                       PART_BYTES = F::PART_BYTES;

  u32 q[NT][D / 8];  // right operand
  float c[NT][2];    // factor of the scores of columns 2 t, 2 t + 1

  // rows: normalised queries in shared memory; size: what they were divided by
  __device__ __forceinline__ void begin(u32 rows, const float* size, const float*, float scale, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) c[n][e] = size[8 * n + 2 * t + e] * scale;
      const u32 row = rows + (8 * n + g) * (D * 2 + 16);
#pragma unroll
      for (int b = 0; b < D / 32; b++) lds<4>(&q[n][4 * b], row + 64 * b + 16 * t);
      if constexpr (D % 32) lds<2>(&q[n][D / 32 * 4], row + D / 32 * 64 + 8 * t);
    }
  }
  __device__ __forceinline__ void copy(u32 stage, const u8* part, int token, bool, int limit, int lane) const {
    F::copy(stage, part, token, limit, lane);
  }
  __device__ __forceinline__ void refresh(u32, u32, int, bool, int) {}

  __device__ __forceinline__ void scores(float (*s)[NT][4], u32 stage, u32, int lane) {
#pragma unroll
    for (int segment = 0; segment < KV_TILE / 32; segment++) {
      float partial[2][NT][4] = {}, scale[4];
#pragma unroll
      for (int k = 0; k < D / 16; k++) {
        u32 a[2][4];
        F::load(a, stage, segment, k, lane);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int h = 0; h < 2; h++) mma<false>(partial[h][n], a[h], q[n][2 * k], q[n][2 * k + 1]);
      }
      F::scales(scale, stage, segment, lane);
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i += EVERY) s[2 * segment + h][n][i] = partial[h][n][i] * scale[2 * h + (i >> 1)];
    }
  }
  __device__ __forceinline__ float factor(int n, int, int e) const { return c[n][e]; }
  __device__ __forceinline__ float offset(int, int, int) const { return 0.f; }
};

template <int D, int SCALE_AT> struct Fp8Values {
  using F = Fp8<D, SCALE_AT>;
  static constexpr int STAGE_BYTES = F::STAGE_BYTES, SCRATCH_BYTES = 0, PART_BYTES = F::PART_BYTES;
  static constexpr float SUM_UNIT = 1.f;

  float shift[KV_TILE / 32][4];  // added to the exponents of the lane's tokens

  __device__ __forceinline__ void begin() {}
  __device__ __forceinline__ void copy(u32 stage, const u8* part, int token, int limit, int lane) const {
    F::copy(stage, part, token, limit, lane);
  }

  static __device__ __forceinline__ void scales(float* x, u32 stage, int segment, int limit, int lane) {
    F::scales(x, stage, segment, lane);
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (PARTIAL && segment * 32 + lane / 4 * 4 + j >= limit) x[j] = 1.f;
  }

  // Zeros the codes after the last token: they may be NaN, and a weight of 0 times NaN is NaN. A lane reads only its own words.
  static __device__ __forceinline__ void clear(u32 stage, int limit, int lane) {
#pragma unroll 1
    for (int at = 0; at < KV_TILE / 32 * D / 16; at++) {
      const int left = limit - at / (D / 16) * 32 - 8 * (lane & 3);
      const u32 address = stage + (at * 32 + lane) * 16;
      u32 w[4];
      lds<4>(w, address);
#pragma unroll
      for (int k = 0; k < 4; k++) w[k] &= (k < left ? 0x00ff00ffu : 0u) | (k + 4 < left ? 0xff00ff00u : 0u);
      sts4(address, w);
    }
  }

  // Exponents to add to the scores before their maximum is taken.
  __device__ __forceinline__ void weigh(u32 stage, u32, int limit, int lane) {
    if (PARTIAL && limit < KV_TILE) clear(stage, limit, lane);
#pragma unroll
    for (int segment = 0; segment < KV_TILE / 32; segment++) {
      scales(shift[segment], stage, segment, limit, lane);
#pragma unroll
      for (int j = 0; j < 4; j++) shift[segment][j] = lg2(shift[segment][j]);
    }
  }
  __device__ __forceinline__ float exponent(int tile, int i) const {
    return shift[tile >> 1][2 * (tile & 1) + (i >> 1)];
  }

  // x: scores plus `exponent`, minus the maximum. Adds weights to l, and weighted values to o.
  __device__ __forceinline__ void add(float (*o)[NT][4], float (*l)[2], float (*x)[NT][4], u32 stage, u32, int limit,
                                      int lane) {
#pragma unroll
    for (int segment = 0; segment < KV_TILE / 32; segment++) {
      float scale[4];
      scales(scale, stage, segment, limit, lane);
      u32 p[2][NT][2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float inverse[2] = {rcp(scale[2 * h]), rcp(scale[2 * h + 1])};
#pragma unroll
        for (int n = 0; n < NT; n++) {
          float w[4] = {};
#pragma unroll
          for (int i = 0; i < 4; i += EVERY) {
            w[i] = ex2(x[2 * segment + h][n][i]);
            l[n][i & 1] += w[i] * inverse[i >> 1];
          }
          p[h][n][0] = transposed(pack_half(w[0], w[1]));
          p[h][n][1] = transposed(pack_half(w[2], w[3]));
        }
      }
#pragma unroll
      for (int k = 0; k < D / 16; k++) {
        u32 a[2][4];
        F::load(a, stage, segment, k, lane);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int h = 0; h < 2; h++) mma<false>(o[k][n], a[h], p[h][n][0], p[h][n][1]);
      }
    }
  }
  __device__ __forceinline__ void decay(int, int, float) {}
  __device__ __forceinline__ void finish(float (*)[NT][4]) {}
};
