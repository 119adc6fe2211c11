/* SPDX-License-Identifier: Apache-2.0
 *
 * The layer against the oracle, and what the header promises about ids, masks, NaN, empty experts,
 * accumulation and gradients that nobody wants. Every problem lies beside guard pages; outputs, saved and
 * workspace start as NaN. */
#include "test.h"

#include <limits.h>
#include <math.h>

#include "oracle.h"
#include "support.h"

/* ---- the oracle */

struct reference {
  struct oracle o;
  double *input[FIRST_OUTPUT];
};

static void reference_run(struct reference *r, const struct layer *l) {
  *r = (struct reference){0};
  for (int id = 0; id < FIRST_OUTPUT; id++) {
    const struct layer_array *a = &l->array[id];
    if (a->data == NULL || a->type < 0) continue;
    r->input[id] = calloc((size_t)a->count + 1, sizeof(double));
    if (r->input[id] == NULL) exit(2);
    for (int64_t i = 0; i < a->count; i++) r->input[id][i] = layer_get(l, id, i);
  }
  double *const *in = r->input;
  r->o = (struct oracle){.config = &l->config,
                         .staged = l->config.dtype,
                         .tokens = l->tokens,
                         .x = in[X],
                         .logits = in[LOGITS],
                         .router_weight = in[ROUTER_WEIGHT],
                         .router_bias = in[ROUTER_BIAS],
                         .correction_bias = in[CORRECTION_BIAS],
                         .given_ids = layer_ints(l, GIVEN_IDS),
                         .given_weights = in[GIVEN_WEIGHTS],
                         .row_offset = layer_ints(l, ROW_OFFSET),
                         .padding_mask = l->array[MASK].data,
                         .global_counts = l->array[GLOBAL_COUNTS].data,
                         .w1 = in[W1],
                         .b1 = in[B1],
                         .w2 = in[W2],
                         .b2 = in[B2],
                         .shared_w1 = in[SHARED_W1],
                         .shared_w2 = in[SHARED_W2],
                         .shared_gate = in[SHARED_GATE],
                         .latent_down = in[LATENT_DOWN],
                         .latent_up = in[LATENT_UP],
                         .dout = in[DOUT]};
  if (oracle_run(&r->o) != 0) exit(2);
}

static void reference_free(struct reference *r) {
  oracle_free(&r->o);
  for (int id = 0; id < FIRST_OUTPUT; id++) free(r->input[id]);
}

/* Root mean square of got - want over that of want. Rounding differently once in a while moves it little; one
 * wrong element of thousands moves it a lot. */
static void expect_close(const struct layer *l, int id, const double *want, const char *name) {
  const struct layer_array *a = &l->array[id];
  if (a->data == NULL || a->count == 0) return;
  REQUIRE(want != NULL, "%s: the oracle has no %s", name, a->name);
  const double limit = l->config.dtype == MOE_FP32 ? 2e-6 : l->config.dtype == MOE_FP16 ? 4e-4 : 4e-3;
  double error = 0, size = 1e-2 * (double)a->count; /* what cancels to 0 has no size of its own */
  for (int64_t i = 0; i < a->count; i++) {
    const double difference = layer_get(l, id, i) - want[i];
    error += difference * difference;
    size += want[i] * want[i];
  }
  EXPECT(error <= limit * limit * size, "%s: %s is off by %g of its size, wanted %g", name, a->name,
         sqrt(error / size), limit);
}

static void expect_equal_ints(const struct layer *l, int id, const int32_t *want, const char *name) {
  const struct layer_array *a = &l->array[id];
  for (int64_t i = 0; a->data != NULL && i < a->count; i++)
    EXPECT(layer_ints(l, id)[i] == want[i], "%s: %s[%d] = %d, wanted %d", name, a->name, (int)i,
           layer_ints(l, id)[i], want[i]);
}

