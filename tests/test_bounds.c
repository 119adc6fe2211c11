/* SPDX-License-Identifier: Apache-2.0
 *
 * What: the two sides of every bound that the other tests cross from far away, and what is only seen by counting.
 * Idea: the last value that is taken and the first that is not; one row without an array; every block that is handed
 * out comes back. Most of these were found by changing the library a token at a time (`make mutants`).
 * Invariant: nothing here looks at results of the layer. */
#include "test.h"

#include <math.h>
#include <time.h>

#include "cpu/kernel.h"
#include "moeblas_ops.h"
#include "plan.h"
#include "support.h"

/* ---- memory is counted */

static int blocks; /* that are held */
void *__real_moe_host_alloc(size_t bytes);
void __real_moe_host_free(void *pointer);
void *__wrap_moe_host_alloc(size_t bytes);
void __wrap_moe_host_free(void *pointer);

void *__wrap_moe_host_alloc(size_t bytes) {
  void *const pointer = __real_moe_host_alloc(bytes);
  blocks += pointer != NULL;
  return pointer;
}

void __wrap_moe_host_free(void *pointer) {
  blocks -= pointer != NULL;
  __real_moe_host_free(pointer);
}

/* ---- time stands still until a test moves it */

static struct timespec now;
int __wrap_clock_gettime(clockid_t clock, struct timespec *time);

int __wrap_clock_gettime(clockid_t clock, struct timespec *time) {
  *time = now;
  return clock == CLOCK_MONOTONIC ? 0 : -1;
}

TEST(every_block_comes_back) {
  moe_context *ctx = cpu_context(1);
  moe_timer *timer;
  void *memory[4];
  for (int i = 0; i < 4; i++)
    REQUIRE(moe_memory_alloc(ctx, (size_t)(i * 1000), &memory[i]) == MOE_OK, "%s", moe_last_error());
  REQUIRE(moe_timer_create(ctx, &timer) == MOE_OK, "%s", moe_last_error());
  EXPECT(blocks == 7, "%d blocks are held, wanted context, memory, timer and its event", blocks);
  for (int i = 0; i < 4; i++) moe_memory_free(ctx, memory[i]);
  moe_timer_destroy(timer);
  moe_context_destroy(ctx);
  EXPECT(blocks == 0, "%d blocks are still held", blocks);
}

TEST(a_timer_counts_seconds_and_nanoseconds) {
  moe_context *ctx = cpu_context(1);
  moe_timer *a, *b;
  double us = 0;
  REQUIRE(moe_timer_create(ctx, &a) == MOE_OK && moe_timer_create(ctx, &b) == MOE_OK, "%s", moe_last_error());
  now = (struct timespec){1, 750000000};
  EXPECT(moe_timer_record(a, NULL) == MOE_OK, "%s", moe_last_error());
  now = (struct timespec){4, 250000000};
  EXPECT(moe_timer_record(b, NULL) == MOE_OK, "%s", moe_last_error());
  EXPECT(moe_timer_elapsed_us(a, b, &us) == MOE_OK && us == 2500000, "%g us", us);
  moe_timer_destroy(a), moe_timer_destroy(b);
  moe_context_destroy(ctx);
}

/* ---- contexts and kernels */

TEST(threads_of_a_context) {
  moe_context *ctx = cpu_context(1024);
  EXPECT(moe_context_units(ctx) == 1024, "%d threads", moe_context_units(ctx));
  moe_context_destroy(ctx);
}

TEST(a_kernel_is_chosen_by_name) {
  static const char *const names[] = {"base", "avx2", "avx512"};
  const struct moe_cpu_kernel *found, *const best = moe_cpu_kernel_best();
  for (int i = 0; i < 3; i++) {
    setenv("MOE_CPU_ISA", names[i], 1);
    const moe_status status = moe_cpu_kernel_select(&found);
    if (status == MOE_OK)
      EXPECT(strcmp(found->name, names[i]) == 0, "%s gives %s", names[i], found->name);
    else
      EXPECT(i > 0 && strcmp(best->name, names[i]) != 0, "%s: %s", names[i], moe_last_error());
    EXPECT(status == MOE_OK || strcmp(best->name, "avx512") != 0, "%s: %s", names[i], moe_last_error());
  }
  setenv("MOE_CPU_ISA", "", 1);
  EXPECT(moe_cpu_kernel_select(&found) == MOE_OK && found == best, "an empty name gives %s", found->name);
  unsetenv("MOE_CPU_ISA");
}

/* ---- configurations */

static moe_config valid(void) {
  moe_config c = MOE_CONFIG_INIT;
  c.hidden = 16, c.inter = 12, c.experts = 8, c.topk = 2, c.act.gated = 1;
  return c;
}

