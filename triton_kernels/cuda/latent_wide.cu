// Attention of many query rows (heads x tokens) to latents in FP8 on Hopper. It does the work of `latent.cu` with products of Hopper's warp
// groups (`wgmma`), whose operands are both e4m3. So queries and weights are quantized (SnapMLA, section 3.2). The reference is
// `eval/benchmarks/snapmla_pipeline.py`.
//
// A CTA of two warp groups processes COLUMNS query rows, in KV tiles of 128 tokens. Operands are swapped: tokens, or channels, are the rows.
//
//   scores    S^T = K q^T. A warp group takes 64 tokens. Content is in e4m3, the RoPE part in the model's dtype.
//   weights   p x scale of the token, in e4m3, relative to a reference that the 128 tokens share. The reference is renewed when a weight
//             is too large for it, and every RENEWAL KV tiles; it then becomes the maximum of the KV tile, so small weights keep their
//             precision. In between no warp waits for another's maximum, and sums need no decay.
//   values    O^T = V^T P^T. A warp group takes half of the channels and all tokens. V^T is read from the bytes of K: `ldmatrix.trans`
//             transposes pairs of channels, `prmt` separates them, and the products read them from registers.
//
// Pages are in core matrices (layout `core-1`), so plain bulk copies load halves (64 tokens of a KV tile) into STAGES stages.
#include "latent.cuh"
#include "hopper.cuh"

constexpr int HALF = 64, THREADS = 256, WARPS = 8;
constexpr int CODE_BYTES = HALF * RANK, ROPE_BYTES = HALF * ROPE * 2, STAGE_BYTES = CODE_BYTES + ROPE_BYTES + HALF * 4;
constexpr int TILES = RANK / 128;          // tiles of 64 value channels per warp group
constexpr int EACH = COLUMNS / 4;          // columns for which a lane has scores, of two tokens each
constexpr int GROUP_BYTES = COLUMNS * 16;  // weights of 16 tokens
constexpr int WEIGHTS_AT = COLUMNS * (RANK + ROPE * 2), STAGES_AT = WEIGHTS_AT + 8 * GROUP_BYTES;
constexpr int FACTORS_AT = STAGES_AT + STAGES * STAGE_BYTES;  // scales of the queries, a float a column
constexpr int MAXIMA_AT = FACTORS_AT + COLUMNS * 4;           // maxima of the KV tile, as integers of the same order
constexpr int REFERENCES_AT = MAXIMA_AT + COLUMNS * 4;        // two copies: references in powers of two, less LIFT
constexpr int TOPS_AT = REFERENCES_AT + COLUMNS * 8;          // two copies: maximum so far, less LIFT
constexpr int SUMS_AT = TOPS_AT + COLUMNS * 8;                // each warp's sums
constexpr int BARRIERS_AT = SUMS_AT + WARPS * COLUMNS * 4;
// A weight at the reference is 2^LIFT. A weight 3.7 powers of two larger still fits into e4m3, so maxima may grow for a long time before
// they outgrow the reference. When the reference is renewed, it becomes the maximum of the KV tile if that is larger, or smaller by SHRINKAGE.
// After a jump by JUMP the next KV tile renews it again, so that tokens after a dominant token are not lost. It never falls more than DEPTH
// below the maximum so far, so that sums stay finite. A weight below 2^-15 of the reference is lost.
constexpr float LIFT = 5.f, SHRINKAGE = 4.f, JUMP = 8.f, DEPTH = 40.f;
constexpr int RENEWAL = 8;
static_assert(RANK % 128 == 0 && PAGE_TOKENS % HALF == 0 && COLUMNS % 16 == 0 && STAGES >= 2, "");

extern "C" __device__ int latent_wide_shared_bytes = BARRIERS_AT + STAGES * 8;

