// Integer pages in layout `fragment-1` / `fragment-1t` (`formats/fragment.py`): words become operands by masking alone.
//
// Codes are not converted: masked bits read as fp16 are subnormals, code x position x 2^-24, which tensor cores take exactly and
// at full speed. Positions are divided out of q (channels of a key), of the scores (rows), of the weights (tokens of a value).
#pragma once
#include "common.cuh"

// Two operands (16 tokens each) from the `BITS / 2` words of 16 channels.
template <int BITS> __device__ __forceinline__ void unpack(const u32* w, u32 (*a)[4]) {
  if constexpr (BITS == 8) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      a[h][0] = w[2 * h] & 0x00ff00ffu; a[h][1] = (w[2 * h] >> 8) & 0x00ff00ffu;
      a[h][2] = w[2 * h + 1] & 0x00ff00ffu; a[h][3] = (w[2 * h + 1] >> 8) & 0x00ff00ffu;
    }
  } else if constexpr (BITS == 4) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 x = w[h], y = w[h] >> 8;
      a[h][0] = x & 0x000f000fu; a[h][2] = x & 0x00f000f0u; a[h][1] = y & 0x000f000fu; a[h][3] = y & 0x00f000f0u;
    }
  } else {
    const u32 x = w[0], y = w[0] >> 8;
    a[0][0] = x & 0x00030003u; a[0][2] = x & 0x000c000cu; a[1][0] = x & 0x00300030u; a[1][2] = x & 0x00c000c0u;
    a[0][1] = y & 0x00030003u; a[0][3] = y & 0x000c000cu; a[1][1] = y & 0x00300030u; a[1][3] = y & 0x00c000c0u;
  }
}

// What a field's position multiplies its code with: by the column half of the operand, and by which of the two operands it is.
template <int BITS> __device__ __forceinline__ constexpr float half_position(int half) { return half == 0 || BITS == 8 ? 1.f : BITS == 4 ? 16.f : 4.f; }
template <int BITS> __device__ __forceinline__ constexpr float operand_position(int h) { return h && BITS == 2 ? 16.f : 1.f; }

template <int BITS, int D> struct Codes {
  static constexpr int WORDS = D / 16 * BITS / 2;                                 // of a lane, of 32 tokens
  static constexpr int V = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
  static constexpr int TILES = V / (BITS / 2);                                    // groups of 16 channels a load
  static constexpr int BYTES = 128 * WORDS;                                       // of 32 tokens
};

// Four consecutive fp16 numbers with `stride` elements between them.
template <int STRIDE> __device__ __forceinline__ void four_halves(float* x, u32 a) {
  if constexpr (STRIDE == 1) {
    u32 w[2]; lds<2>(w, a);
    x[0] = half_to_float(w[0] & 0xffff); x[1] = half_to_float(w[0] >> 16); x[2] = half_to_float(w[1] & 0xffff); x[3] = half_to_float(w[1] >> 16);
  } else {
#pragma unroll
    for (int j = 0; j < 4; j++) { u16 h; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(h) : "r"(a + 2 * STRIDE * j)); x[j] = half_to_float(h); }
  }
}

// ---- keys -------------------------------------------------------------------------------------------------------------------

