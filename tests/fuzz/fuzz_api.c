/* SPDX-License-Identifier: Apache-2.0
 *
 * The C interface. The input is a row of choices that fill a moe_config, field by field or as raw bytes, with plausible,
 * extreme and arbitrary values. The plan is refused with a sentence, or it is small enough to be run: against the oracle
 * where its numbers are tame, and once more with one argument spoiled, which is refused or harmless. */
#include "fuzz.h"

#include <math.h>

#include "../../tools/check.h"
#include "../support.h"
#include "moeblas_ops.h"

enum {
  TOKENS = 12,
  BYTES = 1 << 16 /* of all tensors of a problem that is run */
};

static int64_t feed_size(struct feed *feed) {
  static const int64_t corners[] = {0,
                                    1,
                                    -1,
                                    64,
                                    65,
                                    4096,
                                    4097,
                                    INT32_MAX,
                                    INT32_MIN,
                                    (int64_t)1 << 31,
                                    1ll << 32,
                                    1ll << 40,
                                    INT64_MAX,
                                    INT64_MIN,
                                    INT64_MAX - 255,
                                    MOE_MAX_TOPK,
                                    1ll << 20,
                                    255};
  const unsigned kind = feed_below(feed, 64);
  int64_t value;
  if (kind < 52) return (int64_t)feed_below(feed, kind < 44 ? 9 : 40);
  if (kind < 62) return corners[feed_below(feed, sizeof corners / sizeof *corners)];
  feed_bytes(feed, &value, sizeof value);
  return value;
}

/* Mostly a number that a model would have; *tame is 0 after any other. */
static float feed_real(struct feed *feed, int *tame) {
  static const float usual[] = {0, 0, 0, 0.5f, 1, 1.702f, 2, 7};
  static const float corners[] = {-1,     -7,      NAN,      INFINITY, -INFINITY, 0x1p-149f,
                                  1e-38f, 3.4e38f, -3.4e38f, -0.0f,    1e-20f};
  const unsigned kind = feed_below(feed, 64);
  float value;
  if (kind < 52) return usual[feed_below(feed, sizeof usual / sizeof *usual)];
  *tame = 0;
  if (kind < 62) return corners[feed_below(feed, sizeof corners / sizeof *corners)];
  feed_bytes(feed, &value, sizeof value);
  return value;
}

static int feed_enum(struct feed *feed, int count) {
  const unsigned kind = feed_below(feed, 64);
  int value;
  if (kind < 60) return (int)feed_below(feed, (unsigned)count);
  if (kind < 62) return count;
  feed_bytes(feed, &value, sizeof value);
  return value;
}

static void feed_router(struct feed *feed, moe_router_desc *r, int *tame) {
  r->score = (moe_score)feed_enum(feed, 4);
  r->renormalize = feed_enum(feed, 2);
  r->renorm_epsilon = r->renormalize ? feed_real(feed, tame) : 0;
  r->scale = feed_real(feed, tame);
  if (feed_below(feed, 3) == 0) {
    r->groups = feed_size(feed);
    r->topk_groups = feed_size(feed);
    r->group_score = (moe_group_score)feed_enum(feed, 3);
  }
  r->balance = (moe_balance)feed_enum(feed, 4);
  if (r->balance != MOE_BALANCE_NONE) r->balance_coeff = feed_real(feed, tame);
  r->z_coeff = feed_real(feed, tame);
  if (r->balance == MOE_BALANCE_SEQUENCE) r->sequence_tokens = feed_size(feed);
}

static void feed_act(struct feed *feed, moe_act_desc *a, int *tame) {
  a->kind = (moe_activation)feed_enum(feed, MOE_ACT_COUNT);
  a->gated = feed_enum(feed, 2);
  if (feed_below(feed, 4) == 0) a->alpha = feed_real(feed, tame);
  if (feed_below(feed, 4) == 0) a->beta = feed_real(feed, tame);
  a->gate_max = feed_real(feed, tame);
  if (!a->gated) return;
  if (feed_below(feed, 2)) {
    a->up_max = feed_real(feed, tame);
    a->up_min = -a->up_max;
  }
  a->up_offset = feed_real(feed, tame);
  a->up_beta = feed_real(feed, tame);
  a->layout = (moe_layout)feed_enum(feed, 3);
  if (a->layout == MOE_LAYOUT_INTERLEAVED) a->interleave = feed_size(feed);
}

