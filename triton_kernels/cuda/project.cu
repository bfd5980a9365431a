// Precedes a decode step whose key transform is a full matrix per KV head. One launch multiplies queries and new keys (minus a center, if there
// is one) by their matrices, and (ROTATED) rotates new values. Products are summed in float32.
//
// A CTA takes EACH rows of one KV head and COLUMNS columns of its matrix. Its warps split the sums. A lane starts all its loads of the matrix at
// once and loads the rows meanwhile, so a CTA waits for memory once.
#include "rotate.cuh"

struct ProjectArgs {
  const u8 *q, *k, *v;
  u8 *q_out, *k_out, *v_out;         // contiguous
  const float *q_matrix, *k_matrix;  // KV head h's begins at h * matrix_h; its rows are untransformed channels
  const float* k_center;             // subtracted from keys first, or null; KV head h's begins at h * matrix_h
  float* score_bias;                 // receives the products of queries with the center, or null
  i64 q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s;  // strides in elements; of channels: 1
  i64 matrix_h;
  int batch, q_heads, heads, tokens;
};

constexpr int WARPS = THREADS / 32, SPAN = DIM / WARPS, BANDS = (DIM + COLUMNS - 1) / COLUMNS;
static_assert(DIM % (2 * WARPS) == 0, "all warps have the same number of channels");
static_assert(COLUMNS == 32, "one per lane");

struct Space {
  float x[EACH][DIM], partial[WARPS][EACH][COLUMNS];
};

// Multiplies rows `first` and up of a KV head's `rows` by a slice of a matrix. Rows are counted head by head, then token by token; each: query
// heads of a KV head, or 1. center: subtracted from rows (or null). score_bias: see `ProjectArgs`, `of_center` the KV head's center.
__device__ __forceinline__ void project_rows(Space& space, const u8* from, u8* to, const float* matrix, int slice,
                                             i64 b_, i64 h_, i64 s_, int each, int h, int heads, int first, int rows,
                                             int tokens, const float* center, float* score_bias,
                                             const float* of_center) {
  auto& x = space.x;
  auto& partial = space.partial;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, column = COLUMNS * slice + lane;
  auto locate = [&](int r, int& b, int& head, int& token) {
    token = r % tokens;
    head = h * each + r / tokens % each;
    b = r / tokens / each;
  };
  float w[SPAN];
#pragma unroll
  for (int i = 0; i < SPAN; i++) w[i] = column < DIM ? matrix[(warp * SPAN + i) * DIM + column] : 0.f;
  for (int i = threadIdx.x; i < EACH * DIM / 2; i += THREADS) {
    const int j = i / (DIM / 2), c = i % (DIM / 2);
    int b, head, token;
    locate(min(first + j, rows - 1), b, head, token);
    const u32 pair = reinterpret_cast<const u32*>(from + 2 * (b * b_ + head * h_ + token * s_))[c];
    x[j][2 * c] = to_float((u16)pair) - (center ? center[2 * c] : 0.f);
    x[j][2 * c + 1] = to_float((u16)(pair >> 16)) - (center ? center[2 * c + 1] : 0.f);
  }
  __syncthreads();
  for (int j = warp; score_bias && slice == 0 && j < EACH && first + j < rows; j += WARPS) {
    float sum = 0.f;
    for (int c = lane; c < DIM; c += 32) sum += x[j][c] * of_center[c];
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    int b, head, token;
    locate(first + j, b, head, token);
    if (lane == 0) score_bias[((i64)b * heads * each + head) * tokens + token] = sum;
  }
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < SPAN; i++) sum += x[j][warp * SPAN + i] * w[i];
    partial[warp][j][lane] = sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < EACH * COLUMNS / 2; i += THREADS) {
    const int j = i / (COLUMNS / 2), c = i % (COLUMNS / 2) * 2;
    if (first + j >= rows || COLUMNS * slice + c >= DIM) continue;
    float low = 0.f, high = 0.f;
#pragma unroll
    for (int s = 0; s < WARPS; s++) {
      low += partial[s][j][c];
      high += partial[s][j][c + 1];
    }
    int b, head, token;
    locate(first + j, b, head, token);
    reinterpret_cast<u32*>(to)[((((i64)b * heads * each + head) * tokens + token) * DIM + COLUMNS * slice + c) / 2] =
        pack_model(low, high);
  }
}

// Grid: CTAs for queries, then keys, then values.
extern "C" __global__ void __launch_bounds__(THREADS) project(const __grid_constant__ ProjectArgs a) {
  __shared__ Space space;
  let_next_begin();
  const int groups = a.q_heads / a.heads, rows_k = a.batch * a.tokens, rows_q = rows_k * groups;
  const int blocks_q = (rows_q + EACH - 1) / EACH * BANDS,
            blocks_k = (rows_k + EACH - 1) / EACH * BANDS;  // CTAs of a KV head
  int cta = blockIdx.x;
  auto center_of = [&](int h) { return a.k_center ? a.k_center + h * a.matrix_h : nullptr; };
  if (cta < blocks_q * a.heads) {
    const int h = cta / blocks_q, at = cta % blocks_q;
    project_rows(space, a.q, a.q_out, a.q_matrix + h * a.matrix_h, at % BANDS, a.q_b, a.q_h, a.q_s, groups, h, a.heads,
                 at / BANDS * EACH, rows_q, a.tokens, nullptr, a.score_bias, center_of(h));
    return;
  }
  cta -= blocks_q * a.heads;
  if (cta < blocks_k * a.heads) {
    const int h = cta / blocks_k, at = cta % blocks_k;
    project_rows(space, a.k, a.k_out, a.k_matrix + h * a.matrix_h, at % BANDS, a.k_b, a.k_h, a.k_s, 1, h, a.heads,
                 at / BANDS * EACH, rows_k, a.tokens, center_of(h), nullptr, nullptr);
    return;
  }
#if ROTATED
  cta -= blocks_k * a.heads;
  const int lane = threadIdx.x & 31, r = cta * (THREADS / 32) + (threadIdx.x >> 5);
  if (r >= rows_k * a.heads) return;
  const int token = r % a.tokens, h = r / a.tokens % a.heads, b = r / a.tokens / a.heads;
  transform_token<DIM_V>(a.v + 2 * (b * a.v_b + h * a.v_h + token * a.v_s), a.v_out + 2 * (i64)r * DIM_V, nullptr,
                         lane);
#endif
}
