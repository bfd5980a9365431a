// Attention of the new tokens' queries to all stored tokens and, causally, to the new tokens: `reference.attend`. TRANSFORMED: the
// kernel also transforms queries and new keys. APPENDS: it also stores the new token (one per sequence).
//
// One launch, at most one CTA per multiprocessor. A row here is one KV head of one sequence. The work of all rows, counted in bytes, is
// divided equally among the warp groups of all CTAs. A warp group's work may begin and end inside rows (`plan.cuh`); its part of a row is
// a split. In a split, some of its warps first attend to the full-precision window. Then each warp takes work tiles of the row's pages:
// the next one whenever it has finished one. The last warp group to finish a row merges the partial results that the others left in
// global memory.
//
// With heads of more than 256 channels two warps attend together. "Worker" means such a pair, or one warp (`exchange.cuh`).
//
// The GPU's warp scheduler prefers warps with low indices, so these finish earlier. So consecutive warps belong to different warp groups: each
// group has warps with low and with high indices.
//
// The instruction m16n8k16 computes q k^T and p v. Its left operand is the stored tokens, its eight columns are query rows (heads x tokens).
// Lane 4 g + t holds columns 2 t and 2 t + 1 of every accumulator.
//
// FOLLOWS: `project.cu` makes queries, new keys and values. This kernel may begin before that one ends, so it waits for it before it reads them.
#include "warp.cuh"
#include "exchange.cuh"
#include "pages.cuh"
#include "window.cuh"
#include "plan.cuh"
#include "warp_group.cuh"
#include "queries.cuh"
#include "outputs.cuh"
#include "store_in_attend.cuh"

extern "C" __device__ int shared_bytes = WARP_GROUPS * WARP_GROUP_BYTES + TABLES, argument_bytes = sizeof(StepArgs);
static_assert(sizeof(StepArgs) == ARGUMENT_BYTES, "arguments.py declares other fields");
static_assert(!TABLES || WARP_GROUPS == 1 || SHARED_TABLES, "a CTA has one codebook per side");

// Copies the codebooks of a KV head from the parameters to shared memory.
template <class F> __device__ __forceinline__ void fill_table(u32 at, const Parameter& x, int h, int thread) {
  if constexpr (TableBytes<F>::value > 0) F::fill(at, x.data + h * x.stride, thread, WARP_GROUPS * WARPS * 32);
}
template <class F> __device__ __forceinline__ void find_table(F& format, u32 at, int lane) {
  if constexpr (TableBytes<F>::value > 0) format.find(at, lane);
}

// Starts to copy codebooks: those of a KV head, by a warp group; or those that all heads share (SHARED_TABLES), by the CTA.
__device__ __forceinline__ void fill_tables(const Args& a, u32 tables, int h, int thread) {
  fill_table<Keys>(tables, a.tables[0], h, thread);
  fill_table<Values>(tables + KEY_TABLE, a.tables[1], h, thread);
  commit();
}

// The number of workers of a warp group that attend to the window segments of its split. No more workers than necessary do this; the others
// start with pages at once. The window comes first: afterwards these workers take fewer work tiles than the others, which balances the load.
__device__ __forceinline__ int workers_for_window(int segments, int work_tiles) {
  return min(segments,
             max(1, min((int)__fdividef((float)(WORKERS * segments + work_tiles), (float)(work_tiles + 1)), WORKERS)));
}

