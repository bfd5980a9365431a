// Packs with a codebook: the index of the nearest entry (`formats/codebook.py`). See encode.cuh.
#pragma once
#include "encode.cuh"

// Tensor cores compare entries up to rounding: x . c - |c|^2 / 2 is largest for the nearest entry c. They do so for classes of entries; a
// class is a lane's entries of TILES products. Then distances are computed exactly as defined, for the class of the nearest entry. If rounding
// may hide an equally near entry of another class (one sub-vector in thousands), they are computed for all entries.
template <int DIM, int BITS, int D, bool TRANSPOSED> struct CodebookEncoder {
  static constexpr int COUNT = D / DIM, WORDS = COUNT * BITS / 32, V = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
  // Sub-vectors that a warp takes at a time; a lane has MINE of them. More sub-vectors use a loaded entry more often, and need more registers.
  static constexpr int ENTRIES = 1 << BITS, VECTORS = ENTRIES >= 1024 ? 64 : 32, N = VECTORS / 8, MINE = VECTORS / 32;
  static constexpr int TILES = ENTRIES >= 1024 ? 8 : ENTRIES >= 128 ? 4 : 1;
  static_assert(32 * COUNT % VECTORS == 0, "the sub-vectors of 32 tokens are divided among warps");
  struct Space {
    u16 codes[32 * COUNT];
  };

  // Sixteen entries as a left operand: rows are entries, the first DIM of its 16 columns are channels.
  struct Entries {
    u32 a[4];
    float half_square[2];  // |c|^2 / 2 of the lane's two rows
    __device__ __forceinline__ Entries(const u8* book, int first, int g, int t) {
      a[2] = a[3] = 0;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int entry = first + g + 8 * j;
        a[j] = 0;
        if (2 * t < DIM && entry < ENTRIES) ldg<1>(a + j, book + 2 * DIM * entry + 4 * t);
        const float low = half_to_float(a[j] & 0xffff), high = half_to_float(a[j] >> 16);
        float x = low * low + high * high;
        x += __shfl_xor_sync(~0u, x, 1);
        x += __shfl_xor_sync(~0u, x, 2);
        half_square[j] = entry < ENTRIES ? 0.5f * x : INF;
      }
    }
    // The nearness of the entries to eight sub-vectors (right operand b).
    __device__ __forceinline__ void nearness(float* d, u32 b) const {
      const float c[4] = {-half_square[0], -half_square[0], -half_square[1], -half_square[1]};
      mma_from(d, a, b, 0u, c);
    }
  };

  static __device__ __forceinline__ const u16* vector(const Source& source, int base, int i) {
    return source.token(base + i / COUNT) + i % COUNT * DIM;
  }

  struct Vector {
    float x[DIM];
    __device__ __forceinline__ Vector(const u16* from) {
#pragma unroll
      for (int c = 0; c < DIM; c++) x[c] = to_float(from[c]);
    }
    __device__ __forceinline__ float square() const {
      float sum = 0.f;
#pragma unroll
      for (int c = 0; c < DIM; c++) sum += x[c] * x[c];
      return sum;
    }
    __device__ __forceinline__ float distance(const u8* entry) const {
      u32 w[DIM / 2];
      ldg<DIM / 2>(w, entry);
      float sum = 0.f;
#pragma unroll
      for (int c = 0; c < DIM; c++) {
        const float off = __fsub_rn(x[c], half_to_float(c & 1 ? w[c / 2] >> 16 : w[c / 2] & 0xffff)),
                    square = __fmul_rn(off, off);
        sum = c ? __fadd_rn(sum, square) : square;
      }
      return sum;
    }
  };

  // The nearest of all entries. Called by a warp.
  static __device__ int search_all(const u16* from, const u8* book, int lane) {
    const Vector vector(from);
    float best = INF;
    int code = 0;
    for (int e = lane; e < ENTRIES; e += 32)
      if (const float d = vector.distance(book + 2 * DIM * e); d < best) {
        best = d;
        code = e;
      }  // false for NaN
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const float x = __shfl_xor_sync(~0u, best, d);
      const int other = __shfl_xor_sync(~0u, code, d);
      if (x < best || (x == best && other < code)) {
        best = x;
        code = other;
      }
    }
    return code;
  }

  // The nearest entry of a class; of two equally near entries the one with the lower index. Called by a single lane.
  static __device__ __forceinline__ int search_class(const Vector& vector, const u8* book, int class_) {
    float best = INF;
    int code = class_;
#pragma unroll
    for (int j = 0; j < 2 * TILES; j++) {
      const int entry = class_ + 8 * j;
      if (ENTRIES < 16 && entry >= ENTRIES) break;
      if (const float d = vector.distance(book + 2 * DIM * entry); d < best) {
        best = d;
        code = entry;
      }
    }
    return code;
  }

  // Combines the results of eight lanes with different classes, for a sub-vector: the class of its nearest entry (identified by the class's first
  // entry), the nearness of that entry, and the largest nearness of any other class.
  struct Nearest {
    float best = -INF, second = -INF;
    int class_ = 0;
    __device__ __forceinline__ void add(float nearness, int of) {
      second = fmaxf(second, fminf(best, nearness));
      if (nearness > best) class_ = of;
      best = fmaxf(best, nearness);
    }
    __device__ __forceinline__ void add_lanes() {
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) {
        const float other = __shfl_xor_sync(~0u, second, d);
        add(__shfl_xor_sync(~0u, best, d), __shfl_xor_sync(~0u, class_, d));
        second = fmaxf(second, other);
      }
    }
  };

  // Computes the codes of sub-vectors from `first` on, of a segment whose token 0 has index `base`. Called by a warp.
  static __device__ void search(u16* codes, const Source& source, int base, int first, int lane) {
    const int g = lane >> 2, t = lane & 3;
    u32 b[N];
    float largest = 0.f;
    Nearest nearest_of[N][2];  // of sub-vectors 8 * n + 2 * t and the next
#pragma unroll
    for (int n = 0; n < N; n++) {
      const u16* x = vector(source, base, first + 8 * n + g);
      const float low = 2 * t < DIM ? to_float(x[2 * t]) : 0.f, high = 2 * t < DIM ? to_float(x[2 * t + 1]) : 0.f;
      b[n] = pack_half(low, high);
    }
#pragma unroll 1
    for (int e = 0; e < ENTRIES; e += 16 * TILES) {
      float nearest[N][2];
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        const Entries entries(source.table, e + 16 * tile, g, t);
#pragma unroll
        for (int n = 0; n < N; n++) {
          float d[4];
          entries.nearness(d, b[n]);
#pragma unroll
          for (int i = 0; i < 2; i++)
            nearest[n][i] = tile ? fmaxf(nearest[n][i], fmaxf(d[i], d[i + 2])) : fmaxf(d[i], d[i + 2]);
        }
#pragma unroll
        for (int j = 0; j < 2; j++)
          if (e + 16 * tile + g + 8 * j < ENTRIES) largest = fmaxf(largest, entries.half_square[j]);
      }
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) nearest_of[n][i].add(nearest[n][i], e + g);
    }
    largest = 2.f * max_rows(largest);