static void expect_oracle(struct layer *l, const struct reference *r, const char *name) {
  const struct oracle *o = &r->o;
  const struct {
    int id;
    const double *want;
  } tensors[] = {{OUT, o->out},
                 {TOPK_WEIGHTS, o->weights},
                 {LOSSES, o->losses},
                 {DX, o->dx},
                 {DLOGITS, o->dlogits},
                 {DTOPK_WEIGHTS, o->dtopk_weights},
                 {DROUTER_WEIGHT, o->drouter_weight},
                 {DROUTER_BIAS, o->drouter_bias},
                 {DW1, o->dw1},
                 {DB1, o->db1},
                 {DW2, o->dw2},
                 {DB2, o->db2},
                 {DSHARED_W1, o->dshared_w1},
                 {DSHARED_W2, o->dshared_w2},
                 {DSHARED_GATE, o->dshared_gate},
                 {DLATENT_DOWN, o->dlatent_down},
                 {DLATENT_UP, o->dlatent_up}};
  for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
    expect_close(l, tensors[i].id, tensors[i].want, name);
  expect_equal_ints(l, TOPK_IDS, o->ids, name);
  expect_equal_ints(l, COUNTS, o->counts, name);
  expect_equal_ints(l, SLOT_ROW, o->row_of_slot, name);
}

/* Runs the opened problem between its guards and compares; closes it. */
static void check_and_close(struct layer *l, const struct layer_case *c) {
  struct reference r;
  reference_run(&r, l); /* first: global_counts are read and written */
  RAN(layer_run(l), c);
  expect_oracle(l, &r, c->name);
  const int id = layer_overrun(l);
  EXPECT(id < 0, "%s: something was written next to %s", c->name, l->array[id].name);
  reference_free(&r);
  layer_close(l);
}

static void check_oracle(const struct layer_case *c) {
  struct layer l;
  OPEN(&l, c, o.before = 1);
  check_and_close(&l, c);
  OPEN(&l, c, o.tokens = 1, o.without |= BIT(MASK));
  check_and_close(&l, c);
  OPEN(&l, c, o.without |= BIT(MASK) | BIT(ROUTER_BIAS) | BIT(CORRECTION_BIAS) | BIT(B1) | BIT(B2));
  check_and_close(&l, c);
}
TEST(agrees_with_the_oracle) { EACH_CASE(check_oracle, 1); }

/* The two ways to weigh the gradients of the router losses. */
static void check_loss_scale(const struct layer_case *c) {
  for (int skip = 0; skip < 2; skip++) {
    struct layer l;
    struct reference r;
    OPEN(&l, c, o.seed = 10);
    reference_run(&r, &l);
    oracle_free(&r.o);
    r.o.loss_scale = 30;
    r.o.skip_losses = skip;
    if (oracle_run(&r.o) != 0) exit(2);
    RAN(layer_forward(&l), c);
    l.backward.loss_scale = 30;
    l.backward.skip_losses = skip;
    RAN(moe_backward(l.plan, &l.backward, NULL), c);
    expect_oracle(&l, &r, c->name);
    reference_free(&r);
    layer_close(&l);
  }
}
TEST(losses_are_scaled_or_skipped) {
  EACH_CASE(check_loss_scale, c->router.balance != MOE_BALANCE_NONE || c->router.z_coeff > 0);
}

/* Gradients of the two losses as an array: one of them 30 and the other 0 is a scale of 30 without the other loss. */
static void check_dlosses(const struct layer_case *c) {
  static const int ids[] = {DX, DLOGITS, DROUTER_WEIGHT, DROUTER_BIAS};
  static const _Alignas(16) float dlosses[2][4] = {{30, 0}, {0, 30}};
  for (int which = 0; which < 2; which++) {
    struct layer_case other = *c;
    *(which ? &other.config.router.balance_coeff : &other.config.router.z_coeff) = 0;
    struct layer array, scale;
    OPEN(&array, c, o.seed = 10);
    OPEN(&scale, &other, o.seed = 10);
    RAN(layer_forward(&array), c);
    RAN(layer_forward(&scale), c);
    array.backward.dlosses = dlosses[which];
    scale.backward.loss_scale = 30;
    RAN(moe_backward(array.plan, &array.backward, NULL), c);
    RAN(moe_backward(scale.plan, &scale.backward, NULL), c);
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
      for (int64_t j = 0; j < array.array[ids[i]].count; j++)
        EXPECT(layer_get(&array, ids[i], j) == layer_get(&scale, ids[i], j), "%s: loss %d: %s[%d]: %g and %g",
               c->name, which, array.array[ids[i]].name, (int)j, layer_get(&array, ids[i], j),
               layer_get(&scale, ids[i], j));
    layer_close(&array), layer_close(&scale);
  }
}
TEST(losses_have_gradients) {
  EACH_CASE(check_dlosses, c->router.balance != MOE_BALANCE_NONE && c->router.z_coeff > 0);
}

