/* SPDX-License-Identifier: Apache-2.0
 * The few things every file of src/ uses: errors, sizes, the one allocation hook. */
#pragma once

#include <stdbool.h>

#include "moeblas.h"

/* Records the sentence and returns `status`. The format follows printf. */
moe_status moe_fail(moe_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* At the public edge: CHECK(condition that must hold, STATUS, "op: argument = found, wanted ...", ...). */
#define CHECK(condition, status, ...)                         \
  do {                                                        \
    if (!(condition)) return moe_fail((status), __VA_ARGS__); \
  } while (0)

/* Inside: pass a failure on. */
#define TRY(call)                          \
  do {                                     \
    moe_status status_ = (call);           \
    if (status_ != MOE_OK) return status_; \
  } while (0)

#define CEIL_DIV(a, b) (((a) + (b)-1) / (b))
#define ALIGN_UP(a, b) (CEIL_DIV(a, b) * (b))
#define MOE_ALIGN      256 /* of everything carved from a workspace, bytes */

/* All host memory of the library goes through these two (tests wrap them to make the n-th allocation fail). */
void *moe_host_alloc(size_t bytes); /* zeroed; NULL on failure */
void moe_host_free(void *pointer);
