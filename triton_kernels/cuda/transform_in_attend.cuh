// Transforms queries and new keys in the launch that attends to them (TRANSFORMED): `reference.transformed`.
#pragma once
#include "warp.cuh"

#if TRANSFORMED
#include "rotate.cuh"

// x: a lane's words of a query whose head belongs to `kv_head`.
__device__ __forceinline__ void transform_query(const Args& a, u32* x, int kv_head, int lane) {
  transform_row<DK>(x, a.q_scale + kv_head * a.scale_h, lane);
}

// Transforms the new keys in a warp's segments of a row's window, to the tensor that the window and the append read. It runs before the warp copies
// any of them.
__device__ __forceinline__ void transform_chunk(const Args& a, const Row& row, int first, int stop, int stride,
                                                int lane) {
  const int stored = row.sinks + row.tail;
  for (int segment = first; segment < stop; segment += stride)
    for (int c = max(32 * segment - stored, 0); c < min(32 * segment + 32 - stored, row.new_tokens); c++) {
      const u8* from = a.raw_k + 2 * (row.b * a.raw_b + row.h * a.raw_h + c * a.raw_s);
      u8* to = const_cast<u8*>(a.k) + 2 * (row.b * a.k_b + row.h * a.k_h + c * a.k_s);
      transform_token<DK>(from, to, a.k_scale + row.h * a.scale_h, lane);
    }
  __syncwarp();
}
#else
__device__ __forceinline__ void transform_query(const Args&, u32*, int, int) {}
__device__ __forceinline__ void transform_chunk(const Args&, const Row&, int, int, int, int) {}
#endif