static void check_one_expert(const struct layer_case *c) {
  struct layer l;
  OPEN(&l, c, o.without &= ~BIT(GIVEN_IDS));
  for (int64_t s = 0; s < l.array[GIVEN_IDS].count; s++) layer_ints(&l, GIVEN_IDS)[s] = 1;
  for (int64_t e = 0; e < l.array[ROW_OFFSET].count; e++)
    layer_ints(&l, ROW_OFFSET)[e] = e <= 1 ? 0 : (int32_t)l.tokens;
  struct reference r;
  reference_run(&r, &l);
  RAN(layer_run(&l), c);
  expect_oracle(&l, &r, c->name);
  const int grads[] = {DW1, DB1, DW2, DB2};
  for (int g = 0; g < 4; g++) {
    const int64_t each = l.array[grads[g]].count / l.config.experts;
    for (int64_t i = 0; i < l.array[grads[g]].count; i++)
      EXPECT(i / each == 1 || layer_get(&l, grads[g], i) == 0, "%s: %s[%d] = %g for an empty expert", c->name,
             l.array[grads[g]].name, (int)i, layer_get(&l, grads[g], i));
  }
  reference_free(&r);
  layer_close(&l);
}
TEST(all_slots_to_one_expert) { EACH_CASE(check_one_expert, c->experts > 1); }

/* ---- the same bits whatever else is asked for */

static void check_inference(const struct layer_case *c) {
  struct layer a, b;
  OPEN(&a, c, o.seed = 3);
  OPEN(&b, c, o.seed = 3);
  b.array[SAVED].data = NULL;
  b.array[SAVED].bytes = 0;
  RAN(layer_forward(&a), c);
  RAN(layer_forward(&b), c);
  SAME(&a, &b, 0, c, "inference");
  layer_close(&a), layer_close(&b);
}
TEST(inference_gives_the_bits_of_training) { EACH_CASE(check_inference, 1); }

static void check_recompute(const struct layer_case *c) {
  struct layer_case other = *c;
  other.config.recompute = c->config.recompute == MOE_RECOMPUTE_H ? MOE_RECOMPUTE_NONE : MOE_RECOMPUTE_H;
  struct layer a, b;
  OPEN(&a, c, o.seed = 4);
  OPEN(&b, &other, o.seed = 4);
  RAN(layer_run(&a), c);
  RAN(layer_run(&b), c);
  SAME(&a, &b, 0, c, "recompute");
  EXPECT(a.array[SAVED].count != b.array[SAVED].count, "%s: recomputing saves no memory", c->name);
  layer_close(&a), layer_close(&b);
}
TEST(recompute_gives_the_same_bits) { EACH_CASE(check_recompute, 1); }

static void check_unwanted(const struct layer_case *c) {
  struct layer all, some;
  OPEN(&all, c, o.seed = 5);
  RAN(layer_run(&all), c);
  for (int id = FIRST_OUTPUT; id < AFTER_GRADS; id++) {
    if (all.array[id].data == NULL || id == OUT) continue;
    OPEN(&some, c, o.seed = 5, o.without |= BIT(id));
    RAN(layer_run(&some), c);
    SAME(&all, &some, 0, c, all.array[id].name);
    layer_close(&some);
  }
  OPEN(&some, c, o.seed = 5);
  RAN(layer_forward(&some), c);
  some.backward.grads = NULL;
  RAN(moe_backward(some.plan, &some.backward, NULL), c);
  SAME(&all, &some, ~(BIT(FIRST_GRAD) - 1), c, "no parameter gradients");
  layer_close(&some), layer_close(&all);
}
TEST(unwanted_outputs_leave_the_others_alone) { EACH_CASE(check_unwanted, 1); }

