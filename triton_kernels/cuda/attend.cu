// Attention of a chunk's queries to everything a layer stores and, causally, to the chunk itself: `reference.attend`; with TRANSFORMED,
// queries and the chunk's keys are transformed here (`reference.attend` does); with FUSED, a chunk of one token is stored too.
//
// One launch, one block of threads a multiprocessor. The work of all rows (sequence x KV head), in bytes, is cut into equal shares, one
// a team of warps; a share may end inside a row and begin inside another. A team's warps take units of a row's pages, each the
// next one when it is done, after a few of them have taken the window. Teams alternate in the order of warps, because
// older warps are served first and run ahead. The last team to finish a row merges what the others left in memory.
//
// q k^T and p v are computed with the stored tokens as left operand of m16n8k16, and query rows (heads x tokens) as its eight
// columns: lane 4 g + t holds columns 2 t and 2 t + 1 of every accumulator.
#include "warp.cuh"
#include "pages.cuh"
#include "window.cuh"
#include "plan.cuh"
#include "crew.cuh"
#if FUSED
#include "store_in_attend.cuh"

struct StepArgs : Args {
  AppendArgs store;
  int* arrived;                     // teams that read no counter any more, zero before and after
};
#else
using StepArgs = Args;
#endif
#if TRANSFORMED
#include "rotate.cuh"

// The chunk's keys that lie in a warp's blocks of a row's window, transformed: from where they came to where the window looks for
// them, and where storing finds them afterwards. Before the warp copies any of them.
__device__ __forceinline__ void transform_chunk(const Args& a, const Row& row, int first, int stop, int stride, int lane) {
  const int stored = row.sinks + row.tail;
  for (int block = first; block < stop; block += stride)
    for (int c = max(32 * block - stored, 0); c < min(32 * block + 32 - stored, row.chunk); c++) {
      const u8* from = a.raw_k + 2 * (row.b * a.raw_b + row.h * a.raw_h + c * a.raw_s);
      u8* to = const_cast<u8*>(a.k) + 2 * (row.b * a.k_b + row.h * a.k_h + c * a.k_s);
      transform_token<DK>(from, to, a.k_scale + row.h * a.scale_h, lane);
    }
  __syncwarp();
}
#endif

extern "C" __device__ int shared_bytes = TEAMS * TEAM_BYTES + TABLES, argument_bytes = sizeof(StepArgs);
static_assert(sizeof(StepArgs) == ARGUMENT_BYTES, "arguments.py declares other fields");
static_assert(!TABLES || TEAMS == 1 || SHARED_TABLES, "a block has one codebook a side");

// Codebooks of a KV head, from parameters to shared memory.
template <class F> __device__ __forceinline__ void fill_table(u32 at, const Parameter& x, int h, int thread) {
  if constexpr (TableBytes<F>::value > 0) F::fill(at, x.data + h * x.stride, thread, TEAMS * WARPS * 32);
}
template <class F> __device__ __forceinline__ void find_table(F& format, u32 at, int lane) {
  if constexpr (TableBytes<F>::value > 0) format.find(at, lane);
}

// The queries a warp brings into shared memory: as they are, and where keys are integers normalised, in fp16, with sizes and sums.
struct Queries {
  static constexpr int EACH = (ROWS + WARPS - 1) / WARPS, WORDS = (DK + 63) / 64;
  u32 x[EACH][WORDS];
  float most[EACH];                                       // largest magnitude of the lane's numbers
  typename FoldOf<Keys>::Type fold;

