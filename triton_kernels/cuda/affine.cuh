// Integer pages in layout `fragment-1` / `fragment-1t` (`formats/fragment.py`): words become operands by masking alone.
//
// Codes are not converted: masked bits read as fp16 are subnormals, code x position x 2^-24, which tensor cores take exactly and
// at full speed. Positions are divided out of q (channels of a key), of the scores (rows), of the weights (tokens of a value).
#pragma once
#include "common.cuh"

// Two operands (16 tokens each) from the `BITS / 2` words of 16 channels.
template <int BITS> __device__ __forceinline__ void unpack(const u32* w, u32 (*a)[4]) {
  if constexpr (BITS == 8) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      a[h][0] = w[2 * h] & 0x00ff00ffu; a[h][1] = (w[2 * h] >> 8) & 0x00ff00ffu;
      a[h][2] = w[2 * h + 1] & 0x00ff00ffu; a[h][3] = (w[2 * h + 1] >> 8) & 0x00ff00ffu;
    }
  } else if constexpr (BITS == 4) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 x = w[h], y = w[h] >> 8;
      a[h][0] = x & 0x000f000fu; a[h][2] = x & 0x00f000f0u; a[h][1] = y & 0x000f000fu; a[h][3] = y & 0x00f000f0u;
    }
  } else {
    const u32 x = w[0], y = w[0] >> 8;
    a[0][0] = x & 0x00030003u; a[0][2] = x & 0x000c000cu; a[1][0] = x & 0x00300030u; a[1][2] = x & 0x00c000c0u;
    a[0][1] = y & 0x00030003u; a[0][3] = y & 0x000c000cu; a[1][1] = y & 0x00300030u; a[1][3] = y & 0x00c000c0u;
  }
}

// What a field's position multiplies its code with: by the column half of the operand, and by which of the two operands it is.
template <int BITS> __device__ __forceinline__ constexpr float half_position(int half) { return half == 0 || BITS == 8 ? 1.f : BITS == 4 ? 16.f : 4.f; }
template <int BITS> __device__ __forceinline__ constexpr float operand_position(int h) { return h && BITS == 2 ? 16.f : 1.f; }

template <int BITS, int D> struct Codes {
  static constexpr int WORDS = D / 16 * BITS / 2;                                 // of a lane, of 32 tokens
  static constexpr int V = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
  static constexpr int TILES = V / (BITS / 2);                                    // groups of 16 channels a load
  static constexpr int BYTES = 128 * WORDS;                                       // of 32 tokens
};

// Four consecutive fp16 numbers with `stride` elements between them.
template <int STRIDE> __device__ __forceinline__ void four_halves(float* x, u32 a) {
  if constexpr (STRIDE == 1) {
    u32 w[2]; lds<2>(w, a);
    x[0] = half_to_float(w[0] & 0xffff); x[1] = half_to_float(w[0] >> 16); x[2] = half_to_float(w[1] & 0xffff); x[3] = half_to_float(w[1] >> 16);
  } else {
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = half_to_float(lds_u16(a + 2 * STRIDE * j));
  }
}