static void check_accumulate(const struct layer_case *c) {
  struct layer once, twice;
  OPEN(&once, c, o.seed = 6);
  OPEN(&twice, c, o.seed = 6);
  RAN(layer_run(&once), c);
  RAN(layer_forward(&twice), c);
  for (int id = FIRST_GRAD; id < AFTER_GRADS; id++)
    if (twice.array[id].data != NULL) layer_fill(&twice, id, 1);
  twice.backward.accumulate = 1;
  RAN(moe_backward(twice.plan, &twice.backward, NULL), c);
  SAME(&once, &twice, ~(BIT(FIRST_GRAD) - 1), c, "accumulate");
  for (int id = FIRST_GRAD; id < AFTER_GRADS; id++)
    for (int64_t i = 0; i < twice.array[id].count; i++) {
      const double added = layer_get(&once, id, i), sum = layer_get(&twice, id, i);
      const double ulp = twice.array[id].type == MOE_FP32   ? 1e-6
                         : twice.array[id].type == MOE_FP16 ? 1e-3
                                                            : 8e-3;
      EXPECT(fabs(sum - 1 - added) <= ulp * (1 + fabs(added)) && (added != 0 || sum == 1),
             "%s: %s[%d] = %g, wanted 1 + %g", c->name, once.array[id].name, (int)i, sum, added);
    }
  layer_close(&once), layer_close(&twice);
}
TEST(accumulate_adds_once) { EACH_CASE(check_accumulate, 1); }

/* ---- ids, masks and NaN */

static void check_skipped(const struct layer_case *c) {
  static const int32_t outside[] = {-2, INT_MIN, INT_MAX, 0}; /* 0 becomes E */
  struct layer a, b;
  OPEN(&a, c, o.without &= ~BIT(GIVEN_IDS));
  OPEN(&b, c, o.without &= ~BIT(GIVEN_IDS));
  const int64_t slots = a.array[GIVEN_IDS].count;
  for (int64_t s = 0; s < slots; s += 3) {
    layer_ints(&a, GIVEN_IDS)[s] = -1;
    layer_ints(&b, GIVEN_IDS)[s] = outside[s / 3 % 4] ? outside[s / 3 % 4] : (int32_t)c->config.experts;
    if (b.array[GIVEN_WEIGHTS].data != NULL) layer_set(&b, GIVEN_WEIGHTS, s, NAN);
  }
  RAN(layer_run(&a), c);
  RAN(layer_run(&b), c);
  SAME(&a, &b, BIT(GIVEN_IDS) | BIT(TOPK_IDS) | BIT(GIVEN_WEIGHTS), c, "ids outside");
  for (int64_t s = 0; s < slots; s += 3) {
    EXPECT(layer_ints(&b, SLOT_ROW)[s] == -1, "%s: slot %d has a row", c->name, (int)s);
    if (b.array[DTOPK_WEIGHTS].data != NULL)
      EXPECT(layer_get(&b, DTOPK_WEIGHTS, s) == 0, "%s: a skipped slot has a gradient", c->name);
  }
  layer_close(&a), layer_close(&b);
}
TEST(ids_outside_are_skipped) { EACH_CASE(check_skipped, c->entry != MOE_ENTRY_ROWS); }

/* Puts NaN into what a masked token brings along. */
static void poison_token(struct layer *l, int64_t t) {
  static const int ids[] = {X, DOUT, LOGITS, GIVEN_WEIGHTS};
  for (int i = 0; i < 4; i++) {
    const int64_t each = l->array[ids[i]].count / l->tokens;
    for (int64_t j = t * each; j < (t + 1) * each; j++) layer_set(l, ids[i], j, NAN);
  }
}

static void check_mask(const struct layer_case *c) {
  struct layer a, b;
  OPEN(&a, c, o.without &= ~BIT(MASK));
  OPEN(&b, c, o.without &= ~BIT(MASK));
  const uint8_t *mask = b.array[MASK].data;
  for (int64_t t = 0; t < b.tokens; t++)
    if (mask[t]) poison_token(&b, t);
  RAN(layer_run(&a), c);
  RAN(layer_run(&b), c);
  SAME(&a, &b, BIT(X) | BIT(DOUT) | BIT(LOGITS) | BIT(GIVEN_WEIGHTS), c, "NaN behind the mask");
  for (int id = FIRST_OUTPUT; id < AFTER_GRADS; id++)
    EXPECT(layer_not_finite(&b, id) < 0, "%s: %s is not finite", c->name, b.array[id].name);
  static const int per_token[] = {OUT, DX, DLOGITS, DTOPK_WEIGHTS, TOPK_WEIGHTS};
  for (int i = 0; i < 5; i++) {
    const int64_t each = b.array[per_token[i]].count / b.tokens;
    for (int64_t j = 0; j < b.array[per_token[i]].count; j++)
      EXPECT(!mask[j / each] || layer_get(&b, per_token[i], j) == 0, "%s: %s of a masked token is not 0",
             c->name, b.array[per_token[i]].name);
  }
  layer_close(&a), layer_close(&b);
}
TEST(a_masked_token_takes_no_part) { EACH_CASE(check_mask, c->entry != MOE_ENTRY_ROWS); }

