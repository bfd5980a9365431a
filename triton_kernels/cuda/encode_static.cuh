// Packs a page in static codes (`formats/static.py`): means, a scale per token, codes, planes. See encode.cuh.
#pragma once
#include "encode.cuh"
#include "static.cuh"

// Sums of squares, as bits of floats, at which a token's scale goes up by one.
template <u32... X> struct Thresholds {
  static __device__ __forceinline__ int below(float x) { return ((x >= __uint_as_float(X) ? 1 : 0) + ...); }
};

// VALUES: tokens have scales, and codes are in the order of values; otherwise the page has means. AT: where these are in the page.
template <bool VALUES, int D, int AT, class T, class... W> struct StaticEncoder {
  static constexpr int CHANNEL_THREADS = 4;  // threads that share a channel's sum over a page
  static constexpr int LANE = (D + 31) / 32, EACH = LANE <= 2   ? LANE
                                                    : LANE <= 4 ? 4
                                                    : LANE <= 8 ? 8
                                                                : 16;  // channels of a lane; to a power of two
  struct Space {
    const u16* tokens[PAGE];
    float center[D], step[D], off[D], sum[CHANNEL_THREADS][D];  // off: the page's mean of a channel
    u8 codes[32 * D], k[32];                                    // of a segment of tokens
  };

  // 2^((k - 8) / 4), rounded once.
  static __device__ __forceinline__ float scale_of(int k) {
    const float fraction = (k & 3) == 0   ? 1.f
                           : (k & 3) == 1 ? 1.189207115002721f
                           : (k & 3) == 2 ? 1.4142135623730951f
                                          : 1.681792830507429f;
    return fraction * __uint_as_float((125 + (k >> 2)) << 23);
  }

  // A token's scale, as k + 8. square: squares of channels 32 i + lane. A warp adds them in the order of `fold_sum` over channels.
  static __device__ __forceinline__ int number_of_scale(float* square) {
#pragma unroll
    for (int half = EACH / 2; half > 0; half /= 2)
#pragma unroll
      for (int i = 0; i < half; i++) square[i] = __fadd_rn(square[i], square[i + half]);
    float total = square[0];
#pragma unroll
    for (int d = 16; d > 0; d /= 2) total = __fadd_rn(total, __shfl_xor_sync(~0u, total, d));
    return T::below(total);
  }

  // The distance from the center in steps. Every operation that affects bytes is rounded.
  static __device__ __forceinline__ float steps(const Space& own, int token, int c) {
    return __fdiv_rn(__fsub_rn(to_float(own.tokens[token][c]), own.center[c]), own.step[c]);
  }

  // Calls f with the `Width` of channel c.
  template <class F> static __device__ __forceinline__ void of_channel(int c, const F& f) {
    Columns<D, W...>::of_group(c, f);
  }

  static __device__ void means(u8* part, Space& own, const WarpGroup& warp_group) {
    if constexpr (VALUES) {
      for (int c = warp_group.thread; c < D; c += WARP_GROUP_THREADS) own.off[c] = 0.f;
      warp_group.sync();
      return;
    }
    for (int i = warp_group.thread; i < CHANNEL_THREADS * D; i += WARP_GROUP_THREADS)
      own.sum[i / D][i % D] = fold<CHANNEL_THREADS>([&](int n) { return steps(own, n, i % D); }, i / D);
    warp_group.sync();
    for (int c = warp_group.thread; c < D; c += WARP_GROUP_THREADS) {
      const float total = __fadd_rn(__fadd_rn(own.sum[0][c], own.sum[2][c]), __fadd_rn(own.sum[1][c], own.sum[3][c]));
      const u32 mean = pack_half(fminf(fmaxf(total * (1.f / PAGE), -65504.f), 65504.f), 0.f);
      reinterpret_cast<u16*>(part + AT)[c] = (u16)mean;
      own.off[c] = half_to_float(mean);
    }
    warp_group.sync();
  }

  // Computes scale and codes of the page's token `token`, which has index n in its segment. Called by a warp.
  static __device__ void quantize(Space& own, int token, int n, int lane) {
    float x[EACH], square[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int c = 32 * i + lane;
      x[i] = c < D ? __fsub_rn(steps(own, token, c), own.off[c]) : 0.f;
      square[i] = __fmul_rn(x[i], x[i]);
    }
    float scale = 1.f;
    if constexpr (VALUES) {
      const int k = number_of_scale(square);
      scale = scale_of(k);
      if (lane == 0) own.k[n] = (u8)k;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int c = 32 * i + lane;
      if (c < D)
        of_channel(c, [&](auto width) {
          using X = decltype(width);
          own.codes[n * D + c] =
              (u8)fminf(fmaxf(floorf(VALUES ? __fdiv_rn(x[i], scale) : x[i]) + X::HALF, 0.f), X::MAX_CODE);
        });
    }
  }

  // Writes a segment's words of keys, octet by octet.
  static __device__ void pack_keys(u32* words, const Space& own, const WarpGroup& warp_group) {
    using X = Columns<D, W...>;
    for (int i = warp_group.thread; i < 32 * X::WORDS; i += WARP_GROUP_THREADS) {
      const int word = i / (32 * X::V) * X::V + i % X::V, owner = i / X::V % 32, g = owner >> 2, t = owner & 3;
      u32 value = 0;
      for (int n = 0; n < X::COUNT; n++) {
        const Octet o = X::octet(n);
        if (o.at / 4 != word) continue;
#pragma unroll
        for (int f = 0; f < 8; f++) {  // field f: element f >> 2, row half f & 1 of operand f >> 1 & 1
          const u32 code = own.codes[(4 * g + 2 * (f >> 1 & 1) + (f & 1)) * D + o.channel + 2 * t + (f >> 2)];
          value |= (code >> o.shift & (1u << o.width) - 1)
                   << (16 * (f >> 2) + 8 * (f & 1) + 4 * (f >> 1 & 1) + o.at % 4);
        }
      }
      words[i] = value;
    }
  }

  // Writes a segment's words of values: the plane of 4 or 2 bits as in `AffineEncoder`, then the plane of the lowest bit.
  template <class X> static __device__ void pack_values(u32* words, const Space& own, const WarpGroup& warp_group) {
    constexpr int BITS = X::HIGH, PER_TILE = BITS / 2, LOW_AT = D / 16 * PER_TILE,
                  WORDS = LOW_AT + (X::LOW ? D / 32 : 0);
    constexpr int V = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
    for (int i = warp_group.thread; i < 32 * WORDS; i += WARP_GROUP_THREADS) {
      const int word = i / (32 * V) * V + i % V, owner = i / V % 32, g = owner >> 2, t = owner & 3;
      auto code = [&](int e, int upper, int h, int c, int odd) {
        return (u32)own.codes[(4 * (2 * t + e) + 2 * h + upper) * D + channel_of<D>(c, odd, g)];
      };
      u32 value = 0;
      if (word < LOW_AT)
#pragma unroll
        for (int f = 0; f < 32 / BITS; f++) {  // field f % PER_BYTE of byte f / PER_BYTE
          constexpr int PER_BYTE = 8 / BITS;
          const int byte = f / PER_BYTE, upper = f % PER_BYTE & 1, h = BITS == 2 ? f % PER_BYTE >> 1 : word % PER_TILE;
          value |= code(byte >> 1, upper, h, word / PER_TILE, byte & 1) >> X::LOW << f * BITS;
        }
      else
#pragma unroll
        for (int f = 0; f < 32; f++)
          value |= (code(f >> 4, f >> 1 & 1, f >> 2 & 1, 2 * (word - LOW_AT) + (f & 1), f >> 3 & 1) & 1) << f;
      words[i] = value;
    }
  }
  template <class X, class...> struct First {
    using Type = X;
  };

  // A whole page.
  static __device__ void encode(u8* part, const Source& source, int, int, int base, const WarpGroup& warp_group,
                                void* space) {
    Space& own = *static_cast<Space*>(space);
    const float* record = reinterpret_cast<const float*>(source.table);
    for (int i = warp_group.thread; i < PAGE; i += WARP_GROUP_THREADS) own.tokens[i] = source.token(base + i);
    for (int c = warp_group.thread; c < D; c += WARP_GROUP_THREADS) {
      own.center[c] = record[c];
      own.step[c] = record[D + c];
    }
    warp_group.sync();
    means(part, own, warp_group);
    for (int segment = 0; segment < PAGE / 32; segment++) {
      for (int n = warp_group.thread >> 5; n < 32; n += WARPS)
        quantize(own, segment * 32 + n, n, warp_group.thread & 31);
      warp_group.sync();
      if constexpr (VALUES) {
        using X = typename First<W...>::Type;
        pack_values<X>(reinterpret_cast<u32*>(part) + segment * D * X::BITS, own, warp_group);
      } else pack_keys(reinterpret_cast<u32*>(part) + segment * 32 * Columns<D, W...>::WORDS, own, warp_group);
      if constexpr (VALUES)
        for (int i = warp_group.thread; i < 16; i += WARP_GROUP_THREADS)
          part[AT + 16 * segment + i] = own.k[2 * i] | own.k[2 * i + 1] << 4;
      warp_group.sync();
    }
  }
};
