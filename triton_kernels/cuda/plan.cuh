// Assigns rows (sequence x KV head), and splits of them, to warp groups.
//
// The work of a row is counted in units of 256 bytes. In the general case (`WORK_RANGES`) the rows are laid end to end and cut into equal
// work ranges, one per warp group. One warp computes the group's range and publishes it to the other warps (`Plan`).
//
// If all rows have the same length, there are two cheaper schedules. With `ROW_SPLITS` each row has its own warp groups: their number is a
// multiple of the number of rows. With `WHOLE_ROWS` each warp group has its own rows: they fill the groups evenly several times. In both
// cases every warp computes its split by itself (`uniform_split`). This matters because all other work waits for the split.
#pragma once
#include "warp.cuh"

// A row with at most this many work tiles and window segments per worker gets one warp group. (With 2 a step over 1024 tokens takes 2 %
// longer on an H200.)
constexpr int SHORT = 1;

// Fixed cost of a row, for rows of different lengths: load queries, fill the pipeline, merge. Without it a warp group whose range covers
// empty rows gets dozens of them in sequence while all other groups wait. Pools of rows are padded with empty ones. (75 rows of 4700
// tokens and 53 empty ones, us on an H200: 549 with a factor of 0, 261 with 3, 189 with 6, 148 with 12; 146 without the empty rows)
constexpr u32 ROW_COST = 12 * WORK_TILE_COST / WARP_GROUPS;

// A warp group's split of a row. Bounds are pairs: first, and one past the last.
struct alignas(16) Split {
  enum Kind { NONE, ONE_ROW, WHOLE_ROWS };  // no work; one split of one row; several whole rows, of which this is one
  Row row;
  int segments[2], work_tiles[2];  // of the window and of the pages
  int warp_groups[2];              // first and last warp group that share the row
  int kind, last;                  // a `Kind`; whether this is the warp group's last split

  // The number of work tiles or window segments, of `count`, in the row's first `x` units of work. All warp groups of a row compute the same
  // bounds.
  static __device__ __forceinline__ int bound(u32 x, int count, u32 cost) {
    return x >= cost ? count : min((int)((float)x * __fdividef((float)count, (float)cost)), count);
  }
};

// The lengths of 32 sequences, one per lane.
struct Lengths {
  int base, length, paged;  // of sequence base + lane
  __device__ __forceinline__ void load(const Args& a, int first, int lane) {
    base = first;
    const bool real = base + lane < a.batch;
    length = real ? a.length[(base + lane) * a.heads] : 0;
    paged = real ? a.paged[(base + lane) * a.heads] : 0;
  }
  __device__ __forceinline__ Row row(const Args& a, int row_block, int b, int h) const {
    Row out;
    out.b = b;
    out.h = h;
    out.count(a, row_block, __shfl_sync(~0u, length, b - base), __shfl_sync(~0u, paged, b - base));
    return out;
  }
};

// The first row of a warp group under `ROW_SPLITS` and `WHOLE_ROWS`. It does not depend on lengths, so it is known before they are loaded.
// Returns whether the warp group has a row.
__device__ __forceinline__ bool uniform_row(const Args& a, int warp_group, int& b, int& h) {
  const int r = a.assignment < 0 ? warp_group * a.rows_per_warp_group()
                                 : (int)__fdividef(warp_group + 0.5f, (float)a.warp_groups_per_row());
  b = (int)__fdividef(r + 0.5f, (float)a.heads);
  h = r - b * a.heads;
  return a.assignment && b < a.batch;
}

