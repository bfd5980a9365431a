// Storing new tokens: into sink and tail ring, and packing each page that is due: `reference.append`, bit for bit.
//
// A block of threads over one (sequence, KV head) owns that row's counters of that head. One token is one launch (`append_one`). A
// chunk is three: pages, then sink and tail, then counters, because a page is packed from ring slots that the chunk's newest
// tokens take over. Packing happens once in PAGE tokens, so it is written plainly: a thread gathers the codes of a word.
#include "affine.cuh"

struct AppendArgs {
  const u8 *k, *v, *mask;
  const int *order, *count;         // padded chunk: places of the tokens that are no padding [B, S], and their number [B]
  u8* pool;
  const i64* address;
  u8 *sink_k, *sink_v, *tail_k, *tail_v;
  int *length, *paged;
  i64 k_b, k_h, k_s, v_b, v_h, v_s, mask_b;
  int heads, tokens, pages, room, sink, tail, residual;
};

constexpr float FP16_MAX = 65504.f;

struct Meta { float scale, zero; };

// Tokens of one row and head by index (sink not counted): from the tail ring below `first`, then from the chunk, whose number
// `skipped` is token `first`.
struct Source {
  const u16 *tail, *chunk;
  const int* order;
  i64 stride;
  int size, dim, first, skipped;
  __device__ __forceinline__ const u16* token(int i) const {
    if (i < first) return tail + (i64)(i % size) * dim;
    int number = i - first + skipped;
    if (order) number = order[number];
    return chunk + number * stride;
  }
};

__device__ __forceinline__ u16 half_bits(float x) { u32 r; asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h;}" : "=r"(r) : "f"(x)); return (u16)r; }

// Scale and zero point of a group that spans `low` to `high`, stored as number `at` of each. levels: the largest code.
__device__ __forceinline__ void fit(u8* scales, u8* zeros, Meta* meta, int at, float low, float high, float levels) {
  const u16 s = half_bits(fminf(__fdiv_rn(high - low, levels), FP16_MAX));
  const u16 z = half_bits(fminf(fmaxf(low, -FP16_MAX), FP16_MAX) + 0.f);  // adding 0 makes one of the two zeros
  reinterpret_cast<u16*>(scales)[at] = s;
  reinterpret_cast<u16*>(zeros)[at] = z;
  meta[at] = Meta{half_to_float(s), half_to_float(z)};
}

__device__ __forceinline__ u32 quantized(float x, Meta m, float levels) {
  return m.scale > 0.f ? (u32)rintf(fminf(fmaxf(__fdiv_rn(x - m.zero, m.scale), 0.f), levels)) : 0u;
}

template <int BITS, bool CHANNEL, int GROUP, int D, int SCALE_AT, int ZERO_AT, bool TRANSPOSED> struct AffineEncoder {
  static constexpr int LEVELS = (1 << BITS) - 1, GROUPS = CHANNEL ? PAGE / GROUP : D / GROUP;
  static constexpr int WORDS = D / 16 * BITS / 2, V = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;

  // Tokens [low, high) of a page whose token 0 has index `base`; per channel all of them.
  static __device__ void encode(u8* part, const Source& source, int low, int high, int base, Meta* meta) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    if constexpr (CHANNEL) {
      for (int i = threadIdx.x; i < GROUPS * D; i += blockDim.x) {
        float least = INF, most = -INF;
        for (int n = 0; n < GROUP; n++) {
          const float x = to_float(source.token(base + i / D * GROUP + n)[i % D]);
          least = fminf(least, x); most = fmaxf(most, x);
        }
        fit(part + SCALE_AT, part + ZERO_AT, meta, i, least, most, LEVELS);
      }
    } else {
      for (int i = low * GROUPS + warp; i < high * GROUPS; i += warps) {
        const u16* x = source.token(base + i / GROUPS) + i % GROUPS * GROUP;
        float least = INF, most = -INF;
        for (int n = lane; n < GROUP; n += 32) { least = fminf(least, to_float(x[n])); most = fmaxf(most, to_float(x[n])); }
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) { least = fminf(least, __shfl_xor_sync(~0u, least, d)); most = fmaxf(most, __shfl_xor_sync(~0u, most, d)); }
        if (lane == 0) fit(part + SCALE_AT, part + ZERO_AT, meta, i, least, most, LEVELS);
      }
    }
    __syncthreads();
    u32* words = reinterpret_cast<u32*>(part);
    for (int i = low / 32 * 32 * WORDS + threadIdx.x; i < (high + 31) / 32 * 32 * WORDS; i += blockDim.x) {
      const int block = i / (32 * WORDS), word = i / (32 * V) % (WORDS / V) * V + i % V, owner = i / V % 32, g = owner >> 2, t = owner & 3;
      const int c = word / (BITS / 2), inner = word % (BITS / 2);
      u32 taken = 0, value = 0;
#pragma unroll
      for (int f = 0; f < 32 / BITS; f++) {
        constexpr int PER_BYTE = 8 / BITS;
        const int e = f / (2 * PER_BYTE), odd = f / PER_BYTE & 1, field = f % PER_BYTE;
        const int upper = BITS == 2 ? field & 1 : BITS == 4 ? field : inner & 1, h = BITS == 2 ? field >> 1 : BITS == 4 ? inner : inner >> 1;
        const int token_j = TRANSPOSED ? upper : odd, token_x = TRANSPOSED ? 2 * t + e : g, channel_j = TRANSPOSED ? odd : upper, channel_x = TRANSPOSED ? g : 2 * t + e;
        const int token = block * 32 + 4 * token_x + 2 * h + token_j, channel = channel_of<D>(c, channel_j, channel_x);
        if (token < low || token >= high) continue;
        const Meta m = meta[CHANNEL ? token / GROUP * D + channel : token * GROUPS + channel / GROUP];
        taken |= (u32)LEVELS << (f * BITS);
        value |= quantized(to_float(source.token(base + token)[channel]), m, LEVELS) << (f * BITS);
      }
      if (taken) words[i] = ~taken ? (words[i] & ~taken) | value : value;
    }
    __syncthreads();
  }
};

