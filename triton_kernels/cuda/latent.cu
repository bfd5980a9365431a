// Attention of few query rows to latents (MLA) stored in FP8: `reference.attend` with the attention kind `latent`, formats `fp8` (content) and
// `dense` (RoPE part) in layout `core-1`, no window. `latent_merge.cuh` completes it.
//
// All query heads share one latent, so a tile of 16 query rows (heads x tokens) reads it once. A CTA of four warps takes a split of a
// sequence. It processes KV tiles of 64 tokens, from two stages of shared memory:
//
//   scores    A warp takes 16 tokens and all channels. Tokens are the left operand of m16n8k16, query rows its columns.
//   weights   p x scale of the token, relative to the warp's own maximum, in fp16. They are written in the order of operands.
//   values    A warp takes a quarter of the channels and all tokens. Values are the transposed keys: `ldmatrix.trans`.
//
// An instruction converts e4m3 to fp16 (CONVERT, sm89 and later). On older GPUs bits are moved: sign, exponent and mantissa of e4m3 in the
// fields of fp16 are the number times 2^-8, subnormals included. Products are exact. A token's scale multiplies its score and its weight,
// not its channels. Queries of the content are fp16; each row is normalised by a power of two. Weights are not quantized to FP8, because few
// query rows do not need it.
#include "latent_merge.cuh"

constexpr int KV_TILE = 64;
constexpr int CODE_BYTES = KV_TILE * RANK, ROPE_BYTES = KV_TILE * ROPE * 2,
              STAGE_BYTES = CODE_BYTES + ROPE_BYTES + KV_TILE * 4;
constexpr int Q_BYTES = (CONTENT_VECTORS + ROPE / 16) * 512;
constexpr int WEIGHTS_AT = Q_BYTES, MAXIMA_AT = WEIGHTS_AT + KV_TILE * 32, SCALES_AT = MAXIMA_AT + 16 * WARPS * 4,
              STAGES_AT = SCALES_AT + 64;
constexpr int TILES = RANK / 16 / WARPS;  // tiles of 16 value channels per warp
static_assert(PAGE_TOKENS % KV_TILE == 0, "");

extern "C" __device__ int latent_shared_bytes = STAGES_AT + 2 * STAGE_BYTES;

// Bytes 0 and 2 (odd: 1 and 3) of a word, as e4m3, become two fp16 numbers of 1 / CODE times their value.
__device__ __forceinline__ u32 decoded(u32 x, bool odd) {
  if constexpr (CONVERT) return e4m3_to_half(permuted(x, odd ? 0x31 : 0x20));
  return odd ? (x & 0x80008000u) | ((x >> 1) & 0x3f803f80u) : ((x << 8) & 0x80008000u) | ((x << 7) & 0x3f803f80u);
}
// The two pairs of a word of four channels, in the order of `put_queries`.
__device__ __forceinline__ u32 decoded_key(u32 x, bool second) {
  if constexpr (CONVERT) return e4m3_to_half(second ? x >> 16 : x);
  return decoded(x, second);
}

