/* SPDX-License-Identifier: Apache-2.0
 * What the files of the CPU back end share: the ops, and rows of any format as fp32. */
#pragma once

#include <omp.h>

#include "../backend.h"
#include "../util.h"

#define MOE_OP(name)                                                                             \
  moe_status moe_cpu_##name(moe_context *ctx, const moe_##name##_args *args, moe_stream stream); \
  size_t moe_cpu_##name##_scratch(const moe_context *ctx, const moe_##name##_args *args);
#include "../ops.def"
#undef MOE_OP

/* Memory and time of the table in backend.h (memory.c). */
moe_status moe_cpu_memory_alloc(moe_context *ctx, size_t bytes, void **out);
void moe_cpu_memory_free(moe_context *ctx, void *memory);
moe_status moe_cpu_memory_copy(moe_context *ctx, void *dst, const void *src, size_t bytes);
moe_status moe_cpu_memory_fill(moe_context *ctx, void *dst, int byte, size_t bytes);
moe_status moe_cpu_synchronize(moe_context *ctx, moe_stream stream);
moe_status moe_cpu_stream_create(moe_context *ctx, moe_stream *out);
void moe_cpu_stream_destroy(moe_context *ctx, moe_stream stream);
moe_status moe_cpu_event_create(moe_context *ctx, void **event);
moe_status moe_cpu_event_record(moe_context *ctx, void *event, moe_stream stream);
moe_status moe_cpu_event_elapsed_us(moe_context *ctx, void *from, void *to, double *out);
void moe_cpu_event_destroy(moe_context *ctx, void *event);

/* dst[0..n) = elements first .. first+n-1 of src, as fp32; and back, rounded to nearest even (convert.c). */
void moe_cpu_read(float *dst, const void *src, moe_dtype dtype, int64_t first, int64_t n);
void moe_cpu_write(void *dst, moe_dtype dtype, int64_t first, const float *src, int64_t n);

/* Offset i clamped into 0 .. rows, NULL standing for one expert with all rows. */
static inline int64_t moe_cpu_offset(const int32_t *row_offset, int64_t i, int64_t rows) {
  if (row_offset == NULL) return i == 0 ? 0 : rows;
  const int64_t offset = row_offset[i];
  return offset < 0 ? 0 : offset > rows ? rows : offset;
}