  __device__ __forceinline__ void load(const Args& a, int b, int h, int row_block, int warp, int lane) {
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int i = warp + j * WARPS, r = SPREAD ? i / 2 : row_block * ROWS + i;
      const bool real = i < ROWS && r < a.groups * a.tokens && !(SPREAD && (i & 1));
      const int token = real ? (int)__fdividef(r + 0.5f, (float)a.groups) : 0, head = real ? r - token * a.groups : 0;
      const u32* source = reinterpret_cast<const u32*>(a.q + 2 * (b * a.q_b + (h * a.groups + head) * a.q_h + token * a.q_s));
#pragma unroll
      for (int k = 0; k < WORDS; k++) x[j][k] = real && k * 32 + lane < DK / 2 ? ask(source + k * 32 + lane) : 0u;
    }
    if constexpr (FOLDED) fold.load(a.tables[0].data + h * a.tables[0].stride, lane);
  }

  __device__ __forceinline__ void measure(int j) {
    if constexpr (FOLDED) { most[j] = fold.most(x[j]); return; }
    most[j] = 0.f;
#pragma unroll
    for (int k = 0; k < WORDS; k++) most[j] = fmaxf(most[j], fmaxf(fabsf(to_float(x[j][k] & 0xffff)), fabsf(to_float(x[j][k] >> 16))));
  }

  // The first use of what was asked for, which waits for it: ahead of copies where that is possible, because compilers let such a wait
  // take in copies that were begun before it. (A transform takes too long for that.)
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int j = 0; j < EACH; j++)
      if (!TRANSFORMED) measure(j);
  }

  // kv_head: the row's
  __device__ __forceinline__ void put(const Args& a, u8* head, int kv_head, int warp, int lane) {
    float* size = reinterpret_cast<float*>(head + Q_BYTES);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int i = warp + j * WARPS;
      if (i >= ROWS) break;
#if TRANSFORMED
      transform_row<DK>(x[j], a.q_scale + kv_head * a.scale_h, lane);
      measure(j);
#endif
      u32* target = reinterpret_cast<u32*>(head + i * Q_STRIDE);
#pragma unroll
      for (int k = 0; k < WORDS; k++) {
        const int pair = k * 32 + lane;
        if (pair < DK / 2) target[pair] = x[j][k];
      }
      if constexpr (Keys::NORMALISED)
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) most[j] = fmaxf(most[j], __shfl_xor_sync(~0u, most[j], d));
      if constexpr (FOLDED) fold.put(x[j], most[j], target + ROWS * Q_STRIDE / 4, target + 2 * ROWS * Q_STRIDE / 4, size + i, size + ROWS + i, lane);
      else if constexpr (Keys::NORMALISED) {
        // the next power of two, less the keys' LIFT
        const u32 exponent = min(max((__float_as_uint(most[j]) >> 23) + 1, 2u + Keys::LIFT), 252u) - Keys::LIFT;
        const float inverse = __uint_as_float((254 - exponent) << 23);
        float sum[Keys::GROUPS] = {};
#pragma unroll
        for (int k = 0; k < WORDS; k++) {
          const int pair = k * 32 + lane;
          const float low = to_float(x[j][k] & 0xffff) * inverse, high = to_float(x[j][k] >> 16) * inverse;
          if (pair < DK / 2) {
            target[ROWS * Q_STRIDE / 4 + pair] = pack_half(low, high);
            if constexpr (Keys::LIFT) target[2 * ROWS * Q_STRIDE / 4 + pair] = pack_half(low * (1.f / (1 << Keys::LIFT)), high * (1.f / (1 << Keys::LIFT)));
          }
#pragma unroll
          for (int c = 0; c < Keys::GROUPS; c++) sum[c] += 2 * pair / (DK / Keys::GROUPS) == c ? low + high : 0.f;
        }
#pragma unroll
        for (int c = 0; c < Keys::GROUPS; c++) {
#pragma unroll
          for (int d = 1; d < 32; d <<= 1) sum[c] += __shfl_xor_sync(~0u, sum[c], d);
          if (lane == 0) size[ROWS + i * Keys::GROUPS + c] = sum[c];
        }
        if (lane == 0) size[i] = __uint_as_float(exponent << 23);
      }
    }
  }
};

#if RESTORED
// Values are stored rotated, and the rotation is its own inverse: a row's sums, of channels 32 k + lane, rotated back.
__device__ __forceinline__ void rotate_back(float* o, int lane) {
  constexpr int WORDS = DV / 32;
  static_assert(WORDS * 32 == DV && (WORDS & WORDS - 1) == 0, "transforms.Hadamard.own_inverse");
#pragma unroll
  for (int step = 1; step < 32; step *= 2)
#pragma unroll
    for (int k = 0; k < WORDS; k++) {
      const float other = __shfl_xor_sync(~0u, o[k], step);
      o[k] = lane & step ? other - o[k] : o[k] + other;
    }
#pragma unroll
  for (int step = 1; step < WORDS; step *= 2)
#pragma unroll
    for (int k = 0; k < WORDS; k++)
      if (!(k & step)) { const float low = o[k], high = o[k + step]; o[k] = low + high; o[k + step] = low - high; }
#pragma unroll
  for (int k = 0; k < WORDS; k++) o[k] *= DV == 64 ? 0.125f : DV == 128 ? 0.08838834764831845f : 0.0625f;
}
#endif

