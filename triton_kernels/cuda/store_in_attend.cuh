// Stores a step's token in the launch that attends to it (APPENDS: one token per row): `reference.append` after `reference.attend`.
//
// No warp group reads the bytes that this writes, so most writes need no synchronization:
// - The token has index i = length - sink after the sink. Packing keeps fewer than `tail_size` tokens in the ring (`paged` to i - 1), so
//   slot i % tail_size is free. In the sink the token takes the first free slot. (Several tokens could overwrite slots that other warp groups
//   still read. So separate launches store several new tokens.)
// - The page that is due begins at token `paged`, after all pages that are read. It is packed from slots of the ring, and only the new
//   token's slot is written. If the new token itself belongs to the page (no residual), it is read from the kernel's input and not stored in the ring.
// - All warp groups, of all rows and row blocks, read the counters. The last one to finish reading writes them. Each warp group reads and
//   uses the counters, synchronizes over its last row's queries, then one thread increments an atomic counter. This needs no fence: a later
//   write cannot change values that have been read. The last warp group issues a fence before it writes.
#pragma once
#include "warp.cuh"
#include "plan.cuh"

#if APPENDS
#include "store.cuh"

struct StepArgs : Args {
  AppendArgs append;
  int* arrived;  // number of warp groups that have finished reading the counters; zero before and after the launch
};
static_assert(!DIRECT, "a token that goes straight into a page is stored by a launch of its own (geometry.can_append)");

// The page that a new token makes due. It is computed at the start and used at the end, when the counters in memory may have advanced.
struct DuePage {
  int stored, before;
};  // stored: -1 if no page is due

// A token's channels; a lane has pairs of neighbouring channels.
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

// Stores the token of a row in sink or ring. Called by one warp of the warp group; with TRANSFORMED after a `sync` that follows the transform.
// It has a single exit: if a single warp calls a function that returns early, compute-sanitizer's synccheck reports the next barrier.
COLD DuePage store_token(const AppendArgs& a, int b, int h, int length, int paged, int lane) {
  const int bh = b * a.heads + h;
  const Counts n(a, length, paged, 1);
  Token<DK> k;
  Token<DV> v;  // all loads precede the first branch, so they take one memory latency together
  k.load(a.k, b * a.k_b + h * a.k_h, lane);
  v.load(a.v, b * a.v_b + h * a.v_h, lane);
  const bool real = !padding(a, b);
  u16 *key = nullptr, *value = nullptr;
  if (real && goes_to_window(a, n)) {
    key = window_slot<DK>(a, a.sink_k, a.tail_k, bh, n.stored);
    value = window_slot<DV>(a, a.sink_v, a.tail_v, bh, n.stored);
  }
  k.put(key, lane);
  v.put(value, lane);
  return {real && n.fits && n.after > n.before ? length : -1, paged};
}

// Packs the page that is due. Called by a warp group after its last use of `space`. It runs once in PAGE steps and is not inlined, so it takes no
// registers from the main loops.
COLD void pack_due_page(const AppendArgs& a, int bh, int stored, int before, int thread, int warp_group, u8* space) {
  const Counts n(a, stored, before, 1);
  BARRIER(merging_done, sync_warp_group(warp_group));
  constexpr int AT = (ENCODER_BYTES + 127) / 128 * 128;
  pack_due(a, n, bh, WarpGroup{thread, warp_group}, space,
           AT + PAGE_TOKENS_BYTES <= WARP_GROUP_BYTES ? space + AT : nullptr);
}

// Signals that the warp group has finished reading the counters. Called by one warp, after a `sync` that follows the last read. Lane 0 gets the
// number of warp groups that finished before. The caller uses it later, because it takes a memory latency.
__device__ __forceinline__ int release_counters(int* arrived, int lane) {
  int before = 0;
  atomic_inc_global(lane == 0, arrived, before);  // atomicAdd would wait for its result
  return before;
}

