/* SPDX-License-Identifier: Apache-2.0
 *
 * rows[r,:] = weight(r) x[slot(r)/topk,:], r < row_offset[E].
 *
 * A warp moves a segment of SPAN x 256 columns of one row; neighbours move neighbours. All loads of a lane are under way
 * before the first is stored. Bound by bandwidth: bytes read plus bytes written.
 * Invariant    a row without a slot is 0; rows from row_offset[E] on are not touched.
 * Limits       none; 16-byte accesses if hidden is a multiple of 16 bytes. */
#include "launch.h"
#include "rows.cuh"
#include "vector.cuh"

enum {
  SPAN = 4,
  SPAN_COLUMNS = 32 * EIGHT
};

static __global__ void __launch_bounds__(1024, 1) permute_kernel(const __grid_constant__ moe_permute_args p) {
  const row_groups groups = {p.row_offset, p.rows, p.experts};
  const int64_t rows = offset_at(groups, p.experts);
  const bool vector = aligned_rows(p.x, p.dtype, p.hidden) && aligned_rows(p.y, p.dtype, p.hidden);
  walk w = walk_from(grid_thread() / 32, grid_threads() / 32, (int)CEIL_DIV(p.hidden, SPAN * SPAN_COLUMNS));
  for (; w.row < rows; walk_on(&w)) {
    const int64_t first = (int64_t)w.piece * (SPAN * SPAN_COLUMNS) + threadIdx.x % 32 * EIGHT;
    const int slot = p.row_slot[w.row];
    const int64_t from = slot >= 0 ? slot / (int)p.topk * p.hidden : 0;
    const float weight = slot >= 0 && p.weights != nullptr ? p.weights[slot] : 1.0f;
    float v[SPAN][EIGHT] = {};
#pragma unroll
    for (int c = 0; c < SPAN; c++) {
      const int64_t column = first + c * SPAN_COLUMNS;
      if (slot >= 0) load_eight(v[c], p.x, p.dtype, from + column, p.hidden - column, vector);
    }
#pragma unroll
    for (int c = 0; c < SPAN; c++) {
      const int64_t column = first + c * SPAN_COLUMNS;
#pragma unroll
      for (int j = 0; j < EIGHT; j++) v[c][j] *= weight;
      store_eight(p.y, p.dtype, w.row * p.hidden + column, v[c], p.hidden - column, vector);
    }
  }
}

size_t moe_cuda_permute_scratch(const moe_context *ctx, const moe_permute_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cuda_permute(moe_context *ctx, const moe_permute_args *args, moe_stream stream) {
  const int64_t segments = CEIL_DIV(args->hidden, SPAN * SPAN_COLUMNS);
  const struct cuda_grid grid = grid_of_warps(moe_cuda_units(ctx, args->sm_limit), args->rows * segments, 32);
  return launch("permute", permute_kernel, grid, *args, stream);
}

KERNELS(permute, (const void *)permute_kernel)
