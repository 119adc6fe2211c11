/* SPDX-License-Identifier: Apache-2.0
 * What the tests of the matrix products share: guarded memory, random arrays, every instruction set, exact scratch. */
#pragma once

#include "cpu/cpu.h"
#include "cpu/kernel.h"
#include "format.h"
#include "test.h"

enum {
  GUARD = 64,
  POISON = 0xa5
};

static const char *const isa_names[] = {"base", "avx2", "avx512"};

/* ---- memory --------------------------------------------------------------------------------------------------- */

struct guarded {
  unsigned char *memory;
  size_t bytes;
};

static inline struct guarded guarded_new(size_t bytes) {
  struct guarded g = {malloc(bytes + 2 * GUARD), bytes};
  memset(g.memory, POISON, bytes + 2 * GUARD);
  return g;
}
static inline void *guarded_data(struct guarded g) { return g.memory + GUARD; }

static inline bool poisoned(const unsigned char *bytes, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (bytes[i] != POISON) return false;
  return true;
}
/* Checks the guards, and that nothing was written after the first `used` bytes. */
static inline void guarded_free(struct guarded g, size_t used, const char *name) {
  EXPECT(poisoned(g.memory, GUARD), "%s: written in front", name);
  EXPECT(poisoned(g.memory + GUARD + used, g.bytes - used + GUARD), "%s: written behind byte %zu", name,
         used);
  free(g.memory);
}

static inline void *random_array(uint64_t *seed, moe_dtype dtype, int64_t n) {
  void *array = malloc((size_t)(n + 1) * 4);
  for (int64_t i = 0; i < n; i++) moe_store(array, dtype, i, test_uniform(seed));
  return array;
}
static inline bool open_isa(const char *name, moe_context *ctx, int units) {
  const struct moe_cpu_kernel *kernel;
  setenv("MOE_CPU_ISA", name, 1);
  if (moe_cpu_kernel_select(&kernel) != MOE_OK) return false;
  unsetenv("MOE_CPU_ISA");
  *ctx = (moe_context){.units = units, .state = (void *)(uintptr_t)kernel};
  return true;
}

/* ---- running with exact scratch ------------------------------------------------------------------------------- */

#define RUN(op, ctx, args)                                              \
  do {                                                                  \
    (args)->scratch_bytes = moe_cpu_##op##_scratch((ctx), (args));      \
    const struct guarded scratch_ = guarded_new((args)->scratch_bytes); \
    (args)->scratch = guarded_data(scratch_);                           \
    const moe_status status_ = moe_cpu_##op((ctx), (args), NULL);       \
    EXPECT(status_ == MOE_OK, "%s: %d", #op, (int)status_);             \
    guarded_free(scratch_, (args)->scratch_bytes, #op " scratch");      \
  } while (0)

#define FOR_EACH_ISA(ctx, units)                                          \
  moe_context ctx;                                                        \
  for (size_t isa = 0; isa < sizeof isa_names / sizeof *isa_names; isa++) \
    if (open_isa(isa_names[isa], &ctx, (units)))
