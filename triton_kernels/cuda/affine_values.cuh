// Values as integers: see affine.cuh.
#pragma once
#include "affine.cuh"

// Per token (in groups of channels), the scale is added to the weights' exponent. So fp16 weights are normalised by what a token contributes,
// and no range of scales overflows or vanishes. Zero points become one sum for each row.
//
// Codes and zero points nearly cancel where one channel, or token, of a group lies far below the others. So both are weighted by the same
// weights of eleven bits. Only a subnormal fp16 weight has fewer bits (the row then contributes little beyond its zero point, because its
// channels are nearly equal); zero points are added in float32.
//
// Per channel, scale and zero point of a group of tokens are applied to the product.
template <int BITS, bool CHANNEL, int GROUP, int D, int SCALE_AT, int ZERO_AT> struct AffineValues {
  using C = Codes<BITS, D>;
  using P = Planes<BITS>;
  // Per token: channels of a group that the warp has, its groups, and all groups of a token.
  static constexpr int SPAN = CHANNEL || GROUP < D ? GROUP : D, GROUPS = CHANNEL ? 1 : D / SPAN,
                       ALL = CHANNEL ? 1 : SLICES * D / GROUP;
  static constexpr int CODES = PT / 32 * C::BYTES;
  static constexpr int META = CHANNEL ? (PT > GROUP ? PT / GROUP : 1) * D * 2 : PT * ALL * 2;
  static constexpr int SLOT = CODES + 2 * META;
  static constexpr float SUM_UNIT = 1 / TWO24;                          // the unit of the sums that `add` makes
  static constexpr int PART = ZERO_AT + PAGE * SLICES * D / GROUP * 2;  // bytes of a page's part
  static_assert(SCALE_AT >= PAGE * SLICES * D * BITS / 8 && ZERO_AT >= SCALE_AT + PAGE * SLICES * D / GROUP * 2,
                "codes, scales, zero points");
  static_assert(SLICES == 1 || !CHANNEL || GROUP >= PT, "one group of tokens a piece");
  // With one scale for a token, the lane that has the token computes what depends on it once, and shares it through shared memory.
  static constexpr bool HANDED = !CHANNEL && ALL == 1;
  static constexpr int SCRATCH = HANDED ? 3 * PT * 4 : 0;

  float shift[PT / 32][4];  // added to the exponents of the lane's tokens
  float z[GROUPS][NT][2];   // sum of weight x zero point / scale of the lane's tokens

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int n = 0; n < NT; n++) z[i][n][0] = z[i][n][1] = 0.f;
  }

  __device__ __forceinline__ void copy(u32 slot, const u8* part, int token, int limit, int lane) const {
    C::copy(in_unit(limit), slot, part, token, lane);
    const int first = CHANNEL ? (token / GROUP * SLICES + own_slice()) * D * 2 : token * ALL * 2;
    copy_pair<META>(in_unit(limit), slot + CODES, part + SCALE_AT + first, part + ZERO_AT + first, lane);
  }

  static __device__ __forceinline__ float position(int j) {
    return half_position<BITS>(j & 1) * operand_position<BITS>(j >> 1);
  }

  // The warp's first group of those of a token.
  static __device__ __forceinline__ int first_group() { return ALL > 1 ? own_slice() * GROUPS : 0; }

  // Scales and zero points of one group of channels for the lane's four tokens of a block, positions divided out.
  __device__ __forceinline__ void load_scale(float* scale, u32 slot, int blk, int i, int limit, int lane) const {
    four_halves<ALL>(scale, slot + CODES + ((blk * 32 + lane / 4 * 4) * ALL + first_group() + i) * 2);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (PARTIAL && blk * 32 + lane / 4 * 4 + j >= limit) scale[j] = 1.f;
      scale[j] =
          scale[j] * (P::STEPS / position(j)) + 1e-15f;  // if the scale is zero, so are the codes: any number will do
    }
  }

  // For each token of the piece: the binary logarithm of its scale (position divided out), 1 / scale, zero point / scale.
  __device__ __forceinline__ void hand(u32 slot, u32 scratch, int limit, int lane) const {
    constexpr int EACH = PT / 32;  // neighbouring tokens of a lane: one or two
    const u32 meta = slot + CODES + 2 * EACH * lane;
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
      scale = scale * inverse_position + 1e-15f;  // a scale of zero goes with codes of zero: any number will do
      x[0][e] = lg2(scale);
      x[1][e] = rcp(scale);
      x[2][e] = zero * x[1][e];
    }
