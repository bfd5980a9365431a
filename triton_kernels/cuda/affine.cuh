// Integer pages in layout `fragment-1` / `fragment-1t` (`formats/fragment.py`): masking is enough to turn words into operands.
//
// Codes are not converted. Masked bits, read as fp16, are the subnormal number code x position x 2^-24, where position is the power of two of
// the field's lowest bit. Tensor cores multiply subnormals exactly and at full speed. The position is divided out of q (channels of a key),
// the scores (rows) or the weights (tokens of a value).
#pragma once
#include "common.cuh"

// Two operands (16 tokens each) from the `BITS / 2` words of 16 channels.
template <int BITS> __device__ __forceinline__ void unpack(const u32* w, u32 (*a)[4]) {
  if constexpr (BITS == 8) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      a[h][0] = w[2 * h] & 0x00ff00ffu;
      a[h][1] = (w[2 * h] >> 8) & 0x00ff00ffu;
      a[h][2] = w[2 * h + 1] & 0x00ff00ffu;
      a[h][3] = (w[2 * h + 1] >> 8) & 0x00ff00ffu;
    }
  } else if constexpr (BITS == 4) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 x = w[h], y = w[h] >> 8;
      a[h][0] = x & 0x000f000fu;
      a[h][2] = x & 0x00f000f0u;
      a[h][1] = y & 0x000f000fu;
      a[h][3] = y & 0x00f000f0u;
    }
  } else {
    const u32 x = w[0], y = w[0] >> 8;
    a[0][0] = x & 0x00030003u;
    a[0][2] = x & 0x000c000cu;
    a[1][0] = x & 0x00300030u;
    a[1][2] = x & 0x00c000c0u;
    a[0][1] = y & 0x00030003u;
    a[0][3] = y & 0x000c000cu;
    a[1][1] = y & 0x00300030u;
    a[1][3] = y & 0x00c000c0u;
  }
}

// Codes of 5 and 6 bits (`formats/fragment_planes.py`) have two planes. The HIGH bits are unpacked like 4-bit codes; the words of the LOW bits
// follow them. Sums are of `code / 2^LOW`, so scales are multiplied by 2^LOW.
template <int BITS> struct Planes {
  static constexpr int HIGH = BITS == 5 || BITS == 6 ? 4 : BITS, LOW = BITS - HIGH;
  static constexpr float STEPS = 1 << LOW;
  static constexpr float LOW_WEIGHT = 1 / STEPS;  // the weight of a low code
};

// The low codes of channels from 16 c on, as operand h, in the order of `unpack<4>`. In operand 1 their position is four times as large. word: the
// word of these channels, or (one bit) of 32 channels.
template <int LOW> __device__ __forceinline__ void unpack_low(u32 word, int c, int h, u32* a) {
  const u32 mask = LOW == 2 ? 0x00030003u << 2 * h : 0x00010001u << 2 * h, x = LOW == 1 && (c & 1) ? word >> 1 : word,
            y = x >> 8;
  a[0] = x & mask;
  a[1] = y & mask;
  a[2] = x & mask << 4;
  a[3] = y & mask << 4;
}
__device__ __forceinline__ constexpr float low_position(int h) { return h ? 4.f : 1.f; }

// The factor by which a field's position multiplies its code. It depends on the column half, and on which of the two operands it is.
template <int BITS> __device__ __forceinline__ constexpr float half_position(int half) {
  return half == 0 || BITS == 8 ? 1.f : BITS == 2 ? 4.f : 16.f;
}
template <int BITS> __device__ __forceinline__ constexpr float operand_position(int h) {
  return h && BITS == 2 ? 16.f : 1.f;
}

template <int BITS, int D> struct Codes {
  static constexpr int LOW_AT = D / 16 * Planes<BITS>::HIGH / 2;  // a lane's words of the first plane, of 32 tokens
  static constexpr int WORDS = LOW_AT + (Planes<BITS>::LOW == 2 ? D / 16 : Planes<BITS>::LOW ? D / 32 : 0);
  static constexpr int V = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
  static constexpr bool SPLIT = Planes<BITS>::LOW > 0;
  static constexpr int TILES = SPLIT ? 1 : V / (BITS / 2);  // groups of 16 channels in one load
  static constexpr int HELD = SPLIT ? WORDS : V;            // words in registers at a time
  // The words of channels from 16 k on, of a lane's words at `words`. Loads them unless w holds them already. first: the first k of the loop.
  static __device__ __forceinline__ const u32* tile(u32* w, u32 words, int k, int first) {
    if constexpr (SPLIT) {
      if (k == first)
#pragma unroll
        for (int i = 0; i < WORDS / V; i++) lds<V>(w + i * V, words + i * 128 * V);
      return w + k * 2;
    } else {
      if (k == first || k % TILES == 0) lds<V>(w, words + k / TILES * 128 * V);
      return w + k % TILES * (BITS / 2);
    }
  }
  // The word with the low codes of channels from 16 k on. Call `tile` first.
  static __device__ __forceinline__ u32 low(const u32* w, int k) {
    return w[LOW_AT + (Planes<BITS>::LOW == 1 ? k / 2 : k)];
  }
  static constexpr int BYTES = 128 * WORDS;  // bytes of 32 tokens
  // Copies the codes of a KV tile.
  static __device__ __forceinline__ void copy(bool real, u32 stage, const u8* codes, int token, int lane) {
    copy_codes<SPLIT ? 128 * LOW_AT : BYTES, SPLIT ? BYTES - 128 * LOW_AT : 0>(real, stage, codes, token, lane);
  }
};

// Four consecutive fp16 numbers with `stride` elements between them.
template <int STRIDE> __device__ __forceinline__ void four_halves(float* x, u32 a) {
  if constexpr (STRIDE == 1) {
    u32 w[2];
    lds<2>(w, a);
    x[0] = half_to_float(w[0] & 0xffff);
    x[1] = half_to_float(w[0] >> 16);
    x[2] = half_to_float(w[1] & 0xffff);
    x[3] = half_to_float(w[1] >> 16);
  } else {
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = half_to_float(lds_u16(a + 2 * STRIDE * j));
  }
}
