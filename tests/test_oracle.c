/* SPDX-License-Identifier: Apache-2.0
 *
 * The gradients of the oracle against central differences of its own scalar loss, and its staged results against its ideal
 * ones. The choice of experts and the drops are frozen during differences. What the oracle computes in the first place
 * is checked by hand in test_oracle_golden.c. */
#include "test.h"

#include <math.h>

#include "oracle.h"

enum {
  TOKENS = 5,
  HIDDEN = 6,
  INTER = 4,
  EXPERTS = 6,
  TOPK = 2,
  SHARED = 2,
  LATENT = 3
};
enum {
  BIAS = 1,
  ROUTER_BIAS = 2,
  CORRECTION = 4,
  MASK = 8,
  GIVEN = 16,
  SHARED_GATE = 32,
  SKIP_LOSSES = 64,
  NO_GIVEN_WEIGHTS = 128
};

struct problem {
  moe_config config;
  struct oracle o;
  double x[32], logits[32], router_weight[64], router_bias[8], correction_bias[8], given_weights[16];
  double w1[512], b1[64], w2[256], b2[64], shared_w1[64], shared_w2[64], shared_gate[8];
  double latent_down[32], latent_up[32], dout[32];
  int32_t given_ids[16], row_offset[8];
  uint8_t mask[8];
  int64_t global_counts[8];
};

static void fill(double *v, size_t n, double scale, uint64_t *seed) {
  for (size_t i = 0; i < n; i++) v[i] = scale * (double)test_uniform(seed);
}
#define FILL(array, scale) fill(array, sizeof(array) / sizeof *(array), scale, &seed)

static void fill_all(struct problem *p, uint64_t seed) {
  FILL(p->x, 1.5), FILL(p->logits, 2), FILL(p->router_weight, 1), FILL(p->router_bias, 1);
  FILL(p->correction_bias, 0.3), FILL(p->given_weights, 1), FILL(p->w1, 0.8), FILL(p->b1, 0.5);
  FILL(p->w2, 0.8), FILL(p->b2, 0.5), FILL(p->shared_w1, 0.8), FILL(p->shared_w2, 0.8);
  FILL(p->shared_gate, 0.8), FILL(p->latent_down, 1), FILL(p->latent_up, 1), FILL(p->dout, 1);
  const int32_t ids[TOKENS * TOPK] = {3, 1, 4, 4, -1, 5, EXPERTS, 0, 0, 3}; /* a double one, two to skip */
  const int32_t offsets[EXPERTS + 1] = {0, 1, 1, 3, 3, 4, 4};               /* one tail row */
  memcpy(p->given_ids, ids, sizeof ids);
  memcpy(p->row_offset, offsets, sizeof offsets);
  for (int e = 0; e <= EXPERTS; e++) p->global_counts[e] = 3 + e;
}

/* All inputs that the entry and the flags ask for. */
static void setup(struct problem *p, const moe_config *config, unsigned flags, uint64_t seed) {
  const moe_entry entry = config->entry;
  const int routed = entry == MOE_ENTRY_HIDDEN || entry == MOE_ENTRY_LOGITS;
  memset(p, 0, sizeof *p);
  fill_all(p, seed);
  p->config = *config;
  p->o = (struct oracle){.config = &p->config, .tokens = TOKENS, .x = p->x, .w1 = p->w1, .w2 = p->w2};
  struct oracle *o = &p->o;
  o->dout = p->dout, o->loss_scale = 0.7, o->skip_losses = (flags & SKIP_LOSSES) != 0;
  o->shared_w1 = p->shared_w1, o->shared_w2 = p->shared_w2;
  o->latent_down = p->latent_down, o->latent_up = p->latent_up, o->global_counts = p->global_counts;
  if (flags & BIAS) o->b1 = p->b1, o->b2 = p->b2;
  if (routed && flags & ROUTER_BIAS) o->router_bias = p->router_bias;
  if (routed && flags & CORRECTION) o->correction_bias = p->correction_bias;
  if (flags & SHARED_GATE) o->shared_gate = p->shared_gate;
  if (entry == MOE_ENTRY_HIDDEN) o->router_weight = p->router_weight;
  if (entry == MOE_ENTRY_LOGITS) o->logits = p->logits;
  if (entry == MOE_ENTRY_IDS || flags & GIVEN) o->given_ids = p->given_ids;
  if (!routed && !(flags & NO_GIVEN_WEIGHTS)) o->given_weights = p->given_weights;
  if (entry == MOE_ENTRY_ROWS) o->row_offset = p->row_offset;
  if (flags & MASK) {
    p->mask[1] = 1, o->padding_mask = p->mask;
    for (int64_t i = 0; i < config->hidden; i++) p->x[config->hidden + i] = NAN;
  }
}

