// Attention of a warp to packed pages.
#pragma once
#include "warp.cuh"
#include "exchange.cuh"

// Units [first, first + units) of a row's pages. A worker of the team takes the next unit when it has finished one: the scheduler serves
// older warps first, so they run ahead.
struct Work {
  int first, units, end;  // end: one past the last token
  __device__ __forceinline__ Work(const Row& row, int begin, int stop) {
    first = begin;
    units = stop - begin;
    end = min(stop * UNIT, row.paged);
  }
};

// A unit is two pieces. Each piece has its own slot in the warp's shared memory, and the loop over units is written out for both pieces,
// so the compiler knows every address. Copies run ahead of the computation. While piece 0 of a unit is computed, keys 0 of the next unit
// and values 1 of this unit are copied. While piece 1 is computed, keys 1 and values 0 of the next unit are copied.
struct Pages {
  static constexpr int KEYS[2] = {0, Keys::SLOT + 2 * Values::SLOT},
                       VALUES[2] = {Keys::SLOT, Keys::SLOT + Values::SLOT};  // places of pieces
  static constexpr int NONE = -2 * UNIT;  // `left` of a unit that does not exist: `in_unit` is false for both pieces
  static_assert(PAGE % UNIT == 0 || UNIT % PAGE == 0, "a piece lies in one page");
  static constexpr int EACH = PAGE < UNIT ? UNIT / PAGE : 1;  // pages of a unit

  // Where a unit lies, and how many of its tokens exist.
  struct Place {
    i64 page[EACH];   // bytes from `pool`
    int token, left;  // of piece 0: place in its page; tokens from there on, or NONE
    __device__ __forceinline__ u32 at(int piece) const {
      return PAGE < UNIT ? piece * PT % PAGE : PAGE == UNIT ? piece * PT : token + piece * PT;
    }
  };

  const i64* table;
  const u8* pool;
  Work work;
  int* taken;         // units that the team has taken beyond the first two of each warp
  int pending, lane;  // the next unit to take, less the first two of each warp (of lane 0)
  Place here, next;
  const Exchange& exchange;

  __device__ __forceinline__ Pages(const Args& a, const Row& row, const Work& work_, int* taken_, int lane_,
                                   const Exchange& exchange_)
      : work(work_), taken(taken_), lane(lane_), exchange(exchange_) {
    table = a.address + (i64)row.b * a.pages;
    pool = opaque(a.pool + (i64)row.h * PAGE_BYTES);
  }

  __device__ __forceinline__ Place place(int unit) const {
    Place out;
    const bool real = unit < work.units;
    const u32 token = (u32)(work.first + (real ? unit : 0)) * UNIT;
#pragma unroll
    for (int i = 0; i < EACH; i++)
      out.page[i] = i == 0 || token + i * PAGE < (u32)work.end ? ask(table + token / PAGE + i) : out.page[0];
    out.token = token % PAGE;
    out.left = real ? PARTIAL ? work.end - (int)token : UNIT : NONE;
    return out;
  }
  template <int PIECE> __device__ __forceinline__ const u8* part(const Place& x) const {
    return pool + x.page[PIECE * PT / PAGE % EACH];
  }
  template <int PIECE> __device__ __forceinline__ void copy_keys(const Keys& keys, const Place& x, u32 slots) const {
    keys.copy(slots + KEYS[PIECE], part<PIECE>(x), x.at(PIECE), PIECE == 0, PARTIAL ? x.left - PIECE * PT : x.left,
              lane);
  }
  template <int PIECE>
  __device__ __forceinline__ void copy_values(const Values& values, const Place& x, u32 slots) const {
    values.copy(slots + VALUES[PIECE], part<PIECE>(x) + VALUE_AT, x.at(PIECE), PARTIAL ? x.left - PIECE * PT : x.left,
                lane);
  }

  __device__ __forceinline__ void start(const Warp& w, int unit, u32 slots) {
    here = place(unit);
    next = place(unit + WORKERS);
    if (here.left == NONE) return;  // nothing would wait for this copy
    pending = unit - WORKERS;       // ORDERED
    copy_keys<0>(w.keys, here, slots);
    commit();
    copy_keys<1>(w.keys, here, slots);
    copy_values<0>(w.values, here, slots);
    commit();
  }

