// Keys as integers: see affine.cuh.
#pragma once
#include "affine.cuh"

// GROUP: tokens (CHANNEL) or channels of a group. Per channel, scales are multiplied into q, and zero points become one bias per row. Per token,
// both are applied to the scores, for each group of channels.
template <int BITS, bool CHANNEL, int GROUP, int D, int SCALE_AT, int ZERO_AT> struct AffineKeys {
  using C = Codes<BITS, D>;
  using P = Planes<BITS>;
  static constexpr bool NORMALISED = true;  // needs q as fp16 of magnitude at most 1, times 2^LIFT
  static constexpr int LIFT =
      CHANNEL && BITS == 2 ? 14 : 0;  // if not 0, there is a second copy without it: see `from_rows`
  // Per token: channels of a group in the warp's slice, groups of the slice, and groups of the head.
  static constexpr int SPAN = CHANNEL || GROUP < D ? GROUP : D, GROUPS = CHANNEL ? 1 : D / SPAN,
                       ALL = CHANNEL ? 1 : SLICES * D / GROUP;
  static constexpr int CODES = KV_TILE / 32 * C::BYTES;
  static constexpr int META = CHANNEL ? (KV_TILE > GROUP ? KV_TILE / GROUP : 1) * D * 2 : KV_TILE * ALL * 2;
  static constexpr int STAGE_BYTES = CODES + 2 * META;
  static constexpr int PART_BYTES = ZERO_AT + PAGE * SLICES * D / GROUP * 2;  // bytes of a page's part
  static_assert(SCALE_AT >= PAGE * SLICES * D * BITS / 8 && ZERO_AT >= SCALE_AT + PAGE * SLICES * D / GROUP * 2,
                "codes, scales, zero points");
  static_assert(SLICES == 1 || !CHANNEL || GROUP >= KV_TILE, "one group of tokens per KV tile");
  static constexpr int SECOND_STAGE_BYTES =
      CHANNEL && GROUP >= WORK_TILE
          ? CODES
          : STAGE_BYTES;  // stage of the second KV tile of a work tile, which uses the first one's scales

  u32 q[NT][D / 8];  // right operand, scaled
  static constexpr int BIASES = CHANNEL && GROUP < KV_TILE ? KV_TILE / GROUP : 1;
  float bias[BIASES][NT][2];  // per channel: what zero points add to the scores of a group
  float c[NT][2];             // factor of the scores of columns 2 t, 2 t + 1
  float lifted[NT][2];        // the same factor for the copy of the queries in use
  static_assert(!LIFT || GROUP >= KV_TILE, "one group of tokens per KV tile");
  static constexpr bool RAISED =
      CHANNEL && BITS != 2;           // at 2 bits instructions are the bottleneck, so LIFT replaces this
  float raised[RAISED ? BIASES : 1];  // the factor that undoes `raise`
  float sum[NT][2 * GROUPS];          // per token: c times the sum of q over each group of channels

  // rows: normalised queries in shared memory; size: what they were divided by; sums: [ROWS][GROUPS]
  __device__ __forceinline__ void begin(u32 rows, const float* size, const float* sums, float scale, int lane) {
    const int t = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = 8 * n + 2 * t + e;
        c[n][e] = size[row] * scale * (TWO24 * Planes<BITS>::STEPS);
        if constexpr (!CHANNEL) {
#pragma unroll
          for (int i = 0; i < GROUPS; i++) sum[n][2 * i + e] = size[row] * scale * sums[row * GROUPS + i];
        }
      }
    if constexpr (!CHANNEL) load_q<false>(rows, 0, lane);
  }

  // If keys are small, scales are small too. Their products with q, divided by positions, would be subnormal in fp16. So a group's scales are
  // multiplied by one power of two, which is exact.
  __device__ __forceinline__ u32 raise(u32 meta, int group, int lane) {
    const int t = lane & 3;
    u32 largest = 0;
#pragma unroll
    for (int b = 0; b < (D + 16) / 32; b++) {
      u32 s[4] = {};
      if (b < D / 32) lds<4>(s, meta + 64 * b + 16 * t);
      else lds<2>(s, meta + 64 * b + 8 * t);
#pragma unroll
      for (int i = 0; i < 4; i++) largest = max2(largest, s[i]);
    }
    largest = max2(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max2(largest, __shfl_xor_sync(~0u, largest, 2));
    const int k = min(max(29 - (int)(max(largest & 0xffff, largest >> 16) >> 10), 0), 15);
    raised[group] = __uint_as_float((127 - k) << 23);
    return (15 + k) * 0x04000400u;
  }

  // If keys are small, products of scales and q would be subnormal in fp16. So if all scales of the group are below 2 (the first bit of their
  // exponents is 0), the queries that are 2^LIFT times as large are used. Returns the address of the queries to use.
  __device__ __forceinline__ u32 from_rows(u32 rows, u32 meta, int lane) {
    constexpr int V = D > 128 ? 4 : 2;
    u32 s[V];
    lds<V>(s, meta + min(4 * V * lane, 2 * D - 4 * V));
    u32 all = s[0] | s[1];
    if constexpr (V == 4) all |= s[2] | s[3];
    const bool large = __any_sync(~0u, (all & 0x40004000u) != 0);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) lifted[n][e] = large ? c[n][e] * (1 << LIFT) : c[n][e];
    return large ? rows + 8 * NT * (D * 2 + 16) : rows;
  }

  // Multiplies queries by scales and positions. `meta`: scales, in the order of channels; up: a power of two that multiplies the scales.
  template <bool SCALED> __device__ __forceinline__ void load_q(u32 rows, u32 meta, int lane, u32 up = 0) {
    const int g = lane >> 2, t = lane & 3;
    constexpr int STRIDE = D * 2 + 16;
    const u32 second = pack_half(1 / half_position<BITS>(1), 1 / half_position<BITS>(1)), up_second = mul2(up, second);
#pragma unroll
    for (int b = 0; b < D / 32; b++) {
      u32 s[4];
      if constexpr (SCALED) lds<4>(s, meta + 64 * b + 16 * t);
      if constexpr (RAISED)
#pragma unroll
        for (int i = 0; i < 4; i++) s[i] = mul2(s[i], i & 1 ? up_second : up);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        lds<4>(&q[n][4 * b], rows + (8 * n + g) * STRIDE + 64 * b + 16 * t);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if constexpr (SCALED) q[n][4 * b + i] = mul2(q[n][4 * b + i], s[i]);
          if (BITS != 8 && !RAISED && (i & 1)) q[n][4 * b + i] = mul2(q[n][4 * b + i], second);
        }
      }
    }
    if constexpr (D % 32) {
      constexpr int b = D / 32;
      u32 s[2];
      if constexpr (SCALED) lds<2>(s, meta + 64 * b + 8 * t);
      if constexpr (RAISED)
#pragma unroll
        for (int i = 0; i < 2; i++) s[i] = mul2(s[i], i & 1 ? up_second : up);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        lds<2>(&q[n][4 * b], rows + (8 * n + g) * STRIDE + 64 * b + 8 * t);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          if constexpr (SCALED) q[n][4 * b + i] = mul2(q[n][4 * b + i], s[i]);
          if (BITS != 8 && !RAISED && i) q[n][4 * b + i] = mul2(q[n][4 * b + i], second);
        }
      }
    }
  }

  // Loads scales and zero points from `meta`. Returns the address of the queries that the scales multiply.
  __device__ __forceinline__ u32 load_group(u32 rows, u32 meta, int group, int lane) {
    u32 up = 0, from = rows;
    if constexpr (RAISED) up = raise(meta, group, lane);
    if constexpr (LIFT) from = from_rows(rows, meta, lane);
    load_q<true>(from, meta, lane, up);
    load_bias(from, meta + META, group, lane);
    return from;
  }

  // Multiplies queries by the zero points of a group, like one more row of keys.
  __device__ __forceinline__ void load_bias(u32 rows, u32 meta, int group, int lane) {
    const int g = lane >> 2, t = lane & 3;
    constexpr int STRIDE = D * 2 + 16;
    // A lane's four words of zero points are an operand in their stored order. Rows g then belong to the queries' words 0 and 2, and rows g + 8
    // to words 1 and 3. So there are two products, and half of each is used.
    float acc[2][NT][4] = {};
#pragma unroll
    for (int b = 0; b < (D + 16) / 32; b++) {
      constexpr int WHOLE = D / 32;
      u32 z[4] = {};
      if (b < WHOLE) lds<4>(z, meta + 64 * b + 16 * t);
      else lds<2>(z, meta + 64 * b + 8 * t);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        u32 x[4] = {};
        if (b < WHOLE) lds<4>(x, rows + (8 * n + g) * STRIDE + 64 * b + 16 * t);
        else lds<2>(x, rows + (8 * n + g) * STRIDE + 64 * b + 8 * t);
        mma<false>(acc[0][n], z, x[0], x[2]);
        mma<false>(acc[1][n], z, x[1], x[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        bias[group][n][e] =
            (acc[0][n][e] + acc[1][n][2 + e]) * ((LIFT ? lifted : c)[n][e] * (1 / (TWO24 * Planes<BITS>::STEPS)));
  }

  __device__ __forceinline__ void copy(u32 stage, const u8* part, int token, bool fresh, int limit, int lane) const {
    C::copy(in_work_tile(limit), stage, part, token, lane);
    const int first = CHANNEL ? (token / GROUP * SLICES + own_slice()) * D * 2 : token * ALL * 2;
    if (!CHANNEL || fresh || token % GROUP == 0)
      copy_pair<META>(in_work_tile(limit), stage + CODES, part + SCALE_AT + first, part + ZERO_AT + first, lane);
  }

  // Loads new scales if this KV tile begins a group. Returns the address of the queries that they multiply.
  __device__ __forceinline__ u32 refresh(u32 stage, u32 rows, int token, bool fresh, int lane) {
    if constexpr (CHANNEL && GROUP >= KV_TILE)
      if (fresh || token % GROUP == 0) return load_group(rows, stage + CODES, 0, lane);
    return rows;
  }

  // The first of a token's groups in the warp's slice.
  static __device__ __forceinline__ int first_group() { return ALL > 1 ? own_slice() * GROUPS : 0; }

  __device__ __forceinline__ void scores(float (*s)[NT][4], u32 stage, u32 rows, int lane) {
    const int g = lane >> 2;
#pragma unroll
    for (int segment = 0; segment < KV_TILE / 32; segment++) {
      if constexpr (CHANNEL && GROUP < KV_TILE)
        if (segment * 32 % GROUP == 0)
          load_group(rows, stage + CODES + segment * 32 / GROUP * D * 2, segment * 32 / GROUP, lane);
      float scale[4], zero[4], partial[2][NT][4];
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            partial[h][n][i] = 0.f;
            if constexpr (GROUPS > 1) s[2 * segment + h][n][i] = 0.f;
          }
      const u32 words = stage + segment * C::BYTES + (lane) * 4 * C::V;
      u32 w[C::HELD];
      float low[2][NT][4] = {};  // sums of the low codes
#pragma unroll
      for (int k = 0; k < D / 16; k++) {
        const u32* own = C::tile(w, words, k, 0);
        u32 a[2][4];
        unpack<P::HIGH>(own, a);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int h = 0; h < 2; h++) mma<false>(partial[h][n], a[h], q[n][2 * k], q[n][2 * k + 1]);
        if constexpr (C::SPLIT) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            unpack_low<P::LOW>(C::low(w, k), k, h, a[h]);
#pragma unroll
            for (int n = 0; n < NT; n++) {
              mma<false>(low[h][n], a[h], q[n][2 * k], q[n][2 * k + 1]);
              if (CHANNEL ? k == D / 16 - 1 : (k + 1) * 16 % SPAN == 0)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                  partial[h][n][i] += low[h][n][i] * (P::LOW_WEIGHT / low_position(h));
                  low[h][n][i] = 0.f;
                }
            }
          }
        }
        if constexpr (!CHANNEL)
          if ((k + 1) * 16 % SPAN == 0) {  // a group of channels is complete: its scale and zero point
            const int i0 = k * 16 / SPAN;
            const u32 meta = stage + CODES + ((segment * 32 + 4 * g) * ALL + first_group() + i0) * 2;
            four_halves<ALL>(scale, meta);
            four_halves<ALL>(zero, meta + META);
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
              for (int h = 0; h < 2; h++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                  const int j = 2 * h + (i >> 1);
                  const float x = partial[h][n][i] * (c[n][i & 1] * (scale[j] * (1 / operand_position<BITS>(h)))) +
                                  sum[n][2 * i0 + (i & 1)] * zero[j];
                  s[2 * segment + h][n][i] = GROUPS > 1 ? s[2 * segment + h][n][i] + x : x;
                  partial[h][n][i] = 0.f;
                }
          }
      }
      if constexpr (CHANNEL) {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[2 * segment + h][n][i] = partial[h][n][i];
      }
    }
  }

  // The remaining factor of a score. tile: index of 16 tokens in the KV tile; e: column 2 t + e.
  __device__ __forceinline__ float factor(int n, int tile, int e) const {
    if constexpr (RAISED)
      return c[n][e] * (raised[BIASES > 1 ? tile * 16 / GROUP : 0] * (1 / operand_position<BITS>(tile & 1)));
    return CHANNEL ? lifted[n][e] * (1 / operand_position<BITS>(tile & 1)) : 1.f;
  }
  // The number to add after this factor.
  __device__ __forceinline__ float offset(int n, int tile, int e) const {
    return CHANNEL ? bias[BIASES > 1 ? tile * 16 / GROUP : 0][n][e] : 0.f;
  }
};
