// Numbers of e4m3 (4 bits of exponent, 3 of mantissa, largest 448) and their scales: `formats/fp8.py`, bit for bit.
#pragma once
#include "common.cuh"

// Decoded numbers are CODE times too small. With CONVERT (sm89 and later) an instruction converts. Otherwise bits are moved: sign, exponent and
// mantissa in the fields of fp16 are the number times 2^-8, subnormals included.
constexpr float CODE = CONVERT ? 1.f : 256.f;

// The two numbers in half of a word as two fp16 numbers, each 1 / CODE times its value.
__device__ __forceinline__ u32 e4m3_pair(u32 x, bool upper) {
  if constexpr (CONVERT) return e4m3_to_half(upper ? x >> 16 : x);
  const u32 y =
      permuted(x, upper ? 0x3020 : 0x1000);  // codes go to the upper byte of each half; lower bytes are dropped
  return (y & 0x80008000u) | (y >> 1 & 0x3f803f80u);
}

// float32 -> e4m3, to nearest even, saturated, NaN without a sign.
__device__ __forceinline__ u32 to_e4m3(float x) {
  const u32 bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
  const float size = __uint_as_float(magnitude);
  if (magnitude > 0x7f800000u) return 0x7f;
  u32 code;
  if (size < 0.015625f) code = __float_as_uint(size + 16384.f) - __float_as_uint(16384.f);  // subnormals: steps of 2^-9
  else code = min(((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120u << 3), 0x7eu);
  return code | bits >> 24 & 0x80u;
}

// A number's magnitude, for a token's maximum. NaN counts as infinity, because maxima ignore NaN.
__device__ __forceinline__ float e4m3_size(float x) { return fabsf(x) < INF ? fabsf(x) : INF; }

// The scale of a token with this largest magnitude, which is mapped to 448.
__device__ __forceinline__ float e4m3_scale(float largest) {
  return largest < INF ? fmaxf(__fdiv_rn(largest, 448.f), 8.673617379884035e-19f)
                       : __uint_as_float(0x7fc00000u);  // 2^-60: `MIN_SCALE`
}
