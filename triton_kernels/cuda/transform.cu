// Transforms new keys (or values) and queries in one launch. A warp takes a row of DIM channels.
//
// Steps with few query rows do not need this launch: `attend.cu` transforms rows when it reads them.
#include "rotate.cuh"

struct TransformArgs {
  const u8 *q, *k;
  u8 *q_out, *k_out;                 // contiguous
  const float *q_scale, *k_scale;    // factors, or null; those of KV head h begin at h * scale_h
  i64 q_b, q_h, q_s, k_b, k_h, k_s;  // strides in elements; of channels: 1
  i64 rows;                          // batch x (q_heads + heads) x tokens
  i64 scale_h;
  int q_heads, heads, tokens;
};
static_assert(sizeof(TransformArgs) == ARGUMENT_BYTES, "arguments.py declares other fields");

extern "C" __global__ void __launch_bounds__(128) transform(const __grid_constant__ TransformArgs a) {
  const int lane = threadIdx.x & 31;
  const i64 r = (i64)blockIdx.x * 4 + (threadIdx.x >> 5);
  if (r >= a.rows) return;
  const int token = r % a.tokens, all = a.q_heads + a.heads;
  const i64 b = r / a.tokens / all;
  int h = r / a.tokens % all;
  const bool is_q = h < a.q_heads;
  if (!is_q) h -= a.q_heads;
  const u8* from =
      (is_q ? a.q : a.k) + 2 * (is_q ? b * a.q_b + h * a.q_h + token * a.q_s : b * a.k_b + h * a.k_h + token * a.k_s);
  u8* to = (is_q ? a.q_out : a.k_out) + 2 * (((b * (is_q ? a.q_heads : a.heads) + h) * a.tokens + token) * DIM);
  transform_token<DIM>(from, to, is_q ? a.q_scale + h * a.heads / a.q_heads * a.scale_h : a.k_scale + h * a.scale_h,
                       lane);
}
