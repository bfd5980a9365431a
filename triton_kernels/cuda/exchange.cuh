// Heads of more than 256 channels: SLICES warps, a worker, take the same tokens. Each has the registers and the shared memory for its slice of
// the channels. It computes its part of the scores and hands it to the other one; the sums of both are equal, bit for bit. From then on each
// has all weights, and weighs its slice of the values.
#pragma once
#include "warp.cuh"

struct Exchange {
  static_assert(SLICES <= 2, "parts of two warps are added");
  u32 own, other;  // shared memory of the lane: what the warp hands on, and what the other one does
  int* claims;     // of the worker: the unit that its first warp has claimed
  int barrier;

  // warp: in the team. memory: of the team's warps
  __device__ __forceinline__ Exchange(const u8* memory, int* claims_, int team, int warp, int lane) {
    if constexpr (SLICES > 1) {
      own = shared_address(memory + warp * WARP_BYTES) + EXCHANGE_AT + 4 * lane;
      other = shared_address(memory + (warp ^ 1) * WARP_BYTES) + EXCHANGE_AT + 4 * lane;
      barrier = 1 + TEAMS + team * WORKERS + warp / SLICES;
      claims = claims_ + team * WORKERS + warp / SLICES;
    }
  }

  // Waits for the warps of the worker.
  __device__ __forceinline__ void meet() const {
    if constexpr (SLICES == 1) __syncwarp();
    else BARRIER(parts_there, named_barrier<32 * SLICES>(barrier));
  }
  // Call f(number, place) for each number of the scores of 32 tokens.
  template <class F> static __device__ __forceinline__ void each(float (*s)[NT][4], int turn, const F& f) {
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i += EVERY)
          f(s[k][n][i], turn % TURNS * TURN_BYTES + ((k * NT + n) * 4 + i) / EVERY * 128);
  }
  // The warp's part of the scores. A place is written again TURNS turns later. The other warp has read it if a `meet` lies between.
  __device__ __forceinline__ void put(int turn, float (*s)[NT][4]) const {
    if constexpr (TURNS == 1) BARRIER(parts_read, named_barrier<32 * SLICES>(barrier));
    each(s, turn, [&](float& x, int at) { sts<1>(own + at, &x); });
  }
  // Adds the other warp's part, after a `meet`.
  __device__ __forceinline__ void add(int turn, float (*s)[NT][4]) const {
    if constexpr (SLICES > 1)
      each(s, turn, [&](float& x, int at) {
        float part;
        lds<1>(reinterpret_cast<u32*>(&part), other + at);
        x += part;
      });
  }
  __device__ __forceinline__ void sum(int turn, float (*s)[NT][4]) const {
    if constexpr (SLICES > 1) {
      put(turn, s);
      meet();
      add(turn, s);
    }
  }
  // The unit that the worker has claimed: its first warp tells it, `told` is for all lanes, after a `meet`.
  __device__ __forceinline__ void tell(int claimed) const {
    if (!ORDERED && own_slice() == 0 && threadIdx.x % 32 == 0) *claims = claimed;
  }
  __device__ __forceinline__ int told(int claimed) const {
    if constexpr (SLICES == 1 || ORDERED) return __shfl_sync(~0u, claimed, 0);
    else return *claims;
  }
};
