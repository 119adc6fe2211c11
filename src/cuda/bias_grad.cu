/* SPDX-License-Identifier: Apache-2.0
 *
 * d[e][n] = sum over the rows r of e of weight(r) v[src(r),n].
 *
 * Two levels: a block sums one piece of at most PIECE rows (rows.cuh), a thread eight columns, into scratch; then the pieces
 * of an expert are summed in order. Bound by reading v once; the sums in between are 4/PIECE bytes a byte of fp32.
 * Invariant    the order of a sum depends on the offsets alone. Experts with no rows give 0, or leave d when accumulating. */
#include "launch.h"
#include "rows.cuh"
#include "vector.cuh"

enum {
  PIECE = 128, /* rows */
  THREADS = 64,
  COLUMNS = THREADS * EIGHT
};

struct bias_grad_params {
  moe_bias_grad_args args;
  float *partial; /* [pieces, n] */
};

__device__ __forceinline__ row_groups groups_of(const moe_bias_grad_args &a) {
  return {a.row_offset, a.rows, a.experts};
}

static __global__ void piece_kernel(const __grid_constant__ bias_grad_params p) {
  const moe_bias_grad_args &a = p.args;
  const piece rows = piece_at(groups_of(a), blockIdx.x, PIECE);
  const int64_t column = (int64_t)blockIdx.y * COLUMNS + threadIdx.x * EIGHT, count = a.n - column;
  if (rows.begin >= rows.end || count <= 0) return;
  const bool vector = aligned_rows(a.v, a.v_dtype, a.n);
  float sum[EIGHT] = {0};
#pragma unroll 4
  for (int64_t r = rows.begin; r < rows.end; r++) {
    const int64_t slot = a.row_slot != nullptr ? a.row_slot[r] : r;
    const int64_t source = a.gather_topk > 0 ? slot / a.gather_topk : r;
    const float weight = a.weights != nullptr ? a.weights[slot] : 1.0f;
    float v[EIGHT];
    load_eight(v, a.v, a.v_dtype, source * a.n + column, count, vector);
#pragma unroll
    for (int j = 0; j < EIGHT; j++) sum[j] += weight * v[j];
  }
  store_eight(p.partial, MOE_FP32, blockIdx.x * a.n + column, sum, count,
              aligned_rows(p.partial, MOE_FP32, a.n));
}

static __global__ void finish_kernel(const __grid_constant__ bias_grad_params p) {
  const moe_bias_grad_args &a = p.args;
  const row_groups groups = groups_of(a);
  const int64_t e = blockIdx.y, begin = offset_at(groups, e), end = offset_at(groups, e + 1);
  const int64_t column = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= a.n || (end <= begin && a.accumulate)) return;
  float sum = 0;
#pragma unroll 8
  for (int64_t i = begin / PIECE + e; begin < end && i <= (end - 1) / PIECE + e; i++)
    sum += p.partial[i * a.n + column];
  if (a.accumulate) sum += moe_load(a.d, a.d_dtype, e * a.n + column);
  moe_store(a.d, a.d_dtype, e * a.n + column, sum);
}

size_t moe_cuda_bias_grad_scratch(const moe_context *ctx, const moe_bias_grad_args *args) {
  (void)ctx;
  return (size_t)piece_count(args->rows, args->experts, PIECE) * (size_t)args->n * sizeof(float);
}

moe_status moe_cuda_bias_grad(moe_context *ctx, const moe_bias_grad_args *args, moe_stream stream) {
  (void)ctx;
  const bias_grad_params p = {*args, static_cast<float *>(args->scratch)};
  const int64_t pieces = piece_count(args->rows, args->experts, PIECE);
  TRY(launch("bias_grad", piece_kernel, {pieces, CEIL_DIV(args->n, COLUMNS), 1, THREADS, 0}, p, stream));
  return launch("bias_grad", finish_kernel, {CEIL_DIV(args->n, 128), args->experts, 1, 128, 0}, p, stream);
}

KERNELS(bias_grad, (const void *)piece_kernel, (const void *)finish_kernel)
