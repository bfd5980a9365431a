// Attention of a chunk's queries to everything a layer stores and, causally, to the chunk itself: `reference.attend`.
//
// One launch. The work of all rows (sequence x KV head), in bytes, is cut into equal shares, one a block of threads; a share may
// end inside a row and begin inside another. The warps of a block take pages of a row in turn, then blocks of its window. The last
// block to finish a row merges what the others left in memory.
//
// q k^T and p v are computed with the stored tokens as left operand of m16n8k16, and query rows (heads x tokens) as its eight
// columns: lane 4 g + t holds columns 2 t and 2 t + 1 of every accumulator.
#include "common.cuh"
#include "affine.cuh"
#include "dense.cuh"

using Keys = KEY_FORMAT;
using Values = VALUE_FORMAT;

constexpr int UNIT = PAGE < 128 ? PAGE : 128;          // tokens that a warp takes at a time
constexpr int PIECES = UNIT / PT;                      // pieces of a unit
constexpr int TILES = PT / 16;
constexpr int Q_STRIDE = DK * 2 + 16;                  // bytes; padded against bank conflicts
constexpr int Q_BYTES = (Keys::NORMALISED ? 2 : 1) * ROWS * Q_STRIDE;
constexpr int FLOATS = ROWS * (1 + Keys::GROUPS);      // sizes of the rows, and sums over groups of channels
constexpr int HEAD_BYTES = (Q_BYTES + FLOATS * 4 + 127) / 128 * 128;
constexpr int RING_BYTES = RING * (Keys::SLOT + Values::SLOT);
constexpr int WINDOW_BYTES = Dense<DK>::BLOCK + Dense<DV>::BLOCK;
constexpr int MERGE_BYTES = ROWS * (DV + 2) * 4;       // of a warp
constexpr int MOST = RING_BYTES > WINDOW_BYTES ? RING_BYTES : WINDOW_BYTES;
constexpr int WARP_BYTES = ((MOST > MERGE_BYTES ? MOST : MERGE_BYTES) + 127) / 128 * 128;
constexpr int SLOT_FLOATS = ROWS * (DV + 2);           // of a partial result in memory
constexpr int UNIT_COST = (UNIT / PT * (Keys::SLOT + Values::SLOT) + 255) / 256;
constexpr int BLOCK_COST = WINDOW_BYTES / 256 * 5 / 4; // of 32 tokens of the window, which are copied less evenly
constexpr float GROWTH = 8.f;                          // the maximum is renewed when a score exceeds it by so many powers of two

extern "C" __device__ int shared_bytes = HEAD_BYTES + WARPS * WARP_BYTES;

// A row's share of work, and where its tokens stand.
struct Row {
  int b, h, length, paged, units, sinks, tail, chunk, blocks;
  __device__ __forceinline__ void count(const Args& a, int row_block) {
    length = a.length[b * a.heads + h];
    paged = a.paged[b * a.heads + h];
    units = (paged + UNIT - 1) / UNIT;
    sinks = min(length, a.sink);
    tail = max(length - a.sink, 0) - paged;
    chunk = (min((row_block + 1) * ROWS, a.groups * a.tokens) - 1) / a.groups + 1;
    blocks = (sinks + tail + chunk + 31) / 32;
  }
  __device__ __forceinline__ u32 cost() const { return units * UNIT_COST + blocks * BLOCK_COST; }
};

struct Warp {
  float o[DV / 16][NT][4];
  float m[NT][2], l[NT][2];
  Keys keys;
  Values values;

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int k = 0; k < DV / 16; k++) o[k][n][0] = o[k][n][1] = o[k][n][2] = o[k][n][3] = 0.f;
      m[n][0] = m[n][1] = LOWEST; l[n][0] = l[n][1] = 0.f;
    }
    values.begin();
  }

  // Scores of T tiles, in powers of two, become exponents relative to a maximum that is renewed only where they outgrow it.
  template <int T> __device__ __forceinline__ void subtract_maximum(float (*s)[NT][4]) {
    bool grew = false;
    float most[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float x = fmaxf(s[0][n][e], s[0][n][e + 2]);
#pragma unroll
        for (int k = 1; k < T; k++) x = fmaxf(x, fmaxf(s[k][n][e], s[k][n][e + 2]));
        most[n][e] = x;
        grew |= x > m[n][e] + GROWTH;
      }
    if (__any_sync(~0u, grew)) {
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float x = fmaxf(m[n][e], max_rows(most[n][e])), a = ex2(m[n][e] - x);
          m[n][e] = x; l[n][e] *= a;
          values.decay(n, e, a);
#pragma unroll
          for (int k = 0; k < DV / 16; k++) { o[k][n][e] *= a; o[k][n][e + 2] *= a; }
        }
    }
