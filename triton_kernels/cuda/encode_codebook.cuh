// Packing with a codebook: the nearest entry, as `formats/codebook.py` defines it. See encode.cuh.
#pragma once

// Tensor cores find out how near entries are, up to rounding: x . c - |c|^2 / 2 is largest for the nearest. Where rounding may hide that another
// entry is as near (one sub-vector in thousands), distances are computed as they are defined.
template <int DIM, int BITS, int D, bool TRANSPOSED> struct CodebookEncoder {
  static constexpr int COUNT = D / DIM, WORDS = COUNT * BITS / 32, V = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
  static constexpr int VECTORS = 32, N = VECTORS / 8;     // sub-vectors that a warp takes at a time
  static_assert(32 * COUNT % VECTORS == 0, "a warp's share of 32 tokens");
  struct Space { u16 codes[32 * COUNT]; };

  // Sixteen entries as a left operand: rows are entries, the first DIM of 16 columns channels.
  struct Entries {
    u32 a[4];
    float half_square[2];                                 // |c|^2 / 2 of the lane's two rows
    __device__ __forceinline__ Entries(const u8* book, int first, int g, int t) {
      a[2] = a[3] = 0;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int entry = first + g + 8 * j;
        a[j] = 0;
        if (2 * t < DIM && entry < 1 << BITS) ldg<1>(a + j, book + 2 * DIM * entry + 4 * t);
        const float low = half_to_float(a[j] & 0xffff), high = half_to_float(a[j] >> 16);
        float x = low * low + high * high;
        x += __shfl_xor_sync(~0u, x, 1); x += __shfl_xor_sync(~0u, x, 2);
        half_square[j] = entry < 1 << BITS ? 0.5f * x : INF;
      }
    }
    // How near they are to eight sub-vectors (right operand b).
    __device__ __forceinline__ void nearness(float* d, u32 b) const {
      const float c[4] = {-half_square[0], -half_square[0], -half_square[1], -half_square[1]};
      mma_from(d, a, b, 0u, c);
    }
  };

  static __device__ __forceinline__ const u16* vector(const Source& source, int base, int i) { return source.token(base + i / COUNT) + i % COUNT * DIM; }

  static __device__ __forceinline__ float distance(const u16* x, const u8* entry) {
    u32 w[DIM / 2]; ldg<DIM / 2>(w, entry);
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < DIM; c++) {
      const float off = __fsub_rn(to_float(x[c]), half_to_float(c & 1 ? w[c / 2] >> 16 : w[c / 2] & 0xffff)), square = __fmul_rn(off, off);
      sum = c ? __fadd_rn(sum, square) : square;
    }
    return sum;
  }

  // The nearest entry by the distances themselves. A warp together.
  static __device__ int search_exactly(const u16* x, const u8* book, int lane) {
    float best = INF;
    int code = 0;
    for (int e = lane; e < 1 << BITS; e += 32)
      if (const float d = distance(x, book + 2 * DIM * e); d < best) { best = d; code = e; }  // not NaN
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const float x = __shfl_xor_sync(~0u, best, d);
      const int other = __shfl_xor_sync(~0u, code, d);
      if (x < best || (x == best && other < code)) { best = x; code = other; }
    }
    return code;
  }

  // The codes of sub-vectors `first` and up of a block, whose token 0 has index `base`. A warp together.
  static __device__ void search(u16* codes, const Source& source, int base, int first, int lane) {
    const int g = lane >> 2, t = lane & 3;
    u32 b[N];
    float norm[N], best[N][2], second[N][2], largest = 0.f;
    int code[N][2];
#pragma unroll
    for (int n = 0; n < N; n++) {
      const u16* x = vector(source, base, first + 8 * n + g);
      const float low = 2 * t < DIM ? to_float(x[2 * t]) : 0.f, high = 2 * t < DIM ? to_float(x[2 * t + 1]) : 0.f;
      b[n] = pack_half(low, high);
      norm[n] = low * low + high * high;
      norm[n] += __shfl_xor_sync(~0u, norm[n], 1); norm[n] += __shfl_xor_sync(~0u, norm[n], 2);
#pragma unroll
      for (int i = 0; i < 2; i++) { best[n][i] = second[n][i] = -INF; code[n][i] = 0; }
    }
#pragma unroll 4
    for (int e = 0; e < 1 << BITS; e += 16) {
      const Entries entries(source.table, e, g, t);
#pragma unroll
      for (int n = 0; n < N; n++) {
        float d[4]; entries.nearness(d, b[n]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float& top = best[n][i & 1];
          second[n][i & 1] = fmaxf(second[n][i & 1], fminf(top, d[i]));
          if (d[i] > top) code[n][i & 1] = e + g + 8 * (i >> 1);
          top = fmaxf(top, d[i]);
        }
      }
#pragma unroll
      for (int j = 0; j < 2; j++) if (e + g + 8 * j < 1 << BITS) largest = fmaxf(largest, entries.half_square[j]);
    }
    largest = 2.f * max_rows(largest);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) {                // over the lanes that have other entries
          const float x = __shfl_xor_sync(~0u, best[n][i], d), y = __shfl_xor_sync(~0u, second[n][i], d);
          const int other = __shfl_xor_sync(~0u, code[n][i], d);
          second[n][i] = fmaxf(fmaxf(second[n][i], y), fminf(best[n][i], x));
          if (x > best[n][i]) code[n][i] = other;
          best[n][i] = fmaxf(best[n][i], x);
        }
        const float square = __shfl_sync(~0u, norm[n], 4 * (2 * t + i));
        // what rounding to 16 bits, and in sums, may hide; what does not fit into 16 bits is not clear either
        const float slack = 0x1p-16f * (square + largest) + 0x1p-22f * sqrtf(largest);
        const bool clear = square < 0x1p31f && second[n][i] < best[n][i] - slack;
        const int at = first + 8 * n + 2 * t + i;
        if (g == 0 && clear) codes[at] = code[n][i];
        for (u32 unclear = __ballot_sync(~0u, g == 0 && !clear); unclear; unclear &= unclear - 1) {
          const int owner = __ffs(unclear) - 1, which = __shfl_sync(~0u, at, owner);
          const int found = search_exactly(vector(source, base, which), source.table, lane);
          if (lane == owner) codes[which] = found;
        }
      }
  }

  // Place of index `n` of a lane among those of a block, token by token.
  static __device__ __forceinline__ int place(int lane, int n) {
    const int g = lane >> 2, t = lane & 3;
    if (TRANSPOSED) return (8 * t + 4 * (n & 1) + n / 4 % 2 * 2 + n / 2 % 2) * COUNT + n / 8 * 8 + g;
    const int channel = n / 4 * DIM;
    return (4 * g + n % 4) * COUNT + (channel / 8 * 32 + 8 * t + channel % 8) / DIM;
  }

  static __device__ void encode(u8* part, const Source& source, int low, int high, int base, const Crew& crew, void* space) {
    u16* codes = static_cast<Space*>(space)->codes;
    for (int block = low / 32; 32 * block < high; block++) {
      for (int first = (crew.thread >> 5) * VECTORS; first < 32 * COUNT; first += WARPS * VECTORS)
        search(codes, source, base + 32 * block, first, crew.thread & 31);
      crew.meet();
      u32* words = reinterpret_cast<u32*>(part) + block * 32 * WORDS;
      for (int i = crew.thread; i < 32 * WORDS; i += CREW) {
        const int lane = i / V % 32, first = (i / (32 * V) * V + i % V) * 32;  // bit of the lane's stream
        u32 value = 0;
        for (int n = first / BITS; n * BITS < first + 32; n++) {
          const u32 x = codes[place(lane, n)];
          const int at = n * BITS - first;
          value |= at < 0 ? x >> -at : x << at;
        }
        words[i] = value;
      }
      crew.meet();
    }
  }
};
