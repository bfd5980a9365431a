// Heads of more than 256 channels: SLICES warps, a worker, process the same tokens. Each has registers and shared memory for its slice of the
// channels. It computes partial scores and passes them to the other warp; the sums are equal in both, bit for bit. Then each has all weights,
// and accumulates its slice of the values.
#pragma once
#include "warp.cuh"

struct Exchange {
  static_assert(SLICES <= 2, "partial scores of two warps are added");
  u32 own, other;  // the lane's shared memory: partial scores of the warp, and of the other warp
  int* claims;     // of the worker: the work tile that its first warp has claimed
  int barrier;

  // warp: its index in the warp group. memory: of the warp group's warps
  __device__ __forceinline__ Exchange(const u8* memory, int* claims_, int warp_group, int warp, int lane) {
    if constexpr (SLICES > 1) {
      own = shared_address(memory + warp * WARP_BYTES) + EXCHANGE_AT + 4 * lane;
      other = shared_address(memory + (warp ^ 1) * WARP_BYTES) + EXCHANGE_AT + 4 * lane;
      barrier = 1 + WARP_GROUPS + warp_group * WORKERS + warp / SLICES;
      claims = claims_ + warp_group * WORKERS + warp / SLICES;
    }
  }

  // Waits for the warps of the worker.
  __device__ __forceinline__ void sync() const {
    if constexpr (SLICES == 1) __syncwarp();
    else BARRIER(partial_scores_written, named_barrier<32 * SLICES>(barrier));
  }
  // Calls f(score, offset in shared memory) for each score of 32 tokens.
  template <class F> static __device__ __forceinline__ void each(float (*s)[NT][4], int buffer, const F& f) {
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i += EVERY)
          f(s[k][n][i], buffer % BUFFERS * BUFFER_BYTES + ((k * NT + n) * 4 + i) / EVERY * 128);
  }
  // Writes the warp's partial scores. The same buffer is written again after BUFFERS calls; a `sync` in between ensures that the other warp has
  // read it.
  __device__ __forceinline__ void put(int buffer, float (*s)[NT][4]) const {
    if constexpr (BUFFERS == 1) BARRIER(partial_scores_read, named_barrier<32 * SLICES>(barrier));
    each(s, buffer, [&](float& x, int at) { sts<1>(own + at, &x); });
  }
  // Adds the other warp's partial scores, after a `sync`.
  __device__ __forceinline__ void add(int buffer, float (*s)[NT][4]) const {
    if constexpr (SLICES > 1)
      each(s, buffer, [&](float& x, int at) {
        float partial;
        lds<1>(reinterpret_cast<u32*>(&partial), other + at);
        x += partial;
      });
  }
  __device__ __forceinline__ void sum(int buffer, float (*s)[NT][4]) const {
    if constexpr (SLICES > 1) {
      put(buffer, s);
      sync();
      add(buffer, s);
    }
  }
  // The worker's claimed work tile: its first warp publishes it; `claimed` returns it to all lanes, after a `sync`.
  __device__ __forceinline__ void publish(int claimed) const {
    if (!ORDERED && own_slice() == 0 && threadIdx.x % 32 == 0) *claims = claimed;
  }
  __device__ __forceinline__ int claimed(int claimed) const {
    if constexpr (SLICES == 1 || ORDERED) return __shfl_sync(~0u, claimed, 0);
    else return *claims;
  }
};
