/* SPDX-License-Identifier: Apache-2.0
 *
 * moeblas check --mutate: is the comparison able to fail? Known errors are planted into the library's inputs or results,
 * and each must be noticed.
 *
 * A mutation may `change` a copy of the sample: the library runs on it, and the tensors first .. last of that run replace
 * those of an honest one. Or it may `spoil` the results. The comparison always has the honest sample. A mutation says in
 * `applies` where it makes a difference at all. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

struct mutation {
  const char *name;
  bool (*applies)(const struct sample *s, const struct run *honest);
  bool (*change)(struct sample *changed, const struct run *honest); /* false: no memory */
  enum tensor first, last;
  void (*spoil)(const struct sample *s, struct run *run);
};

/* ---- tensors --------------------------------------------------------------------------------------------------- */

static double row_norm(const struct sample *s, const struct run *run, enum tensor id, int64_t row) {
  const struct shape *shape = &s->shape[id];
  double sum = 0;
  for (int64_t i = row * shape->columns; i < (row + 1) * shape->columns; i++) {
    const double v = element_load(run_data(run, id), shape->element, i);
    sum += v * v;
  }
  return sqrt(sum);
}

/* The row of largest norm: an error there is one that nobody may overlook. */
static int64_t loudest(const struct sample *s, const struct run *run, enum tensor id) {
  int64_t best = 0;
  for (int64_t r = 1; r < s->shape[id].rows; r++)
    if (row_norm(s, run, id, r) > row_norm(s, run, id, best)) best = r;
  return best;
}

static bool has_values(const struct sample *s, const struct run *run, enum tensor id) {
  return run_data(run, id) && shape_count(&s->shape[id]) > 0 && row_norm(s, run, id, loudest(s, run, id)) > 0;
}

static void scale_rows(const struct sample *s, void *data, enum tensor id, int64_t row, int64_t rows,
                       double factor) {
  const struct shape *shape = &s->shape[id];
  for (int64_t i = row * shape->columns; i < (row + rows) * shape->columns; i++)
    element_store(data, shape->element, i, factor * element_load(data, shape->element, i));
}

static void clear(struct sample *s, enum tensor id) {
  if (s->data[id]) memset(s->data[id], 0, shape_bytes(&s->shape[id]));
}

/* ---- results spoilt -------------------------------------------------------------------------------------------- */

static bool has_out(const struct sample *s, const struct run *run) { return has_values(s, run, T_OUT); }
static bool has_dx(const struct sample *s, const struct run *run) { return has_values(s, run, T_DX); }
static bool has_dw1(const struct sample *s, const struct run *run) { return has_values(s, run, T_DW1); }
static bool has_dw2(const struct sample *s, const struct run *run) { return has_values(s, run, T_DW2); }
static bool has_db2(const struct sample *s, const struct run *run) { return has_values(s, run, T_DB2); }
static bool has_dlogits(const struct sample *s, const struct run *run) {
  return has_values(s, run, T_DLOGITS);
}

static void zero_out(const struct sample *s, struct run *run) {
  memset(run_data(run, T_OUT), 0, shape_bytes(&s->shape[T_OUT]));
}
static void drop_row(const struct sample *s, struct run *run) {
  scale_rows(s, run_data(run, T_OUT), T_OUT, loudest(s, run, T_OUT), 1, 0);
}
static void double_row(const struct sample *s, struct run *run) {
  scale_rows(s, run_data(run, T_OUT), T_OUT, loudest(s, run, T_OUT), 1, 2);
}
/* Four limits of the type: what a wrong rounding mode or a lost low part does. Small tensors have more room. */
static bool has_much_out(const struct sample *s, const struct run *run) {
  return has_out(s, run) && s->problem.tokens >= 32 && s->problem.config.hidden >= 32 && !s->problem.invalid;
}
static void drift_out(const struct sample *s, struct run *run) {
  const double limit = check_limit_of(s->problem.config.dtype)->row;
  scale_rows(s, run_data(run, T_OUT), T_OUT, 0, s->shape[T_OUT].rows, 1 + 4 * limit);
}
static void double_dx(const struct sample *s, struct run *run) {
  scale_rows(s, run_data(run, T_DX), T_DX, loudest(s, run, T_DX), 1, 2);
}
static void drop_dw1(const struct sample *s, struct run *run) {
  scale_rows(s, run_data(run, T_DW1), T_DW1, loudest(s, run, T_DW1), 1, 0);
}
static void double_dw2(const struct sample *s, struct run *run) {
  scale_rows(s, run_data(run, T_DW2), T_DW2, loudest(s, run, T_DW2), 1, 2);
}
static void drop_db2(const struct sample *s, struct run *run) {
  scale_rows(s, run_data(run, T_DB2), T_DB2, loudest(s, run, T_DB2), 1, 0);
}
static bool logits_matter(const struct sample *s, const struct run *run) {
  /* Where one weight is 1 (k = 1, renormalised, or a lone expert), the gradient is rounding noise around 0, and so is
   * its double. */
  const moe_router_desc *r = &s->problem.config.router;
  const bool constant = s->problem.config.topk == 1 && (r->renormalize || r->score == MOE_SCORE_TOPK_SOFTMAX);
  return has_dlogits(s, run) && !constant && s->problem.skew == SKEW_UNIFORM;
}
static void double_dlogits(const struct sample *s, struct run *run) {
  scale_rows(s, run_data(run, T_DLOGITS), T_DLOGITS, 0, s->shape[T_DLOGITS].rows, 2);
}

