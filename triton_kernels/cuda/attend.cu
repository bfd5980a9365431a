// Attention of a chunk's queries to everything a layer stores and, causally, to the chunk itself: `reference.attend`; with TRANSFORMED,
// queries and the chunk's keys are transformed here (`reference.attend` does); with FUSED, a chunk of one token is stored too.
//
// One launch, one block of threads for each multiprocessor. The work of all rows (sequence x KV head), counted in bytes, is cut into equal
// shares, one for each team of warps. A share may begin and end inside rows. First a few of the team's warps take the row's window. Then
// every warp takes units of the row's pages: the next one whenever it has finished one. (In heads of more than 256 channels two warps do
// so together, and such a pair is meant by "worker": `exchange.cuh`.) Warps of different teams alternate, because the
// scheduler serves older warps first and they run ahead. The last team to finish a row merges the results that other teams left in memory.
//
// q k^T and p v are computed by m16n8k16. Its left operand is the stored tokens, its eight columns are query rows (heads x tokens).
// Lane 4 g + t holds columns 2 t and 2 t + 1 of every accumulator.
#include "warp.cuh"
#include "exchange.cuh"
#include "pages.cuh"
#include "window.cuh"
#include "plan.cuh"
#include "crew.cuh"
#include "queries.cuh"
#include "outputs.cuh"
#include "store_in_attend.cuh"

extern "C" __device__ int shared_bytes = TEAMS * TEAM_BYTES + TABLES, argument_bytes = sizeof(StepArgs);
static_assert(sizeof(StepArgs) == ARGUMENT_BYTES, "arguments.py declares other fields");
static_assert(!TABLES || TEAMS == 1 || SHARED_TABLES, "a block has one codebook a side");

// Copies the codebooks of a KV head from the parameters to shared memory.
template <class F> __device__ __forceinline__ void fill_table(u32 at, const Parameter& x, int h, int thread) {
  if constexpr (TableBytes<F>::value > 0) F::fill(at, x.data + h * x.stride, thread, TEAMS * WARPS * 32);
}
template <class F> __device__ __forceinline__ void find_table(F& format, u32 at, int lane) {
  if constexpr (TableBytes<F>::value > 0) format.find(at, lane);
}

// Begins to copy codebooks: a team copies those of its KV head, or a block those that serve all heads.
__device__ __forceinline__ void fill_tables(const Args& a, u32 tables, int h, int thread) {
  fill_table<Keys>(tables, a.tables[0], h, thread);
  fill_table<Values>(tables + KEY_TABLE, a.tables[1], h, thread);
  commit();
}

// How many of a team's workers take the row's window: few, so that the others are not held up. They take it before their pages, because
// taking pages one by one evens out the time.
__device__ __forceinline__ int workers_for_window(int blocks, int units) {
  return min(blocks, max(1, min((int)__fdividef((float)(WORKERS * blocks + units), (float)(units + 1)), WORKERS)));
}

