/* SPDX-License-Identifier: Apache-2.0
 *
 * What: one op run on the CPU and on CUDA from the same arguments, and the results compared.
 * Idea: a test fills two argument structs that differ in pointers only. Every array is named once, with both fields: the host
 * one is the truth before the run; the device one is a copy between guard bands, poisoned with NaN like the scratch,
 * which has exactly the bytes asked for. CUDA runs twice, and the two results must be the same bits.
 * Invariant: a float is compared relative to the largest of its row, an integer bit by bit. Without a device the program
 * says why and ends well. */
#pragma once

#include <math.h>
#include <stdarg.h>

#include "../../src/format.h"
#include "../test.h"
#include "moeblas_ops.h"

enum {
  MAX_ARRAYS = 24,
  GUARD_BYTES = 4096
};

static moe_context *cpu, *gpu;

static void open_contexts(void) {
  if (moe_backend_available(MOE_BACKEND_CUDA) != MOE_OK) {
    printf("skipped: %s\n0 passed, 0 failed, 1 skipped\n", moe_last_error());
    fflush(stdout);
    _Exit(0);
  }
  if (moe_context_create(&cpu, MOE_BACKEND_CPU, 0) == MOE_OK &&
      moe_context_create(&gpu, MOE_BACKEND_CUDA, 0) == MOE_OK)
    return;
  printf("%s\n0 passed, 1 failed\n", moe_last_error());
  fflush(stdout);
  _Exit(1);
}

/* Not the contexts themselves: the kernels of a static library register in constructors too. */
__attribute__((constructor)) static void begin_with_contexts(void) { test_begin = open_contexts; }

struct twin_array {
  const char *name;
  unsigned char *host;   /* before the run; then what the CPU left */
  unsigned char *before; /* kept for the second run */
  unsigned char *found;  /* what CUDA left, guards included */
  unsigned char *device; /* guard, data, guard */
  size_t bytes;
  moe_dtype dtype; /* MOE_DTYPE_DEFAULT: bits */
  int64_t row;     /* elements of a row */
  double bound;    /* 0: bits */
};

struct twin {
  char what[256];
  int count;
  struct twin_array array[MAX_ARRAYS];
};

__attribute__((format(printf, 2, 3))) static inline void twin_open(struct twin *t, const char *format, ...) {
  va_list list;
  *t = (struct twin){0};
  va_start(list, format);
  vsnprintf(t->what, sizeof t->what, format, list);
  va_end(list);
}

static inline void twin_close(struct twin *t) {
  for (int i = 0; i < t->count; i++) {
    free(t->array[i].host), free(t->array[i].before), free(t->array[i].found);
    moe_memory_free(gpu, t->array[i].device);
  }
}

static inline void *must(void *pointer) {
  if (pointer == NULL) exit(2);
  return pointer;
}

