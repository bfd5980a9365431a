// Packing tokens as they are (`formats/dense.py`): see encode.cuh.
#pragma once
#include "encode.cuh"

template <int D> struct DenseEncoder {
  struct Space {};
  static __device__ void encode(u8* part, const Source& source, int low, int high, int base, const Crew& crew, void*) {
    for (int i = low * D + crew.thread; i < high * D; i += CREW)
      reinterpret_cast<u16*>(part)[i] = source.token(base + i / D)[i % D];
    crew.meet();
  }
};
