// Attention of few query tokens to latents (MLA) stored in FP8, and storing new latents: `reference.attend` and `append` with the reading
// `latent`, formats `fp8` (content) and `dense` (RoPE part), no window.
//
// All query heads share one latent, so a tile of 16 query rows (heads x tokens) reads it once. A block of four warps takes a share of a
// sequence, 64 tokens at a time, out of two stages of shared memory:
//
//   scores    a warp takes 16 tokens and all channels. Tokens are the left operand of m16n8k16, query rows its columns.
//   weights   p x scale of the token, relative to the warp's own maximum, in fp16; handed on in the order of operands
//   values    a warp takes a quarter of the channels and all tokens. Values are the transposed keys: `ldmatrix.trans`.
//
// e4m3 becomes fp16 by an instruction (CONVERT, sm89 and later), or by moving bits: sign, exponent and mantissa in place are the number
// times 2^-8, subnormals included. Products are exact, and the scale of a token multiplies its score and its weight, never its channels. Queries of the content are fp16,
// normalised by a power of two a row. Weights are not quantized to FP8, which the narrow case does not need.
//
// `latent_merge` adds the chunk's own tokens, in the model's dtype, and what the shares found; then it stores the chunk.
#include "common.cuh"

constexpr int BLOCK = 64, WARPS = 4, THREADS = 128;
constexpr int CHUNKS = RANK / 16, ROPE_CHUNKS = ROPE / 8;  // of 16 bytes a token
constexpr int CODE_BYTES = BLOCK * RANK, ROPE_BYTES = BLOCK * ROPE * 2, STAGE_BYTES = CODE_BYTES + ROPE_BYTES + BLOCK * 4;
constexpr int Q_BYTES = (CHUNKS + ROPE / 16) * 512;
constexpr int WEIGHTS_AT = Q_BYTES, MAXIMA_AT = WEIGHTS_AT + BLOCK * 32, SCALES_AT = MAXIMA_AT + 16 * WARPS * 4, STAGES_AT = SCALES_AT + 64;
constexpr int MASK_C = RANK % 128 == 0 ? 7 : 3, MASK_R = ROPE % 64 == 0 ? 7 : ROPE % 32 == 0 ? 3 : 1;
constexpr int TILES = RANK / 16 / WARPS;                  // of 16 channels, that a warp weighs
constexpr float CODE = CONVERT ? 1.f : 256.f;                             // what a decoded number is too small by
static_assert(RANK % 64 == 0 && RANK <= 512 && ROPE % 16 == 0 && PAGE_TOKENS % BLOCK == 0, "");

struct LatentArgs {
  const u8 *q, *c, *r, *mask;       // queries [B, Hq, S, RANK + ROPE]; the chunk's content [B, S, RANK] and RoPE part [B, S, ROPE]
  u8* pool;
  const i64* address;               // [B, pages]: bytes from pool
  int *length, *paged, *lost;       // [B]; lost: tokens for which there was no room
  u8* out;                          // [B, S, Hq, RANK]
  float *partial, *sums;            // [B, tiles, splits, 16, RANK] and, maximum and sum, [B, tiles, splits, 2, 16]
  const int *order, *count;         // padded chunk: places of the tokens that are no padding [B, S], and their number [B]
  i64 q_b, q_h, q_s, c_b, c_s, r_b, r_s, mask_b, mask_s;  // strides in elements
  int heads, tokens, pages, splits, room, stores;         // stores: whether `latent_merge` stores the chunk
  float scaling;
};

extern "C" __device__ int latent_shared_bytes = STAGES_AT + 2 * STAGE_BYTES;

// Bytes 0 and 2 (odd: 1 and 3) of a word, e4m3, as two numbers of fp16, 1 / CODE of their size.
__device__ __forceinline__ u32 decoded(u32 x, bool odd) {
  if constexpr (CONVERT) return e4m3_to_half(permuted(x, odd ? 0x31 : 0x20));
  return odd ? (x & 0x80008000u) | ((x >> 1) & 0x3f803f80u) : ((x << 8) & 0x80008000u) | ((x << 7) & 0x3f803f80u);
}
// Two halves of a word of four channels, in the order of `put_queries`.
__device__ __forceinline__ u32 decoded_key(u32 x, bool second) {
  if constexpr (CONVERT) return e4m3_to_half(second ? x >> 16 : x);
  return decoded(x, second);
}