extern "C" __global__ void __launch_bounds__(WARP_GROUPS * WARPS * 32, 1) attend(const __grid_constant__ StepArgs a) {
  DYNAMIC_SHARED(memory);
  __shared__ int is_last[WARP_GROUPS], tiles_taken[WARP_GROUPS];  // see `last_of_row` and `Pages`
  __shared__ DuePage due_pages[DUE_PAGES];
  __shared__ Split splits[WARP_GROUPS];
  __shared__ WorkRange ranges[WARP_GROUPS];
  __shared__ int claims[SLICES > 1 ? WARP_GROUPS * WORKERS : 1];  // see `Exchange`
  const int warp_group = WARP_GROUPS == 1 ? 0 : (threadIdx.x >> 5) % WARP_GROUPS,
            warp = (threadIdx.x >> 5) / WARP_GROUPS, lane = threadIdx.x & 31;
  const int thread = warp * 32 + lane,
            grid_warp_group = blockIdx.x * WARP_GROUPS + warp_group;  // index in the warp group; its index in the grid
  u8* smem = memory + warp_group * WARP_GROUP_BYTES;
  const int row_block = blockIdx.y, real_rows = min(a.groups * a.tokens - row_block * ROWS, ROWS);
  const float scale = a.scaling * (SOFTCAP ? 1.f : LOG2E);

  // The warp group's first split. If the schedule is for rows of one length (`uniform_row`), its row is known before lengths are loaded. Its
  // queries are then loaded before any copy starts. If lengths differ after all, `Plan` computes the split.
  Split split;
  Queries queries;
  int b, h;
  const bool has_row = uniform_row(a, grid_warp_group, b, h);
  bool queries_loaded = has_row && !FOLLOWS;
  if (queries_loaded) queries.load(a, b, h, row_block, warp, lane);
  const u32 tables = shared_address(memory) + WARP_GROUPS * WARP_GROUP_BYTES;
  if constexpr (TABLES && SHARED_TABLES) fill_tables(a, tables, 0, threadIdx.x);
  const bool uniform =
      a.schedule() != WORK_RANGES && uniform_split(a, row_block, grid_warp_group, has_row, b, h, lane, split);
  queries_loaded &= uniform;
  if (uniform && thread == 0) splits[warp_group] = split;  // `next_row` advances it
  if (!uniform) {
    if (warp == 0) plan_first(a, row_block, grid_warp_group, lane, splits[warp_group], ranges[warp_group]);
    sync_warp_group(warp_group);
    split = splits[warp_group];
  }
  if constexpr (TABLES && SHARED_TABLES) {
    wait<0>();
    __syncthreads();
  }
  if (split.kind == Split::NONE) {
    if constexpr (FOLLOWS) wait_for_previous();
    if (warp == 0) TokenStore::release_unused(a, lane);
    return;
  }

  u8 *own_head = smem + warp % SLICES * HEAD_BYTES, *memory_of_warps = smem + SLICES * HEAD_BYTES;
  const WarpSums sums{reinterpret_cast<float*>(memory_of_warps)};
  const u32 rows_raw = shared_address(own_head), rows = rows_raw + (Keys::NORMALISED ? ROWS * Q_STRIDE : 0);
  const u32 stages = shared_address(memory_of_warps + warp * WARP_BYTES);
  const float* query_scales = reinterpret_cast<const float*>(own_head + Q_BYTES);
  const Exchange exchange(memory_of_warps, claims, warp_group, warp, lane);
  const int worker = warp / SLICES;
  Warp w;
  find_table(w.keys, tables, lane);
  find_table(w.values, tables + KEY_TABLE, lane);
  int tables_head = -1;  // the KV head whose codebooks are in shared memory
  while (true) {
    if (thread == 0) tiles_taken[warp_group] = 0;
    const Row row = split.row;
    const int w0 = split.segments[0], w1 = split.segments[1];
    const WorkTiles work(row, split.work_tiles[0], split.work_tiles[1]);
    const int window_workers = workers_for_window(w1 - w0, work.count);
    const bool takes_window = worker < window_workers;
    const Window window{a, row, w0 + worker, takes_window ? w1 : 0, window_workers, lane, stages, exchange};
    // Workers without window segments take the first tiles. Of the others, worker 0 has the most segments, so it takes the last of them.
    const int first_tile = takes_window ? WORKERS - 1 - worker : worker - window_workers;
    const TokenStore token(split, row_block, warp);
    token.begin(due_pages, warp_group, thread);

    // start the copies, and write the queries to where products read them
    if (queries_loaded) queries.settle();
    else if constexpr (!FOLLOWS) queries.load(a, row.b, row.h, row_block, warp, lane);
    Pages pages(a, row, work, &tiles_taken[warp_group], lane, exchange);
    if (takes_window) transform_chunk(a, row, w0 + worker, w1, window_workers, lane);
    const bool reload_tables = TABLES && !SHARED_TABLES && tables_head != row.h;
    if (reload_tables) {
      fill_tables(a, tables, row.h, thread);
      tables_head = row.h;
    }
    if constexpr (FOLLOWS)
      if (takes_window) wait_for_previous();
    if (takes_window) window.start();
    else pages.start(w, first_tile, stages);
    if constexpr (FOLLOWS) {
      wait_for_previous();
      queries.load(a, row.b, row.h, row_block, warp, lane);
    }
    if (!queries_loaded) queries.settle();
    queries_loaded = false;
    queries.put(a, smem, row.h, warp, lane);
    if (reload_tables) wait<0>();
    BARRIER(queries_ready, sync_warp_group(warp_group));

    token.store(a, row, due_pages, warp_group, warp, lane);
    w.begin();
    give_record(w.values, a.tables[1], row.h);
    w.keys.begin(rows, query_scales, query_scales + ROWS, scale, lane);
    w.load_score_bias(a, row, row_block, scale, lane);
    if (takes_window) {
      window.attend(w, row_block, rows_raw, scale);
      enter_pages(w.values, w.o, lane);
      w.rescale_for_pages();
      if constexpr (Order<Values>::OWN) w.reorder(sums.memory + warp * WarpSums::STRIDE, lane);
      pages.start(w, first_tile, stages);
    }
    pages.attend(w, rows, stages, a.softcap);
    leave_pages(w.values, w.o, lane);

    // merge the results of the warps, then those of the row's warp groups
    __syncwarp();
    sums.put(w, warp, lane);
    BARRIER(sums_ready, sync_warp_group(warp_group));
    const i64 r = (i64)row.b * a.heads + row.h, results = a.warp_groups + (i64)a.batch * a.heads;
    const int first = split.warp_groups[0], last = split.warp_groups[1];
    float* partial = a.partial + (row_block * results + r) * PARTIAL_FLOATS;  // + c * PARTIAL_FLOATS: of warp group c
    const Target target{row.b, row.h, row_block * ROWS, real_rows};
    sums.merge(a, target, first == last, partial + (i64)grid_warp_group * PARTIAL_FLOATS, thread);
    if (first != last) {
      int* counter = a.counters + row_block * a.batch * a.heads + r;
      if (last_of_row(counter, last - first, is_last[warp_group], thread, warp_group)) {
        merge_warp_groups(a, target, partial, first, last, warp, lane);
        if (thread == 0) *counter = 0;
      }
    }

    token.pack(a, due_pages, r, thread, warp_group, smem);
    if (split.last) return;
    if (split.kind == Split::WHOLE_ROWS) {
      if (thread == 0) next_row(a, splits[warp_group]);
    } else if (warp == 0) Plan(a, row_block, ranges[warp_group], lane).next(splits[warp_group], ranges[warp_group]);
    sync_warp_group(warp_group);
    split = splits[warp_group];
  }
}
