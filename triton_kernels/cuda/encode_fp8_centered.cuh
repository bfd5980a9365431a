// Packs a page of keys as FP8 with a center per channel (`formats/fp8_centered.py`) in layout `fragment-1`: see encode.cuh.
#pragma once
#include "encode_fp8.cuh"

template <int D, int SCALE_AT, int CENTER_AT> struct Fp8CenteredEncoder {
  struct Space {
    float center[D];
    typename Fp8Encoder<D, SCALE_AT, false>::Space tokens;
  };

  // A whole page.
  static __device__ void encode(u8* part, const Source& source, int, int, int base, const WarpGroup& warp_group,
                                void* space) {
    Space& own = *static_cast<Space*>(space);
    for (int c = warp_group.thread; c < D; c += WARP_GROUP_THREADS) {
      float low = INF, high = -INF;
      for (int n = 0; n < PAGE; n++) {
        const float x = to_float(source.token(base + n)[c]);
        if (!(fabsf(x) < INF)) continue;
        low = fminf(low, x);
        high = fmaxf(high, x);
      }
      const float middle = fminf(fmaxf(__fadd_rn(low * 0.5f, high * 0.5f), -FP16_MAX), FP16_MAX);
      const float center = low <= high ? half_to_float(half_bits(middle)) + 0.f : 0.f;  // adding 0 turns -0 into 0
      reinterpret_cast<u16*>(part + CENTER_AT)[c] = half_bits(center);
      own.center[c] = center;
    }
    warp_group.sync();
    Fp8Encoder<D, SCALE_AT, false>::store(part, 0, PAGE, warp_group, own.tokens, [&](int token, int c) {
      return __fsub_rn(to_float(source.token(base + token)[c]), own.center[c]);
    });
  }
};
