// Attention of few query rows to latents (MLA) stored in the model's dtype: `reference.attend` with the attention kind `latent`, formats
// `dense` (content) and `dense` (RoPE part) in layout `core-1`, no window. `latent_merge.cuh` completes it.
//
// All query heads share one latent, so a tile of 16 query rows (heads x tokens) reads it once. A CTA of four warps takes a split of a
// sequence. It processes KV tiles of 32 tokens, from STAGES stages of shared memory:
//
//   scores    A warp takes 16 tokens, all channels and eight query rows. It keeps their queries in registers. Tokens are the left operand
//             of m16n8k16, query rows its columns.
//   weights   They are relative to a reference for each query row, rounded to the model's dtype, and written in the order of operands.
//   values    A warp takes a quarter of the channels, all tokens and all rows. Values are the transposed keys: `ldmatrix.trans`.
//
// The barrier before the values is also a vote: does a score exceed its row's reference by more than GROWTH powers of two? Only then the
// references are renewed, from the maxima of the KV tile.
#include "latent_merge.cuh"

constexpr int KV_TILE = 32;
constexpr int CONTENT_BYTES = KV_TILE * RANK * 2, ROPE_BYTES = KV_TILE * ROPE * 2,
              STAGE_BYTES = CONTENT_BYTES + ROPE_BYTES;
constexpr int MAXIMA_AT = KV_TILE * 16 * 2, STAGES_AT = MAXIMA_AT + 2 * 16 * 4;  // after the weights
constexpr int TILES = RANK / 16 / WARPS;                                         // tiles of 16 value channels per warp
constexpr int STEPS = (RANK + ROPE) / 16;                                        // products that make a score
constexpr float GROWTH = 8.f;  // weights are at most 2^GROWTH, which fp16 holds
static_assert(PAGE_TOKENS % KV_TILE == 0 && STAGES >= 2, "");

extern "C" __device__ int latent_dense_shared_bytes = STAGES_AT + STAGES * STAGE_BYTES;

// The address of a KV tile's page. It is loaded one KV tile ahead, because the copies need it immediately.
__device__ __forceinline__ i64 load_page_address(const LatentArgs& a, int b, int kv_tile) {
  return load_now(a.address + (i64)b * a.pages + kv_tile * KV_TILE / PAGE_TOKENS);
}

// Starts to copy `BYTES` of a KV tile's stream, in the page's order; a token has VECTORS_OF vectors of 16 bytes.
template <int BYTES, int VECTORS_OF>
__device__ __forceinline__ void copy_stream(const u8* source, u32 target, int left, int thread) {
#pragma unroll
  for (int i = 0; i < (BYTES / 16 + THREADS - 1) / THREADS; i++) {
    const int at = i * THREADS + thread, token = at / 8 / VECTORS_OF * 8 + at % 8;
    if (BYTES / 16 % THREADS == 0 || at < BYTES / 16) cp16(target + at * 16, source + at * 16, token < left);
  }
}
// left: number of tokens from the KV tile's first token on. Later bytes become zeros, because a weight of 0 times NaN is NaN.
__device__ __forceinline__ void copy_kv_tile(const u8* page, int kv_tile, u32 stage, int left, int thread) {
  const int token = kv_tile * KV_TILE % PAGE_TOKENS;
  copy_stream<CONTENT_BYTES, CONTENT_VECTORS>(page + (i64)token * RANK * 2, stage, left, thread);
  copy_stream<ROPE_BYTES, ROPE_VECTORS>(page + ROPE_AT + token * ROPE * 2, stage + CONTENT_BYTES, left, thread);
}

