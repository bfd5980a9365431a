// Races in shared memory: two warps use the same byte, one of them writes, and no barrier orders the two (of lanes of one warp nothing is
// said). The compiler calls `__tsan_*` at every use of memory (-fsanitize=thread, without its library); here each byte remembers
// who wrote and who read it when, in clocks of the warps, which barriers hand on. What does not depend on the order in which threads
// happen to run is seen whatever that order was.
#define UNWATCHED __attribute__((no_sanitize("thread"), noinline))
namespace races {
enum Use { READ, WRITE, ATOMIC };
constexpr int WARPS_MOST = 32, DYNAMIC = sizeof shared_memory, STATIC = 4096;
struct Cell {
  unsigned block, written, read[WARPS_MOST];          // clocks; 0: not at all
  int writer;
  void* by[2];                                        // where it was written and read last
};
static Cell cells[DYNAMIC + STATIC];
static unsigned clocks[WARPS_MOST][WARPS_MOST];       // what each warp knows of each
static unsigned block;
static int found;
extern "C" char __ehdr_start[] __attribute__((visibility("hidden")));  // where the library was loaded to
extern "C" char __start_gpu_shared[] __attribute__((weak)), __stop_gpu_shared[] __attribute__((weak));

static UNWATCHED void begin_block() {
  block++;
  for (int w = 0; w < WARPS_MOST; w++)
    for (int x = 0; x < WARPS_MOST; x++) clocks[w][x] = x == w;
}
static UNWATCHED long cell_of(const void* p) {
  const char* at = (const char*)p;
  if (at >= (char*)shared_memory && at < (char*)shared_memory + DYNAMIC) return at - (char*)shared_memory;
  if (at >= __start_gpu_shared && at < __stop_gpu_shared && at - __start_gpu_shared < STATIC) return DYNAMIC + (at - __start_gpu_shared);
  return -1;
}
static UNWATCHED void report(long at, int warp, void* pc, Use use, int other, void* before, bool wrote) {
  if (found++ >= 8) return;
  auto place = [](void* pc) { return (long)((char*)pc - __ehdr_start); };
  printf("race at byte %ld: warp %d %s it at %#lx, warp %d %s it at %#lx\n", at, warp, use == READ ? "reads" : "writes", place(pc), other, wrote ? "wrote" : "read", place(before));
  fflush(stdout);
}
static UNWATCHED void touch(const void* p, unsigned size, Use use, void* pc) {
  const long at = cell_of(p);
  if (at < 0) return;
  const int warp = current / 32;
  const unsigned* known = clocks[warp];
  for (unsigned i = 0; i < size; i++) {
    Cell& c = cells[at + i];
    if (c.block != block) { c = Cell{}; c.block = block; }
    if (c.written && c.writer != warp && known[c.writer] < c.written) report(at + i, warp, pc, use, c.writer, c.by[1], true);
    if (use == WRITE)
      for (int w = 0; w < WARPS_MOST; w++)
        if (w != warp && c.read[w] && known[w] < c.read[w]) { report(at + i, warp, pc, use, w, c.by[0], false); break; }
    if (use == WRITE) { c.writer = warp; c.written = known[warp]; } else c.read[warp] = known[warp];
    c.by[use == WRITE] = pc;
  }
}
// What a barrier hands on: of those who have come, to those who leave.
struct Handed {
  unsigned coming[WARPS_MOST], leaving[WARPS_MOST];
  UNWATCHED void come() {
    unsigned* own = clocks[current / 32];
    for (int w = 0; w < WARPS_MOST; w++) coming[w] = coming[w] > own[w] ? coming[w] : own[w];
    own[current / 32]++;
  }
  UNWATCHED void open() {
    for (int w = 0; w < WARPS_MOST; w++) { leaving[w] = coming[w]; coming[w] = 0; }
  }
  UNWATCHED void leave() const {
    unsigned* own = clocks[current / 32];
    for (int w = 0; w < WARPS_MOST; w++) own[w] = own[w] > leaving[w] ? own[w] : leaving[w];
  }
};
}
#define CALLER __builtin_return_address(0)
extern "C" {
UNWATCHED void __tsan_init() {}
UNWATCHED void __tsan_vptr_update(void**, void*) {}
#define SIZED(N) \
  UNWATCHED void __tsan_read##N(void* p) { races::touch(p, N, races::READ, CALLER); } \
  UNWATCHED void __tsan_write##N(void* p) { races::touch(p, N, races::WRITE, CALLER); } \
  UNWATCHED void __tsan_unaligned_read##N(void* p) { races::touch(p, N, races::READ, CALLER); } \
  UNWATCHED void __tsan_unaligned_write##N(void* p) { races::touch(p, N, races::WRITE, CALLER); } \
  UNWATCHED void __tsan_volatile_read##N(void* p) { races::touch(p, N, races::READ, CALLER); } \
  UNWATCHED void __tsan_volatile_write##N(void* p) { races::touch(p, N, races::WRITE, CALLER); }
SIZED(1) SIZED(2) SIZED(4) SIZED(8) SIZED(16)
UNWATCHED void __tsan_read_range(void* p, size_t size) { races::touch(p, size, races::READ, CALLER); }
UNWATCHED void __tsan_write_range(void* p, size_t size) { races::touch(p, size, races::WRITE, CALLER); }
}