/* Of an exact problem the last bit of one number is an error; the loudest row has one that is not 0. */
static void flip_last_bit(const struct sample *s, struct run *run, enum tensor id) {
  const struct shape *shape = &s->shape[id];
  unsigned char *data = run_data(run, id);
  int64_t i = loudest(s, run, id) * shape->columns;
  while (element_load(data, shape->element, i) == 0) i++;
  data[i * (int64_t)element_bytes(shape->element)] ^= 1; /* the lowest byte comes first */
}
static bool is_exact_out(const struct sample *s, const struct run *run) {
  return s->problem.exact && has_out(s, run);
}
static bool is_exact_dx(const struct sample *s, const struct run *run) {
  return s->problem.exact && has_dx(s, run);
}
static bool is_exact_dw1(const struct sample *s, const struct run *run) {
  return s->problem.exact && has_dw1(s, run);
}
static bool is_exact_dw2(const struct sample *s, const struct run *run) {
  return s->problem.exact && has_dw2(s, run);
}
static void flip_out(const struct sample *s, struct run *run) { flip_last_bit(s, run, T_OUT); }
static void flip_dx(const struct sample *s, struct run *run) { flip_last_bit(s, run, T_DX); }
static void flip_dw1(const struct sample *s, struct run *run) { flip_last_bit(s, run, T_DW1); }
static void flip_dw2(const struct sample *s, struct run *run) { flip_last_bit(s, run, T_DW2); }

static bool has_balance(const struct sample *s, const struct run *run) {
  return s->problem.config.router.balance && ((const float *)run_data(run, T_LOSSES))[0] != 0;
}
static void lose_balance(const struct sample *s, struct run *run) {
  (void)s;
  ((float *)run_data(run, T_LOSSES))[0] = 0;
}
static bool has_z_loss(const struct sample *s, const struct run *run) {
  return s->problem.config.router.z_coeff > 0 && ((const float *)run_data(run, T_LOSSES))[1] != 0;
}
static void lose_z_loss(const struct sample *s, struct run *run) {
  (void)s;
  ((float *)run_data(run, T_LOSSES))[1] = 0;
}

static bool may_choose_wrongly(const struct sample *s, const struct run *run) {
  return run_data(run, T_TOPK_IDS) && !s->problem.replay && s->problem.tokens && !s->data[T_MASK];
}
static void repeat_id(const struct sample *s, struct run *run) {
  int32_t *ids = run_data(run, T_TOPK_IDS);
  ids[0] = s->problem.config.topk > 1 ? ids[1] : (int32_t)s->problem.config.experts;
}
/* A loser for a winner: the first expert that token 0 did not choose. */
static bool has_loser(const struct sample *s, const struct run *run) {
  return may_choose_wrongly(s, run) && s->problem.config.experts > s->problem.config.topk;
}
static void choose_loser(const struct sample *s, struct run *run) {
  int32_t *ids = run_data(run, T_TOPK_IDS);
  const int64_t topk = s->problem.config.topk;
  for (int32_t loser = 0;; loser++) {
    bool chosen = false;
    for (int64_t j = 0; j < topk; j++) chosen = chosen || ids[j] == loser;
    if (chosen) continue;
    ids[topk - 1] = loser;
    return;
  }
}
static bool has_counts(const struct sample *s, const struct run *run) {
  return run_data(run, T_COUNTS) && s->problem.tokens;
}
static void miscount(const struct sample *s, struct run *run) {
  (void)s;
  ((int32_t *)run_data(run, T_COUNTS))[0]++;
}

