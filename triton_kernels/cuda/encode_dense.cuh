// Packs tokens without quantization (`formats/dense.py`): see encode.cuh.
#pragma once
#include "encode.cuh"

template <int D> struct DenseEncoder {
  struct Space {};
  static __device__ void encode(u8* part, const Source& source, int low, int high, int base,
                                const WarpGroup& warp_group, void*) {
    for (int i = low * D + warp_group.thread; i < high * D; i += WARP_GROUP_THREADS)
      reinterpret_cast<u16*>(part)[i] = source.token(base + i / D)[i % D];
    warp_group.sync();
  }
};
