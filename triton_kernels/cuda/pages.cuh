// Attention of a warp to packed pages.
#pragma once
#include "warp.cuh"

// The packed pages [u0 + warp, u1) of a row, piece by piece. Copies run ahead of what is computed: group n of them holds the keys
// of piece n + 1 and the values of piece n.
struct Pages {
  static constexpr int STEP = UNIT * WARPS;               // tokens from a unit of this warp to its next
  static constexpr int SLOT = Keys::SLOT + Values::SLOT;
  const i64* table;
  const u8 *pool, *k_page, *v_page;
  i64 k_next, v_next;                                     // the pages after these, looked up a unit ahead
  int begin, end, k_token, v_token;                       // tokens, sink not counted; k and v: of the units to copy next
  int paged, lane;
  u32 ring;

  __device__ __forceinline__ void copy_keys(const Keys& keys, int piece, u32 slot) {
    if (k_token >= end) return;
    if (piece == 0) { k_page = pool + k_next; if (k_token + STEP < end) k_next = table[(k_token + STEP) / PAGE]; }
    keys.copy(slot, k_page, k_token % PAGE + piece * PT, piece == 0, paged - k_token - piece * PT, lane);
    if (piece == PIECES - 1) k_token += STEP;
  }
  __device__ __forceinline__ void copy_values(const Values& values, int piece, u32 slot) {
    if (v_token >= end) return;
    if (piece == 0) { v_page = pool + v_next + VALUE_AT; if (v_token + STEP < end) v_next = table[(v_token + STEP) / PAGE]; }
    values.copy(slot + Keys::SLOT, v_page, v_token % PAGE + piece * PT, paged - v_token - piece * PT, lane);
    if (piece == PIECES - 1) v_token += STEP;
  }

  __device__ __forceinline__ void start(const Warp& w, const Args& a, const Row& row, int u0, int u1, int warp, int lane_, u32 ring_) {
    const int count = u1 - u0 > warp ? (u1 - u0 - warp + WARPS - 1) / WARPS : 0;
    table = a.address + (i64)row.b * a.pages; pool = a.pool + (i64)row.h * PAGE_BYTES;
    paged = row.paged; lane = lane_; ring = ring_;
    begin = k_token = v_token = (u0 + warp) * UNIT; end = begin + count * STEP;
    if (count == 0) return;
    k_next = v_next = table[begin / PAGE];
    copy_keys(w.keys, 0, ring); commit();
#pragma unroll
    for (int i = 0; i < RING - 1; i++) {
      copy_keys(w.keys, (i + 1) % PIECES, ring + (i + 1) * SLOT); copy_values(w.values, i % PIECES, ring + i * SLOT); commit();
    }
  }

  __device__ __forceinline__ void attend(Warp& w, u32 rows, float cap) {
    if (begin == end) return;
    wait<RING - 1>(); __syncwarp();
    u32 before = ring + (RING - 1) * SLOT, here = ring, behind = ring + SLOT;  // slots of pieces n - 1, n, n + 1
    float s[TILES][NT][4];
    w.keys.refresh(ring, rows, begin % PAGE, true, lane);
    w.keys.scores(s, ring, rows, lane);
    for (int unit = begin; unit < end; unit += STEP) {
#pragma unroll
      for (int piece = 0; piece < PIECES; piece++) {
        wait<RING - 2>(); __syncwarp();
        copy_keys(w.keys, (piece + RING) % PIECES, here); copy_values(w.values, (piece + RING - 1) % PIECES, before); commit();
        const int limit = DIRECT ? paged - unit - piece * PT : 0;
        w.values.weigh(here + Keys::SLOT, limit, lane);
#pragma unroll
        for (int k = 0; k < TILES; k++)
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
              s[k][n][i] = Warp::capped(s[k][n][i] * w.keys.factor(n, k, i & 1) + w.keys.offset(n, k, i & 1), cap) + w.values.exponent(k, i);
              if (DIRECT && 32 * (k >> 1) + lane / 4 * 4 + 2 * (k & 1) + (i >> 1) >= limit) s[k][n][i] = -INF;
            }
        w.subtract_maximum<TILES>(s);
        // the next piece's scores do not depend on this one's weights: the compiler interleaves the two (behind the last piece
        // they are computed from stale memory and not used)
        w.keys.refresh(behind, rows, unit % PAGE + (piece + 1) % PIECES * PT, piece == PIECES - 1, lane);
        float next[TILES][NT][4];
        w.keys.scores(next, behind, rows, lane);
        w.values.add(w.o, w.l, s, here + Keys::SLOT, limit, lane);
        before = here; here = behind; behind = behind == ring + (RING - 1) * SLOT ? ring : behind + SLOT;
#pragma unroll
        for (int k = 0; k < TILES; k++)
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[k][n][i] = next[k][n][i];
      }
    }
    wait<0>(); __syncwarp();
  }
};