/* ---- samples changed ------------------------------------------------------------------------------------------- */

/* The chosen ones are many enough that what is changed is not lost among skipped slots. */
static bool has_work(const struct sample *s, const struct run *run) {
  return has_out(s, run) && s->problem.tokens >= 8 && s->problem.config.hidden >= 4 &&
         s->problem.config.inter >= 4;
}

static bool other_seed(struct sample *changed, const struct run *honest) {
  struct problem problem = honest->sample->problem;
  char error[PROBLEM_ERROR];
  sample_free(changed);
  problem.seed++;
  return sample_make(changed, &problem, error, sizeof error);
}

static bool is_gated(const struct sample *s, const struct run *run) {
  return has_work(s, run) && s->problem.config.act.gated;
}
static bool swap_halves(struct sample *changed, const struct run *honest) {
  moe_act_desc *act = &changed->problem.config.act;
  (void)honest;
  act->layout =
      act->layout == MOE_LAYOUT_CONCAT_UP_FIRST ? MOE_LAYOUT_CONCAT_GATE_FIRST : MOE_LAYOUT_CONCAT_UP_FIRST;
  act->interleave = 0;
  return true;
}

static bool is_clamped(const struct sample *s, const struct run *run) {
  return has_work(s, run) && s->problem.config.act.gate_max > 0 &&
         s->problem.tokens * s->problem.config.inter >= 512 && s->problem.config.act.kind != MOE_ACT_SITU;
}
static bool lose_clamp(struct sample *changed, const struct run *honest) {
  moe_act_desc *act = &changed->problem.config.act;
  (void)honest;
  act->gate_max = act->up_min = act->up_max = 0;
  return true;
}

static bool is_weighted(const struct sample *s, const struct run *run) {
  return has_work(s, run) && s->data[T_GIVEN_WEIGHTS];
}
static bool weigh_twice(struct sample *changed, const struct run *honest) {
  float *weights = changed->data[T_GIVEN_WEIGHTS];
  (void)honest;
  for (int64_t i = 0; i < shape_count(&changed->shape[T_GIVEN_WEIGHTS]); i++) weights[i] *= weights[i];
  return true;
}

/* The last 16 columns of x, or a quarter of them, are not summed. */
static bool lose_k_step(struct sample *changed, const struct run *honest) {
  const struct shape *x = &changed->shape[T_X];
  const int64_t step = x->columns / 4 < 16 ? x->columns / 4 : 16;
  (void)honest;
  for (int64_t t = 0; t < x->rows; t++)
    for (int64_t i = x->columns - step; i < x->columns; i++)
      element_store(changed->data[T_X], x->element, t * x->columns + i, 0);
  return true;
}

static bool is_matrix(const struct sample *s, const struct run *run) {
  return has_work(s, run) && problem_width(&s->problem) > 1;
}
static bool flip_transposed(struct sample *changed, const struct run *honest) {
  (void)honest;
  changed->problem.config.transposed = !changed->problem.config.transposed;
  return true;
}

static bool has_bias(const struct sample *s, const struct run *run) {
  return has_work(s, run) && s->problem.bias;
}
static bool lose_b1(struct sample *changed, const struct run *honest) {
  (void)honest;
  clear(changed, T_B1);
  return true;
}
static bool has_shared(const struct sample *s, const struct run *run) {
  return has_work(s, run) && s->problem.config.shared_inter > 4;
}
static bool lose_shared(struct sample *changed, const struct run *honest) {
  (void)honest;
  clear(changed, T_SHARED_W2);
  return true;
}

static bool has_padding(const struct sample *s, const struct run *run) {
  const uint8_t *mask = s->data[T_MASK];
  bool any = false;
  for (int64_t t = 0; mask && t < s->problem.tokens; t++) any = any || mask[t];
  return any && has_work(s, run) && s->problem.config.entry != MOE_ENTRY_IDS;
}
static bool lose_mask(struct sample *changed, const struct run *honest) {
  (void)honest;
  clear(changed, T_MASK);
  return true;
}

static bool has_drops(const struct sample *s, const struct run *run) {
  const int32_t *rows = run_data(run, T_SLOT_ROW);
  bool any = false;
  for (int64_t i = 0; rows && i < s->problem.tokens * s->problem.config.topk; i++) any = any || rows[i] < 0;
  return any && s->problem.config.capacity_factor > 0 && !s->problem.invalid && !s->data[T_MASK];
}
static bool lose_capacity(struct sample *changed, const struct run *honest) {
  (void)honest;
  changed->problem.config.capacity_factor = 0;
  changed->problem.config.drop = MOE_DROP_WEIGHT; /* the other one asks for a capacity */
  return true;
}

