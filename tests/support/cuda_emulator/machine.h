// A CUDA block on the CPU, to test kernels without a GPU: every thread is a fiber, and what threads of a warp do together (shuffles, votes,
// tensor-core products) waits until all of them have come there. Threads run one after another, copies are done early or late: this finds
// wrong results, wrong addresses, copies not waited for, and races in shared memory (`races.h`); of races in global memory those
// that show when blocks run one after the other, in either order.
#include <immintrin.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __constant__
#define __shared__ static __attribute__((section("gpu_shared")))
#define __grid_constant__
#define __launch_bounds__(...)

// A sequence of its own: order of warps and time of copies differ from launch to launch and are the same in every process.
static unsigned draw() {
  static unsigned state = 12345;
  state ^= state << 13; state ^= state >> 17; state ^= state << 5;
  return state >> 3;
}
static bool hasty;                                  // whether copies of this block may be done before they are waited for
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Dim { unsigned x, y, z; };
static Dim blockIdx, gridDim, blockDim;
static int current, threads;                        // the running thread of the block, and their number
#define threadIdx (Dim{(unsigned)current, 0, 0})
static unsigned char shared_memory[240 * 1024] __attribute__((aligned(128)));

// Threads are stacks of their own. What a function must keep of its caller's registers is put on the stack that is left; `from` gets where
// that one ends, and the other is taken up where `to` says. (`swapcontext` does the same with two calls of the system.)
extern "C" __attribute__((visibility("hidden"))) void switch_stack(void** from, void* to);
asm(R"(
.text
.type switch_stack, @function
switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size switch_stack, .-switch_stack
)");
static void *scheduler, *fibers[1024];
static bool finished[1024];
static void yield() { switch_stack(&fibers[current], scheduler); }

#include "races.h"

struct Barrier {
  int arrived, generation;
  races::Handed handed;
  void wait(int count) {
    const int mine = generation;
    const bool several = count > 32;                  // warps; lanes of one have the same clocks
    if (several) handed.come();
    if (++arrived == count) { arrived = 0; generation++; if (several) handed.open(); }
    while (generation == mine) yield();
    if (several) handed.leave();
  }
};
static Barrier warps[32], barriers[17];
// Name of a `BARRIER` that launches leave out, to see what that does. Set from outside; empty: none.
extern "C" char left_out[64];
char left_out[64];
UNWATCHED static bool is_left_out(const char* name) { return *left_out && !strcmp(name, left_out); }
static void __syncthreads() { barriers[0].wait(threads); }
static int __syncthreads_or(int p) {
  static int any[2], turn[1024];                      // by turns: one is cleared while the other is in use
  const int mine = turn[current]++ & 1;
  any[mine] |= p != 0;
  __syncthreads();
  const int found = any[mine];
  __syncthreads();
  any[mine] = 0;
  return found;
}
static void __syncwarp() { warps[current / 32].wait(32); }
static void __threadfence() {}

// What lanes show each other.
static unsigned shown[32][32][8];
template <class T> static unsigned bits_of(T x) { unsigned u; static_assert(sizeof(T) == 4); memcpy(&u, &x, 4); return u; }
template <class T> static T from_bits(unsigned u) { T x; memcpy(&x, &u, 4); return x; }
// `read` is called between two meetings of the warp; it sees `x` of every lane
template <class T, class F> static auto exchange(T x, F read) {
  unsigned(*all)[8] = shown[current / 32];
  all[current % 32][0] = bits_of(x);
  __syncwarp();
  const auto out = read(all);
  __syncwarp();
  return out;
}
template <class T> static T __shfl_sync(unsigned, T x, int lane) { return exchange(x, [=](unsigned(*all)[8]) { return from_bits<T>(all[lane & 31][0]); }); }
template <class T> static T __shfl_xor_sync(unsigned m, T x, int d) { return __shfl_sync(m, x, current % 32 ^ d); }
template <class T> static T __shfl_up_sync(unsigned m, T x, int d) { return __shfl_sync(m, x, current % 32 >= d ? current % 32 - d : current % 32); }
static unsigned __ballot_sync(unsigned, bool p) { return exchange((unsigned)p, [](unsigned(*all)[8]) { unsigned out = 0; for (int i = 0; i < 32; i++) out |= all[i][0] << i; return out; }); }
static bool __any_sync(unsigned m, bool p) { return __ballot_sync(m, p) != 0; }
static unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((unsigned long long)x * y >> 32); }
static unsigned __reduce_add_sync(unsigned, unsigned x) { return exchange(x, [](unsigned(*all)[8]) { unsigned out = 0; for (int i = 0; i < 32; i++) out += all[i][0]; return out; }); }

