// Packs tokens as integers (`formats/affine.py`): see encode.cuh.
#pragma once
#include "affine.cuh"
#include "encode.cuh"

template <int BITS, bool CHANNEL, int GROUP, int D, int SCALE_AT, int ZERO_AT, bool TRANSPOSED> struct AffineEncoder {
  struct Space {
    Meta meta[PAGE / (CHANNEL ? GROUP : 1) * (CHANNEL ? D : D / GROUP)];
  };
  static constexpr int LEVELS = (1 << BITS) - 1, GROUPS = CHANNEL ? PAGE / GROUP : D / GROUP;
  using C = Codes<BITS, D>;
  using P = Planes<BITS>;
  static constexpr int WORDS = C::WORDS, V = C::V;

  // Tokens [low, high) of a page whose token 0 has index `base`; per channel all of them.
  static __device__ void encode(u8* part, const Source& source, int low, int high, int base,
                                const WarpGroup& warp_group, void* space) {
    Meta* meta = static_cast<Space*>(space)->meta;
    const int warp = warp_group.thread >> 5, lane = warp_group.thread & 31;
    if constexpr (CHANNEL) {
      for (int i = warp_group.thread; i < GROUPS * D; i += WARP_GROUP_THREADS) {
        float lowest = INF, highest = -INF;
        for (int n = 0; n < GROUP; n++) {
          const float x = to_float(source.token(base + i / D * GROUP + n)[i % D]);
          lowest = fminf(lowest, x);
          highest = fmaxf(highest, x);
        }
        fit(part + SCALE_AT, part + ZERO_AT, meta, i, lowest, highest, LEVELS);
      }
    } else {
      for (int i = low * GROUPS + warp; i < high * GROUPS; i += WARPS) {
        const u16* x = source.token(base + i / GROUPS) + i % GROUPS * GROUP;
        float lowest = INF, highest = -INF;
        for (int n = lane; n < GROUP; n += 32) {
          lowest = fminf(lowest, to_float(x[n]));
          highest = fmaxf(highest, to_float(x[n]));
        }
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
          lowest = fminf(lowest, __shfl_xor_sync(~0u, lowest, d));
          highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, d));
        }
        if (lane == 0) fit(part + SCALE_AT, part + ZERO_AT, meta, i, lowest, highest, LEVELS);
      }
    }
    warp_group.sync();
    u32* words = reinterpret_cast<u32*>(part);
    for (int i = low / 32 * 32 * WORDS + warp_group.thread; i < (high + 31) / 32 * 32 * WORDS;
         i += WARP_GROUP_THREADS) {
      const int segment = i / (32 * WORDS), word = i / (32 * V) % (WORDS / V) * V + i % V, owner = i / V % 32,
                g = owner >> 2, t = owner & 3;
      u32 taken = 0, value = 0;
      // Adds a field of 16 channels c: element e, register 2 upper + odd, operand h; its width, its bit position, and bits of the code below it.
      auto put = [&](int c, int e, int odd, int upper, int h, int width, int at, int below) {
        const int token_j = TRANSPOSED ? upper : odd, token_x = TRANSPOSED ? 2 * t + e : g,
                  channel_j = TRANSPOSED ? odd : upper, channel_x = TRANSPOSED ? g : 2 * t + e;
        const int token = segment * 32 + 4 * token_x + 2 * h + token_j,
                  channel = channel_of<D>(c, channel_j, channel_x);
        if (token < low || token >= high) return;
        const Meta m = meta[CHANNEL ? token / GROUP * D + channel : token * GROUPS + channel / GROUP];
        const u32 mask = (1u << width) - 1, code = quantized(to_float(source.token(base + token)[channel]), m, LEVELS);
        taken |= mask << at;
        value |= (code >> below & mask) << at;
      };
      if (!C::SPLIT || word < C::LOW_AT) {
        constexpr int WIDTH = P::HIGH, PER_BYTE = 8 / WIDTH;
        const int c = word / (WIDTH / 2), inner = word % (WIDTH / 2);
#pragma unroll
        for (int f = 0; f < 32 / WIDTH; f++) {
          const int field = f % PER_BYTE,
                    upper = WIDTH == 2   ? field & 1
                            : WIDTH == 4 ? field
                                         : inner & 1,
                    h = WIDTH == 2   ? field >> 1
                        : WIDTH == 4 ? inner
                                     : inner >> 1;
          put(c, f / (2 * PER_BYTE), f / PER_BYTE & 1, upper, h, WIDTH, f * WIDTH, P::LOW);
        }
      } else if constexpr (C::SPLIT) {
        constexpr int EACH = 2 / P::LOW;  // times 16 channels whose low codes share a word
#pragma unroll
        for (int f = 0; f < 32 / P::LOW; f++) {
          const int at = f * P::LOW;
          put((word - C::LOW_AT) * EACH + (EACH == 2 ? at & 1 : 0), at >> 4, at >> 3 & 1, at >> 2 & 1, at >> 1 & 1,
              P::LOW, at, 0);
        }
      }
      if (taken) words[i] = ~taken ? (words[i] & ~taken) | value : value;
    }
    warp_group.sync();
  }
};
