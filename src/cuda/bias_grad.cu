/* SPDX-License-Identifier: Apache-2.0
 *
 * d[e][n] = sum over the rows r of e of weight(r) v[src(r),n].
 *
 * Two levels: a warp sums 256 columns of one piece of at most PIECE rows (rows.cuh), a lane eight of them, into scratch; then
 * the pieces of an expert are summed in order. Four or eight rows are asked for before the first is added. Bound by reading v once;
 * the sums in between are 4/PIECE bytes a byte of fp32.
 * Invariant    the order of a sum depends on the offsets alone. Experts with no rows give 0, or leave d when accumulating. */
#include "launch.h"
#include "rows.cuh"
#include "vector.cuh"

enum {
  ANY = MOE_DTYPE_DEFAULT, /* stands for rows that are not whole, aligned eights */
  PIECE = 128,             /* rows */
  WARPS = 16,
  COLUMNS = 32 * EIGHT /* of a warp */
};

struct bias_grad_params {
  moe_bias_grad_args args;
  int64_t pieces;
  float *partial; /* [pieces, n] */
};

__device__ __forceinline__ row_groups groups_of(const moe_bias_grad_args &a) {
  return {a.row_offset, a.rows, a.experts};
}

/* The row of v that row r stands for, and its weight. */
__device__ __forceinline__ int source_of(const moe_bias_grad_args &a, int r, float *weight) {
  const int slot = a.row_slot != nullptr ? a.row_slot[r] : r;
  *weight = a.weights != nullptr ? a.weights[slot] : 1.0f;
  return a.gather_topk > 0 ? slot / (int)a.gather_topk : r;
}

/* Rows of whole, aligned eights. */
template <int DTYPE>
__device__ __forceinline__ void sum_rows(float (*sum)[EIGHT], const moe_bias_grad_args &a, const piece &rows,
                                         int column) {
  constexpr int BYTES = DTYPE == MOE_FP32 ? 4 : 2, BATCH = 16 / BYTES;
  const row_source v = {static_cast<const char *>(a.v) + (int64_t)column * BYTES, (uint32_t)(a.n * BYTES),
                        (int)a.n - column};
  for (int64_t base = rows.begin; base < rows.end; base += 32) {
    const int64_t r = base + threadIdx.x % 32;
    float weight = 0;
    const int row = r < rows.end ? source_of(a, (int)r, &weight) : -1;
#pragma unroll 1
    for (int j = 0; j < 32 && base + j < rows.end; j += BATCH)
      add_rows<DTYPE, BATCH, 1>(sum, v, row, weight, j);
  }
}

/* Of any width and alignment. */
template <>
__device__ __forceinline__ void sum_rows<ANY>(float (*sum)[EIGHT], const moe_bias_grad_args &a,
                                              const piece &rows, int column) {
  for (int64_t r = rows.begin; r < rows.end; r++) {
    float weight, v[EIGHT];
    const int64_t source = source_of(a, (int)r, &weight);
    load_eight(v, a.v, a.v_dtype, source * a.n + column, a.n - column, false);
#pragma unroll
    for (int j = 0; j < EIGHT; j++) sum[0][j] += weight * v[j];
  }
}

template <int DTYPE>
static __global__ void __launch_bounds__(WARPS * 32, 1)
    piece_kernel(const __grid_constant__ bias_grad_params p) {
  const moe_bias_grad_args &a = p.args;
  walk w = walk_from(grid_thread() / 32, grid_threads() / 32, (int)CEIL_DIV(a.n, COLUMNS));
  for (; w.row < p.pieces; walk_on(&w)) {
    const piece rows = piece_at(groups_of(a), w.row, PIECE);
    const int column = w.piece * COLUMNS + threadIdx.x % 32 * EIGHT;
    float sum[1][EIGHT] = {};
    if (rows.begin >= rows.end) continue;
    sum_rows<DTYPE>(sum, a, rows, column);
    store_eight(p.partial, MOE_FP32, w.row * a.n + column, sum[0], a.n - column,
                aligned_rows(p.partial, MOE_FP32, a.n));
  }
}

static __global__ void __launch_bounds__(WARPS * 32, 1)
    finish_kernel(const __grid_constant__ bias_grad_params p) {
  const moe_bias_grad_args &a = p.args;
  const row_groups groups = groups_of(a);
  walk w = walk_from(grid_thread(), grid_threads(), (int)a.n);
  for (; w.row < a.experts; walk_on(&w)) {
    const int64_t e = w.row, begin = offset_at(groups, e), end = offset_at(groups, e + 1);
    if (end <= begin && a.accumulate) continue;
    float sum = 0;
#pragma unroll 8
    for (int64_t i = begin / PIECE + e; begin < end && i <= (end - 1) / PIECE + e; i++)
      sum += p.partial[i * a.n + w.piece];
    if (a.accumulate) sum += moe_load(a.d, a.d_dtype, e * a.n + w.piece);
    moe_store(a.d, a.d_dtype, e * a.n + w.piece, sum);
  }
}

size_t moe_cuda_bias_grad_scratch(const moe_context *ctx, const moe_bias_grad_args *args) {
  (void)ctx;
  return (size_t)piece_count(args->rows, args->experts, PIECE) * (size_t)args->n * sizeof(float);
}

moe_status moe_cuda_bias_grad(moe_context *ctx, const moe_bias_grad_args *args, moe_stream stream) {
  const int64_t pieces = piece_count(args->rows, args->experts, PIECE),
                units = moe_cuda_units(ctx, args->sm_limit);
  const bias_grad_params p = {*args, pieces, static_cast<float *>(args->scratch)};
  const struct cuda_grid grid = grid_of_warps(units, pieces * CEIL_DIV(args->n, COLUMNS), WARPS);
  if (args->n % EIGHT != 0 || !aligned_16(args->v))
    TRY(launch("bias_grad", piece_kernel<ANY>, grid, p, stream));
  else if (args->v_dtype == MOE_FP32)
    TRY(launch("bias_grad", piece_kernel<MOE_FP32>, grid, p, stream));
  else if (args->v_dtype == MOE_BF16)
    TRY(launch("bias_grad", piece_kernel<MOE_BF16>, grid, p, stream));
  else
    TRY(launch("bias_grad", piece_kernel<MOE_FP16>, grid, p, stream));
  return launch("bias_grad", finish_kernel,
                grid_of_warps(units, CEIL_DIV(args->experts * args->n, 32), WARPS), p, stream);
}

KERNELS(bias_grad, (const void *)piece_kernel<ANY>, (const void *)piece_kernel<MOE_FP32>,
        (const void *)piece_kernel<MOE_BF16>, (const void *)piece_kernel<MOE_FP16>,
        (const void *)finish_kernel)
