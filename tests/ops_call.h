/* SPDX-License-Identifier: Apache-2.0
 *
 * What: call_<op>, which calls an op of the CPU back end the way src/ does, and buffers that notice
 * overruns.
 * Idea: scratch is a heap block of exactly the bytes asked for, filled with NaN: a sanitizer sees one byte
 * too far, and reading before writing shows in the result. Outputs lie between guard bands, which need no
 * sanitizer.
 * Invariant: nothing here computes what an op computes. */
#pragma once

#include <math.h>

#include "cpu/cpu.h"
#include "format.h"
#include "test.h"

enum {
  GUARD = 64,
  GUARD_BYTE = 0xa5
};

/* A block of `bytes` NaN-filled bytes between guard bands; exits if memory is short, as a test cannot go
 * on. */
static inline void *guarded(size_t bytes) {
  char *base = malloc(bytes + 3 * GUARD);
  if (base == NULL) exit(2);
  memcpy(base, &bytes, sizeof bytes);
  memset(base + GUARD, GUARD_BYTE, bytes + 2 * GUARD);
  memset(base + 2 * GUARD, 0xff, bytes);
  return base + 2 * GUARD;
}

static inline int guards_intact(const void *block) {
  const unsigned char *data = block;
  size_t bytes;
  memcpy(&bytes, data - 2 * GUARD, sizeof bytes);
  for (int i = 0; i < GUARD; i++)
    if (data[i - GUARD] != GUARD_BYTE || data[bytes + (size_t)i] != GUARD_BYTE) return 0;
  return 1;
}

static inline void guarded_free(void *block) {
  EXPECT(guards_intact(block), "something was written outside of an output");
  free((char *)block - 2 * GUARD);
}

#define MOE_OP(name)                                                               \
  static inline moe_status call_##name(moe_##name##_args *args, int threads) {     \
    moe_context ctx = {.units = threads};                                          \
    args->size = sizeof *args;                                                     \
    args->scratch_bytes = moe_cpu_##name##_scratch(&ctx, args);                    \
    args->scratch = args->scratch_bytes > 0 ? malloc(args->scratch_bytes) : NULL;  \
    if (args->scratch_bytes > 0) memset(args->scratch, 0xff, args->scratch_bytes); \
    const moe_status status = moe_cpu_##name(&ctx, args, NULL);                    \
    free(args->scratch);                                                           \
    args->scratch = NULL;                                                          \
    return status;                                                                 \
  }
#include "ops.def"
#undef MOE_OP

static inline size_t element_bytes(moe_dtype dtype) { return dtype == MOE_FP32 ? 4 : 2; }

/* The largest relative error of rounding to the format. */
static inline double half_ulp(moe_dtype dtype) {
  return dtype == MOE_FP32 ? 0x1p-24 : dtype == MOE_BF16 ? 0x1p-8 : 0x1p-11;
}

/* n uniform values times `range`, as dtype. */
static inline void *random_array(moe_dtype dtype, int64_t n, float range, uint64_t *seed) {
  void *array = guarded((size_t)n * element_bytes(dtype));
  for (int64_t i = 0; i < n; i++) moe_store(array, dtype, i, range * test_uniform(seed));
  return array;
}

static inline double at(const void *array, moe_dtype dtype, int64_t i) { return moe_load(array, dtype, i); }
