// Attention of a warp to packed pages.
#pragma once
#include "warp.cuh"
#include "exchange.cuh"

// Work tiles [first, first + count) of a row's pages. A worker takes the next one when it has finished one: the scheduler prefers older
// warps, which run ahead.
struct WorkTiles {
  int first, count, end;  // end: one past the last token
  __device__ __forceinline__ WorkTiles(const Row& row, int begin, int stop) {
    first = begin;
    count = stop - begin;
    end = min(stop * WORK_TILE, row.paged);
  }
};

// The pipeline over a row's work tiles. A work tile is two KV tiles. Each has its own stages in the warp's shared memory, for keys and for
// values, and the loop body covers both, so the compiler knows every address. Copies run ahead of the computation. While KV tile 0 is
// computed, keys 0 of the next work tile and values 1 of this one are copied. While KV tile 1 is computed, keys 1 and values 0 of the next
// work tile are copied.
struct Pages {
  static constexpr int KEYS[2] = {0, Keys::STAGE_BYTES + 2 * Values::STAGE_BYTES},
                       VALUES[2] = {Keys::STAGE_BYTES,
                                    Keys::STAGE_BYTES + Values::STAGE_BYTES};  // offsets of stages, by KV tile
  static constexpr int NONE =
      -2 * WORK_TILE;  // `remaining` of a missing work tile: `in_work_tile` is false for both KV tiles
  static_assert(PAGE % WORK_TILE == 0 || WORK_TILE % PAGE == 0, "a KV tile lies in one page");
  static constexpr int EACH = PAGE < WORK_TILE ? WORK_TILE / PAGE : 1;  // pages of a work tile

  // Where a work tile is, and how many of its tokens exist.
  struct TileLocation {
    i64 page[EACH];        // bytes from `pool`
    int token, remaining;  // of KV tile 0: offset in its page; number of tokens from there on, or NONE
    __device__ __forceinline__ u32 at(int kv_tile) const {
      return PAGE < WORK_TILE    ? kv_tile * KV_TILE % PAGE
             : PAGE == WORK_TILE ? kv_tile * KV_TILE
                                 : token + kv_tile * KV_TILE;
    }
  };

  const i64* table;
  const u8* pool;
  WorkTiles work;
  int* taken;         // work tiles that the warp group has taken, less the first two per warp
  int pending, lane;  // the next work tile to take, less the first two per warp (in lane 0)
  TileLocation current, next;
  const Exchange& exchange;

  __device__ __forceinline__ Pages(const Args& a, const Row& row, const WorkTiles& work_, int* taken_, int lane_,
                                   const Exchange& exchange_)
      : work(work_), taken(taken_), lane(lane_), exchange(exchange_) {
    table = a.address + (i64)row.b * a.pages;
    pool = opaque(a.pool + (i64)row.h * PAGE_BYTES);
  }

  __device__ __forceinline__ TileLocation locate(int work_tile) const {
    TileLocation out;
    const bool real = work_tile < work.count;
    const u32 token = (u32)(work.first + (real ? work_tile : 0)) * WORK_TILE;
#pragma unroll
    for (int i = 0; i < EACH; i++)
      out.page[i] = i == 0 || token + i * PAGE < (u32)work.end ? load_now(table + token / PAGE + i) : out.page[0];
    out.token = token % PAGE;
    out.remaining = real ? PARTIAL ? work.end - (int)token : WORK_TILE : NONE;
    return out;
  }
  template <int INDEX> __device__ __forceinline__ const u8* part(const TileLocation& x) const {
    return pool + x.page[INDEX * KV_TILE / PAGE % EACH];
  }
  template <int INDEX>
  __device__ __forceinline__ void copy_keys(const Keys& keys, const TileLocation& x, u32 stages) const {
    keys.copy(stages + KEYS[INDEX], part<INDEX>(x), x.at(INDEX), INDEX == 0,
              PARTIAL ? x.remaining - INDEX * KV_TILE : x.remaining, lane);
  }
  template <int INDEX>
  __device__ __forceinline__ void copy_values(const Values& values, const TileLocation& x, u32 stages) const {
    values.copy(stages + VALUES[INDEX], part<INDEX>(x) + VALUE_AT, x.at(INDEX),
                PARTIAL ? x.remaining - INDEX * KV_TILE : x.remaining, lane);
  }

