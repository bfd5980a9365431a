// What all kernels share: types, PTX, and the geometry, which the host gives as macros (see `geometry.py`).
// NVRTC has no headers of the system; nothing is included, so that no toolkit has to be found.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

// Whether an instruction makes fp16 of e4m3.
#ifndef CONVERT
#if __CUDA_ARCH__ >= 890
#define CONVERT 1
#else
#define CONVERT 0
#endif
#endif

// What most launches do not come to, or one warp only: out of the others' way. Behind another kernel a launch finds none of its
// instructions in a cache, and waits for what it comes by.
#define COLD __device__ __noinline__

constexpr int ROWS = 8 * NT;        // columns of products for query rows (heads x tokens), of which a team of warps attends for as many
// SPREAD: at most four query rows, in every other column. A lane then has one row's scores, where side by side half of the lanes
// had two and the others none that count. COLUMNS_USED: of a lane's two columns; EVERY: step over a lane's four numbers.
constexpr int COLUMNS_USED = SPREAD ? 1 : 2, EVERY = SPREAD ? 2 : 1;
#ifdef PAGE
// Tokens that a warp takes at a time, in two pieces; and whether not all of them need hold tokens.
constexpr int UNIT = 2 * PT;
constexpr bool PARTIAL = DIRECT || PAGE % UNIT != 0;
// Tokens from a piece's first on (`limit`): whether there is a unit at all. In one, the second piece may have none; it is copied all the same
// (from another's place), because what has no weight must be numbers.
__device__ __forceinline__ bool in_unit(int limit) { return limit > -PT; }
#endif
constexpr float LOWEST = -1e30f;    // stands for a maximum over nothing: finite, so that a difference is never NaN
constexpr float LOG2E = 1.4426950408889634f;
constexpr float TWO24 = 16777216.f; // masked bits read as fp16 are subnormal: code x position x 2^-24
#define INF __int_as_float(0x7f800000)

// A parameter of a layer: of KV head h, `stride * h` bytes from `data` on.
struct Parameter { const u8* data; i64 stride; };

struct Args {
  const u8 *q, *k, *v, *mask, *sinks, *pool;
  const i64* address;               // [B, pages]: bytes from pool
  const u8 *sink_k, *sink_v, *tail_k, *tail_v;
  const int *length, *paged;        // [B, H]
  u8* out;                          // [B, S, Hq, DV]
  float* partial;
  int* counters;                    // [row blocks, B * H], zero before and after
  i64 q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, mask_b, mask_s;  // strides in elements; of channels: 1
  int batch, heads, groups, tokens, pages, sink, tail, teams, split;  // split: teams / (B * H) where that is whole, else 0
  float scaling, softcap;
  const u8* raw_k;                  // TRANSFORMED: the chunk's keys; `k` is then where they are put, transformed
  const float *q_scale, *k_scale;   // factors of channels, of KV head h at h * scale_h
  i64 raw_b, raw_h, raw_s, scale_h;
  Parameter tables[2];              // codebooks of keys and values, or null
};

__device__ __forceinline__ void cp16(u32 s, const void* g, bool keep = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(s), "l"(g), "r"(keep ? 16 : 0));
}
// Or nothing at all.
__device__ __forceinline__ void cp16_if(bool real, u32 s, const void* g) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;}" ::"r"(s), "l"(g), "r"((int)real));
}
__device__ __forceinline__ void cp8(u32 s, const void* g, bool keep) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(s), "l"(g), "r"(keep ? 8 : 0));
}
__device__ __forceinline__ void cp4(u32 s, const void* g) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(s), "l"(g)); }
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// The same pointer, about which the compiler knows nothing: what is added to it later are then offsets, not pointers of their own.
__device__ __forceinline__ const u8* opaque(const u8* p) { asm volatile("" : "+l"(p)); return p; }

