// Attention of a warp to a row's full-precision window: sink, tail and new tokens.
#pragma once
#include "warp.cuh"
#include "exchange.cuh"

// Segments of 32 tokens of a row's window (sink, tail and new tokens, in this order): first, first + stride, ... below `stop`.
struct Window {
  const Args& a;
  const Row& row;
  int first, stop, stride, lane;
  u32 space;
  const Exchange& exchange;
  static constexpr int VALUES = NARROW ? 0 : Dense<WK>::SEGMENT_BYTES;  // offset of the values in `space`

  // The address of token i of the window. side: 0 keys, 1 values. keep: whether the token exists.
  __device__ __forceinline__ const u8* locate(int side, int i, bool& keep) const {
    const i64 bh = (i64)row.b * a.heads + row.h;
    const int stored = row.sinks + row.tail, d = 2 * (side ? DV : DK);
    keep = true;
    if (i < row.sinks) return (side ? a.sink_v : a.sink_k) + (bh * a.sink + i) * d;
    if (i < stored) {
      const int slot = row.paged % a.tail + i - row.sinks;
      return (side ? a.tail_v : a.tail_k) + (bh * a.tail + (slot < a.tail ? slot : slot - a.tail)) * d;
    }
    const int c = i - stored;
    keep = c < row.new_tokens && (!HAS_MASK || a.mask[row.b * a.mask_b + c * a.mask_s]);
    const i64 at = side ? row.b * a.v_b + row.h * a.v_h + (keep ? c : 0) * a.v_s
                        : row.b * a.k_b + row.h * a.k_h + (keep ? c : 0) * a.k_s;
    return (side ? a.v : a.k) + 2 * at;
  }
  // Each lane computes the address of one token of the segment, and shuffles pass it to the lanes that copy the token.
  template <int D> __device__ __forceinline__ void copy(int side, int segment, u32 target) const {
    bool real;
    const u64 own = (u64)locate(side, 32 * segment + lane, real) + 2 * D * own_slice();
    const u32 low = (u32)own, high = (u32)(own >> 32), kept = __ballot_sync(~0u, real);
    Dense<D>::copy(
        target,
        [&](int j, bool& keep) {
          const int from = lane / 4 * 4 + j;
          keep = kept >> from & 1;
          return (const u8*)((u64)__shfl_sync(~0u, high, from) << 32 | __shfl_sync(~0u, low, from));
        },
        lane);
    commit();
  }
  __device__ __forceinline__ void copy_keys(int segment) const { copy<WK>(0, segment, space); }
  __device__ __forceinline__ void copy_values(int segment) const { copy<WV>(1, segment, space + VALUES); }
  // Starts to copy what the next products need, if possible keys and values by the same instructions: after another kernel, instructions come
  // from memory.
  __device__ __forceinline__ void start(int segment) const {
    if constexpr (NARROW) copy_keys(segment);
    else if constexpr (WK == WV) {
#pragma unroll 1
      for (int side = 0; side < 2; side++) copy<WK>(side, segment, space + side * VALUES);
    } else {
      copy_keys(segment);
      copy_values(segment);
    }
  }
  __device__ __forceinline__ void start() const {
    if (first < stop) start(first);
  }

  __device__ __forceinline__ void attend(Warp& w, int row_block, u32 rows, float scale) const {
    if (first >= stop) return;
    const int g = lane >> 2, t = lane & 3, stored = row.sinks + row.tail;
    int query[NT][2];  // token of each column's query
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < COLUMNS_USED; e++)
        query[n][e] = (int)__fdividef((SPREAD ? t : row_block * ROWS + 8 * n + 2 * t + e) + 0.5f, (float)a.groups);
#pragma unroll 1
    for (int segment = first; segment < stop; segment += stride) {
      float s[2][NT][4];
      wait<NARROW ? 0 : 1>();
      __syncwarp();
      Dense<WK>::scores(s, space, rows, lane);
      exchange.sum((segment - first) / stride & 1, s);
      if constexpr (NARROW) {
        __syncwarp();
        copy_values(segment);
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int c = 32 * segment + 4 * g + j - stored;  // index among the new tokens
        const bool keep = c < row.new_tokens && (!HAS_MASK || c < 0 || a.mask[row.b * a.mask_b + c * a.mask_s]);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int e = 0; e < COLUMNS_USED; e++) {
            float& x = s[j >> 1][n][2 * (j & 1) + e];
            x = keep && c <= query[n][e] ? Warp::capped(w.with_score_bias(x * scale, n, e), a.softcap) : -INF;
          }
      }
      w.subtract_maximum<2>(s);
      wait<0>();
      __syncwarp();
      Dense<WV>::add(w.o, w.l, s, space + VALUES, lane);
      __syncwarp();
      if (segment + stride < stop) start(segment + stride);
    }
    wait<0>();
    exchange.sync();
  }
};
