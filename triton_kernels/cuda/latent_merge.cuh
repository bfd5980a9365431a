// Follows attention to latents: attends to the new tokens, in the model's dtype, merges the results of a sequence's splits, and stores the
// new tokens.
#pragma once
#include "latent.cuh"
#include "e4m3.cuh"

constexpr int WARPS = 4, THREADS = 128;

// Reduces over all threads of a CTA: the maximum, or the sum. space: a number per warp.
template <bool MAXIMUM> __device__ __forceinline__ float reduce(float x, float* space, int thread) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const float y = __shfl_xor_sync(~0u, x, d);
    x = MAXIMUM ? fmaxf(x, y) : x + y;
  }
  __syncthreads();
  if ((thread & 31) == 0) space[thread >> 5] = x;
  __syncthreads();
  x = space[0];
#pragma unroll
  for (int w = 1; w < WARPS; w++) x = MAXIMUM ? fmaxf(x, space[w]) : x + space[w];
  return x;
}

// Stores new token `from` at `position` of sequence b.
__device__ __forceinline__ void store_token(const LatentArgs& a, int b, int from, int position, float* space,
                                            int thread) {
  u8* page = a.pool + a.address[(i64)b * a.pages + position / PAGE_TOKENS];
  const int row = position % PAGE_TOKENS;
  const i64 at = b * a.c_b + from * a.c_s;
#if DENSE_CONTENT
  for (int x = 8 * thread; x < RANK; x += 8 * THREADS)
    *reinterpret_cast<float4*>(page + core_matrix(CONTENT_VECTORS, row, x / 8)) =
        *reinterpret_cast<const float4*>(a.c + 2 * (at + x));
#else
  float maximum = 0.f;
  for (int x = thread; x < RANK; x += THREADS) maximum = fmaxf(maximum, e4m3_size(number(a.c, at + x)));
  const float scale = e4m3_scale(reduce<true>(maximum, space, thread));
  for (int x = 4 * thread; x < RANK; x += 4 * THREADS) {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) word |= to_e4m3(__fdiv_rn(number(a.c, at + x + i), scale)) << 8 * i;
    *reinterpret_cast<u32*>(page + core_matrix(CONTENT_VECTORS, row, x / 16) + x % 16) = word;
  }
  if (thread == 0) reinterpret_cast<float*>(page + SCALE_AT)[row] = scale;
#endif
  const u16* rope = reinterpret_cast<const u16*>(a.r) + b * a.r_b + from * a.r_s;
  for (int x = thread; x < ROPE; x += THREADS)
    *reinterpret_cast<u16*>(page + ROPE_AT + core_matrix(ROPE_VECTORS, row, x / 8) + x % 8 * 2) = rope[x];
}

__device__ __forceinline__ bool padding(const LatentArgs& a, int b, int token) {
  return a.mask && !a.mask[b * a.mask_b + token * a.mask_s];
}

// Stores the new tokens of sequence b. Called by a CTA.
__device__ __forceinline__ void store_chunk(const LatentArgs& a, int b, float* space, int thread) {
  int position = a.length[b], lost = 0;
  for (int token = 0; token < a.tokens; token++) {
    if (padding(a, b, token)) continue;
    if (position < a.room) store_token(a, b, token, position++, space, thread);
    else lost++;
  }
  __syncthreads();  // all have read the length
  if (thread == 0) {
    a.length[b] = a.paged[b] = position;
    if (lost) a.lost[b] += lost;
  }
}

constexpr int SLICE = RANK % 128 == 0 ? 128 : 64, LANES = SLICE / 4, GROUPS = THREADS / LANES;