#pragma unroll
    for (int k = 0; k < T; k++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[k][n][i] -= m[n][i & 1];
  }

  // score: true one times log2(e), or true one where there is a cap
  static __device__ __forceinline__ float capped(float x, float cap) {
    if constexpr (SOFTCAP) return (cap * LOG2E) * (1.f - 2.f * __fdividef(1.f, 1.f + ex2(x * (2.f * LOG2E / cap))));
    else return x;
  }
};

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

// The blocks of 32 tokens w0 + first, w0 + first + WARPS, ... of a row's window: its sink, tail and chunk, one behind the other.
__device__ __forceinline__ void attend_window(Warp& w, const Args& a, const Row& row, int row_block, int w0, int w1, int lane, u32 rows, u32 space, float scale) {
  const int g = lane >> 2, t = lane & 3;
  const i64 bh = (i64)row.b * a.heads + row.h;
  const int stored = row.sinks + row.tail;
  const int oldest = a.tail ? row.paged % a.tail - row.sinks : 0;  // slot of the tail's first token, less its number
  // which: 0 keys, 1 values
  auto locate = [&](int which, int i, bool& keep) -> const u8* {
    const int d = 2 * (which ? DV : DK);
    keep = true;
    if (i < row.sinks) return (which ? a.sink_v : a.sink_k) + (bh * a.sink + i) * d;
    if (i < stored) {
      const int slot = oldest + i;
      return (which ? a.tail_v : a.tail_k) + (bh * a.tail + (slot < a.tail ? slot : slot - a.tail)) * d;
    }
    const int c = i - stored;
    keep = c < row.chunk && (!HAS_MASK || a.mask[row.b * a.mask_b + c * a.mask_s]);
    const i64 at = which ? row.b * a.v_b + row.h * a.v_h + (keep ? c : 0) * a.v_s : row.b * a.k_b + row.h * a.k_h + (keep ? c : 0) * a.k_s;
    return (which ? a.v : a.k) + 2 * at;
  };
  auto copy_keys = [&](int blk) { Dense<DK>::copy(space, [&](int j, bool& keep) { return locate(0, 32 * blk + 4 * g + j, keep); }, lane); };
  auto copy_values = [&](int blk) { Dense<DV>::copy(space + Dense<DK>::BLOCK, [&](int j, bool& keep) { return locate(1, 32 * blk + 4 * g + j, keep); }, lane); };
  if (w0 >= w1) return;
  int query[NT][2];                                       // token of each column's query
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) query[n][e] = (row_block * ROWS + 8 * n + 2 * t + e) / a.groups;
  copy_keys(w0); commit();
  copy_values(w0); commit();
  for (int blk = w0; blk < w1; blk += WARPS) {
    const bool more = blk + WARPS < w1;
    float s[2][NT][4];
    wait<1>(); __syncwarp();
    Dense<DK>::scores(s, space, rows, lane);
    __syncwarp();
    if (more) copy_keys(blk + WARPS);
    commit();
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int c = 32 * blk + 4 * g + j - stored;        // token of the chunk
      const bool keep = c < row.chunk && (!HAS_MASK || c < 0 || a.mask[row.b * a.mask_b + c * a.mask_s]);
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[j >> 1][n][2 * (j & 1) + e];
          x = keep && c <= query[n][e] ? Warp::capped(x * scale, a.softcap) : -INF;
        }
    }
    w.subtract_maximum<2>(s);
    wait<1>(); __syncwarp();
    Dense<DV>::add(w.o, w.l, s, space + Dense<DK>::BLOCK, lane);
    __syncwarp();
    if (more) copy_values(blk + WARPS);
    commit();
  }
  wait<0>(); __syncwarp();
}