  __device__ __forceinline__ void start(const Warp& w, int work_tile, u32 stages) {
    current = locate(work_tile);
    next = locate(work_tile + WORKERS);
    if (current.remaining == NONE) return;  // no later wait covers this copy
    pending = work_tile - WORKERS;          // ORDERED
    copy_keys<0>(w.keys, current, stages);
    commit();
    copy_keys<1>(w.keys, current, stages);
    copy_values<0>(w.values, current, stages);
    commit();
  }

  // Claims the next work tile, unless the previous claim failed.
  __device__ __forceinline__ void claim() {
    if (ORDERED) pending += WORKERS;
    else atomic_inc_shared(lane == 0 && own_slice() == 0 && next.remaining != NONE, taken, pending);
  }

  // A score from a product.
  static __device__ __forceinline__ float complete(const Warp& w, float (*s)[NT][4], int k, int n, int i) {
    return s[k][n][i] * w.keys.factor(n, k, i & 1) + w.keys.offset(n, k, i & 1);
  }
  // SLICES > 1: completes the warp's partial scores of a KV tile and passes them to the other warps.
  __device__ __forceinline__ void exchange_scores(const Warp& w, int kv_tile, float (*s)[NT][4]) const {
    if constexpr (SLICES > 1) {
#pragma unroll
      for (int k = 0; k < TILES; k++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i += EVERY) s[k][n][i] = complete(w, s, k, n, i);
      exchange.put(kv_tile, s);
      if (kv_tile == 1) exchange.publish(pending);
    }
  }

  // Processes KV tile INDEX of the work tile: computes weights from its scores s, accumulates its values, and computes the scores of the next
  // KV tile.
  template <int INDEX>
  __device__ __forceinline__ void attend_kv_tile(Warp& w, float (*s)[NT][4], u32 rows, u32 stages, float cap) {
    const u32 values = stages + VALUES[INDEX], scratch = stages + KEYS[1] + Keys::SECOND_STAGE_BYTES;
    wait<0>();
    exchange.sync();
    exchange.add(INDEX, s);
    copy_keys<INDEX>(w.keys, next, stages);
    if constexpr (INDEX == 0) copy_values<1>(w.values, current, stages);
    else copy_values<0>(w.values, next, stages);
    commit();
    const int limit = PARTIAL ? current.remaining - INDEX * KV_TILE : 0;
    w.values.weigh(values, scratch, limit, lane);
#pragma unroll
    for (int k = 0; k < TILES; k++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i += EVERY) {
          const float score = SLICES > 1 ? s[k][n][i] : complete(w, s, k, n, i);
          s[k][n][i] = Warp::capped(w.with_score_bias(score, n, i & 1), cap) + w.values.exponent(k, i);
          if (PARTIAL && 32 * (k >> 1) + lane / 4 * 4 + 2 * (k & 1) + (i >> 1) >= limit) s[k][n][i] = -INF;
        }
    w.subtract_maximum<TILES>(s);
    // the scores of the next KV tile do not depend on these weights, so the compiler interleaves the two. (After the last KV tile they are
    // computed from stale memory and not used)
    const u32 keys = stages + KEYS[1 - INDEX];
    w.keys.refresh(keys, rows, INDEX == 0 ? current.at(1) : next.at(0), INDEX == 1, lane);
    float next_s[TILES][NT][4];
    w.keys.scores(next_s, keys, rows, lane);
    exchange_scores(w, 1 - INDEX, next_s);
    w.values.add(w.o, w.l, s, values, scratch, limit, lane);
    if constexpr (INDEX == 1 || PAGE < WORK_TILE) end_page(w.values, w.l);
#pragma unroll
    for (int k = 0; k < TILES; k++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i += EVERY) s[k][n][i] = next_s[k][n][i];
  }

  __device__ __forceinline__ void attend(Warp& w, u32 rows, u32 stages, float cap) {
    if (current.remaining == NONE) return;
    wait<1>();
    __syncwarp();
    claim();
    float s[TILES][NT][4];
    w.keys.refresh(stages, rows, current.at(0), true, lane);
    w.keys.scores(s, stages, rows, lane);
    exchange_scores(w, 0, s);
    if constexpr (SLICES > 1) {
      exchange.publish(pending);
      exchange.sync();
    }
#pragma unroll 1
    while (true) {
      const TileLocation following = locate(
          2 * WORKERS + exchange.claimed(pending));  // the work tile after next: its page address is loaded early
      claim();
      attend_kv_tile<0>(w, s, rows, stages, cap);
      attend_kv_tile<1>(w, s, rows, stages, cap);
      current = next;
      next = following;
      if (current.remaining == NONE) break;
    }
    wait<0>();
    __syncwarp();
  }
};
