/* SPDX-License-Identifier: Apache-2.0
 *
 * moeblas check --bitwise: what must be equal to the last bit. Any number of threads gives the same results; a token's
 * output depends on no other token, so half a batch or the batch backwards gives the same rows; a slot of weight 0 adds
 * nothing; and where the layer is linear, twice the input gives exactly twice the output. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum {
  THREADS = 4
};

/* ---- samples made from others ---------------------------------------------------------------------------------- */

/* A sample that owns nothing but what `own` copied. */
struct variant {
  struct sample sample;
  bool owned[T_COUNT];
};

static struct variant variant_of(const struct sample *sample) { return (struct variant){.sample = *sample}; }

static void variant_free(struct variant *variant) {
  for (int id = 0; id < T_COUNT; id++)
    if (variant->owned[id]) free(variant->sample.data[id]);
}

/* Gives the variant its own copy of a tensor. False: no memory. */
static bool own(struct variant *variant, enum tensor id) {
  const size_t bytes = shape_bytes(&variant->sample.shape[id]);
  void *copy = malloc(bytes + 1);
  if (copy == NULL) return false;
  memcpy(copy, variant->sample.data[id], bytes);
  variant->sample.data[id] = copy;
  variant->owned[id] = true;
  return true;
}

static bool is_per_token(enum tensor id) {
  return id == T_X || id == T_LOGITS || id == T_GIVEN_IDS || id == T_GIVEN_WEIGHTS || id == T_MASK ||
         id == T_DOUT;
}

static size_t row_bytes(const struct shape *shape) {
  return (size_t)shape->columns * element_bytes(shape->element);
}

static struct variant tokens_from(const struct sample *sample, int64_t first, int64_t count) {
  struct variant variant = variant_of(sample);
  variant.sample.problem.tokens = count;
  for (int i = 0; i < T_SAVED; i++) {
    const enum tensor id = (enum tensor)i;
    variant.sample.shape[id] = tensor_shape(&variant.sample.problem, id);
    if (sample->data[id] && is_per_token(id))
      variant.sample.data[id] = (char *)sample->data[id] + (size_t)first * row_bytes(&sample->shape[id]);
  }
  return variant;
}

static bool reverse_tokens(struct variant *variant) {
  for (int i = 0; i < T_INPUTS; i++) {
    const enum tensor id = (enum tensor)i;
    const char *from = variant->sample.data[id];
    if (from == NULL || !is_per_token(id)) continue;
    if (!own(variant, id)) return false;
    const size_t bytes = row_bytes(&variant->sample.shape[id]);
    const int64_t rows = variant->sample.shape[id].rows;
    for (int64_t r = 0; r < rows; r++)
      memcpy((char *)variant->sample.data[id] + (size_t)r * bytes, from + (size_t)(rows - 1 - r) * bytes,
             bytes);
  }
  return true;
}

static bool double_tensor(struct variant *variant, enum tensor id) {
  struct sample *s = &variant->sample;
  if (s->data[id] == NULL) return true;
  if (!own(variant, id)) return false;
  for (int64_t i = 0; i < shape_count(&s->shape[id]); i++)
    element_store(s->data[id], s->shape[id].element, i,
                  2 * element_load(s->data[id], s->shape[id].element, i));
  return true;
}

/* ---- comparing ------------------------------------------------------------------------------------------------- */

static void expect_rows(const struct run *found, int64_t found_row, const struct run *wanted,
                        int64_t wanted_row, int64_t rows, const char *what, struct verdict *v) {
  const size_t bytes = row_bytes(&wanted->sample->shape[T_OUT]);
  for (int64_t r = 0; r < rows; r++)
    if (memcmp(found->span[T_OUT].data + (size_t)(found_row + r) * bytes,
               wanted->span[T_OUT].data + (size_t)(wanted_row + r) * bytes, bytes))
      verdict_fail(v, "%s: row %lld of out has other bits", what, (long long)(wanted_row + r));
}

static void expect_twice(const struct run *found, const struct run *single, enum tensor first,
                         enum tensor last, const char *what, struct verdict *v) {
  for (int id = first; id <= (int)last; id++) {
    const struct shape *shape = &single->sample->shape[id];
    for (int64_t i = 0; single->span[id].bytes && i < shape_count(shape); i++)
      if (element_load(found->span[id].data, shape->element, i) !=
          2 * element_load(single->span[id].data, shape->element, i))
        verdict_fail(v, "%s: %s[%lld] is not exactly doubled", what, tensor_name((enum tensor)id),
                     (long long)i);
  }
}

/* ---- the properties -------------------------------------------------------------------------------------------- */

static void check_threads(const struct sample *sample, const struct run *reference, struct verdict *v) {
  for (int threads = 1; threads <= THREADS && !v->broken; threads++) {
    moe_context *ctx = NULL;
    struct run run;
    const moe_status status = moe_context_create(&ctx, MOE_BACKEND_CPU, threads);
    if (status != MOE_OK) {
      verdict_fail(v, "%d threads: %s", threads, moe_last_error());
      v->broken = status == MOE_ERROR_MEMORY; /* nothing is known of the library's bits */
    } else if (check_run(ctx, sample, &run, v)) {
      for (int id = T_INPUTS; id < T_RESULTS; id++)
        if (run.span[id].bytes && memcmp(run.span[id].data, reference->span[id].data, run.span[id].bytes))
          verdict_fail(v, "%d threads: %s has other bits", threads, tensor_name((enum tensor)id));
      check_run_close(&run);
    }
    moe_context_destroy(ctx);
  }
}