// Maps floats to integers of the same order.
__device__ __forceinline__ int ordered(float x) {
  const int i = __float_as_int(x);
  return i ^ (i >> 31 & 0x7fffffff);
}
__device__ __forceinline__ float unordered(int i) { return __int_as_float(i ^ (i >> 31 & 0x7fffffff)); }
__device__ __forceinline__ float2 pair_at(u32 address) {
  u32 x[2];
  lds<2>(x, address);
  return {__uint_as_float(x[0]), __uint_as_float(x[1])};
}

// Writes query rows as right operands: content in e4m3 with a scale per row, and the RoPE part unchanged.
__device__ __forceinline__ void put_queries(const LatentArgs& a, int b, int tile, u8* smem, int warp, int lane) {
  constexpr int OWN = COLUMNS / WARPS, WORDS = RANK / 64, ROPE_WORDS = (ROPE + 63) / 64;
  const int last = a.heads * a.tokens - 1;
  float* factors = reinterpret_cast<float*>(smem + FACTORS_AT);
  u32 content[OWN][WORDS], rope[OWN][ROPE_WORDS];
#pragma unroll
  for (int j = 0; j < OWN; j++) {                                  // all loads begin before the first result is used
    const int row = min(tile * COLUMNS + warp + j * WARPS, last);  // rows past the last one are replaced by zeros
    const u32* source =
        reinterpret_cast<const u32*>(a.q + 2 * (b * a.q_b + row % a.heads * a.q_h + row / a.heads * a.q_s));
#pragma unroll
    for (int k = 0; k < WORDS; k++) content[j][k] = load_now(source + 32 * k + lane);
#pragma unroll
    for (int k = 0; k < ROPE_WORDS; k++)
      rope[j][k] = 64 * k + 2 * lane < ROPE ? load_now(source + RANK / 2 + 32 * k + lane) : 0u;
  }
  float largest[OWN] = {};
#pragma unroll
  for (int j = 0; j < OWN; j++) {
    const bool real = tile * COLUMNS + warp + j * WARPS <= last;
#pragma unroll
    for (int k = 0; k < WORDS; k++) content[j][k] = real ? content[j][k] : 0u;
#pragma unroll
    for (int k = 0; k < ROPE_WORDS; k++) rope[j][k] = real ? rope[j][k] : 0u;
#pragma unroll
    for (int k = 0; k < WORDS; k++)
      largest[j] =
          fmaxf(largest[j], fmaxf(fabsf(to_float(content[j][k] & 0xffff)), fabsf(to_float(content[j][k] >> 16))));
  }
#pragma unroll
  for (int d = 1; d < 32; d <<= 1)
#pragma unroll
    for (int j = 0; j < OWN; j++) largest[j] = fmaxf(largest[j], __shfl_xor_sync(~0u, largest[j], d));
#pragma unroll
  for (int j = 0; j < OWN; j++) {
    const int row = warp + j * WARPS;
    const float scale = fmaxf(largest[j] * (1.f / 448.f), 8.673617379884035e-19f),
                inverse = rcp(scale);  // 2^-60: `formats.fp8.MIN_SCALE`
    if (lane == 0) factors[row] = scale * a.scaling * LOG2E;
#pragma unroll
    for (int k = 0; k < WORDS; k++) {
      const int x = 64 * k + 2 * lane;
      *reinterpret_cast<u16*>(smem + core_matrix(CONTENT_VECTORS, row, x / 16) + x % 16) =
          (u16)pack_e4m3(to_float(content[j][k] & 0xffff) * inverse, to_float(content[j][k] >> 16) * inverse);
    }
#pragma unroll
    for (int k = 0; k < ROPE_WORDS; k++) {
      const int x = 64 * k + 2 * lane;
      if (x < ROPE)
        *reinterpret_cast<u32*>(smem + COLUMNS * RANK + core_matrix(ROPE_VECTORS, row, x / 8) + x % 8 * 2) = rope[j][k];
    }
  }
}

