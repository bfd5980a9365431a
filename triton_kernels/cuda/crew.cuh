// A crew is the WARPS warps that work together: a block of threads in `append.cu`; a team in `attend.cu`, where a block has TEAMS teams.
#pragma once

constexpr int CREW = WARPS * 32;

// Waits for all threads of the crew.
__device__ __forceinline__ void meet(int team) {
  if constexpr (TEAMS == 1) __syncthreads();
  else named_barrier<WARPS * 32>(team + 1);
}

struct Crew {
  int thread, team;  // the thread's index in the crew; the crew's index in the block
  __device__ __forceinline__ void meet() const { ::meet(team); }
};
