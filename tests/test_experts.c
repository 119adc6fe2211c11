/* SPDX-License-Identifier: Apache-2.0
 *
 * The MoE layers of `moeblas train` on a back end of their own: with copies to and from it a model must learn the same
 * bits as without, and in bf16 nearly the same. A second context of the CPU stands in for a GPU. */
#include <math.h>

#include "../tools/train/model.h"
#include "../tools/train/optim.h"
#include "moeblas_ops.h"
#include "test.h"

enum {
  TOKENS = 30,
  STEPS = 3
};

/* As memory of a GPU may be: NaN wherever nothing is written. */
moe_status __real_moe_memory_alloc(moe_context *ctx, size_t bytes, void **out);
moe_status __wrap_moe_memory_alloc(moe_context *ctx, size_t bytes, void **out);

moe_status __wrap_moe_memory_alloc(moe_context *ctx, size_t bytes, void **out) {
  const moe_status status = __real_moe_memory_alloc(ctx, bytes, out);
  return status == MOE_OK ? moe_memory_fill(ctx, *out, 0xff, bytes) : status;
}

/* Odd enough that floats of nothing stand between a layer's parameters. */
static const struct model_config odd = {
    .layers = 2, .dim = 10, .heads = 1, .experts = 4, .topk = 2, .inter = 5, .sequence = 15};
static const struct model_config even = {/* sizes that bf16 has kernels of its own for */
                                         .layers = 2, .dim = 32,   .heads = 2,    .experts = 4,
                                         .topk = 2,   .inter = 16, .sequence = 15};

struct bench {
  moe_context *host, *other;
  struct model *m;
  uint8_t input[TOKENS], target[TOKENS];
};

static int open_bench(struct bench *b, const struct model_config *config, int apart, int training) {
  char error[256] = "";
  uint64_t state = 3;
  *b = (struct bench){NULL};
  EXPECT(moe_context_create(&b->host, MOE_BACKEND_CPU, 2) == MOE_OK, "%s", moe_last_error());
  EXPECT(moe_context_create(&b->other, MOE_BACKEND_CPU, 1) == MOE_OK, "%s", moe_last_error());
  b->m = model_create(b->host, apart ? b->other : b->host, config, TOKENS, training, error, sizeof error);
  EXPECT(b->m, "%s", error);
  if (b->m) model_init(b->m, 7);
  for (int i = 0; i < TOKENS; i++) {
    b->input[i] = (uint8_t)test_random(&state);
    b->target[i] = (uint8_t)test_random(&state);
  }
  return b->m != NULL;
}

static void close_bench(struct bench *b) {
  model_destroy(b->m);
  moe_context_destroy(b->other);
  moe_context_destroy(b->host);
}

/* What is seen of a little training: its losses, the last gradient with all that lies between, loads, router losses. */
struct seen {
  double loss[STEPS];
  float *grad;
  int64_t count;
  int32_t counts[8];
  float losses[4], bias[8];
};

static void learn(struct seen *s, const struct model_config *config, int apart, int steps) {
  struct bench b;
  memset(s, 0, sizeof *s);
  if (!open_bench(&b, config, apart, 1)) return;
  struct model *m = b.m;
  for (int step = 0; step < steps; step++) {
    EXPECT(model_gradient(m, b.input, b.target, 2, 15, s->loss + step) == MOE_OK, "%s", moe_last_error());
    const float scale = clip_scale(gradient_norm(m->grad, m->count), 1);
    for (int64_t i = 0; i < m->count; i++) m->value[i] -= 0.5f * scale * m->grad[i];
    EXPECT(model_rebalance(m, 0.1f) == MOE_OK, "%s", moe_last_error());
  }
  s->count = m->count;
  s->grad = malloc((size_t)m->count * sizeof *s->grad);
  memcpy(s->grad, m->grad, (size_t)m->count * sizeof *s->grad);
  for (int l = 0; l < 2; l++) {
    memcpy(s->counts + 4 * l, m->layer[l].counts, 4 * sizeof *s->counts);
    memcpy(s->losses + 2 * l, m->layer[l].losses, 2 * sizeof *s->losses);
  }
  memcpy(s->bias, m->correction_bias, sizeof s->bias);
  close_bench(&b);
}

