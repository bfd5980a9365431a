// The threads that work together: WARPS warps, in `append.cu` a block of threads, in `attend.cu` a team, of which a block has TEAMS.
#pragma once

constexpr int CREW = WARPS * 32;

// Waits for all of them.
__device__ __forceinline__ void meet(int team) {
  if constexpr (TEAMS == 1) __syncthreads();
  else named_barrier<WARPS * 32>(team + 1);
}

struct Crew {
  int thread, team;  // number among them; which of the block's teams they are
  __device__ __forceinline__ void meet() const { ::meet(team); }
};
