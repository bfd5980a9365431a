// Computes outputs from the warps' sums: merges them over the warps of a warp group, then over the warp groups that share a row.
#pragma once
#include "warp.cuh"
#include "warp_group.cuh"

// Undoes the rotation of values in a row's sums (channels 32 k + lane). The rotation is its own inverse.
template <int D> __device__ __forceinline__ void rotate_back(float* o, int lane) {
  constexpr int WORDS = D / 32;
  static_assert(!RESTORED || (WORDS * 32 == D && (WORDS & WORDS - 1) == 0), "transforms.Hadamard.own_inverse");
#pragma unroll
  for (int step = 1; step < 32; step *= 2)
#pragma unroll
    for (int k = 0; k < WORDS; k++) {
      const float other = __shfl_xor_sync(~0u, o[k], step);
      o[k] = lane & step ? other - o[k] : o[k] + other;
    }
#pragma unroll
  for (int step = 1; step < WORDS; step *= 2)
#pragma unroll
    for (int k = 0; k < WORDS; k++)
      if (!(k & step)) {
        const float low = o[k], high = o[k + step];
        o[k] = low + high;
        o[k + step] = low - high;
      }
#pragma unroll
  for (int k = 0; k < WORDS; k++)
    o[k] *= D == 64 ? 0.125f : D == 128 ? 0.08838834764831845f : D == 256 ? 0.0625f : 0.04419417382415922f;
}

// The sum o of a slice with weights l, rescaled to weights `whole`: slices may have different references.
__device__ __forceinline__ float relative_to(float whole, float o, float l) {
  return l > 0.f ? __fdividef(o, l) * whole : 0.f;
}

enum Sinks { NO_SINKS, MODEL_DTYPE_SINKS, FLOAT32_SINKS };  // values of SINKS: `geometry.Sinks`

// Stores one output number; o and l are relative to 2^m.
__device__ __forceinline__ void put_output(const Args& a, int b, int h, int r, int channel, float o, float l, float m) {
  const int head = h * a.groups + r % a.groups;
  if constexpr (SINKS != NO_SINKS) {
    const float x = (SINKS == FLOAT32_SINKS ? reinterpret_cast<const float*>(a.sinks)[head]
                                            : to_float(reinterpret_cast<const u16*>(a.sinks)[head])) *
                    LOG2E;
    const float top = fmaxf(m, x), decay = ex2(m - top);
    l = l * decay + ex2(x - top);
    o *= decay;
  }
  const float value = l > 0.f ? __fdividef(o, l) : 0.f;
  const i64 at = (((i64)b * a.tokens + r / a.groups) * (a.heads * a.groups) + head) * DV + channel;
  reinterpret_cast<u16*>(a.out)[at] = (u16)pack_model(value, 0.f);
}

// The query rows of one row (sequence x KV head) in a row block, and where their results are stored.
struct Target {
  int b, h, first, count;  // first: of the sequence's query rows; count: existing rows

  __device__ __forceinline__ void put(const Args& a, int i, int channel, float o, float l, float m) const {
    put_output(a, b, h, first + i, channel, o, l, m);
  }
};

// The results of a warp group's warps, each in the warp's memory for stages: sums `o` row by row, then maxima, then sums of weights `l`.
struct WarpSums {
  float* memory;  // the first warp's results
  static constexpr int STRIDE = WARP_BYTES / 4, MAXIMA = ROWS * MERGE_STRIDE, WEIGHTS = MAXIMA + ROWS;

  __device__ __forceinline__ void put(Warp& w, int warp, int lane) const {
    const int g = lane >> 2, t = lane & 3;
    float *mine = memory + warp * STRIDE, *mine_ml = mine + MAXIMA;
#pragma unroll
    for (int n = 0; n < NT; n++) {
      auto row_of = [&](int e) { return SPREAD ? t : 8 * n + 2 * t + e; };
#pragma unroll
      for (int e = 0; e < COLUMNS_USED; e++) w.l[n][e] = sum_rows(w.l[n][e]);
#pragma unroll
      for (int k = 0; k < WV / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i += EVERY)
          mine[row_of(i & 1) * MERGE_STRIDE + out_channel(k, i >> 1, g)] = w.o[k][n][i];
      if (g == 0)
#pragma unroll
        for (int e = 0; e < COLUMNS_USED; e++) {
          mine_ml[row_of(e)] = w.m[n][e];
          mine_ml[ROWS + row_of(e)] = w.l[n][e];
        }
    }
  }

  // o and l of row i and a channel, summed over all warps that have the channel, both relative to 2^m.
  __device__ __forceinline__ float merged(int i, int channel, float& m, float& l) const {
    float o = 0.f;
    m = LOWEST;
    l = 0.f;
    const float* first = memory;
    if constexpr (SLICES > 1) {
      first += channel / WV * STRIDE;
      channel %= WV;
    }
#pragma unroll
    for (int k = 0; k < WORKERS; k++) m = fmaxf(m, first[k * SLICES * STRIDE + MAXIMA + i]);
#pragma unroll
    for (int k = 0; k < WORKERS; k++) {
      const float* other = first + k * SLICES * STRIDE;
      const float f = ex2(other[MAXIMA + i] - m);
      l += f * other[WEIGHTS + i];
      o += f * other[i * MERGE_STRIDE + channel];
    }
    return o;
  }

