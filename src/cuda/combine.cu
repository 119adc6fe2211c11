/* SPDX-License-Identifier: Apache-2.0
 *
 * out[t,:] = addend[t,:] + sum over ascending j of weights[t,j] y[slot_row[t,j],:]
 * and its gradient: dy[r,:] = weight dout[token,:], dweights[t,j] = <dout[t,:], y[r,:]>.
 *
 * Forward      a thread sums eight columns of one token over its slots, in their order: gather, never scatter.
 * Backward     a warp has one slot; its lanes walk over the columns, eight at a time, and the 32 sums of the dot product
 *              are added by a fixed tree.
 * Invariant    results depend on a token and its slots alone. Products are rounded before they are added, as on the CPU.
 * Limits       none; 16-byte accesses if rows are multiples of 16 bytes. Bound by bandwidth. */
#include "launch.h"
#include "rows.cuh"
#include "vector.cuh"

/* Rows from here on are skipped. */
__device__ __forceinline__ int64_t row_limit(const int32_t *row_end, int64_t rows) {
  return row_end != nullptr && *row_end < rows ? *row_end : rows;
}

/* The row of slot s, or -1 when it is not below `limit`. */
__device__ __forceinline__ int64_t row_of(const int32_t *slot_row, int64_t s, int64_t limit) {
  const int64_t row = slot_row != nullptr ? slot_row[s] : s;
  return row >= 0 && row < limit ? row : -1;
}

static __global__ void combine_kernel(const __grid_constant__ moe_combine_args p) {
  const int64_t limit = row_limit(p.row_end, p.rows), pieces = CEIL_DIV(p.hidden, EIGHT);
  const bool in_vector = aligned_rows(p.y, p.y_dtype, p.hidden);
  const bool out_vector = aligned_rows(p.out, p.out_dtype, p.hidden);
  const bool add_vector = aligned_rows(p.addend, MOE_FP32, p.hidden);
  for (int64_t i = grid_thread(); i < p.tokens * pieces; i += grid_threads()) {
    const int64_t t = i / pieces, column = (i - t * pieces) * EIGHT, count = p.hidden - column;
    float sum[EIGHT] = {0}, v[EIGHT];
    if (p.addend != nullptr) load_eight(sum, p.addend, MOE_FP32, t * p.hidden + column, count, add_vector);
#pragma unroll 4
    for (int64_t s = t * p.topk; s < (t + 1) * p.topk; s++) {
      const int64_t r = row_of(p.slot_row, s, limit);
      if (r < 0) continue;
      const float weight = p.weights != nullptr ? p.weights[s] : 1.0f;
      load_eight(v, p.y, p.y_dtype, r * p.hidden + column, count, in_vector);
#pragma unroll
      for (int j = 0; j < EIGHT; j++) sum[j] += weight * v[j];
    }
    store_eight(p.out, p.out_dtype, t * p.hidden + column, sum, count, out_vector);
  }
}

/* Slot s with row r: dy and what this lane adds up of the dot product. */
__device__ __forceinline__ float backward_slot(const moe_combine_backward_args &p, int64_t s, int64_t r) {
  const float weight = p.weights != nullptr ? p.weights[s] : 1.0f;
  const int64_t from = s / p.topk * p.hidden, to = r * p.hidden;
  const bool dout_vector = aligned_rows(p.dout, p.dout_dtype, p.hidden);
  const bool y_vector = aligned_rows(p.y, p.y_dtype, p.hidden),
             dy_vector = aligned_rows(p.dy, p.y_dtype, p.hidden);
  float dot = 0;
  for (int64_t column = threadIdx.x % 32 * EIGHT; column < p.hidden; column += 32 * EIGHT) {
    const int64_t count = p.hidden - column;
    float dout[EIGHT], v[EIGHT];
    load_eight(dout, p.dout, p.dout_dtype, from + column, count, dout_vector);
    if (p.dweights != nullptr) {
      load_eight(v, p.y, p.y_dtype, to + column, count, y_vector);
#pragma unroll
      for (int j = 0; j < EIGHT; j++) dot += dout[j] * v[j];
    }
    if (p.dy != nullptr) {
#pragma unroll
      for (int j = 0; j < EIGHT; j++) v[j] = weight * dout[j];
      store_eight(p.dy, p.y_dtype, to + column, v, count, dy_vector);
    }
  }
  return dot;
}

static __global__ void combine_backward_kernel(const __grid_constant__ moe_combine_backward_args p) {
  const int64_t limit = row_limit(p.row_end, p.rows);
  for (int64_t s = grid_thread() / 32; s < p.tokens * p.topk; s += grid_threads() / 32) {
    const int64_t r = row_of(p.slot_row, s, limit);
    float dot = r >= 0 ? backward_slot(p, s, r) : 0;
    for (int d = 16; d > 0; d /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, d);
    if (p.dweights != nullptr && threadIdx.x % 32 == 0) p.dweights[s] = dot;
  }
}

size_t moe_cuda_combine_scratch(const moe_context *ctx, const moe_combine_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cuda_combine(moe_context *ctx, const moe_combine_args *args, moe_stream stream) {
  (void)ctx;
  return launch("combine", combine_kernel, grid_over(args->tokens * CEIL_DIV(args->hidden, EIGHT)), *args,
                stream);
}

size_t moe_cuda_combine_backward_scratch(const moe_context *ctx, const moe_combine_backward_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cuda_combine_backward(moe_context *ctx, const moe_combine_backward_args *args,
                                     moe_stream stream) {
  (void)ctx;
  return launch("combine_backward", combine_backward_kernel, grid_over(args->tokens * args->topk * 32), *args,
                stream);
}

KERNELS(combine, (const void *)combine_kernel, (const void *)combine_backward_kernel)