static double loss(const struct problem *p, const struct oracle *frozen) {
  struct oracle o = p->o;
  double sum = 0;
  o.dout = NULL, o.use_ids = frozen->ids, o.use_slot_row = frozen->row_of_slot;
  if (oracle_run(&o) != 0) return NAN;
  for (int64_t i = 0; i < o.tokens * p->config.hidden; i++) sum += p->dout[i] * o.out[i];
  if (!o.skip_losses) sum += o.loss_scale * (o.losses[0] + o.losses[1]);
  oracle_free(&o);
  return sum;
}

static void check(struct problem *p, const struct oracle *got, const char *label, const char *what, double *v,
                  int64_t n, const double *gradient) {
  const double step = 1e-4;
  double largest = 0;
  REQUIRE(gradient != NULL, "%s: d%s is NULL", label, what);
  for (int64_t i = 0; i < n; i++) largest = fmax(largest, fabs(gradient[i]));
  for (int64_t i = 0; i < n; i++) {
    const double value = v[i];
    if (isnan(value)) {
      EXPECT(gradient[i] == 0, "%s: d%s[%d] of a masked token is %g", label, what, (int)i, gradient[i]);
      continue;
    }
    v[i] = value + step;
    const double above = loss(p, got);
    v[i] = value - step;
    const double below = loss(p, got);
    v[i] = value;
    const double slope = (above - below) / (2 * step);
    EXPECT(fabs(slope - gradient[i]) <= 1e-6 * fabs(slope) + 2e-8 * (1 + largest),
           "%s: d%s[%d] = %.10g, difference quotient %.10g", label, what, (int)i, gradient[i], slope);
  }
}

static void check_experts(struct problem *p, const struct oracle *got, const char *label) {
  const moe_config *c = &p->config;
  const int64_t width = c->latent ? c->latent : c->hidden, halves = c->act.gated ? 2 : 1;
  check(p, got, label, "w1", p->w1, c->experts * halves * c->inter * width, got->dw1);
  check(p, got, label, "w2", p->w2, c->experts * width * c->inter, got->dw2);
  if (p->o.b1) check(p, got, label, "b1", p->b1, c->experts * halves * c->inter, got->db1);
  if (p->o.b2) check(p, got, label, "b2", p->b2, c->experts * width, got->db2);
  if (c->shared_inter) {
    check(p, got, label, "shared_w1", p->shared_w1, halves * c->shared_inter * c->hidden, got->dshared_w1);
    check(p, got, label, "shared_w2", p->shared_w2, c->shared_inter * c->hidden, got->dshared_w2);
    if (p->o.shared_gate) check(p, got, label, "shared_gate", p->shared_gate, c->hidden, got->dshared_gate);
  }
  if (c->latent) {
    check(p, got, label, "latent_down", p->latent_down, c->latent * c->hidden, got->dlatent_down);
    check(p, got, label, "latent_up", p->latent_up, c->latent * c->hidden, got->dlatent_up);
  }
}

static void check_router(struct problem *p, const struct oracle *got, const char *label) {
  const moe_config *c = &p->config;
  if (p->o.router_weight)
    check(p, got, label, "router_weight", p->router_weight, c->experts * c->hidden, got->drouter_weight);
  if (p->o.logits) check(p, got, label, "logits", p->logits, TOKENS * c->experts, got->dlogits);
  if (p->o.router_bias) check(p, got, label, "router_bias", p->router_bias, c->experts, got->drouter_bias);
  if (p->o.given_weights)
    check(p, got, label, "topk_weights", p->given_weights, TOKENS * c->topk, got->dtopk_weights);
}

/* 1 if a value of h is so near a kink of the activation that a difference quotient would straddle it. */
static int near_kink(const struct problem *p, const struct oracle *got) {
  const moe_act_desc *act = &p->config.act;
  const int64_t values = got->offsets[EXPERTS] * p->config.inter * (act->gated ? 2 : 1);
  const int bent = act->kind == MOE_ACT_RELU || act->kind == MOE_ACT_RELU2 || act->kind == MOE_ACT_RELU2_TANH;
  const double kinks[] = {bent ? 0 : NAN, act->gate_max != 0 ? act->gate_max : NAN,
                          act->up_min != 0 ? act->up_min : NAN, act->up_max != 0 ? act->up_max : NAN};
  int64_t beyond = 0;
  for (int64_t i = 0; i < values; i++) {
    beyond += got->h[i] > act->gate_max;
    for (int n = 0; n < 4; n++)
      if (fabs(got->h[i] - kinks[n]) < 1e-3) return 1;
  }
  EXPECT(act->gate_max == 0 || (beyond > 0 && beyond < values), "%d values beyond the clamp", (int)beyond);
  return 0;
}

