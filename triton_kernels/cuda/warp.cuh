// The state of a warp during attention, and the sizes of shared memory and of work.
#pragma once
#include "common.cuh"
#include "model_tokens.cuh"
// the headers of the two formats, from `format_structs.py`
#include KEY_HEADER
#include VALUE_HEADER

constexpr int WK = DK / SLICES, WV = DV / SLICES;  // a warp's channels
constexpr int WORKERS = WARPS / SLICES;            // of a warp group; a worker is SLICES warps
static_assert(DK % SLICES == 0 && DV % SLICES == 0 && WARPS % SLICES == 0, "slices");

using Keys = KEY_FORMAT;
using Values = VALUE_FORMAT;

// Optional members of formats: TABLE_BYTES (shared memory of a codebook), PART_BYTES (of a page's part), OWN_ORDER (another order of a lane's
// channels), Fold (keys that multiply parameters into queries: `StaticFold`), RECORD (values that need their parameters and the ends of pages:
// `StaticValues`).
template <class F, class = void> struct TableBytes {
  static constexpr int value = 0;
};
template <class F> struct TableBytes<F, decltype((void)F::TABLE_BYTES)> {
  static constexpr int value = F::TABLE_BYTES;
};
template <class F, class = void> struct PartBytes {
  static constexpr int value = 0;
};
template <class F> struct PartBytes<F, decltype((void)F::PART_BYTES)> {
  static constexpr int value = F::PART_BYTES;
};
template <class F, class = void> struct Order {
  static constexpr bool OWN = false;
  static __device__ __forceinline__ constexpr int channel(int k, int j, int g) { return channel_of<WV>(k, j, g); }
};
template <class F> struct Order<F, decltype((void)F::OWN_ORDER)> {
  static constexpr bool OWN = true;
  static __device__ __forceinline__ constexpr int channel(int k, int j, int g) { return F::channel(k, j, g); }
};
struct NoFold {
  __device__ __forceinline__ void load(const u8*, int) {}
  __device__ __forceinline__ float largest(const u32*) const { return 0.f; }
  __device__ __forceinline__ void put(const u32*, float, u32*, u32*, float*, float*, int) const {}
};
template <class F, class = void> struct FoldOf {
  static constexpr bool FOLDS = false;
  using Type = NoFold;
};
template <class F> struct FoldOf<F, decltype((void)sizeof(typename F::Fold))> {
  static constexpr bool FOLDS = true;
  using Type = typename F::Fold;
};
constexpr bool FOLDED = FoldOf<Keys>::FOLDS;
template <class F, class = void> struct Record {
  static constexpr bool NEEDED = false;
};
template <class F> struct Record<F, decltype((void)F::RECORD)> {
  static constexpr bool NEEDED = true;
};
template <class F> __device__ __forceinline__ void give_record(F& values, const Parameter& x, int h) {
  if constexpr (Record<F>::NEEDED) values.record = reinterpret_cast<const float*>(x.data + h * x.stride);
}
// Hooks for values with a RECORD: between window and pages, after the last KV tile of a page or work tile, and at the end.
template <class F, class O> __device__ __forceinline__ void enter_pages(const F& values, O o, int lane) {
  if constexpr (Record<F>::NEEDED) values.enter(o, lane);
}
template <class F, class L> __device__ __forceinline__ void end_page(F& values, L l) {
  if constexpr (Record<F>::NEEDED) values.end_page(l);
}
template <class F, class O> __device__ __forceinline__ void leave_pages(F& values, O o, int lane) {
  if constexpr (Record<F>::NEEDED) values.leave(o, lane);
  else values.finish(o);
}
constexpr int KEY_TABLE = TableBytes<Keys>::value, TABLES = KEY_TABLE + TableBytes<Values>::value;

// Channel of a lane's sum `o[k][n][i]` over pages; j is i >> 1.
__device__ __forceinline__ constexpr int out_channel(int k, int j, int g) { return Order<Values>::channel(k, j, g); }

