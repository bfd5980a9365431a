// What stands in front of a decode step where the transform of keys is a full matrix for each KV head: queries and the chunk's keys times
// their matrices, and (ROTATED) the chunk's values rotated, in one launch. Products are summed in float32.
//
// A block takes eight rows of one KV head. Its threads are columns of the result times shares of the sum, so that all of a matrix is
// asked for at once.
#include "rotate.cuh"

struct ProjectArgs {
  const u8 *q, *k, *v;
  u8 *q_out, *k_out, *v_out;        // contiguous
  const float *q_matrix, *k_matrix; // of KV head h at h * matrix_h; rows are channels as the model made them
  i64 q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s;  // strides in elements; of channels: 1
  i64 matrix_h;
  int batch, q_heads, heads, tokens;
};

constexpr int EACH = 8, THREADS = 512, SHARES = DIM <= 64 ? 8 : DIM <= 128 ? 4 : 2;  // rows of a block; shares of a sum
static_assert(SHARES * DIM <= THREADS && DIM % SHARES == 0, "a thread for every column and share");

struct Space { float x[EACH][DIM], part[SHARES][EACH][DIM]; };

// Rows first, ... of `rows` of a KV head, head by head and token by token; each: heads of q, or 1.
__device__ __forceinline__ void project_rows(Space& space, const u8* from, u8* to, const float* matrix, i64 b_, i64 h_, i64 s_, int each, int h, int heads, int first, int rows, int tokens) {
  auto &x = space.x;
  auto &part = space.part;
  auto place = [&](int r, int& b, int& head, int& token) { token = r % tokens; head = h * each + r / tokens % each; b = r / tokens / each; };
  for (int i = threadIdx.x; i < EACH * DIM; i += THREADS) {
    const int r = first + i / DIM;
    int b, head, token;
    place(min(r, rows - 1), b, head, token);
    x[i / DIM][i % DIM] = to_float(reinterpret_cast<const u16*>(from)[b * b_ + head * h_ + token * s_ + i % DIM]);
  }
  __syncthreads();
  const int share = threadIdx.x / DIM, column = threadIdx.x % DIM;
  if (share < SHARES) {
    float sum[EACH] = {};
#pragma unroll 16
    for (int i = share * (DIM / SHARES); i < (share + 1) * (DIM / SHARES); i++) {
      const float w = matrix[i * DIM + column];
#pragma unroll
      for (int j = 0; j < EACH; j++) sum[j] += x[j][i] * w;
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) part[share][j][column] = sum[j];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < EACH * DIM / 2; i += THREADS) {
    const int j = i / (DIM / 2), c = i % (DIM / 2) * 2;
    if (first + j >= rows) continue;
    float low = 0.f, high = 0.f;
#pragma unroll
    for (int s = 0; s < SHARES; s++) { low += part[s][j][c]; high += part[s][j][c + 1]; }
    int b, head, token;
    place(first + j, b, head, token);
    reinterpret_cast<u32*>(to)[((((i64)b * heads * each + head) * tokens + token) * DIM + c) / 2] = pack_model(low, high);
  }
}

// Grid: blocks of queries, of keys, of values.
extern "C" __global__ void __launch_bounds__(THREADS) project(const __grid_constant__ ProjectArgs a) {
  __shared__ Space space;
  const int groups = a.q_heads / a.heads, rows_k = a.batch * a.tokens, rows_q = rows_k * groups;
  const int blocks_q = (rows_q + EACH - 1) / EACH, blocks_k = (rows_k + EACH - 1) / EACH;
  int block = blockIdx.x;
  if (block < blocks_q * a.heads) {
    const int h = block / blocks_q;
    project_rows(space, a.q, a.q_out, a.q_matrix + h * a.matrix_h, a.q_b, a.q_h, a.q_s, groups, h, a.heads, block % blocks_q * EACH, rows_q, a.tokens);
    return;
  }
  block -= blocks_q * a.heads;
  if (block < blocks_k * a.heads) {
    const int h = block / blocks_k;
    project_rows(space, a.k, a.k_out, a.k_matrix + h * a.matrix_h, a.k_b, a.k_h, a.k_s, 1, h, a.heads, block % blocks_k * EACH, rows_k, a.tokens);
    return;
  }
#if ROTATED
  block -= blocks_k * a.heads;
  const int lane = threadIdx.x & 31, r = block * (THREADS / 32) + (threadIdx.x >> 5);
  if (r >= rows_k * a.heads) return;
  const int token = r % a.tokens, h = r / a.tokens % a.heads, b = r / a.tokens / a.heads;
  const u32* from = reinterpret_cast<const u32*>(a.v + 2 * (b * a.v_b + h * a.v_h + token * a.v_s));
  u32 x[Rotation<DIM_V>::WORDS];
#pragma unroll
  for (int j = 0; j < Rotation<DIM_V>::WORDS; j++) x[j] = 32 * j + lane < DIM_V / 2 ? from[32 * j + lane] : 0u;
  transform_row<DIM_V>(x, nullptr, lane);
#pragma unroll
  for (int j = 0; j < Rotation<DIM_V>::WORDS; j++)
    if (32 * j + lane < DIM_V / 2) reinterpret_cast<u32*>(a.v_out)[(i64)r * (DIM_V / 2) + 32 * j + lane] = x[j];
#endif
}