static void check_halves(moe_context *ctx, const struct sample *sample, const struct run *whole,
                         struct verdict *v) {
  const int64_t tokens = sample->problem.tokens, half = tokens / 2;
  const int64_t first[] = {0, half}, count[] = {half, tokens - half};
  for (int i = 0; i < 2; i++) {
    const struct variant variant = tokens_from(sample, first[i], count[i]);
    struct run run;
    if (!check_run(ctx, &variant.sample, &run, v)) return;
    expect_rows(&run, 0, whole, first[i], count[i], "half of the batch", v);
    check_run_close(&run);
  }
}

static void check_backwards(moe_context *ctx, const struct sample *sample, const struct run *whole,
                            struct verdict *v) {
  struct variant variant = variant_of(sample);
  struct run run;
  v->broken = !reverse_tokens(&variant);
  if (!v->broken && check_run(ctx, &variant.sample, &run, v)) {
    const int64_t tokens = sample->problem.tokens;
    for (int64_t t = 0; t < tokens; t++)
      expect_rows(&run, tokens - 1 - t, whole, t, 1, "the batch backwards", v);
    check_run_close(&run);
  }
  variant_free(&variant);
}

/* The last slot of each token weighs nothing in one run and has no expert in the other. */
static void check_weightless(moe_context *ctx, const struct sample *sample, struct verdict *v) {
  const int64_t topk = sample->problem.config.topk;
  struct variant zero = variant_of(sample);
  v->broken = !own(&zero, T_GIVEN_WEIGHTS);
  for (int64_t t = 0; !v->broken && t < sample->problem.tokens; t++)
    ((float *)zero.sample.data[T_GIVEN_WEIGHTS])[t * topk + topk - 1] = 0;
  struct variant none = variant_of(&zero.sample);
  v->broken = v->broken || !own(&none, T_GIVEN_IDS);
  for (int64_t t = 0; !v->broken && t < sample->problem.tokens; t++)
    ((int32_t *)none.sample.data[T_GIVEN_IDS])[t * topk + topk - 1] = INT_MIN;
  struct run with, without;
  if (!v->broken && check_run(ctx, &zero.sample, &with, v)) {
    if (check_run(ctx, &none.sample, &without, v)) {
      expect_rows(&with, 0, &without, 0, sample->problem.tokens, "a slot of weight 0", v);
      check_run_close(&without);
    }
    check_run_close(&with);
  }
  variant_free(&none);
  variant_free(&zero);
}

static void check_doubled_output(moe_context *ctx, const struct sample *sample, const struct run *single,
                                 struct verdict *v) {
  struct variant variant = variant_of(sample);
  struct run run;
  v->broken = !double_tensor(&variant, T_W2) || !double_tensor(&variant, T_B2) ||
              !double_tensor(&variant, T_SHARED_W2);
  if (!v->broken && check_run(ctx, &variant.sample, &run, v)) {
    expect_twice(&run, single, T_OUT, T_OUT, "w2 and b2 doubled", v);
    check_run_close(&run);
  }
  variant_free(&variant);
}

static void check_doubled_gradient(moe_context *ctx, const struct sample *sample, const struct run *single,
                                   struct verdict *v) {
  struct variant variant = variant_of(sample);
  struct run run;
  v->broken = !double_tensor(&variant, T_DOUT);
  if (!v->broken && check_run(ctx, &variant.sample, &run, v)) {
    expect_twice(&run, single, T_DX, T_DLATENT_UP, "dout doubled", v);
    check_run_close(&run);
  }
  variant_free(&variant);
}

/* fp16 is left out of doubling: its subnormals are within reach, and rounding there is not linear. */
static void check_properties(moe_context *ctx, const struct sample *sample, const struct run *run,
                             struct verdict *v) {
  const struct problem *p = &sample->problem;
  const moe_config *c = &p->config;
  const bool wide = c->dtype != MOE_FP16 && c->logits_dtype != MOE_FP16;
  const bool losses = c->router.balance || c->router.z_coeff > 0;
  const bool independent = c->entry != MOE_ENTRY_ROWS && !(c->capacity_factor > 0);
  if (moe_context_backend(ctx) == MOE_BACKEND_CPU) check_threads(sample, run, v);
  if (independent && !v->broken) check_halves(ctx, sample, run, v);
  if (independent && !v->broken) check_backwards(ctx, sample, run, v);
  if (independent && !v->broken && c->entry == MOE_ENTRY_IDS && !c->weight_on_input)
    check_weightless(ctx, sample, v);
  if (wide && !v->broken) check_doubled_output(ctx, sample, run, v);
  if (wide && !v->broken && p->backward && !losses && !p->accumulate)
    check_doubled_gradient(ctx, sample, run, v);
}

void check_bitwise(moe_context *ctx, const struct sample *sample, struct verdict *v) {
  struct run run;
  if (!check_run(ctx, sample, &run, v)) return;
  check_properties(ctx, sample, &run, v);
  check_run_close(&run);
}
