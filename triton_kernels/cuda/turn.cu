// Key transforms: a chunk's keys and queries in one launch, bit for bit as `transforms.turned` defines them.
//
// A warp takes a row of DIM channels. What reads the results may be launched before this is done (`griddepcontrol`): it waits where
// it needs them.
#include "common.cuh"

struct TurnArgs {
  const u8 *q, *k;
  u8 *q_out, *k_out;                // contiguous
  const float *q_scale, *k_scale;   // [DIM], or null
  i64 q_b, q_h, q_s, k_b, k_h, k_s; // strides in elements; of channels: 1
  i64 rows;                         // batch x (q_heads + heads) x tokens
  int q_heads, heads, tokens;
};

constexpr int OWN = (DIM + 31) / 32;  // channels of a lane: lane, lane + 32, ...
#if BASE > 1
__constant__ u32 negative[BASE] = {SIGNS};  // bit p of column c: whether entry (p, c) of the matrix is -1
#endif

// Butterfly over the lanes and their registers, for a power of two.
__device__ __forceinline__ void rotate_lanes(float* x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2)
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      const float other = __shfl_xor_sync(~0u, x[j], step);
      x[j] = lane & step ? other - x[j] : x[j] + other;
    }
#pragma unroll
  for (int step = 1; step < OWN; step *= 2)
#pragma unroll
    for (int j = 0; j < OWN; j++)
      if (!(j & step)) { const float low = x[j], high = x[j + step]; x[j] = low + high; x[j + step] = low - high; }
}

// Any other size, through shared memory.
__device__ __forceinline__ void rotate_shared(float* x, float* row, int lane) {
  auto share = [&]() {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < OWN; j++) if (lane + 32 * j < DIM) row[lane + 32 * j] = x[j];
    __syncwarp();
  };
#if BASE > 1
  share();
#pragma unroll
  for (int j = 0; j < OWN; j++) {
    const int c = min(lane + 32 * j, DIM - 1), first = c / BASE * BASE;
    const u32 signs = negative[c % BASE];
    float total = 0.f;
#pragma unroll
    for (int p = 0; p < BASE; p++) {
      const float term = signs >> p & 1 ? -row[first + p] : row[first + p];
      total = p ? total + term : term;
    }
    x[j] = total;
  }
#endif
#pragma unroll
  for (int step = 1; step < DIM / BASE; step *= 2) {
    share();
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      const int c = min(lane + 32 * j, DIM - 1), upper = c / BASE & step;
      const float other = row[upper ? c - step * BASE : c + step * BASE];
      x[j] = upper ? other - x[j] : x[j] + other;
    }
  }
}

extern "C" __global__ void __launch_bounds__(128) turn(const __grid_constant__ TurnArgs a) {
  __shared__ float shared[4][DIM];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const i64 r = (i64)blockIdx.x * 4 + warp;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  if (r >= a.rows) return;
  const int token = r % a.tokens, all = a.q_heads + a.heads;
  const i64 b = r / a.tokens / all;
  int h = r / a.tokens % all;
  const bool is_q = h < a.q_heads;
  if (!is_q) h -= a.q_heads;
  const u16* from = reinterpret_cast<const u16*>(is_q ? a.q : a.k) + (is_q ? b * a.q_b + h * a.q_h + token * a.q_s : b * a.k_b + h * a.k_h + token * a.k_s);
  u16* to = reinterpret_cast<u16*>(is_q ? a.q_out : a.k_out) + ((b * (is_q ? a.q_heads : a.heads) + h) * a.tokens + token) * DIM;
  const float* scale = is_q ? a.q_scale : a.k_scale;
  float x[OWN];
#pragma unroll
  for (int j = 0; j < OWN; j++) {
    const int c = lane + 32 * j;
    x[j] = c < DIM ? to_float(from[c]) : 0.f;
    if (scale && c < DIM) x[j] = __fmul_rn(x[j], scale[c]);
  }
  if constexpr (ROTATED) {
    if constexpr (BASE == 1 && DIM % 32 == 0) rotate_lanes(x, lane); else rotate_shared(x, shared[warp], lane);
#pragma unroll
    for (int j = 0; j < OWN; j++) x[j] = __fmul_rn(x[j], __uint_as_float(NORM_BITS));
  }
#pragma unroll
  for (int j = 0; j < OWN; j++)
    if (lane + 32 * j < DIM) to[lane + 32 * j] = (u16)pack_model(x[j], 0.f);
}