TEST(widths) {
  moe_config c = valid();
  int64_t *const widths[] = {&c.hidden, &c.inter, &c.latent, &c.shared_inter};
  for (int i = 0; i < 4; i++) {
    c = valid();
    *widths[i] = MOE_MAX_WIDTH;
    EXPECT(plan_status(&c) == MOE_OK, "%s", moe_last_error());
    *widths[i] = MOE_MAX_WIDTH + 1;
    REFUSED(plan_status(&c), ARGUMENT, "= 16777217, wanted ");
  }
}

TEST(numbers_of_the_router) {
  float bad[] = {NAN, INFINITY, -1};
  for (int i = 0; i < 3; i++) {
    moe_config c = valid();
    c.router.renormalize = 1;
    c.router.renorm_epsilon = bad[i];
    REFUSED(plan_status(&c), ARGUMENT, "plan: router.renorm_epsilon = ");
  }
}

TEST(a_description_tells_the_limit) {
  moe_config c = valid();
  moe_context *ctx = cpu_context(3);
  char text[1024];
  for (int limit = 0; limit < 3; limit++) {
    moe_plan *plan;
    char want[64];
    c.sm_limit = limit;
    REQUIRE(moe_plan_create(&plan, ctx, &c) == MOE_OK, "%s", moe_last_error());
    moe_plan_describe(plan, 4, text, sizeof text);
    snprintf(want, sizeof want, "at most %d units", limit > 0 ? limit : 3);
    EXPECT(strstr(text, want) != NULL, "limit %d: %s", limit, text);
    moe_plan_destroy(plan);
  }
  moe_context_destroy(ctx);
}

/* ---- ops */

static _Alignas(16) char some[256];
#define SCRATCH(op, ...) \
  moe_##op##_scratch(ctx, &(moe_##op##_args){.size = sizeof(moe_##op##_args), __VA_ARGS__})
#define CALL(op, ...) moe_##op(ctx, &(moe_##op##_args){.size = sizeof(moe_##op##_args), __VA_ARGS__}, NULL)
#define PERMUTE       .topk = 1, .experts = 1, .dtype = MOE_FP32
#define CONVERT       .x_dtype = MOE_FP32, .y_dtype = MOE_BF16
#define PRODUCT       .experts = 1, .a_dtype = MOE_FP32, .b_dtype = MOE_FP32, .d_dtype = MOE_FP32

TEST(sizes_of_ops) {
  moe_context *ctx = cpu_context(1);
  EXPECT(SCRATCH(convert, CONVERT, .count = INT64_MAX / 8) == 0, "%s", moe_last_error());
  EXPECT(SCRATCH(convert, CONVERT, .count = INT64_MAX / 8 + 1) == SIZE_MAX, "too many elements are taken");
  EXPECT(SCRATCH(permute, PERMUTE, .hidden = 2 * MOE_MAX_WIDTH) == 0, "%s", moe_last_error());
  EXPECT(SCRATCH(permute, PERMUTE, .hidden = 2 * MOE_MAX_WIDTH + 1) == SIZE_MAX,
         "too many columns are taken");
  EXPECT(SCRATCH(permute, PERMUTE, .hidden = 1, .rows = INT32_MAX) == 0, "%s", moe_last_error());
  EXPECT(SCRATCH(permute, PERMUTE, .hidden = 1, .rows = (int64_t)INT32_MAX + 1) == SIZE_MAX, "too many rows");
  EXPECT(SCRATCH(copy, .bytes = PTRDIFF_MAX) == 0, "%s", moe_last_error());
  EXPECT(SCRATCH(zero, .bytes = PTRDIFF_MAX) == 0, "%s", moe_last_error());
  EXPECT(SCRATCH(zero, .bytes = (size_t)PTRDIFF_MAX + 1) == SIZE_MAX, "too many bytes are taken");
  moe_context_destroy(ctx);
}

/* Without rows to add up, combine converts its addend: what y would be does not matter. */
TEST(what_copies_and_clears_needs_no_scratch) {
  moe_context *ctx = cpu_context(2);
  const moe_copy_args copy = {.size = sizeof copy, .bytes = 1 << 22};
  const moe_zero_args zero = {.size = sizeof zero, .bytes = 1 << 22};
  EXPECT(moe_copy_scratch(ctx, &copy) == 0, "copy wants %zu bytes", moe_copy_scratch(ctx, &copy));
  EXPECT(moe_zero_scratch(ctx, &zero) == 0, "zero wants %zu bytes", moe_zero_scratch(ctx, &zero));
  moe_context_destroy(ctx);
}

TEST(combine_of_nothing_needs_no_dtype) {
  moe_context *ctx = cpu_context(1);
  const float addend[2] = {1, -2};
  float sum[2] = {0};
  EXPECT(CALL(combine, .tokens = 2, .hidden = 1, .addend = addend, .out = sum, .out_dtype = MOE_FP32) ==
             MOE_OK,
         "%s", moe_last_error());
  EXPECT(sum[0] == 1 && sum[1] == -2, "%g %g", (double)sum[0], (double)sum[1]);
  moe_context_destroy(ctx);
}

