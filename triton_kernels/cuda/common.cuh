// Shared by all kernels: types, PTX, and the geometry, which Python passes as macros (see `geometry.py`).
// NVRTC has no system headers. Nothing is included from a toolkit, so none has to be found.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

// Whether an instruction converts e4m3 to fp16.
#ifndef CONVERT
#if __CUDA_ARCH__ >= 890
#define CONVERT 1
#else
#define CONVERT 0
#endif
#endif

// Heads of more than 256 channels: SLICES warps take the same tokens. Each has a slice of the channels (`exchange.cuh`).
#ifndef SLICES
#define SLICES 1
#endif

// Marks code that most launches do not reach, or only one warp executes: it is not inlined. After another kernel the instruction cache is
// cold, so every instruction on the common path costs a load.
#define COLD __device__ __noinline__

constexpr int ROWS = 8 * NT;  // columns of a product: the query rows (heads x tokens) of a warp group
// SPREAD: at most four query rows, in every other column. Then each lane has the scores of one row. In adjacent columns half of the lanes
// would have two rows and the others none. COLUMNS_USED: how many of a lane's two columns; EVERY: the step over a lane's four numbers.
constexpr int COLUMNS_USED = SPREAD ? 1 : 2, EVERY = SPREAD ? 2 : 1;
#ifdef PAGE
// Tokens of a work tile, which a warp takes at a time: two KV tiles of KV_TILE tokens. PARTIAL: work tiles may hold fewer tokens.
constexpr int WORK_TILE = 2 * KV_TILE;
constexpr bool PARTIAL = DIRECT || PAGE % WORK_TILE != 0;
// Whether a work tile exists. limit: the number of tokens from the KV tile's first token on. The second KV tile of a work tile may have no
// tokens. It is copied anyway, from another page, because a weight of 0 times NaN is NaN.
__device__ __forceinline__ bool in_work_tile(int limit) { return limit > -KV_TILE; }
#endif
constexpr float LOWEST = -1e30f;  // the maximum over nothing: finite, so that a difference is never NaN
constexpr float LOG2E = 1.4426950408889634f;
constexpr float TWO24 = 16777216.f;  // masked bits read as fp16 are subnormal: code x position x 2^-24
#define INF __int_as_float(0x7f800000)

// A parameter of a layer. That of KV head h begins `stride * h` bytes from `data`.
struct Parameter {
  const u8* data;
  i64 stride;
};

// How rows (sequence x KV head) are assigned to warp groups: `plan.cuh`.
enum Schedule { WORK_RANGES, ROW_SPLITS, WHOLE_ROWS };

struct Args {
  const u8 *q, *k, *v, *mask, *sinks, *pool;
  const i64* address;  // [B, pages]: bytes from pool
  const u8 *sink_k, *sink_v, *tail_k, *tail_v;
  const int *length, *paged;  // [B, H]
  u8* out;                    // [B, S, Hq, DV]
  float* partial;
  int* counters;                                                    // [row blocks, B * H], zero before and after
  i64 q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, mask_b, mask_s;  // strides in elements; of channels: 1
  int batch, heads, groups, tokens, pages, sink, tail, warp_groups,
      assignment;  // `geometry.Assignment.encoded`; decoded by the functions below
  float scaling, softcap;
  const u8* raw_k;                 // TRANSFORMED: the untransformed new keys; `k` receives the transformed ones
  const float *q_scale, *k_scale;  // factors of channels; those of KV head h begin at h * scale_h
  const float* score_bias;         // HAS_SCORE_BIAS: [B, Hq, S], added to all products of a query with keys
  i64 raw_b, raw_h, raw_s, scale_h;
  Parameter tables[2];  // codebooks of keys and values, or null

  __device__ __forceinline__ Schedule schedule() const {
    return assignment == 0 ? WORK_RANGES : assignment < 0 ? WHOLE_ROWS : ROW_SPLITS;
  }
  __device__ __forceinline__ int warp_groups_per_row() const { return assignment; }   // ROW_SPLITS
  __device__ __forceinline__ int rows_per_warp_group() const { return -assignment; }  // WHOLE_ROWS
};

#include "ptx.cuh"

// the model's dtype
__device__ __forceinline__ float to_float(u32 x) { return BF16 ? bf16_to_float(x) : half_to_float(x); }
__device__ __forceinline__ u32 pack_model(float low, float high) {
  return BF16 ? pack_bf16(low, high) : pack_half(low, high);
}

// Sum over the eight lanes that hold the same columns of an accumulator.
__device__ __forceinline__ float sum_rows(float x) {
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) x += __shfl_xor_sync(~0u, x, d);
  return x;
}
__device__ __forceinline__ float max_rows(float x) {
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

// Rounds to eleven bits, like a normal fp16 number. It multiplies instead of masking, because unpacking keeps the ALUs for bit operations
// busy.
__device__ __forceinline__ float eleven_bits(float x) { return __fmul_rn(x, 8193.f) - x * 8192.f; }

// The channel of row or column `8 j + x` of the operand over channels from 16 c on: `formats/fragment.py`.
template <int D> __device__ __forceinline__ constexpr int channel_of(int c, int j, int x) {
  return c < D / 32 * 2 ? c / 2 * 32 + 8 * (x >> 1) + 4 * (c & 1) + 2 * j + (x & 1)
                        : D / 32 * 32 + 4 * (x >> 1) + 2 * j + (x & 1);
}

// Copies `BYTES` consecutive bytes if `real`. Called by a warp.
template <int BYTES> __device__ __forceinline__ void copy_linear(bool real, u32 target, const u8* source, int lane) {
  const u8* from = opaque(source + lane * 16);
#pragma unroll
  for (int at = 0; at < BYTES; at += 512)
    cp16_if(real && (at + 512 <= BYTES || at + lane * 16 < BYTES), target + at + lane * 16, from + at);
}

#ifdef PAGE
// The warp's slice.
__device__ __forceinline__ int own_slice() {
  if constexpr (SLICES == 1) return 0;
  else return (threadIdx.x >> 5) / WARP_GROUPS % SLICES;
}
static_assert(SLICES == 1 || KV_TILE == 32, "a slice of a KV tile's codes is one run of bytes in each plane");

// Copies the codes of a KV tile, for the warp's channels. HIGH, LOW: bytes of 32 tokens of these channels in the first and second plane.
template <int HIGH, int LOW = 0>
__device__ __forceinline__ void copy_codes(bool real, u32 target, const u8* codes, int token, int lane) {
  if constexpr (SLICES == 1 || LOW == 0)
    copy_linear<KV_TILE / 32 * (HIGH + LOW)>(real, target, codes + (token / 32 * SLICES + own_slice()) * (HIGH + LOW),
                                             lane);
  else {
    const u8* segment = codes + token / 32 * SLICES * (HIGH + LOW);
    copy_linear<HIGH>(real, target, segment + own_slice() * HIGH, lane);
    copy_linear<LOW>(real, target + HIGH, segment + SLICES * HIGH + own_slice() * LOW, lane);
  }
}
#endif

// Two contiguous arrays of `BYTES` bytes each.
template <int BYTES>
__device__ __forceinline__ void copy_pair(bool real, u32 target, const u8* first, const u8* second, int lane) {
#pragma unroll
  for (int at = 0; at < 2 * BYTES; at += 512) {
    const int mine = at + lane * 16;
    cp16_if(real && (at + 512 <= 2 * BYTES || mine < 2 * BYTES), target + mine,
            mine < BYTES ? first + mine : second + (mine - BYTES));
  }
}
