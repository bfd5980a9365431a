// Stores a step's token in the launch that attends to it (FUSED: one token per row): `reference.append` after `reference.attend`.
//
// No team reads the bytes that this writes, so most writes need not wait:
// - The token has index i = length - sink after the sink. Fewer than `tail_size` tokens are in the ring (`paged` to i - 1; packing
//   sees to that), so slot i % tail_size is free. In the sink the token takes the first free place. (Several tokens could take over
//   slots that other teams still read. So chunks of several tokens are stored by launches of their own.)
// - The page that is due begins at token `paged`, after all pages that are read. It is packed from slots of the ring, and only the
//   token's own slot is written. If the token itself belongs to the page (no residual), it is taken from the chunk and not kept.
// - All teams, of all rows and row blocks, read the counters. The team that finishes reading last writes them. Each team
//   reads and uses the counters, then meets over its last row's queries, then one thread adds to an atomic counter. This needs no
//   fence: a later write cannot change what has been read. The last team issues a fence before it writes.
#pragma once
#include "warp.cuh"
#include "plan.cuh"

#if FUSED
#include "store.cuh"

struct StepArgs : Args {
  AppendArgs store;
  int* arrived;  // number of teams that have finished reading the counters; zero before and after the launch
};
static_assert(!DIRECT, "a token that goes straight into a page is stored by a launch of its own (geometry.can_store)");

// The work of storing a row's token. It is computed at the start and used at the end, when the counters in memory may have advanced.
struct Due {
  int stored, before;
};  // stored: -1 if no page is due

// A token's channels; a lane has pairs of neighbours.
template <int D> struct Token {
  static constexpr int WORDS = (D + 63) / 64;
  u32 x[WORDS];
  __device__ __forceinline__ void load(const u8* rows, i64 at, int lane) {
    const u32* from = reinterpret_cast<const u32*>(rows + 2 * at);
#pragma unroll
    for (int j = 0; j < WORDS; j++) x[j] = 32 * j + lane < D / 2 ? from[32 * j + lane] : 0u;
  }
  __device__ __forceinline__ void put(u16* target, int lane) const {
    if (!target) return;
#pragma unroll
    for (int j = 0; j < WORDS; j++)
      if (32 * j + lane < D / 2) reinterpret_cast<u32*>(target)[32 * j + lane] = x[j];
  }
};

// Puts the token of a row and head into sink or ring. Called by one warp of the team, after a `meet` where the key was transformed (TRANSFORMED).
// It has a single exit: if a single warp calls a function that returns early, compute-sanitizer's synccheck reports the next barrier.
COLD Due keep_token(const AppendArgs& a, int b, int h, int length, int paged, int lane) {
  const int bh = b * a.heads + h;
  const Counts n(a, length, paged, 1);
  Token<DK> k;
  Token<DV> v;  // everything is loaded before the first branch, so it costs one memory latency
  k.load(a.k, b * a.k_b + h * a.k_h, lane);
  v.load(a.v, b * a.v_b + h * a.v_h, lane);
  const bool real = !padding(a, b);
  u16 *key = nullptr, *value = nullptr;
  if (real && kept(a, n)) {
    key = home<DK>(a, a.sink_k, a.tail_k, bh, n.stored);
    value = home<DV>(a, a.sink_v, a.tail_v, bh, n.stored);
  }
  k.put(key, lane);
  v.put(value, lane);
  return {real && n.fits && n.after > n.before ? length : -1, paged};
}

// Packs the page that is due. Called by a team after its last use of `space`. It runs once in PAGE steps and is kept out of line, so the
// main loops do not pay for its registers.
COLD void pack_token(const AppendArgs& a, int bh, int stored, int before, int thread, int team, u8* space) {
  const Counts n(a, stored, before, 1);
  BARRIER(merging_done, meet(team));
  constexpr int AT = (SPACE + 127) / 128 * 128;
  pack_due(a, n, bh, Crew{thread, team}, space, AT + STAGE <= TEAM_BYTES ? space + AT : nullptr);
}

// Signals that the team has finished reading the counters. Called by one warp, after a `meet` after the team's last read. Lane 0 gets the number of
// teams that came before. The caller uses that later, because the answer takes a memory latency.
__device__ __forceinline__ int leave_counters(int* arrived, int lane) {
  int before = 0;
  count_up_global(lane == 0, arrived, before);  // atomicAdd would wait for its answer
  return before;
}