// The halves of a split that remain to be copied. One thread starts the copies.
struct Halves {
  int next, stop;  // indices of halves in the sequence
  i64 page;        // the address of the page of `next`, loaded early
  __device__ __forceinline__ void load_page_address(const LatentArgs& a, int b) {
    if (next < stop) page = load_now(a.address + (i64)b * a.pages + next * HALF / PAGE_TOKENS);
  }
  __device__ __forceinline__ void copy(const LatentArgs& a, int b, u32 memory, int stage_index) {
    if (next >= stop) return;
    const int token = next * HALF % PAGE_TOKENS;
    const u8* from = a.pool + page;
    const u32 stage = memory + STAGES_AT + stage_index * STAGE_BYTES, barrier = memory + BARRIERS_AT + stage_index * 8;
    barrier_expect(barrier, STAGE_BYTES);
    copy_bulk(stage, from + (i64)token * RANK, CODE_BYTES, barrier);
    copy_bulk(stage + CODE_BYTES, from + ROPE_AT + token * ROPE * 2, ROPE_BYTES, barrier);
    copy_bulk(stage + CODE_BYTES + ROPE_BYTES, from + SCALE_AT + token * 4, HALF * 4, barrier);
    next++;
  }
};

// Takes maxima of `COUNT` numbers over the eight lanes with the same columns. Each lane keeps `COUNT / 8` of them, at least one: the columns
// from `column` on.
template <int COUNT> __device__ __forceinline__ void reduce_columns(float* x, int& column, int lane) {
  int left = COUNT;
#pragma unroll
  for (int d = 16; d >= 4; d >>= 1) {
    if (left > 1) {
      left /= 2;
      const bool upper = lane & d;
#pragma unroll
      for (int i = 0; i < COUNT / 2; i++)
        if (i < left) {
          const float other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + left], d);
          x[i] = fmaxf(upper ? x[i + left] : x[i], other);
        }
      if (upper) column += left;
    } else x[0] = fmaxf(x[0], __shfl_xor_sync(~0u, x[0], d));
  }
}

// Grid (split, sequence, tile of COLUMNS query rows).
extern "C" __global__ void __launch_bounds__(THREADS, CTAS) latent_wide_attend(const __grid_constant__ LatentArgs a) {
  DYNAMIC_SHARED(smem);
  // The shuffle makes `warp` uniform for the compiler, so descriptors of products stay in uniform registers.
  const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread >> 5, 0), lane = thread & 31, g = lane >> 2,
            t = lane & 3, warp_group = warp >> 2, group_warp = warp & 3;
  const int split = blockIdx.x, b = blockIdx.y, tile = blockIdx.z, tiles = (a.heads * a.tokens + 15) / 16;
  const int length = a.length[b], kv_tiles = (length + 2 * HALF - 1) / (2 * HALF);
  const int first = (int)((i64)kv_tiles * split / a.splits), stop = (int)((i64)kv_tiles * (split + 1) / a.splits);
  auto slot_of = [&](int row) { return ((i64)b * tiles + tile * (COLUMNS / 16) + row / 16) * a.splits + split; };
  auto is_real = [&](int row) { return tile * (COLUMNS / 16) + row / 16 < tiles; };
  if (first >= stop) {
    if (thread < COLUMNS && is_real(thread)) {
      float* at = a.sums + slot_of(thread) * 32 + thread % 16;
      at[0] = LOWEST;
      at[16] = 0.f;
    }
    return;
  }
  const u32 memory = shared_address(smem), weights = memory + WEIGHTS_AT;
  Halves halves{2 * first, min(2 * stop, (length + HALF - 1) / HALF), 0};
  if (thread == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; i++) barrier_init(memory + BARRIERS_AT + 8 * i);
    barrier_init_done();
    i64 pages[STAGES];  // all loads begin before the first result is used
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      halves.next = 2 * first + i;
      halves.load_page_address(a, b);
      pages[i] = halves.page;
    }
    halves.next = 2 * first;
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      halves.page = pages[i];
      halves.copy(a, b, memory, i);
    }
    halves.load_page_address(a, b);
  }
  if (thread < COLUMNS) {
    reinterpret_cast<int*>(smem + MAXIMA_AT)[thread] = ordered(LOWEST);
    reinterpret_cast<float*>(smem + REFERENCES_AT)[thread] = 0.f;
    reinterpret_cast<float*>(smem + TOPS_AT)[thread] = LOWEST;
  }
  put_queries(a, b, tile, smem, warp, lane);
  proxy_fence();
  __syncthreads();

  float o[TILES][COLUMNS / 2], l[EACH];