/* <A row, dot_bias> for every length of a row. */
TEST(dot_bias_of_every_length) {
  enum {
    MOST = 300
  };
  moe_context *ctx = cpu_context(1);
  const moe_act_desc act = {0};
  static _Alignas(16) float a[MOST], bias[MOST], b[MOST];
  static _Alignas(256) char scratch[1 << 21];
  float want = 0;
  for (int k = 1; k <= MOST; k++) {
    _Alignas(16) float h[1] = {1}, dh[1], dweights[1] = {-1};
    a[k - 1] = (float)(k % 7 - 3), bias[k - 1] = (float)(k % 5 - 2);
    want += a[k - 1] * bias[k - 1]; /* small integers: exact in any order */
    EXPECT(CALL(gemm, PRODUCT, .rows = 1, .n = 1, .k = k, .a = a, .b = b, .bias_dtype = MOE_FP32,
                .epilogue = MOE_EPILOGUE_DACT, .act = &act, .h = h, .dh = dh, .dweights = dweights,
                .dot_bias = bias, .scratch = scratch, .scratch_bytes = sizeof scratch) == MOE_OK,
           "%s", moe_last_error());
    EXPECT(dweights[0] == want, "length %d: %g, wanted %g", k, (double)dweights[0], (double)want);
  }
  moe_context_destroy(ctx);
}

/* The smallest problem that needs an array is refused without it. */
TEST(one_row_needs_its_arrays) {
  moe_context *ctx = cpu_context(1);
  const moe_act_desc act = {0};
  int32_t *const ints = (int32_t *)(void *)some;
  REFUSED(CALL(wgrad, PRODUCT, .rows = 1, .m = 1, .n = 1, .b = some, .d = some), ARGUMENT, "wgrad: a = NULL");
  REFUSED(CALL(wgrad, PRODUCT, .rows = 1, .m = 1, .n = 1, .a = some, .d = some), ARGUMENT, "wgrad: b = NULL");
  REFUSED(CALL(gemm, PRODUCT, .rows = 1, .n = 1, .k = 1, .b = some, .d = some), ARGUMENT, "gemm: a = NULL");
  REFUSED(CALL(gemm, PRODUCT, .rows = 1, .n = 1, .k = 1, .a = some, .d = some), ARGUMENT, "gemm: b = NULL");
  REFUSED(CALL(bias_grad, .rows = 1, .n = 1, .experts = 1, .v_dtype = MOE_FP32, .d_dtype = MOE_FP32),
          ARGUMENT, "bias_grad: v = NULL");
  REFUSED(CALL(act, .rows = 1, .inter = 1, .act = &act, .dtype = MOE_FP32, .a = some), ARGUMENT,
          "act: h = NULL");
  REFUSED(CALL(act, .rows = 1, .inter = 1, .act = &act, .dtype = MOE_FP32, .h = some), ARGUMENT,
          "act: a = NULL");
  REFUSED(CALL(act_backward, .rows = 1, .inter = 1, .act = &act, .dtype = MOE_FP32, .h = some, .dh = some),
          ARGUMENT, "act_backward: da = NULL");
  REFUSED(CALL(convert, CONVERT, .count = 1, .y = some), ARGUMENT, "convert: x = NULL");
  REFUSED(CALL(convert, CONVERT, .count = 1, .x = some), ARGUMENT, "convert: y = NULL");
  REFUSED(CALL(permute, PERMUTE, .rows = 1, .hidden = 1, .row_offset = ints, .x = some, .y = some), ARGUMENT,
          "permute: row_slot = NULL");
  REFUSED(CALL(combine, .tokens = 1, .hidden = 1, .topk = 1, .rows = 1, .y_dtype = MOE_FP32, .out = some,
               .out_dtype = MOE_FP32),
          ARGUMENT, "combine: y = NULL");
  REFUSED(CALL(sort, .tokens = 1, .experts = 2, .topk = 1, .row_offset = ints), ARGUMENT, "sort: ids = NULL");
  moe_context_destroy(ctx);
}

/* Forward's checks come first in most tests; backward has its own. */
TEST(backward_alone_needs_its_arrays) {
  const struct layer_case *c = &layer_cases[0];
  struct layer l;
  OPEN(&l, c, o.tokens = 1);
  RAN(layer_forward(&l), c);
  layer_bind(&l);
  l.backward.x = NULL;
  REFUSED(moe_backward(l.plan, &l.backward, NULL), ARGUMENT, "backward: x = NULL, wanted an array");
  layer_bind(&l);
  l.backward.dout = NULL;
  REFUSED(moe_backward(l.plan, &l.backward, NULL), ARGUMENT, "backward: dout = NULL, wanted an array");
  layer_bind(&l);
  l.params.w1 = NULL;
  REFUSED(moe_backward(l.plan, &l.backward, NULL), ARGUMENT, "backward: params.w1 = NULL, wanted an array");
  layer_close(&l);
}

TEST_MAIN()