// Writes a tile's query rows in the order in which lanes load them as right operands: 16 bytes for each lane and 16 channels.
__device__ __forceinline__ void put_queries(const LatentArgs& a, int b, int tile, u8* smem, int warp, int lane) {
  constexpr int EACH = 16 / WARPS, WORDS = RANK / 64, ROPE_WORDS = (ROPE + 63) / 64;
  float* size = reinterpret_cast<float*>(smem + SCALES_AT);
  u32 content[EACH][WORDS], rope[EACH][ROPE_WORDS];
#pragma unroll
  for (int j = 0; j < EACH; j++) {  // all loads start before the first result is used
    const int row = tile * 16 + warp + j * WARPS;
    const bool real = row < a.heads * a.tokens;
    const u32* source =
        reinterpret_cast<const u32*>(a.q + 2 * (real ? b * a.q_b + row % a.heads * a.q_h + row / a.heads * a.q_s : 0));
#pragma unroll
    for (int k = 0; k < WORDS; k++) content[j][k] = real ? load_now(source + 32 * k + lane) : 0u;
#pragma unroll
    for (int k = 0; k < ROPE_WORDS; k++)
      rope[j][k] = real && 64 * k + 2 * lane < ROPE ? load_now(source + RANK / 2 + 32 * k + lane) : 0u;
  }
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    const int i = warp + j * WARPS;
    float largest = 0.f;
#pragma unroll
    for (int k = 0; k < WORDS; k++)
      largest = fmaxf(largest, fmaxf(fabsf(to_float(content[j][k] & 0xffff)), fabsf(to_float(content[j][k] >> 16))));
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
    const u32 exponent = min(max((__float_as_uint(largest) >> 23) + 1, 2u), 240u);  // the next power of two
    const float inverse = __uint_as_float((254 - exponent) << 23);
    if (lane == 0) size[i] = __uint_as_float(exponent << 23) * CODE * a.scaling * LOG2E;
    u8* target = smem + (i & 7) * 64 + (i >> 3) * 8;
#pragma unroll
    for (int k = 0; k < WORDS; k++) {
      const int x = 64 * k + 2 * lane, y = x & 3;  // channels x and x + 1
      u8* at = target + x / 16 * 512 + x % 16 / 4 * 16;
      const u32 pair = pack_half(to_float(content[j][k] & 0xffff) * inverse, to_float(content[j][k] >> 16) * inverse);
      if constexpr (CONVERT) *reinterpret_cast<u32*>(at + 2 * y) = pair;
      else {  // 0, 2, 1, 3
        *reinterpret_cast<u16*>(at + y) = (u16)pair;
        *reinterpret_cast<u16*>(at + y + 4) = (u16)(pair >> 16);
      }
    }
#pragma unroll
    for (int k = 0; k < ROPE_WORDS; k++) {
      const int x = 64 * k + 2 * lane;
      if (x < ROPE)
        *reinterpret_cast<u32*>(target + (CONTENT_VECTORS + x / 16) * 512 + x % 8 / 2 * 16 + x % 16 / 8 * 4) =
            rope[j][k];
    }
  }
}

// The address of a KV tile's page. It is loaded one KV tile ahead, because the copies need it immediately.
__device__ __forceinline__ i64 load_page_address(const LatentArgs& a, int b, int kv_tile) {
  return load_now(a.address + (i64)b * a.pages + kv_tile * KV_TILE / PAGE_TOKENS);
}

// Starts to copy a KV tile, in the page's order, in which 16 bytes of eight tokens are in different banks.
__device__ __forceinline__ void copy_kv_tile(const u8* page, int kv_tile, u32 stage, int thread) {
  static_assert(KV_TILE * CONTENT_VECTORS % THREADS == 0 && KV_TILE * ROPE_VECTORS % THREADS == 0,
                "every thread copies as much");
  const int token = kv_tile * KV_TILE % PAGE_TOKENS;
  const u8 *codes = page + (i64)token * RANK + thread * 16, *rope = page + ROPE_AT + token * ROPE * 2 + thread * 16;
  const u32 target = stage + thread * 16;
#pragma unroll
  for (int i = 0; i < KV_TILE * CONTENT_VECTORS / THREADS; i++)
    cp16(target + i * THREADS * 16, codes + i * THREADS * 16);
#pragma unroll
  for (int i = 0; i < KV_TILE * ROPE_VECTORS / THREADS; i++)
    cp16(target + CODE_BYTES + i * THREADS * 16, rope + i * THREADS * 16);
  if (thread < KV_TILE / 4) cp16(target + CODE_BYTES + ROPE_BYTES, page + SCALE_AT + token * 4 + thread * 16);
}

