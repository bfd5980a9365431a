// Pages of `formats.dense`: tokens in the model's dtype, like those of the window.
#pragma once
#include "model_tokens.cuh"

template <int D> struct DenseKeys {
  static constexpr bool NORMALISED = false;
  static constexpr int GROUPS = 1, LIFT = 0, STAGE_BYTES = KV_TILE / 32 * Dense<D>::SEGMENT_BYTES,
                       SECOND_STAGE_BYTES = STAGE_BYTES, PART_BYTES = PAGE * SLICES * D * 2;
  float c;

  __device__ __forceinline__ void begin(u32, const float*, const float*, float scale, int) { c = scale; }
  __device__ __forceinline__ void copy(u32 stage, const u8* part, int token, bool, int limit, int lane) const {
#pragma unroll
    for (int segment = 0; segment < KV_TILE / 32; segment++)
      Dense<D>::copy(
          stage + segment * Dense<D>::SEGMENT_BYTES,
          [&](int j, bool& keep) {
            const int i = segment * 32 + lane / 4 * 4 + j;
            keep = i < limit;
            return part + ((i64)(token + i) * SLICES + own_slice()) * D * 2;
          },
          lane);
  }
  __device__ __forceinline__ void refresh(u32, u32, int, bool, int) {}
  __device__ __forceinline__ void scores(float (*s)[NT][4], u32 stage, u32 rows, int lane) {
#pragma unroll
    for (int segment = 0; segment < KV_TILE / 32; segment++)
      Dense<D>::scores(s + 2 * segment, stage + segment * Dense<D>::SEGMENT_BYTES, rows, lane);
  }
  __device__ __forceinline__ float factor(int, int, int) const { return c; }
  __device__ __forceinline__ float offset(int, int, int) const { return 0.f; }
};

template <int D> struct DenseValues {
  static constexpr int STAGE_BYTES = KV_TILE / 32 * Dense<D>::SEGMENT_BYTES, SCRATCH_BYTES = 0,
                       PART_BYTES = PAGE * SLICES * D * 2;
  static constexpr float SUM_UNIT = 1.f;

  __device__ __forceinline__ void begin() {}
  __device__ __forceinline__ void copy(u32 stage, const u8* part, int token, int limit, int lane) const {
    DenseKeys<D>().copy(stage, part, token, false, limit, lane);
  }
  __device__ __forceinline__ void weigh(u32, u32, int, int) {}
  __device__ __forceinline__ float exponent(int, int) const { return 0.f; }
  __device__ __forceinline__ void add(float (*o)[NT][4], float (*l)[2], float (*x)[NT][4], u32 stage, u32, int,
                                      int lane) {
#pragma unroll
    for (int segment = 0; segment < KV_TILE / 32; segment++)
      Dense<D>::add(o, l, x + 2 * segment, stage + segment * Dense<D>::SEGMENT_BYTES, lane);
  }
  __device__ __forceinline__ void decay(int, int, float) {}
  __device__ __forceinline__ void finish(float (*)[NT][4]) {}
};
