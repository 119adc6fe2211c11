/* SPDX-License-Identifier: Apache-2.0
 *
 * The oracle against things that are not code: central differences of its own scalar loss, values worked out by hand, and
 * the neighbours of every bf16 and fp16 number. The choice of experts and the drops are frozen during differences. */
#include "test.h"

#include <float.h>
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

/* ---- values worked out by hand */

static int near(double found, double wanted) { return fabs(found - wanted) <= 1e-6 * fabs(wanted) + 1e-12; }

/* One expert with W1 the identity and W2 = (1,0): x holds gate and up, interleaved, and out[0] is the activation. */
TEST(gpt_oss_clamped_swiglu) {
  moe_config c = {.hidden = 2, .inter = 1, .experts = 1, .topk = 1, .entry = MOE_ENTRY_LOGITS};
  c.act = (moe_act_desc){.kind = MOE_ACT_SILU, .gated = 1, .alpha = 1.702f, .gate_max = 7, .up_min = -7};
  c.act.up_max = 7, c.act.up_offset = 1, c.act.layout = MOE_LAYOUT_INTERLEAVED;
  const double x[] = {2, 3, 9, -8, -1, 0.5, 7, 7}, logits[4] = {0}, dout[] = {1, 0, 1, 0, 1, 0, 1, 0};
  const double w1[] = {1, 0, 0, 1}, w2[] = {1, 0};
  const double out[] = {7.74263449, -41.9997188, -0.231306351, 55.9996250};
  struct oracle o = {.config = &c, .tokens = 4, .x = x, .logits = logits, .w1 = w1, .w2 = w2, .dout = dout};
  REQUIRE(oracle_run(&o) == 0, "no memory");
  for (int t = 0; t < 4; t++) EXPECT(near(o.out[2 * t], out[t]), "token %d: %.9g", t, o.out[2 * t]);
  EXPECT(o.dx[2] == 0 && o.dx[3] == 0, "beyond the clamps the gradient is (%g,%g)", o.dx[2], o.dx[3]);
  EXPECT(near(o.dx[6], 8.00058463) && near(o.dx[7], 6.99995313), "on the clamps it is (%.9g,%.9g)", o.dx[6],
         o.dx[7]);
  oracle_free(&o);
}

/* Scores .9 .1 | .6 .5 | .7 .2 | .55 .58, the last one corrected to .88. */
TEST(deepseek_group_routing) {
  const double score[8] = {.9, .1, .6, .5, .7, .2, .55, .58}, bias[8] = {0, 0, 0, 0, 0, 0, 0, .3};
  const int32_t ids[3][3] = {{0, 7, 6}, {7, 2, 6}, {0, 7, 6}}; /* groups 0 3, 3 1, 0 3 */
  const double weights[3][3] = {{.9, .58, .55}, {.58, .6, .55}, {.9, .58, .55}};
  double logits[8], one = 1;
  for (int e = 0; e < 8; e++) logits[e] = log(score[e] / (1 - score[e]));
  for (int n = 0; n < 3; n++) {
    moe_config c = {.hidden = 1, .inter = 1, .experts = 8, .topk = 3, .entry = MOE_ENTRY_LOGITS};
    c.router = (moe_router_desc){.score = MOE_SCORE_SIGMOID, .renormalize = 1, .scale = 2.5f, .groups = 4};
    c.router.topk_groups = 2, c.router.group_score = (moe_group_score)n;
    const double w[8] = {0};
    struct oracle o = {.config = &c, .tokens = 1, .x = &one, .logits = logits, .correction_bias = bias};
    o.w1 = o.w2 = w;
    REQUIRE(oracle_run(&o) == 0, "no memory");
    const double sum = weights[n][0] + weights[n][1] + weights[n][2];
    for (int j = 0; j < 3; j++) {
      EXPECT(o.ids[j] == ids[n][j], "group score %d: id %d is %d", n, j, (int)o.ids[j]);
      EXPECT(near(o.weights[j], 2.5 * weights[n][j] / sum), "group score %d: weight %.9g", n, o.weights[j]);
    }
    EXPECT(o.keys[4] == -INFINITY && near(o.keys[7], .88), "keys %g and %g", o.keys[4], o.keys[7]);
    oracle_free(&o);
  }
}