#pragma unroll
    for (int i = 0; i < 3; i++) sts<EACH>(scratch + 4 * (i * PT + EACH * lane), x[i]);
    __syncwarp();
  }

  // Exponents to add to the scores before their maximum is taken.
  __device__ __forceinline__ void weigh(u32 slot, u32 scratch, int limit, int lane) {
    if constexpr (HANDED) {
      hand(slot, scratch, limit, lane);
#pragma unroll
      for (int blk = 0; blk < PT / 32; blk++)
        lds<4>(reinterpret_cast<u32*>(shift[blk]), scratch + (blk * 32 + lane / 4 * 4) * 4);
      return;
    }
#pragma unroll
    for (int blk = 0; blk < PT / 32; blk++) {
      float most[4] = {};
      if constexpr (!CHANNEL) {
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
          float scale[4];
          load_scale(scale, slot, blk, i, limit, lane);
#pragma unroll
          for (int j = 0; j < 4; j++) most[j] = i ? fmaxf(most[j], scale[j]) : scale[j];
        }
      }
#pragma unroll
      for (int j = 0; j < 4; j++) shift[blk][j] = CHANNEL ? -lg2(position(j)) : lg2(most[j]);
    }
  }
  __device__ __forceinline__ float exponent(int tile, int i) const {
    return shift[tile >> 1][2 * (tile & 1) + (i >> 1)];
  }

  // x: scores plus `exponent`, minus the maximum. Adds weights to l, and weighted values to o.
  __device__ __forceinline__ void add(float (*o)[NT][4], float (*l)[2], float (*x)[NT][4], u32 slot, u32 scratch,
                                      int limit, int lane) {
#pragma unroll
    for (int blk = 0; blk < PT / 32; blk++)
      if constexpr (CHANNEL) add_channel(o, l, x + 2 * blk, slot, blk, lane);
      else
#pragma unroll
        for (int i = 0; i < GROUPS; i++) add_token(o, l, x + 2 * blk, slot, scratch, blk, i, limit, lane);
  }

  __device__ __forceinline__ void add_token(float (*o)[NT][4], float (*l)[2], float (*x)[NT][4], u32 slot, u32 scratch,
                                            int blk, int group, int limit, int lane) {
    float scale[4], zero[4], inverse[4];
    u32 p[2][NT][2];
    if constexpr (HANDED) {
      lds<4>(reinterpret_cast<u32*>(inverse), scratch + (PT + blk * 32 + lane / 4 * 4) * 4);
      lds<4>(reinterpret_cast<u32*>(zero), scratch + (2 * PT + blk * 32 + lane / 4 * 4) * 4);
    } else {
      load_scale(scale, slot, blk, group, limit, lane);
      four_halves<ALL>(zero, slot + CODES + META + ((blk * 32 + lane / 4 * 4) * ALL + first_group() + group) * 2);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (PARTIAL && blk * 32 + lane / 4 * 4 + j >= limit) zero[j] = 0.f;
        inverse[j] = rcp(scale[j]);
        zero[j] *= inverse[j];
        scale[j] = lg2(scale[j]) - shift[blk][j];
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
    const u32 words = slot + blk * C::BYTES + lane * 4 * C::V;
    u32 w[C::HELD], less[2][NT][2];
    lessen(p, less);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      if (k * 16 / SPAN != group) continue;
      const u32* own = C::tile(w, words, k, group * (SPAN / 16));
      product(o[k], own, w, k, p, less);
    }
  }

  // Weights for the low codes, made from weights p: they include what a low code counts for, and its place in the operand.
  static __device__ __forceinline__ void lessen(const u32 (*p)[NT][2], u32 (*less)[NT][2]) {
    if constexpr (C::SPLIT)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 2; i++)
            less[h][n][i] = mul2(p[h][n][i], pack_half(P::PART / low_position(h), P::PART / low_position(h)));
  }

  // Adds weighted codes of channels 16 k and up. own: their words in w.
  static __device__ __forceinline__ void product(float (*o)[4], const u32* own, const u32* w, int k,
                                                 const u32 (*p)[NT][2], const u32 (*less)[NT][2]) {
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
        for (int n = 0; n < NT; n++) mma<false>(o[n], a[h], less[h][n][0], less[h][n][1]);
      }
  }

  __device__ __forceinline__ void add_channel(float (*o)[NT][4], float (*l)[2], float (*x)[NT][4], u32 slot, int blk,
                                              int lane) {
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
    const u32 words = slot + blk * C::BYTES + lane * 4 * C::V;
    const u32 meta = slot + CODES + (PT > GROUP ? blk * 32 / GROUP * D * 2 : 0);
    u32 w[C::HELD], less[2][NT][2];
    lessen(p, less);
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
      float part[NT][4] = {};
      product(part, own, w, k, p, less);
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[k][n][i] += part[n][i] * scale[i >> 1] + total[n][i & 1] * zero[i >> 1];
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
