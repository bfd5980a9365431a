// FP8 keys whose page has an fp16 center per channel (`formats/fp8_centered.py`), in layout `fragment-1`:
//   q . k = scale (q . codes) + q . center
// The last term is one product per page. `fp8.cuh` has the rest.
#pragma once
#include "fp8.cuh"

template <int D, int SCALE_AT, int CENTER_AT> struct Fp8CenteredKeys : Fp8Keys<D, SCALE_AT> {
  using Base = Fp8Keys<D, SCALE_AT>;
  static constexpr int TOKENS = Base::STAGE_BYTES, STAGE_BYTES = TOKENS + 2 * D,
                       SECOND_STAGE_BYTES = PAGE >= WORK_TILE ? TOKENS : STAGE_BYTES,
                       PART_BYTES = CENTER_AT + 2 * D * SLICES;
  static_assert(CENTER_AT >= Base::PART_BYTES, "codes, scales, center");

  float bias[NT][2];  // the center's contribution to the scores of columns 2 t, 2 t + 1

  __device__ __forceinline__ void copy(u32 stage, const u8* part, int token, bool fresh, int limit, int lane) const {
    Base::copy(stage, part, token, fresh, limit, lane);
    if (fresh || token % PAGE == 0)
      copy_linear<2 * D>(in_work_tile(limit), stage + TOKENS, part + CENTER_AT + 2 * D * own_slice(), lane);
  }

  // Multiplies queries by a page's center, like one more row of keys. A lane has eight neighbouring channels of every 32.
  __device__ __forceinline__ void refresh(u32 stage, u32 rows, int token, bool fresh, int lane) {
    if (!fresh && token % PAGE) return;
    const int g = lane >> 2, t = lane & 3;
    constexpr int STRIDE = D * 2 + 16, WHOLE = D / 32;
    float acc[2][NT][4] = {};
#pragma unroll
    for (int b = 0; b < (D + 16) / 32; b++) {
      u32 m[4] = {};
      if (b < WHOLE) lds<4>(m, stage + TOKENS + 64 * b + 16 * t);
      else lds<2>(m, stage + TOKENS + 64 * b + 8 * t);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        u32 x[4] = {};
        if (b < WHOLE) lds<4>(x, rows + (8 * n + g) * STRIDE + 64 * b + 16 * t);
        else lds<2>(x, rows + (8 * n + g) * STRIDE + 64 * b + 8 * t);
        const u32 low[4] = {m[0], 0u, m[1], 0u}, high[4] = {m[2], 0u, m[3], 0u};
        mma<false>(acc[0][n], low, x[0], x[1]);
        if (b < WHOLE) mma<false>(acc[1][n], high, x[2], x[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) bias[n][e] = (acc[0][n][e] + acc[1][n][e]) * this->c[n][e];
  }

  __device__ __forceinline__ float offset(int n, int, int e) const { return bias[n][e]; }
};
