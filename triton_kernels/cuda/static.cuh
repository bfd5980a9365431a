// Static codes (`formats/static.py`) in layout `fragment-1`: the columns of a page, and the preparation of a query. Steps and centers do not
// depend on the page, so they are multiplied into the query once per decode step:
//   q . k = sum (q step gain) code + sum (q step) mean + [sum q center - sum (q step gain) middle]
// The bracket is one number per query. The term with the mean is one product per page.
#pragma once
#include "affine.cuh"

template <int N> struct Number {
  static constexpr int value = N;
};
// f(Number<FIRST>), ..., f(Number<LAST - 1>): a loop whose index is a compile-time constant.
template <int FIRST, int LAST, class F> __device__ __forceinline__ void each(const F& f) {
  if constexpr (FIRST < LAST) {
    f(Number<FIRST>{});
    each<FIRST + 1, LAST>(f);
  }
}

// Neighbouring channels of one width. GAIN: bits of the float that multiplies a code's distance from the middle.
template <int BITS_, u32 GAIN_> struct Width {
  static constexpr int BITS = BITS_, HIGH = BITS >= 4 ? 4 : BITS >= 2 ? 2 : BITS, LOW = BITS - HIGH;  // its planes
  static constexpr u32 GAIN = GAIN_;
  static constexpr float HALF = BITS ? (1 << BITS) / 2 : 0, MAX_CODE = (1 << BITS) - 1, MIDDLE = MAX_CODE / 2;
};

// Eight channels of a plane, from `channel` on: their bits, the code's bits below them, and their offset in a lane's data (in quarter words).
struct Octet {
  int channel, width, shift, at;
};

// Groups of channels, all of one size.
template <int D, class... W> struct Columns {
  static constexpr int GROUPS = sizeof...(W), SIZE = D / GROUPS, EACH = SIZE / 8;
  static_assert(SIZE % 8 == 0, "formats.static.validate");

  // Octet n, in order. After the last octet only `at` is defined.
  static __device__ __forceinline__ constexpr Octet octet(int n) {
    const int high[] = {W::HIGH...}, low[] = {W::LOW...};
    int at = 0;
    for (int width = 4; width > 0; width /= 2)
      for (int i = 0; i < GROUPS; i++) {
        if (width != high[i] && width != low[i]) continue;
        if (n < EACH) return {i * SIZE + n * 8, width, width == high[i] ? low[i] : 0, at + n * width};
        n -= EACH;
        at += EACH * width;
      }
    return {0, 0, 0, at};
  }
  static constexpr int count() {
    const int high[] = {W::HIGH...}, low[] = {W::LOW...};
    int planes = 0;
    for (int i = 0; i < GROUPS; i++) planes += (high[i] > 0) + (low[i] > 0);
    return planes * EACH;
  }
  static constexpr int COUNT = count(), TILES = (COUNT + 1) / 2;  // octets, and operands of 16 columns
  static constexpr int WORDS = (octet(COUNT).at + 3) / 4;         // a lane's words of 32 tokens
  static constexpr int V = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1, BYTES = 128 * WORDS;

  // Calls f(Width) with the width of the channel's group.
  template <class F> static __device__ __forceinline__ void of_group(int channel, const F& f) {
    int i = 0;
    ((channel / SIZE == i++ ? f(W{}) : void()), ...);
  }
};

