// Which rows a team attends to, and which parts of them.
//
// The work of all rows is counted in units of 256 bytes. The rows are laid end to end and cut into equal shares, one for each team.
// Usually one warp of the team computes the team's share and tells the other warps. There is a faster way where all rows have the same
// length, and the number of teams is a multiple of the number of rows, or the rows fill the teams evenly several times. Then every row
// has its own teams, or every team its own rows, and each warp computes its part by itself (`even_part`). Everything waits for the part.
#pragma once
#include "warp.cuh"

// One team takes the whole row if the row has at most this many units and blocks for each of the team's warps. (With two, a step over
// 1024 tokens takes 2 % longer on an H200.)
constexpr int SHORT = 1;

// What a row costs its team beside units and blocks, where rows differ in length: loading queries, filling the pipeline, merging. Without
// it, a team whose share lies in empty rows gets dozens of them, one after the other, while all other teams wait; a pool of rows is padded
// with empty ones. (75 rows of 4700 tokens and 53 empty ones, us on an H200: 549 with a factor of 0, 261 with 3, 189 with 6, 148 with 12;
// 146 without the empty rows)
constexpr u32 ROW_COST = 12 * UNIT_COST / TEAMS;

// A team's part of a row. Bounds are pairs: first, and one behind the last.
struct alignas(16) Part {
  Row row;
  int blocks[2], units[2];  // of the window and of the pages
  int teams[2];             // the first and the last team that share the row
  int some, last;           // whether the team has a part (WHOLE: whole rows, several); whether this is its last part
  static constexpr int WHOLE = 2;

  // The number of units or blocks, of `count`, that belong to the row's first `x` of work. All teams that share a row compute the same bounds.
  static __device__ __forceinline__ int bound(u32 x, int count, u32 cost) {
    return x >= cost ? count : min((int)((float)x * __fdividef((float)count, (float)cost)), count);
  }
};

// The lengths of 32 sequences, one in each lane.
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

// The first row of a team where rows are dealt out evenly: each row has `a.split` teams of its own, or each team has -`a.split` whole rows.
// This needs no lengths, so it is known before they are loaded.
__device__ __forceinline__ bool even_row(const Args& a, int team, int& b, int& h) {
  const int r = a.split < 0 ? team * -a.split : (int)__fdividef(team + 0.5f, (float)a.split);
  b = (int)__fdividef(r + 0.5f, (float)a.heads);
  h = r - b * a.heads;
  return a.split && b < a.batch;
}

// The team's part of that row (`some`: whether it has one). Returns false where the rows differ in length; all teams compute the same answer.
__device__ __forceinline__ bool even_part(const Args& a, int row_block, int team, bool some, int b, int h, int lane,
                                          Part& out) {
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
  out.some = some;
  if (a.split < 0) {
    out.some = some ? Part::WHOLE : 0;
    out.blocks[0] = out.units[0] = 0;
    out.blocks[1] = out.row.blocks;
    out.units[1] = out.row.units;
    out.teams[0] = out.teams[1] = team;
    out.last = r + 1 == min((team + 1) * -a.split, a.batch * a.heads);
    return true;
  }
  // one team if each of its warps has at most one unit or block: then nothing is merged through memory. Otherwise as many teams as have
  // work for every warp
  const int c = team - r * a.split, fit = (int)__fdividef((float)cost, (float)(WORKERS * UNIT_COST)) + 1;
  const int count = out.row.units + out.row.blocks <= SHORT * WORKERS ? 1 : min(a.split, fit);
  if (c >= count) out.some = 0;
  const u32 low = __fdividef((float)cost * c, (float)count),
            high = c + 1 == count ? cost : (u32)__fdividef((float)cost * (c + 1), (float)count);
  out.blocks[0] = Part::bound(low, out.row.blocks, cost);
  out.blocks[1] = Part::bound(high, out.row.blocks, cost);
  out.units[0] = Part::bound(low, out.row.units, cost);
  out.units[1] = Part::bound(high, out.row.units, cost);
  out.teams[0] = r * a.split;
  out.teams[1] = out.teams[0] + count - 1;
  out.last = 1;
  return true;
}