// Grid (query row, sequence, slice of channels). With `stores` there is one more row, whose first slice stores the new tokens.
extern "C" __global__ void __launch_bounds__(THREADS) latent_merge(const __grid_constant__ LatentArgs a) {
  __shared__ float space[WARPS], weight[MAX_TOKENS], factor[MAX_SPLITS], partial_sums[GROUPS][SLICE];
  const int thread = threadIdx.x, row = blockIdx.x, b = blockIdx.y, rows = a.heads * a.tokens;
  if (row == rows) {
    if (!blockIdx.z) store_chunk(a, b, space, thread);
    return;
  }
  const int token = row / a.heads, head = row % a.heads, tiles = (rows + 15) / 16;
  const i64 slot = ((i64)b * tiles + row / 16) * a.splits, q = b * a.q_b + head * a.q_h + token * a.q_s;
  float maximum = LOWEST;
  for (int j = 0; j <= token; j++) {  // the new tokens
    float s = 0.f;
    if (!padding(a, b, j)) {
      const i64 c = b * a.c_b + j * a.c_s, r = b * a.r_b + j * a.r_s;
      for (int x = thread; x < RANK; x += THREADS) s += number(a.c, c + x) * number(a.q, q + x);
      for (int x = thread; x < ROPE; x += THREADS) s += number(a.r, r + x) * number(a.q, q + RANK + x);
      s = reduce<false>(s, space, thread) * a.scaling * LOG2E;
      maximum = fmaxf(maximum, s);
    } else s = -INF;
    if (thread == 0) weight[j] = s;
  }
  const float* sums = a.sums + slot * 32 + row % 16;
  for (int i = thread; i < a.splits; i += THREADS) maximum = fmaxf(maximum, sums[i * 32]);
  maximum = reduce<true>(maximum, space, thread);
  float l = 0.f;
  for (int i = thread; i < a.splits; i += THREADS) {
    const float f = ex2(sums[i * 32] - maximum), weight_sum = sums[i * 32 + 16];
    factor[i] = weight_sum > 0.f ? f : 0.f;
    l += f * weight_sum;
  }
  l = reduce<false>(l, space, thread);  // after its barrier all factors are written
  const int group = thread / LANES, channel = blockIdx.z * SLICE + thread % LANES * 4;
  float o[4] = {};
#pragma unroll 8
  for (int i = group; i < a.splits; i += GROUPS) {
    const float f = factor[i];
    if (f > 0.f) {
      const float4 x = *reinterpret_cast<const float4*>(a.partial + ((slot + i) * 16 + row % 16) * RANK + channel);
      o[0] += f * x.x;
      o[1] += f * x.y;
      o[2] += f * x.z;
      o[3] += f * x.w;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) partial_sums[group][thread % LANES * 4 + i] = o[i];
  __syncthreads();
  if (thread >= SLICE) return;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < GROUPS; i++) sum += partial_sums[i][thread];
  for (int j = 0; j <= token; j++) {
    const float p = ex2(weight[j] - maximum);
    l += p;
    if (p > 0.f) sum += p * number(a.c, b * a.c_b + j * a.c_s + blockIdx.z * SLICE + thread);
  }
  const i64 at = (((i64)b * a.tokens + token) * a.heads + head) * RANK + blockIdx.z * SLICE + thread;
  reinterpret_cast<u16*>(a.out)[at] = (u16)pack_model(l > 0.f ? sum / l : 0.f, 0.f);
}

#if RANK % 128 == 0
// `latent_merge` for many query rows: a warp takes a whole row. Grid (four query rows, sequence). With `stores` there is one more CTA per
// sequence, which stores the new tokens.
extern "C" __global__ void __launch_bounds__(THREADS) latent_merge_rows(const __grid_constant__ LatentArgs a) {
  constexpr int VECTORS = RANK / 128;  // a lane has VECTORS groups of four neighbouring channels, 128 apart
  __shared__ float space[WARPS];
  const int thread = threadIdx.x, lane = thread & 31, b = blockIdx.y, rows = a.heads * a.tokens,
            row = blockIdx.x * WARPS + (thread >> 5);
  if (blockIdx.x * WARPS >= rows) {
    store_chunk(a, b, space, thread);
    return;
  }
  if (row >= rows) return;
  const int token = row / a.heads, head = row % a.heads, tiles = (rows + 15) / 16;
  const i64 slot = ((i64)b * tiles + row / 16) * a.splits;
  const float* sums = a.sums + slot * 32 + row % 16;
  const u16* q = reinterpret_cast<const u16*>(a.q) + b * a.q_b + head * a.q_h + token * a.q_s;
  auto four = [&](const u16* p, float* x) {
    const u32 low = reinterpret_cast<const u32*>(p)[0], high = reinterpret_cast<const u32*>(p)[1];
    x[0] = to_float(low & 0xffff);
    x[1] = to_float(low >> 16);
    x[2] = to_float(high & 0xffff);
    x[3] = to_float(high >> 16);
  };
  float o[VECTORS][4] = {}, query[VECTORS][4], m = LOWEST, l = 0.f;
#pragma unroll
  for (int k = 0; k < VECTORS; k++) four(q + 128 * k + 4 * lane, query[k]);
  for (int j = 0; j <= token; j++) {  // the new tokens
    if (padding(a, b, j)) continue;
    const u16 *c = reinterpret_cast<const u16*>(a.c) + b * a.c_b + j * a.c_s,
              *r = reinterpret_cast<const u16*>(a.r) + b * a.r_b + j * a.r_s;
    float value[VECTORS][4], s = 0.f;
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
      four(c + 128 * k + 4 * lane, value[k]);
#pragma unroll
      for (int i = 0; i < 4; i++) s += value[k][i] * query[k][i];
    }
    for (int x = lane; x < ROPE; x += 32) s += to_float(r[x]) * to_float(q[RANK + x]);
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) s += __shfl_xor_sync(~0u, s, d);
    s *= a.scaling * LOG2E;
    const float top = fmaxf(m, s), decay = ex2(m - top), p = ex2(s - top);
    m = top;
    l = l * decay + p;
