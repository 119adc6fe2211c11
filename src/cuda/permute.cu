/* SPDX-License-Identifier: Apache-2.0
 *
 * rows[r,:] = weight(r) x[slot(r)/topk,:], r < row_offset[E].
 *
 * A thread moves eight columns of one row; neighbours move neighbours. Bound by bandwidth: bytes read plus bytes written.
 * Invariant    a row without a slot is 0; rows from row_offset[E] on are not touched.
 * Limits       none; 16-byte accesses if hidden is a multiple of 16 bytes. */
#include "launch.h"
#include "rows.cuh"
#include "vector.cuh"

static __global__ void permute_kernel(const __grid_constant__ moe_permute_args p) {
  const row_groups groups = {p.row_offset, p.rows, p.experts};
  const int64_t rows = offset_at(groups, p.experts), pieces = CEIL_DIV(p.hidden, EIGHT);
  const bool vector = aligned_rows(p.x, p.dtype, p.hidden) && aligned_rows(p.y, p.dtype, p.hidden);
  for (int64_t i = grid_thread(); i < rows * pieces; i += grid_threads()) {
    const int64_t r = i / pieces, column = (i - r * pieces) * EIGHT, count = p.hidden - column;
    const int64_t slot = p.row_slot[r];
    float v[EIGHT] = {0};
    if (slot >= 0) {
      const float weight = p.weights != nullptr ? p.weights[slot] : 1.0f;
      load_eight(v, p.x, p.dtype, slot / p.topk * p.hidden + column, count, vector);
#pragma unroll
      for (int j = 0; j < EIGHT; j++) v[j] *= weight;
    }
    store_eight(p.y, p.dtype, r * p.hidden + column, v, count, vector);
  }
}

size_t moe_cuda_permute_scratch(const moe_context *ctx, const moe_permute_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cuda_permute(moe_context *ctx, const moe_permute_args *args, moe_stream stream) {
  (void)ctx;
  return launch("permute", permute_kernel, grid_over(args->rows * CEIL_DIV(args->hidden, EIGHT)), *args,
                stream);
}

KERNELS(permute, (const void *)permute_kernel)
