// In place of `hopper_ptx.cuh`. Products are done at once: what is read of sums before it is waited for is not seen here.
struct Meeting {                                      // of a warpgroup; it orders nothing else
  int arrived, generation;
  void wait() {
    const int mine = generation;
    if (++arrived == 128) { arrived = 0; generation++; }
    while (generation == mine) yield();
  }
};
static Meeting meetings[8];
static u32 operands[1024][4];

static float e4m3_to_float(u32 c) { return half_to_float((c & 0x80) << 8 | (c & 0x7f) << 7) * ((c & 0x7f) == 0x7f ? NAN : 256.f); }
static u32 float_to_e4m3(float x) {
  const u32 sign = __float_as_uint(x) >> 24 & 0x80;
  const float size = fabsf(x);
  if (isnan(x)) return 0x7f;
  if (size >= 448.f) return sign | 0x7e;
  const int exponent = size < 0.015625f ? -6 : ilogbf(size);
  const float steps = nearbyintf(ldexpf(size, 3 - exponent));  // to even
  return sign | (u32)(steps + (size < 0.015625f ? 0 : (exponent + 6) * 8));
}
static u32 pack_e4m3(float low, float high) { return float_to_e4m3(low) | float_to_e4m3(high) << 8; }
static u32 permuted2(u32 a, u32 b, u32 order) {
  const u64 all = a | (u64)b << 32;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= (u32)(all >> 8 * (order >> 4 * i & 7) & 0xff) << 8 * i;
  return r;
}

// 16 bytes of a row of a matrix that a descriptor describes
static u32 row_at(u64 matrix, int row, int k) {
  const u32 start = (matrix & 0x3fff) << 4, along = (matrix >> 16 & 0x3fff) << 4, across = (matrix >> 32 & 0x3fff) << 4;
  return start + row / 8 * across + k * along + row % 8 * 16;
}
static void use_row(u64 matrix, int row) {
  for (int k = 0; k < 2; k++) { check(row_at(matrix, row, k), 16); used(row_at(matrix, row, k), 16, races::READ); }
}
// element(matrix, row, k)
template <int N, int K, class A, class B> static void product(float* d, A left, B right, bool more) {
  const int part = current % 128 / 32, g = current % 32 >> 2, t = current & 3;
  for (int j = 0; j < N / 8; j++)
    for (int i = 0; i < 2; i++)
      for (int e = 0; e < 2; e++) {
        double sum = more ? d[4 * j + 2 * i + e] : 0.;
        for (int k = 0; k < K; k++) sum += (double)left(16 * part + g + 8 * i, k) * right(8 * j + 2 * t + e, k);
        d[4 * j + 2 * i + e] = (float)sum;
      }
}
UNWATCHED static float code_at(u64 matrix, int row, int k) { return e4m3_to_float(shared_memory[row_at(matrix, row, k / 16) + k % 16]); }
UNWATCHED static float number_at(u64 matrix, int row, int k) {
  u16 x; memcpy(&x, shared_memory + row_at(matrix, row, k / 8) + k % 8 * 2, 2);
  return to_float(x);
}
template <int N> static void touch_operands(const u64* a, u64 b) {
  const int mine = current % 128;
  if (a && mine < 64) use_row(*a, mine);
  if (mine < N) use_row(b, mine);
}
template <int N> static void wgmma_e4m3(float* d, u64 a, u64 b, int more) {
  meetings[current / 128].wait();
  touch_operands<N>(&a, b);
  product<N, 32>(d, [=](int row, int k) { return code_at(a, row, k); }, [=](int row, int k) { return code_at(b, row, k); }, more);
  meetings[current / 128].wait();
}
template <int N> static void wgmma_e4m3(float* d, const u32* a, u64 b) {
  memcpy(operands[current], a, 16);
  meetings[current / 128].wait();
  touch_operands<N>(nullptr, b);
  const int warp = current / 32 * 32;
  auto left = [=](int row, int k) {                   // as in `mma.m16n8k32`
    const u32 x = operands[warp + 4 * (row % 8) + k % 16 / 4][(row % 16 >= 8) + 2 * (k >= 16)];
    return e4m3_to_float(x >> 8 * (k % 4) & 0xff);
  };
  product<N, 32>(d, left, [=](int row, int k) { return code_at(b, row, k); }, true);
  meetings[current / 128].wait();
}
template <int N> static void wgmma_model(float* d, u64 a, u64 b, int more) {
  meetings[current / 128].wait();
  touch_operands<N>(&a, b);
  product<N, 16>(d, [=](int row, int k) { return number_at(a, row, k); }, [=](int row, int k) { return number_at(b, row, k); }, more);
  meetings[current / 128].wait();
}
static void wgmma_fence() {}
static void wgmma_commit() {}
template <int N> static void wgmma_wait() {}
template <int N> static void pin_registers(float*) {}
static void proxy_fence() {}

// Barriers that count bytes, by where they stand. Copies are done at once in hasty blocks, else when somebody waits.
struct ByteBarrier { long left; u32 phase; bool armed; races::Handed handed; std::vector<Copy> copies; };
static ByteBarrier byte_barriers[sizeof shared_memory / 8];
static ByteBarrier& byte_barrier(u32 at) { check(at, 8); return byte_barriers[at / 8]; }
static void barrier_init(u32 at) { byte_barrier(at) = ByteBarrier{}; }
static void barrier_init_done() {}
static void barrier_expect(u32 at, u32 bytes) {
  ByteBarrier& barrier = byte_barrier(at);
  if (barrier.armed) fault("a barrier that expects bytes already", at);
  barrier.left = bytes; barrier.armed = true;
}
static void land(ByteBarrier& barrier, const Copy& c) {
  copy(c.s, c.g, 16, true);
  memcpy(shared_memory + c.s, c.g, c.size);
  barrier.left -= c.size;
  if (barrier.left == 0) { barrier.handed.come(); barrier.handed.open(); barrier.armed = false; barrier.phase ^= 1; }
}
static void copy_bulk(u32 s, const void* g, u32 bytes, u32 at) {
  ByteBarrier& barrier = byte_barrier(at);
  if (s % 16 || bytes % 16 || (size_t)g % 16) fault("bulk copy of misaligned bytes", s);
  check(s + bytes - 16, 16);
  used(s, bytes, races::WRITE);
  const Copy c{s, g, bytes, true, 0, false};
  if (hasty) land(barrier, c); else barrier.copies.push_back(c);
}
static void barrier_wait(u32 at, u32 phase) {
  ByteBarrier& barrier = byte_barrier(at);
  while (barrier.phase == phase) {
    if (!barrier.copies.empty()) {
      const std::vector<Copy> copies = barrier.copies;
      barrier.copies.clear();
      for (const Copy& c : copies) land(barrier, c);
    } else yield();
  }
  barrier.handed.leave();
}

template <int COUNT> static void stmatrix_trans(u32 a, const u32* r) {
  const int g = current % 32 >> 2, t = current & 3;
  for (int i = 0; i < COUNT; i++) {
    const u32 x = transposed(r[i]), row = __shfl_sync(~0u, a, 8 * i + g);
    check(row, 16); used(row + 4 * t, 4, races::WRITE);
    memcpy(shared_memory + row + 4 * t, &x, 4);
  }
}