TEST(ties_nan_and_infinities) {
  const double logits[] = {NAN, 1, 1, -INFINITY, INFINITY, 0, INFINITY, NAN, NAN, -INFINITY, NAN, NAN};
  const int32_t ids[] = {1, 2, 0, 0, 2, 1, 0, 1, 2};
  const double weights[] = {.5, .5, 0, .5, .5, 0, 0, 0, 0};
  const double x[3] = {1, 1, 1}, w[4] = {1, 1, 1, 1};
  for (int score = 0; score < 4; score++) {
    moe_config c = {.hidden = 1, .inter = 1, .experts = 4, .topk = 3, .entry = MOE_ENTRY_LOGITS};
    c.router = (moe_router_desc){.score = (moe_score)score, .balance = MOE_BALANCE_BATCH, .balance_coeff = 1};
    struct oracle o = {.config = &c, .tokens = 3, .x = x, .logits = logits, .w1 = w, .w2 = w, .dout = x};
    REQUIRE(oracle_run(&o) == 0, "no memory");
    for (int i = 0; i < 9; i++) {
      EXPECT(o.ids[i] == ids[i], "score %d: id %d is %d", score, i, (int)o.ids[i]);
      if (score < 2) EXPECT(near(o.weights[i], weights[i]), "score %d: weight %g", score, o.weights[i]);
    }
    EXPECT(isfinite(o.losses[0]), "score %d: balancing loss %g", score, o.losses[0]);
    for (int i = 0; i < 12; i++)
      EXPECT(isfinite(o.dlogits[i]) && (o.dlogits[i] == 0 || isfinite(logits[i]) || logits[i] > 0),
             "score %d: dlogits[%d] = %g", score, i, o.dlogits[i]);
    oracle_free(&o);
  }
}

/* Scores (.75,.25) and (.4,.6) of two tokens, and a masked one between them. */
TEST(losses_by_hand) {
  const double logits[] = {log(3), 0, NAN, NAN, log(2), log(3)}, x[3] = {0}, w[2] = {0};
  const double wanted[] = {0, 1, (2 * .75 + 2 * .6) / 2, 2 * (5. / 8 * .575 + 3. / 8 * .425)};
  const int64_t counts[] = {4, 2, 6};
  const uint8_t mask[] = {0, 1, 0};
  for (int balance = 0; balance < 4; balance++) {
    moe_config c = {.hidden = 1, .inter = 1, .experts = 2, .topk = 1, .entry = MOE_ENTRY_LOGITS};
    c.router = (moe_router_desc){.balance = (moe_balance)balance, .balance_coeff = .5f, .z_coeff = 2};
    c.router.sequence_tokens = balance == MOE_BALANCE_SEQUENCE ? 2 : 0;
    struct oracle o = {.config = &c, .tokens = 3, .x = x, .logits = logits, .w1 = w, .w2 = w};
    o.padding_mask = mask, o.global_counts = counts;
    REQUIRE(oracle_run(&o) == 0, "no memory");
    EXPECT(near(o.losses[0], .5 * wanted[balance]), "balance %d: %.9g", balance, o.losses[0]);
    EXPECT(near(o.losses[1], pow(log(4), 2) + pow(log(5), 2)), "z-loss %.9g", o.losses[1]);
    EXPECT(o.ids[1] == -1 && o.weights[1] == 0 && o.out[1] == 0, "a masked token has id %d", (int)o.ids[1]);
    EXPECT(o.counts[0] == 1 && o.counts[1] == 1, "counts %d %d", (int)o.counts[0], (int)o.counts[1]);
    oracle_free(&o);
  }
}