#pragma unroll
  for (int k = 0; k < TILES; k++)
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) o[k][i] = 0.f;
#pragma unroll
  for (int i = 0; i < EACH; i++) l[i] = 0.f;
  const float factor = a.scaling * LOG2E;
  const u64 queries = matrix(memory, 128, RANK * 8), rope_queries = matrix(memory + COLUMNS * RANK, 128, ROPE * 16);
  const u64 weight_rows = matrix(weights, GROUP_BYTES, 128);
  int buffer = 0, stage_index = 0, phase = 0;  // stage_index, phase: of the KV tile's first half
  bool again = false;                          // renew, because the reference has just jumped

#pragma unroll 1
  for (int kv_tile = first; kv_tile < stop; kv_tile++) {
    const bool whole = 2 * kv_tile + 1 < halves.stop;  // otherwise the first half is read in place of the second
    const int next = stage_index + 1 == STAGES ? 0 : stage_index + 1, next_phase = phase ^ (stage_index + 1 == STAGES);
    const u32 stages = memory + STAGES_AT, mine = stages + (warp_group && whole ? next : stage_index) * STAGE_BYTES;
    barrier_wait(memory + BARRIERS_AT + stage_index * 8, phase);
    if (whole) barrier_wait(memory + BARRIERS_AT + next * 8, next_phase);

    const u64 keys = matrix(mine, 128, RANK * 8), rope_keys = matrix(mine + CODE_BYTES, 128, ROPE * 16);
    float s[COLUMNS / 2], r[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) s[i] = r[i] = 0.f;
    pin_registers<COLUMNS / 2>(s);
    pin_registers<COLUMNS / 2>(r);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < ROPE / 16; k++)
      wgmma_model<COLUMNS>(r, further(rope_keys, k * 256), further(rope_queries, k * 256), k > 0);