#pragma unroll
    for (int j = 0; j < MINE; j++) {
      Nearest mine;
#pragma unroll
      for (int v = j; v < 2 * N; v += MINE) {
        nearest_of[v / 2][v % 2].add_lanes();
        if (g == v / MINE) mine = nearest_of[v / 2][v % 2];
      }
      const int v = MINE * g + j, at = first + v / 2 * 8 + 2 * t + v % 2;
      const Vector x(vector(source, base, at));
      // slack: differences that rounding to 16 bits, and in sums, may hide. Numbers outside the range of 16 bits are also unclear
      const float square = x.square(), slack = 0x1p-16f * (square + largest) + 0x1p-22f * sqrtf(largest);
      const bool clear = square < 0x1p31f && mine.second < mine.best - slack;
      if (clear) codes[at] = search_class(x, source.table, mine.class_);
      for (u32 unclear = __ballot_sync(~0u, !clear); unclear; unclear &= unclear - 1) {
        const int owner = __ffs(unclear) - 1, vector_index = __shfl_sync(~0u, at, owner);
        const int code = search_all(vector(source, base, vector_index), source.table, lane);
        if (lane == owner) codes[vector_index] = code;
      }
    }
  }

  // The position of a lane's index `n` among a segment's indices, which are counted token by token.
  static __device__ __forceinline__ int index_position(int lane, int n) {
    const int g = lane >> 2, t = lane & 3;
    if (TRANSPOSED) return (8 * t + 4 * (n & 1) + n / 4 % 2 * 2 + n / 2 % 2) * COUNT + n / 8 * 8 + g;
    const int channel = n / 4 * DIM;
    return (4 * g + n % 4) * COUNT + (channel / 8 * 32 + 8 * t + channel % 8) / DIM;
  }

  static __device__ void encode(u8* part, const Source& source, int low, int high, int base,
                                const WarpGroup& warp_group, void* space) {
    u16* codes = static_cast<Space*>(space)->codes;
    for (int segment = low / 32; 32 * segment < high; segment++) {
      for (int first = (warp_group.thread >> 5) * VECTORS; first < 32 * COUNT; first += WARPS * VECTORS)
        search(codes, source, base + 32 * segment, first, warp_group.thread & 31);
      warp_group.sync();
      u32* words = reinterpret_cast<u32*>(part) + segment * 32 * WORDS;
      for (int i = warp_group.thread; i < 32 * WORDS; i += WARP_GROUP_THREADS) {
        const int lane = i / V % 32,
                  first = (i / (32 * V) * V + i % V) * 32;  // first bit of the word in the lane's stream
        u32 value = 0;
        for (int n = first / BITS; n * BITS < first + 32; n++) {
          const u32 x = codes[index_position(lane, n)];
          const int at = n * BITS - first;
          value |= at < 0 ? x >> -at : x << at;
        }
        words[i] = value;
      }
      warp_group.sync();
    }
  }
};
