/* SPDX-License-Identifier: Apache-2.0
 *
 * Bias gradients, d[e] = sum over its rows of weight times the row of v.
 * A task is a block of columns of one expert; it adds up whole rows in fp32, in order, so that each column is one chain
 * over ascending rows on any number of threads. */
#include <string.h>

#include "cpu.h"

#include "kernel.h"

enum {
  BLOCK = 1024
};

static void add_row(const moe_bias_grad_args *args, const struct moe_cpu_kernel *kernel, int64_t row,
                    int64_t n0, int64_t n, float *values, float *sum) {
  const int64_t slot = args->row_slot ? args->row_slot[row] : row;
  const int64_t source = args->gather_topk > 0 ? slot / args->gather_topk : row;
  const float weight = args->weights ? args->weights[slot] : 1.0f;
  kernel->read(values, n, args->v, args->v_dtype, source * args->n + n0, 0, 1, n);
  for (int64_t j = 0; j < n; j++) sum[j] += weight * values[j];
}

static void sum_rows(const moe_bias_grad_args *args, const struct moe_cpu_kernel *kernel, int64_t e,
                     int64_t n0, float *sum, float *values) {
  const int64_t n = args->n - n0 < BLOCK ? args->n - n0 : BLOCK, first = e * args->n + n0;
  const int64_t begin = moe_cpu_offset(args->row_offset, e, args->rows);
  const int64_t end = moe_cpu_offset(args->row_offset, e + 1, args->rows);
  if (end <= begin && args->accumulate) return;
  memset(sum, 0, (size_t)n * sizeof *sum);
  for (int64_t row = begin; row < end; row++) add_row(args, kernel, row, n0, n, values, sum);
  if (args->accumulate) {
    kernel->read(values, n, args->d, args->d_dtype, first, 0, 1, n);
    for (int64_t j = 0; j < n; j++) sum[j] += values[j];
  }
  moe_cpu_write(args->d, args->d_dtype, first, sum, n);
}

size_t moe_cpu_bias_grad_scratch(const moe_context *ctx, const moe_bias_grad_args *args) {
  (void)args;
  return (size_t)ctx->units * 2 * BLOCK * sizeof(float);
}

moe_status moe_cpu_bias_grad(moe_context *ctx, const moe_bias_grad_args *args, moe_stream stream) {
  (void)stream;
  const int64_t blocks = CEIL_DIV(args->n, BLOCK);
#pragma omp parallel num_threads(ctx->units)
  {
    float *sum = (float *)args->scratch + (int64_t)omp_get_thread_num() * 2 * BLOCK;
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < args->experts * blocks; task++)
      sum_rows(args, ctx->state, task / blocks, task % blocks * BLOCK, sum, sum + BLOCK);
  }
  return MOE_OK;
}
