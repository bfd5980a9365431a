// Shared by the kernels for latents (MLA): `latent.cu` (FP8, few query rows), `latent_wide.cu` (FP8, many), `latent_dense.cu` (content in the
// model's dtype: DENSE_CONTENT), and `latent_merge.cuh`, which follows all of them.
#pragma once
#include "common.cuh"

constexpr int CHUNKS = RANK / (DENSE_CONTENT ? 8 : 16), ROPE_CHUNKS = ROPE / 8;  // a token's chunks of 16 bytes
static_assert(RANK % 64 == 0 && RANK <= 512 && ROPE % 16 == 0, "");

// The offset of a token's 16-byte chunk in layout `core-1`; chunks: per token. A brick (core matrix) has one chunk of eight tokens.
__device__ __forceinline__ constexpr int brick(int chunks, int token, int chunk) {
  return ((token >> 3) * chunks + chunk) * 128 + (token & 7) * 16;
}

struct LatentArgs {
  const u8 *q, *c, *r,
      *mask;  // queries [B, Hq, S, RANK + ROPE]; the chunk's content [B, S, RANK] and RoPE part [B, S, ROPE]
  u8* pool;
  const i64* address;          // [B, pages]: bytes from pool
  int *length, *paged, *lost;  // [B]; lost: tokens for which there was no room
  u8* out;                     // [B, S, Hq, RANK]
  float *partial, *sums;       // [B, tiles, splits, 16, RANK] and, maximum and sum, [B, tiles, splits, 2, 16]
  const int *order, *count;    // padded chunk: indices of the real tokens [B, S], and their number [B]
  i64 q_b, q_h, q_s, c_b, c_s, r_b, r_s, mask_b, mask_s;  // strides in elements
  int heads, tokens, pages, splits, room, stores;         // stores: whether `latent_merge` stores the chunk
  float scaling;
};

__device__ __forceinline__ float number(const u8* p, i64 i) { return to_float(reinterpret_cast<const u16*>(p)[i]); }