TEST(drops_by_hand) {
  const double weights[3][4] = {{.1, .9, .5, .9}, {.5, .5, .5, .1}, {NAN, .1, .2, NAN}};
  const int32_t rows[3][2][4] = {
      {{-1, 0, -1, 1}, {0, 1, -1, -1}}, {{0, 1, -1, -1}, {0, 1, -1, -1}}, {{-1, 0, 1, -1}, {0, 1, -1, -1}}};
  const int32_t ids[4] = {0};
  const double x[4] = {0}, w[2] = {0};
  for (int n = 0; n < 6; n++) {
    moe_config c = {.hidden = 1, .inter = 1, .experts = 2, .topk = 1, .entry = MOE_ENTRY_IDS};
    c.capacity_factor = .9f, c.drop = (moe_drop)(n % 2); /* ceil(4 / 2 * .9) = 2 */
    struct oracle o = {.config = &c, .tokens = 4, .x = x, .given_ids = ids, .given_weights = weights[n / 2]};
    o.w1 = o.w2 = w;
    REQUIRE(oracle_run(&o) == 0, "no memory");
    for (int s = 0; s < 4; s++)
      EXPECT(o.row_of_slot[s] == rows[n / 2][n % 2][s], "case %d: row %d", n, (int)o.row_of_slot[s]);
    EXPECT(o.counts[0] == 4 && o.offsets[1] == 2 && o.offsets[2] == 2, "counts before drops %d",
           (int)o.counts[0]);
    oracle_free(&o);
    o.tokens = 0;
    EXPECT(oracle_run(&o) == 0 && o.offsets[2] == 0, "no tokens");
    oracle_free(&o);
  }
}

/* ---- rounding */

/* Every rounding of the staged mode, written out for a layer whose every dimension is 1. */
static void staged_chain(const double *v, int on_input, moe_dtype dtype, moe_dtype grad) {
#define D(value)  oracle_round(value, dtype)
#define G(value)  oracle_round(value, grad)
#define F(value)  oracle_act(MOE_ACT_SILU, value, 1, 0)
#define DF(value) oracle_dact(MOE_ACT_SILU, value, 1, 0)
  moe_config c = {.hidden = 1, .inter = 1, .experts = 1, .topk = 1, .entry = MOE_ENTRY_IDS, .dtype = dtype};
  c.grad_dtype = grad, c.weight_on_input = on_input, c.shared_inter = 1, c.latent = 1;
  const int32_t id = 0;
  struct oracle o = {
      .config = &c, .staged = dtype, .tokens = 1, .given_ids = &id, .x = v, .given_weights = v + 1};
  o.w1 = v + 2, o.b1 = v + 3, o.w2 = v + 4, o.b2 = v + 5, o.shared_w1 = v + 6, o.shared_w2 = v + 7;
  o.shared_gate = v + 8, o.latent_down = v + 9, o.latent_up = v + 10, o.dout = v + 11;
  const double in = on_input ? v[1] : 1, by = on_input ? 1 : v[1];
  const double xl = D(v[0] * v[9]), h = D(in * (xl * v[2]) + v[3]), y = D(D(F(h)) * v[4] + v[5]),
               cl = D(by * y);
  const double hs = D(v[0] * v[6]), gate = 1 / (1 + exp(-v[0] * v[8])), ys = D(D(F(hs)) * v[7]);
  const double g = D(v[11] * v[10]), da = g * v[4], dh = D(DF(h) * (by * da)), row = D(dh * v[2]);
  const double dxl = D(in * row), dp = on_input ? row * xl : g * v[5] + da * F(h);
  const double dhs = D(DF(hs) * (gate * (v[11] * v[7]))), dgate = v[11] * v[7] * F(hs) * gate * (1 - gate);
  REQUIRE(oracle_run(&o) == 0, "no memory");
  const double pairs[][2] = {{o.h[0], h},
                             {o.out[0], D(cl * v[10] + gate * ys)},
                             {o.dx[0], D(D(dhs * v[6]) + dgate * v[8] + dxl * v[9])},
                             {o.dtopk_weights[0], dp},
                             {o.dw1[0], G(in * dh * xl)},
                             {o.db1[0], G(dh)},
                             {o.dw2[0], G(g * D(by * F(h)))},
                             {o.db2[0], G(by * g)},
                             {o.dshared_w1[0], G(dhs * v[0])},
                             {o.dshared_w2[0], G(v[11] * D(gate * F(hs)))},
                             {o.dshared_gate[0], G(dgate * v[0])},
                             {o.dlatent_down[0], G(dxl * v[0])},
                             {o.dlatent_up[0], G(v[11] * cl)}};
  for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
    EXPECT(fabs(pairs[i][0] - pairs[i][1]) <= 1e-13 * fabs(pairs[i][1]),
           "dtype %d grad %d value %d: %.17g, wanted %.17g", (int)dtype, (int)grad, (int)i, pairs[i][0],
           pairs[i][1]);
  oracle_free(&o);
}