static void check_nan_token(const struct layer_case *c) {
  const int64_t sick = 16, hidden = c->config.hidden;
  struct layer a, b;
  OPEN(&a, c, o.without |= BIT(MASK));
  OPEN(&b, c, o.without |= BIT(MASK));
  poison_token(&b, sick);
  RAN(layer_run(&a), c);
  RAN(layer_run(&b), c);
  for (int64_t i = 0; i < a.array[OUT].count; i++)
    EXPECT(i / hidden == sick || layer_get(&a, OUT, i) == layer_get(&b, OUT, i),
           "%s: NaN in token %d reaches token %d", c->name, (int)sick, (int)(i / hidden));
  layer_close(&a), layer_close(&b);
}
TEST(nan_stays_in_its_token) { EACH_CASE(check_nan_token, c->capacity_factor == 0); }

/* Expert 1 has no rows by the offsets of support.c. */
static void check_unchosen(const struct layer_case *c) {
  static const int weights[] = {W1, B1, W2, B2};
  struct layer a, b;
  OPEN(&a, c, o.without &= ~BIT(GIVEN_IDS));
  OPEN(&b, c, o.without &= ~BIT(GIVEN_IDS));
  for (int64_t s = 0; s < a.array[GIVEN_IDS].count; s++)
    if (layer_ints(&a, GIVEN_IDS)[s] == 1) layer_ints(&a, GIVEN_IDS)[s] = layer_ints(&b, GIVEN_IDS)[s] = 0;
  for (int i = 0; i < 4; i++) {
    const int64_t each = b.array[weights[i]].count / c->config.experts;
    for (int64_t j = each; j < 2 * each; j++) layer_set(&b, weights[i], j, NAN);
  }
  RAN(layer_run(&a), c);
  RAN(layer_run(&b), c);
  SAME(&a, &b, BIT(W1) | BIT(B1) | BIT(W2) | BIT(B2), c, "NaN in an expert nobody chose");
  layer_close(&a), layer_close(&b);
}
TEST(unchosen_experts_do_not_matter) { EACH_CASE(check_unchosen, c->experts > 2); }

/* ---- ends of the range */

static void check_no_tokens(const struct layer_case *c) {
  struct layer l;
  OPEN(&l, c, o.tokens = 0);
  for (int id = 0; id < LAYER_ARRAY_COUNT; id++)
    if (id != GLOBAL_COUNTS && (id < FIRST_GRAD || id >= AFTER_GRADS) && l.array[id].bytes == 0)
      l.array[id].data = NULL;
  for (int id = 0; id < FIRST_OUTPUT; id++)
    if (id != GLOBAL_COUNTS) l.array[id].data = NULL;
  l.array[DSHARED_GATE].data = NULL; /* refused without the gate itself */
  RAN(layer_run(&l), c);
  for (int id = FIRST_GRAD; id < AFTER_GRADS; id++)
    for (int64_t i = 0; l.array[id].data != NULL && i < l.array[id].count; i++)
      EXPECT(layer_get(&l, id, i) == 0, "%s: %s is not 0 without tokens", c->name, l.array[id].name);
  for (int64_t e = 0; e < l.array[COUNTS].count; e++)
    EXPECT(layer_ints(&l, COUNTS)[e] == 0, "%s: counts[%d] without tokens", c->name, (int)e);
  layer_close(&l);
}
TEST(no_tokens_is_success) { EACH_CASE(check_no_tokens, 1); }

