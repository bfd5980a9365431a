// What Hopper has (sm_90a): products of a warpgroup (`wgmma`), bulk copies, barriers in shared memory that count bytes.
#pragma once
#include "common.cuh"

// A matrix in shared memory, K-major, without swizzling: 8 x 16 bytes lie together (a core matrix). along: bytes from one to the next along K.
// across: to the next eight rows.
__device__ __forceinline__ u64 matrix(u32 address, u32 along, u32 across) {
  return (u64)(address >> 4) | (u64)(along >> 4) << 16 | (u64)(across >> 4) << 32;
}
// The same matrix so many bytes further.
__device__ __forceinline__ u64 further(u64 matrix, u32 bytes) { return matrix + (bytes >> 4); }

#include "hopper_ptx.cuh"