#pragma unroll
    for (int k = 0; k < VECTORS; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) o[k][i] = o[k][i] * decay + p * value[k][i];
  }
  for (int from = 0; from < a.splits;
       from += 32) {  // 32 splits at a time: factors in parallel lanes, then sums in sequence
    const int count = min(a.splits - from, 32);
    const float mine = lane < count ? sums[(from + lane) * 32] : LOWEST,
                weight_sum = lane < count ? sums[(from + lane) * 32 + 16] : 0.f;
    float top = fmaxf(m, mine);
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const float decay = ex2(m - top), factor = weight_sum > 0.f ? ex2(mine - top) : 0.f;
    float split_weights = factor * weight_sum;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) split_weights += __shfl_xor_sync(~0u, split_weights, d);
    m = top;
    l = l * decay + split_weights;
#pragma unroll
    for (int k = 0; k < VECTORS; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) o[k][i] *= decay;
#pragma unroll 4
    for (int i = 0; i < count; i++) {
      const float f = __shfl_sync(~0u, factor, i);
      const float* at = a.partial + ((slot + from + i) * 16 + row % 16) * RANK + 4 * lane;
      if (f > 0.f) {  // a split without tokens may have written nothing
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
          const float4 x = *reinterpret_cast<const float4*>(at + 128 * k);
          o[k][0] += f * x.x;
          o[k][1] += f * x.y;
          o[k][2] += f * x.z;
          o[k][3] += f * x.w;
        }
      }
    }
  }
  const float inverse = l > 0.f ? 1.f / l : 0.f;
  u32* out = reinterpret_cast<u32*>(a.out + 2 * ((((i64)b * a.tokens + token) * a.heads + head) * RANK + 4 * lane));
#pragma unroll
  for (int k = 0; k < VECTORS; k++) {
    out[64 * k] = pack_model(o[k][0] * inverse, o[k][1] * inverse);
    out[64 * k + 1] = pack_model(o[k][2] * inverse, o[k][3] * inverse);
  }
}
#endif

// Grid (new token, sequence). A separate launch advances the counters: `latent_append_counters`.
extern "C" __global__ void __launch_bounds__(THREADS) latent_append(const __grid_constant__ LatentArgs a) {
  __shared__ float space[WARPS];
  const int i = blockIdx.x, b = blockIdx.y, position = a.length[b] + i;
  if (i >= (a.count ? a.count[b] : a.tokens) || position >= a.room) return;
  store_token(a, b, a.order ? a.order[(i64)b * a.tokens + i] : i, position, space, threadIdx.x);
}

extern "C" __global__ void latent_append_counters(const __grid_constant__ LatentArgs a, int batch) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= batch) return;
  const int length = a.length[b] + (a.count ? a.count[b] : a.tokens);
  a.length[b] = a.paged[b] = min(length, a.room);
  if (length > a.room) a.lost[b] += length - a.room;
}
