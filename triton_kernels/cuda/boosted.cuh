// Boosted keys (`formats/boosted.py`) in layout `fragment-1`: 2-bit keys per channel, and COLUMNS more columns with the high bits of the boosted
// channels: S = low . q' + high . (4 q')[map], where q' is the queries times the scales. Only q' differs between pages, so no warp diverges, and
// no code branches on boosted channels.
#pragma once
#include "affine_keys.cuh"

// Two operands from the word of 16 columns, like `unpack<2>`, but in both column halves the position of every code is four times that of
// `unpack<2>` in the lower half. Then q' replaces 4 q'.
__device__ __forceinline__ void unpack_high(u32 w, u32 (*a)[4]) {
  const u32 x = w << 2, y = w >> 6, z = w >> 8;
  a[0][0] = x & 0x000c000cu;
  a[0][1] = y & 0x000c000cu;
  a[0][2] = w & 0x000c000cu;
  a[0][3] = z & 0x000c000cu;
  a[1][0] = x & 0x00c000c0u;
  a[1][1] = y & 0x00c000c0u;
  a[1][2] = w & 0x00c000c0u;
  a[1][3] = z & 0x00c000c0u;
}

template <int COLUMNS, int D, int HIGH_AT, int SCALE_AT, int ZERO_AT, int MAP_AT> struct BoostedKeys {
  using Low = AffineKeys<2, true, PAGE, D, SCALE_AT, ZERO_AT>;
  using C = Codes<2, COLUMNS>;
  static_assert(D == 0 || SLICES == 1, "the map names channels of the whole head");
  static constexpr bool NORMALISED = Low::NORMALISED;
  static constexpr int GROUPS = Low::GROUPS, LIFT = Low::LIFT;
  static constexpr int HIGH = Low::STAGE_BYTES, MAP = HIGH + KV_TILE / 32 * C::BYTES, STAGE_BYTES = MAP + COLUMNS,
                       SECOND_STAGE_BYTES = STAGE_BYTES;  // bytes of a slot
  static constexpr int PART_BYTES = MAP_AT + COLUMNS;     // bytes of a page's part

  Low low;
  u32 q[NT][COLUMNS ? COLUMNS / 8 : 1];  // right operand for the high bits, scaled

  __device__ __forceinline__ void begin(u32 rows, const float* size, const float* sums, float scale, int lane) {
    low.begin(rows, size, sums, scale, lane);
  }

  __device__ __forceinline__ void copy(u32 stage, const u8* part, int token, bool fresh, int limit, int lane) const {
    low.copy(stage, part, token, fresh, limit, lane);
    copy_linear<KV_TILE / 32 * C::BYTES>(in_work_tile(limit), stage + HIGH, part + HIGH_AT + token / 32 * C::BYTES,
                                         lane);
    if (fresh || token % PAGE == 0) copy_linear<COLUMNS>(in_work_tile(limit), stage + MAP, part + MAP_AT, lane);
  }

  // A lane has four neighbouring columns of 16 (`channel_of`). One word of the map holds their channels.
  __device__ __forceinline__ void refresh(u32 stage, u32 rows, int token, bool fresh, int lane) {
    const u32 from = low.refresh(stage, rows, token, fresh, lane);
    if (!fresh && token % PAGE) return;
    const int g = lane >> 2, t = lane & 3;
    constexpr int STRIDE = D * 2 + 16;
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++) {
      u32 map, at[4], scale[4];
      lds<1>(&map, stage + MAP + channel_of<COLUMNS>(k, 0, 2 * t));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        at[i] = 2 * min(map >> 8 * i & 0xff, D - 1u);  // after a split's last page the map is undefined
        scale[i] = lds_u16(stage + Low::CODES + at[i]);
      }
#pragma unroll
      for (int n = 0; n < NT; n++) {
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = lds_u16(from + (8 * n + g) * STRIDE + at[i]);
        q[n][2 * k] = mul2(x[0] | x[1] << 16, scale[0] | scale[1] << 16);
        q[n][2 * k + 1] = mul2(x[2] | x[3] << 16, scale[2] | scale[3] << 16);
      }
    }
  }

  __device__ __forceinline__ void scores(float (*s)[NT][4], u32 stage, u32 rows, int lane) {
    low.scores(s, stage, rows, lane);
#pragma unroll
    for (int segment = 0; segment < KV_TILE / 32; segment++)
#pragma unroll
      for (int load = 0; load < C::WORDS / C::V; load++) {
        u32 w[C::V];
        lds<C::V>(w, stage + HIGH + segment * C::BYTES + (load * 32 + lane) * 4 * C::V);
#pragma unroll
        for (int e = 0; e < C::V; e++) {
          u32 a[2][4];
          unpack_high(w[e], a);
          const int k = load * C::V + e;
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) mma<false>(s[2 * segment + h][n], a[h], q[n][2 * k], q[n][2 * k + 1]);
        }
      }
  }

  __device__ __forceinline__ float factor(int n, int tile, int e) const { return low.factor(n, tile, e); }
  __device__ __forceinline__ float offset(int n, int tile, int e) const { return low.offset(n, tile, e); }
};
