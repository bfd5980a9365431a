// Storing tokens of a row (sequence x KV head): shared by `append.cu` and `attend.cu`.
#pragma once
#include "encode.cuh"
#include KEY_ENCODER_HEADER
#include VALUE_ENCODER_HEADER

struct AppendArgs {
  const u8 *k, *v, *mask;
  const int *order, *count;  // padded chunk: indices of the real tokens [B, S], and their number [B]
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
constexpr int SPACE = sizeof(EncodeKeys::Space) > sizeof(EncodeValues::Space) ? sizeof(EncodeKeys::Space)
                                                                              : sizeof(EncodeValues::Space);

// How storing a chunk changes a row's counters.
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
constexpr int STAGE = PAGE * ((DK > DV ? DK : DV) + 8) * 2;

// Copies a page's tokens to shared memory, because packing reads each number several times, one at a time.
template <int D> __device__ __forceinline__ void stage(Source& source, int base, const Crew& crew, u8* memory) {
  constexpr int STRIDE = D + 8;  // padded against bank conflicts
  for (int i = crew.thread; i < PAGE * (D / 8); i += CREW) {
    const int token = i / (D / 8), x = i % (D / 8) * 8;
    cp16(shared_address(memory) + 2 * (token * STRIDE + x), source.token(base + token) + x);
  }
  commit();
  wait<0>();
  BARRIER(tokens_ready, crew.meet());
  source.tail = reinterpret_cast<const u16*>(memory) - (i64)base * STRIDE;
  source.dim = STRIDE;
  source.first = source.size = 0x7fffffff;
}

// side: 0 keys, 1 values. staged: shared memory of `STAGE` bytes, or null; with it, whole pages only.
__device__ __forceinline__ void pack(const AppendArgs& a, const Counts& n, int bh, int page, int side, const Crew& crew,
                                     void* space, u8* staged = nullptr) {
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
    source.chunk = reinterpret_cast<const u16*>(a.k) + b * a.k_b + h * a.k_h;
    source.stride = a.k_s;
    if (staged) stage<DK>(source, page * PAGE, crew, staged);
    EncodeKeys::encode(part, source, low, high, page * PAGE, crew, space);
  } else {
    source.tail = reinterpret_cast<const u16*>(a.tail_v) + (i64)bh * a.tail * DV;
    source.dim = DV;
    source.table = a.tables[1].data + h * a.tables[1].stride;
    source.chunk = reinterpret_cast<const u16*>(a.v) + b * a.v_b + h * a.v_h;
    source.stride = a.v_s;
    if (staged) stage<DV>(source, page * PAGE, crew, staged);
    EncodeValues::encode(part + VALUE_AT, source, low, high, page * PAGE, crew, space);
  }
}

// The address in sink or tail of a row's token `place` (counted from the start of the sink), or null if it has none there.
template <int D> __device__ __forceinline__ u16* home(const AppendArgs& a, u8* sink, u8* tail, int bh, int place) {
  if (place < a.sink) return reinterpret_cast<u16*>(sink) + ((i64)bh * a.sink + place) * D;
  return a.tail ? reinterpret_cast<u16*>(tail) + ((i64)bh * a.tail + (place - a.sink) % a.tail) * D : nullptr;
}
template <int D> __device__ __forceinline__ void keep(const AppendArgs& a, u8* sink, u8* tail, int bh, int place,
                                                      const u16* x, int lane) {
  if (u16* target = home<D>(a, sink, tail, bh, place))
    for (int i = lane; i < D; i += 32) target[i] = x[i];
}

// One token: whether it is padding, and whether it goes to sink or tail (otherwise it goes straight into a page).
__device__ __forceinline__ bool padding(const AppendArgs& a, int b) { return a.mask && !a.mask[b * a.mask_b]; }
__device__ __forceinline__ bool kept(const AppendArgs& a, const Counts& n) {
  return n.fits && (n.stored < a.sink || n.stored - a.sink >= n.after);
}

// Packs the page that one token makes due.
__device__ __forceinline__ void pack_due(const AppendArgs& a, const Counts& n, int bh, const Crew& crew, void* space,
                                         u8* staged = nullptr) {
  if (n.after > n.before)
    for (int page = n.before / PAGE; page * PAGE < n.after; page++)
      for (int side = 0; side < 2; side++) pack(a, n, bh, page, side, crew, space, staged);
}
