// Vector-quantized pages in layout `fragment-1` / `fragment-1t` (`formats/codebook.py`): indices look up operands in shared memory.
//
// A codebook is in shared memory as [entry][REPLICAS] of DIM fp16 numbers, and a lane reads replica `lane % REPLICAS`. If the replicas of an
// entry fill 128 bytes, lanes of one memory transaction have no bank conflict. An index is masked at a bit position where it already counts
// bytes, so an address costs a shift, a mask and an addition.
#pragma once
#include "common.cuh"

template <int X> struct Log2 {
  static constexpr int value = 1 + Log2<X / 2>::value;
};
template <> struct Log2<1> {
  static constexpr int value = 0;
};

template <int DIM, int BITS, int REPLICAS> struct Table {
  static constexpr int ENTRY = 2 * DIM, SHIFT = Log2<ENTRY * REPLICAS>::value, BYTES = ENTRY * REPLICAS << BITS;

  // Called by all threads that share the table. The caller waits for the copies.
  static __device__ __forceinline__ void fill(u32 table, const u8* codebook, int thread, int threads) {
    if constexpr (REPLICAS == 1)
      for (int i = thread; i < BYTES / 16; i += threads) cp16(table + 16 * i, codebook + 16 * i);
    else
      for (int i = thread; i < REPLICAS << BITS; i += threads) {
        const u8* entry = codebook + i / REPLICAS * ENTRY;
        if constexpr (DIM == 2) cp4(table + ENTRY * i, entry);
        else if constexpr (DIM == 4) cp8(table + ENTRY * i, entry, true);
        else cp16(table + ENTRY * i, entry);
      }
  }

  // The address of the entry for index `n` of a stream of words, in the lane's table at `table`.
  static __device__ __forceinline__ u32 entry(u32 table, const u32* w, int n) {
    const int word = n * BITS / 32, bit = n * BITS % 32;
    if constexpr (BITS == 8) return table + (byte_of(w[word], bit / 8) << SHIFT);
    u32 x;
    if (bit + BITS > 32) x = funnel(w[word], w[word + 1], bit - SHIFT);
    else x = bit >= SHIFT ? w[word] >> (bit - SHIFT) : w[word] << (SHIFT - bit);
    return table + (x & ((1u << BITS) - 1) << SHIFT);
  }
};

// A lane's stream of indices for 32 tokens.
template <int DIM, int BITS, int D> struct Stream {
  static constexpr int WORDS = D / DIM * BITS / 32, V = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
  static constexpr int BYTES = 128 * WORDS;  // bytes of all lanes
  static_assert(SLICES == 1 || V == 4, "a slice begins with a load, for any number of words");
  static_assert(D / DIM * BITS % 32 == 0, "formats.Codebook.in_lanes");

  u32 w[WORDS];
  __device__ __forceinline__ void load(u32 segment, int lane) {
#pragma unroll
    for (int i = 0; i < WORDS / V; i++) lds<V>(w + i * V, segment + (i * 32 + lane) * 4 * V);
  }
};

template <int DIM, int BITS, int REPLICAS, int D> struct CodebookKeys {
  using T = Table<DIM, BITS, REPLICAS>;
  using S = Stream<DIM, BITS, D>;
  static constexpr bool NORMALISED = true;  // needs q as fp16 of magnitude at most 1
  static constexpr int GROUPS = 1, LIFT = 0, STAGE_BYTES = KV_TILE / 32 * S::BYTES, SECOND_STAGE_BYTES = STAGE_BYTES,
                       TABLE_BYTES = T::BYTES, PART_BYTES = PAGE / 32 * SLICES * S::BYTES;

  u32 q[NT][D / 8];  // right operand
  float c[NT][2];    // factor of the scores of columns 2 t, 2 t + 1
  u32 table;         // the lane's replica

  static __device__ __forceinline__ void fill(u32 at, const u8* codebook, int thread, int threads) {
    T::fill(at, codebook, thread, threads);
  }
  __device__ __forceinline__ void find(u32 at, int lane) { table = at + lane % REPLICAS * T::ENTRY; }

  __device__ __forceinline__ void begin(u32 rows, const float* size, const float*, float scale, int lane) {
    const int g = lane >> 2, t = lane & 3;
    constexpr int STRIDE = D * 2 + 16;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) c[n][e] = size[8 * n + 2 * t + e] * scale;
#pragma unroll
      for (int b = 0; b < D / 32; b++) lds<4>(&q[n][4 * b], rows + (8 * n + g) * STRIDE + 64 * b + 16 * t);
    }
  }

  __device__ __forceinline__ void copy(u32 stage, const u8* part, int token, bool, int limit, int lane) const {
    copy_codes<S::BYTES>(in_work_tile(limit), stage, part, token, lane);
  }
  __device__ __forceinline__ void refresh(u32, u32, int, bool, int) {}

  // The left operand over channels from 16 c on, for 16 tokens (half h of 32).
  __device__ __forceinline__ void operand(u32* a, const S& s, int c, int h) const {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if constexpr (DIM == 2) {
#pragma unroll
        for (int i = 0; i < 2; i++) lds<1>(a + 2 * i + j, T::entry(table, s.w, (2 * c + i) * 4 + 2 * h + j));
      } else if constexpr (DIM == 4) {
        u32 x[2];
        lds<2>(x, T::entry(table, s.w, c * 4 + 2 * h + j));
        a[j] = x[0];
        a[2 + j] = x[1];
      } else {  // one entry covers this c and the next
        u32 x[4];
        lds<4>(x, T::entry(table, s.w, c / 2 * 4 + 2 * h + j));
        a[j] = x[0];
        a[2 + j] = x[1];
        a[4 + j] = x[2];
        a[6 + j] = x[3];
      }
    }
  }

  __device__ __forceinline__ void scores(float (*s)[NT][4], u32 stage, u32, int lane) {
    constexpr int STEP = DIM == 8 ? 2 : 1;
#pragma unroll
    for (int segment = 0; segment < KV_TILE / 32; segment++) {
      S stream;
      stream.load(stage + segment * S::BYTES, lane);
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < NT; n++)
          s[2 * segment + h][n][0] = s[2 * segment + h][n][1] = s[2 * segment + h][n][2] = s[2 * segment + h][n][3] =
              0.f;
#pragma unroll
      for (int c = 0; c < D / 16; c += STEP)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          u32 a[4 * STEP];
          operand(a, stream, c, h);
#pragma unroll
          for (int i = 0; i < STEP; i++)
#pragma unroll
            for (int n = 0; n < NT; n++)
              mma<false>(s[2 * segment + h][n], a + 4 * i, q[n][2 * (c + i)], q[n][2 * (c + i) + 1]);
        }
    }
  }

  __device__ __forceinline__ float factor(int n, int, int e) const { return c[n][e]; }
  __device__ __forceinline__ float offset(int, int, int) const { return 0.f; }
};