static void check_same(const struct model_config *config) {
  struct seen here, apart;
  learn(&here, config, 0, STEPS);
  learn(&apart, config, 1, STEPS);
  REQUIRE(here.grad && apart.grad, "no result");
  int64_t slots = 0;
  for (int e = 0; e < 8; e++) slots += here.counts[e];
  EXPECT(slots == 2 * TOKENS * config->topk, "%d slots", (int)slots);
  EXPECT(here.loss[STEPS - 1] < here.loss[0], "nothing is learned: %g", here.loss[STEPS - 1]);
  EXPECT(memcmp(here.loss, apart.loss, sizeof here.loss) == 0, "losses %.17g and %.17g", here.loss[STEPS - 1],
         apart.loss[STEPS - 1]);
  EXPECT(memcmp(here.grad, apart.grad, (size_t)here.count * sizeof *here.grad) == 0, "other gradients");
  EXPECT(memcmp(here.counts, apart.counts, sizeof here.counts) == 0, "other loads");
  EXPECT(memcmp(here.losses, apart.losses, sizeof here.losses) == 0, "other router losses");
  EXPECT(memcmp(here.bias, apart.bias, sizeof here.bias) == 0, "other correction biases");
  free(here.grad), free(apart.grad);
}

TEST(copies_change_no_bit) {
  struct model_config config = odd;
  check_same(&config);
  config.balance = BALANCE_BIAS;
  check_same(&config);
}

TEST(bf16_is_the_same_on_any_context) {
  struct model_config config = even;
  config.dtype = MOE_BF16;
  check_same(&config);
}

/* Each of the few roundings on the way has a relative error of at most 2^-9. Every expert is chosen, so that none of them
 * can change the choice. */
static void check_rounded(struct model_config plain) {
  plain.topk = plain.experts;
  struct model_config config = plain;
  struct seen exact, rounded;
  double difference = 0, size = 0;
  config.dtype = MOE_BF16;
  learn(&exact, &plain, 0, 1);
  learn(&rounded, &config, 0, 1);
  REQUIRE(exact.grad && rounded.grad, "no result");
  for (int64_t i = 0; i < exact.count; i++) {
    difference += pow((double)exact.grad[i] - (double)rounded.grad[i], 2);
    size += pow((double)exact.grad[i], 2);
  }
  EXPECT(difference > 0 && sqrt(difference / size) < 0x1p-7, "gradients differ by %g",
         sqrt(difference / size));
  EXPECT(fabs(exact.loss[0] - rounded.loss[0]) < 1e-3 * exact.loss[0], "loss %g, in bf16 %g", exact.loss[0],
         rounded.loss[0]);
  free(exact.grad), free(rounded.grad);
}

TEST(bf16_is_nearly_fp32) {
  check_rounded(odd);
  check_rounded(even);
}

TEST(inference_with_copies) {
  struct bench here, apart;
  if (!open_bench(&here, &odd, 0, 0)) return;
  REQUIRE(open_bench(&apart, &odd, 1, 0), "no model");
  for (int i = 0; i < 2; i++) { /* the second time with other parameters */
    for (struct bench *b = &here; b; b = b == &here ? &apart : NULL) {
      b->m->value[b->m->count - 1] += 1;
      b->m->value[b->m->param[7].offset] += 1;
      EXPECT(model_forward(b->m, b->input, 1, 9) == MOE_OK, "%s", moe_last_error());
      EXPECT(model_step(b->m, 'x', 9) == MOE_OK, "%s", moe_last_error());
    }
    EXPECT(memcmp(here.m->logits, apart.m->logits, MODEL_BYTES * sizeof(float)) == 0, "pass %d", i);
  }
  close_bench(&here);
  close_bench(&apart);
}

TEST(a_plan_that_cannot_be_is_refused) {
  struct model_config config = odd;
  moe_context *ctx = NULL;
  char error[256] = "";
  config.topk = MOE_MAX_TOPK + 1;
  EXPECT(moe_context_create(&ctx, MOE_BACKEND_CPU, 1) == MOE_OK, "%s", moe_last_error());
  EXPECT(!model_create(ctx, ctx, &config, TOKENS, 1, error, sizeof error) && strstr(error, "topk"), "'%s'",
         error);
  moe_context_destroy(ctx);
}

TEST_MAIN()