static void check_hostile_offsets(const struct layer_case *c) {
  static const int32_t hostile[][6] = {{0, 40, 40, 40, 40, 40},
                                       {0, 5, 3, 30, 2, 33},
                                       {-7, -1, 4, 4, 9, 12},
                                       {33, 20, 10, 5, 1, 0},
                                       {INT_MIN, INT_MAX, INT_MIN, INT_MAX, 0, INT_MAX},
                                       {INT_MAX, INT_MIN, 0, 0, INT_MAX, INT_MIN},
                                       {5, 5, 5, 5, 5, -3}};
  for (size_t h = 0; h < sizeof hostile / sizeof *hostile; h++)
    for (int before = 0; before < 2; before++) {
      struct layer l;
      OPEN(&l, c, o.before = before, o.threads = 1); /* overlapping experts write the same rows */
      memcpy(l.array[ROW_OFFSET].data, hostile[h], sizeof hostile[h]);
      RAN(layer_run(&l), c);
      const int id = layer_overrun(&l);
      EXPECT(id < 0, "%s: offsets %d: something was written next to %s", c->name, (int)h, l.array[id].name);
      layer_close(&l);
    }
}
TEST(hostile_offsets_stay_inside) { EACH_CASE(check_hostile_offsets, c->entry == MOE_ENTRY_ROWS); }

static void check_vast_capacity(const struct layer_case *c) {
  struct layer_case vast = *c, none = *c;
  vast.config.capacity_factor = 1e30f;
  none.config.capacity_factor = 0;
  none.config.drop = MOE_DROP_WEIGHT;
  struct layer a, b;
  OPEN(&a, &none, o.seed = 8);
  OPEN(&b, &vast, o.seed = 8);
  RAN(layer_run(&a), c);
  RAN(layer_run(&b), c);
  SAME(&a, &b, 0, c, "a vast capacity");
  layer_close(&a), layer_close(&b);
}
TEST(a_vast_capacity_drops_nothing) { EACH_CASE(check_vast_capacity, c->capacity_factor > 0); }

/* ---- the reports */

static void check_reports(const struct layer_case *c) {
  struct layer l;
  OPEN(&l, c, o.seed = 9);
  RAN(layer_run(&l), c);
  const int32_t *ids = layer_ints(&l, l.array[TOPK_IDS].data ? TOPK_IDS : GIVEN_IDS);
  const uint8_t *mask = l.array[MASK].data;
  const int64_t slots = l.array[SLOT_ROW].count;
  const int64_t kept_at_most =
      c->config.capacity_factor == 0
          ? slots
          : (int64_t)ceil((double)slots / (double)c->config.experts * (double)c->config.capacity_factor);
  int32_t counts[8] = {0}, kept[8] = {0}, slot_of_row[128];
  for (int64_t r = 0; r < slots; r++) slot_of_row[r] = -1;
  for (int64_t s = 0; s < slots; s++) {
    const int64_t e = mask && mask[s / c->config.topk] ? -1 : ids[s];
    const int32_t row = layer_ints(&l, SLOT_ROW)[s];
    const int counted = e >= 0 && e < c->config.experts;
    if (counted) counts[e]++;
    if (row < 0) continue;
    REQUIRE(counted && row < slots && slot_of_row[row] < 0, "%s: slot %d has row %d", c->name, (int)s, row);
    slot_of_row[row] = (int32_t)s;
    kept[e]++;
  }
  int64_t row = 0;
  for (int64_t e = 0; e < c->config.experts; e++) {
    EXPECT(layer_ints(&l, COUNTS)[e] == counts[e], "%s: counts[%d] = %d, wanted %d", c->name, (int)e,
           layer_ints(&l, COUNTS)[e], counts[e]);
    const int64_t want = counts[e] < kept_at_most ? counts[e] : kept_at_most;
    EXPECT(kept[e] == want, "%s: expert %d keeps %d, wanted %d", c->name, (int)e, kept[e], (int)want);
    for (int64_t end = row + kept[e], last = -1; row < end; last = slot_of_row[row++])
      EXPECT(slot_of_row[row] > last && ids[slot_of_row[row]] == e, "%s: row %d is out of order", c->name,
             (int)row);
  }
  layer_close(&l);
}
TEST(reports_are_consistent) { EACH_CASE(check_reports, c->entry != MOE_ENTRY_ROWS); }

TEST_MAIN()