#pragma unroll
    for (int k = 0; k < RANK / 32; k++)
      wgmma_e4m3<COLUMNS>(s, further(keys, k * 256), further(queries, k * 256), k > 0);
    wgmma_commit();

    float scale[2], inverse[2], logarithm[2];  // tokens g and g + 8 of the warp's 16
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int token = 16 * group_warp + g + 8 * i;
      const bool real = (2 * kv_tile + warp_group) * HALF + token < length;
      u32 bits;
      lds<1>(&bits, mine + CODE_BYTES + ROPE_BYTES + token * 4);
      scale[i] = real ? __uint_as_float(bits) : 1.f;
      logarithm[i] = real ? lg2(scale[i]) : -INF;  // a token that does not exist gets no weight
      inverse[i] = rcp(scale[i]);
    }
    wgmma_wait<0>();
    pin_registers<COLUMNS / 2>(s);
    pin_registers<COLUMNS / 2>(r);

    // Scores become exponents of weights, relative to the reference so far.
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++) {
      const float2 size = pair_at(memory + FACTORS_AT + (8 * j + 2 * t) * 4);
      const float2 reference = pair_at(memory + REFERENCES_AT + (buffer * COLUMNS + 8 * j + 2 * t) * 4);
#pragma unroll
      for (int e = 0; e < 2; e++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int x = 4 * j + 2 * i + e;
          s[x] = s[x] * (scale[i] * (e ? size.y : size.x)) +
                 (r[x] * factor + (logarithm[i] - (e ? reference.y : reference.x)));
        }
    }
    const int count = kv_tile - first;
    bool renew = again || (count & (count - 1)) == 0 || count % RENEWAL == 0;
    u32 codes[COLUMNS / 8];
    auto put_weights = [&]() {  // 16 tokens of a warp: first, ninth, second, ...
      constexpr int AT_ONCE = COLUMNS >= 32 ? 4 : 2;
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j += AT_ONCE)
        stmatrix_trans<AT_ONCE>(weights + warp * GROUP_BYTES + j * 128 + (lane & (8 * AT_ONCE - 1)) * 16, codes + j);
      proxy_fence();
    };
    // Values, 32 tokens at a time: the first ones are loaded before the wait for weights, the others while products run.
    u32 v[2][TILES][4];
    auto load = [&](int step) {
      const u32 stage = stages + (step >= 2 && whole ? next : stage_index) * STAGE_BYTES;
#pragma unroll
      for (int k = 0; k < TILES; k++) {
        u32 x[4];
        ldmatrix4_trans(
            x, stage + core_matrix(CONTENT_VECTORS, step % 2 * 32 + lane, (warp_group * TILES + k) * 4 + group_warp));
        v[step & 1][k][0] = permuted2(x[0], x[1], 0x6240);
        v[step & 1][k][1] = permuted2(x[0], x[1], 0x7351);
        v[step & 1][k][2] = permuted2(x[2], x[3], 0x6240);
        v[step & 1][k][3] = permuted2(x[2], x[3], 0x7351);
      }
    };
    load(0);
    if (!renew) {
      float sum[EACH];
      u32 greatest = 0;  // a byte's highest bit is set if the weight is 0x7e, the largest code, or saturated
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j++) {
        u32 pair[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float p0 = ex2(s[4 * j + e]), p1 = ex2(s[4 * j + 2 + e]);
          sum[2 * j + e] = p0 * inverse[0] + p1 * inverse[1];
          pair[e] = pack_e4m3(p0, p1);
        }
        codes[j] = pair[0] | pair[1] << 16;
        greatest |= codes[j] + 0x02020202u;
      }
      put_weights();
      renew = __syncthreads_or(greatest & 0x80808080u);  // all weights are written, unless one is too large
      if (!renew) {
#pragma unroll
        for (int i = 0; i < EACH; i++) l[i] += sum[i];
      }
    }
    if (renew) {
      float top[EACH];
      int column = 0;
#pragma unroll
      for (int i = 0; i < EACH; i++) top[i] = fmaxf(s[i / 2 * 4 + (i & 1)], s[i / 2 * 4 + 2 + (i & 1)]);
      reduce_columns<EACH>(top, column, lane);
#pragma unroll
      for (int i = 0; i < (EACH + 7) / 8; i++) {
        const int c = column + i;
        if (EACH >= 8 || !(g & (8 / EACH - 1)))
          atomicMax(reinterpret_cast<int*>(smem + MAXIMA_AT) + 8 * (c >> 1) + 2 * t + (c & 1),
                    ordered(fmaxf(top[i], LOWEST)));
      }
      BARRIER(maxima_ready, __syncthreads());
      bool moved = false, jumped = false;
      float decay[EACH];
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j++) {
        const u32 at = (8 * j + 2 * t) * 4, old = at + buffer * COLUMNS * 4;
        const float2 largest = pair_at(memory + MAXIMA_AT + at), reference = pair_at(memory + REFERENCES_AT + old),
                     high = pair_at(memory + TOPS_AT + old);
        float now[2], tops[2];
        u32 pair[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float before = e ? reference.y : reference.x, previous_top = e ? high.y : high.x;
          const float excess = unordered(__float_as_int(e ? largest.y : largest.x)) - LIFT, m = before + excess;
          tops[e] = fmaxf(m, previous_top);
          const bool moves = excess > 0.f || excess < -SHRINKAGE;
          jumped |= excess > JUMP && previous_top != LOWEST;
          now[e] = moves ? fmaxf(m, tops[e] - DEPTH) : before;
          moved |= moves;
          const float d = previous_top == LOWEST ? 0.f : ex2(before - now[e]),
                      p0 = ex2(s[4 * j + e] + (before - now[e])), p1 = ex2(s[4 * j + 2 + e] + (before - now[e]));
          decay[2 * j + e] = d;
          l[2 * j + e] = l[2 * j + e] * d + (p0 * inverse[0] + p1 * inverse[1]);
          pair[e] = pack_e4m3(p0, p1);
        }
        codes[j] = pair[0] | pair[1] << 16;
        if (warp == 0 && g == 0) {
          sts<2>(memory + REFERENCES_AT + at + (buffer ^ 1) * COLUMNS * 4, now);
          sts<2>(memory + TOPS_AT + at + (buffer ^ 1) * COLUMNS * 4, tops);
        }
      }
      put_weights();
      BARRIER(renewed_weights_ready, __syncthreads());  // all weights are written
      if (thread < COLUMNS) reinterpret_cast<int*>(smem + MAXIMA_AT)[thread] = ordered(LOWEST);
      buffer ^= 1;
      again = __any_sync(~0u, jumped);  // the same in all warps
      if (__any_sync(~0u, moved)) {
#pragma unroll
        for (int k = 0; k < TILES; k++)
#pragma unroll
          for (int i = 0; i < COLUMNS / 2; i++) o[k][i] *= decay[i / 4 * 2 + (i & 1)];
      }
    }