// GROUP: tokens (CHANNEL) or channels of a group. Per channel: scales go into q, zero points into one bias a row; per token: onto
// the scores, in groups of channels.
template <int BITS, bool CHANNEL, int GROUP, int D, int SCALE_AT, int ZERO_AT> struct AffineKeys {
  using C = Codes<BITS, D>;
  static constexpr bool NORMALISED = true;                                        // wants q as fp16 of magnitude 1 at most
  static constexpr int GROUPS = CHANNEL ? 1 : D / GROUP;
  static constexpr int CODES = PT / 32 * C::BYTES;
  static constexpr int META = CHANNEL ? (PT > GROUP ? PT / GROUP : 1) * D * 2 : PT * GROUPS * 2;
  static constexpr int SLOT = CODES + 2 * META;

  u32 q[NT][D / 8];       // right operand, scaled
  static constexpr int BIASES = CHANNEL && GROUP < PT ? PT / GROUP : 1;
  float bias[BIASES][NT][2];  // per channel: what zero points add to the scores of a group
  float c[NT][2];         // factor of the scores of columns 2 t, 2 t + 1
  float sum[NT][2 * GROUPS];  // per token: c times the sum of q over each group of channels

  // rows: normalised queries in shared memory; size: what they were divided by; sums: [ROWS][GROUPS]
  __device__ __forceinline__ void begin(u32 rows, const float* size, const float* sums, float scale, int lane) {
    const int t = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = 8 * n + 2 * t + e;
        c[n][e] = size[row] * scale * TWO24;
        if constexpr (!CHANNEL) {
#pragma unroll
          for (int i = 0; i < GROUPS; i++) sum[n][2 * i + e] = size[row] * scale * sums[row * GROUPS + i];
        }
      }
    if constexpr (!CHANNEL) load_q<false>(rows, 0, lane);
  }

  // Queries times scales and positions. `meta`: scales, in the order of channels.
  template <bool SCALED> __device__ __forceinline__ void load_q(u32 rows, u32 meta, int lane) {
    const int g = lane >> 2, t = lane & 3;
    constexpr int STRIDE = D * 2 + 16;
    const u32 second = pack_half(1 / half_position<BITS>(1), 1 / half_position<BITS>(1));
#pragma unroll
    for (int b = 0; b < D / 32; b++) {
      u32 s[4];
      if constexpr (SCALED) lds<4>(s, meta + 64 * b + 16 * t);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        lds<4>(&q[n][4 * b], rows + (8 * n + g) * STRIDE + 64 * b + 16 * t);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if constexpr (SCALED) q[n][4 * b + i] = mul2(q[n][4 * b + i], s[i]);
          if (BITS != 8 && (i & 1)) q[n][4 * b + i] = mul2(q[n][4 * b + i], second);
        }
      }
    }
    if constexpr (D % 32) {
      constexpr int b = D / 32;
      u32 s[2];
      if constexpr (SCALED) lds<2>(s, meta + 64 * b + 8 * t);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        lds<2>(&q[n][4 * b], rows + (8 * n + g) * STRIDE + 64 * b + 8 * t);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          if constexpr (SCALED) q[n][4 * b + i] = mul2(q[n][4 * b + i], s[i]);
          if (BITS != 8 && i) q[n][4 * b + i] = mul2(q[n][4 * b + i], second);
        }
      }
    }
  }

  // The zero points of a group as one more row of keys.
  __device__ __forceinline__ void load_bias(u32 rows, u32 meta, int which, int lane) {
    const int g = lane >> 2, t = lane & 3;
    constexpr int STRIDE = D * 2 + 16;
    // A lane's four words of zero points are an operand as they lie: rows g then go with the queries' words 0 and 2, rows g + 8 with
    // 1 and 3. So there are two products, and half of each counts.
    float acc[2][NT][4] = {};
#pragma unroll
    for (int b = 0; b < (D + 16) / 32; b++) {
      constexpr int WHOLE = D / 32;
      u32 z[4] = {};
      if (b < WHOLE) lds<4>(z, meta + 64 * b + 16 * t); else lds<2>(z, meta + 64 * b + 8 * t);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        u32 x[4] = {};
        if (b < WHOLE) lds<4>(x, rows + (8 * n + g) * STRIDE + 64 * b + 16 * t); else lds<2>(x, rows + (8 * n + g) * STRIDE + 64 * b + 8 * t);
        mma<false>(acc[0][n], z, x[0], x[2]);
        mma<false>(acc[1][n], z, x[1], x[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) bias[which][n][e] = (acc[0][n][e] + acc[1][n][2 + e]) * (c[n][e] * (1 / TWO24));
  }

  __device__ __forceinline__ void copy(u32 slot, const u8* part, int token, bool fresh, int limit, int lane) const {
    copy_linear<CODES>(slot, part + token / 32 * C::BYTES, lane);
    const int first = CHANNEL ? token / GROUP * D * 2 : token * GROUPS * 2;
    if (!CHANNEL || fresh || token % GROUP == 0) copy_pair<META>(slot + CODES, part + SCALE_AT + first, part + ZERO_AT + first, lane);
  }

  // Whether `scores` finds new scales in this piece.
  __device__ __forceinline__ void refresh(u32 slot, u32 rows, int token, bool fresh, int lane) {
    if constexpr (CHANNEL && GROUP >= PT)
      if (fresh || token % GROUP == 0) { load_q<true>(rows, slot + CODES, lane); load_bias(rows, slot + CODES + META, 0, lane); }
  }

  __device__ __forceinline__ void scores(float (*s)[NT][4], u32 slot, u32 rows, int lane) {
    const int g = lane >> 2;
#pragma unroll
    for (int blk = 0; blk < PT / 32; blk++) {
      if constexpr (CHANNEL && GROUP < PT)
        if (blk * 32 % GROUP == 0) {
          load_q<true>(rows, slot + CODES + blk * 32 / GROUP * D * 2, lane);
          load_bias(rows, slot + CODES + META + blk * 32 / GROUP * D * 2, blk * 32 / GROUP, lane);
        }
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
#pragma unroll
      for (int load = 0; load < C::WORDS / C::V; load++) {
        u32 w[C::V]; lds<C::V>(w, words + load * 128 * C::V);
#pragma unroll
        for (int e = 0; e < C::TILES; e++) {
          const int k = load * C::TILES + e;
          u32 a[2][4]; unpack<BITS>(w + e * (BITS / 2), a);
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) mma<false>(part[h][n], a[h], q[n][2 * k], q[n][2 * k + 1]);
          if constexpr (!CHANNEL)
            if ((k + 1) * 16 % GROUP == 0) {  // a group of channels is complete: its scale and zero point
              const int i0 = k * 16 / GROUP;
              const u32 meta = slot + CODES + ((blk * 32 + 4 * g) * GROUPS + i0) * 2;
              four_halves<GROUPS>(scale, meta); four_halves<GROUPS>(zero, meta + META);
#pragma unroll
              for (int n = 0; n < NT; n++)
#pragma unroll
                for (int h = 0; h < 2; h++)
#pragma unroll
                  for (int i = 0; i < 4; i++) {
                    const int j = 2 * h + (i >> 1);
                    const float x = part[h][n][i] * (c[n][i & 1] * (scale[j] * (1 / operand_position<BITS>(h)))) + sum[n][2 * i0 + (i & 1)] * zero[j];
                    s[2 * blk + h][n][i] = GROUPS > 1 ? s[2 * blk + h][n][i] + x : x;
                    part[h][n][i] = 0.f;
                  }
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

  // What a score is still to be multiplied with. tile: 16 tokens of the piece; e: column 2 t + e.
  __device__ __forceinline__ float factor(int n, int tile, int e) const { return CHANNEL ? c[n][e] * (1 / operand_position<BITS>(tile & 1)) : 1.f; }
  // What is to be added then.
  __device__ __forceinline__ float offset(int n, int tile, int e) const { return CHANNEL ? bias[BIASES > 1 ? tile * 16 / GROUP : 0][n][e] : 0.f; }
};

// ---- values -----------------------------------------------------------------------------------------------------------------

// Per token (in groups of channels): the scale goes into the weights' exponent, so that the fp16 weights are normalised by what a
// token contributes and no range of scales can overflow or vanish; zero points become one sum a row. Per channel: scale and zero
// point of a group of tokens onto the product.
template <int BITS, bool CHANNEL, int GROUP, int D, int SCALE_AT, int ZERO_AT> struct AffineValues {
  using C = Codes<BITS, D>;
  static constexpr int GROUPS = CHANNEL ? 1 : D / GROUP;
  static constexpr int CODES = PT / 32 * C::BYTES;
  static constexpr int META = CHANNEL ? (PT > GROUP ? PT / GROUP : 1) * D * 2 : PT * GROUPS * 2;
  static constexpr int SLOT = CODES + 2 * META; static constexpr float SUM_UNIT = 1 / TWO24;  // in which `add` sums up
  // One scale a token: what is made of it is computed once, by the lane that has the token, and handed on in shared memory.
  static constexpr bool HANDED = !CHANNEL && GROUPS == 1;
  static constexpr int SCRATCH = HANDED ? 3 * PT * 4 : 0;

  float shift[PT / 32][4];               // added to the exponents of the lane's tokens
  float z[GROUPS][NT][2];                // sum of weight x zero point / scale of the lane's tokens

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int n = 0; n < NT; n++) z[i][n][0] = z[i][n][1] = 0.f;
  }

  __device__ __forceinline__ void copy(u32 slot, const u8* part, int token, int limit, int lane) const {
    copy_linear<CODES>(slot, part + token / 32 * C::BYTES, lane);
    const int first = CHANNEL ? token / GROUP * D * 2 : token * GROUPS * 2;
    copy_pair<META>(slot + CODES, part + SCALE_AT + first, part + ZERO_AT + first, lane);
  }

  static __device__ __forceinline__ float position(int j) { return half_position<BITS>(j & 1) * operand_position<BITS>(j >> 1); }

  // Scales and zero points of one group of channels for the lane's four tokens of a block, positions divided out.
  __device__ __forceinline__ void load_scale(float* scale, u32 slot, int blk, int i, int limit, int lane) const {
    four_halves<GROUPS>(scale, slot + CODES + ((blk * 32 + lane / 4 * 4) * GROUPS + i) * 2);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (DIRECT && blk * 32 + lane / 4 * 4 + j >= limit) scale[j] = 1.f;
      scale[j] = scale[j] * (1 / position(j)) + 1e-15f;  // a scale of zero goes with codes of zero: any number will do
    }
  }

  // For each token of the piece: the binary logarithm of its scale (position divided out), 1 / scale, zero point / scale.
  __device__ __forceinline__ void hand(u32 slot, u32 scratch, int limit, int lane) const {
    constexpr int EACH = PT / 32;                         // neighbouring tokens of a lane: one or two
    const u32 meta = slot + CODES + 2 * EACH * lane;
    u32 scales, zeros;
    if constexpr (EACH == 2) { lds<1>(&scales, meta); lds<1>(&zeros, meta + META); }
    else { scales = lds_u16(meta); zeros = lds_u16(meta + META); }
    float x[3][EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int token = lane * EACH + e, j = token & 3;
      // 1 / position(j), a power of two
      const float inverse_position = __uint_as_float((127 - (BITS == 2 ? 2 * (j & 1) + 4 * (j >> 1) : BITS == 4 ? 4 * (j & 1) : 0)) << 23);
      float scale = half_to_float(e ? scales >> 16 : scales & 0xffff), zero = half_to_float(e ? zeros >> 16 : zeros & 0xffff);
      if (DIRECT && token >= limit) { scale = 1.f; zero = 0.f; }
      scale = scale * inverse_position + 1e-15f;          // a scale of zero goes with codes of zero: any number will do
      x[0][e] = lg2(scale); x[1][e] = rcp(scale); x[2][e] = zero * x[1][e];
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
      for (int blk = 0; blk < PT / 32; blk++) lds<4>(reinterpret_cast<u32*>(shift[blk]), scratch + (blk * 32 + lane / 4 * 4) * 4);
      return;
    }
#pragma unroll
    for (int blk = 0; blk < PT / 32; blk++) {
      float most[4] = {};
      if constexpr (!CHANNEL) {
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
          float scale[4]; load_scale(scale, slot, blk, i, limit, lane);
#pragma unroll
          for (int j = 0; j < 4; j++) most[j] = i ? fmaxf(most[j], scale[j]) : scale[j];
        }
      }
#pragma unroll
      for (int j = 0; j < 4; j++) shift[blk][j] = CHANNEL ? -lg2(position(j)) : lg2(most[j]);
    }
  }
  __device__ __forceinline__ float exponent(int tile, int i) const { return shift[tile >> 1][2 * (tile & 1) + (i >> 1)]; }

  // x: scores plus `exponent`, minus the maximum. Adds weights to l, and weighted values to o.
  __device__ __forceinline__ void add(float (*o)[NT][4], float (*l)[2], float (*x)[NT][4], u32 slot, u32 scratch, int limit, int lane) {
#pragma unroll
    for (int blk = 0; blk < PT / 32; blk++)
      if constexpr (CHANNEL) add_channel(o, l, x + 2 * blk, slot, blk, lane);
      else
#pragma unroll
        for (int i = 0; i < GROUPS; i++) add_token(o, l, x + 2 * blk, slot, scratch, blk, i, limit, lane);
  }

  __device__ __forceinline__ void add_token(float (*o)[NT][4], float (*l)[2], float (*x)[NT][4], u32 slot, u32 scratch, int blk, int group, int limit, int lane) {
    float scale[4], zero[4], inverse[4]; u32 p[2][NT][2];
    if constexpr (HANDED) {
      lds<4>(reinterpret_cast<u32*>(inverse), scratch + (PT + blk * 32 + lane / 4 * 4) * 4);
      lds<4>(reinterpret_cast<u32*>(zero), scratch + (2 * PT + blk * 32 + lane / 4 * 4) * 4);
    } else {
      load_scale(scale, slot, blk, group, limit, lane);
      four_halves<GROUPS>(zero, slot + CODES + META + ((blk * 32 + lane / 4 * 4) * GROUPS + group) * 2);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (DIRECT && blk * 32 + lane / 4 * 4 + j >= limit) zero[j] = 0.f;
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
          w[i] = ex2(GROUPS > 1 ? x[h][n][i] + scale[j] : x[h][n][i]);
          if (group == 0) l[n][i & 1] += w[i] * inverse[j];
          z[group][n][i & 1] += w[i] * zero[j];
        }
        p[h][n][0] = transposed(pack_half(w[0], w[1])); p[h][n][1] = transposed(pack_half(w[2], w[3]));
      }
    const u32 words = slot + blk * C::BYTES + lane * 4 * C::V;
#pragma unroll
    for (int load = 0; load < C::WORDS / C::V; load++) {
      if ((load + 1) * C::TILES * 16 <= group * GROUP || load * C::TILES * 16 >= (group + 1) * GROUP) continue;
      u32 w[C::V]; lds<C::V>(w, words + load * 128 * C::V);
#pragma unroll
      for (int e = 0; e < C::TILES; e++) {
        if ((load * C::TILES + e) * 16 / GROUP != group) continue;
        u32 a[2][4]; unpack<BITS>(w + e * (BITS / 2), a);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int h = 0; h < 2; h++) mma<false>(o[load * C::TILES + e][n], a[h], p[h][n][0], p[h][n][1]);
      }
    }
  }

  __device__ __forceinline__ void add_channel(float (*o)[NT][4], float (*l)[2], float (*x)[NT][4], u32 slot, int blk, int lane) {
    u32 p[2][NT][2]; float total[NT][4] = {};
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float w[4] = {};
#pragma unroll
        for (int i = 0; i < 4; i += EVERY) {
          w[i] = ex2(x[h][n][i]);
          const float p_true = w[i] * position(2 * h + (i >> 1));
          l[n][i & 1] += p_true; total[n][i & 1] += p_true;
        }
        p[h][n][0] = transposed(pack_half(w[0], w[1])); p[h][n][1] = transposed(pack_half(w[2], w[3]));
      }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < COLUMNS_USED; e++) total[n][e] = sum_rows(total[n][e]);
    const u32 words = slot + blk * C::BYTES + lane * 4 * C::V;
    const u32 meta = slot + CODES + (PT > GROUP ? blk * 32 / GROUP * D * 2 : 0);