// Queries into shared memory: as they are, and where keys are integers normalised, in fp16, with sizes and sums.
__device__ __forceinline__ void load_queries(const Args& a, const Row& row, int row_block, u8* head, int warp, int lane) {
  float* size = reinterpret_cast<float*>(head + Q_BYTES);
  const int rows = a.groups * a.tokens;
  for (int i = warp; i < ROWS; i += WARPS) {
    const int r = row_block * ROWS + i;
    const u32* source = nullptr;
    if (r < rows) source = reinterpret_cast<const u32*>(a.q + 2 * (row.b * a.q_b + (row.h * a.groups + r % a.groups) * a.q_h + r / a.groups * a.q_s));
    u32* target = reinterpret_cast<u32*>(head + i * Q_STRIDE);
    u32 x[(DK + 63) / 64];
    float most = 0.f;
#pragma unroll
    for (int k = 0; k < (DK + 63) / 64; k++) {
      const int pair = k * 32 + lane;
      x[k] = source && pair < DK / 2 ? source[pair] : 0u;
      if (pair < DK / 2) target[pair] = x[k];
      most = fmaxf(most, fmaxf(fabsf(to_float(x[k] & 0xffff)), fabsf(to_float(x[k] >> 16))));
    }
    if constexpr (Keys::NORMALISED) {
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
      const u32 exponent = min(max((__float_as_uint(most) >> 23) + 1, 2u), 252u);  // the next power of two
      const float inverse = __uint_as_float((254 - exponent) << 23);
      float sum[Keys::GROUPS] = {};
#pragma unroll
      for (int k = 0; k < (DK + 63) / 64; k++) {
        const int pair = k * 32 + lane;
        const float low = to_float(x[k] & 0xffff) * inverse, high = to_float(x[k] >> 16) * inverse;
        if (pair < DK / 2) target[ROWS * Q_STRIDE / 4 + pair] = pack_half(low, high);
#pragma unroll
        for (int j = 0; j < Keys::GROUPS; j++) sum[j] += 2 * pair / (DK / Keys::GROUPS) == j ? low + high : 0.f;
      }
#pragma unroll
      for (int j = 0; j < Keys::GROUPS; j++) {
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) sum[j] += __shfl_xor_sync(~0u, sum[j], d);
        if (lane == 0) size[ROWS + i * Keys::GROUPS + j] = sum[j];
      }
      if (lane == 0) size[i] = __uint_as_float(exponent << 23);
    }
  }
}

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