static int __ffs(unsigned x) { return __builtin_ffs(x); }
static int __popc(unsigned x) { return __builtin_popcount(x); }
template <class T> static T __ldcg(const T* p) { return *p; }
UNWATCHED static int atomicMax(int* p, int x) {
  races::touch(p, sizeof *p, races::ATOMIC, __builtin_return_address(0));
  const int old = *p; *p = old > x ? old : x; return old;
}
static int atomicAdd(int* p, int x) { const int old = *p; *p += x; return old; }
static float __int_as_float(int x) { return from_bits<float>(x); }
static float __uint_as_float(unsigned x) { return from_bits<float>(x); }
static unsigned __float_as_uint(float x) { return bits_of(x); }
static int __float_as_int(float x) { return (int)bits_of(x); }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fdividef(float a, float b) { return a * (1.f / b); }
template <class A, class B> static constexpr auto min(A a, B b) { using T = std::common_type_t<A, B>; return (T)a < (T)b ? (T)a : (T)b; }
template <class A, class B> static constexpr auto max(A a, B b) { using T = std::common_type_t<A, B>; return (T)a > (T)b ? (T)a : (T)b; }

// The arguments of a launch: a structure, then integers.
static const void* argument;
static const long long* integers;
template <class A, class... Rest, size_t... I> static void call_with(void (*kernel)(A, Rest...), std::index_sequence<I...>) {
  kernel(*(const std::remove_cv_t<A>*)argument, (Rest)integers[I]...);
}
static void check_waited();
template <class A, class... Rest> static void call(void (*kernel)(A, Rest...)) {
  call_with(kernel, std::index_sequence_for<Rest...>());
  check_waited();
  finished[current] = true;
  for (;;) yield();
}

// `entry` runs a kernel in one thread and does not return.
static int run_grid(void (*entry)(), const void* a, const long long* more, const int* grid, int count, int backwards) {
  constexpr size_t STACK = 128 * 1024;
  static char* stacks = (char*)aligned_alloc(16, 1024 * STACK);
  const int x = grid[0], y = grid[1], z = grid[2];
  argument = a; integers = more;
  races::found = 0;
  gridDim = {(unsigned)x, (unsigned)y, (unsigned)z}; blockDim = {(unsigned)count, 1, 1}; threads = count;
  for (int n = 0; n < x * y * z; n++) {
    const unsigned i = backwards ? x * y * z - 1 - n : n;
    blockIdx = {i % x, i / x % y, i / (x * y)};
    memset(shared_memory, 0xff, sizeof shared_memory);  // NaN
    hasty = draw() & 1;
    races::begin_block(count / 32);
    memset(warps, 0, sizeof warps); memset(barriers, 0, sizeof barriers);
    for (int t = 0; t < count; t++) {
      finished[t] = false;
      void** top = (void**)(stacks + (t + 1) * STACK) - 2;
      *top = (void*)entry;                              // where the first switch returns to; six registers are taken off before
      fibers[t] = top - 6;
    }
    for (long left = count, rounds = 0; left; rounds++) {
      if (rounds > 10000000) return 1;                  // threads wait for each other
      left = 0;
      const int all = count / 32, first = draw() % all;
      const unsigned rest = draw() % 3 ? draw() : 0;      // warps that do not run this time
      for (int w = 0; w < all; w++) {
        const int warp = (first + w) % all, flip = draw() & 1 ? 31 : 0;
        for (int lane = 0; lane < 32; lane++) {
          const int t = warp * 32 + (lane ^ flip);
          if (!finished[t] && !(rest >> warp & 1)) { current = t; switch_stack(&scheduler, fibers[t]); }
          left += !finished[t];
        }
      }
    }
  }
  return races::found ? 2 : 0;
}
#define LAUNCHED(kernel) \
  extern "C" int run_##kernel(const void* a, const long long* more, const int* grid, int count, int backwards) { \
    return run_grid([] { call(kernel); }, a, more, grid, count, backwards); \
  }