__device__ __forceinline__ float number(const u8* p, i64 i) { return to_float(reinterpret_cast<const u16*>(p)[i]); }

// Query rows of a tile, in the order in which lanes load them as right operands: 16 bytes a lane and 16 channels.
__device__ __forceinline__ void put_queries(const LatentArgs& a, int b, int tile, u8* smem, int warp, int lane) {
  constexpr int EACH = 16 / WARPS, WORDS = RANK / 64, MORE = (ROPE + 63) / 64;
  float* size = reinterpret_cast<float*>(smem + SCALES_AT);
  u32 content[EACH][WORDS], rope[EACH][MORE];
#pragma unroll
  for (int j = 0; j < EACH; j++) {                        // all is asked for before anything is used
    const int row = tile * 16 + warp + j * WARPS;
    const bool real = row < a.heads * a.tokens;
    const u32* source = reinterpret_cast<const u32*>(a.q + 2 * (real ? b * a.q_b + row % a.heads * a.q_h + row / a.heads * a.q_s : 0));
#pragma unroll
    for (int k = 0; k < WORDS; k++) content[j][k] = real ? ask(source + 32 * k + lane) : 0u;
#pragma unroll
    for (int k = 0; k < MORE; k++) rope[j][k] = real && 64 * k + 2 * lane < ROPE ? ask(source + RANK / 2 + 32 * k + lane) : 0u;
  }
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    const int i = warp + j * WARPS;
    float most = 0.f;
#pragma unroll
    for (int k = 0; k < WORDS; k++) most = fmaxf(most, fmaxf(fabsf(to_float(content[j][k] & 0xffff)), fabsf(to_float(content[j][k] >> 16))));
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
    const u32 exponent = min(max((__float_as_uint(most) >> 23) + 1, 2u), 240u);  // the next power of two
    const float inverse = __uint_as_float((254 - exponent) << 23);
    if (lane == 0) size[i] = __uint_as_float(exponent << 23) * CODE * a.scaling * LOG2E;
    u8* target = smem + (i & 7) * 64 + (i >> 3) * 8;
#pragma unroll
    for (int k = 0; k < WORDS; k++) {
      const int x = 64 * k + 2 * lane, y = x & 3;         // channels x and x + 1
      u8* at = target + x / 16 * 512 + x % 16 / 4 * 16;
      const u32 pair = pack_half(to_float(content[j][k] & 0xffff) * inverse, to_float(content[j][k] >> 16) * inverse);
      if constexpr (CONVERT) *reinterpret_cast<u32*>(at + 2 * y) = pair;
      else {                                              // 0, 2, 1, 3
        *reinterpret_cast<u16*>(at + y) = (u16)pair;
        *reinterpret_cast<u16*>(at + y + 4) = (u16)(pair >> 16);
      }
    }
#pragma unroll
    for (int k = 0; k < MORE; k++) {
      const int x = 64 * k + 2 * lane;
      if (x < ROPE) *reinterpret_cast<u32*>(target + (CHUNKS + x / 16) * 512 + x % 8 / 2 * 16 + x % 16 / 8 * 4) = rope[j][k];
    }
  }
}

// Begins to copy a block of tokens; channels of a token are swapped in groups of 16 bytes, so that eight tokens lie in different banks.
__device__ __forceinline__ void copy_block(const LatentArgs& a, int b, int block, u32 stage, int thread) {
  const int token = block * BLOCK;
  const u8* page = a.pool + a.address[(i64)b * a.pages + token / PAGE_TOKENS];
  const u8 *codes = page + (i64)(token % PAGE_TOKENS) * RANK, *rope = page + ROPE_AT + token % PAGE_TOKENS * ROPE * 2;
#pragma unroll 8
  for (int i = thread; i < BLOCK * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, x = i % CHUNKS;
    cp16(stage + row * RANK + ((x ^ (row & MASK_C)) << 4), codes + i * 16);
  }
#pragma unroll
  for (int i = thread; i < BLOCK * ROPE_CHUNKS; i += THREADS) {
    const int row = i / ROPE_CHUNKS, x = i % ROPE_CHUNKS;
    cp16(stage + CODE_BYTES + row * ROPE * 2 + ((x ^ (row & MASK_R)) << 4), rope + i * 16);
  }
  if (thread < BLOCK / 4) cp16(stage + CODE_BYTES + ROPE_BYTES + thread * 16, page + SCALE_AT + token % PAGE_TOKENS * 4 + thread * 16);
}

