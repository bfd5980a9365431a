// Instructions that only Hopper has (sm_90a), each as a function. The tests run the kernels on a CPU, with replacements of these functions
// (`tests/support/cuda_emulator/hopper.h`).
#pragma once

#define SUMS8_(i)                                                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define SUMS16 SUMS8_(0)
#define SUMS32 SUMS8_(0), SUMS8_(8)
#define SUMS64 SUMS8_(0), SUMS8_(8), SUMS8_(16), SUMS8_(24)
// d += a b for e4m3: a is 64 x 32 in shared memory, b is 32 x N. With more = 0: d = a b.
template <int N> __device__ __forceinline__ void wgmma_e4m3(float* d, u64 a, u64 b, int more) {
  if constexpr (N == 16)
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %10, 0; wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1;}"
        : SUMS16
        : "l"(a), "l"(b), "r"(more));
  else if constexpr (N == 32)
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1;}"
        : SUMS32
        : "l"(a), "l"(b), "r"(more));
  else
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%"
        "29,%30,%31}, %32, %33, p, 1, 1;}"
        : SUMS64
        : "l"(a), "l"(b), "r"(more));
}
// The same with the left operand in registers.
template <int N> __device__ __forceinline__ void wgmma_e4m3(float* d, const u32* a, u64 b) {
  if constexpr (N == 16)
    asm volatile(
        "{.reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1;}"
        : SUMS16
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else if constexpr (N == 32)
    asm volatile(
        "{.reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1;}"
        : SUMS32
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else
    asm volatile(
        "{.reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%"
        "29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1;}"
        : SUMS64
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// d += a b in the model's dtype: a is 64 x 16, b is 16 x N.
template <int N> __device__ __forceinline__ void wgmma_model(float* d, u64 a, u64 b, int more) {
  if constexpr (BF16) {
    if constexpr (N == 16)
      asm volatile(
          "{.reg .pred p; setp.ne.b32 p, %10, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
          "{%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, 0, 0;}"
          : SUMS16
          : "l"(a), "l"(b), "r"(more));
    else if constexpr (N == 32)
      asm volatile(
          "{.reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
          "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, 0, 0;}"
          : SUMS32
          : "l"(a), "l"(b), "r"(more));
    else
      asm volatile(
          "{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
          "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%"
          "29,%30,%31}, %32, %33, p, 1, 1, 0, 0;}"
          : SUMS64
          : "l"(a), "l"(b), "r"(more));
  } else {
    if constexpr (N == 16)
      asm volatile(
          "{.reg .pred p; setp.ne.b32 p, %10, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
          "{%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, 0, 0;}"
          : SUMS16
          : "l"(a), "l"(b), "r"(more));
    else if constexpr (N == 32)
      asm volatile(
          "{.reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
          "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, 0, 0;}"
          : SUMS32
          : "l"(a), "l"(b), "r"(more));
    else
      asm volatile(
          "{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
          "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%"
          "29,%30,%31}, %32, %33, p, 1, 1, 0, 0;}"
          : SUMS64
          : "l"(a), "l"(b), "r"(more));
  }
}
// Needed before the first product, and after other instructions have written registers that a product uses.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N groups of products are pending.
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from reading or moving accumulators that pending products write.
template <int N> __device__ __forceinline__ void pin_registers(float* d) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Barriers in shared memory. A phase ends when the expected number of bytes has arrived.
__device__ __forceinline__ void barrier_init(u32 barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 phase) {
  asm volatile(
      "{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @p bra DONE; bra AGAIN; DONE:}" ::"r"(
          barrier),
      "r"(phase)
      : "memory");
}
__device__ __forceinline__ void copy_bulk(u32 target, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}
// Makes this thread's writes to shared memory visible to products and bulk copies after the next barrier.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Stores 8 x 8 matrices of 16-bit elements to shared memory, each transposed. Lane 8 i + j gives the address of row j of matrix i.
template <int COUNT> __device__ __forceinline__ void stmatrix_trans(u32 a, const u32* r) {
  if constexpr (COUNT == 4)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(a), "r"(r[0]), "r"(r[1])
                 : "memory");
}
// Converts two numbers to e4m3, saturated.
__device__ __forceinline__ u32 pack_e4m3(float low, float high) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ u32 permuted2(u32 a, u32 b, u32 order) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(order));
  return r;
}
