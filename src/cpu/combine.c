/* SPDX-License-Identifier: Apache-2.0
 *
 * What: each token's weighted sum of its experts' rows, and the gradient of that.
 * Idea: gather, never scatter: a token reads the rows of its slots in ascending order, so no two threads
 * write the same element and the order of every sum is fixed. Work goes by blocks of columns that stay in
 * the first-level cache.
 * Invariant: results do not depend on the number of threads, nor on the other tokens. */
#include "cpu.h"

#include <string.h>

#define LANES 16 /* partial sums of a dot product */
enum {
  BLOCK = 1024
}; /* floats; a multiple of LANES, so that blocks do not change who adds what */

size_t moe_cpu_combine_scratch(const moe_context *ctx, const moe_combine_args *args) {
  (void)ctx, (void)args;
  return 0;
}

/* Rows from here on are skipped. */
static int64_t row_limit(const int32_t *row_end, int64_t rows) {
  return row_end != NULL && *row_end < rows ? *row_end : rows;
}

/* The row of slot s, or -1 when it is not below `limit`. */
static int64_t row_of(const int32_t *slot_row, int64_t s, int64_t limit) {
  const int64_t row = slot_row != NULL ? slot_row[s] : s;
  return row >= 0 && row < limit ? row : -1;
}

static int64_t block_size(int64_t hidden, int64_t first) {
  return hidden - first < BLOCK ? hidden - first : BLOCK;
}

static void combine_block(const moe_combine_args *args, int64_t t, int64_t first, int64_t limit) {
  float sum[BLOCK] = {0}, row[BLOCK];
  const int64_t n = block_size(args->hidden, first);
  if (args->addend != NULL) moe_cpu_read(sum, args->addend, MOE_FP32, t * args->hidden + first, n);
  for (int64_t s = t * args->topk; s < (t + 1) * args->topk; s++) {
    const int64_t r = row_of(args->slot_row, s, limit);
    if (r < 0) continue;
    const float weight = args->weights != NULL ? args->weights[s] : 1.0f;
    moe_cpu_read(row, args->y, args->y_dtype, r * args->hidden + first, n);
    for (int64_t i = 0; i < n; i++) sum[i] += weight * row[i];
  }
  moe_cpu_write(args->out, args->out_dtype, t * args->hidden + first, sum, n);
}

moe_status moe_cpu_combine(moe_context *ctx, const moe_combine_args *args, moe_stream stream) {
  (void)stream;
  const int64_t limit = row_limit(args->row_end, args->rows);
#pragma omp parallel for collapse(2) schedule(static) num_threads(ctx->units)
  for (int64_t t = 0; t < args->tokens; t++)
    for (int64_t first = 0; first < args->hidden; first += BLOCK) combine_block(args, t, first, limit);
  return MOE_OK;
}

size_t moe_cpu_combine_backward_scratch(const moe_context *ctx, const moe_combine_backward_args *args) {
  (void)ctx, (void)args;
  return 0;
}

/* sum[i % LANES] += a[i] b[i]. The lanes are a local array while they add up, so that they live in
 * registers. */
static void dot_lanes(float *sum, const float *restrict a, const float *restrict b, int64_t n) {
  float lane[LANES];
  memcpy(lane, sum, sizeof lane);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int l = 0; l < LANES; l++) lane[l] += a[i + l] * b[i + l];
  for (int l = 0; i + l < n; l++) lane[l] += a[i + l] * b[i + l];
  memcpy(sum, lane, sizeof lane);
}

static float sum_lanes(float *lane) {
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int l = 0; l < half; l++) lane[l] += lane[l + half];
  return lane[0];
}

/* Slot s with row r >= 0. */
static void backward_slot(const moe_combine_backward_args *args, int64_t s, int64_t r) {
  float dout[BLOCK], row[BLOCK], lane[LANES] = {0};
  const float weight = args->weights != NULL ? args->weights[s] : 1.0f;
  for (int64_t first = 0; first < args->hidden; first += BLOCK) {
    const int64_t n = block_size(args->hidden, first);
    moe_cpu_read(dout, args->dout, args->dout_dtype, s / args->topk * args->hidden + first, n);
    if (args->dweights != NULL) {
      moe_cpu_read(row, args->y, args->y_dtype, r * args->hidden + first, n);
      dot_lanes(lane, dout, row, n);
    }
    if (args->dy != NULL) {
      for (int64_t i = 0; i < n; i++) row[i] = weight * dout[i];
      moe_cpu_write(args->dy, args->y_dtype, r * args->hidden + first, row, n);
    }
  }
  if (args->dweights != NULL) args->dweights[s] = sum_lanes(lane);
}

moe_status moe_cpu_combine_backward(moe_context *ctx, const moe_combine_backward_args *args,
                                    moe_stream stream) {
  (void)stream;
  const int64_t limit = row_limit(args->row_end, args->rows);
#pragma omp parallel for schedule(static) num_threads(ctx->units)
  for (int64_t s = 0; s < args->tokens * args->topk; s++) {
    const int64_t r = row_of(args->slot_row, s, limit);
    if (r >= 0)
      backward_slot(args, s, r);
    else if (args->dweights != NULL)
      args->dweights[s] = 0;
  }
  return MOE_OK;
}