constexpr int TILES = KV_TILE / 16;
constexpr int Q_STRIDE = WK * 2 + 16;  // bytes; padded against bank conflicts
constexpr int Q_BYTES = (!Keys::NORMALISED ? 1 : Keys::LIFT || FOLDED ? 3 : 2) * ROWS * Q_STRIDE;
constexpr int FLOATS = ROWS * (1 + Keys::GROUPS);  // sizes of the rows, and sums over groups of channels
constexpr int HEAD_BYTES = (Q_BYTES + FLOATS * 4 + 127) / 128 * 128;  // of a slice
// The stages of a work tile's two KV tiles: keys, values, values, keys (the last may be smaller). Then scratch memory of the values.
constexpr int STAGES_BYTES =
    Keys::STAGE_BYTES + 2 * Values::STAGE_BYTES + Keys::SECOND_STAGE_BYTES + Values::SCRATCH_BYTES;
// NARROW: keys and values of a window segment use the same memory in turn, so the window does not limit the number of warps.
constexpr int WINDOW_BYTES = NARROW ? (WK > WV ? Dense<WK>::SEGMENT_BYTES : Dense<WV>::SEGMENT_BYTES)
                                    : Dense<WK>::SEGMENT_BYTES + Dense<WV>::SEGMENT_BYTES;
constexpr int MERGE_STRIDE = WV + 1;  // floats per row of a warp's result, padded against bank conflicts
constexpr int MERGE_BYTES = ROWS * (MERGE_STRIDE + 2) * 4;
constexpr int LOAD_BYTES = STAGES_BYTES > WINDOW_BYTES ? STAGES_BYTES : WINDOW_BYTES;
// Partial scores of 32 tokens for the other warp of the worker, double-buffered if there is room.
constexpr int BUFFERS = EVERY, BUFFER_BYTES = 1024 * NT / BUFFERS,
              EXCHANGE_BYTES = SLICES > 1 ? BUFFERS * BUFFER_BYTES : 0;
constexpr int EXCHANGE_AT = ((LOAD_BYTES > MERGE_BYTES ? LOAD_BYTES : MERGE_BYTES) + 127) / 128 * 128,
              WARP_BYTES = EXCHANGE_AT + EXCHANGE_BYTES;
constexpr int WARP_GROUP_BYTES = SLICES * HEAD_BYTES + WARPS * WARP_BYTES;
static_assert(WARP_GROUPS * WARP_GROUP_BYTES + TABLES == SHARED_BYTES,
              "memory.py computes another size: check the formats' needs.Needs");
static_assert(PartBytes<Keys>::value <= VALUE_AT && VALUE_AT + PartBytes<Values>::value <= PAGE_BYTES,
              "formats and structs differ on a page's parts");
constexpr int PARTIAL_FLOATS = ROWS * (DV + 2 * SLICES);  // floats of a partial result in memory
constexpr int WORK_TILE_COST = (2 * (Keys::STAGE_BYTES + Values::STAGE_BYTES) + 255) / 256;
constexpr int SEGMENT_COST =
    (Dense<WK>::SEGMENT_BYTES + Dense<WV>::SEGMENT_BYTES) / 256;  // cost of 32 tokens of the window
// Scores are logarithms to base 2. A new maximum is set HEADROOM below the largest score, so that small weights lose less precision in fp16. It
// is replaced when a score exceeds that largest score by GROWTH. So weights are at most 2^(HEADROOM + GROWTH), which fp16 can represent.
constexpr float GROWTH = 8.f, HEADROOM = 7.f;

// The work of a row: work tiles of its pages and segments of its window. Also the numbers of its tokens in each region.
struct Row {
  int b, h, length, paged, work_tiles, sinks, tail, new_tokens, segments;
  __device__ __forceinline__ void count(const Args& a, int row_block, int length_, int paged_) {
    length = length_;
    paged = paged_;
    work_tiles = (paged + WORK_TILE - 1) / WORK_TILE;
    sinks = min(length, a.sink);
    tail = max(length - a.sink, 0) - paged;
    new_tokens = (min((row_block + 1) * ROWS, a.groups * a.tokens) - 1) / a.groups + 1;
    segments = (sinks + tail + new_tokens + 31) / 32;
  }
  __device__ __forceinline__ u32 cost() const { return work_tiles * WORK_TILE_COST + segments * SEGMENT_COST; }
};

