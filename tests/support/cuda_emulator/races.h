// Races in shared memory: two warps use the same byte, one of them writes, and no barrier orders the two. Lanes of one warp are not checked.
// The compiler calls `__tsan_*` at every use of memory (-fsanitize=thread, without its library). Each byte or word has the clocks of its
// last write and of its reads, by warp, and barriers synchronize the warps' clocks. So a race is found in any order of threads.
#define UNWATCHED __attribute__((no_sanitize("thread"), noinline))
#define INLINED inline __attribute__((no_sanitize("thread"), always_inline))
namespace races {
enum Use { READ, WRITE, ATOMIC };
constexpr int WARPS_MOST = 32, DYNAMIC = sizeof shared_memory, STATIC = 4096;
struct Cell {
  unsigned block, written, read[WARPS_MOST];          // clocks; 0: not at all
  int writer;
  void* by[2];                                        // where it was written and read last
};
// Most uses are of whole words of four bytes. A byte that is used by itself has a cell of its own, and its word knows that.
static Cell bytes[DYNAMIC + STATIC], words[(DYNAMIC + STATIC) / 4];
static unsigned apart[(DYNAMIC + STATIC) / 4];        // the last block in which bytes of a word were used by themselves
static unsigned clocks[WARPS_MOST][WARPS_MOST];       // what each warp knows of each
static unsigned block;
static int found, warps_now;                            // warps of a block

extern "C" char __ehdr_start[] __attribute__((visibility("hidden")));  // where the library was loaded to
extern "C" char __start_gpu_shared[] __attribute__((weak)), __stop_gpu_shared[] __attribute__((weak));

static UNWATCHED void begin_block(int warps) {
  block++;
  warps_now = warps;
  for (int w = 0; w < warps; w++)
    for (int x = 0; x < warps; x++) clocks[w][x] = x == w;
}
static INLINED long place_of(const void* p) {
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
static INLINED void compare(const Cell& c, long at, int warp, Use use, void* pc) {
  if (c.block != block) return;
  const unsigned* known = clocks[warp];
  if (c.written && c.writer != warp && known[c.writer] < c.written) report(at, warp, pc, use, c.writer, c.by[1], true);
  if (use == WRITE)
    for (int w = 0; w < warps_now; w++)
      if (w != warp && c.read[w] && known[w] < c.read[w]) { report(at, warp, pc, use, w, c.by[0], false); break; }
}
static INLINED void note(Cell& c, int warp, Use use, void* pc) {
  if (c.block != block) { c = Cell{}; c.block = block; }
  if (use == WRITE) { c.writer = warp; c.written = clocks[warp][warp]; } else c.read[warp] = clocks[warp][warp];
  c.by[use == WRITE] = pc;
}
static UNWATCHED void touch_shared(long at, long size, Use use, void* pc) {
  const int warp = current / 32;
  for (const long end = at + size; at < end;) {
    const long word = at / 4;
    compare(words[word], at, warp, use, pc);
    if (at % 4 == 0 && end - at >= 4) {
      if (apart[word] == block)
        for (int i = 0; i < 4; i++) compare(bytes[at + i], at + i, warp, use, pc);
      note(words[word], warp, use, pc);
      at += 4;
    } else {
      compare(bytes[at], at, warp, use, pc);
      note(bytes[at], warp, use, pc);
      apart[word] = block;
      at++;
    }
  }
}
static INLINED void touch(const void* p, unsigned size, Use use, void* pc) {
  const long at = place_of(p);
  if (at >= 0) touch_shared(at, size, use, pc);
}
// What a barrier hands on: of those who have come, to those who leave.
struct Handed {
  unsigned coming[WARPS_MOST], leaving[WARPS_MOST];
  UNWATCHED void come() {
    unsigned* own = clocks[current / 32];
    for (int w = 0; w < warps_now; w++) coming[w] = coming[w] > own[w] ? coming[w] : own[w];
    own[current / 32]++;
  }
  UNWATCHED void open() {
    for (int w = 0; w < warps_now; w++) { leaving[w] = coming[w]; coming[w] = 0; }
  }
  UNWATCHED void leave() const {
    unsigned* own = clocks[current / 32];
    for (int w = 0; w < warps_now; w++) own[w] = own[w] > leaving[w] ? own[w] : leaving[w];
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