/* A new array, filled with NaN bytes; its addresses go to the two fields (of any pointer type). Returns the host one. */
static inline void *twin_array(struct twin *t, void *cpu_field, void *gpu_field, const char *name,
                               size_t bytes) {
  struct twin_array *a = &t->array[t->count++];
  void *device;
  if (t->count > MAX_ARRAYS || moe_memory_alloc(gpu, bytes + 2 * GUARD_BYTES, &device) != MOE_OK) exit(2);
  *a = (struct twin_array){.name = name, .bytes = bytes, .device = device};
  a->host = must(malloc(bytes + 1)), a->before = must(malloc(bytes + 1)),
  a->found = must(malloc(bytes + 2 * GUARD_BYTES));
  memset(a->host, 0xff, bytes);
  device = a->device + GUARD_BYTES;
  memcpy(cpu_field, &a->host, sizeof a->host);
  memcpy(gpu_field, &device, sizeof device);
  return a->host;
}
#define ARRAY(t, c, g, field, bytes) \
  twin_array(t, (void *)&(c).field, (void *)&(g).field, #field, (size_t)(bytes))

static inline int64_t bytes_of(moe_dtype dtype, int64_t n) { return n * (dtype == MOE_FP32 ? 4 : 2); }

/* The array made last is an output of floats. */
static inline void twin_floats(struct twin *t, moe_dtype dtype, int64_t row, double bound) {
  struct twin_array *a = &t->array[t->count - 1];
  a->dtype = dtype, a->row = row > 0 ? row : 1, a->bound = bound;
}

static inline void fill_random(void *array, moe_dtype dtype, int64_t n, float range, uint64_t *seed) {
  for (int64_t i = 0; i < n; i++) moe_store(array, dtype, i, range * test_uniform(seed));
}

/* What one step of the format is to a value, with room for the rounding of sums. */
static inline double step_of(moe_dtype dtype) {
  return dtype == MOE_FP32 ? 0x1p-16 : dtype == MOE_BF16 ? 0x1.1p-7 : 0x1.1p-10;
}

static inline void upload(struct twin *t) {
  for (int i = 0; i < t->count; i++) {
    struct twin_array *a = &t->array[i];
    EXPECT(moe_memory_fill(gpu, a->device, 0xff, a->bytes + 2 * GUARD_BYTES) == MOE_OK, "%s",
           moe_last_error());
    EXPECT(moe_memory_copy(gpu, a->device + GUARD_BYTES, a->before, a->bytes) == MOE_OK, "%s",
           moe_last_error());
  }
}

static inline void download(struct twin *t, int second) {
  for (int i = 0; i < t->count; i++) {
    struct twin_array *a = &t->array[i];
    unsigned char *now = must(malloc(a->bytes + 2 * GUARD_BYTES));
    EXPECT(moe_memory_copy(gpu, now, a->device, a->bytes + 2 * GUARD_BYTES) == MOE_OK, "%s",
           moe_last_error());
    size_t guard = 0;
    for (; guard < GUARD_BYTES && now[guard] == 0xff && now[GUARD_BYTES + a->bytes + guard] == 0xff;) guard++;
    EXPECT(guard == GUARD_BYTES, "%s: %s: written outside, at byte %zu of a guard", t->what, a->name, guard);
    if (second)
      EXPECT(memcmp(now, a->found, a->bytes + 2 * GUARD_BYTES) == 0, "%s: %s: two runs differ", t->what,
             a->name);
    memcpy(a->found, now, a->bytes + 2 * GUARD_BYTES);
    free(now);
  }
}

static inline void compare_row(const struct twin *t, const struct twin_array *a, int64_t first, int64_t end) {
  const void *found = a->found + GUARD_BYTES;
  double largest = 0;
  for (int64_t i = first; i < end; i++) {
    const double want = moe_load(a->host, a->dtype, i);
    if (isfinite(want)) largest = fmax(largest, fabs(want));
  }
  for (int64_t i = first; i < end; i++) {
    const double want = moe_load(a->host, a->dtype, i), got = moe_load(found, a->dtype, i);
    if (want == got || (isnan(want) && isnan(got))) continue;
    EXPECT(fabs(got - want) <= a->bound * largest + 0x1p-24 * a->bound,
           "%s: %s[%lld]: got %.9g, want %.9g (row of %.3g)", t->what, a->name, (long long)i, got, want,
           largest);
  }
}

static inline void compare(const struct twin *t) {
  for (int i = 0; i < t->count; i++) {
    const struct twin_array *a = &t->array[i];
    if (a->bound > 0) {
      const int64_t n = (int64_t)a->bytes / bytes_of(a->dtype, 1);
      for (int64_t first = 0; first < n; first += a->row)
        compare_row(t, a, first, first + a->row < n ? first + a->row : n);
      continue;
    }
    for (size_t j = 0; j < a->bytes; j++) {
      if (a->host[j] == a->found[GUARD_BYTES + j]) continue;
      EXPECT(0, "%s: %s differs at byte %zu of %zu: got %02x, want %02x", t->what, a->name, j, a->bytes,
             a->found[GUARD_BYTES + j], a->host[j]);
      break;
    }
  }
}

/* Runs op on both with exactly the scratch asked for (c and g are the argument structs), compares, closes. */
#define RUN_TWIN(t, op, c, g)                                                                             \
  do {                                                                                                    \
    (c).size = sizeof(c), (g).size = sizeof(g);                                                           \
    (c).scratch_bytes = moe_##op##_scratch(cpu, &(c)), (g).scratch_bytes = moe_##op##_scratch(gpu, &(g)); \
    REQUIRE((c).scratch_bytes != SIZE_MAX && (g).scratch_bytes != SIZE_MAX, "%s: %s", (t)->what,          \
            moe_last_error());                                                                            \
    (c).scratch = must(aligned_alloc(256, (c).scratch_bytes / 256 * 256 + 256));                          \
    memset((c).scratch, 0xff, (c).scratch_bytes);                                                         \
    for (int i_ = 0; i_ < (t)->count; i_++)                                                               \
      memcpy((t)->array[i_].before, (t)->array[i_].host, (t)->array[i_].bytes);                           \
    EXPECT(moe_##op(cpu, &(c), NULL) == MOE_OK, "%s: CPU: %s", (t)->what, moe_last_error());              \
    for (int second_ = 0; second_ < 2; second_++) {                                                       \
      unsigned char *scratch_;                                                                            \
      void *block_;                                                                                       \
      if (moe_memory_alloc(gpu, (g).scratch_bytes + 2 * GUARD_BYTES, &block_) != MOE_OK) exit(2);         \
      scratch_ = block_;                                                                                  \
      (g).scratch = scratch_ + GUARD_BYTES;                                                               \
      moe_memory_fill(gpu, scratch_, 0xff, (g).scratch_bytes + 2 * GUARD_BYTES);                          \
      upload(t);                                                                                          \
      EXPECT(moe_##op(gpu, &(g), NULL) == MOE_OK, "%s: CUDA: %s", (t)->what, moe_last_error());           \
      EXPECT(moe_synchronize(gpu, NULL) == MOE_OK, "%s: CUDA: %s", (t)->what, moe_last_error());          \
      download(t, second_);                                                                               \
      guards_intact(t, scratch_, (g).scratch_bytes);                                                      \
      moe_memory_free(gpu, scratch_);                                                                     \
    }                                                                                                     \
    compare(t);                                                                                           \
    free((c).scratch);                                                                                    \
    twin_close(t);                                                                                        \
  } while (0)

static inline void guards_intact(const struct twin *t, const unsigned char *scratch, size_t bytes) {
  unsigned char guard[2 * GUARD_BYTES];
  EXPECT(moe_memory_copy(gpu, guard, scratch, GUARD_BYTES) == MOE_OK, "%s", moe_last_error());
  EXPECT(moe_memory_copy(gpu, guard + GUARD_BYTES, scratch + GUARD_BYTES + bytes, GUARD_BYTES) == MOE_OK,
         "%s", moe_last_error());
  size_t intact = 0;
  while (intact < sizeof guard && guard[intact] == 0xff) intact++;
  EXPECT(intact == sizeof guard, "%s: scratch: written outside, at byte %zu of its guards", t->what, intact);
}

/* ---- random problems */

static inline int64_t pick(uint64_t *seed, const int64_t *from, int count) {
  return from[test_random(seed) % (uint64_t)count];
}
#define PICK(seed, ...) \
  pick(seed, (const int64_t[]){__VA_ARGS__}, (int)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))
static inline int chance(uint64_t *seed, int percent) { return (int)(test_random(seed) % 100) < percent; }
static inline moe_dtype any_dtype(uint64_t *seed) {
  return (moe_dtype)PICK(seed, MOE_FP32, MOE_BF16, MOE_FP16);
}

/* Rows of random slots: the maps of moe_sort, on the host. */
struct maps {
  int64_t tokens, experts, topk, slots;
  int32_t *ids, *row_offset, *row_slot, *slot_row;
};

static inline void maps_open(struct maps *m, int64_t tokens, int64_t experts, int64_t topk, uint64_t *seed) {
  *m = (struct maps){.tokens = tokens, .experts = experts, .topk = topk, .slots = tokens * topk};
  m->ids = must(malloc((size_t)m->slots * 4 + 4)), m->row_slot = must(malloc((size_t)m->slots * 4 + 4));
  m->slot_row = must(malloc((size_t)m->slots * 4 + 4)), m->row_offset = must(malloc((size_t)experts * 4 + 4));
  memset(m->row_offset, 0, (size_t)experts * 4 + 4);
  if (topk == 0) return;
  const int skew = (int)(test_random(seed) % 3); /* even, two experts, or with skipped slots */
  for (int64_t s = 0; s < m->slots; s++) {
    const int64_t e = (int64_t)(test_random(seed) % (uint64_t)experts);
    m->ids[s] = (int32_t)(skew == 1 ? e % 2 * (experts - 1) : skew == 2 && e % 5 == 0 ? -1 : e);
  }
  moe_sort_args args = {.size = sizeof args,
                        .tokens = tokens,
                        .experts = experts,
                        .topk = topk,
                        .ids = m->ids,
                        .row_offset = m->row_offset,
                        .row_slot = m->row_slot,
                        .slot_row = m->slot_row};
  if (moe_sort(cpu, &args, NULL) != MOE_OK) exit(2);
}

static inline void maps_close(struct maps *m) {
  free(m->ids), free(m->row_offset), free(m->row_slot), free(m->slot_row);
}

static inline moe_act_desc any_act(int64_t inter, uint64_t *seed) {
  moe_act_desc act = {.kind = (moe_activation)(test_random(seed) % MOE_ACT_COUNT), .gated = chance(seed, 60)};
  if (!act.gated) return act;
  act.layout = (moe_layout)PICK(seed, 0, 1, 2);
  const int64_t run = PICK(seed, 1, 2, 8, 32);
  act.interleave = act.layout == MOE_LAYOUT_INTERLEAVED && inter % run == 0 ? run : 0;
  if (chance(seed, 30)) act.gate_max = 1, act.up_min = -0.75f, act.up_max = 0.5f, act.up_offset = 1;
  if (chance(seed, 20)) act.up_beta = 2;
  return act;
}