struct Warp {
  float o[WV / 16][NT][4];
  float m[NT][2], l[NT][2];
  float score_bias[HAS_SCORE_BIAS ? NT : 1][2];  // the number added to all scores of a query
  Keys keys;
  Values values;

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int k = 0; k < WV / 16; k++) o[k][n][0] = o[k][n][1] = o[k][n][2] = o[k][n][3] = 0.f;
      m[n][0] = m[n][1] = LOWEST;
      l[n][0] = l[n][1] = 0.f;
    }
    values.begin();
  }

  // scale: the factor of scores.
  __device__ __forceinline__ void load_score_bias(const Args& a, const Row& row, int row_block, float scale, int lane) {
    if constexpr (HAS_SCORE_BIAS)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < COLUMNS_USED; e++) {
          const int t = lane & 3, r = SPREAD ? t : row_block * ROWS + 8 * n + 2 * t + e;
          const int token = r / a.groups, head = (row.b * a.heads + row.h) * a.groups + r % a.groups;
          score_bias[n][e] = token < a.tokens ? a.score_bias[(i64)head * a.tokens + token] * scale : 0.f;
        }
  }
  // The score plus `score_bias`.
  __device__ __forceinline__ float with_score_bias(float x, int n, int e) const {
    if constexpr (HAS_SCORE_BIAS) return x + score_bias[n][e];
    else return x;
  }

  // Subtracts the maximum from scores of T tiles. The maximum changes only if scores exceed it by too much.
  template <int T> __device__ __forceinline__ void subtract_maximum(float (*s)[NT][4]) {
    bool grew = false;
    float tile_max[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < COLUMNS_USED; e++) {
        float x = fmaxf(s[0][n][e], s[0][n][e + 2]);
#pragma unroll
        for (int k = 1; k < T; k++) x = fmaxf(x, fmaxf(s[k][n][e], s[k][n][e + 2]));
        tile_max[n][e] = x;
        grew |= x > m[n][e] + (GROWTH + HEADROOM);
      }
    if (__any_sync(~0u, grew)) {
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < COLUMNS_USED; e++) {
          const float x = fmaxf(m[n][e], max_rows(tile_max[n][e]) - HEADROOM), a = ex2(m[n][e] - x);
          m[n][e] = x;
          l[n][e] *= a;
          values.decay(n, e, a);
#pragma unroll
          for (int k = 0; k < WV / 16; k++) {
            o[k][n][e] *= a;
            o[k][n][e + 2] *= a;
          }
        }
    }
#pragma unroll
    for (int k = 0; k < T; k++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i += EVERY) s[k][n][i] -= m[n][i & 1];
  }

  // Reorders sums from the window's order of channels to that of pages. memory: of the warp, for ROWS rows.
  __device__ __forceinline__ void reorder(float* memory, int lane) {
    const int g = lane >> 2, t = lane & 3;
    __syncwarp();
#pragma unroll
    for (int back = 0; back < 2; back++) {
#pragma unroll
      for (int k = 0; k < WV / 16; k++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float& at = memory[(8 * n + 2 * t + (i & 1)) * MERGE_STRIDE +
                               (back ? out_channel(k, i >> 1, g) : channel_of<WV>(k, i >> 1, g))];
            if (back) o[k][n][i] = at;
            else at = o[k][n][i];
          }
      __syncwarp();
    }
  }

  // Between window and pages: converts sums to the unit of pages, and lowers the maximum. Exponents of pages include the scales of values, so
  // with a maximum from a sink's large score the weights of pages would vanish in fp16. With the lower maximum, the first KV tile with relevant
  // weights sets a new one. Sums are scaled by the same factor, so they do not change relative to the maximum.
  __device__ __forceinline__ void rescale_for_pages() {
    constexpr float BY = 60.f, FACTOR = 0x1p60f;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int e = 0; e < COLUMNS_USED; e++) {
        m[n][e] -= BY;
        l[n][e] *= FACTOR;
      }
#pragma unroll
      for (int k = 0; k < WV / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[k][n][i] *= Values::SUM_UNIT * FACTOR;
    }
  }

  // x: the score, times log2(e) if there is no cap. Returns the capped score times log2(e).
  static __device__ __forceinline__ float capped(float x, float cap) {
    if constexpr (SOFTCAP) return (cap * LOG2E) * (1.f - 2.f * __fdividef(1.f, 1.f + ex2(x * (2.f * LOG2E / cap))));
    else return x;
  }
};