  // Asks for one more unit, if the unit before it existed.
  __device__ __forceinline__ void claim() {
    if (ORDERED) pending += WORKERS;
    else count_up(lane == 0 && own_slice() == 0 && next.left != NONE, taken, pending);
  }

  // A score, from what keys made of it.
  static __device__ __forceinline__ float complete(const Warp& w, float (*s)[NT][4], int k, int n, int i) {
    return s[k][n][i] * w.keys.factor(n, k, i & 1) + w.keys.offset(n, k, i & 1);
  }
  // With SLICES: completes the warp's part of a piece's scores, and hands it to the other warps.
  __device__ __forceinline__ void hand_on(const Warp& w, int piece, float (*s)[NT][4]) const {
    if constexpr (SLICES > 1) {
#pragma unroll
      for (int k = 0; k < TILES; k++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i += EVERY) s[k][n][i] = complete(w, s, k, n, i);
      exchange.put(piece, s);
      if (piece == 1) exchange.tell(pending);
    }
  }

  // One piece: turns its scores s into weights, accumulates its values, and computes the scores of the next piece.
  template <int PIECE>
  __device__ __forceinline__ void attend_piece(Warp& w, float (*s)[NT][4], u32 rows, u32 slots, float cap) {
    const u32 values = slots + VALUES[PIECE], scratch = slots + KEYS[1] + Keys::SECOND;
    wait<0>();
    exchange.meet();
    exchange.add(PIECE, s);
    copy_keys<PIECE>(w.keys, next, slots);
    if constexpr (PIECE == 0) copy_values<1>(w.values, here, slots);
    else copy_values<0>(w.values, next, slots);
    commit();
    const int limit = PARTIAL ? here.left - PIECE * PT : 0;
    w.values.weigh(values, scratch, limit, lane);
#pragma unroll
    for (int k = 0; k < TILES; k++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i += EVERY) {
          const float score = SLICES > 1 ? s[k][n][i] : complete(w, s, k, n, i);
          s[k][n][i] = Warp::capped(w.whole(score, n, i & 1), cap) + w.values.exponent(k, i);
          if (PARTIAL && 32 * (k >> 1) + lane / 4 * 4 + 2 * (k & 1) + (i >> 1) >= limit) s[k][n][i] = -INF;
        }
    w.subtract_maximum<TILES>(s);
    // the next piece's scores do not depend on this piece's weights, so the compiler interleaves the two. (After the last piece
    // they are computed from stale memory and not used)
    const u32 keys = slots + KEYS[1 - PIECE];
    w.keys.refresh(keys, rows, PIECE == 0 ? here.at(1) : next.at(0), PIECE == 1, lane);
    float ahead[TILES][NT][4];
    w.keys.scores(ahead, keys, rows, lane);
    hand_on(w, 1 - PIECE, ahead);
    w.values.add(w.o, w.l, s, values, scratch, limit, lane);
    if constexpr (PIECE == 1 || PAGE < UNIT) end_page(w.values, w.l);
#pragma unroll
    for (int k = 0; k < TILES; k++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i += EVERY) s[k][n][i] = ahead[k][n][i];
  }

  __device__ __forceinline__ void attend(Warp& w, u32 rows, u32 slots, float cap) {
    if (here.left == NONE) return;
    wait<1>();
    __syncwarp();
    claim();
    float s[TILES][NT][4];
    w.keys.refresh(slots, rows, here.at(0), true, lane);
    w.keys.scores(s, slots, rows, lane);
    hand_on(w, 0, s);
    if constexpr (SLICES > 1) {
      exchange.tell(pending);
      exchange.meet();
    }
#pragma unroll 1
    while (true) {
      const Place following = place(
          2 * WORKERS + exchange.told(pending));  // the unit after the next: its page address is loaded a unit ahead
      claim();
      attend_piece<0>(w, s, rows, slots, cap);
      attend_piece<1>(w, s, rows, slots, cap);
      here = next;
      next = following;
      if (here.left == NONE) break;
    }
    wait<0>();
    __syncwarp();
  }
};
