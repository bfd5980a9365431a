// Keys as integers: see affine.cuh.
#pragma once
#include "affine.cuh"

// GROUP: tokens (CHANNEL) or channels of a group. Per channel, scales are multiplied into q, and zero points become one bias for each row.
// Per token, both are applied to the scores, in groups of channels.
template <int BITS, bool CHANNEL, int GROUP, int D, int SCALE_AT, int ZERO_AT> struct AffineKeys {
  using C = Codes<BITS, D>;
  using P = Planes<BITS>;
  static constexpr bool NORMALISED = true;  // needs q as fp16 of magnitude at most 1, times 2^LIFT
  static constexpr int LIFT =
      CHANNEL && BITS == 2 ? 14 : 0;  // if not 0, also a second copy without it: see `from_rows`
  // Per token: channels of a group that the warp has, its groups, and all groups of a token.
  static constexpr int SPAN = CHANNEL || GROUP < D ? GROUP : D, GROUPS = CHANNEL ? 1 : D / SPAN,
                       ALL = CHANNEL ? 1 : SLICES * D / GROUP;
  static constexpr int CODES = PT / 32 * C::BYTES;
  static constexpr int META = CHANNEL ? (PT > GROUP ? PT / GROUP : 1) * D * 2 : PT * ALL * 2;
  static constexpr int SLOT = CODES + 2 * META;
  static constexpr int PART = ZERO_AT + PAGE * SLICES * D / GROUP * 2;  // bytes of a page's part
  static_assert(SCALE_AT >= PAGE * SLICES * D * BITS / 8 && ZERO_AT >= SCALE_AT + PAGE * SLICES * D / GROUP * 2,
                "codes, scales, zero points");
  static_assert(SLICES == 1 || !CHANNEL || GROUP >= PT, "one group of tokens a piece");
  static constexpr int SECOND =
      CHANNEL && GROUP >= UNIT ? CODES : SLOT;  // slot of a unit's second piece, which uses the first piece's scales

  u32 q[NT][D / 8];  // right operand, scaled
  static constexpr int BIASES = CHANNEL && GROUP < PT ? PT / GROUP : 1;
  float bias[BIASES][NT][2];  // per channel: what zero points add to the scores of a group
  float c[NT][2];             // factor of the scores of columns 2 t, 2 t + 1
  float lifted[NT][2];        // the same factor for the copy of the queries in use
  static_assert(!LIFT || GROUP >= PT, "one group of tokens a piece");
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

  // Where keys are small, scales are small too. Their products with q, divided by positions, would fall below fp16's normal numbers. So a
  // group's scales are multiplied by one power of two, which is exact.
  __device__ __forceinline__ u32 raise(u32 meta, int which, int lane) {
    const int t = lane & 3;
    u32 most = 0;
#pragma unroll
    for (int b = 0; b < (D + 16) / 32; b++) {
      u32 s[4] = {};
      if (b < D / 32) lds<4>(s, meta + 64 * b + 16 * t);
      else lds<2>(s, meta + 64 * b + 8 * t);
#pragma unroll
      for (int i = 0; i < 4; i++) most = max2(most, s[i]);
    }
    most = max2(most, __shfl_xor_sync(~0u, most, 1));
    most = max2(most, __shfl_xor_sync(~0u, most, 2));
    const int k = min(max(29 - (int)(max(most & 0xffff, most >> 16) >> 10), 0), 15);
    raised[which] = __uint_as_float((127 - k) << 23);
    return (15 + k) * 0x04000400u;
  }

  // Where keys are small, products of scales and q would fall below fp16's normal numbers. So if all scales of the group are below 2 (the
  // first bit of the exponent tells), the queries that are 2^LIFT times as large are used. Returns the address of the queries to use.
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

  // Takes new scales and zero points from `meta`. Returns the address of the queries that these scales multiply.
  __device__ __forceinline__ u32 load_group(u32 rows, u32 meta, int which, int lane) {
    u32 up = 0, from = rows;
    if constexpr (RAISED) up = raise(meta, which, lane);
    if constexpr (LIFT) from = from_rows(rows, meta, lane);
    load_q<true>(from, meta, lane, up);
    load_bias(from, meta + META, which, lane);
    return from;
  }

  // Multiplies queries by the zero points of a group, as if these were one more row of keys.
  __device__ __forceinline__ void load_bias(u32 rows, u32 meta, int which, int lane) {
    const int g = lane >> 2, t = lane & 3;
    constexpr int STRIDE = D * 2 + 16;
    // A lane's four words of zero points serve as an operand in the order in which they lie. Then rows g belong to the queries' words 0 and
    // 2, and rows g + 8 to words 1 and 3. So there are two products, and half of each is used.
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
        bias[which][n][e] =
            (acc[0][n][e] + acc[1][n][2 + e]) * ((LIFT ? lifted : c)[n][e] * (1 / (TWO24 * Planes<BITS>::STEPS)));
  }

  __device__ __forceinline__ void copy(u32 slot, const u8* part, int token, bool fresh, int limit, int lane) const {
    C::copy(in_unit(limit), slot, part, token, lane);
    const int first = CHANNEL ? (token / GROUP * SLICES + own_slice()) * D * 2 : token * ALL * 2;
    if (!CHANNEL || fresh || token % GROUP == 0)
      copy_pair<META>(in_unit(limit), slot + CODES, part + SCALE_AT + first, part + ZERO_AT + first, lane);
  }

  // Takes new scales if this piece begins a group. Returns the address of the queries that they multiply.
  __device__ __forceinline__ u32 refresh(u32 slot, u32 rows, int token, bool fresh, int lane) {
    if constexpr (CHANNEL && GROUP >= PT)
      if (fresh || token % GROUP == 0) return load_group(rows, slot + CODES, 0, lane);
    return rows;
  }

  // The warp's first group of those of a token.
  static __device__ __forceinline__ int first_group() { return ALL > 1 ? own_slice() * GROUPS : 0; }

  __device__ __forceinline__ void scores(float (*s)[NT][4], u32 slot, u32 rows, int lane) {
    const int g = lane >> 2;
#pragma unroll
    for (int blk = 0; blk < PT / 32; blk++) {
      if constexpr (CHANNEL && GROUP < PT)
        if (blk * 32 % GROUP == 0) load_group(rows, slot + CODES + blk * 32 / GROUP * D * 2, blk * 32 / GROUP, lane);
      float scale[4], zero[4], part[2][NT][4];
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            part[h][n][i] = 0.f;
            if constexpr (GROUPS > 1) s[2 * blk + h][n][i] = 0.f;
          }
      const u32 words = slot + blk * C::BYTES + (lane) * 4 * C::V;
      u32 w[C::HELD];
      float less[2][NT][4] = {};  // the low codes' part of the sums
#pragma unroll
      for (int k = 0; k < D / 16; k++) {
        const u32* own = C::tile(w, words, k, 0);
        u32 a[2][4];
        unpack<P::HIGH>(own, a);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int h = 0; h < 2; h++) mma<false>(part[h][n], a[h], q[n][2 * k], q[n][2 * k + 1]);
        if constexpr (C::SPLIT) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            unpack_low<P::LOW>(C::low(w, k), k, h, a[h]);
#pragma unroll
            for (int n = 0; n < NT; n++) {
              mma<false>(less[h][n], a[h], q[n][2 * k], q[n][2 * k + 1]);
              if (CHANNEL ? k == D / 16 - 1 : (k + 1) * 16 % SPAN == 0)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                  part[h][n][i] += less[h][n][i] * (P::PART / low_position(h));
                  less[h][n][i] = 0.f;
                }
            }
          }
        }
        if constexpr (!CHANNEL)
          if ((k + 1) * 16 % SPAN == 0) {  // a group of channels is complete: its scale and zero point
            const int i0 = k * 16 / SPAN;
            const u32 meta = slot + CODES + ((blk * 32 + 4 * g) * ALL + first_group() + i0) * 2;
            four_halves<ALL>(scale, meta);
            four_halves<ALL>(zero, meta + META);
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
              for (int h = 0; h < 2; h++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                  const int j = 2 * h + (i >> 1);
                  const float x = part[h][n][i] * (c[n][i & 1] * (scale[j] * (1 / operand_position<BITS>(h)))) +
                                  sum[n][2 * i0 + (i & 1)] * zero[j];
                  s[2 * blk + h][n][i] = GROUPS > 1 ? s[2 * blk + h][n][i] + x : x;
                  part[h][n][i] = 0.f;
                }
          }
      }
      if constexpr (CHANNEL) {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[2 * blk + h][n][i] = part[h][n][i];
      }
    }
  }

  // The factor that a score still needs. tile: which 16 tokens of the piece; e: column 2 t + e.
  __device__ __forceinline__ float factor(int n, int tile, int e) const {
    if constexpr (RAISED)
      return c[n][e] * (raised[BIASES > 1 ? tile * 16 / GROUP : 0] * (1 / operand_position<BITS>(tile & 1)));
    return CHANNEL ? lifted[n][e] * (1 / operand_position<BITS>(tile & 1)) : 1.f;
  }
  // The number to add after that factor.
  __device__ __forceinline__ float offset(int n, int tile, int e) const {
    return CHANNEL ? bias[BIASES > 1 ? tile * 16 / GROUP : 0][n][e] : 0.f;
  }
};
