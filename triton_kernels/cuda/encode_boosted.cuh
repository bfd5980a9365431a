// Packs a page of boosted keys (`formats/boosted.py`): a warp group scores channels, chooses, quantizes and packs.
#pragma once
#include "affine.cuh"
#include "encode.cuh"

enum Score { MAGNITUDE, VARIANCE, RANGE, RANDOM };

// MurmurHash3's finaliser
__device__ __forceinline__ u32 mixed(u32 x) {
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

template <int COUNT, int COLUMNS, int D, int HIGH_AT, int SCALE_AT, int ZERO_AT, int MAP_AT, int SCORE, u32 SEED>
struct BoostedEncoder {
  static_assert(WARP_GROUP_THREADS >= D, "a thread per channel");
  static constexpr int CHANNEL_THREADS = WARP_GROUP_THREADS / D >= 4   ? 4
                                         : WARP_GROUP_THREADS / D >= 2 ? 2
                                                                       : 1;  // threads that share a channel

  // Statistics of each thread's tokens of a channel.
  struct Statistics {
    float low[CHANNEL_THREADS][D], high[CHANNEL_THREADS][D], sum[CHANNEL_THREADS][D];
  };
  struct Space {
    const u16* tokens[PAGE];
    Statistics statistics;
    Meta meta[D];
    int keys[D], counts[(WARPS + 3) / 4 * 4];  // rounded up: ptxas combines four loads, and reads past the last count
    float levels[D];
    u8 map[COLUMNS ? COLUMNS : 1];
  };
  static __device__ __forceinline__ float total(const float (*x)[D], int c) {
    if constexpr (CHANNEL_THREADS == 4) return __fadd_rn(__fadd_rn(x[0][c], x[2][c]), __fadd_rn(x[1][c], x[3][c]));
    else if constexpr (CHANNEL_THREADS == 2) return __fadd_rn(x[0][c], x[1][c]);
    else return x[0][c];
  }

  // The score of channel `c` as an integer of the same order. Called by all threads.
  static __device__ __forceinline__ int score(Statistics& statistics, const u16* const* tokens, int c, int p, float low,
                                              float high, const WarpGroup& warp_group) {
    float x = 0.f;
    if constexpr (SCORE == MAGNITUDE) {
      if (p == 0) x = total(statistics.sum, c);
    }
    if constexpr (SCORE == VARIANCE) {
      float mean = 0.f;
      if (p < CHANNEL_THREADS) mean = total(statistics.sum, c) * (1.f / PAGE);
      warp_group.sync();
      if (p < CHANNEL_THREADS)
        statistics.sum[p][c] = fold<CHANNEL_THREADS>(
            [&](int n) {
              const float off = to_float(tokens[n][c]) - mean;
              return __fmul_rn(off, off);
            },
            p);
      warp_group.sync();
      if (p == 0) x = total(statistics.sum, c);
    }
    if constexpr (SCORE == RANGE) x = high - low;
    if constexpr (SCORE == RANDOM)
      x = (float)(mixed(__float_as_uint(low + 0.f) ^ (u32)c * 0x9e3779b1u ^ SEED * 0x27d4eb2fu) >> 8);
    return __float_as_int(x + 0.f);  // x is at least 0, so its bits have the same order
  }

  // Words of `fragment-1`, 2 bits; code(token, column).
  template <int WIDTH, class F>
  static __device__ __forceinline__ void pack(u32* words, const WarpGroup& warp_group, F code) {
    using C = Codes<2, WIDTH ? WIDTH : 16>;
    for (int i = warp_group.thread; i < PAGE * WIDTH / 16; i += WARP_GROUP_THREADS) {
      const int segment = i / (32 * C::WORDS), c = i / (32 * C::V) % (C::WORDS / C::V) * C::V + i % C::V,
                owner = i / C::V % 32, g = owner >> 2, t = owner & 3;
      u32 word = 0;
#pragma unroll
      for (int f = 0; f < 16;
           f++)  // field f: element f >> 3 of register 2 (f & 1) + (f >> 2 & 1) of operand f >> 1 & 1
        word |=
            code(segment * 32 + 4 * g + 2 * (f >> 1 & 1) + (f >> 2 & 1), channel_of<WIDTH>(c, f & 1, 2 * t + (f >> 3)))
            << 2 * f;
      words[i] = word;
    }
  }

  static __device__ void encode(u8* part, const Source& source, int, int, int base, const WarpGroup& warp_group,
                                void* space) {
    Space& own = *static_cast<Space*>(space);
    const u16** tokens = own.tokens;
    Statistics& statistics = own.statistics;
    Meta* meta = own.meta;
    int *keys = own.keys, *counts = own.counts;
    float* levels = own.levels;
    u8* map = own.map;
    const int warp = warp_group.thread >> 5, lane = warp_group.thread & 31, c = warp_group.thread % D,
              p = warp_group.thread / D;
    for (int i = warp_group.thread; i < PAGE; i += WARP_GROUP_THREADS) tokens[i] = source.token(base + i);
    warp_group.sync();
    if (p < CHANNEL_THREADS) {
      float low = INF, high = -INF;
      statistics.sum[p][c] = fold<CHANNEL_THREADS>(
          [&](int n) {
            const float x = to_float(tokens[n][c]);
            low = fminf(low, x);
            high = fmaxf(high, x);
            return SCORE == MAGNITUDE ? fabsf(x) : x;
          },
          p);
      statistics.low[p][c] = low;
      statistics.high[p][c] = high;
    }
    warp_group.sync();
    float low = statistics.low[0][c], high = statistics.high[0][c];
#pragma unroll
    for (int i = 1; i < CHANNEL_THREADS; i++) {
      low = fminf(low, statistics.low[i][c]);
      high = fmaxf(high, statistics.high[i][c]);
    }
    bool boosted = false;
    if constexpr (COUNT > 0) {
      const int key = score(statistics, tokens, c, p, low, high, warp_group);
      if (p == 0) keys[c] = key;
      for (int i = warp_group.thread; i < COLUMNS; i += WARP_GROUP_THREADS) map[i] = 0;
      warp_group.sync();
      int ahead = 0;  // channels that rank before this one
      if (p == 0)
#pragma unroll 8
        for (int i = 0; i < D; i++) ahead += keys[i] > key || (keys[i] == key && i < c);
      boosted = p == 0 && ahead < COUNT;
      const u32 chosen = __ballot_sync(~0u, boosted);
      if (lane == 0) counts[warp] = __popc(chosen);
      warp_group.sync();
      int row = __popc(chosen & (1u << lane) - 1);
      for (int i = 0; i < warp; i++) row += counts[i];
      if (boosted) map[row] = (u8)c;
    }
    if (p == 0) {
      levels[c] = boosted ? 15.f : 3.f;
      fit(part + SCALE_AT, part + ZERO_AT, meta, c, low, high, levels[c]);
    }
    warp_group.sync();
    auto code = [&](int token, int channel) {
      return quantized(to_float(tokens[token][channel]), meta[channel], levels[channel]);
    };
    pack<D>(reinterpret_cast<u32*>(part), warp_group, [&](int token, int channel) { return code(token, channel) & 3; });
    pack<COLUMNS>(reinterpret_cast<u32*>(part + HIGH_AT), warp_group,
                  [&](int token, int column) { return column < COUNT ? code(token, map[column]) >> 2 : 0u; });
    for (int i = warp_group.thread; i < COLUMNS; i += WARP_GROUP_THREADS) part[MAP_AT + i] = map[i];
    warp_group.sync();
  }
};
