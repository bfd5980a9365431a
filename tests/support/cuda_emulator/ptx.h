// In place of `ptx.cuh`.
#define DYNAMIC_SHARED(name) u8* name = shared_memory
#define BARRIER(name, wait) do { if (!is_left_out(#name)) wait; } while (0)
template <int COUNT> static void named_barrier(int name) { barriers[name].wait(COUNT); }

static void fault(const char* what, u32 address) { printf("%s at byte %u of shared memory\n", what, address); abort(); }
static void check(u32 s, u32 size) { if (s % size) fault("misaligned access", s); if (s + size > sizeof shared_memory) fault("access", s); }
static void used(u32 s, u32 size, races::Use use) { races::touch(shared_memory + s, size, use, __builtin_return_address(0)); }
static void copy(u32 s, const void* g, u32 size, bool keep) {
  check(s, size);
  if (keep && (size_t)g % size) fault("copy from a misaligned address", s);
  if (keep) memcpy(shared_memory + s, g, size); else memset(shared_memory + s, 0, size);
}
// Copies are done as late as they may be, when they are waited for: what is read too early is then not there yet. In hasty blocks most
// are done at once: what is still read is then gone.
struct Copy { u32 s; const void* g; u32 size; bool keep; int group; bool done; };
static std::vector<Copy> begun[1024];
static int groups_begun[1024];
static void begin_copy(u32 s, const void* g, u32 size, bool keep) {
  const bool now = hasty && draw() % 4;
  used(s, size, races::WRITE);                        // it may come at once, and it may come when it is waited for
  if (now) copy(s, g, size, keep);
  begun[current].push_back({s, g, size, keep, groups_begun[current], now});
}
static void commit() { groups_begun[current]++; }
template <int N> static void wait() {
  std::vector<Copy>& all = begun[current];
  size_t done = 0;
  for (; done < all.size() && all[done].group < groups_begun[current] - N; done++) {
    used(all[done].s, all[done].size, races::WRITE);
    if (!all[done].done) copy(all[done].s, all[done].g, all[done].size, all[done].keep);
  }
  all.erase(all.begin(), all.begin() + done);
}
static void check_waited() { if (!begun[current].empty()) fault("a copy without a wait", begun[current][0].s); }
static void cp16(u32 s, const void* g, bool keep = true) { begin_copy(s, g, 16, keep); }
static void cp16_if(bool real, u32 s, const void* g) { if (real) begin_copy(s, g, 16, true); }
static void cp8(u32 s, const void* g, bool keep) { begin_copy(s, g, 8, keep); }
static void cp4(u32 s, const void* g) { begin_copy(s, g, 4, true); }
template <int V> static void sts(u32 a, const float* x) { check(a, 4 * V); used(a, 4 * V, races::WRITE); memcpy(shared_memory + a, x, 4 * V); }
static void sts4(u32 a, const u32* x) { check(a, 16); used(a, 16, races::WRITE); memcpy(shared_memory + a, x, 16); }
template <int V> static void lds(u32* r, u32 a) { check(a, 4 * V); used(a, 4 * V, races::READ); memcpy(r, shared_memory + a, 4 * V); }
static u16 lds_u16(u32 a) { check(a, 2); used(a, 2, races::READ); u16 h; memcpy(&h, shared_memory + a, 2); return h; }
static void let_next_begin() {}
static void wait_for_previous() {}
static const u8* opaque(const u8* p) { return p; }
static u32 load_now(const u32* p) { return *p; }
static i64 load_now(const i64* p) { return *p; }
UNWATCHED static void atomic_inc_shared(bool active, int* counter, int& old) {
  if (!active) return;
  races::touch(counter, sizeof *counter, races::ATOMIC, __builtin_return_address(0));
  old = (*counter)++;
}
static void atomic_inc_global(bool active, int* counter, int& old) { atomic_inc_shared(active, counter, old); }
static u32 shared_address(const void* p) { return (u32)((const u8*)p - shared_memory); }

template <int V> static void ldg(u32* r, const void* p) { if ((size_t)p % (4 * V)) fault("load from a misaligned address", 0); memcpy(r, p, 4 * V); }
static u32 low_halves(u32 a, u32 b) { return (a & 0xffff) | b << 16; }
static u32 high_halves(u32 a, u32 b) { return a >> 16 | (b & 0xffff0000u); }
static u32 byte_of(u32 x, int i) { return x >> 8 * i & 0xff; }
static u32 funnel(u32 low, u32 high, int by) { return by ? low >> by | high << (32 - by) : low; }