// q.k of the warp's 16 tokens: content and RoPE part.
__device__ __forceinline__ void score(float (*content)[4], float (*rope)[4], u32 stage, u32 queries, int warp, int lane) {
  const int token = 16 * warp + (lane & 15), side = lane >> 4;
  float sums[2][2][4] = {};                               // two chains of products for each tile of rows
#pragma unroll 4
  for (int p = 0; p < RANK / 32; p++) {
    u32 x[4], q[4], k[4];
    ldmatrix4(x, stage + token * RANK + (((2 * p + side) ^ (token & MASK_C)) << 4));
#pragma unroll
    for (int half = 0; half < 2; half++) {
      lds<4>(q, queries + (2 * p + half) * 512 + lane * 16);
      k[0] = decoded_key(x[2 * half], false); k[1] = decoded_key(x[2 * half + 1], false);
      k[2] = decoded_key(x[2 * half], true); k[3] = decoded_key(x[2 * half + 1], true);
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
    ldmatrix4(k, stage + CODE_BYTES + token * ROPE * 2 + (((2 * p + side) ^ (token & MASK_R)) << 4));
    lds<4>(q, queries + (CHUNKS + p) * 512 + lane * 16);
    mma<BF16>(rope[0], k, q[0], q[1]);
    mma<BF16>(rope[1], k, q[2], q[3]);
  }
}

// Grid (share, sequence, tile of 16 query rows).
extern "C" __global__ void __launch_bounds__(THREADS, 2) latent_attend(const __grid_constant__ LatentArgs a) {
  extern __shared__ __align__(128) u8 memory[];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const int split = blockIdx.x, b = blockIdx.y, tile = blockIdx.z;
  const int length = a.length[b], blocks = (length + BLOCK - 1) / BLOCK;
  const int first = (int)((i64)blocks * split / a.splits), stop = (int)((i64)blocks * (split + 1) / a.splits);
  const i64 slot = ((i64)b * gridDim.z + tile) * a.splits + split;
  float* sums = a.sums + slot * 32;
  if (first >= stop) {
    if (thread < 16) { sums[thread] = LOWEST; sums[16 + thread] = 0.f; }
    return;
  }
  const u32 queries = shared_address(memory), weights = queries + WEIGHTS_AT, maxima = queries + MAXIMA_AT, stages = queries + STAGES_AT;
  copy_block(a, b, first, stages, thread); commit();
  put_queries(a, b, tile, memory, warp, lane);
  float o[TILES][2][4] = {}, m[2][2], l[2][2] = {}, m_rows[2] = {LOWEST, LOWEST};  // rows 2 t + e + 8 n, and rows g + 8 n
#pragma unroll
  for (int n = 0; n < 2; n++) m[n][0] = m[n][1] = LOWEST;
  float size[2][2];

#pragma unroll 1
  for (int block = first; block < stop; block++) {
    const u32 stage = stages + ((block - first) & 1) * STAGE_BYTES;
    wait<0>();
    __syncthreads();
    if (block + 1 < stop) copy_block(a, b, block + 1, stages + ((block + 1 - first) & 1) * STAGE_BYTES, thread);
    commit();
    if (block == first)
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
      real[i] = block * BLOCK + token < length;
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
        const float handed = __uint_as_float(transposed(pair));
        sts<1>(weights + warp * 512 + lane * 16 + n * 8 + i * 4, &handed);
      }
    }
    __syncthreads();

    u32 factors[2][WARPS];                                // of the weights of each warp's tokens, rows g + 8 n, twice in a word
#pragma unroll
    for (int n = 0; n < 2; n++) {
      u32 bits[4];
      lds<4>(bits, maxima + (g + 8 * n) * WARPS * 4);
#pragma unroll
      for (int w = 0; w < WARPS; w++) m_rows[n] = fmaxf(m_rows[n], __uint_as_float(bits[w]));
#pragma unroll
      for (int w = 0; w < WARPS; w++) { const float f = ex2(__uint_as_float(bits[w]) - m_rows[n]); factors[n][w] = pack_half(f, f); }
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
        for (int k = 0; k < TILES; k++) { o[k][n][e] *= decay; o[k][n][2 + e] *= decay; }
      }
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      u32 p[4], x[4], v[4];
      lds<4>(p, weights + w * 512 + lane * 16);
#pragma unroll
      for (int i = 0; i < 4; i++) p[i] = mul2(p[i], factors[i >> 1][w]);
      const int token = 16 * w + (lane & 15);
      auto weigh = [&](int k, int half) {                 // 16 channels
        v[0] = decoded(x[2 * half], false); v[1] = decoded(x[2 * half], true);
        v[2] = decoded(x[2 * half + 1], false); v[3] = decoded(x[2 * half + 1], true);
        mma<false>(o[k][0], v, p[0], p[1]);
        mma<false>(o[k][1], v, p[2], p[3]);
      };
#pragma unroll
      for (int k = 0; k + 1 < TILES; k += 2) {
        ldmatrix4_trans(x, stage + token * RANK + (((warp * TILES + k + (lane >> 4)) ^ (token & MASK_C)) << 4));
        weigh(k, 0);
        weigh(k + 1, 1);
      }
      if (TILES % 2) {
        ldmatrix4_trans(x, stage + token * RANK + (((warp * TILES + TILES - 1) ^ (token & MASK_C)) << 4));
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
        at[0] = o[k][n][e] * CODE; at[1] = o[k][n][2 + e] * CODE;
      }
  __syncthreads();                                        // maxima have been read
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

// Of all threads of a block; `space`: a number a warp.
template <bool MOST> __device__ __forceinline__ float reduce(float x, float* space, int thread) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) { const float y = __shfl_xor_sync(~0u, x, d); x = MOST ? fmaxf(x, y) : x + y; }
  __syncthreads();
  if ((thread & 31) == 0) space[thread >> 5] = x;
  __syncthreads();
  x = space[0];