TEST(staged_rounds_where_documented) {
  uint64_t seed = 5;
  for (int n = 0; n < 600; n++) {
    const moe_dtype dtype = (moe_dtype)(MOE_FP32 + n % 3);
    double v[12];
    fill(v, 12, 2, &seed);
    for (int i = 0; i < 12; i++) v[i] = oracle_round(v[i], i == 1 ? MOE_FP32 : dtype);
    staged_chain(v, n / 3 % 2, dtype, n / 6 % 2 ? MOE_FP32 : dtype);
  }
}

TEST(staged_rounds_dlogits) {
  struct problem *p = malloc(sizeof *p);
  REQUIRE(p != NULL, "no memory");
  moe_config c = base_config(MOE_ENTRY_LOGITS);
  c.logits_dtype = MOE_BF16;
  setup(p, &c, ROUTER_BIAS, 3);
  struct oracle exact = p->o, staged = p->o;
  staged.staged = MOE_FP32;
  REQUIRE(oracle_run(&exact) == 0 && oracle_run(&staged) == 0, "no memory");
  double sum = 0;
  for (int i = 0; i < TOKENS * EXPERTS; i++) {
    if (i % EXPERTS == 0) sum += staged.dlogits[i];
    EXPECT(staged.dlogits[i] == oracle_round(staged.dlogits[i], MOE_BF16), "%g", staged.dlogits[i]);
    EXPECT(fabs(staged.dlogits[i] - exact.dlogits[i]) <= 0x1p-8 * fabs(exact.dlogits[i]) + 1e-6, "element %d",
           i);
  }
  EXPECT(near(staged.drouter_bias[0], sum), "%g, wanted %g", staged.drouter_bias[0], sum);
  oracle_free(&exact);
  oracle_free(&staged);
  free(p);
}

/* The number with this code: `mantissa` bits below an exponent whose least normal value is 2^lowest. */
static double decode(int code, int mantissa, int lowest) {
  const int exponent = code >> mantissa, fraction = code & ((1 << mantissa) - 1);
  return exponent == 0 ? ldexp(fraction, lowest - mantissa)
                       : ldexp(fraction + (1 << mantissa), lowest - mantissa + exponent - 1);
}

static void check_rounding(moe_dtype dtype, int mantissa, int lowest, int infinity) {
  for (int code = 0; code < infinity; code++) {
    const double low = decode(code, mantissa, lowest), high = decode(code + 1, mantissa, lowest);
    const double above = code + 1 == infinity ? INFINITY : high, middle = (low + high) / 2;
    for (int sign = -1; sign < 2; sign += 2) {
      EXPECT(oracle_round(sign * low, dtype) == sign * low, "dtype %d code %d", (int)dtype, code);
      EXPECT(oracle_round(sign * middle, dtype) == sign * (code % 2 ? above : low), "tie above %d", code);
      EXPECT(oracle_round(sign * nextafter(middle, 0), dtype) == sign * low, "below the tie of %d", code);
      EXPECT(oracle_round(sign * nextafter(middle, INFINITY), dtype) == sign * above, "above it, %d", code);
    }
  }
}

TEST(rounding_to_every_neighbour) {
  check_rounding(MOE_BF16, 7, -126, 0x7f80);
  check_rounding(MOE_FP16, 10, -14, 0x7c00);
  for (int dtype = 0; dtype <= (int)MOE_FP16; dtype++) {
    EXPECT(isnan(oracle_round(NAN, (moe_dtype)dtype)), "NaN in dtype %d", dtype);
    EXPECT(oracle_round(-INFINITY, (moe_dtype)dtype) == -INFINITY, "-inf in dtype %d", dtype);
    EXPECT(signbit(oracle_round(-0.0, (moe_dtype)dtype)), "-0 in dtype %d", dtype);
  }
  EXPECT(oracle_round(0x1.000001p0, MOE_FP32) == 1 && oracle_round(0x1.000003p0, MOE_FP32) == 0x1.000004p0,
         "fp32");
  EXPECT(oracle_round(0x1.0000010000001p0, MOE_FP32) == 0x1.000002p0, "fp32 above a tie");
  EXPECT(oracle_round(0.1, MOE_DTYPE_DEFAULT) == 0.1, "ideal values are not rounded");
}

TEST_MAIN()