static float half_to_float(u32 h) { return _cvtsh_ss((u16)h); }
static float bf16_to_float(u32 h) { return __uint_as_float(h << 16); }
static u16 half_bits(float x) { return _cvtss_sh(x, 0); }
static u16 bf16_bits(float x) { const u32 u = __float_as_uint(x); return isnan(x) ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16; }
static u32 pack_half(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
static u32 pack_bf16(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
static u32 mul2(u32 a, u32 b) { return pack_half(half_to_float(a & 0xffff) * half_to_float(b & 0xffff), half_to_float(a >> 16) * half_to_float(b >> 16)); }
static u32 max2(u32 a, u32 b) { return pack_half(fmaxf(half_to_float(a & 0xffff), half_to_float(b & 0xffff)), fmaxf(half_to_float(a >> 16), half_to_float(b >> 16))); }
static u32 choose_bits(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }
template <int BY> static u32 rotated_left(u32 x) { return x << BY | x >> (32 - BY); }
static float ex2(float x) { return exp2f(x); }
static float lg2(float x) { return log2f(x); }
static float rcp(float x) { return 1.f / x; }

static u32 transposed(u32 x) {
  const int g = current % 32 >> 2, t = current & 3;
  return exchange(x, [=](unsigned(*all)[8]) {
    auto at = [&](int row, int column) { return all[4 * row + column / 2][0] >> 16 * (column & 1) & 0xffff; };
    return at(2 * t, g) | at(2 * t + 1, g) << 16;
  });
}

static u32 e4m3_to_half(u32 x) {
  auto half = [](u32 c) { return (c & 0x7f) == 0x7f ? c << 8 | 0x7fff : half_bits(half_to_float((c & 0x80) << 8 | (c & 0x7f) << 7) * 256.f); };
  return half(x & 0xff) | half(x >> 8 & 0xff) << 16;
}
static u32 permuted(u32 x, u32 order) { u32 r = 0; for (int i = 0; i < 4; i++) r |= (x >> 8 * (order >> 4 * i & 3) & 0xff) << 8 * i; return r; }
static void ldmatrix4(u32* r, u32 a) {
  check(a, 16); used(a, 16, races::READ);
  const int g = current % 32 >> 2, t = current & 3;
  for (int i = 0; i < 4; i++) r[i] = exchange(a, [=](unsigned(*all)[8]) { u32 x; memcpy(&x, shared_memory + all[8 * i + g][0] + 4 * t, 4); return x; });
}
static void ldmatrix4_trans(u32* r, u32 a) {
  ldmatrix4(r, a);
  for (int i = 0; i < 4; i++) r[i] = transposed(r[i]);
}

// c += a b, 16 x 16 times 16 x 8, in the registers of `mma.m16n8k16` (PTX ISA)
template <bool BF> static void mma(float* c, const u32* a, u32 b0, u32 b1) {
  unsigned(*all)[8] = shown[current / 32];
  const int lane = current % 32, g = lane >> 2, t = lane & 3;
  for (int i = 0; i < 4; i++) all[lane][i] = a[i];
  all[lane][4] = b0; all[lane][5] = b1;
  __syncwarp();
  auto element = [&](int row, int k, int reg) { const u32 x = all[4 * (row % 8) + k % 8 / 2][reg] >> 16 * (k & 1) & 0xffff; return BF ? bf16_to_float(x) : half_to_float(x); };
  for (int i = 0; i < 4; i++) {
    const int row = g + 8 * (i >> 1), column = 2 * t + (i & 1);
    double sum = c[i];
    for (int k = 0; k < 16; k++) sum += (double)element(row, k, (row >= 8) + 2 * (k >= 8)) * element(column, k, 4 + (k >= 8));
    c[i] = (float)sum;
  }
  __syncwarp();
}
static void mma_from(float* d, const u32* a, u32 b0, u32 b1, const float* c) { for (int i = 0; i < 4; i++) d[i] = c[i]; mma<false>(d, a, b0, b1); }