// One output number: o and l, both relative to 2^m.
__device__ __forceinline__ void store(const Args& a, int b, int h, int r, int channel, float o, float l, float m) {
  const int head = h * a.groups + r % a.groups;
  if constexpr (SINKS) {
    const float x = (SINKS == 2 ? reinterpret_cast<const float*>(a.sinks)[head] : to_float(reinterpret_cast<const u16*>(a.sinks)[head])) * LOG2E;
    const float top = fmaxf(m, x), decay = ex2(m - top);
    l = l * decay + ex2(x - top); o *= decay;
  }
  const float value = l > 0.f ? __fdividef(o, l) : 0.f;
  const i64 at = (((i64)b * a.tokens + r / a.groups) * (a.heads * a.groups) + head) * DV + channel;
  reinterpret_cast<u16*>(a.out)[at] = (u16)pack_model(value, 0.f);
}

extern "C" __global__ void __launch_bounds__(TEAMS * WARPS * 32, 1) attend(const __grid_constant__ StepArgs a) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ int lasts[TEAMS], takens[TEAMS];
  const int team = TEAMS == 1 ? 0 : (threadIdx.x >> 5) % TEAMS, warp = (threadIdx.x >> 5) / TEAMS, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int thread = warp * 32 + lane, here = blockIdx.x * TEAMS + team;  // of the team; of all teams
  u8* smem = memory + team * TEAM_BYTES;
  int &last = lasts[team], &taken = takens[team];         // taken: see Pages
#if FUSED
  __shared__ Due dues[TEAMS];
  static_assert(SPACE <= TEAM_BYTES, "what packing needs");