// count: sequences x KV heads. BATCH: a third of the loads in flight. Few rows need few loads and a short function, because after another kernel
// its instructions come from memory. A batch is computed before its first store, because after a store the compiler reloads every field
// of `a`.
template <int BATCH> COLD void advance_counters(const AppendArgs& a, int* arrived, int count, int lane) {
  __threadfence();
#pragma unroll 1
  for (int first = lane; first < count; first += 32 * BATCH) {
    int *length = a.length + first, *paged = a.paged + first, *lost = a.lost + first;
    int stored[BATCH], after[BATCH];
    bool real[BATCH], fits[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const bool in_range = first + 32 * j < count;
      stored[j] = in_range ? length[32 * j] : 0;
      after[j] = in_range ? paged[32 * j] : 0;
      real[j] = in_range && !(HAS_MASK && padding(a, (first + 32 * j) / a.heads));
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

// The last warp group writes the counters. before: the result of `release_counters`.
__device__ __forceinline__ void write_counters(const AppendArgs& a, int* arrived, int before, int count, int lane) {
  if (__shfl_sync(~0u, before, 0) == (int)(gridDim.x * gridDim.y) * WARP_GROUPS - 1) {
    if (count <= 64) advance_counters<1>(a, arrived, count, lane);
    else if (count <= 256) advance_counters<4>(a, arrived, count, lane);
    else advance_counters<16>(a, arrived, count, lane);
  }
}

// Stores a row's token while the warp group attends to the row.
constexpr int DUE_PAGES = WARP_GROUPS;
static_assert(ENCODER_BYTES <= WARP_GROUP_BYTES, "memory for packing");
struct TokenStore {
  bool stores,
      releases;  // stores: the warp group has the window segment with the new token; releases: this warp signals the end of its reads

  // A warp group without work signals too.
  static __device__ __forceinline__ void release_unused(const StepArgs& a, int lane) {
    write_counters(a.append, a.arrived, release_counters(a.arrived, lane), a.batch * a.heads, lane);
  }

  __device__ __forceinline__ TokenStore(const Split& split, int row_block, int warp) {
    stores = row_block == 0 && split.segments[0] < split.row.segments && split.segments[1] == split.row.segments;
    releases = warp == WARPS - 1 && split.last;
  }
  __device__ __forceinline__ void begin(DuePage* due_pages, int warp_group, int thread) const {
    if (thread == 0) due_pages[warp_group].stored = -1;
  }

  // Done by the last warp, which has no window and no pages if there is too little work.
  __device__ __forceinline__ void store(const StepArgs& a, const Row& row, DuePage* due_pages, int warp_group, int warp,
                                        int lane) const {
    const int before = releases ? release_counters(a.arrived, lane) : 0;  // in parallel with loading the token
    if (stores && warp == WARPS - 1) {
      const DuePage due_page = store_token(a.append, row.b, row.h, row.length, row.paged, lane);
      if (lane == 0) due_pages[warp_group] = due_page;
    }
    if (releases) write_counters(a.append, a.arrived, before, a.batch * a.heads, lane);
  }
  __device__ __forceinline__ void pack(const StepArgs& a, const DuePage* due_pages, int bh, int thread, int warp_group,
                                       u8* space) const {
    if (const DuePage due_page = due_pages[warp_group]; due_page.stored >= 0)
      pack_due_page(a.append, bh, due_page.stored, due_page.before, thread, warp_group, space);
  }
};
#else
using StepArgs = Args;
struct DuePage {};
constexpr int DUE_PAGES = 1;
struct TokenStore {
  static __device__ __forceinline__ void release_unused(const StepArgs&, int) {}
  __device__ __forceinline__ TokenStore(const Split&, int, int) {}
  __device__ __forceinline__ void begin(DuePage*, int, int) const {}
  __device__ __forceinline__ void store(const StepArgs&, const Row&, DuePage*, int, int, int) const {}
  __device__ __forceinline__ void pack(const StepArgs&, const DuePage*, i64, int, int, u8*) const {}
};
#endif