#pragma unroll
  for (int w = 1; w < WARPS; w++) x = MOST ? fmaxf(x, space[w]) : x + space[w];
  return x;
}

// float32 -> e4m3, to nearest even, saturated: PyTorch's bits.
__device__ __forceinline__ u32 to_e4m3(float x) {
  const u32 bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
  const float size = __uint_as_float(magnitude);
  u32 code;
  if (size < 0.015625f) code = __float_as_uint(size + 16384.f) - __float_as_uint(16384.f);  // subnormals: steps of 2^-9
  else code = min(((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120u << 3), 0x7eu);
  return code | bits >> 24 & 0x80u;
}

// Token `from` of the chunk becomes the token at `place` of sequence b.
__device__ __forceinline__ void store_token(const LatentArgs& a, int b, int from, int place, float* space, int thread) {
  u8* page = a.pool + a.address[(i64)b * a.pages + place / PAGE_TOKENS];
  const int row = place % PAGE_TOKENS;
  const i64 at = b * a.c_b + from * a.c_s;
  float most = 0.f;
  for (int x = thread; x < RANK; x += THREADS) most = fmaxf(most, fabsf(number(a.c, at + x)));
  most = reduce<true>(most, space, thread);
  const float scale = fmaxf(__fdiv_rn(most, 448.f), 8.673617379884035e-19f);  // 2^-60: `formats.fp8.LEAST_SCALE`
  for (int x = 4 * thread; x < RANK; x += 4 * THREADS) {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) word |= to_e4m3(__fdiv_rn(number(a.c, at + x + i), scale)) << 8 * i;
    *reinterpret_cast<u32*>(page + (i64)row * RANK + x) = word;
  }
  const u16* rope = reinterpret_cast<const u16*>(a.r) + b * a.r_b + from * a.r_s;
  for (int x = thread; x < ROPE; x += THREADS) reinterpret_cast<u16*>(page + ROPE_AT)[row * ROPE + x] = rope[x];
  if (thread == 0) reinterpret_cast<float*>(page + SCALE_AT)[row] = scale;
}

__device__ __forceinline__ bool padding(const LatentArgs& a, int b, int token) { return a.mask && !a.mask[b * a.mask_b + token * a.mask_s]; }

constexpr int SLICE = RANK % 128 == 0 ? 128 : 64, LANES = SLICE / 4, GROUPS = THREADS / LANES;