/* All gradients of a configuration against differences, on the first data that keep clear of kinks. */
static void differentiate(const moe_config *config, unsigned flags, const char *label) {
  struct problem *p = malloc(sizeof *p);
  REQUIRE(p != NULL, "no memory");
  for (uint64_t seed = 1; seed < 40; seed++) {
    setup(p, config, flags, seed);
    struct oracle got = p->o;
    REQUIRE(oracle_run(&got) == 0, "%s: no memory", label);
    if (!near_kink(p, &got)) {
      check(p, &got, label, "x", p->x, TOKENS * config->hidden, got.dx);
      check_experts(p, &got, label);
      check_router(p, &got, label);
      oracle_free(&got);
      free(p);
      return;
    }
    oracle_free(&got);
  }
  free(p);
  EXPECT(0, "%s: no data without kinks", label);
}

static moe_config base_config(moe_entry entry) {
  moe_config c = MOE_CONFIG_INIT;
  c.hidden = HIDDEN, c.inter = INTER, c.experts = EXPERTS, c.topk = entry == MOE_ENTRY_ROWS ? 1 : TOPK;
  c.entry = entry, c.act.gated = 1;
  return c;
}

TEST(gradients_of_every_activation) {
  for (int kind = 0; kind < (int)MOE_ACT_COUNT; kind++) {
    for (int form = 0; form < 3; form++) {
      char label[64];
      moe_config c = base_config(MOE_ENTRY_IDS);
      c.act.kind = (moe_activation)kind, c.act.gated = form > 0;
      if (form == 2) {
        c.act.gate_max = 0.4f, c.act.up_min = -0.5f, c.act.up_max = 0.3f;
        c.act.up_offset = 1, c.act.up_beta = kind % 2 ? 2.5f : 0;
      }
      snprintf(label, sizeof label, "activation %d form %d", kind, form);
      differentiate(&c, BIAS, label);
    }
  }
}

TEST(gradients_of_every_score) {
  for (int score = 0; score <= (int)MOE_SCORE_SQRT_SOFTPLUS; score++) {
    for (int n = 0; n < 8; n++) {
      char label[64];
      moe_config c = base_config(MOE_ENTRY_LOGITS);
      c.inter = 2, c.router.score = (moe_score)score, c.router.renormalize = n % 2;
      if (n % 2) c.router.renorm_epsilon = 0.1f, c.router.scale = 2.5f;
      if (n / 2 > 0)
        c.router.groups = 3, c.router.topk_groups = 2, c.router.group_score = (moe_group_score)(n / 2 - 1);
      snprintf(label, sizeof label, "score %d variant %d", score, n);
      differentiate(&c, n / 2 == 2 ? CORRECTION : ROUTER_BIAS, label);
    }
  }
}

TEST(gradients_of_every_loss) {
  for (int score = 0; score <= (int)MOE_SCORE_SQRT_SOFTPLUS; score++) {
    for (int balance = 0; balance <= (int)MOE_BALANCE_GLOBAL; balance++) {
      char label[64];
      moe_config c = base_config(MOE_ENTRY_HIDDEN);
      c.inter = 1, c.router.score = (moe_score)score, c.router.balance = (moe_balance)balance;
      c.router.balance_coeff = balance ? 0.8f : 0, c.router.z_coeff = balance == 1 ? 0 : 0.3f;
      c.router.sequence_tokens = balance == MOE_BALANCE_SEQUENCE ? 2 : 0, c.router.renormalize = balance == 2;
      snprintf(label, sizeof label, "score %d balance %d", score, balance);
      differentiate(&c, balance == 3 ? MASK | ROUTER_BIAS : balance == 2 ? MASK : GIVEN, label);
    }
  }
}

TEST(gradients_of_every_entry) {
  for (int entry = 0; entry <= (int)MOE_ENTRY_ROWS; entry++) {
    for (int on_input = 0; on_input < 2; on_input++) {
      char label[64];
      moe_config c = base_config((moe_entry)entry);
      c.weight_on_input = on_input;
      if (entry < 2) c.router.balance = MOE_BALANCE_BATCH, c.router.balance_coeff = 1;
      snprintf(label, sizeof label, "entry %d weight_on_input %d", entry, on_input);
      differentiate(&c, BIAS, label);
      differentiate(&c, MASK, label);
      differentiate(&c,
                    entry < 2                ? GIVEN | SKIP_LOSSES
                    : on_input && entry == 3 ? NO_GIVEN_WEIGHTS
                                             : BIAS | MASK,
                    label);
    }
  }
}

