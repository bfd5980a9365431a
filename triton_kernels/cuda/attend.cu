// Attention of a chunk's queries to everything a layer stores and, causally, to the chunk itself: `reference.attend`.
//
// One launch. The work of all rows (sequence x KV head), in bytes, is cut into equal shares, one a block of threads; a share may
// end inside a row and begin inside another. The warps of a block take pages of a row in turn, then blocks of its window. The last
// block to finish a row merges what the others left in memory.
//
// q k^T and p v are computed with the stored tokens as left operand of m16n8k16, and query rows (heads x tokens) as its eight
// columns: lane 4 g + t holds columns 2 t and 2 t + 1 of every accumulator.
#include "warp.cuh"
#include "pages.cuh"
#include "window.cuh"

extern "C" __device__ int shared_bytes = HEAD_BYTES + WARPS * WARP_BYTES;

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
    if constexpr (TURNED) wait_for_turn();                // nothing before this needs what it computes
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