template <int D> struct DenseEncoder {
  static __device__ void encode(u8* part, const Source& source, int low, int high, int base, Meta*) {
    for (int i = low * D + threadIdx.x; i < high * D; i += blockDim.x) reinterpret_cast<u16*>(part)[i] = source.token(base + i / D)[i % D];
    __syncthreads();
  }
};

#include "encode_boosted.cuh"

using EncodeKeys = KEY_FORMAT;
using EncodeValues = VALUE_FORMAT;
constexpr int META = PAGE * (DK > DV ? DK : DV) / 32;

// What storing a chunk does to a row's counters.
struct Counts {
  int stored, before, fits, after;
  __device__ __forceinline__ Counts(const AppendArgs& a, int bh) {
    stored = a.length[bh]; before = a.paged[bh];
    const int tokens = a.count ? a.count[bh / a.heads] : a.tokens;
    fits = max(min(tokens, a.room - stored), 0);
    const int index = stored + fits - a.sink;
    after = max(before, DIRECT ? max(index, 0) : max(index - a.residual, 0) / PAGE * PAGE);
  }
};

// side: 0 keys, 1 values
__device__ __forceinline__ void pack(const AppendArgs& a, const Counts& n, int bh, int page, int side, Meta* meta) {
  const int b = bh / a.heads, h = bh % a.heads;
  const int low = max(n.before - page * PAGE, 0), high = min(n.after - page * PAGE, PAGE);
  u8* part = a.pool + a.address[(i64)b * a.pages + page] + (i64)h * PAGE_BYTES;
  Source source;
  source.order = a.order ? a.order + (i64)b * a.tokens : nullptr;
  source.size = a.tail; source.first = max(n.stored - a.sink, 0); source.skipped = min(max(a.sink - n.stored, 0), n.fits);
  if (side == 0) {
    source.tail = reinterpret_cast<const u16*>(a.tail_k) + (i64)bh * a.tail * DK; source.dim = DK;
    source.chunk = reinterpret_cast<const u16*>(a.k) + b * a.k_b + h * a.k_h; source.stride = a.k_s;
    EncodeKeys::encode(part, source, low, high, page * PAGE, meta);
  } else {
    source.tail = reinterpret_cast<const u16*>(a.tail_v) + (i64)bh * a.tail * DV; source.dim = DV;
    source.chunk = reinterpret_cast<const u16*>(a.v) + b * a.v_b + h * a.v_h; source.stride = a.v_s;
    EncodeValues::encode(part + VALUE_AT, source, low, high, page * PAGE, meta);
  }
}

