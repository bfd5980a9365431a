// Shared by the kernels for latents (MLA): `latent.cu` (FP8, few query rows), `latent_wide.cu` (FP8, many), `latent_dense.cu` (content in the
// model's dtype: DENSE_CONTENT), and `latent_merge.cuh`, which follows all of them.
#pragma once
#include "common.cuh"

constexpr int CONTENT_VECTORS = RANK / (DENSE_CONTENT ? 8 : 16),
              ROPE_VECTORS = ROPE / 8;  // a token's vectors of 16 bytes
static_assert(RANK % 64 == 0 && RANK <= 512 && ROPE % 16 == 0, "");

// The offset of a token's 16-byte vector in layout `core-1`; vectors: per token. A core matrix has one vector of each of eight tokens.
__device__ __forceinline__ constexpr int core_matrix(int vectors, int token, int vector) {
  return ((token >> 3) * vectors + vector) * 128 + (token & 7) * 16;
}

struct LatentArgs {
  const u8 *q, *c, *r,
      *mask;  // queries [B, Hq, S, RANK + ROPE]; content of the new tokens [B, S, RANK] and their RoPE part [B, S, ROPE]
  u8* pool;
  const i64* address;          // [B, pages]: bytes from pool
  int *length, *paged, *lost;  // [B]; lost: tokens for which there was no room
  u8* out;                     // [B, S, Hq, RANK]
  float *partial, *sums;       // [B, tiles, splits, 16, RANK] and, maximum and sum, [B, tiles, splits, 2, 16]
  const int *order, *count;    // with padding: indices of the real new tokens [B, S], and their number [B]
  i64 q_b, q_h, q_s, c_b, c_s, r_b, r_s, mask_b, mask_s;  // strides in elements
  int heads, tokens, pages, splits, room, stores;         // stores: whether `latent_merge` stores the new tokens
  float scaling;
};

__device__ __forceinline__ float number(const u8* p, i64 i) { return to_float(reinterpret_cast<const u16*>(p)[i]); }