  // Writes a warp group's results: to the output if it has the whole row, otherwise to `slot`.
  __device__ __forceinline__ void merge(const Args& a, const Target& target, bool whole_row, float* slot,
                                        int thread) const {
    if constexpr (RESTORED)
      if (whole_row) {
        merge_and_restore(a, target, thread >> 5, thread & 31);
        return;
      }
    for (int x = thread; x < target.count * DV; x += WARPS * 32) {
      const int i = x / DV;
      float m, l;
      const float o = merged(i, x % DV, m, l);
      if (whole_row) target.put(a, i, x % DV, o, l, m);
      else {
        slot[x] = o;
        if (x % WV == 0) {
          const int at = ROWS * DV + (SLICES == 1 ? 0 : x % DV / WV) * 2 * ROWS + i;
          slot[at] = m;
          slot[at + ROWS] = l;
        }
      }
    }
  }

  // RESTORED: one warp takes all channels of a query row, because the rotation needs them.
  __device__ __forceinline__ void merge_and_restore(const Args& a, const Target& target, int warp, int lane) const {
    for (int i = warp; i < target.count; i += WARPS) {
      float m, l, o[DV / 32];
#pragma unroll
      for (int k = 0; k < WV / 32; k++) o[k] = merged(i, 32 * k + lane, m, l);
#pragma unroll
      for (int k = WV / 32; k < DV / 32; k++) {
        float own_m, own_l;
        o[k] = merged(i, 32 * k + lane, own_m, own_l);
        o[k] = relative_to(l, o[k], own_l);
      }
      rotate_back<DV>(o, lane);
#pragma unroll
      for (int k = 0; k < DV / 32; k++) target.put(a, i, 32 * k + lane, o[k], l, m);
    }
  }
};

// Whether this warp group is the last to finish the row. If so, the results of the other warp groups are visible.
__device__ __forceinline__ bool last_of_row(int* counter, int other_groups, int& last, int thread, int warp_group) {
  sync_warp_group(warp_group);
  if (thread == 0) {
    __threadfence();  // orders the warp group's writes before the barrier
    last = atomicAdd(counter, 1) == other_groups;
  }
  sync_warp_group(warp_group);
  return last;
}

// Sums query row i over the warp groups `first` to `last`, for a slice of the channels: o and l, both relative to 2^m. partial: the results of
// warp group c are at + c * PARTIAL_FLOATS.
template <int WORDS> __device__ __forceinline__ void merge_slice(const float* partial, int first, int last, int i,
                                                                 int slice, int lane, float& m, float& l, float* o) {
  constexpr int BATCH = 8;  // loads in flight
  m = LOWEST;
  l = 0.f;
  for (int c0 = first; c0 <= last; c0 += BATCH) {
    float ms[BATCH], ls[BATCH], os[BATCH][WORDS], top = m;
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const bool in_range = c0 + j <= last;
      const float* slot = partial + (i64)(in_range ? c0 + j : last) * PARTIAL_FLOATS;
      const float *of_row = slot + slice * WV, *of_rows = slot + slice * 2 * ROWS;
      ms[j] = in_range ? __ldcg(of_rows + ROWS * DV + i) : -INF;
      ls[j] = __ldcg(of_rows + ROWS * DV + ROWS + i);
#pragma unroll
      for (int k = 0; k < WORDS; k++)
        os[j][k] = WV % 32 == 0 || k * 32 + lane < WV ? __ldcg(of_row + i * DV + k * 32 + lane) : 0.f;
    }
#pragma unroll
    for (int j = 0; j < BATCH; j++) top = fmaxf(top, ms[j]);
    const float decay = ex2(m - top);
    m = top;
    l *= decay;
#pragma unroll
    for (int k = 0; k < WORDS; k++) o[k] *= decay;
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const float f = ex2(ms[j] - m);
      l += f * ls[j];
#pragma unroll
      for (int k = 0; k < WORDS; k++) o[k] += f * os[j][k];
    }
  }
}

// Writes the outputs of a row that the warp groups `first` to `last` share.
__device__ __forceinline__ void merge_warp_groups(const Args& a, const Target& target, const float* partial, int first,
                                                  int last, int warp, int lane) {
  __threadfence();
  for (int i = warp; i < target.count; i += WARPS) {
    constexpr int WORDS = (WV + 31) / 32;  // a lane's channels of a slice
    float m[SLICES], l[SLICES], o[SLICES * WORDS] = {};
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++)
      merge_slice<WORDS>(partial, first, last, i, slice, lane, m[slice], l[slice], o + slice * WORDS);
    if constexpr (RESTORED) {
#pragma unroll
      for (int k = WORDS; k < SLICES * WORDS; k++) o[k] = relative_to(l[0], o[k], l[k / WORDS]);
      rotate_back<DV>(o, lane);
    }
#pragma unroll
    for (int k = 0; k < SLICES * WORDS; k++)
      if (WV % 32 == 0 || k * 32 + lane < WV)
        target.put(a, i, k * 32 + lane, o[k], l[RESTORED ? 0 : k / WORDS], m[RESTORED ? 0 : k / WORDS]);
  }
}
