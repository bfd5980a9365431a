// Values as integers: see affine.cuh.
#pragma once
#include "affine.cuh"

// Per token (in groups of channels), the scale is added to the weights' exponent. So fp16 weights are normalised by the contribution of a
// token, and no range of scales overflows or vanishes. Zero points become one sum per row.
//
// Codes and zero points nearly cancel if one channel, or token, of a group is far below the others. So both are multiplied by the same weights
// of eleven bits. Only a subnormal fp16 weight has fewer bits (the row's channels are then nearly equal, so it contributes little besides its
// zero point); zero points are added in float32.
//
// Per channel, scale and zero point of a group of tokens are applied to the product.
template <int BITS, bool CHANNEL, int GROUP, int D, int SCALE_AT, int ZERO_AT> struct AffineValues {
  using C = Codes<BITS, D>;
  using P = Planes<BITS>;
  // Per token: channels of a group in the warp's slice, groups of the slice, and groups of the head.
  static constexpr int SPAN = CHANNEL || GROUP < D ? GROUP : D, GROUPS = CHANNEL ? 1 : D / SPAN,
                       ALL = CHANNEL ? 1 : SLICES * D / GROUP;
  static constexpr int CODES = KV_TILE / 32 * C::BYTES;
  static constexpr int META = CHANNEL ? (KV_TILE > GROUP ? KV_TILE / GROUP : 1) * D * 2 : KV_TILE * ALL * 2;
  static constexpr int STAGE_BYTES = CODES + 2 * META;
  static constexpr float SUM_UNIT = 1 / TWO24;                                // the unit of the sums of `add`
  static constexpr int PART_BYTES = ZERO_AT + PAGE * SLICES * D / GROUP * 2;  // bytes of a page's part
  static_assert(SCALE_AT >= PAGE * SLICES * D * BITS / 8 && ZERO_AT >= SCALE_AT + PAGE * SLICES * D / GROUP * 2,
                "codes, scales, zero points");
  static_assert(SLICES == 1 || !CHANNEL || GROUP >= KV_TILE, "one group of tokens per KV tile");
  // With one scale per token, one lane computes all numbers that depend on it, and shares them through shared memory.
  static constexpr bool SHARED_SCALES = !CHANNEL && ALL == 1;
  static constexpr int SCRATCH_BYTES = SHARED_SCALES ? 3 * KV_TILE * 4 : 0;

  float shift[KV_TILE / 32][4];  // added to the exponents of the lane's tokens
  float z[GROUPS][NT][2];        // sum of weight x zero point / scale of the lane's tokens

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int n = 0; n < NT; n++) z[i][n][0] = z[i][n][1] = 0.f;
  }

  __device__ __forceinline__ void copy(u32 stage, const u8* part, int token, int limit, int lane) const {
    C::copy(in_work_tile(limit), stage, part, token, lane);
    const int first = CHANNEL ? (token / GROUP * SLICES + own_slice()) * D * 2 : token * ALL * 2;
    copy_pair<META>(in_work_tile(limit), stage + CODES, part + SCALE_AT + first, part + ZERO_AT + first, lane);
  }

  static __device__ __forceinline__ float position(int j) {
    return half_position<BITS>(j & 1) * operand_position<BITS>(j >> 1);
  }

  // The first of a token's groups in the warp's slice.
  static __device__ __forceinline__ int first_group() { return ALL > 1 ? own_slice() * GROUPS : 0; }

  // Scales and zero points of one group of channels for the lane's four tokens of a segment, positions divided out.
  __device__ __forceinline__ void load_scale(float* scale, u32 stage, int segment, int i, int limit, int lane) const {
    four_halves<ALL>(scale, stage + CODES + ((segment * 32 + lane / 4 * 4) * ALL + first_group() + i) * 2);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (PARTIAL && segment * 32 + lane / 4 * 4 + j >= limit) scale[j] = 1.f;
      scale[j] = scale[j] * (P::STEPS / position(j)) +
                 1e-15f;  // if the scale is zero, so are the codes: any number is correct
    }
  }

  // For each token of the KV tile: the binary logarithm of its scale (position divided out), 1 / scale, zero point / scale.
  __device__ __forceinline__ void share_scales(u32 stage, u32 scratch, int limit, int lane) const {
    constexpr int EACH = KV_TILE / 32;  // neighbouring tokens of a lane: one or two
    const u32 meta = stage + CODES + 2 * EACH * lane;
    u32 scales, zeros;
    if constexpr (EACH == 2) {
      lds<1>(&scales, meta);
      lds<1>(&zeros, meta + META);
    } else {
      scales = lds_u16(meta);
      zeros = lds_u16(meta + META);
    }
    float x[3][EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int token = lane * EACH + e, j = token & 3;
      // STEPS / position(j), a power of two
      const float inverse_position = __uint_as_float((127 + P::LOW -
                                                      (BITS == 2   ? 2 * (j & 1) + 4 * (j >> 1)
                                                       : BITS == 8 ? 0
                                                                   : 4 * (j & 1)))
                                                     << 23);
      float scale = half_to_float(e ? scales >> 16 : scales & 0xffff),
            zero = half_to_float(e ? zeros >> 16 : zeros & 0xffff);
      if (PARTIAL && token >= limit) {
        scale = 1.f;
        zero = 0.f;
      }
      scale = scale * inverse_position + 1e-15f;  // if the scale is zero, so are the codes: any number is correct
      x[0][e] = lg2(scale);
      x[1][e] = rcp(scale);
      x[2][e] = zero * x[1][e];
    }
#pragma unroll
    for (int i = 0; i < 3; i++) sts<EACH>(scratch + 4 * (i * KV_TILE + EACH * lane), x[i]);
    __syncwarp();
  }

  // Exponents to add to the scores before their maximum is taken.
  __device__ __forceinline__ void weigh(u32 stage, u32 scratch, int limit, int lane) {
    if constexpr (SHARED_SCALES) {
      share_scales(stage, scratch, limit, lane);
#pragma unroll
      for (int segment = 0; segment < KV_TILE / 32; segment++)
        lds<4>(reinterpret_cast<u32*>(shift[segment]), scratch + (segment * 32 + lane / 4 * 4) * 4);
      return;
    }
#pragma unroll
    for (int segment = 0; segment < KV_TILE / 32; segment++) {
      float largest[4] = {};
      if constexpr (!CHANNEL) {
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
          float scale[4];
          load_scale(scale, stage, segment, i, limit, lane);
#pragma unroll
          for (int j = 0; j < 4; j++) largest[j] = i ? fmaxf(largest[j], scale[j]) : scale[j];
        }
      }
#pragma unroll
      for (int j = 0; j < 4; j++) shift[segment][j] = CHANNEL ? -lg2(position(j)) : lg2(largest[j]);
    }
  }
  __device__ __forceinline__ float exponent(int tile, int i) const {
    return shift[tile >> 1][2 * (tile & 1) + (i >> 1)];
  }

  // x: scores plus `exponent`, minus the maximum. Adds weights to l, and weighted values to o.
  __device__ __forceinline__ void add(float (*o)[NT][4], float (*l)[2], float (*x)[NT][4], u32 stage, u32 scratch,
                                      int limit, int lane) {
#pragma unroll
    for (int segment = 0; segment < KV_TILE / 32; segment++)
      if constexpr (CHANNEL) add_channel(o, l, x + 2 * segment, stage, segment, lane);
      else
#pragma unroll
        for (int i = 0; i < GROUPS; i++) add_token(o, l, x + 2 * segment, stage, scratch, segment, i, limit, lane);
  }

  __device__ __forceinline__ void add_token(float (*o)[NT][4], float (*l)[2], float (*x)[NT][4], u32 stage, u32 scratch,
                                            int segment, int group, int limit, int lane) {
    float scale[4], zero[4], inverse[4];
    u32 p[2][NT][2];
    if constexpr (SHARED_SCALES) {
      lds<4>(reinterpret_cast<u32*>(inverse), scratch + (KV_TILE + segment * 32 + lane / 4 * 4) * 4);
      lds<4>(reinterpret_cast<u32*>(zero), scratch + (2 * KV_TILE + segment * 32 + lane / 4 * 4) * 4);
    } else {
      load_scale(scale, stage, segment, group, limit, lane);
      four_halves<ALL>(zero, stage + CODES + META + ((segment * 32 + lane / 4 * 4) * ALL + first_group() + group) * 2);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (PARTIAL && segment * 32 + lane / 4 * 4 + j >= limit) zero[j] = 0.f;
        inverse[j] = rcp(scale[j]);
        zero[j] *= inverse[j];
        scale[j] = lg2(scale[j]) - shift[segment][j];
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float w[4] = {};
#pragma unroll
        for (int i = 0; i < 4; i += EVERY) {
          const int j = 2 * h + (i >> 1);
          w[i] = eleven_bits(ex2(GROUPS > 1 ? x[h][n][i] + scale[j] : x[h][n][i]));
          if (group == 0) l[n][i & 1] += w[i] * inverse[j];
          z[group][n][i & 1] += w[i] * zero[j];
        }
        p[h][n][0] = transposed(pack_half(w[0], w[1]));
        p[h][n][1] = transposed(pack_half(w[2], w[3]));
      }
    const u32 words = stage + segment * C::BYTES + lane * 4 * C::V;
    u32 w[C::HELD], low_p[2][NT][2];
    low_weights(p, low_p);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      if (k * 16 / SPAN != group) continue;
      const u32* own = C::tile(w, words, k, group * (SPAN / 16));
      product(o[k], own, w, k, p, low_p);
    }
  }

  // Weights for the low codes, from weights p: times the weight of a low code, divided by its position in the operand.
  static __device__ __forceinline__ void low_weights(const u32 (*p)[NT][2], u32 (*low_p)[NT][2]) {
    if constexpr (C::SPLIT)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 2; i++)
            low_p[h][n][i] =
                mul2(p[h][n][i], pack_half(P::LOW_WEIGHT / low_position(h), P::LOW_WEIGHT / low_position(h)));
  }

  // Adds weighted codes of channels from 16 k on. own: their words in w.
  static __device__ __forceinline__ void product(float (*o)[4], const u32* own, const u32* w, int k,
                                                 const u32 (*p)[NT][2], const u32 (*low_p)[NT][2]) {
    u32 a[2][4];
    unpack<P::HIGH>(own, a);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) mma<false>(o[n], a[h], p[h][n][0], p[h][n][1]);
    if constexpr (C::SPLIT)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        unpack_low<P::LOW>(C::low(w, k), k, h, a[h]);