// Where the token `place` of a row (sink counted) belongs in sink or tail, or null where it has no place there.
template <int D> __device__ __forceinline__ u16* home(const AppendArgs& a, u8* sink, u8* tail, int bh, int place) {
  if (place < a.sink) return reinterpret_cast<u16*>(sink) + ((i64)bh * a.sink + place) * D;
  return a.tail ? reinterpret_cast<u16*>(tail) + ((i64)bh * a.tail + (place - a.sink) % a.tail) * D : nullptr;
}
template <int D> __device__ __forceinline__ void keep(const AppendArgs& a, u8* sink, u8* tail, int bh, int place, const u16* x, int lane) {
  if (u16* target = home<D>(a, sink, tail, bh, place))
    for (int i = lane; i < D; i += 32) target[i] = x[i];
}

extern "C" __global__ void __launch_bounds__(256) append_one(const __grid_constant__ AppendArgs a) {
  __shared__ Meta meta[META];
  const int bh = blockIdx.x, b = bh / a.heads, h = bh % a.heads;
  // all is loaded before the first branch, so that one memory latency is waited for
  constexpr int EACH_K = (DK + 255) / 256, EACH_V = (DV + 255) / 256;
  const u16 *k = reinterpret_cast<const u16*>(a.k) + b * a.k_b + h * a.k_h, *v = reinterpret_cast<const u16*>(a.v) + b * a.v_b + h * a.v_h;
  u16 new_k[EACH_K], new_v[EACH_V];
#pragma unroll
  for (int j = 0; j < EACH_K; j++) new_k[j] = k[min(j * 256 + (int)threadIdx.x, DK - 1)];
#pragma unroll
  for (int j = 0; j < EACH_V; j++) new_v[j] = v[min(j * 256 + (int)threadIdx.x, DV - 1)];
  const bool real = !a.mask || a.mask[b * a.mask_b];
  const Counts n(a, bh);
  if (n.fits == 0 || !real) return;
  if (n.stored < a.sink || n.stored - a.sink >= n.after) {  // else it goes straight into a page
    u16 *place_k = home<DK>(a, a.sink_k, a.tail_k, bh, n.stored), *place_v = home<DV>(a, a.sink_v, a.tail_v, bh, n.stored);
#pragma unroll
    for (int j = 0; j < EACH_K; j++) if (place_k && j * 256 + threadIdx.x < DK) place_k[j * 256 + threadIdx.x] = new_k[j];
#pragma unroll
    for (int j = 0; j < EACH_V; j++) if (place_v && j * 256 + threadIdx.x < DV) place_v[j * 256 + threadIdx.x] = new_v[j];
  }
  __syncthreads();  // all have read the counters, and written the token
  if (n.after > n.before)
    for (int page = n.before / PAGE; page * PAGE < n.after; page++)
      for (int side = 0; side < 2; side++) pack(a, n, bh, page, side, meta);
  if (threadIdx.x == 0) { a.length[bh] = n.stored + 1; a.paged[bh] = n.after; }
}

// Grid (row * head, page that is due, side).
extern "C" __global__ void __launch_bounds__(256) append_pages(const __grid_constant__ AppendArgs a) {
  __shared__ Meta meta[META];
  const Counts n(a, blockIdx.x);
  const int page = n.before / PAGE + blockIdx.y;
  if (n.after > n.before && page * PAGE < n.after) pack(a, n, blockIdx.x, page, blockIdx.z, meta);
}

// Grid (row * head, 32 tokens); a warp takes a token.
extern "C" __global__ void __launch_bounds__(256) append_window(const __grid_constant__ AppendArgs a) {
  const int bh = blockIdx.x, b = bh / a.heads, h = bh % a.heads, lane = threadIdx.x & 31;
  const Counts n(a, bh);
  for (int i = blockIdx.y * 32 + (threadIdx.x >> 5); i < min((int)blockIdx.y * 32 + 32, n.fits); i += blockDim.x >> 5) {
    const int place = n.stored + i;
    if (place >= a.sink && place - a.sink < n.after) continue;
    const i64 number = a.order ? a.order[(i64)b * a.tokens + i] : i;
    keep<DK>(a, a.sink_k, a.tail_k, bh, place, reinterpret_cast<const u16*>(a.k) + b * a.k_b + h * a.k_h + number * a.k_s, lane);
    keep<DV>(a, a.sink_v, a.tail_v, bh, place, reinterpret_cast<const u16*>(a.v) + b * a.v_b + h * a.v_h + number * a.v_s, lane);
  }
}

extern "C" __global__ void append_counters(const __grid_constant__ AppendArgs a, int count) {
  const int bh = blockIdx.x * blockDim.x + threadIdx.x;
  if (bh >= count) return;
  const Counts n(a, bh);
  a.length[bh] = n.stored + n.fits; a.paged[bh] = n.after;
}