#pragma unroll
    for (int k = 0; k < TILES; k++) pin_registers<COLUMNS / 2>(o[k]);
#pragma unroll
    for (int step = 0; step < 4; step++) {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < TILES; k++)
        wgmma_e4m3<COLUMNS>(o[k], v[step & 1][k], further(weight_rows, 2 * step * GROUP_BYTES));
      wgmma_commit();
      if (step < 3) {
        if (step) wgmma_wait<1>();  // the registers of the next values are free
        load(step + 1);
      }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int k = 0; k < TILES; k++) pin_registers<COLUMNS / 2>(o[k]);

    BARRIER(stages_free, __syncthreads());  // all warps have read the KV tile
    if (thread == 0) {
      halves.copy(a, b, memory, stage_index);
      halves.load_page_address(a, b);
      halves.copy(a, b, memory, next);
      halves.load_page_address(a, b);
    }
    phase ^= stage_index + 2 >= STAGES;
    stage_index = stage_index + 2 >= STAGES ? stage_index + 2 - STAGES : stage_index + 2;
  }

#pragma unroll
  for (int k = 0; k < TILES; k++)
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = 8 * j + 2 * t + e;
        if (is_real(row))
          *reinterpret_cast<float2*>(a.partial + (slot_of(row) * 16 + row % 16) * RANK +
                                     ((warp_group * TILES + k) * 4 + group_warp) * 16 + 2 * g) =
              float2{o[k][4 * j + e], o[k][4 * j + 2 + e]};
      }
  float* shared_sums = reinterpret_cast<float*>(smem + SUMS_AT);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const float all = sum_rows(l[i]);
    if (g == 0) shared_sums[warp * COLUMNS + 8 * (i >> 1) + 2 * t + (i & 1)] = all;
  }
  __syncthreads();
  if (thread < COLUMNS && is_real(thread)) {
    float all = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) all += shared_sums[w * COLUMNS + thread];
    float* at = a.sums + slot_of(thread) * 32 + thread % 16;
    at[0] = reinterpret_cast<const float*>(smem + REFERENCES_AT)[buffer * COLUMNS + thread];
    at[16] = all;
  }
}
