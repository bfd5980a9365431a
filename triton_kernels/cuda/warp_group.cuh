// A warp group: WARPS warps that work together. In `append.cu` the CTA is one warp group; in `attend.cu` a CTA has WARP_GROUPS of them.
#pragma once

constexpr int WARP_GROUP_THREADS = WARPS * 32;

// Waits for all threads of warp group `index` of the CTA.
__device__ __forceinline__ void sync_warp_group(int index) {
  if constexpr (WARP_GROUPS == 1) __syncthreads();
  else named_barrier<WARPS * 32>(index + 1);
}

struct WarpGroup {
  int thread, index;  // the thread's index in the warp group; the warp group's index in the CTA
  __device__ __forceinline__ void sync() const { sync_warp_group(index); }
};
