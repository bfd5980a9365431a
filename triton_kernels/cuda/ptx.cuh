// Instructions that CUDA C++ cannot express, each as a function. Only this file and `hopper_ptx.cuh` contain assembly. The tests run the kernels
// on a CPU, with replacements of these functions (`tests/support/cuda_emulator/ptx.h`).
#pragma once

// Shared memory whose size the launch sets. A file has one such array.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]
// A barrier with a name. The tests omit one at a time, and check that the race is detected.
#define BARRIER(name, wait) wait

__device__ __forceinline__ void cp16(u32 s, const void* g, bool keep = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(s), "l"(g), "r"(keep ? 16 : 0));
}
// Copies nothing unless `real`.
__device__ __forceinline__ void cp16_if(bool real, u32 s, const void* g) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;}" ::"r"(s),
               "l"(g), "r"((int)real));
}
__device__ __forceinline__ void cp8(u32 s, const void* g, bool keep) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(s), "l"(g), "r"(keep ? 8 : 0));
}
__device__ __forceinline__ void cp4(u32 s, const void* g) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(s), "l"(g));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Lets the next kernel of the stream begin, if it was launched for that (`Module.launch`, `early`).
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Waits until the previous kernel has ended, and what it wrote can be read.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Returns the same pointer, but hides its origin from the compiler. So the compiler adds offsets to it instead of keeping several pointers.
__device__ __forceinline__ const u8* opaque(const u8* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// `V` consecutive words of shared memory
template <int V> __device__ __forceinline__ void lds(u32* r, u32 a) {
  if constexpr (V == 4)
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
  else if constexpr (V == 2) asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(a));
  else asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r[0]) : "r"(a));
}
// Loads from global memory at this point: the compiler must not move the load after later copies, or its wait would include them.
__device__ __forceinline__ u32 load_now(const u32* p) {
  u32 x;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(p));
  return x;
}
__device__ __forceinline__ i64 load_now(const i64* p) {
  i64 x;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(x) : "l"(p));
  return x;
}
__device__ __forceinline__ u32 lds_u16(u32 a) {
  u16 h;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(h) : "r"(a));
  return h;
}
// `V` consecutive numbers to shared memory
template <int V> __device__ __forceinline__ void sts(u32 a, const float* x) {
  if constexpr (V == 2) asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(a), "f"(x[0]), "f"(x[1]) : "memory");
  else asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(x[0]) : "memory");
}
__device__ __forceinline__ void sts4(u32 a, const u32* x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
// Increments a counter in shared memory if `active`. `old` receives the old value; only its first use waits for it. In a branch, atomicAdd and
// atom.add would wait here, because compilers aggregate the lanes of a warp and distribute the result. Counters stay far below the limit.
__device__ __forceinline__ void atomic_inc_shared(bool active, int* counter, int& old) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; @p atom.shared.inc.u32 %0, [%2], 0x7fffffff;}"
               : "+r"(old)
               : "r"((int)active), "r"((u32)__cvta_generic_to_shared(counter))
               : "memory");
}
// The same for a counter in global memory.
__device__ __forceinline__ void atomic_inc_global(bool active, int* counter, int& old) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; @p atom.global.inc.u32 %0, [%2], 0x7fffffff;}"
               : "+r"(old)
               : "r"((int)active), "l"(counter)
               : "memory");
}
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ float half_to_float(u32 h) {
  float f;
  asm("{.reg .b16 x; cvt.u16.u32 x, %1; cvt.f32.f16 %0, x;}" : "=f"(f) : "r"(h));
  return f;
}
__device__ __forceinline__ float bf16_to_float(u32 h) { return __uint_as_float(h << 16); }
__device__ __forceinline__ u32 pack_half(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
  u32 r;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ u32 max2(u32 a, u32 b) {
  u32 r;
  asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Bits of `a` where the mask has ones, of `b` elsewhere; and x rotated left. Inline assembly prevents the compiler from rewriting them.
__device__ __forceinline__ u32 choose_bits(u32 mask, u32 a, u32 b) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
  return r;
}
template <int BY> __device__ __forceinline__ u32 rotated_left(u32 x) {
  u32 r;
  asm("shf.l.wrap.b32 %0, %1, %1, %2;" : "=r"(r) : "r"(x), "n"(BY));
  return r;
}
__device__ __forceinline__ float ex2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float lg2(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float rcp(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// The low halves of two words, and the high ones.
__device__ __forceinline__ u32 low_halves(u32 a, u32 b) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Byte `i` of a word
__device__ __forceinline__ u32 byte_of(u32 x, int i) {
  u32 r;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(x), "r"(0x4440 + i));
  return r;
}
// 32 bits of two words, from bit `by` (below 32) on
__device__ __forceinline__ u32 funnel(u32 low, u32 high, int by) {
  u32 r;
  asm("shf.r.wrap.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(by));
  return r;
}
// `V` consecutive words that no kernel writes while this one runs
template <int V> __device__ __forceinline__ void ldg(u32* r, const void* p) {
  if constexpr (V == 4)
    asm("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(p));
  else if constexpr (V == 2) asm("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "l"(p));
  else asm("ld.global.nc.u32 %0, [%1];" : "=r"(r[0]) : "l"(p));
}

// 8 x 8 transposition of 16-bit elements across the warp
__device__ __forceinline__ u32 transposed(u32 x) {
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

// The low two bytes, e4m3, as fp16.
__device__ __forceinline__ u32 e4m3_to_half(u32 x) {
#if CONVERT
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((u16)x));
  return r;
#else
  return x;
#endif
}
__device__ __forceinline__ u32 permuted(u32 x, u32 order) {
  u32 r;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(x), "r"(order));
  return r;
}
// Four 8 x 8 matrices of 16-bit elements from shared memory; lane 8 i + j gives the address of row j of matrix i.
__device__ __forceinline__ void ldmatrix4(u32* r, u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a));
}
// The same, each transposed.
__device__ __forceinline__ void ldmatrix4_trans(u32* r, u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a));
}

template <bool BF> __device__ __forceinline__ void mma(float* c, const u32* a, u32 b0, u32 b1) {
  if constexpr (BF)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = c + a b, of fp16
__device__ __forceinline__ void mma_from(float* d, const u32* a, u32 b0, u32 b1, const float* c) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// A float rounded to fp16.
__device__ __forceinline__ u16 half_bits(float x) {
  u32 r;
  asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h;}" : "=r"(r) : "f"(x));
  return (u16)r;
}
// Barrier number `name` of `COUNT` threads; 0 is that of `__syncthreads`.
template <int COUNT> __device__ __forceinline__ void named_barrier(int name) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "n"(COUNT) : "memory");
}
