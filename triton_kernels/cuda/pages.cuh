// Attention of a warp to packed pages.
#pragma once
#include "warp.cuh"

// Units [begin, stop) of a row's pages, which the warps of a team take as they get done: whole units, and of the last ones a piece at
// a time, so that all warps are done together (older warps are served first and run ahead).
struct Work {
  int units, first, whole, items, end;                    // first token; items that are whole units; all items; where tokens end
  __device__ __forceinline__ Work(const Row& row, int begin, int stop) {
    units = stop - begin;
    first = begin * UNIT; end = min(stop * UNIT, row.paged);
    whole = max(units - WARPS, 0); items = whole + (units - whole) * PIECES;
  }
};

// Copies run ahead of what is computed: group n of them holds the keys of piece n + 1 and the values of piece n.
struct Pages {
  static constexpr int SLOT = Keys::SLOT + Values::SLOT, NONE = 0x7fffffff;
  const i64* table;
  const u8* pool;
  const u8* page[RING + 1];                               // of pieces n, n + 1, ..., n + RING
  int token[RING + 1];                                    // of these, sink not counted; odd where a unit or an item begins
  int left, next, next_left;                              // pieces that follow in this item; the item to take next
  i64 next_page;
  Work work;
  int* taken;                                             // items that the team has taken beyond the first two of each warp
  int pending, lane;                                      // the item after `next` (of lane 0)

  __device__ __forceinline__ Pages(const Args& a, const Row& row, const Work& work_, int* taken_, int lane_) : work(work_), taken(taken_), lane(lane_) {
    table = a.address + (i64)row.b * a.pages; pool = a.pool + (i64)row.h * PAGE_BYTES;
  }

  __device__ __forceinline__ void take(int item) {
    const bool unit = item < work.whole;
    next = work.first + (unit ? item * UNIT : work.whole * UNIT + (item - work.whole) * PT) + 1;
    next_left = unit ? PIECES - 1 : 0;
    if (item < work.items && next <= work.end) next_page = table[(u32)next / PAGE]; else next = NONE;
  }
  // From one piece of this warp to its next.
  __device__ __forceinline__ void step(int& t, const u8*& p) {
    if (left > 0 && (t & -2) + PT < work.end) {
      left--; t = (t & -2) + PT;
      if (PAGE < UNIT && (u32)t % PAGE == 0) { p = pool + table[(u32)t / PAGE]; t++; }
      return;
    }
    t = next; left = next_left; p = pool + next_page;
    if (next == NONE) return;
    const int item = __shfl_sync(~0u, pending, 0);
    if (ORDERED) pending += WARPS;
    else if (lane == 0) pending = 2 * WARPS + atomicAdd(taken, 1);
    take(item);
  }
  __device__ __forceinline__ void copy_keys(const Keys& keys, int i, u32 slot) {
    const int t = token[i] & -2;
    if (t < work.end) keys.copy(slot, page[i], (u32)t % PAGE, token[i] & 1, work.end - t, lane);
  }
  __device__ __forceinline__ void copy_values(const Values& values, int i, u32 slot) {
    const int t = token[i] & -2;
    if (t < work.end) values.copy(slot + Keys::SLOT, page[i] + VALUE_AT, (u32)t % PAGE, work.end - t, lane);
  }

  __device__ __forceinline__ void start(const Warp& w, int item, u32 ring) {
    left = 0; pending = item + WARPS;
    take(item);
#pragma unroll
    for (int i = 0; i < RING; i++) {
      if (i) { token[i] = token[i - 1]; page[i] = page[i - 1]; }
      step(token[i], page[i]);
      copy_keys(w.keys, i, ring + i * SLOT);
      if (i) copy_values(w.values, i - 1, ring + (i - 1) * SLOT);
      commit();
    }
  }

  __device__ __forceinline__ void attend(Warp& w, u32 rows, u32 ring, float cap) {
    if (token[0] == NONE) return;
    wait<RING - 1>(); __syncwarp();
    u32 before = ring + (RING - 1) * SLOT, here = ring, behind = ring + SLOT;  // slots of pieces n - 1, n, n + 1
    float s[TILES][NT][4];
    w.keys.refresh(ring, rows, (u32)(token[0] & -2) % PAGE, true, lane);
    w.keys.scores(s, ring, rows, lane);
#pragma unroll 1
    while (token[0] != NONE) {
      wait<RING - 2>(); __syncwarp();
      token[RING] = token[RING - 1]; page[RING] = page[RING - 1];
      step(token[RING], page[RING]);
      copy_keys(w.keys, RING, here); copy_values(w.values, RING - 1, before); commit();
      const int limit = DIRECT ? work.end - (token[0] & -2) : 0;
      w.values.weigh(here + Keys::SLOT, ring + RING * SLOT, limit, lane);
#pragma unroll
      for (int k = 0; k < TILES; k++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i += EVERY) {
            s[k][n][i] = Warp::capped(s[k][n][i] * w.keys.factor(n, k, i & 1) + w.keys.offset(n, k, i & 1), cap) + w.values.exponent(k, i);
            if (DIRECT && 32 * (k >> 1) + lane / 4 * 4 + 2 * (k & 1) + (i >> 1) >= limit) s[k][n][i] = -INF;
          }
      w.subtract_maximum<TILES>(s);
      // the next piece's scores do not depend on this one's weights: the compiler interleaves the two (behind the last piece
      // they are computed from stale memory and not used)
      w.keys.refresh(behind, rows, (u32)(token[1] & -2) % PAGE, token[1] & 1, lane);
      float ahead[TILES][NT][4];
      w.keys.scores(ahead, behind, rows, lane);
      w.values.add(w.o, w.l, s, here + Keys::SLOT, ring + RING * SLOT, limit, lane);
      before = here; here = behind; behind = behind == ring + (RING - 1) * SLOT ? ring : behind + SLOT;
#pragma unroll
      for (int i = 0; i < RING; i++) { token[i] = token[i + 1]; page[i] = page[i + 1]; }
#pragma unroll
      for (int k = 0; k < TILES; k++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i += EVERY) s[k][n][i] = ahead[k][n][i];
    }
    wait<0>(); __syncwarp();
  }
};