static bool has_gradients(const struct sample *s, const struct run *run) {
  return has_work(s, run) && has_values(s, run, T_DW2);
}
/* The token whose output is loudest is sure to have rows. */
static bool lose_token(struct sample *changed, const struct run *honest) {
  scale_rows(changed, changed->data[T_DOUT], T_DOUT, loudest(honest->sample, honest, T_OUT), 1, 0);
  return true;
}

static bool is_accumulating(const struct sample *s, const struct run *run) {
  return has_work(s, run) && s->problem.accumulate;
}
static bool lose_what_was_there(struct sample *changed, const struct run *honest) {
  (void)honest;
  for (int id = T_DROUTER_WEIGHT; id < T_RESULTS; id++) clear(changed, (enum tensor)id);
  return true;
}

static bool router_matters(const struct sample *s, const struct run *run) {
  const moe_config *c = &s->problem.config;
  return has_gradients(s, run) && c->entry == MOE_ENTRY_HIDDEN && c->topk > 1 &&
         s->problem.skew == SKEW_UNIFORM;
}
/* The same ids and weights, given: the layer is the same but for the gradient through the router. */
static bool lose_router(struct sample *changed, const struct run *honest) {
  struct problem *p = &changed->problem;
  p->config.entry = MOE_ENTRY_IDS;
  p->config.router = (moe_router_desc){0};
  p->config.router_dtype = MOE_DTYPE_DEFAULT;
  p->router_bias = p->correction_bias = p->replay = 0;
  for (int i = 0; i < T_SAVED; i++) {
    const enum tensor id = (enum tensor)i;
    changed->shape[id] = tensor_shape(p, id);
    if (changed->shape[id].present && id != T_GIVEN_IDS) continue;
    free(changed->data[id]);
    changed->data[id] = NULL;
  }
  const size_t bytes = shape_bytes(&changed->shape[T_GIVEN_IDS]);
  if (changed->data[T_GIVEN_IDS] == NULL) changed->data[T_GIVEN_IDS] = malloc(bytes);
  changed->data[T_GIVEN_WEIGHTS] = malloc(bytes);
  if (changed->data[T_GIVEN_IDS] == NULL || changed->data[T_GIVEN_WEIGHTS] == NULL) return false;
  memcpy(changed->data[T_GIVEN_IDS], run_data(honest, T_TOPK_IDS), bytes);
  memcpy(changed->data[T_GIVEN_WEIGHTS], run_data(honest, T_TOPK_WEIGHTS), bytes);
  return true;
}

/* ---- the table ------------------------------------------------------------------------------------------------- */

#define SPOIL(name, applies, spoil) \
  { name, applies, NULL, T_COUNT, T_COUNT, spoil }
#define CHANGE(name, applies, change, a, b) \
  { name, applies, change, a, b, NULL }

static const struct mutation mutations[] = {
    SPOIL("out is zero", has_out, zero_out),
    SPOIL("a row of out is missing", has_out, drop_row),
    SPOIL("a row of out is doubled", has_out, double_row),
    SPOIL("out drifts by four limits", has_much_out, drift_out),
    SPOIL("a row of dx is doubled", has_dx, double_dx),
    SPOIL("a row of dw1 is missing", has_dw1, drop_dw1),
    SPOIL("a row of dw2 is doubled", has_dw2, double_dw2),
    SPOIL("a row of db2 is missing", has_db2, drop_db2),
    SPOIL("dlogits are doubled", logits_matter, double_dlogits),
    SPOIL("a last bit of out is flipped", is_exact_out, flip_out),
    SPOIL("a last bit of dx is flipped", is_exact_dx, flip_dx),
    SPOIL("a last bit of dw1 is flipped", is_exact_dw1, flip_dw1),
    SPOIL("a last bit of dw2 is flipped", is_exact_dw2, flip_dw2),
    SPOIL("the balancing loss is 0", has_balance, lose_balance),
    SPOIL("the z-loss is 0", has_z_loss, lose_z_loss),
    SPOIL("an expert is chosen twice", may_choose_wrongly, repeat_id),
    SPOIL("a losing expert is chosen", has_loser, choose_loser),
    SPOIL("a count is off by one", has_counts, miscount),
    CHANGE("out is that of another batch", has_work, other_seed, T_OUT, T_OUT),
    CHANGE("gate and up are swapped", is_gated, swap_halves, T_OUT, T_OUT),
    CHANGE("the clamp is lost", is_clamped, lose_clamp, T_OUT, T_OUT),
    CHANGE("the weight is applied twice", is_weighted, weigh_twice, T_OUT, T_OUT),
    CHANGE("a k-step is missing", has_work, lose_k_step, T_OUT, T_OUT),
    CHANGE("weights are read transposed", is_matrix, flip_transposed, T_OUT, T_OUT),
    CHANGE("b1 is forgotten", has_bias, lose_b1, T_OUT, T_OUT),
    CHANGE("the shared expert is forgotten", has_shared, lose_shared, T_OUT, T_OUT),
    CHANGE("padding takes part", has_padding, lose_mask, T_OUT, T_OUT),
    CHANGE("nothing is dropped at capacity", has_drops, lose_capacity, T_OUT, T_SLOT_ROW),
    CHANGE("dw1 misses a token", has_gradients, lose_token, T_DW1, T_DB1),
    CHANGE("dw2 misses a token", has_gradients, lose_token, T_DW2, T_DB2),
    CHANGE("dx misses a token", has_gradients, lose_token, T_DX, T_DX),
    CHANGE("gradients are not added to", is_accumulating, lose_what_was_there, T_DROUTER_WEIGHT,
           T_DLATENT_UP),
    CHANGE("dx misses the router", router_matters, lose_router, T_DX, T_DX),
};
enum {
  MUTATIONS = sizeof mutations / sizeof *mutations
};