// Grid (split, sequence, tile of 16 query rows).
extern "C" __global__ void __launch_bounds__(THREADS, CTAS) latent_dense_attend(const __grid_constant__ LatentArgs a) {
  DYNAMIC_SHARED(memory);
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const int token_half = warp & 1, row_half = warp >> 1;  // 16 tokens and eight query rows of the warp's scores
  const int split = blockIdx.x, b = blockIdx.y, tile = blockIdx.z;
  const int length = a.length[b], kv_tiles = (length + KV_TILE - 1) / KV_TILE;
  const int first = (int)((i64)kv_tiles * split / a.splits), stop = (int)((i64)kv_tiles * (split + 1) / a.splits);
  const i64 slot = ((i64)b * gridDim.z + tile) * a.splits + split;
  float* sums = a.sums + slot * 32;
  if (first >= stop) {
    if (thread < 16) {
      sums[thread] = LOWEST;
      sums[16 + thread] = 0.f;
    }
    return;
  }
  const u32 weights = shared_address(memory), maxima = weights + MAXIMA_AT, stages = weights + STAGES_AT;
  i64 pages[STAGES];  // pages of the first KV tiles
#pragma unroll
  for (int i = 0; i < STAGES; i++) pages[i] = first + i < stop ? load_page_address(a, b, first + i) : 0;
  u32 q[STEPS][2];  // right operands
  {
    const int row = tile * 16 + 8 * row_half + g;
    const bool real = row < a.heads * a.tokens;
    const u32* source =
        reinterpret_cast<const u32*>(a.q + 2 * (real ? b * a.q_b + row % a.heads * a.q_h + row / a.heads * a.q_s : 0)) +
        t;
#pragma unroll
    for (int p = 0; p < STEPS; p++)
#pragma unroll
      for (int i = 0; i < 2; i++) q[p][i] = real ? load_now(source + 8 * p + 4 * i) : 0u;
  }
#pragma unroll
  for (int i = 0; i + 1 < STAGES; i++) {
    if (first + i < stop)
      copy_kv_tile(a.pool + pages[i], first + i, stages + i * STAGE_BYTES, length - (first + i) * KV_TILE, thread);
    commit();
  }
  i64 page = pages[STAGES - 1];  // the page of the next KV tile to copy
  float o[TILES][2][4] = {}, m[2][2], own[2] = {LOWEST, LOWEST},
        l[2] = {};  // references of rows 2 t + e + 8 n, and of the rows that the warp scores
  m[0][0] = m[0][1] = m[1][0] = m[1][1] = LOWEST;
  const float factor = a.scaling * LOG2E;
  int stage_index = 0;  // the stage of the KV tile

#pragma unroll 1
  for (int kv_tile = first; kv_tile < stop; kv_tile++) {
    const u32 stage = stages + stage_index * STAGE_BYTES;
    wait<STAGES - 2>();
    BARRIER(kv_tile_ready, __syncthreads());
    const int ahead = kv_tile + STAGES - 1;
    if (ahead < stop)
      copy_kv_tile(a.pool + page, ahead, stages + (stage_index ? stage_index - 1 : STAGES - 1) * STAGE_BYTES,
                   length - ahead * KV_TILE, thread);
    commit();
    if (ahead + 1 < stop) page = load_page_address(a, b, ahead + 1);
    stage_index = stage_index + 1 < STAGES ? stage_index + 1 : 0;

    float chains[4][4] = {}, s[4];  // four independent chains: products of one chain wait for each other
    {
      const int token = 16 * token_half + (lane & 15), half = lane >> 4;
#pragma unroll
      for (int p = 0; p < STEPS; p++) {
        u32 k[4];
        ldmatrix4(k, p < RANK / 16 ? stage + core_matrix(CONTENT_VECTORS, token, 2 * p + half)
                                   : stage + CONTENT_BYTES + core_matrix(ROPE_VECTORS, token, 2 * p - RANK / 8 + half));
        mma<BF16>(chains[p & 3], k, q[p][0], q[p][1]);
      }
    }
    bool grew = false;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float x = (chains[0][i] + chains[1][i]) + (chains[2][i] + chains[3][i]);
      s[i] = kv_tile * KV_TILE + 16 * token_half + g + 8 * (i >> 1) < length ? x * factor : -INF;
      grew |= s[i] > own[i & 1] + GROWTH;
    }
    float p[4];
    auto store_weights = [&]() {
#pragma unroll
      for (int i = 0; i < 4; i++) p[i] = ex2(s[i] - own[i & 1]);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float word = __uint_as_float(transposed(pack_model(p[2 * i], p[2 * i + 1])));
        sts<1>(weights + token_half * 512 + lane * 16 + row_half * 8 + i * 4, &word);
      }
    };
    store_weights();
    if (__syncthreads_or(grew)) {  // all weights are written, unless one is too large
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float top = max_rows(fmaxf(s[e], s[2 + e]));
        if (g == 0) sts<1>(maxima + (16 * token_half + 8 * row_half + 2 * t + e) * 4, &top);
      }
      BARRIER(maxima_ready, __syncthreads());
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          u32 top[2];
#pragma unroll
          for (int i = 0; i < 2; i++) lds<1>(&top[i], maxima + (16 * i + 8 * n + 2 * t + e) * 4);
          const float x = fmaxf(m[n][e], fmaxf(__uint_as_float(top[0]), __uint_as_float(top[1]))),
                      decay = ex2(m[n][e] - x);
          m[n][e] = x;
          if (n == row_half) {
            own[e] = x;
            l[e] *= decay;
          }
#pragma unroll
          for (int k = 0; k < TILES; k++) {
            o[k][n][e] *= decay;
            o[k][n][2 + e] *= decay;
          }
        }
      store_weights();
      BARRIER(renewed_weights_ready, __syncthreads());
    }
    l[0] += p[0] + p[2];
    l[1] += p[1] + p[3];

#pragma unroll
    for (int w = 0; w < 2; w++) {
      u32 x[4], v[4];
      lds<4>(x, weights + w * 512 + lane * 16);
      const int token = 16 * w + (lane >> 4) * 8 + (lane & 7), vector = 2 * warp * TILES + (lane >> 3 & 1);
#pragma unroll
      for (int k = 0; k < TILES; k++) {
        ldmatrix4_trans(v, stage + core_matrix(CONTENT_VECTORS, token, vector + 2 * k));
        mma<BF16>(o[k][0], v, x[0], x[1]);
        mma<BF16>(o[k][1], v, x[2], x[3]);
      }
    }
  }
  wait<0>();

  float* partial = a.partial + slot * 16 * RANK;
#pragma unroll
  for (int k = 0; k < TILES; k++)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        partial[(2 * t + (i & 1) + 8 * n) * RANK + (warp * TILES + k) * 16 + g + 8 * (i >> 1)] = o[k][n][i];
  float* shared_sums = reinterpret_cast<float*>(memory + MAXIMA_AT);
  if (g == 0 && warp == 0)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) sums[2 * t + e + 8 * n] = m[n][e];
  __syncthreads();  // all warps have read the maxima
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const float all = sum_rows(l[e]);
    if (g == 0) shared_sums[16 * token_half + 8 * row_half + 2 * t + e] = all;
  }
  __syncthreads();
  if (thread < 16) sums[16 + thread] = shared_sums[thread] + shared_sums[16 + thread];
}
