/* SPDX-License-Identifier: Apache-2.0
 *
 * What: rows of any format as fp32 and back, the conversion op, the copy and the zero fill.
 * Idea: the format is switched on once a call, so that each loop has one codec in it and vectorises;
 * everything else of the CPU back end works on fp32 blocks that these two functions fill and drain.
 * Invariant: element i of the result depends on element i of the source only. */
#include "cpu.h"

#include "../format.h"

enum {
  BLOCK = 2048
}; /* floats on the stack: 8 KiB stays in the first-level cache */

void moe_cpu_read(float *restrict dst, const void *restrict src, moe_dtype dtype, int64_t first, int64_t n) {
  switch ((int)dtype) {
#define MOE_FORMAT(ENUM, name, type, codec)                               \
  case ENUM: {                                                            \
    const type *restrict from = (const type *)src + first;                \
    for (int64_t i = 0; i < n; i++) dst[i] = moe_decode_##codec(from[i]); \
    break;                                                                \
  }
#include "../format.def"
#undef MOE_FORMAT
  default: break;
  }
}

void moe_cpu_write(void *restrict dst, moe_dtype dtype, int64_t first, const float *restrict src, int64_t n) {
  switch ((int)dtype) {
#define MOE_FORMAT(ENUM, name, type, codec)                             \
  case ENUM: {                                                          \
    type *restrict to = (type *)dst + first;                            \
    for (int64_t i = 0; i < n; i++) to[i] = moe_encode_##codec(src[i]); \
    break;                                                              \
  }
#include "../format.def"
#undef MOE_FORMAT
  default: break;
  }
}

size_t moe_cpu_convert_scratch(const moe_context *ctx, const moe_convert_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cpu_convert(moe_context *ctx, const moe_convert_args *args, moe_stream stream) {
  (void)stream;
  const int64_t blocks = CEIL_DIV(args->count, BLOCK);
#pragma omp parallel for schedule(static) num_threads(ctx->units) if (blocks > 1)
  for (int64_t b = 0; b < blocks; b++) {
    float values[BLOCK];
    const int64_t first = b * BLOCK;
    const int64_t n = args->count - first < BLOCK ? args->count - first : BLOCK;
    moe_cpu_read(values, args->x, args->x_dtype, first, n);
    moe_cpu_write(args->y, args->y_dtype, first, values, n);
  }
  return MOE_OK;
}

enum {
  PIECE = 1 << 20
}; /* bytes a thread copies or clears at a time */

static size_t pieces_of(size_t bytes) { return CEIL_DIV(bytes, (size_t)PIECE); }
static size_t piece_bytes(size_t bytes, size_t first) {
  return bytes - first < PIECE ? bytes - first : PIECE;
}

size_t moe_cpu_copy_scratch(const moe_context *ctx, const moe_copy_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cpu_copy(moe_context *ctx, const moe_copy_args *args, moe_stream stream) {
  (void)stream;
  const size_t pieces = pieces_of(args->bytes);
#pragma omp parallel for schedule(static) num_threads(ctx->units) if (pieces > 1)
  for (size_t i = 0; i < pieces; i++) {
    const size_t first = i * PIECE;
    memcpy((char *)args->dst + first, (const char *)args->src + first, piece_bytes(args->bytes, first));
  }
  return MOE_OK;
}

size_t moe_cpu_zero_scratch(const moe_context *ctx, const moe_zero_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cpu_zero(moe_context *ctx, const moe_zero_args *args, moe_stream stream) {
  (void)stream;
  const size_t pieces = pieces_of(args->bytes);
#pragma omp parallel for schedule(static) num_threads(ctx->units) if (pieces > 1)
  for (size_t i = 0; i < pieces; i++) {
    const size_t first = i * PIECE;
    memset((char *)args->data + first, 0, piece_bytes(args->bytes, first));
  }
  return MOE_OK;
}
