// Storing new tokens: into sink and tail ring, and packing each page that is due: `reference.append`, bit for bit.
//
// A CTA owns the counters of one row (sequence x KV head). One token takes one launch (`append_one`), or none if `attend.cu` stores it. A longer
// tokens take three launches: pages, then sink and tail, then counters. Pages come first, because they are packed from ring slots that the
// newest of these tokens overwrite.
#include "store.cuh"

extern "C" __global__ void __launch_bounds__(WARP_GROUP_THREADS) append_one(const __grid_constant__ AppendArgs a) {
  __shared__ u64 space[ENCODER_BYTES / 8 + 1];
  const int bh = blockIdx.x, b = bh / a.heads, h = bh % a.heads;
  // all loads precede the first branch, so they take one memory latency together
  constexpr int EACH_K = (DK + 255) / 256, EACH_V = (DV + 255) / 256;
  const u16 *k = reinterpret_cast<const u16*>(a.k) + b * a.k_b + h * a.k_h,
            *v = reinterpret_cast<const u16*>(a.v) + b * a.v_b + h * a.v_h;
  u16 new_k[EACH_K], new_v[EACH_V];
#pragma unroll
  for (int j = 0; j < EACH_K; j++) new_k[j] = k[min(j * 256 + (int)threadIdx.x, DK - 1)];
#pragma unroll
  for (int j = 0; j < EACH_V; j++) new_v[j] = v[min(j * 256 + (int)threadIdx.x, DV - 1)];
  const bool real = !padding(a, b);
  const Counts n(a, bh);
  if (n.fits == 0 || !real) {
    if (real && threadIdx.x == 0) a.lost[bh] += 1;
    return;
  }
  if (goes_to_window(a, n)) {
    u16 *slot_k = window_slot<DK>(a, a.sink_k, a.tail_k, bh, n.stored),
        *slot_v = window_slot<DV>(a, a.sink_v, a.tail_v, bh, n.stored);
#pragma unroll
    for (int j = 0; j < EACH_K; j++)
      if (slot_k && j * 256 + threadIdx.x < DK) slot_k[j * 256 + threadIdx.x] = new_k[j];
#pragma unroll
    for (int j = 0; j < EACH_V; j++)
      if (slot_v && j * 256 + threadIdx.x < DV) slot_v[j * 256 + threadIdx.x] = new_v[j];
  }
  __syncthreads();  // all threads have read the counters and written the token
  pack_due(a, n, bh, WarpGroup{(int)threadIdx.x, 0}, space);
  if (threadIdx.x == 0) {
    a.length[bh] = n.stored + 1;
    a.paged[bh] = n.after;
  }
}

// Grid (row * head, due page, keys or values).
extern "C" __global__ void __launch_bounds__(WARP_GROUP_THREADS) append_pages(const __grid_constant__ AppendArgs a) {
  __shared__ u64 space[ENCODER_BYTES / 8 + 1];
  const Counts n(a, blockIdx.x);
  const int page = n.before / PAGE + blockIdx.y;
  if (n.after > n.before && page * PAGE < n.after)
    pack(a, n, blockIdx.x, page, blockIdx.z, WarpGroup{(int)threadIdx.x, 0}, space);
}

// Grid (row * head, 32 tokens); a warp takes a token.
extern "C" __global__ void __launch_bounds__(WARP_GROUP_THREADS) append_window(const __grid_constant__ AppendArgs a) {
  const int bh = blockIdx.x, b = bh / a.heads, h = bh % a.heads, lane = threadIdx.x & 31;
  const Counts n(a, bh);
  for (int i = blockIdx.y * 32 + (threadIdx.x >> 5); i < min((int)blockIdx.y * 32 + 32, n.fits); i += blockDim.x >> 5) {
    const int position = n.stored + i;
    if (position >= a.sink && position - a.sink < n.after) continue;
    const i64 number = a.order ? a.order[(i64)b * a.tokens + i] : i;
    store_in_window<DK>(a, a.sink_k, a.tail_k, bh, position,
                        reinterpret_cast<const u16*>(a.k) + b * a.k_b + h * a.k_h + number * a.k_s, lane);
    store_in_window<DV>(a, a.sink_v, a.tail_v, bh, position,
                        reinterpret_cast<const u16*>(a.v) + b * a.v_b + h * a.v_h + number * a.v_s, lane);
  }
}

extern "C" __global__ void append_counters(const __grid_constant__ AppendArgs a, int count) {
  const int bh = blockIdx.x * blockDim.x + threadIdx.x;
  if (bh >= count) return;
  const Counts n(a, bh);
  a.length[bh] = n.stored + n.fits;
  a.paged[bh] = n.after;
  if (n.missing) a.lost[bh] += n.missing;
}
