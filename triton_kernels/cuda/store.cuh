// Storing tokens of a row (sequence x KV head): shared by `append.cu` and `attend.cu`.
#pragma once
#include "encode.cuh"
#include KEY_ENCODER_HEADER
#include VALUE_ENCODER_HEADER

struct AppendArgs {
  const u8 *k, *v, *mask;
  const int *order, *count;  // with padding: indices of the real new tokens [B, S], and their number [B]
  u8* pool;
  const i64* address;
  u8 *sink_k, *sink_v, *tail_k, *tail_v;
  int *length, *paged, *lost;
  i64 k_b, k_h, k_s, v_b, v_h, v_s, mask_b;
  int heads, tokens, pages, room, sink, tail, residual;
  Parameter tables[2];  // codebooks of keys and values, or null
};
static_assert(sizeof(AppendArgs) == APPEND_ARGUMENT_BYTES, "arguments.py declares other fields");

using EncodeKeys = KEY_ENCODER;
using EncodeValues = VALUE_ENCODER;
constexpr int ENCODER_BYTES = sizeof(EncodeKeys::Space) > sizeof(EncodeValues::Space) ? sizeof(EncodeKeys::Space)
                                                                                      : sizeof(EncodeValues::Space);

// A row's counters before and after new tokens are stored.
struct Counts {
  int stored, before, fits, after, missing;  // missing: tokens that do not fit
  __device__ __forceinline__ Counts(const AppendArgs& a, int bh)
      : Counts(a, a.length[bh], a.paged[bh], a.count ? a.count[bh / a.heads] : a.tokens) {}
  __device__ __forceinline__ Counts(const AppendArgs& a, int length, int paged, int tokens) {
    stored = length;
    before = paged;
    fits = max(min(tokens, a.room - stored), 0);
    missing = tokens - fits;
    const int index = stored + fits - a.sink;
    after = max(before, DIRECT ? max(index, 0) : max(index - a.residual, 0) / PAGE * PAGE);
  }
};

// Shared memory for a page's tokens.
constexpr int PAGE_TOKENS_BYTES = PAGE * ((DK > DV ? DK : DV) + 8) * 2;

// Copies a page's tokens to shared memory, because packing reads each number several times.
template <int D>
__device__ __forceinline__ void copy_page(Source& source, int base, const WarpGroup& warp_group, u8* memory) {
  constexpr int STRIDE = D + 8;  // padded against bank conflicts
  for (int i = warp_group.thread; i < PAGE * (D / 8); i += WARP_GROUP_THREADS) {
    const int token = i / (D / 8), x = i % (D / 8) * 8;
    cp16(shared_address(memory) + 2 * (token * STRIDE + x), source.token(base + token) + x);
  }
  commit();
  wait<0>();
  BARRIER(tokens_ready, warp_group.sync());
  source.tail = reinterpret_cast<const u16*>(memory) - (i64)base * STRIDE;
  source.dim = STRIDE;
  source.first = source.size = 0x7fffffff;
}

// Packs keys (side 0) or values (side 1) of a page. staged: shared memory of `PAGE_TOKENS_BYTES` bytes, or null. With it only whole pages.
__device__ __forceinline__ void pack(const AppendArgs& a, const Counts& n, int bh, int page, int side,
                                     const WarpGroup& warp_group, void* space, u8* staged = nullptr) {
  const int b = bh / a.heads, h = bh % a.heads;
  const int low = max(n.before - page * PAGE, 0), high = min(n.after - page * PAGE, PAGE);
  u8* part = a.pool + a.address[(i64)b * a.pages + page] + (i64)h * PAGE_BYTES;
  Source source;
  source.order = a.order ? a.order + (i64)b * a.tokens : nullptr;
  source.size = a.tail;
  source.first = max(n.stored - a.sink, 0);
  source.skipped = min(max(a.sink - n.stored, 0), n.fits);
  if (side == 0) {
    source.tail = reinterpret_cast<const u16*>(a.tail_k) + (i64)bh * a.tail * DK;
    source.dim = DK;
    source.table = a.tables[0].data + h * a.tables[0].stride;
    source.new_tokens = reinterpret_cast<const u16*>(a.k) + b * a.k_b + h * a.k_h;
    source.stride = a.k_s;
    if (staged) copy_page<DK>(source, page * PAGE, warp_group, staged);
    EncodeKeys::encode(part, source, low, high, page * PAGE, warp_group, space);
  } else {
    source.tail = reinterpret_cast<const u16*>(a.tail_v) + (i64)bh * a.tail * DV;
    source.dim = DV;
    source.table = a.tables[1].data + h * a.tables[1].stride;
    source.new_tokens = reinterpret_cast<const u16*>(a.v) + b * a.v_b + h * a.v_h;
    source.stride = a.v_s;
    if (staged) copy_page<DV>(source, page * PAGE, warp_group, staged);
    EncodeValues::encode(part + VALUE_AT, source, low, high, page * PAGE, warp_group, space);
  }
}

// The address in sink or tail of the token at `position` (counted from the start of the sink), or null if the window has no slot for it.
template <int D>
__device__ __forceinline__ u16* window_slot(const AppendArgs& a, u8* sink, u8* tail, int bh, int position) {
  if (position < a.sink) return reinterpret_cast<u16*>(sink) + ((i64)bh * a.sink + position) * D;
  return a.tail ? reinterpret_cast<u16*>(tail) + ((i64)bh * a.tail + (position - a.sink) % a.tail) * D : nullptr;
}
template <int D> __device__ __forceinline__ void store_in_window(const AppendArgs& a, u8* sink, u8* tail, int bh,
                                                                 int position, const u16* x, int lane) {
  if (u16* target = window_slot<D>(a, sink, tail, bh, position))
    for (int i = lane; i < D; i += 32) target[i] = x[i];
}

// For one token: whether it is padding, and whether it goes to sink or tail (otherwise straight into a page).
__device__ __forceinline__ bool padding(const AppendArgs& a, int b) { return a.mask && !a.mask[b * a.mask_b]; }
__device__ __forceinline__ bool goes_to_window(const AppendArgs& a, const Counts& n) {
  return n.fits && (n.stored < a.sink || n.stored - a.sink >= n.after);
}

// Packs the page that one token makes due.
__device__ __forceinline__ void pack_due(const AppendArgs& a, const Counts& n, int bh, const WarpGroup& warp_group,
                                         void* space, u8* staged = nullptr) {
  if (n.after > n.before)
    for (int page = n.before / PAGE; page * PAGE < n.after; page++)
      for (int side = 0; side < 2; side++) pack(a, n, bh, page, side, warp_group, space, staged);
}
