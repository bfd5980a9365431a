// Loads the queries of a row block, transforms them, and writes them to shared memory for the products.
#pragma once
#include "warp.cuh"
#include "transform_in_attend.cuh"

// The queries that a warp writes to shared memory: unchanged; and, if keys need it (`NORMALISED`), normalised in fp16, with their sizes and sums.
struct Queries {
  static constexpr int EACH = (ROWS + WARPS - 1) / WARPS, WORDS = (DK + 63) / 64;
  static constexpr int OWN_WORDS = WORDS / SLICES;  // of a slice
  u32 x[EACH][WORDS];
  float largest[EACH];  // largest magnitude of the lane's numbers
  typename FoldOf<Keys>::Type fold;

  __device__ __forceinline__ void load(const Args& a, int b, int h, int row_block, int warp, int lane) {
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int i = warp + j * WARPS, r = SPREAD ? i / 2 : row_block * ROWS + i;
      const bool real = i < ROWS && r < a.groups * a.tokens && !(SPREAD && (i & 1));
      const int token = real ? (int)__fdividef(r + 0.5f, (float)a.groups) : 0, head = real ? r - token * a.groups : 0;
      const u32* source =
          reinterpret_cast<const u32*>(a.q + 2 * (b * a.q_b + (h * a.groups + head) * a.q_h + token * a.q_s));
#pragma unroll
      for (int k = 0; k < WORDS; k++) x[j][k] = real && k * 32 + lane < DK / 2 ? load_now(source + k * 32 + lane) : 0u;
    }
    if constexpr (FOLDED) fold.load(a.tables[0].data + h * a.tables[0].stride, lane);
  }

  __device__ __forceinline__ void measure(int j) {
    if constexpr (FOLDED) {
      largest[j] = fold.largest(x[j]);
      return;
    }
    largest[j] = 0.f;
#pragma unroll
    for (int k = 0; k < WORDS; k++)
      largest[j] = fmaxf(largest[j], fmaxf(fabsf(to_float(x[j][k] & 0xffff)), fabsf(to_float(x[j][k] >> 16))));
  }

  // Waits for the queries by using them. If possible this precedes the copies, because the compiler's wait includes all earlier copies. (With a
  // transform it would take too long.)
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int j = 0; j < EACH; j++)
      if constexpr (!TRANSFORMED) measure(j);
  }

  // kv_head: the row's KV head
  __device__ __forceinline__ void put(const Args& a, u8* head, int kv_head, int warp, int lane) {
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int i = warp + j * WARPS;
      if (i >= ROWS) break;
      if constexpr (TRANSFORMED) {
        transform_query(a, x[j], kv_head, lane);
        measure(j);
      }
#pragma unroll
      for (int slice = 0; slice < SLICES; slice++) put_slice(head + slice * HEAD_BYTES, i, j, slice, lane);
    }
  }

  // Writes a slice of query j of the warp to row i of `head`.
  __device__ __forceinline__ void put_slice(u8* head, int i, int j, int slice, int lane) {
    float* size = reinterpret_cast<float*>(head + Q_BYTES);
    const u32* own = x[j] + slice * OWN_WORDS;
    {
      u32* target = reinterpret_cast<u32*>(head + i * Q_STRIDE);
#pragma unroll
      for (int k = 0; k < OWN_WORDS; k++) {
        const int pair = k * 32 + lane;
        if (pair < WK / 2) target[pair] = own[k];
      }
      if constexpr (Keys::NORMALISED)
        if (slice == 0)
#pragma unroll
          for (int d = 1; d < 32; d <<= 1) largest[j] = fmaxf(largest[j], __shfl_xor_sync(~0u, largest[j], d));
      if constexpr (FOLDED)
        fold.put(x[j], largest[j], target + ROWS * Q_STRIDE / 4, target + 2 * ROWS * Q_STRIDE / 4, size + i,
                 size + ROWS + i, lane);
      else if constexpr (Keys::NORMALISED) {
        // the next power of two, divided by 2^LIFT of the keys
        const u32 exponent = min(max((__float_as_uint(largest[j]) >> 23) + 1, 2u + Keys::LIFT), 252u) - Keys::LIFT;
        const float inverse = __uint_as_float((254 - exponent) << 23);
        float sum[Keys::GROUPS] = {};
#pragma unroll
        for (int k = 0; k < OWN_WORDS; k++) {
          const int pair = k * 32 + lane;
          const float low = to_float(own[k] & 0xffff) * inverse, high = to_float(own[k] >> 16) * inverse;
          if (pair < WK / 2) {
            target[ROWS * Q_STRIDE / 4 + pair] = pack_half(low, high);
            if constexpr (Keys::LIFT)
              target[2 * ROWS * Q_STRIDE / 4 + pair] =
                  pack_half(low * (1.f / (1 << Keys::LIFT)), high * (1.f / (1 << Keys::LIFT)));
          }
#pragma unroll
          for (int c = 0; c < Keys::GROUPS; c++) sum[c] += 2 * pair / (WK / Keys::GROUPS) == c ? low + high : 0.f;
        }
#pragma unroll
        for (int c = 0; c < Keys::GROUPS; c++) {
#pragma unroll
          for (int d = 1; d < 32; d <<= 1) sum[c] += __shfl_xor_sync(~0u, sum[c], d);
          if (lane == 0) size[ROWS + i * Keys::GROUPS + c] = sum[c];
        }
        if (lane == 0) size[i] = __uint_as_float(exponent << 23);
      }
    }
  }
};
