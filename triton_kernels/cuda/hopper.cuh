// Features of Hopper (sm_90a): products of a warp group of four warps (`wgmma`), bulk copies, barriers in shared memory that count bytes.
#pragma once
#include "common.cuh"

// The descriptor of a matrix in shared memory, K-major, without swizzling. A core matrix of 8 x 16 bytes is contiguous. along: bytes from
// one core matrix to the next along K. across: bytes to the next eight rows.
__device__ __forceinline__ u64 matrix(u32 address, u32 along, u32 across) {
  return (u64)(address >> 4) | (u64)(along >> 4) << 16 | (u64)(across >> 4) << 32;
}
// The descriptor, advanced by `bytes`.
__device__ __forceinline__ u64 further(u64 matrix, u32 bytes) { return matrix + (bytes >> 4); }

#include "hopper_ptx.cuh"
