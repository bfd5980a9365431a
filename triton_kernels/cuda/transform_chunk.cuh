// What `attend.cu` does to queries and to its chunk before it attends. TRANSFORMED 1: queries and keys are multiplied with factors or rotated
// (`rotate.cuh`). TRANSFORMED 2: they are multiplied by a matrix, and (ROTATED) values are rotated.
#pragma once
#include "rotate.cuh"
#include "warp.cuh"
#if TRANSFORMED == 2
#include "product.cuh"
#endif

// The chunk's tokens that lie in a warp's blocks of a row's window.
template <class Work> __device__ __forceinline__ void each_of_chunk(const Row& row, int first, int stop, int stride, const Work& work) {
  const int stored = row.sinks + row.tail;
  for (int block = first; block < stop; block += stride)
    for (int c = max(32 * block - stored, 0); c < min(32 * block + 32 - stored, row.chunk); c++) work(c);
  __syncwarp();
}

// Those tokens, transformed: from where they came to where the window looks for them, and where storing finds them afterwards. Before the
// warp copies any of them. Of what a matrix does not do: keys, or values.
__device__ __forceinline__ void transform_chunk(const Args& a, const Row& row, int first, int stop, int stride, int lane) {
#if TRANSFORMED == 1
  const u8* from = a.raw_k + 2 * (row.b * a.raw_b + row.h * a.raw_h);
  u8* to = const_cast<u8*>(a.k) + 2 * (row.b * a.k_b + row.h * a.k_h);
  each_of_chunk(row, first, stop, stride, [&](int c) { transform_token<DK>(from + 2 * (c * a.raw_s), to + 2 * (c * a.k_s), a.k_scale + row.h * a.scale_h, lane); });
#elif ROTATED
  const u8* from = a.raw_v + 2 * (row.b * a.raw_v_b + row.h * a.raw_v_h);
  u8* to = const_cast<u8*>(a.v) + 2 * (row.b * a.v_b + row.h * a.v_h);
  each_of_chunk(row, first, stop, stride, [&](int c) { transform_token<DV>(from + 2 * (c * a.raw_v_s), to + 2 * (c * a.v_s), nullptr, lane); });
#endif
}