// The warp group's split of that row. has_row: the result of `uniform_row`. Returns false if rows differ in length; all warp groups agree on
// this.
__device__ __forceinline__ bool uniform_split(const Args& a, int row_block, int warp_group, bool has_row, int b, int h,
                                              int lane, Split& out) {
  constexpr int BATCH = 4;  // loads in flight, twice
  bool same = true;
  int length = 0, paged = 0;
  for (int first = 0; first < a.batch; first += 32 * BATCH) {
    int lengths[BATCH], pageds[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      if (j && first + 32 * j >= a.batch) {
        lengths[j] = lengths[0];
        pageds[j] = pageds[0];
        continue;
      }
      const int at = min(first + 32 * j + lane, a.batch - 1) * a.heads;
      lengths[j] = a.length[at];
      pageds[j] = a.paged[at];
    }
    if (first == 0) {
      length = __shfl_sync(~0u, lengths[0], 0);
      paged = __shfl_sync(~0u, pageds[0], 0);
    }
#pragma unroll
    for (int j = 0; j < BATCH; j++) same &= lengths[j] == length && pageds[j] == paged;
  }
  out.row.b = b;
  out.row.h = h;
  out.row.count(a, row_block, length, paged);
  const u32 cost = out.row.cost();
  if (__any_sync(~0u, !same)) return false;
  const int r = b * a.heads + h;
  out.kind = has_row ? Split::ONE_ROW : Split::NONE;
  if (a.assignment < 0) {
    out.kind = has_row ? Split::WHOLE_ROWS : Split::NONE;
    out.segments[0] = out.work_tiles[0] = 0;
    out.segments[1] = out.row.segments;
    out.work_tiles[1] = out.row.work_tiles;
    out.warp_groups[0] = out.warp_groups[1] = warp_group;
    out.last = r + 1 == min((warp_group + 1) * a.rows_per_warp_group(), a.batch * a.heads);
    return true;
  }
  // one warp group if each worker has at most one work tile or window segment: then nothing is merged through global memory. Otherwise use
  // only as many warp groups as can give work to each of their workers
  const int c = warp_group - r * a.warp_groups_per_row(),
            fit = (int)__fdividef((float)cost, (float)(WORKERS * WORK_TILE_COST)) + 1;
  const int count = out.row.work_tiles + out.row.segments <= SHORT * WORKERS ? 1 : min(a.warp_groups_per_row(), fit);
  if (c >= count) out.kind = Split::NONE;
  const u32 low = __fdividef((float)cost * c, (float)count),
            high = c + 1 == count ? cost : (u32)__fdividef((float)cost * (c + 1), (float)count);
  out.segments[0] = Split::bound(low, out.row.segments, cost);
  out.segments[1] = Split::bound(high, out.row.segments, cost);
  out.work_tiles[0] = Split::bound(low, out.row.work_tiles, cost);
  out.work_tiles[1] = Split::bound(high, out.row.work_tiles, cost);
  out.warp_groups[0] = r * a.warp_groups_per_row();
  out.warp_groups[1] = out.warp_groups[0] + count - 1;
  out.last = 1;
  return true;
}

// Advances to the next of a warp group's whole rows. All rows have the same length.
__device__ __forceinline__ void next_row(const Args& a, Split& split) {
  if (++split.row.h == a.heads) {
    split.row.h = 0;
    split.row.b++;
  }
  const int r = split.row.b * a.heads + split.row.h;
  split.last = (r + 1) % a.rows_per_warp_group() == 0 || r + 1 == a.batch * a.heads;
}

// The rest of a warp group's work range: from `at` to `stop`. It is consumed row by row. (b, h) is the current row, which begins at `start`.
struct WorkRange {
  u32 total, ranges, at, stop, start;  // total: the work of all rows; ranges: number of work ranges
  int b, h;
};

// Computes a warp group's splits under `WORK_RANGES`, in one warp.
struct Plan : WorkRange {
  const Args& a;
  int row_block, lane;
  Lengths lengths;

  // The work of all heads of the lane's sequence.
  __device__ __forceinline__ u32 cost() const {
    if (lengths.base + lane >= a.batch) return 0;
    Row row;
    row.count(a, row_block, lengths.length, lengths.paged);
    return (row.cost() + ROW_COST) * a.heads;
  }