extern "C" __global__ void __launch_bounds__(WARPS * 32, MINB) attend(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) u8 smem[];
  __shared__ int last;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int row_block = blockIdx.y, real = min(a.groups * a.tokens - row_block * ROWS, ROWS);
  const float scale = a.scaling * (SOFTCAP ? 1.f : LOG2E);

  // this block's share of the work: cost from `at` to `stop` of all rows together, in units of 256 bytes
  u32 total = 0;
  for (int b0 = 0; b0 < a.batch; b0 += 32) {
    Row row; row.b = b0 + lane; row.h = 0;
    u32 cost = 0;
    if (row.b < a.batch) { row.count(a, row_block); cost = row.cost(); }
    total += __reduce_add_sync(~0u, cost) * a.heads;
  }
  const u32 blocks = min(gridDim.x, max(total / (WARPS * UNIT_COST), 1u));
  if (blockIdx.x >= blocks) return;
  // rows of one length divide evenly where the grid is a multiple of their number: shares then end where rows do
  u32 at = (u64)total * blockIdx.x / blocks;
  const u32 stop = (u64)total * (blockIdx.x + 1) / blocks;
  auto owner = [&](u32 x) { return (u32)(((u64)(x + 1) * blocks - 1) / total); };

  Row row; row.b = 0;
  u32 start = 0, cost = 0;                                // of the current row
  for (int b0 = 0; b0 < a.batch; b0 += 32) {              // the sequence in which the share begins
    Row mine; mine.b = b0 + lane; mine.h = 0;
    u32 own = 0;
    if (mine.b < a.batch) { mine.count(a, row_block); own = mine.cost() * a.heads; }
    u32 before = own;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) { const u32 x = __shfl_up_sync(~0u, before, d); if (lane >= d) before += x; }
    const u32 behind = __ballot_sync(~0u, start + before > at);
    if (behind) {
      const int first = __ffs(behind) - 1;
      start += __shfl_sync(~0u, before - own, first);
      row.b = b0 + first;
      break;
    }
    start += __shfl_sync(~0u, before, 31);
  }
  row.h = 0; row.count(a, row_block); cost = row.cost();
  row.h = (at - start) / cost; start += cost * row.h;

  float* merge = reinterpret_cast<float*>(smem + HEAD_BYTES);
  const u32 rows_raw = shared_address(smem), rows = rows_raw + (Keys::NORMALISED ? ROWS * Q_STRIDE : 0);
  const u32 ring = shared_address(smem + HEAD_BYTES + warp * WARP_BYTES);
  const float* size = reinterpret_cast<const float*>(smem + Q_BYTES);
  Warp w;
  while (at < stop) {
    row.count(a, row_block); cost = row.cost();
    const int low = at - start, high = min(stop - start, cost), packed = row.units * UNIT_COST;
    auto index = [](int x, int c, int most) { return x <= 0 ? 0 : min((x + c - 1) / c, most); };
    const int u0 = index(low, UNIT_COST, row.units), u1 = index(high, UNIT_COST, row.units);
    const int w0 = index(low - packed, BLOCK_COST, row.blocks), w1 = index(high - packed, BLOCK_COST, row.blocks);
    __syncthreads();
    Pages pages;
    pages.start(w, a, row, u0, u1, warp, lane, ring);
    load_queries(a, row, row_block, smem, warp, lane);
    __syncthreads();
    w.begin();
    w.keys.begin(rows, size, size + ROWS, scale, lane);
    pages.attend(w, rows, a.softcap);
    w.values.finish(w.o);
    const int turn = (u1 - u0) % WARPS;                   // the warp whose turn it is next
    attend_window(w, a, row, row_block, w0 + (warp - turn + WARPS) % WARPS, w1, lane, rows_raw, ring, scale);

    // the warps of the block
    __syncthreads();
    float *mine = merge + warp * (WARP_BYTES / 4), *mine_ml = mine + ROWS * DV;
#pragma unroll
    for (int n = 0; n < NT; n++) {
      w.l[n][0] = sum_rows(w.l[n][0]); w.l[n][1] = sum_rows(w.l[n][1]);
#pragma unroll
      for (int k = 0; k < DV / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) mine[(8 * n + 2 * t + (i & 1)) * DV + channel_of<DV>(k, i >> 1, g)] = w.o[k][n][i];
      if (g == 0)
#pragma unroll
        for (int e = 0; e < 2; e++) { mine_ml[8 * n + 2 * t + e] = w.m[n][e]; mine_ml[ROWS + 8 * n + 2 * t + e] = w.l[n][e]; }
    }
    __syncthreads();
    const i64 r = (i64)row.b * a.heads + row.h;
    const int first = owner(start), final = owner(start + cost - 1);  // the blocks of threads that share the row
    const i64 slots = gridDim.x + (i64)a.batch * a.heads;
    float* partial = a.partial + (row_block * slots + r) * SLOT_FLOATS;  // of block c of the grid: + c * SLOT_FLOATS
    for (int x = threadIdx.x; x < real * DV; x += WARPS * 32) {
      const int i = x / DV;
      float m = LOWEST, l = 0.f, o = 0.f;
#pragma unroll
      for (int k = 0; k < WARPS; k++) m = fmaxf(m, merge[k * (WARP_BYTES / 4) + ROWS * DV + i]);
#pragma unroll
      for (int k = 0; k < WARPS; k++) {
        const float* other = merge + k * (WARP_BYTES / 4);
        const float f = ex2(other[ROWS * DV + i] - m);
        l += f * other[ROWS * DV + ROWS + i]; o += f * other[x];
      }
      if (first == final) store(a, row.b, row.h, row_block * ROWS + i, x % DV, o, l, m);
      else {
        float* slot = partial + (i64)blockIdx.x * SLOT_FLOATS;
        slot[x] = o;
        if (x % DV == 0) { slot[ROWS * DV + i] = m; slot[ROWS * DV + ROWS + i] = l; }
      }
    }
    if (first != final) {  // the blocks of the grid
      __threadfence();
      __syncthreads();
      int* counter = a.counters + row_block * a.batch * a.heads + r;
      if (threadIdx.x == 0) last = atomicAdd(counter, 1) == final - first;
      __syncthreads();
      if (last) {
        __threadfence();
        for (int i = warp; i < real; i += WARPS) {
          float m = LOWEST, l = 0.f;
          for (int c = first + lane; c <= final; c += 32) m = fmaxf(m, __ldcg(partial + (i64)c * SLOT_FLOATS + ROWS * DV + i));
#pragma unroll
          for (int d = 1; d < 32; d <<= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
          float o[(DV + 31) / 32] = {};
#pragma unroll 8
          for (int c = first; c <= final; c++) {
            const float* slot = partial + (i64)c * SLOT_FLOATS;
            const float f = ex2(__ldcg(slot + ROWS * DV + i) - m);
            l += f * __ldcg(slot + ROWS * DV + ROWS + i);
#pragma unroll
            for (int k = 0; k < (DV + 31) / 32; k++)
              if (DV % 32 == 0 || k * 32 + lane < DV) o[k] += f * __ldcg(slot + i * DV + k * 32 + lane);
          }
#pragma unroll
          for (int k = 0; k < (DV + 31) / 32; k++)
            if (DV % 32 == 0 || k * 32 + lane < DV) store(a, row.b, row.h, row_block * ROWS + i, k * 32 + lane, o[k], l, m);
        }
        if (threadIdx.x == 0) *counter = 0;
      }
    }
    at = start + cost; start = at;
    if (++row.h == a.heads) { row.h = 0; row.b++; }
  }
}