static void feed_extras(struct feed *feed, moe_config *c, int *tame) {
  c->weight_on_input = feed_enum(feed, 2);
  c->transposed = feed_enum(feed, 2);
  c->recompute = (moe_recompute)feed_enum(feed, 2);
  c->schedule = (moe_schedule)feed_enum(feed, 2);
  c->sm_limit = feed_below(feed, 4) ? 0 : feed_size(feed);
  if (c->entry == MOE_ENTRY_ROWS) return;
  c->capacity_factor = feed_below(feed, 3) ? 0 : feed_real(feed, tame);
  if (c->capacity_factor > 0) c->drop = (moe_drop)feed_enum(feed, 2);
  c->shared_inter = feed_below(feed, 3) ? 0 : feed_size(feed);
  c->latent = feed_below(feed, 3) ? 0 : feed_size(feed);
}

static moe_config feed_config(struct feed *feed, int *tame) {
  moe_config c = MOE_CONFIG_INIT;
  *tame = 1;
  if (feed_below(feed, 8) == 0) {
    feed_bytes(feed, &c, sizeof c);
    if (feed_below(feed, 2)) c.size = sizeof c;
    if (c.size > sizeof c)
      c.size %= sizeof c + 1; /* a struct is as large as it says: that is the caller's word */
    *tame = 0;
    return c;
  }
  c.hidden = feed_size(feed);
  c.inter = feed_size(feed);
  c.experts = feed_size(feed);
  c.entry = (moe_entry)feed_enum(feed, 4);
  c.topk = c.entry == MOE_ENTRY_ROWS ? 1 : 1 + feed_size(feed) % 4;
  c.dtype = (moe_dtype)feed_enum(feed, 4);
  c.logits_dtype = (moe_dtype)feed_enum(feed, 4);
  if (feed_below(feed, 2)) c.router_dtype = MOE_FP32;
  if (feed_below(feed, 2)) c.grad_dtype = MOE_FP32;
  feed_act(feed, &c.act, tame);
  if (c.entry <= MOE_ENTRY_LOGITS) feed_router(feed, &c.router, tame);
  feed_extras(feed, &c, tame);
  return c;
}

/* ---- sizes ------------------------------------------------------------------------------------------------------ */

static void expect_sizes(const moe_plan *plan, struct feed *feed) {
  const int64_t tokens = feed_size(feed);
  char text[256];
  const size_t room = feed_below(feed, 255), workspace = moe_plan_workspace(plan, tokens),
               saved = moe_plan_saved(plan, tokens);
  memset(text, 'x', sizeof text);
  const size_t length = moe_plan_describe(plan, tokens, text, room);
  PROMISE(length > 0 && text[room] == 'x', "the description leaves its %zu bytes", room);
  PROMISE(room == 0 || memchr(text, 0, room) != NULL, "the description has no end");
  if (tokens < 0)
    PROMISE(workspace == SIZE_MAX && saved == SIZE_MAX, "sizes for %lld tokens", (long long)tokens);
  if (tokens < 1 || workspace == SIZE_MAX) return;
  PROMISE(moe_plan_workspace(plan, tokens - 1) <= workspace, "workspace shrinks at %lld", (long long)tokens);
  PROMISE(moe_plan_saved(plan, tokens / 2) <= saved, "saved shrinks at %lld", (long long)tokens);
}

/* ---- a run ------------------------------------------------------------------------------------------------------ */

/* The tool's arrays, and their sizes, want the types that the library would choose. */
static moe_config with_dtypes(const moe_config *config) {
  moe_config c = *config;
  if (c.dtype == MOE_DTYPE_DEFAULT) c.dtype = MOE_BF16;
  if (c.logits_dtype == MOE_DTYPE_DEFAULT) c.logits_dtype = MOE_FP32;
  return c;
}

static struct problem feed_problem(struct feed *feed, const moe_config *config) {
  struct problem p = {.config = with_dtypes(config), .seed = 1 + feed_below(feed, 9), .backward = 1};
  const int routed = problem_routed(&p), rows = config->entry == MOE_ENTRY_ROWS;
  p.tokens = (int64_t)feed_below(feed, TOKENS);
  p.bias = (int)feed_below(feed, 2);
  p.router_bias = routed && feed_below(feed, 2);
  p.correction_bias = routed && feed_below(feed, 2);
  p.replay = routed && feed_below(feed, 4) == 0;
  p.mask = !rows && feed_below(feed, 3) == 0;
  p.invalid = (p.replay || config->entry == MOE_ENTRY_IDS) && feed_below(feed, 2);
  p.accumulate = config->grad_dtype == MOE_FP32 && feed_below(feed, 2);
  p.skew = (enum skew)feed_below(feed, SKEW_FILE);
  p.shared_gate = config->shared_inter > 0 && feed_below(feed, 2);
  return p;
}

/* The limits of `moeblas check` allow for the random problem, not for one that was searched for: sums that cancel pass them
 * without a bug. What is far off is none of that. */