  __device__ __forceinline__ Plan(const Args& a_, int row_block_, int warp_group, int lane_)
      : a(a_), row_block(row_block_), lane(lane_) {
    total = 0;
    for (int first = (a.batch - 1) & -32; first >= 0; first -= 32) {
      lengths.load(a, first, lane);
      total += __reduce_add_sync(~0u, cost());
    }
    // use only as many warp groups as can give work to each of their workers. If rows get more than one warp group, all get the same number,
    // so that few groups have splits of two rows
    const u32 rows = a.batch * a.heads;
    ranges = min((u32)a.warp_groups, max((total - rows * ROW_COST) / (WORKERS * WORK_TILE_COST), 1u));
    if (ranges > rows && ranges < (u32)a.warp_groups) ranges = min(ranges / rows + 1, (u32)a.warp_groups / rows) * rows;
    at = stop = start = 0;
    b = h = 0;
    if (warp_group >= (int)ranges) return;
    // rows of one length divide evenly if the number of warp groups is a multiple of the number of rows: ranges then end where rows end.
    // (`each * x + rest * x / ranges` avoids the 64-bit division of `total * x`, which takes half a microsecond.)
    const u32 each = total / ranges, rest = total - each * ranges;
    const u32 x = warp_group + (lane & 1), border = each * x + rest * x / ranges;
    at = __shfl_sync(~0u, border, 0);
    stop = __shfl_sync(~0u, border, 1);
    while (true) {  // find the sequence in which the range begins
      const u32 own = cost();
      u32 prefix = own;  // inclusive prefix sum over lanes
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const u32 y = __shfl_up_sync(~0u, prefix, d);
        if (lane >= d) prefix += y;
      }
      const u32 ends_after = __ballot_sync(~0u, start + prefix > at);
      if (ends_after) {
        b = __ffs(ends_after) - 1;
        const u32 cost = __shfl_sync(~0u, own, b) / a.heads;
        start += __shfl_sync(~0u, prefix - own, b);
        h = (at - start) / cost;
        start += cost * h;
        b += lengths.base;
        return;
      }
      start += __shfl_sync(~0u, prefix, 31);
      lengths.load(a, lengths.base + 32, lane);
    }
  }
  __device__ __forceinline__ Plan(const Args& a_, int row_block_, const WorkRange& range, int lane_)
      : WorkRange(range), a(a_), row_block(row_block_), lane(lane_) {
    lengths.load(a, b & -32, lane);
  }

  // The warp group whose range contains x. The row's first warp group has its first unit of work, its last warp group the last unit.
  __device__ __forceinline__ int owner(u32 x) const {
    return __umulhi(total, ranges) ? (int)(((u64)(x + 1) * ranges - 1) / total) : (int)(((x + 1) * ranges - 1) / total);
  }

  // Writes the next row's split to shared memory and advances. All other warps have finished with the previous split.
  __device__ __forceinline__ void next(Split& out, WorkRange& left) {
    if (at >= stop) {
      if (lane == 0) out.kind = Split::NONE;
      return;
    }
    const Row row = lengths.row(a, row_block, b, h);
    const u32 cost = row.cost() + ROW_COST, low = at - start, high = min(stop - start, cost);
    // the same fraction of the row's work tiles as of its window, so that no warp group gets the whole window
    const int bound = Split::bound(lane & 1 ? high : low, lane & 2 ? row.work_tiles : row.segments, cost);
    __syncwarp();  // all lanes have read the split that is overwritten now
    if (lane < 4) (lane & 2 ? out.work_tiles : out.segments)[lane & 1] = bound;
    else if (lane < 6) out.warp_groups[lane & 1] = owner(lane & 1 ? start + cost - 1 : start);
    at = start += cost;
    if (++h == a.heads) {
      h = 0;
      b++;
    }
    if (lane == 0) {
      out.row = row;
      out.kind = Split::ONE_ROW;
      out.last = at >= stop;
      left = *this;
    }
  }
};

// The first split of a warp group. Not inlined: rows of one length need no plan, and after another kernel the instructions around it come
// from memory.
COLD void plan_first(const Args& a, int row_block, int warp_group, int lane, Split& out, WorkRange& left) {
  Plan(a, row_block, warp_group, lane).next(out, left);
}
