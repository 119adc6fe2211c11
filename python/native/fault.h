/* SPDX-License-Identifier: Apache-2.0
 * A refusal on its way to XLA: the sentence travels in the caller's memory until it becomes an error of XLA's. */
#pragma once

#include "moeblas.h"

struct fault {
  moe_status status;
  char text[512];
};

/* Writes the sentence and returns `status`. The format follows printf. */
moe_status moe_xla_fail(struct fault *fault, moe_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Hands on what a call of the library says. */
moe_status moe_xla_check(struct fault *fault, moe_status status);

#define CHECK(condition, fault, status, ...)                               \
  do {                                                                     \
    if (!(condition)) return moe_xla_fail((fault), (status), __VA_ARGS__); \
  } while (0)

#define TRY(call)                          \
  do {                                     \
    const moe_status status_ = (call);     \
    if (status_ != MOE_OK) return status_; \
  } while (0)