/* ---- planting -------------------------------------------------------------------------------------------------- */

static bool copy_changed(moe_context *ctx, const struct mutation *m, const struct run *honest,
                         struct run *target) {
  struct sample changed;
  struct run run;
  struct verdict v = {.row = -1};
  char error[PROBLEM_ERROR];
  const bool made = sample_make(&changed, &honest->sample->problem, error, sizeof error);
  const bool done = made && m->change(&changed, honest) && check_run(ctx, &changed, &run, &v);
  for (int id = m->first; done && id <= (int)m->last; id++)
    if (target->span[id].bytes) memcpy(target->span[id].data, run.span[id].data, target->span[id].bytes);
  if (done) check_run_close(&run);
  sample_free(&changed);
  return done;
}

enum {
  NO_ERROR = 2
};

/* Among small integers, many of them 0, a change may change nothing. */
static bool is_same(const struct mutation *m, const struct run *honest, const struct run *run) {
  for (int id = m->first; id <= (int)m->last; id++)
    if (run->span[id].bytes && memcmp(run->span[id].data, honest->span[id].data, run->span[id].bytes))
      return false;
  return true;
}

/* 1 noticed, 0 not, NO_ERROR nothing was to be noticed, -1 the mutation could not be made. */
static int plant(moe_context *ctx, const struct sample *sample, const struct mutation *m,
                 const struct run *honest) {
  struct run run;
  struct verdict v = {.row = -1};
  if (!check_run(ctx, sample, &run, &v)) return -1;
  bool made = true;
  if (m->change)
    made = copy_changed(ctx, m, honest, &run);
  else
    m->spoil(sample, &run);
  const bool same = made && m->change && sample->problem.exact && is_same(m, honest, &run);
  if (made && !same) check_compare(sample, &run, &v);
  check_run_close(&run);
  return !made || v.broken ? -1 : same ? NO_ERROR : v.failed;
}

static bool plant_all(moe_context *ctx, const struct sample *sample, const struct run *honest,
                      struct mutation_count *count) {
  for (int i = 0; i < MUTATIONS; i++) {
    if (!mutations[i].applies(sample, honest)) continue;
    const int noticed = plant(ctx, sample, &mutations[i], honest);
    if (noticed < 0) return false;
    if (!noticed) count->unnoticed[count->failed++] = mutations[i].name;
    count->passed += noticed == 1;
  }
  return true;
}

bool check_mutations(moe_context *ctx, const struct sample *sample, struct mutation_count *count) {
  struct run honest;
  struct verdict v = {.row = -1};
  *count = (struct mutation_count){0};
  _Static_assert((int)MUTATIONS < (int)MUTATION_LIMIT, "room for the names");
  if (!check_run(ctx, sample, &honest, &v)) return false;
  check_compare(sample, &honest, &v);
  if (v.failed) count->unnoticed[count->failed++] = "fails without any mutation";
  const bool done = !v.broken && (v.refused || plant_all(ctx, sample, &honest, count));
  check_run_close(&honest);
  return done;
}
