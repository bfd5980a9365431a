// Levels of codes on the path of a trellis (`formats/trellis.py`), for one word of a lane at a time: level = 2 (code ^ u_1 ^ u_3) + u_2.
// u_k is the path bit k steps earlier. A chain passes through a lane's words, so path bits have the same positions in earlier words.
#pragma once

// D: head_dim. At 64 a chain takes two neighbouring fields of each word in turn, so u_1 of the odd field is the even field's path bit.
template <int D> struct Trellis {
  static_assert(D == 0 || SLICES == 1, "a chain passes through all words of a lane");
  static constexpr bool TWO_FIELDS = D <= 64;
  static constexpr int CHAIN = 128;  // tokens
  // SPLIT_CHAINS: a work tile may begin inside a chain; then the words before it are also copied.
  static constexpr int WORDS = D / 16, V = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
  static constexpr bool SPLIT_CHAINS = WORK_TILE < CHAIN && PAGE > WORK_TILE;
  static constexpr int BEFORE = SPLIT_CHAINS ? (3 + V - 1) / V * V * 128 : 0;

  u32 past[3];  // the lane's last words, the newest first; zeros where a chain begins

  __device__ __forceinline__ void begin() { past[0] = past[1] = past[2] = 0; }

  // Copies the words before `codes`, the codes of a KV tile that begins at `token`.
  static __device__ __forceinline__ void copy(bool real, u32 stage, const u8* codes, int token, int lane) {
    if (real && 16 * lane < BEFORE) cp16(stage + 16 * lane, codes - BEFORE + 16 * lane, token % CHAIN != 0);
  }
  __device__ __forceinline__ void find(u32 stage, int lane) {
    if constexpr (SPLIT_CHAINS) {
      u32 w[BEFORE / 128];
#pragma unroll
      for (int i = 0; i < BEFORE / 128 / V; i++) lds<V>(w + i * V, stage + i * 128 * V + 4 * V * lane);
#pragma unroll
      for (int k = 0; k < 3; k++) past[k] = w[BEFORE / 128 - 1 - k];
    }
  }
  // Keeps the last words of a segment.
  __device__ __forceinline__ void keep(const u32* w) {
#pragma unroll
    for (int k = 0; k < 3; k++) past[k] = w[WORDS - 1 - k];
  }

  // The word k words before word c of the segment.
  __device__ __forceinline__ u32 word(const u32* w, int c, int k) const { return c >= k ? w[c - k] : past[k - c - 1]; }

  // Levels of the codes of word c, in the order in which `unpack` returns codes. Fields of three bits overlap, so `even` and `odd` have
  // every other level.
  __device__ __forceinline__ void levels(const u32* w, int c, u32 (*a)[4]) const {
    const u32 own = w[c], before = word(w, c, 1);
    u32 code, low;
    if constexpr (TWO_FIELDS) {
      code = own ^ ((before ^ word(w, c, 2)) >> 2 & 0x11111111u) ^ ((own ^ before) << 2 & 0x44444444u);
      low = before;
    } else {
      code = own ^ (before ^ word(w, c, 3)) & 0x55555555u;
      low = word(w, c, 2);
    }
    code = rotated_left<1>(code);  // above the path bits, which are the lowest bits of the levels
    const u32 even = choose_bits(0x66666666u, code, low), odd = choose_bits(0x66666666u, low, code);
    const u32 x = rotated_left<24>(even), y = rotated_left<24>(odd);
    a[0][0] = even & 0x00070007u;
    a[0][2] = odd & 0x001c001cu;
    a[1][0] = even & 0x00700070u;
    a[1][2] = odd & 0x01c001c0u;
    a[0][1] = x & 0x00070007u;
    a[0][3] = y & 0x001c001cu;
    a[1][1] = x & 0x00700070u;
    a[1][3] = y & 0x01c001c0u;
  }
};
// For codes that are levels.
struct NoTrellis {
  static constexpr int BEFORE = 0;
  __device__ __forceinline__ void begin() {}
  static __device__ __forceinline__ void copy(bool, u32, const u8*, int, int) {}
  __device__ __forceinline__ void find(u32, int) {}
  __device__ __forceinline__ void keep(const u32*) {}
};
template <int D, bool TRELLIS> struct TrellisOf {
  using Type = NoTrellis;
};
template <int D> struct TrellisOf<D, true> {
  using Type = Trellis<D>;
};