// `V` consecutive words of shared memory
template <int V> __device__ __forceinline__ void lds(u32* r, u32 a) {
  if constexpr (V == 4) asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
  else if constexpr (V == 2) asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(a));
  else asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r[0]) : "r"(a));
}
// From global memory, asked for where this stands: before copies that come after it, behind which it would wait.
__device__ __forceinline__ u32 ask(const u32* p) { u32 x; asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(p)); return x; }
__device__ __forceinline__ i64 ask(const i64* p) { i64 x; asm volatile("ld.global.u64 %0, [%1];" : "=l"(x) : "l"(p)); return x; }
__device__ __forceinline__ u32 lds_u16(u32 a) { u16 h; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(h) : "r"(a)); return h; }
// `V` consecutive numbers to shared memory
template <int V> __device__ __forceinline__ void sts(u32 a, const float* x) {
  if constexpr (V == 2) asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(a), "f"(x[0]), "f"(x[1]) : "memory");
  else asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(x[0]) : "memory");
}
__device__ __forceinline__ void sts4(u32 a, const u32* x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
// Adds one to a counter in shared memory; `found` gets what it was, when that is looked at: nothing waits here. In a branch, with
// atomicAdd and with atom.add it would: compilers add for a warp's lanes together and hand out the answer. Counters stay far below the limit.
__device__ __forceinline__ void count_up(bool does, int* counter, int& found) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; @p atom.shared.inc.u32 %0, [%2], 0x7fffffff;}" : "+r"(found) : "r"((int)does), "r"((u32)__cvta_generic_to_shared(counter)) : "memory");
}
// The same in global memory.
__device__ __forceinline__ void count_up_global(bool does, int* counter, int& found) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; @p atom.global.inc.u32 %0, [%2], 0x7fffffff;}" : "+r"(found) : "r"((int)does), "l"(counter) : "memory");
}
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ float half_to_float(u32 h) { float f; asm("{.reg .b16 x; cvt.u16.u32 x, %1; cvt.f32.f16 %0, x;}" : "=f"(f) : "r"(h)); return f; }
__device__ __forceinline__ float bf16_to_float(u32 h) { return __uint_as_float(h << 16); }
__device__ __forceinline__ u32 pack_half(float low, float high) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
__device__ __forceinline__ u32 pack_bf16(float low, float high) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
__device__ __forceinline__ u32 mul2(u32 a, u32 b) { u32 r; asm("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
__device__ __forceinline__ u32 max2(u32 a, u32 b) { u32 r; asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
__device__ __forceinline__ float ex2(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float lg2(float x) { float r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float rcp(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

// The low halves of two words, and the high ones.
__device__ __forceinline__ u32 low_halves(u32 a, u32 b) { u32 r; asm("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(r) : "r"(a), "r"(b)); return r; }
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) { u32 r; asm("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(r) : "r"(a), "r"(b)); return r; }
// Byte `i` of a word
__device__ __forceinline__ u32 byte_of(u32 x, int i) { u32 r; asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(x), "r"(0x4440 + i)); return r; }
// Two neighbouring bytes (0 and 1, or 2 and 3) as fp16, and byte `i` as a float, of numbers to which 128 has been added
__device__ __forceinline__ u32 signed_halves(u32 x, int upper) {
  u32 r; asm("{.reg .b32 t; prmt.b32 t, %1, 0x64646464, %2; add.f16x2 %0, t, %3;}" : "=r"(r) : "r"(x), "r"(upper ? 0x4342 : 0x4140), "r"(0xe480e480u));
  return r;  // 1024 + byte - 1152
}
__device__ __forceinline__ float signed_byte(u32 x, int i) {
  u32 r; asm("prmt.b32 %0, %1, 0x4b000000, %2;" : "=r"(r) : "r"(x), "r"(0x7540 + i)); return __uint_as_float(r) - 8388736.f;  // 2^23 + byte - 2^23 - 128
}
// 32 bits from bit `by` (below 32) of two words on
__device__ __forceinline__ u32 funnel(u32 low, u32 high, int by) { u32 r; asm("shf.r.wrap.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(by)); return r; }
// `V` consecutive words that nobody writes
template <int V> __device__ __forceinline__ void ldg(u32* r, const void* p) {
  if constexpr (V == 4) asm("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(p));
  else if constexpr (V == 2) asm("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "l"(p));
  else asm("ld.global.nc.u32 %0, [%1];" : "=r"(r[0]) : "l"(p));
}

// the model's dtype
__device__ __forceinline__ float to_float(u32 x) { return BF16 ? bf16_to_float(x) : half_to_float(x); }
__device__ __forceinline__ u32 pack_model(float low, float high) { return BF16 ? pack_bf16(low, high) : pack_half(low, high); }

// 8 x 8 transposition of 16-bit elements across the warp
__device__ __forceinline__ u32 transposed(u32 x) { u32 r; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x)); return r; }

// The low two bytes, e4m3, as fp16.
__device__ __forceinline__ u32 e4m3_to_half(u32 x) {
#if CONVERT
  u32 r; asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((u16)x)); return r;
#else
  return x;
#endif
}
__device__ __forceinline__ u32 permuted(u32 x, u32 order) { u32 r; asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(x), "r"(order)); return r; }
// Four 8 x 8 matrices of 16-bit elements from shared memory; lane 8 i + j gives the address of row j of matrix i.
__device__ __forceinline__ void ldmatrix4(u32* r, u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}
// The same, each transposed.
__device__ __forceinline__ void ldmatrix4_trans(u32* r, u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}

template <bool BF> __device__ __forceinline__ void mma(float* c, const u32* a, u32 b0, u32 b1) {
  if constexpr (BF)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = c + a b, of fp16
__device__ __forceinline__ void mma_from(float* d, const u32* a, u32 b0, u32 b1, const float* c) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Sum over the eight lanes that hold the same columns of an accumulator.
__device__ __forceinline__ float sum_rows(float x) {
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) x += __shfl_xor_sync(~0u, x, d);
  return x;
}
__device__ __forceinline__ float max_rows(float x) {
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

// A number rounded to eleven bits, which are what fp16 keeps of it while it is not subnormal there. By products, because what masks bits
// has to wait for the words' unpacking, which is all masks.
__device__ __forceinline__ float eleven_bits(float x) { return __fmul_rn(x, 8193.f) - x * 8192.f; }

// Channel of row or column `8 j + x` of the operands over channels 16 c and up: `formats/fragment.py`.
template <int D> __device__ __forceinline__ constexpr int channel_of(int c, int j, int x) {
  return c < D / 32 * 2 ? c / 2 * 32 + 8 * (x >> 1) + 4 * (c & 1) + 2 * j + (x & 1) : D / 32 * 32 + 4 * (x >> 1) + 2 * j + (x & 1);
}

// Copy `BYTES` consecutive bytes, the warp together; or, where they are not real, nothing.
template <int BYTES> __device__ __forceinline__ void copy_linear(bool real, u32 target, const u8* source, int lane) {
  const u8* from = opaque(source + lane * 16);
#pragma unroll
  for (int at = 0; at < BYTES; at += 512)
    cp16_if(real && (at + 512 <= BYTES || at + lane * 16 < BYTES), target + at + lane * 16, from + at);
}

// Two arrays of `BYTES` bytes each, one behind the other.
template <int BYTES> __device__ __forceinline__ void copy_pair(bool real, u32 target, const u8* first, const u8* second, int lane) {
#pragma unroll
  for (int at = 0; at < 2 * BYTES; at += 512) {
    const int mine = at + lane * 16;
    cp16_if(real && (at + 512 <= 2 * BYTES || mine < 2 * BYTES), target + mine, mine < BYTES ? first + mine : second + (mine - BYTES));
  }
}