extern "C" __global__ void __launch_bounds__(TEAMS * WARPS * 32, 1) attend(const __grid_constant__ StepArgs a) {
  DYNAMIC_SHARED(memory);
  __shared__ int lasts[TEAMS], takens[TEAMS];  // see `last_of_row` and `Pages`
  __shared__ Due dues[DUES];
  __shared__ Part parts[TEAMS];
  __shared__ Share shares[TEAMS];
  __shared__ int claims[SLICES > 1 ? TEAMS * WORKERS : 1];  // see `Exchange`
  const int team = TEAMS == 1 ? 0 : (threadIdx.x >> 5) % TEAMS, warp = (threadIdx.x >> 5) / TEAMS,
            lane = threadIdx.x & 31;
  const int thread = warp * 32 + lane,
            here = blockIdx.x * TEAMS + team;  // index in the team; the team's index among all
  u8* smem = memory + team * TEAM_BYTES;
  const int row_block = blockIdx.y, real = min(a.groups * a.tokens - row_block * ROWS, ROWS);
  const float scale = a.scaling * (SOFTCAP ? 1.f : LOG2E);

  // the team's first part of a row. If the row is known at once, its queries are loaded before any copy begins, those of other blocks too
  Part part;
  Queries queries;
  int b, h;
  bool asked = even_row(a, here, b, h);
  if (asked) queries.load(a, b, h, row_block, warp, lane);
  const u32 tables = shared_address(memory) + TEAMS * TEAM_BYTES;
  if constexpr (TABLES && SHARED_TABLES) fill_tables(a, tables, 0, threadIdx.x);
  const bool even = a.split && even_part(a, row_block, here, asked, b, h, lane, part);
  asked &= even;
  if (even && thread == 0) parts[team] = part;  // the next row is computed from it
  if (!even) {
    if (warp == 0) Plan(a, row_block, here, lane).next(parts[team], shares[team]);
    meet(team);
    part = parts[team];
  }
  if constexpr (TABLES && SHARED_TABLES) {
    wait<0>();
    __syncthreads();
  }
  if (!part.some) {
    if (warp == 0) TokenStore::leave_unused(a, lane);
    return;
  }

  u8 *own_head = smem + warp % SLICES * HEAD_BYTES, *memory_of_warps = smem + SLICES * HEAD_BYTES;
  const WarpSums sums{reinterpret_cast<float*>(memory_of_warps)};
  const u32 rows_raw = shared_address(own_head), rows = rows_raw + (Keys::NORMALISED ? ROWS * Q_STRIDE : 0);
  const u32 slots = shared_address(memory_of_warps + warp * WARP_BYTES);
  const float* size = reinterpret_cast<const float*>(own_head + Q_BYTES);
  const Exchange exchange(memory_of_warps, claims, team, warp, lane);
  const int worker = warp / SLICES;
  Warp w;
  find_table(w.keys, tables, lane);
  find_table(w.values, tables + KEY_TABLE, lane);
  int books = -1;  // the KV head whose codebooks are in shared memory
  while (true) {
    if (thread == 0) takens[team] = 0;
    const Row row = part.row;
    const int w0 = part.blocks[0], w1 = part.blocks[1];
    const Work work(row, part.units[0], part.units[1]);
    const int few = workers_for_window(w1 - w0, work.units);
    const bool both = worker < few;
    const Window window{a, row, w0 + worker, both ? w1 : 0, few, lane, slots, exchange};
    const int item = both ? WORKERS - 1 - worker : worker - few;
    const TokenStore token(part, row_block, warp);
    token.begin(dues, team, thread);

    // begin the copies, and bring the queries to where the products read them
    if (asked) queries.settle();
    else queries.load(a, row.b, row.h, row_block, warp, lane);
    Pages pages(a, row, work, &takens[team], lane, exchange);
    if (both) transform_chunk(a, row, w0 + worker, w1, few, lane);
    const bool other = TABLES && !SHARED_TABLES && books != row.h;
    if (other) {
      fill_tables(a, tables, row.h, thread);
      books = row.h;
    }
    if (both) window.start();
    else pages.start(w, item, slots);
    if (!asked) queries.settle();
    asked = false;
    queries.put(a, smem, row.h, warp, lane);
    if (other) wait<0>();
    BARRIER(queries_ready, meet(team));

    token.keep(a, row, dues, team, warp, lane);
    w.begin();
    give_record(w.values, a.tables[1], row.h);
    w.keys.begin(rows, size, size + ROWS, scale, lane);
    w.load_lacking(a, row, row_block, scale, lane);
    if (both) {
      window.attend(w, row_block, rows_raw, scale);
      enter_pages(w.values, w.o, lane);
      w.turn_to_pages();
      if constexpr (Order<Values>::OWN) w.reorder(sums.memory + warp * WarpSums::STRIDE, lane);
      pages.start(w, item, slots);
    }
    pages.attend(w, rows, slots, a.softcap);
    leave_pages(w.values, w.o, lane);

    // merge the warps' results into the team's, and the results of the row's teams into the row's
    __syncwarp();
    sums.put(w, warp, lane);
    BARRIER(sums_ready, meet(team));
    const i64 r = (i64)row.b * a.heads + row.h, all_slots = a.teams + (i64)a.batch * a.heads;
    const int first = part.teams[0], final = part.teams[1];
    float* partial = a.partial + (row_block * all_slots + r) * SLOT_FLOATS;  // team c: + c * SLOT_FLOATS
    const Target target{row.b, row.h, row_block * ROWS, real};
    sums.merge(a, target, first == final, partial + (i64)here * SLOT_FLOATS, thread);
    if (first != final) {
      int* counter = a.counters + row_block * a.batch * a.heads + r;
      if (last_of_row(counter, final - first, lasts[team], thread, team)) {
        merge_teams(a, target, partial, first, final, warp, lane);
        if (thread == 0) *counter = 0;
      }
    }

    token.pack(a, dues, r, thread, team, smem);
    if (part.last) return;
    if (part.some == Part::WHOLE) {
      if (thread == 0) next_row(a, parts[team]);
    } else if (warp == 0) Plan(a, row_block, shares[team], lane).next(parts[team], shares[team]);
    meet(team);
    part = parts[team];
  }
}