#pragma unroll
        for (int n = 0; n < NT; n++) mma<false>(o[n], a[h], low_p[h][n][0], low_p[h][n][1]);
      }
  }

  __device__ __forceinline__ void add_channel(float (*o)[NT][4], float (*l)[2], float (*x)[NT][4], u32 stage,
                                              int segment, int lane) {
    u32 p[2][NT][2];
    float total[NT][4] = {};
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float w[4] = {};
#pragma unroll
        for (int i = 0; i < 4; i += EVERY) {
          w[i] = eleven_bits(ex2(x[h][n][i]));
          total[n][i & 1] += w[i] * position(2 * h + (i >> 1));
        }
        p[h][n][0] = transposed(pack_half(w[0], w[1]));
        p[h][n][1] = transposed(pack_half(w[2], w[3]));
      }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < COLUMNS_USED; e++) {
        l[n][e] += total[n][e];
        total[n][e] = sum_rows(total[n][e]);
      }
    const u32 words = stage + segment * C::BYTES + lane * 4 * C::V;
    const u32 meta = stage + CODES + (KV_TILE > GROUP ? segment * 32 / GROUP * D * 2 : 0);
    u32 w[C::HELD], low_p[2][NT][2];
    low_weights(p, low_p);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      const u32* own = C::tile(w, words, k, 0);
      float scale[2], zero[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const u32 at = meta + 2 * channel_of<D>(k, j, lane >> 2), s = lds_u16(at), m = lds_u16(at + META);
        scale[j] = half_to_float(s) * P::STEPS;
        zero[j] = half_to_float(m) * (1 / TWO24);  // o is in units of 2^-24
      }
      float partial[NT][4] = {};
      product(partial, own, w, k, p, low_p);
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[k][n][i] += partial[n][i] * scale[i >> 1] + total[n][i & 1] * zero[i >> 1];
    }
  }

  __device__ __forceinline__ void decay(int n, int e, float a) {
#pragma unroll
    for (int i = 0; i < GROUPS; i++) z[i][n][e] *= a;
  }

  // Multiplies o by its unit, so that it is the true sum.
  __device__ __forceinline__ void finish(float (*o)[NT][4]) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < COLUMNS_USED; e++)
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
          const float zero = CHANNEL ? 0.f : sum_rows(z[i][n][e]);
#pragma unroll
          for (int k = i * (D / GROUPS) / 16; k < (i + 1) * (D / GROUPS) / 16; k++) {
            o[k][n][e] = o[k][n][e] * TWO24 + zero;
            o[k][n][e + 2] = o[k][n][e + 2] * TWO24 + zero;
          }
        }
  }
};