// An entry holds channels of one token, but an operand needs neighbouring tokens, so two entries are interleaved. A lane then has the channels of
// a sub-vector instead of those of `channel_of`. So sums over pages have their own order of channels (`channel`).
template <int DIM, int BITS, int REPLICAS, int D> struct CodebookValues {
  using T = Table<DIM, BITS, REPLICAS>;
  using S = Stream<DIM, BITS, D>;
  static constexpr int STAGE_BYTES = KV_TILE / 32 * S::BYTES, SCRATCH_BYTES = 0, TABLE_BYTES = T::BYTES,
                       PART_BYTES = PAGE / 32 * SLICES * S::BYTES;
  static constexpr float SUM_UNIT = 1.f;
  static constexpr bool OWN_ORDER = true;
  static __device__ __forceinline__ constexpr int channel(int k, int j, int g) {
    return k / (DIM / 2) * 8 * DIM + DIM * g + k % (DIM / 2) * 2 + j;
  }

  u32 table;

  static __device__ __forceinline__ void fill(u32 at, const u8* codebook, int thread, int threads) {
    T::fill(at, codebook, thread, threads);
  }
  __device__ __forceinline__ void find(u32 at, int lane) { table = at + lane % REPLICAS * T::ENTRY; }
  __device__ __forceinline__ void begin() {}
  __device__ __forceinline__ void copy(u32 stage, const u8* part, int token, int limit, int lane) const {
    copy_codes<S::BYTES>(in_work_tile(limit), stage, part, token, lane);
  }
  __device__ __forceinline__ void weigh(u32, u32, int, int) {}
  __device__ __forceinline__ float exponent(int, int) const { return 0.f; }

  __device__ __forceinline__ void add(float (*o)[NT][4], float (*l)[2], float (*x)[NT][4], u32 stage, u32, int,
                                      int lane) {
#pragma unroll
    for (int segment = 0; segment < KV_TILE / 32; segment++) {
      S stream;
      stream.load(stage + segment * S::BYTES, lane);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        u32 p[NT][2];
#pragma unroll
        for (int n = 0; n < NT; n++) {
          float w[4] = {};
#pragma unroll
          for (int i = 0; i < 4; i += EVERY) {
            w[i] = ex2(x[2 * segment + h][n][i]);
            l[n][i & 1] += w[i];
          }
          p[n][0] = transposed(pack_half(w[0], w[1]));
          p[n][1] = transposed(pack_half(w[2], w[3]));
        }
#pragma unroll
        for (int u = 0; u < D / (8 * DIM); u++) {
          u32 y[2][2][DIM / 2];
#pragma unroll
          for (int j = 0; j < 2; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) lds<DIM / 2>(y[j][e], T::entry(table, stream.w, 8 * u + 4 * h + 2 * j + e));
#pragma unroll
          for (int m = 0; m < DIM / 2; m++) {
            const u32 a[4] = {low_halves(y[0][0][m], y[0][1][m]), high_halves(y[0][0][m], y[0][1][m]),
                              low_halves(y[1][0][m], y[1][1][m]), high_halves(y[1][0][m], y[1][1][m])};
#pragma unroll
            for (int n = 0; n < NT; n++) mma<false>(o[u * (DIM / 2) + m][n], a, p[n][0], p[n][1]);
          }
        }
      }
    }
  }
  __device__ __forceinline__ void decay(int, int, float) {}
  __device__ __forceinline__ void finish(float (*)[NT][4]) {}
};