// Moves on to the next of a team's whole rows. All rows have the same length.
__device__ __forceinline__ void next_row(const Args& a, Part& part) {
  if (++part.row.h == a.heads) {
    part.row.h = 0;
    part.row.b++;
  }
  const int r = part.row.b * a.heads + part.row.h;
  part.last = (r + 1) % -a.split == 0 || r + 1 == a.batch * a.heads;
}

// The rest of a team's share, which advances from row to row: from `at` to `stop`. Row (b, h) is the present one, and begins at `start`.
struct Share {
  u32 total, shares, at, stop, start;
  int b, h;
};

// Computes a team's share, in one warp.
struct Plan : Share {
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

  __device__ __forceinline__ Plan(const Args& a_, int row_block_, int team, int lane_)
      : a(a_), row_block(row_block_), lane(lane_) {
    total = 0;
    for (int first = (a.batch - 1) & -32; first >= 0; first -= 32) {
      lengths.load(a, first, lane);
      total += __reduce_add_sync(~0u, cost());
    }
    // as many teams as have work for every warp. Rows that get more than one team all get the same number, so that few teams have parts
    // of two rows
    const u32 rows = a.batch * a.heads;
    shares = min((u32)a.teams, max((total - rows * ROW_COST) / (WORKERS * UNIT_COST), 1u));
    if (shares > rows && shares < (u32)a.teams) shares = min(shares / rows + 1, (u32)a.teams / rows) * rows;
    at = stop = start = 0;
    b = h = 0;
    if (team >= (int)shares) return;
    // rows of one length divide evenly if the number of teams is a multiple of the number of rows: shares then end where rows end.
    // (The division total x / shares and its inverse: a 64-bit division takes half a microsecond)
    const u32 each = total / shares, rest = total - each * shares;
    const u32 x = team + (lane & 1), border = each * x + rest * x / shares;
    at = __shfl_sync(~0u, border, 0);
    stop = __shfl_sync(~0u, border, 1);
    while (true) {  // the sequence in which the share begins
      const u32 own = cost();
      u32 before = own;
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const u32 y = __shfl_up_sync(~0u, before, d);
        if (lane >= d) before += y;
      }
      const u32 behind = __ballot_sync(~0u, start + before > at);
      if (behind) {
        b = __ffs(behind) - 1;
        const u32 cost = __shfl_sync(~0u, own, b) / a.heads;
        start += __shfl_sync(~0u, before - own, b);
        h = (at - start) / cost;
        start += cost * h;
        b += lengths.base;
        return;
      }
      start += __shfl_sync(~0u, before, 31);
      lengths.load(a, lengths.base + 32, lane);
    }
  }
  __device__ __forceinline__ Plan(const Args& a_, int row_block_, const Share& share, int lane_)
      : Share(share), a(a_), row_block(row_block_), lane(lane_) {
    lengths.load(a, b & -32, lane);
  }

  // The row's first team has its first unit, the row's last team its last unit.
  __device__ __forceinline__ int owner(u32 x) const {
    return __umulhi(total, shares) ? (int)(((u64)(x + 1) * shares - 1) / total) : (int)(((x + 1) * shares - 1) / total);
  }

  // Writes the next row's part to shared memory and advances. All other warps have finished with the part before.
  __device__ __forceinline__ void next(Part& out, Share& left) {
    if (at >= stop) {
      if (lane == 0) out.some = 0;
      return;
    }
    const Row row = lengths.row(a, row_block, b, h);
    const u32 cost = row.cost() + ROW_COST, low = at - start, high = min(stop - start, cost);
    // the same fraction of the row's units as of its window, so that no team gets the whole window
    const int bound = Part::bound(lane & 1 ? high : low, lane & 2 ? row.units : row.blocks, cost);
    __syncwarp();  // all lanes have read the part that is overwritten now
    if (lane < 4) (lane & 2 ? out.units : out.blocks)[lane & 1] = bound;
    else if (lane < 6) out.teams[lane & 1] = owner(lane & 1 ? start + cost - 1 : start);
    at = start += cost;
    if (++h == a.heads) {
      h = 0;
      b++;
    }
    if (lane == 0) {
      out.row = row;
      out.some = 1;
      out.last = at >= stop;
      left = *this;
    }
  }
};