// Grid (query row, sequence, slice of channels), and with `stores` one row more, whose first slice stores the chunk.
extern "C" __global__ void __launch_bounds__(THREADS) latent_merge(const __grid_constant__ LatentArgs a) {
  __shared__ float space[WARPS], weight[MOST_TOKENS], factor[MOST_SPLITS], parts[GROUPS][SLICE];
  const int thread = threadIdx.x, row = blockIdx.x, b = blockIdx.y, rows = a.heads * a.tokens;
  if (row == rows) {
    if (blockIdx.z) return;
    int place = a.length[b], lost = 0;
    for (int token = 0; token < a.tokens; token++) {
      if (padding(a, b, token)) continue;
      if (place < a.room) store_token(a, b, token, place++, space, thread);
      else lost++;
    }
    __syncthreads();                                      // all have read the length
    if (thread == 0) { a.length[b] = a.paged[b] = place; if (lost) a.lost[b] += lost; }
    return;
  }
  const int token = row / a.heads, head = row % a.heads, tiles = (rows + 15) / 16;
  const i64 slot = ((i64)b * tiles + row / 16) * a.splits, q = b * a.q_b + head * a.q_h + token * a.q_s;
  float most = LOWEST;
  for (int j = 0; j <= token; j++) {                      // the chunk's own tokens
    float s = 0.f;
    if (!padding(a, b, j)) {
      const i64 c = b * a.c_b + j * a.c_s, r = b * a.r_b + j * a.r_s;
      for (int x = thread; x < RANK; x += THREADS) s += number(a.c, c + x) * number(a.q, q + x);
      for (int x = thread; x < ROPE; x += THREADS) s += number(a.r, r + x) * number(a.q, q + RANK + x);
      s = reduce<false>(s, space, thread) * a.scaling * LOG2E;
      most = fmaxf(most, s);
    } else s = -INF;
    if (thread == 0) weight[j] = s;
  }
  const float* sums = a.sums + slot * 32 + row % 16;
  for (int i = thread; i < a.splits; i += THREADS) most = fmaxf(most, sums[i * 32]);
  most = reduce<true>(most, space, thread);
  float l = 0.f;
  for (int i = thread; i < a.splits; i += THREADS) {
    const float f = ex2(sums[i * 32] - most), some = sums[i * 32 + 16];
    factor[i] = some > 0.f ? f : 0.f;
    l += f * some;
  }
  l = reduce<false>(l, space, thread);                    // and factors are there
  const int group = thread / LANES, channel = blockIdx.z * SLICE + thread % LANES * 4;
  float o[4] = {};
#pragma unroll 8
  for (int i = group; i < a.splits; i += GROUPS) {
    const float f = factor[i];
    if (f > 0.f) {
      const float4 x = *reinterpret_cast<const float4*>(a.partial + ((slot + i) * 16 + row % 16) * RANK + channel);
      o[0] += f * x.x; o[1] += f * x.y; o[2] += f * x.z; o[3] += f * x.w;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) parts[group][thread % LANES * 4 + i] = o[i];
  __syncthreads();
  if (thread >= SLICE) return;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < GROUPS; i++) sum += parts[i][thread];
  for (int j = 0; j <= token; j++) {
    const float p = ex2(weight[j] - most);
    l += p;
    if (p > 0.f) sum += p * number(a.c, b * a.c_b + j * a.c_s + blockIdx.z * SLICE + thread);
  }
  const i64 at = (((i64)b * a.tokens + token) * a.heads + head) * RANK + blockIdx.z * SLICE + thread;
  reinterpret_cast<u16*>(a.out)[at] = (u16)pack_model(l > 0.f ? sum / l : 0.f, 0.f);
}

// Grid (token of the chunk, sequence). Counters follow by themselves, `latent_counters`.
extern "C" __global__ void __launch_bounds__(THREADS) latent_append(const __grid_constant__ LatentArgs a) {
  __shared__ float space[WARPS];
  const int i = blockIdx.x, b = blockIdx.y, place = a.length[b] + i;
  if (i >= (a.count ? a.count[b] : a.tokens) || place >= a.room) return;
  store_token(a, b, a.order ? a.order[(i64)b * a.tokens + i] : i, place, space, threadIdx.x);
}

extern "C" __global__ void latent_counters(const __grid_constant__ LatentArgs a, int batch) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= batch) return;
  const int length = a.length[b] + (a.count ? a.count[b] : a.tokens);
  a.length[b] = a.paged[b] = min(length, a.room);
  if (length > a.room) a.lost[b] += length - a.room;
}