#endif
  const int row_block = blockIdx.y, real = min(a.groups * a.tokens - row_block * ROWS, ROWS);
  const float scale = a.scaling * (SOFTCAP ? 1.f : LOG2E);

  __shared__ Part parts[TEAMS];
  __shared__ Share shares[TEAMS];
  Part part;
  Queries queries;
  int b, h;
  bool asked = even_row(a, here, b, h);
  if (asked) queries.load(a, b, h, row_block, warp, lane);  // ahead of all copies, of other blocks too
  const u32 tables = shared_address(memory) + TEAMS * TEAM_BYTES;
  if constexpr (TABLES && SHARED_TABLES) {                // of all heads: by the whole block
    fill_table<Keys>(tables, a.tables[0], 0, threadIdx.x); fill_table<Values>(tables + KEY_TABLE, a.tables[1], 0, threadIdx.x);
    commit();
  }
  if (asked) asked = even_part(a, row_block, here, b, h, lane, part);
  if (!asked) {
    if (warp == 0) Plan(a, row_block, here, lane).next(parts[team], shares[team]);
    meet(team);
    part = parts[team];
  }
  if constexpr (TABLES && SHARED_TABLES) { wait<0>(); __syncthreads(); }
  if (!part.some) {
#if FUSED
    if (warp == 0) write_counters(a.store, a.arrived, leave_counters(a.arrived, lane), a.batch * a.heads, lane);
#endif
    return;
  }

  float* merge = reinterpret_cast<float*>(smem + HEAD_BYTES);
  const u32 rows_raw = shared_address(smem), rows = rows_raw + (Keys::NORMALISED ? ROWS * Q_STRIDE : 0);
  const u32 slots = shared_address(smem + HEAD_BYTES + warp * WARP_BYTES);
  const float* size = reinterpret_cast<const float*>(smem + Q_BYTES);
  Warp w;
  find_table(w.keys, tables, lane); find_table(w.values, tables + KEY_TABLE, lane);
  int books = -1;                                         // of which KV head codebooks are in shared memory
  while (true) {
    if (thread == 0) taken = 0;
    const Row row = part.row;
    const i64 r = (i64)row.b * a.heads + row.h;
    const int w0 = part.blocks[0], w1 = part.blocks[1], first = part.teams[0], final = part.teams[1];
    const Work work(row, part.units[0], part.units[1]);
    // few warps take the window, so that it does not hold up the others, and before pages, so that these even out the rest
    const int few = min(w1 - w0, max(1, min((int)__fdividef((float)(WARPS * (w1 - w0) + work.units), (float)(work.units + 1)), WARPS)));
    const bool both = warp < few;
    const Window window{a, row, w0 + warp, both ? w1 : 0, few, lane, slots};
    const int item = both ? WARPS - 1 - warp : warp - few;
#if FUSED
    const bool stores = row_block == 0 && w0 < row.blocks && w1 == row.blocks;  // has the chunk's block of the window
    if (thread == 0) dues[team].stored = -1;
    const bool leaves = warp == WARPS - 1 && part.last;
#endif
    if (asked) queries.settle(); else queries.load(a, row.b, row.h, row_block, warp, lane);
    Pages pages(a, row, work, &taken, lane);
#if TRANSFORMED
    if (both) transform_chunk(a, row, w0 + warp, w1, few, lane);
#endif
    const bool other = TABLES && !SHARED_TABLES && books != row.h;
    if (other) {
      fill_table<Keys>(tables, a.tables[0], row.h, thread); fill_table<Values>(tables + KEY_TABLE, a.tables[1], row.h, thread);
      commit();
      books = row.h;
    }
    if (both) window.start(); else pages.start(w, item, slots);
    if (!asked) queries.settle();
    asked = false;
    queries.put(a, smem, row.h, warp, lane);
    if (other) wait<0>();
    meet(team);
#if FUSED
    // by the last warp: it has neither window nor pages, where there is not enough for all
    const int before = leaves ? leave_counters(a.arrived, lane) : 0;  // its answer takes as long as the token's reads
    if (stores && warp == WARPS - 1) {
      const Due due = keep_token(a.store, row.b, row.h, row.length, row.paged, lane);
      if (lane == 0) dues[team] = due;
    }
    if (leaves) write_counters(a.store, a.arrived, before, a.batch * a.heads, lane);
#endif
    w.begin();
    give_record(w.values, a.tables[1], row.h);
    w.keys.begin(rows, size, size + ROWS, scale, lane);
    if (both) {
      window.attend(w, row_block, rows_raw, scale);
      enter_pages(w.values, w.o, lane);
      w.turn_to_pages();
      if constexpr (Order<Values>::OWN) w.reorder(merge + warp * (WARP_BYTES / 4), lane);
      pages.start(w, item, slots);
    }
    pages.attend(w, rows, slots, a.softcap);
    leave_pages(w.values, w.o, lane);

    // the warps of the team; each puts what it has where its copies were
    __syncwarp();
    float *mine = merge + warp * (WARP_BYTES / 4), *mine_ml = mine + ROWS * MERGE_STRIDE;
#pragma unroll
    for (int n = 0; n < NT; n++) {
      auto row_of = [&](int e) { return SPREAD ? t : 8 * n + 2 * t + e; };
#pragma unroll
      for (int e = 0; e < COLUMNS_USED; e++) w.l[n][e] = sum_rows(w.l[n][e]);
#pragma unroll
      for (int k = 0; k < DV / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i += EVERY) mine[row_of(i & 1) * MERGE_STRIDE + out_channel(k, i >> 1, g)] = w.o[k][n][i];
      if (g == 0)
#pragma unroll
        for (int e = 0; e < COLUMNS_USED; e++) { mine_ml[row_of(e)] = w.m[n][e]; mine_ml[ROWS + row_of(e)] = w.l[n][e]; }
    }
    meet(team);
    const i64 slots = a.teams + (i64)a.batch * a.heads;
    float* partial = a.partial + (row_block * slots + r) * SLOT_FLOATS;  // of team c: + c * SLOT_FLOATS
    // of row i and a channel: o and l, both relative to 2^m
    auto merged = [&](int i, int channel, float& m, float& l) {
      float o = 0.f;
      m = LOWEST; l = 0.f;
#pragma unroll
      for (int k = 0; k < WARPS; k++) m = fmaxf(m, merge[k * (WARP_BYTES / 4) + ROWS * MERGE_STRIDE + i]);
#pragma unroll
      for (int k = 0; k < WARPS; k++) {
        const float* other = merge + k * (WARP_BYTES / 4);
        const float f = ex2(other[ROWS * MERGE_STRIDE + i] - m);
        l += f * other[ROWS * MERGE_STRIDE + ROWS + i]; o += f * other[i * MERGE_STRIDE + channel];
      }
      return o;
    };
#if RESTORED
    if (first == final)
      for (int i = warp; i < real; i += WARPS) {
        float m, l, o[DV / 32];
#pragma unroll
        for (int k = 0; k < DV / 32; k++) o[k] = merged(i, 32 * k + lane, m, l);
        rotate_back(o, lane);
#pragma unroll
        for (int k = 0; k < DV / 32; k++) store(a, row.b, row.h, row_block * ROWS + i, 32 * k + lane, o[k], l, m);
      }
    else
#endif
    for (int x = thread; x < real * DV; x += WARPS * 32) {
      const int i = x / DV;
      float m, l;
      const float o = merged(i, x % DV, m, l);
      if (first == final) store(a, row.b, row.h, row_block * ROWS + i, x % DV, o, l, m);
      else {
        float* slot = partial + (i64)here * SLOT_FLOATS;
        slot[x] = o;
        if (x % DV == 0) { slot[ROWS * DV + i] = m; slot[ROWS * DV + ROWS + i] = l; }
      }
    }
    if (first != final) {  // the teams
      meet(team);
      int* counter = a.counters + row_block * a.batch * a.heads + r;
      if (thread == 0) {
        __threadfence();                                  // what the whole team wrote comes first: it was written before the barrier
        last = atomicAdd(counter, 1) == final - first;
      }
      meet(team);
      if (last) {
        __threadfence();
        for (int i = warp; i < real; i += WARPS) {
          constexpr int BATCH = 8, WORDS = (DV + 31) / 32;   // loads in flight, and a lane's channels
          float m = LOWEST, l = 0.f, o[WORDS] = {};
          for (int c0 = first; c0 <= final; c0 += BATCH) {
            float ms[BATCH], ls[BATCH], os[BATCH][WORDS], top = m;
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
              const bool there = c0 + j <= final;
              const float* slot = partial + (i64)(there ? c0 + j : final) * SLOT_FLOATS;
              ms[j] = there ? __ldcg(slot + ROWS * DV + i) : -INF; ls[j] = __ldcg(slot + ROWS * DV + ROWS + i);
#pragma unroll
              for (int k = 0; k < WORDS; k++) os[j][k] = DV % 32 == 0 || k * 32 + lane < DV ? __ldcg(slot + i * DV + k * 32 + lane) : 0.f;
            }
#pragma unroll
            for (int j = 0; j < BATCH; j++) top = fmaxf(top, ms[j]);
            const float decay = ex2(m - top);
            m = top; l *= decay;
#pragma unroll
            for (int k = 0; k < WORDS; k++) o[k] *= decay;
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
              const float f = ex2(ms[j] - m);
              l += f * ls[j];
#pragma unroll
              for (int k = 0; k < WORDS; k++) o[k] += f * os[j][k];
            }
          }
#if RESTORED
          rotate_back(o, lane);
#endif
#pragma unroll
          for (int k = 0; k < (DV + 31) / 32; k++)
            if (DV % 32 == 0 || k * 32 + lane < DV) store(a, row.b, row.h, row_block * ROWS + i, k * 32 + lane, o[k], l, m);
        }
        if (thread == 0) *counter = 0;
      }
    }
#if FUSED
    if (const Due due = dues[team]; due.stored >= 0) pack_token(a.store, r, due.stored, due.before, thread, team, smem);
#endif
    if (part.last) return;
    if (warp == 0) Plan(a, row_block, shares[team], lane).next(parts[team], shares[team]);
    meet(team);
    part = parts[team];
  }
}