// count: rows times heads. BATCH: a third of the loads in flight. Few rows need few loads, and a short function: after another kernel
// its instructions come from memory. All of a batch is computed before the first store, because after a store every field of `a` would
// be loaded again.
template <int BATCH> COLD void advance_counters(const AppendArgs& a, int* arrived, int count, int lane) {
  __threadfence();
#pragma unroll 1
  for (int first = lane; first < count; first += 32 * BATCH) {
    int *length = a.length + first, *paged = a.paged + first, *lost = a.lost + first;
    int stored[BATCH], after[BATCH];
    bool real[BATCH], fits[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const bool here = first + 32 * j < count;
      stored[j] = here ? length[32 * j] : 0;
      after[j] = here ? paged[32 * j] : 0;
      real[j] = here && !(HAS_MASK && padding(a, (first + 32 * j) / a.heads));
    }
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const Counts n(a, stored[j], after[j], 1);
      after[j] = n.after;
      fits[j] = n.fits;
    }
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      if (real[j] && fits[j]) {
        length[32 * j] = stored[j] + 1;
        paged[32 * j] = after[j];
      } else if (real[j]) lost[32 * j] += 1;
    }
  }
  if (lane == 0) *arrived = 0;
}

// The last team writes the counters. before: the number that `leave_counters` returned.
__device__ __forceinline__ void write_counters(const AppendArgs& a, int* arrived, int before, int count, int lane) {
  if (__shfl_sync(~0u, before, 0) == (int)(gridDim.x * gridDim.y) * TEAMS - 1) {
    if (count <= 64) advance_counters<1>(a, arrived, count, lane);
    else if (count <= 256) advance_counters<4>(a, arrived, count, lane);
    else advance_counters<16>(a, arrived, count, lane);
  }
}

// How a team stores tokens while it attends to one row.
constexpr int DUES = TEAMS;
static_assert(SPACE <= TEAM_BYTES, "what packing needs");
struct TokenStore {
  bool stores, leaves;  // the team has the window's block with the chunk; this warp reports the end of the team's reads

  // A team without any part reports too.
  static __device__ __forceinline__ void leave_unused(const StepArgs& a, int lane) {
    write_counters(a.store, a.arrived, leave_counters(a.arrived, lane), a.batch * a.heads, lane);
  }

  __device__ __forceinline__ TokenStore(const Part& part, int row_block, int warp) {
    stores = row_block == 0 && part.blocks[0] < part.row.blocks && part.blocks[1] == part.row.blocks;
    leaves = warp == WARPS - 1 && part.last;
  }
  __device__ __forceinline__ void begin(Due* dues, int team, int thread) const {
    if (thread == 0) dues[team].stored = -1;
  }

  // Done by the last warp: it is the one without window or pages if there is not enough work for all.
  __device__ __forceinline__ void keep(const StepArgs& a, const Row& row, Due* dues, int team, int warp,
                                       int lane) const {
    const int before = leaves ? leave_counters(a.arrived, lane) : 0;  // the answer takes as long as loading the token
    if (stores && warp == WARPS - 1) {
      const Due due = keep_token(a.store, row.b, row.h, row.length, row.paged, lane);
      if (lane == 0) dues[team] = due;
    }
    if (leaves) write_counters(a.store, a.arrived, before, a.batch * a.heads, lane);
  }
  __device__ __forceinline__ void pack(const StepArgs& a, const Due* dues, int bh, int thread, int team,
                                       u8* space) const {
    if (const Due due = dues[team]; due.stored >= 0)
      pack_token(a.store, bh, due.stored, due.before, thread, team, space);
  }
};
#else
using StepArgs = Args;
struct Due {};
constexpr int DUES = 1;
struct TokenStore {
  static __device__ __forceinline__ void leave_unused(const StepArgs&, int) {}
  __device__ __forceinline__ TokenStore(const Part&, int, int) {}
  __device__ __forceinline__ void begin(Due*, int, int) const {}
  __device__ __forceinline__ void keep(const StepArgs&, const Row&, Due*, int, int, int) const {}
  __device__ __forceinline__ void pack(const StepArgs&, const Due*, i64, int, int, u8*) const {}
};
#endif