// Steps and centers of a lane's channels (two of every 64). `put` multiplies them into queries.
template <int D, class X> struct StaticFold {
  static constexpr int WORDS = (D + 63) / 64;
  static constexpr int ROOM = 12;  // queries have a magnitude of at most 2^ROOM
  u32 center[WORDS][2], step[WORDS][2];

  // record: the KV head's centers and steps, each float32 [D]
  __device__ __forceinline__ void load(const u8* record, int lane) {
#pragma unroll
    for (int k = 0; k < WORDS; k++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const u32* from = reinterpret_cast<const u32*>(record) + min(2 * (k * 32 + lane) + e, D - 1);
        center[k][e] = load_now(from);
        step[k][e] = load_now(from + D);
      }
  }
  __device__ __forceinline__ float scaled(const u32* x, int k, int e) const {
    return to_float(e ? x[k] >> 16 : x[k] & 0xffff) * __uint_as_float(step[k][e]);
  }
  // The largest magnitude of the lane's numbers, for query x.
  __device__ __forceinline__ float largest(const u32* x) const {
    float magnitude = 0.f;
#pragma unroll
    for (int k = 0; k < WORDS; k++)
#pragma unroll
      for (int e = 0; e < 2; e++) magnitude = fmaxf(magnitude, fabsf(scaled(x, k, e)));
    return magnitude;
  }
  // Writes query x, divided by `size`, for products with means (`means`) and with codes (`codes`). fixed: the query's constant term in every
  // score. largest: the maximum of `largest(x)` over all lanes. Called by a warp.
  __device__ __forceinline__ void put(const u32* x, float largest, u32* means, u32* codes, float* size, float* fixed,
                                      int lane) const {
    const u32 exponent = min(max((__float_as_uint(largest) >> 23) + 1, ROOM + 2u), 252u);
    const float inverse = __uint_as_float((254 - exponent + ROOM) << 23),
                back = __uint_as_float((exponent - ROOM) << 23);
    float constant = 0.f;
#pragma unroll
    for (int k = 0; k < WORDS; k++) {
      const int pair = k * 32 + lane;
      if (pair >= D / 2) continue;
      float code[2] = {}, y[2], middle = 0.f;
#pragma unroll
      for (int e = 0; e < 2; e++) {
        y[e] = scaled(x, k, e) * inverse;
        X::of_group(2 * pair, [&](auto width) {
          using W = decltype(width);
          if (W::BITS) code[e] = y[e] * __uint_as_float(W::GAIN);
          middle = W::MIDDLE;
        });
        constant += to_float(e ? x[k] >> 16 : x[k] & 0xffff) * __uint_as_float(center[k][e]);
      }
      const u32 code_pair = pack_half(code[0], code[1]);
      codes[pair] = code_pair;
      means[pair] = pack_half(y[0], y[1]);
      // from the rounded factors of the codes, because the two nearly cancel
      constant -= (half_to_float(code_pair & 0xffff) + half_to_float(code_pair >> 16)) * middle * back;
    }
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) constant += __shfl_xor_sync(~0u, constant, d);
    if (lane == 0) {
      *size = back;
      *fixed = constant;
    }
  }
};