#pragma unroll
    for (int load = 0; load < C::WORDS / C::V; load++) {
      u32 w[C::V]; lds<C::V>(w, words + load * 128 * C::V);
#pragma unroll
      for (int e = 0; e < C::TILES; e++) {
        const int k = load * C::TILES + e;
        u32 a[2][4]; unpack<BITS>(w + e * (BITS / 2), a);
        float scale[2], zero[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          u16 s, m; const u32 at = meta + 2 * channel_of<D>(k, j, lane >> 2);
          asm volatile("ld.shared.u16 %0, [%1];" : "=h"(s) : "r"(at));
          asm volatile("ld.shared.u16 %0, [%1];" : "=h"(m) : "r"(at + META));
          scale[j] = half_to_float(s); zero[j] = half_to_float(m) * (1 / TWO24);  // o is in units of 2^-24
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
          float part[4] = {};
#pragma unroll
          for (int h = 0; h < 2; h++) mma<false>(part, a[h], p[h][n][0], p[h][n][1]);
#pragma unroll
          for (int i = 0; i < 4; i++) o[k][n][i] += part[i] * scale[i >> 1] + total[n][i & 1] * zero[i >> 1];
        }
      }
    }
  }

  __device__ __forceinline__ void decay(int n, int e, float a) {
#pragma unroll
    for (int i = 0; i < GROUPS; i++) z[i][n][e] *= a;
  }

  // Bring o to true size.
  __device__ __forceinline__ void finish(float (*o)[NT][4]) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < COLUMNS_USED; e++)
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
          const float zero = CHANNEL ? 0.f : sum_rows(z[i][n][e]);
#pragma unroll
          for (int k = i * (D / GROUPS) / 16; k < (i + 1) * (D / GROUPS) / 16; k++) { o[k][n][e] = o[k][n][e] * TWO24 + zero; o[k][n][e + 2] = o[k][n][e + 2] * TWO24 + zero; }
        }
  }
};