static void expect_oracle(moe_context *ctx, const struct problem *problem, int tame) {
  struct sample sample;
  struct run run;
  struct verdict v = {.row = -1};
  char error[PROBLEM_ERROR];
  PROMISE(sample_make(&sample, problem, error, sizeof error), "%s", error);
  if (check_run(ctx, &sample, &run, &v)) {
    PROMISE(run_damaged(&run) == T_COUNT, "%s: its surroundings were written",
            tensor_name(run_damaged(&run)));
    if (tame) check_compare(&sample, &run, &v);
    check_run_close(&run);
    PROMISE(!tame || !v.failed || (v.text[0] == '\0' && v.error < 0.5), "%s: %g, %s", tensor_name(v.tensor),
            v.error, v.text);
  } else {
    PROMISE(v.refused || v.failed, "neither run nor refused");
    fuzz_sentence(v.text, sizeof v.text);
  }
  sample_free(&sample);
}

/* ---- a mistake of the caller -------------------------------------------------------------------------------------- */

static void spoil(struct layer *l, struct feed *feed) {
  static const int64_t counts[] = {-1, INT64_MIN, INT64_MAX, (int64_t)1 << 31, (int64_t)1 << 40};
  struct layer_array *array = &l->array[feed_below(feed, LAYER_ARRAY_COUNT)];
  switch (feed_below(feed, 7)) {
  case 0: array->data = NULL; break;
  case 1: array->data = array->data ? (char *)array->data + 1 + feed_below(feed, 15) : NULL; break;
  case 2: l->forward.tokens = l->backward.tokens = counts[feed_below(feed, 5)]; break;
  case 3: l->forward.workspace_bytes = l->backward.workspace_bytes = feed_below(feed, 64); break;
  case 4: l->forward.saved_bytes = l->backward.saved_bytes = feed_below(feed, 64); break;
  case 5: l->forward.size = l->backward.size = feed_below(feed, 8); break;
  default: l->backward.accumulate = 2 + (int)feed_below(feed, 9); break;
  }
  layer_bind(l);
}

static void expect_call(moe_status status, const char *call) {
  static const moe_status refusals[] = {MOE_ERROR_ARGUMENT, MOE_ERROR_UNSUPPORTED, MOE_ERROR_WORKSPACE};
  for (int i = 0; i < 3; i++)
    if (status == refusals[i]) fuzz_sentence(moe_last_error(), 512);
  PROMISE(status == MOE_OK || (status >= MOE_ERROR_ARGUMENT && status <= MOE_ERROR_WORKSPACE), "%s: %s: %s",
          call, moe_status_name(status), moe_last_error());
}

static void expect_mistake(const moe_config *config, struct feed *feed) {
  struct layer_options o = {
      .tokens = (int64_t)feed_below(feed, TOKENS), .seed = 7, .threads = 1, .fill = 0xff};
  struct layer l;
  feed_bytes(feed, &o.without, sizeof o.without);
  o.without &= ~(BIT(SAVED) | BIT(WORKSPACE));
  if (layer_open(&l, config, &o) != MOE_OK) return;
  spoil(&l, feed);
  expect_call(moe_forward(l.plan, &l.forward, NULL), "forward");
  expect_call(moe_backward(l.plan, &l.backward, NULL), "backward");
  PROMISE(layer_overrun(&l) < 0, "%s: its surroundings were written", l.array[layer_overrun(&l)].name);
  layer_close(&l);
}

static int is_small(const moe_config *c) {
  const int64_t sizes[] = {c->hidden, c->inter, c->experts, c->shared_inter, c->latent};
  struct problem problem = {.config = with_dtypes(c), .tokens = TOKENS, .backward = 1};
  for (int i = 0; i < 5; i++)
    if (sizes[i] > 4096) return 0;
  return problem_bytes(&problem) <= BYTES;
}

int fuzz_api(const uint8_t *data, size_t size) {
  struct feed feed = {data, size};
  moe_context *ctx;
  moe_plan *plan = NULL;
  int tame;
  PROMISE(moe_context_create(&ctx, MOE_BACKEND_CPU, 1) == MOE_OK, "%s", moe_last_error());
  const moe_config config = feed_config(&feed, &tame);
  const moe_status status = moe_plan_create(&plan, ctx, &config);
  if (status == MOE_OK) {
    expect_sizes(plan, &feed);
    if (is_small(&config)) {
      const struct problem problem = feed_problem(&feed, &config);
      expect_oracle(ctx, &problem, tame);
      expect_mistake(&config, &feed);
    }
  } else {
    PROMISE(plan == NULL && (status == MOE_ERROR_ARGUMENT || status == MOE_ERROR_UNSUPPORTED), "%s: %s",
            moe_status_name(status), moe_last_error());
    fuzz_sentence(moe_last_error(), 512);
  }
  moe_plan_destroy(plan);
  moe_context_destroy(ctx);
  return 0;
}