TEST(gradients_of_layouts_shared_latent_and_drops) {
  for (int n = 0; n < 24; n++) {
    char label[64];
    moe_config c = base_config(n % 2 ? MOE_ENTRY_HIDDEN : MOE_ENTRY_IDS);
    c.act.layout = (moe_layout)(n % 3), c.transposed = n / 6 % 2, c.weight_on_input = n / 12;
    if (n % 3 == 2) c.act.interleave = n / 3 % 2 + 1;
    if (n % 4 != 1) c.shared_inter = SHARED;
    if (n % 4 != 2) c.latent = LATENT;
    if (n % 5 == 0) c.capacity_factor = 0.6f, c.drop = (moe_drop)(n % 2);
    snprintf(label, sizeof label, "combination %d", n);
    differentiate(&c, (n % 3 ? BIAS : 0) | (n % 4 ? SHARED_GATE : 0) | (n % 5 == 1 ? MASK : 0), label);
  }
}

/* The staged results are numbers of their formats, and near the ideal ones. */
static void check_staged(const char *what, const double *staged, const double *exact, int64_t n,
                         moe_dtype dtype) {
  double largest = 0;
  for (int64_t i = 0; i < n; i++) largest = fmax(largest, fabs(exact[i]));
  EXPECT(largest > 0, "%s is all 0", what);
  for (int64_t i = 0; i < n; i++) {
    EXPECT(staged[i] == oracle_round(staged[i], dtype), "%s[%d] = %.17g", what, (int)i, staged[i]);
    EXPECT(fabs(staged[i] - exact[i]) <= 0.05 * largest, "%s[%d] = %g, ideal %g", what, (int)i, staged[i],
           exact[i]);
  }
}

static void compare_staged(struct problem *p, moe_dtype grad) {
  const moe_config *c = &p->config;
  struct oracle exact = p->o, staged = p->o;
  staged.staged = MOE_BF16;
  REQUIRE(oracle_run(&exact) == 0 && oracle_run(&staged) == 0, "no memory");
  check_staged("out", staged.out, exact.out, TOKENS * HIDDEN, MOE_BF16);
  check_staged("dx", staged.dx, exact.dx, TOKENS * HIDDEN, MOE_BF16);
  check_staged("dw1", staged.dw1, exact.dw1, EXPERTS * 2 * INTER * HIDDEN, grad);
  check_staged("db1", staged.db1, exact.db1, EXPERTS * 2 * INTER, grad);
  check_staged("dw2", staged.dw2, exact.dw2, EXPERTS * HIDDEN * INTER, grad);
  check_staged("db2", staged.db2, exact.db2, EXPERTS * HIDDEN, grad);
  if (c->entry == MOE_ENTRY_HIDDEN)
    check_staged("drouter_weight", staged.drouter_weight, exact.drouter_weight, EXPERTS * HIDDEN, grad);
  if (c->entry == MOE_ENTRY_LOGITS)
    check_staged("dlogits", staged.dlogits, exact.dlogits, TOKENS * EXPERTS, c->logits_dtype);
  for (int e = 0; e < EXPERTS; e++) {
    double sum = 0;
    for (int t = 0; t < TOKENS; t++) sum += staged.dlogits[t * EXPERTS + e];
    EXPECT(fabs(staged.drouter_bias[e] - sum) < 1e-14, "drouter_bias %.17g, wanted %.17g",
           staged.drouter_bias[e], sum);
  }
  oracle_free(&exact);
  oracle_free(&staged);
}

TEST(staged_results_are_numbers_of_their_formats) {
  struct problem *p = malloc(sizeof *p);
  REQUIRE(p != NULL, "no memory");
  for (int n = 0; n < 4; n++) {
    moe_config c = base_config(n % 2 ? MOE_ENTRY_LOGITS : MOE_ENTRY_HIDDEN);
    c.logits_dtype = MOE_FP16, c.grad_dtype = n / 2 ? MOE_FP32 : MOE_DTYPE_DEFAULT;
    setup(p, &c, BIAS | ROUTER_BIAS, (uint64_t)n + 3);
    compare_staged(p, n / 2 ? MOE_FP32 : MOE_BF16);
  }
  free(p);
}

TEST_MAIN()
