// Values in static codes, layout `fragment-1t`: see static.cuh and `formats/static.py`.
//   sum p v = center sum p + step gain (sum p t code - middle sum p t)
// Sums are kept in units of step x gain. A token's scale t is added to the exponent of its weight, so codes are multiplied by p t. For
// the sum of p, weights are divided by t.
#pragma once
#include "static.cuh"

template <int D, int SCALE_AT, class W> struct StaticValues {
  static constexpr int BITS = W::BITS, HIGH = W::HIGH;
  static_assert(BITS == 2 || BITS == 3 || BITS == 4, "formats.static.validate");
  static constexpr int PER_TILE = HIGH / 2,
                       LOW_AT = D / 16 * PER_TILE;  // words of 16 channels; first word of the lower plane
  static constexpr int WORDS = LOW_AT + (W::LOW ? D / 32 : 0),
                       V = WORDS % 4 == 0   ? 4
                           : WORDS % 2 == 0 ? 2
                                            : 1,
                       BYTES = 128 * WORDS;
  static constexpr int CODES = KV_TILE / 32 * BYTES, SCALES = CODES;
  static constexpr int STAGE_BYTES = SCALES + KV_TILE / 2, SCRATCH_BYTES = 2 * KV_TILE * 4;
  static constexpr float SUM_UNIT = 1 / TWO24,
                         STEPS = 1 << W::LOW;  // `add` sums multiples of STEPS code steps, times SUM_UNIT
  static constexpr bool RECORD = true;         // needs the KV head's parameters

  const float* record;           // center and step of the row's KV head
  float shift[KV_TILE / 32][4];  // added to the exponents of the lane's tokens' weights
  float z[NT][2];                // minus middle times the sum of p t, over the lane's tokens
  float page[NT][2];             // sum of p in the current page, over the lane's tokens
  float pages[NT][2];            // the same for all earlier pages

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int n = 0; n < NT; n++) z[n][0] = z[n][1] = page[n][0] = page[n][1] = pages[n][0] = pages[n][1] = 0.f;
  }

  __device__ __forceinline__ void copy(u32 stage, const u8* part, int token, int limit, int lane) const {
    copy_codes<128 * LOW_AT, 128 * (WORDS - LOW_AT)>(in_work_tile(limit), stage, part, token, lane);
    cp16_if(in_work_tile(limit) && lane < KV_TILE / 32, stage + SCALES + 16 * lane,
            part + SCALE_AT + token / 2 + 16 * lane);
  }

  // A token's code is multiplied by 2^bit_position(j). j: index among the lane's four neighbouring tokens.
  static __device__ __forceinline__ constexpr int bit_position(int j) {
    return HIGH == 4 ? 4 * (j & 1) : 2 * (j & 1) + 4 * (j >> 1);
  }

  // For each token of the KV tile computes log2(scale / 2^bit_position), and 1 / (scale / 2^bit_position).
  __device__ __forceinline__ void weigh(u32 stage, u32 scratch, int, int lane) {
    constexpr int EACH = KV_TILE / 32;  // neighbouring tokens of a lane: one or two
    const u32 first = lane * EACH, pair = lds_u16(stage + SCALES + first / 4 * 2);
    float x[2][EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const u32 token = first + e, j = token & 3, k = pair >> 4 * j & 15;
      const int at = HIGH == 4 ? 4 * (j & 1) : 2 * (j & 1) + 4 * (j >> 1);
      x[0][e] = (float)((int)k - 8 - 4 * at) * 0.25f;
      x[1][e] = ex2(-x[0][e]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) sts<EACH>(scratch + 4 * (i * KV_TILE + EACH * lane), x[i]);
    __syncwarp();
#pragma unroll
    for (int segment = 0; segment < KV_TILE / 32; segment++)
      lds<4>(reinterpret_cast<u32*>(shift[segment]), scratch + (segment * 32 + lane / 4 * 4) * 4);
  }
  __device__ __forceinline__ float exponent(int tile, int i) const {
    return shift[tile >> 1][2 * (tile & 1) + (i >> 1)];
  }

  // x: scores plus `exponent`, minus the maximum. Adds weighted codes to o, and weights to the sums of the page.
  __device__ __forceinline__ void add(float (*o)[NT][4], float (*)[2], float (*x)[NT][4], u32 stage, u32 scratch, int,
                                      int lane) {
#pragma unroll
    for (int segment = 0; segment < KV_TILE / 32; segment++) {
      float inverse[4];
      u32 p[2][NT][2];
      lds<4>(reinterpret_cast<u32*>(inverse), scratch + (KV_TILE + segment * 32 + lane / 4 * 4) * 4);
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < NT; n++) {
          float w[4] = {};
#pragma unroll
          for (int i = 0; i < 4; i += EVERY) {
            const int j = 2 * h + (i >> 1);
            w[i] = eleven_bits(ex2(x[2 * segment + h][n][i]));
            page[n][i & 1] += w[i] * inverse[j];
            z[n][i & 1] += w[i] * (-W::MIDDLE * (1 << bit_position(j)));
          }
          p[h][n][0] = transposed(pack_half(w[0], w[1]));
          p[h][n][1] = transposed(pack_half(w[2], w[3]));
        }
      const u32 words = stage + segment * BYTES + lane * 4 * V;
      u32 w[WORDS];
#pragma unroll
      for (int load = 0; load < WORDS / V; load++) lds<V>(w + load * V, words + load * 128 * V);
#pragma unroll
      for (int c = 0; c < D / 16; c++) {
        u32 a[2][4];
        unpack<HIGH>(w + c * PER_TILE, a);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int h = 0; h < 2; h++) mma<false>(o[c][n], a[h], p[h][n][0], p[h][n][1]);
      }
      if constexpr (W::LOW) add_low(o, p, w + LOW_AT);
    }
  }

  // Adds the plane of the lowest bit. Its bits weigh half as much as those of the plane above. In odd groups of channels they are one bit higher in
  // their words, so the factor is a quarter.
  static __device__ __forceinline__ void add_low(float (*o)[NT][4], const u32 (*p)[NT][2], const u32* w) {
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      const u32 factor = odd ? pack_half(0.25f, 0.25f) : pack_half(0.5f, 0.5f);
      u32 low_p[2][NT][2];
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 2; i++) low_p[h][n][i] = mul2(p[h][n][i], factor);
#pragma unroll
      for (int c = odd; c < D / 16; c += 2) {
        const u32 x = w[c / 2], y = x >> 8, mask = 0x00010001u << odd;
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const u32 a[4] = {x & mask << 4 * h, y & mask << 4 * h, x & mask << 4 * h + 2, y & mask << 4 * h + 2};
#pragma unroll
          for (int n = 0; n < NT; n++) mma<false>(o[c][n], a, low_p[h][n][0], low_p[h][n][1]);
        }
      }
    }
  }

  // After the last KV tile of a page or work tile: adds its weights to the totals.
  __device__ __forceinline__ void end_page(float (*l)[2]) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < COLUMNS_USED; e++) {
        l[n][e] += page[n][e];
        pages[n][e] += page[n][e];
        page[n][e] = 0.f;
      }
  }

  __device__ __forceinline__ void decay(int n, int e, float a) {
    z[n][e] *= a;
    page[n][e] *= a;
    pages[n][e] *= a;
  }

  // Calls f(o, center, step x gain, n, e) for each channel and row of the lane.
  template <class F> __device__ __forceinline__ void channels(float (*o)[NT][4], int lane, F f) const {
#pragma unroll
    for (int c = 0; c < D / 16; c++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int channel = own_slice() * D + channel_of<D>(c, j, lane >> 2);
        const float center = record[channel], step = record[SLICES * D + channel] * (__uint_as_float(W::GAIN) * STEPS);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int e = 0; e < COLUMNS_USED; e++) f(o[c][n][2 * j + e], center, step, n, e);
      }
  }

  // Converts the window's sums in o to the unit of pages. Centers are added in `leave`, only for tokens of pages.
  __device__ __forceinline__ void enter(float (*o)[NT][4], int lane) const {
    channels(o, lane, [&](float& x, float, float step, int, int) { x = __fdividef(x, step); });
  }

  // Converts o from the unit of pages to final values.
  __device__ __forceinline__ void leave(float (*o)[NT][4], int lane) const {
    float total[NT][2], middle[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < COLUMNS_USED; e++) {
        total[n][e] = sum_rows(pages[n][e]);
        middle[n][e] = sum_rows(z[n][e]) / STEPS;
      }
    channels(o, lane, [&](float& x, float center, float step, int n, int e) {
      x = (x * TWO24 + middle[n][e]) * step + center * total[n][e];
    });
  }
};