template <int D, int MEAN_AT, class... W> struct StaticKeys {
  using X = Columns<D, W...>;
  using Fold = StaticFold<D, X>;
  static_assert(D == 0 || SLICES == 1, "a lane's words have the channels in the order of their widths");
  static constexpr bool NORMALISED = true;  // needs its own copies of the queries
  static constexpr int GROUPS = 1, LIFT = 0;
  static constexpr int CODES = KV_TILE / 32 * X::BYTES, STAGE_BYTES = CODES + 2 * D,
                       SECOND_STAGE_BYTES = PAGE >= WORK_TILE ? CODES : STAGE_BYTES;

  u32 q[NT][2 * X::TILES];  // right operand for codes
  float c[NT][2];           // the unit of products with q and with means
  float fixed[NT][2];       // the constant term of all scores
  float bias[NT][2];        // the same, plus the page's term

  // rows: queries for means, then queries for codes; size, sums: see `StaticFold.put`
  __device__ __forceinline__ void begin(u32 rows, const float* size, const float* sums, float scale, int lane) {
    const int g = lane >> 2, t = lane & 3;
    constexpr int STRIDE = D * 2 + 16;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        c[n][e] = size[8 * n + 2 * t + e] * scale;
        fixed[n][e] = sums[8 * n + 2 * t + e] * scale;
      }
      q[n][2 * X::TILES - 1] = 0;
      each<0, X::COUNT>([&](auto i) {
        constexpr Octet o = X::octet(decltype(i)::value);
        constexpr float factor = (float)(1 << o.shift) / (1 << o.at % 4);
        u32 x;
        lds<1>(&x, rows + (8 * (NT + n) + g) * STRIDE + 2 * (o.channel + 2 * t));
        q[n][decltype(i)::value] = mul2(x, pack_half(factor, factor));
      });
    }
  }

  __device__ __forceinline__ void copy(u32 stage, const u8* part, int token, bool fresh, int limit, int lane) const {
    copy_linear<CODES>(in_work_tile(limit), stage, part + token / 32 * X::BYTES, lane);
    if (fresh || token % PAGE == 0) copy_linear<2 * D>(in_work_tile(limit), stage + CODES, part + MEAN_AT, lane);
  }

  // Multiplies queries by a page's means, like one more row of keys. A lane has eight neighbouring channels of every 32.
  __device__ __forceinline__ void refresh(u32 stage, u32 rows, int token, bool fresh, int lane) {
    if (!fresh && token % PAGE) return;
    const int g = lane >> 2, t = lane & 3;
    constexpr int STRIDE = D * 2 + 16, WHOLE = D / 32;
    float acc[NT][4] = {};
#pragma unroll
    for (int b = 0; b < (D + 16) / 32; b++) {
      u32 a[4] = {};
      if (b < WHOLE) lds<4>(a, stage + CODES + 64 * b + 16 * t);
      else lds<2>(a, stage + CODES + 64 * b + 8 * t);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        u32 x[4] = {};
        if (b < WHOLE) lds<4>(x, rows + (8 * n + g) * STRIDE + 64 * b + 16 * t);
        else lds<2>(x, rows + (8 * n + g) * STRIDE + 64 * b + 8 * t);
        const u32 low[4] = {a[0], 0u, a[1], 0u}, high[4] = {a[2], 0u, a[3], 0u};
        mma<false>(acc[n], low, x[0], x[1]);
        if (b < WHOLE) mma<false>(acc[n], high, x[2], x[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) bias[n][e] = acc[n][e] * c[n][e] + fixed[n][e];
  }

  // Registers 2 i and 2 i + 1 of the operands over 16 tokens each (h): an octet is half of their columns.
  template <int O> static __device__ __forceinline__ void unpack(const u32* w, u32 (*a)[4], int i) {
    constexpr Octet o = X::octet(O);
    constexpr u32 MASK = ((1u << o.width) - 1) * 0x00010001u << o.at % 4;
    const u32 x = w[o.at / 4], y = w[o.at / 4] >> 8;
    a[0][2 * i] = x & MASK;
    a[0][2 * i + 1] = y & MASK;
    a[1][2 * i] = x & MASK << 4;
    a[1][2 * i + 1] = y & MASK << 4;
  }

  __device__ __forceinline__ void scores(float (*s)[NT][4], u32 stage, u32, int lane) {
#pragma unroll
    for (int segment = 0; segment < KV_TILE / 32; segment++) {
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < NT; n++)
          s[2 * segment + h][n][0] = s[2 * segment + h][n][1] = s[2 * segment + h][n][2] = s[2 * segment + h][n][3] =
              0.f;
      const u32 words = stage + segment * X::BYTES + lane * 4 * X::V;
      u32 w[X::WORDS];
      each<0, X::TILES>([&](auto k) {
        constexpr int K = decltype(k)::value, LAST = 2 * K + 1 < X::COUNT ? 2 * K + 1 : X::COUNT - 1;
        constexpr int HAVE = K == 0 ? 0 : X::octet(2 * K - 1).at / 4 / X::V + 1,
                      NEED = X::octet(LAST).at / 4 / X::V + 1;
#pragma unroll
        for (int load = HAVE; load < NEED; load++) lds<X::V>(w + load * X::V, words + load * 128 * X::V);
        u32 a[2][4] = {};
        unpack<2 * K>(w, a, 0);
        if constexpr (2 * K + 1 < X::COUNT) unpack<2 * K + 1>(w, a, 1);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int h = 0; h < 2; h++) mma<false>(s[2 * segment + h][n], a[h], q[n][2 * K], q[n][2 * K + 1]);
      });
    }
  }

  __device__ __forceinline__ float factor(int n, int tile, int e) const {
    return c[n][e] * (TWO24 / operand_position<2>(tile & 1));
  }
  __device__ __forceinline__ float offset(int n, int, int e) const { return bias[n][e]; }
};
