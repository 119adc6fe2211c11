/* SPDX-License-Identifier: Apache-2.0
 *
 * What: the tokens' rows, copied out in the order of the experts.
 * Idea: each row is read, weighted and written on its own, in blocks that stay in the first-level cache.
 * Invariant: rows from row_offset[E] on are not touched; a row without a slot is 0. */
#include "cpu.h"

#include <string.h>

enum {
  BLOCK = 1024
}; /* floats */

size_t moe_cpu_permute_scratch(const moe_context *ctx, const moe_permute_args *args) {
  (void)ctx, (void)args;
  return 0;
}

static void permute_block(const moe_permute_args *args, int64_t r, int64_t first, int64_t n) {
  float values[BLOCK];
  const int64_t slot = args->row_slot[r];
  if (slot < 0) {
    memset(values, 0, sizeof values);
  } else {
    moe_cpu_read(values, args->x, args->dtype, slot / args->topk * args->hidden + first, n);
    const float weight = args->weights != NULL ? args->weights[slot] : 1.0f;
    for (int64_t i = 0; i < n; i++) values[i] *= weight;
  }
  moe_cpu_write(args->y, args->dtype, r * args->hidden + first, values, n);
}

moe_status moe_cpu_permute(moe_context *ctx, const moe_permute_args *args, moe_stream stream) {
  (void)stream;
  const int64_t rows = moe_cpu_offset(args->row_offset, args->experts, args->rows);
#pragma omp parallel for collapse(2) schedule(static) num_threads(ctx->units)
  for (int64_t r = 0; r < rows; r++)
    for (int64_t first = 0; first < args->hidden; first += BLOCK)
      permute_block(args, r, first, args->hidden - first < BLOCK ? args->hidden - first : BLOCK);
  return MOE_OK;
}
