// Packs a page on the path of a trellis (`formats/trellis.py`): first the scales of tokens, then one thread per chain searches a path. See
// encode.cuh.
#pragma once
#include "encode_static.cuh"
#include "trellis.cuh"

template <int D, int SCALE_AT, class T, class W> struct TrellisEncoder {
  using Scales = StaticEncoder<true, D, SCALE_AT, T, W>;
  static constexpr int FIELDS = Trellis<D>::TWO_FIELDS ? 2 : 1;  // fields of a word that a chain takes
  static constexpr int WORDS = D / 16, V = Trellis<D>::V;
  static constexpr int TOKENS = PAGE < Trellis<D>::CHAIN ? PAGE : Trellis<D>::CHAIN, CTAS = TOKENS / 32,
                       STEPS = CTAS * WORDS * FIELDS;
  static constexpr int EACH = 16 / FIELDS, CHAINS = PAGE / TOKENS * 32 * EACH;  // chains of a lane, of a page
  static constexpr float FARTHEST = 1024.f;
  struct Space {
    const u16* tokens[PAGE];
    float center[D], step[D], scale[PAGE];
    u8 k[PAGE];
  };

  // The distance of a number of channel c from the center, in steps.
  static __device__ __forceinline__ float steps(const Space& own, u16 number, int c) {
    return __fdiv_rn(__fsub_rn(to_float(number), own.center[c]), own.step[c]);
  }
  // The number of each step of a chain. Loads run two steps ahead, divisions one.
  struct Numbers {
    const Space& own;
    const int lane, field, first;  // field: the chain's first field; first: the token where the chain begins

    struct Position {
      int token, channel;
    };
    __device__ __forceinline__ Position position(int t) const {
      const int f = field + t % FIELDS, word = t / FIELDS % WORDS, segment = t / FIELDS / WORDS;
      return {first + 32 * segment + 4 * (2 * (lane & 3) + (f >> 3)) + 2 * (f >> 1 & 1) + (f & 1),
              channel_of<D>(word, f >> 2 & 1, lane >> 2)};
    }
    __device__ __forceinline__ u16 load(int t) const {
      const Position at = position(min(t, STEPS - 1));
      return own.tokens[at.token][at.channel];
    }
    // In half steps, divided by the token's scale.
    __device__ __forceinline__ float number(u16 loaded, int t) const {
      const Position at = position(min(t, STEPS - 1));
      return fminf(fmaxf(2.f * __fdiv_rn(steps(own, loaded, at.channel), own.scale[at.token]), -FARTHEST), FARTHEST);
    }
  };

  template <int N, class = void> struct BitsOf {
    using Type = u32;
  };
  template <class X> struct BitsOf<64, X> {
    using Type = u64;
  };
  using Bits = typename BitsOf<STEPS <= 32 ? 32 : 64>::Type;
  // Both bits of the codes of a path. The lowest bits are those of the last step.
  struct Path {
    Bits own, upper;
  };

  // For each of the eight states: the lowest cost of a path that ends there, and the codes of that path.
  struct Search {
    float cost[8];
    Path path[8];

    __device__ __forceinline__ Search() {
#pragma unroll
      for (int s = 0; s < 8; s++) {
        cost[s] = s ? INF : 0.f;
        path[s] = {0, 0};
      }
    }
    // x: in half steps. Rounded after every operation.
    __device__ __forceinline__ void step(float x) {
      float square[4], next[8];
      bool upper[4];
#pragma unroll
      for (int d = 0; d < 4; d++) {
        const float off = __fsub_rn(x, d - 3.5f);
        upper[d] = off > 2.f;
        const float lowest = upper[d] ? __fsub_rn(off, 4.f) : off;
        square[d] = __fmul_rn(lowest, lowest);
      }
      Path longer[8];
#pragma unroll
      for (int s = 0; s < 8; s++) {
        const int first = s >> 1, second = first | 4, own = s & 1;
        const int lowest = 2 * (own ^ (first & 1)) + (first >> 1 & 1),
                  other = lowest ^ 2;  // the two candidate levels
        const float one = __fadd_rn(cost[first], square[lowest]), two = __fadd_rn(cost[second], square[other]);
        const bool way = two < one;
        next[s] = way ? two : one;
        longer[s] = {(way ? path[second].own : path[first].own) << 1 | (Bits)own,
                     (way ? path[second].upper : path[first].upper) << 1 | (Bits)(way ? upper[other] : upper[lowest])};
      }
#pragma unroll
      for (int s = 0; s < 8; s++) {
        cost[s] = next[s];
        path[s] = longer[s];
      }
    }
    __device__ __forceinline__ Path best() const {
      float lowest = cost[0];
      Path cheapest = path[0];
#pragma unroll
      for (int s = 1; s < 8; s++)
        if (cost[s] < lowest) {
          lowest = cost[s];
          cheapest = path[s];
        }
      return cheapest;
    }
  };

  // A whole page.
  static __device__ void encode(u8* part, const Source& source, int, int, int base, const WarpGroup& warp_group,
                                void* space) {
    Space& own = *static_cast<Space*>(space);
    const float* record = reinterpret_cast<const float*>(source.table);
    const int warp = warp_group.thread >> 5, lane = warp_group.thread & 31;
    for (int i = warp_group.thread; i < PAGE; i += WARP_GROUP_THREADS) own.tokens[i] = source.token(base + i);
    for (int c = warp_group.thread; c < D; c += WARP_GROUP_THREADS) {
      own.center[c] = record[c];
      own.step[c] = record[D + c];
    }
    warp_group.sync();
    for (int n = warp; n < PAGE; n += WARPS) {
      float square[Scales::EACH];
#pragma unroll
      for (int i = 0; i < Scales::EACH; i++) {
        const float x = 32 * i + lane < D ? steps(own, own.tokens[n][32 * i + lane], 32 * i + lane) : 0.f;
        square[i] = __fmul_rn(x, x);
      }
      const int k = Scales::number_of_scale(square);
      if (lane == 0) {
        own.k[n] = (u8)k;
        own.scale[n] = Scales::scale_of(k);
      }
    }
    warp_group.sync();
    for (int i = warp_group.thread; i < PAGE / 2; i += WARP_GROUP_THREADS)
      part[SCALE_AT + i] = own.k[2 * i] | own.k[2 * i + 1] << 4;
    for (int i = warp_group.thread; i < CHAINS; i += WARP_GROUP_THREADS) {
      const int field = i % EACH * FIELDS, owner = i / EACH % 32, first = i / (32 * EACH) * TOKENS;
      Search search;
      const Numbers numbers{own, owner, field, first};
      float x = numbers.number(numbers.load(0), 0);
      u16 next = numbers.load(1);
#pragma unroll 1
      for (int t = 0; t < STEPS; t++) {
        const u16 later = numbers.load(t + 2);
        const float y = numbers.number(next, t + 1);
        search.step(x);
        x = y;
        next = later;
      }
      const Path path = search.best();
      u32* words = reinterpret_cast<u32*>(part) + first * D / 16;
      // lanes with chains of the same word combine its fields
#pragma unroll 1
      for (int word = 0; word < CTAS * WORDS; word++) {
        u32 value = 0;
#pragma unroll
        for (int f = 0; f < FIELDS; f++) {
          const int at = STEPS - 1 - (word * FIELDS + f);
          value |= (u32)((path.upper >> at & 1) * 2 | path.own >> at & 1) << 2 * (field + f);
        }
#pragma unroll
        for (int d = 1; d < EACH; d *= 2) value |= __shfl_xor_sync(~0u, value, d);
        if (i % EACH == word % EACH) words[word / V * (32 * V) + owner * V + word % V] = value;
      }
    }
    warp_group.sync();
  }
};
