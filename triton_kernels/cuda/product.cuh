// Rows times a matrix of their KV head, by the warps of a team: queries and the chunk's keys where the transform of keys is a matrix, as
// `project.cu` multiplies those of many rows. Sums are in float32.
#pragma once
#include "rotate.cuh"
#include "warp.cuh"

// A warp's part of it: all rows times 16 columns of the matrix, which it copies to where its pages will be. Lane 4 i + j multiplies the
// i-th of eight parts of the channels, for the columns 4 j to 4 j + 3.
template <int D> struct Product {
  static constexpr int COLUMNS = 16, SLICES = D / COLUMNS, BYTES = 4 * COLUMNS * D;
  static constexpr int EACH = D / 8, GROUP = 4;             // channels of a lane, and rows at a time
  static constexpr bool AHEAD = 2 * BYTES <= WARP_BYTES;    // there is room for the next slice
  static_assert(D % 64 == 0 && BYTES <= WARP_BYTES, "geometry.MULTIPLIED");

  // Channel by channel of a part, the eight parts next to each other: lanes read without bank conflicts.
  static __device__ __forceinline__ void copy(u32 space, const float* matrix, int slice, int lane) {
    const int channel = lane / 4, column = lane % 4 * 4;
#pragma unroll 2
    for (int i = 0; i < D; i += 8)
      cp16(space + ((channel + i) % EACH * 8 + (channel + i) / EACH) * 4 * COLUMNS + 4 * column, matrix + (channel + i) * D + slice * COLUMNS + column);
    commit();
  }
  // Rows 0 to count - 1 (`rows`: where a row's channels are; `target`: where its product goes). The copy of the slice has been begun,
  // and another one behind it.
  template <class Rows, class Target> static __device__ __forceinline__ void multiply(u32 space, int slice, int count, int lane, const Rows& rows, const Target& target) {
#pragma unroll 1
    for (int first = 0; first < count; first += GROUP) {
      u32 x[GROUP][EACH / 2];
#pragma unroll
      for (int j = 0; j < GROUP; j++) {
        const u8* row = rows(min(first + j, count - 1)) + lane / 4 * EACH * 2;
#pragma unroll
        for (int k = 0; k < EACH / 8; k++) ask4(x[j] + 4 * k, row + 16 * k);
      }
      wait<AHEAD ? 1 : 0>(); __syncwarp();
      float sum[GROUP][4] = {};
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        u32 w[4]; lds<4>(w, space + i * 32 * COLUMNS + lane * 16);
#pragma unroll
        for (int j = 0; j < GROUP; j++) {
          const float channel = to_float(i & 1 ? x[j][i / 2] >> 16 : x[j][i / 2] & 0xffff);
#pragma unroll
          for (int c = 0; c < 4; c++) sum[j][c] += channel * __uint_as_float(w[c]);
        }
      }
      // the eight lanes with the same columns share the sums out: two rows each, then one, then two columns of it
      const bool upper = lane & 16, odd = lane & 8, right = lane & 4;
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const float other = __shfl_xor_sync(~0u, upper ? sum[j][c] : sum[j + 2][c], 16);
          sum[j][c] = (upper ? sum[j + 2][c] : sum[j][c]) + other;
        }
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const float other = __shfl_xor_sync(~0u, odd ? sum[0][c] : sum[1][c], 8);
        sum[0][c] = (odd ? sum[1][c] : sum[0][c]) + other;
      }
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float other = __shfl_xor_sync(~0u, right ? sum[0][c] : sum[0][c + 2], 4);
        sum[0][c] = (right ? sum[0][c + 2] : sum[0][c]) + other;
      }
      const int r = first + 2 * upper + odd, column = slice * COLUMNS + lane % 4 * 4 + 2 * right;
      if (r < count) *reinterpret_cast<u32*>(target(r) + 2 * column) = pack_model(sum[0][0], sum[0][1]);
    }
  }
};

// A team's products: its queries, and the chunk's keys in its part of the window. Its warps take slices of the two matrices, one at a time.
struct Products {
  using Slice = Product<DK>;
  u32 space;                        // the warp's

  // Rows: query heads of a token, token by token; keys are one head's.
  struct Rows {
    const u8* data;
    i64 of_head, of_token;
    int heads, first, count;
    __device__ __forceinline__ const u8* operator()(int r) const {
      const int token = (int)__fdividef(first + r + 0.5f, (float)heads);
      return data + 2 * ((first + r - token * heads) * of_head + token * of_token);
    }
  };
  static __device__ __forceinline__ Rows queries(const Args& a, int b, int h, int row_block) {
    return {a.q + 2 * (b * a.q_b + h * a.groups * a.q_h), a.q_h, a.q_s, a.groups, row_block * ROWS, min(a.groups * a.tokens - row_block * ROWS, ROWS)};
  }
  // Slice n: of the queries' matrix, then of the keys'. turn: how many the warp has taken.
  __device__ __forceinline__ u32 place(int turn) const { return space + (Slice::AHEAD && (turn & 1) ? Slice::BYTES : 0); }
  __device__ __forceinline__ void copy(const Args& a, int h, int n, int turn, int lane) const {
    const bool keys = n >= Slice::SLICES;
    Slice::copy(place(turn), (keys ? a.k_scale : a.q_scale) + h * a.scale_h, keys ? n - Slice::SLICES : n, lane);
  }

  // Begins with queries. These are brought near, into the L1 cache: to keep them until lengths are known would take too many registers.
  __device__ __forceinline__ void start(const Args& a, int b, int h, int row_block, int warp, int lane) {
    if (warp >= Slice::SLICES) return;
    const Rows rows = queries(a, b, h, row_block);
    for (int at = 32 * lane; at < rows.count * 2 * DK; at += 1024) ask(reinterpret_cast<const u32*>(rows(at / (2 * DK)) + at % (2 * DK)));
    copy(a, h, warp, 0, lane);
  }

  // Queries go where `Queries::take` finds them, keys where the window does, behind a `meet`. started: `start` has been called.
  // first, stop: the chunk's tokens that are wanted.
  __device__ __forceinline__ void multiply(const Args& a, const Row& row, int row_block, bool started, int first, int stop, u8* head, int warp, int lane) {
    const int slices = Slice::SLICES + (stop > first ? Slice::SLICES : 0);
    int turn = 0;
#pragma unroll 1
    for (int n = warp; n < slices; n += WARPS, turn++) {
      const bool keys = n >= Slice::SLICES, ready = turn == 0 && started && !keys;
      Rows rows = queries(a, row.b, row.h, row_block);
      u8* to = head;
      i64 stride = (SPREAD ? 2 : 1) * Q_STRIDE;
      if (keys) {
        rows = {a.raw_k + 2 * (row.b * a.raw_b + row.h * a.raw_h), 0, a.raw_s, 1, first, stop - first};
        to = const_cast<u8*>(a.k) + 2 * (row.b * a.k_b + row.h * a.k_h + first * a.k_s);
        stride = 2 * a.k_s;
      }
      if (!ready && (!Slice::AHEAD || turn == 0)) copy(a, row.h, n, turn, lane);
      if (Slice::AHEAD && n + WARPS < slices) copy(a, row.h, n + WARPS, turn + 1, lane); else commit();
      Slice::multiply(place(turn), keys ? n - Slice::SLICES : n, rows.count, lane, rows, [&](int r) { return to + r * stride; });
      __syncwarp();                                       // all lanes have read what is overwritten now
    }
  }
};