// q.k of the warp's 16 tokens: content plus RoPE part.
__device__ __forceinline__ void score(float (*content)[4], float (*rope)[4], u32 stage, u32 queries, int warp,
                                      int lane) {
  const int token = 16 * warp + (lane & 15), side = lane >> 4;
  float sums[2][2][4] = {};  // two independent chains of products for each tile of rows
#pragma unroll 4
  for (int p = 0; p < RANK / 32; p++) {
    u32 x[4], q[4], k[4];
    ldmatrix4(x, stage + core_matrix(CONTENT_VECTORS, token, 2 * p + side));
#pragma unroll
    for (int half = 0; half < 2; half++) {
      lds<4>(q, queries + (2 * p + half) * 512 + lane * 16);
      k[0] = decoded_key(x[2 * half], false);
      k[1] = decoded_key(x[2 * half + 1], false);
      k[2] = decoded_key(x[2 * half], true);
      k[3] = decoded_key(x[2 * half + 1], true);
      mma<false>(sums[half][0], k, q[0], q[1]);
      mma<false>(sums[half][1], k, q[2], q[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) content[n][i] = sums[0][n][i] + sums[1][n][i];
#pragma unroll
  for (int p = 0; p < ROPE / 16; p++) {
    u32 k[4], q[4];
    ldmatrix4(k, stage + CODE_BYTES + core_matrix(ROPE_VECTORS, token, 2 * p + side));
    lds<4>(q, queries + (CONTENT_VECTORS + p) * 512 + lane * 16);
    mma<BF16>(rope[0], k, q[0], q[1]);
    mma<BF16>(rope[1], k, q[2], q[3]);
  }
}

// Grid (split, sequence, tile of 16 query rows).
extern "C" __global__ void __launch_bounds__(THREADS, 2) latent_attend(const __grid_constant__ LatentArgs a) {
  DYNAMIC_SHARED(memory);
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
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
  const u32 queries = shared_address(memory), weights = queries + WEIGHTS_AT, maxima = queries + MAXIMA_AT,
            stages = queries + STAGES_AT;
  copy_kv_tile(a.pool + load_page_address(a, b, first), first, stages, thread);
  commit();
  i64 page = first + 1 < stop ? load_page_address(a, b, first + 1) : 0;  // of the next KV tile
  put_queries(a, b, tile, memory, warp, lane);
  float o[TILES][2][4] = {}, m[2][2], l[2][2] = {},
        m_rows[2] = {LOWEST, LOWEST};  // rows 2 t + e + 8 n, and rows g + 8 n
#pragma unroll
  for (int n = 0; n < 2; n++) m[n][0] = m[n][1] = LOWEST;
  float size[2][2];

#pragma unroll 1
  for (int kv_tile = first; kv_tile < stop; kv_tile++) {
    const u32 stage = stages + ((kv_tile - first) & 1) * STAGE_BYTES;
    wait<0>();
    BARRIER(kv_tile_ready, __syncthreads());
    if (kv_tile + 1 < stop)
      copy_kv_tile(a.pool + page, kv_tile + 1, stages + ((kv_tile + 1 - first) & 1) * STAGE_BYTES, thread);
    commit();
    if (kv_tile + 2 < stop) page = load_page_address(a, b, kv_tile + 2);
    if (kv_tile == first)
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) size[n][e] = reinterpret_cast<const float*>(memory + SCALES_AT)[2 * t + e + 8 * n];

    float content[2][4] = {}, rope[2][4] = {}, top[2][2], sum[2][2];
    score(content, rope, stage, queries, warp, lane);
    float scale[2], logarithm[2];
    bool real[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int token = 16 * warp + g + 8 * i;
      u32 bits;
      lds<1>(&bits, stage + CODE_BYTES + ROPE_BYTES + token * 4);
      scale[i] = __uint_as_float(bits);
      logarithm[i] = lg2(scale[i]);
      real[i] = kv_tile * KV_TILE + token < length;
    }
    const float factor = a.scaling * LOG2E;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float s = content[n][i] * (scale[i >> 1] * size[n][i & 1]) + rope[n][i] * factor;
        rope[n][i] = real[i >> 1] ? s : -INF;
        content[n][i] = real[i >> 1] ? s + logarithm[i >> 1] : -INF;
      }
#pragma unroll
      for (int e = 0; e < 2; e++) top[n][e] = fmaxf(max_rows(fmaxf(content[n][e], content[n][2 + e])), LOWEST);
      if (g == 0) {
        sts<1>(maxima + ((2 * t + 8 * n) * WARPS + warp) * 4, &top[n][0]);
        sts<1>(maxima + ((2 * t + 1 + 8 * n) * WARPS + warp) * 4, &top[n][1]);
      }
#pragma unroll
      for (int e = 0; e < 2; e++) sum[n][e] = ex2(rope[n][e] - top[n][e]) + ex2(rope[n][2 + e] - top[n][e]);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 pair = pack_half(ex2(content[n][2 * i] - top[n][0]), ex2(content[n][2 * i + 1] - top[n][1]));
        const float word = __uint_as_float(transposed(pair));
        sts<1>(weights + warp * 512 + lane * 16 + n * 8 + i * 4, &word);
      }
    }
    BARRIER(weights_ready, __syncthreads());

    u32 factors[2][WARPS];  // factors of the weights of each warp's tokens: rows g + 8 n, twice in a word
#pragma unroll
    for (int n = 0; n < 2; n++) {
      u32 bits[4];
      lds<4>(bits, maxima + (g + 8 * n) * WARPS * 4);
#pragma unroll
      for (int w = 0; w < WARPS; w++) m_rows[n] = fmaxf(m_rows[n], __uint_as_float(bits[w]));
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float f = ex2(__uint_as_float(bits[w]) - m_rows[n]);
        factors[n][w] = pack_half(f, f);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        u32 bits[4];
        lds<4>(bits, maxima + (2 * t + e + 8 * n) * WARPS * 4);
        float top_of_all = m[n][e];
#pragma unroll
        for (int w = 0; w < WARPS; w++) top_of_all = fmaxf(top_of_all, __uint_as_float(bits[w]));
        const float decay = ex2(m[n][e] - top_of_all);
        l[n][e] = l[n][e] * decay + sum[n][e] * ex2(top[n][e] - top_of_all);
        m[n][e] = top_of_all;
#pragma unroll
        for (int k = 0; k < TILES; k++) {
          o[k][n][e] *= decay;
          o[k][n][2 + e] *= decay;
        }
      }
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      u32 p[4], x[4] = {}, v[4];
      lds<4>(p, weights + w * 512 + lane * 16);
#pragma unroll
      for (int i = 0; i < 4; i++) p[i] = mul2(p[i], factors[i >> 1][w]);
      const int token = 16 * w + (lane & 15);
      auto weigh = [&](int k, int half) {  // 16 channels
        v[0] = decoded(x[2 * half], false);
        v[1] = decoded(x[2 * half], true);
        v[2] = decoded(x[2 * half + 1], false);
        v[3] = decoded(x[2 * half + 1], true);
        mma<false>(o[k][0], v, p[0], p[1]);
        mma<false>(o[k][1], v, p[2], p[3]);
      };
#pragma unroll
      for (int k = 0; k + 1 < TILES; k += 2) {
        ldmatrix4_trans(x, stage + core_matrix(CONTENT_VECTORS, token, warp * TILES + k + (lane >> 4)));
        weigh(k, 0);
        weigh(k + 1, 1);
      }
      if (TILES % 2) {
        ldmatrix4_trans(x, stage + core_matrix(CONTENT_VECTORS, token, warp * TILES + TILES - 1));
        weigh(TILES - 1, 0);
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
      for (int e = 0; e < 2; e++) {
        const int row = 2 * t + e + 8 * n, channel = (warp * TILES + k) * 16 + 2 * g;
        float* at = partial + row * RANK + channel;
        at[0] = o[k][n][e] * CODE;
        at[1] = o[k][n][2 + e] * CODE;
      }
  __syncthreads();  // all warps have read the maxima
  float* shared_sums = reinterpret_cast<float*>(memory + MAXIMA_AT);
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float all = sum_rows(l[n][e]);
      const int row = 2 * t + e + 8 * n;
      if (g == 0) shared_sums[row * WARPS + warp] = all;
      if (g == 0 && warp == 0) sums[row] = m[n][e];
    }
  __syncthreads();
  if (thread < 16) {
    float all = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) all += shared_sums[thread * WARPS + w];
    sums[16 + thread] = all;
  }
}
