/* SPDX-License-Identifier: Apache-2.0
 *
 * Results of the library against the oracle, row by row.
 *
 * First the decisions: chosen experts must be a top-k of the oracle's keys up to fp32 noise, dropped slots must be those
 * that a full expert drops. Then the oracle follows the library's decisions, so that a near tie is no error, and integers
 * must agree exactly and numbers by row:  |row - reference row| / max(|reference row|, floor).
 *
 * The floor: an error is made of the terms that a row sums, not of what is left of them. Long rows rarely cancel, a tenth
 * of the typical row is floor enough; short rows do, the typical row is theirs, and in a tensor of n numbers all may have
 * cancelled, so that the limit grows by 1 + 64/n. Rows that are 0 throughout are typical of nothing. Gradients of logits
 * are differences of w dp by construction (exactly 0 for k = 1, renormalised), and those of the losses may cancel as well
 * (under an even load), so |w dp| with the terms of the losses is a floor for them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "check_kinks.h"

enum {
  SHORT_ROW = 16
};

/* ---- decisions ------------------------------------------------------------------------------------------------- */

/* A slot that the library keeps and the oracle drops, or the other way, must weigh what another such slot of its expert
 * weighs; and each expert keeps as many slots as it should. */
static void check_drop(const struct sample *s, const struct run *run, const struct oracle *own,
                       struct verdict *v) {
  const int64_t slots = s->problem.tokens * s->problem.config.topk;
  const int32_t *slot_row = run_data(run, T_SLOT_ROW);
  for (int64_t e = 0; e < s->problem.config.experts; e++) {
    int64_t balance = 0, differ = 0;
    double low = INFINITY, high = -INFINITY;
    for (int64_t i = 0; i < slots; i++) {
      const bool kept = slot_row[i] >= 0, expected = own->row_of_slot[i] >= 0;
      if (own->ids[i] != e || kept == expected) continue;
      balance += kept ? 1 : -1;
      differ++;
      low = fmin(low, own->weights[i]);
      high = fmax(high, own->weights[i]);
    }
    const bool tie = s->problem.config.drop == MOE_DROP_WEIGHT && high - low <= CHECK_KEY_TOLERANCE * high;
    if (balance || (differ && !tie))
      verdict_fail(v, "slot_row: expert %lld does not keep the slots that its capacity leaves", (long long)e);
  }
}

static bool check_drops(const struct sample *s, const struct run *run, const struct reference *r,
                        struct verdict *v) {
  if (!(s->problem.config.capacity_factor > 0)) return true;
  struct oracle own = oracle_of(s, r);
  own.use_ids = r->ideal.use_ids;
  own.dout = NULL;
  const bool done = oracle_run(&own) == 0;
  if (done) check_drop(s, run, &own, v);
  oracle_free(&own);
  return done;
}

void check_integers(const struct run *run, enum tensor id, const int32_t *wanted, int64_t count,
                    struct verdict *v) {
  const int32_t *found = run_data(run, id);
  for (int64_t i = 0; found && wanted && i < count; i++)
    if (found[i] != wanted[i])
      verdict_fail(v, "%s[%lld] = %d, the oracle has %d", tensor_name(id), (long long)i, found[i], wanted[i]);
}

static void check_global_counts(const struct sample *s, const struct run *run, const struct oracle *o,
                                struct verdict *v) {
  const int64_t *before = s->data[T_GLOBAL_COUNTS], *after = run_data(run, T_GLOBAL_COUNTS);
  const int64_t experts = s->problem.config.experts;
  int64_t live = 0;
  if (before == NULL) return;
  for (int64_t t = 0; t < s->problem.tokens; t++) live += !check_masked(s, t);
  for (int64_t e = 0; e <= experts; e++) {
    const int64_t wanted = before[e] + (e < experts ? o->counts[e] : live);
    if (after[e] != wanted)
      verdict_fail(v, "global_counts[%lld] = %lld, wanted %lld", (long long)e, (long long)after[e],
                   (long long)wanted);
  }
}

/* ---- numbers --------------------------------------------------------------------------------------------------- */

static double square(double v) { return v * v; }

/* sqrt of the mean over tokens of |w dp|^2, and what a loss, which is a mean over tokens, gives a logit. */
static double logit_unit(const struct oracle *o, const moe_config *c) {
  double sum = 0;
  if (o->dtopk_weights == NULL || o->weights == NULL || o->tokens == 0) return 0;
  for (int64_t i = 0; i < o->tokens * c->topk; i++) sum += square(o->weights[i] * o->dtopk_weights[i]);
  const double losses = (double)c->router.balance_coeff + 2 * (double)c->router.z_coeff;
  return sqrt(sum / (double)o->tokens) + losses / (double)o->tokens;
}

/* A row of a weight's gradient may come from one dh = f'(h) da, or from one a = f(gate) (up + offset). Both have roots,
 * where their relative error has no bound. */
static bool follows_root(enum tensor id) {
  return id == T_DW1 || id == T_DB1 || id == T_DW2 || id == T_DSHARED_W1 || id == T_DSHARED_W2;
}

static double floor_of(const struct sample *s, const struct oracle *o, enum tensor id, double typical) {
  const moe_config *c = &s->problem.config;
  if (id == T_LOSSES) return 0;
  const bool whole = s->shape[id].columns < SHORT_ROW || follows_root(id);
  const double usual = whole ? typical : 0.1 * typical;
  if (id != T_DLOGITS && id != T_DROUTER_WEIGHT && id != T_DROUTER_BIAS) return usual;
  const double unit = logit_unit(o, c), tokens = (double)s->problem.tokens;
  if (id == T_DLOGITS) return fmax(usual, unit);
  return fmax(usual,
              unit * sqrt(id == T_DROUTER_BIAS ? tokens : tokens * (double)c->hidden / (double)c->experts));
}

struct operand { /* the versions of one tensor; staged NULL for fp32; before NULL unless accumulating */
  const void *found;
  const void *before;
  const double *ideal;
  const double *staged;
  const double *size;
};

/* Reference element i: what was there before, plus what the oracle adds. */
static double wanted(const struct operand *t, const double *reference, int element, int64_t i) {
  return reference[i] + (t->before ? element_load(t->before, element, i) : 0);
}

/* What a tensor usually is like: norm of a row, and how many numbers there are, rows of zeros left out. */
struct habit {
  double typical;
  double numbers;
};

static double row_square(const struct operand *t, const double *reference, const struct shape *shape,
                         int64_t row) {
  double sum = 0;
  for (int64_t i = row * shape->columns; i < (row + 1) * shape->columns; i++)
    sum += square(wanted(t, reference, shape->element, i));
  return sum;
}

static struct habit habit_of(const struct operand *t, const double *reference, const struct shape *shape) {
  double total = 0, live = 0;
  for (int64_t r = 0; r < shape->rows; r++) {
    const double norm = row_square(t, reference, shape, r);
    total += norm;
    live += norm > 0;
  }
  return (struct habit){live > 0 ? sqrt(total / live) : 0, live * (double)shape->columns};
}

#define LEFT 1e-6 /* of the terms of a whole tensor: what fp32 sums may leave where all of it should cancel */

/* The square of the usual size of a row of such terms, however little is left of them. */
static double terms_square(const struct operand *t, const struct shape *shape, int64_t row) {
  double sum = 0;
  for (int64_t i = row * shape->columns; t->size && i < (row + 1) * shape->columns; i++)
    sum += t->size[i] + (t->before ? square(element_load(t->before, shape->element, i)) : 0);
  return sum;
}

/* Half of it, for what an activation takes away; of a row of one number that may be nothing. */
static double row_usual(const struct operand *t, const struct shape *shape, int64_t row) {
  return (shape->columns > 1 ? 0.5 : 1) * sqrt(terms_square(t, shape, row));
}

/* The z-loss is z_coeff times a mean of squares, and an error of the logarithm is one of unit terms:
 * d(l^2) = 2 l dl, however small l is. */
static double loss_usual(const struct sample *s, int64_t row, double loss) {
  return row == 1 ? 2 * sqrt((double)s->problem.config.router.z_coeff * loss) : 0;
}

/* Router math is fp32 whatever the dtype, and so are its results. */
static bool is_router_math(enum tensor id) { return id == T_TOPK_WEIGHTS || id == T_LOSSES; }

/* Two spacings are those of h and of what follows from it; a square turns the first into two. */
static double chain_of(const struct sample *s, enum tensor id) {
  const moe_activation kind = s->problem.config.act.kind;
  return !is_router_math(id) && (kind == MOE_ACT_RELU2 || kind == MOE_ACT_RELU2_TANH) ? 1.5 : 1;
}

static void compare_rows(const struct sample *s, const struct oracle *o, enum tensor id,
                         const struct operand *t, const struct check_limit *limit, const struct kinks *kinks,
                         struct verdict *v) {
  const struct shape *shape = &s->shape[id];
  const double *reference = t->staged ? t->staged : t->ideal;
  const struct habit habit = habit_of(t, reference, shape);
  const double tiny = limit->normal * sqrt((double)shape->columns);
  const double floor = fmax(floor_of(s, o, id, habit.typical), tiny), few = 1 + 64 / (habit.numbers + 1);
  const double most = limit->row * few * (t->staged ? chain_of(s, id) : 1);
  for (int64_t r = 0; r < shape->rows; r++) {
    double error = 0;
    for (int64_t i = r * shape->columns; i < (r + 1) * shape->columns; i++)
      error += square(element_load(t->found, shape->element, i) - wanted(t, reference, shape->element, i));
    const double left = sqrt(row_square(t, reference, shape, r));
    const double usual = id == T_LOSSES ? loss_usual(s, r, left) : row_usual(t, shape, r);
    const double unit = fmax(fmax(left, floor), usual), jump = kinks_excuse(kinks, id, r);
    const double relative = error > 0 ? sqrt(error) / unit : error;
    v->rows++;
    v->excused += relative > most && sqrt(error) <= most * unit + jump;
    verdict_measure(v, id, r, relative, most + (jump > 0 ? jump / unit : 0), t->staged ? "staged" : "ideal");
  }
}

/* Norms of the lines of a tensor that one rounded value moves: of a token's results its row, of dw1 the weights of one h, of
 * dw2 those of one a. Transposed they stand in columns of the experts' matrices. Returns the longest, squared. */
static double longest_line(const struct sample *s, enum tensor id, const struct operand *t,
                           const struct shape *shape) {
  const bool w1 = id == T_DW1 || id == T_DSHARED_W1, w2 = id == T_DW2 || id == T_DSHARED_W2;
  const bool transposed = s->problem.config.transposed;
  const bool down = (w1 && transposed) || (w2 && !transposed);
  const int64_t matrices = id == T_DW1 || id == T_DW2 ? s->problem.config.experts : 1;
  const int64_t height = down ? shape->rows / matrices : 1, lines = down ? shape->columns : 1;
  double longest = 0;
  if (!w1 && !w2 && shape->rows != s->problem.tokens) return 0;
  for (int64_t first = 0; first + height <= shape->rows; first += height)
    for (int64_t line = 0; line < lines; line++) {
      double sum = 0;
      for (int64_t r = first; r < first + height; r++)
        for (int64_t c = down ? line : 0; c < (down ? line + 1 : shape->columns); c++)
          sum += square(wanted(t, t->staged, shape->element, r * shape->columns + c));
      longest = fmax(longest, sum);
    }
  return longest;
}

/* Of how many terms of one size a tensor consists, any of which may have been rounded the other way: of its slots, but of
 * not more than lines as long as the longest would fill. */
static double terms_of(const struct sample *s, enum tensor id, const struct operand *t,
                       const struct shape *shape) {
  const double slots = (double)(s->problem.tokens * s->problem.config.topk);
  const struct habit habit = habit_of(t, t->staged, shape);
  const double terms = fmin(slots, habit.numbers), longest = longest_line(s, id, t, shape);
  double total = 0;
  for (int64_t r = 0; longest > 0 && r < shape->rows; r++) total += row_square(t, t->staged, shape, r);
  return fmax(1, longest > 0 ? fmin(terms, total / longest) : terms);
}

/* The library may be no further from the truth than its documented roundings explain, but for the row or two in which a
 * value was rounded the other way: their share falls with the number of rows. */
static void compare_whole(const struct sample *s, enum tensor id, const struct operand *t,
                          const struct check_limit *limit, const struct kinks *kinks, struct verdict *v) {
  const struct shape *shape = &s->shape[id];
  double norm = 0, found = 0, staged = 0, terms = 0, jumps = 0;
  for (int64_t row = 0; row < shape->rows; row++) {
    terms += terms_square(t, shape, row);
    jumps += square(kinks_excuse(kinks, id, row));
  }
  for (int64_t i = 0; i < shape_count(shape); i++) {
    const double ideal = wanted(t, t->ideal, shape->element, i);
    norm += square(ideal);
    found += square(element_load(t->found, shape->element, i) - ideal);
    staged += square(wanted(t, t->staged, shape->element, i) - ideal);
  }
  norm = norm > 0 ? sqrt(norm) : 1;
  const double one = 1 / sqrt(terms_of(s, id, t, shape)); /* term's share of the tensor, and of its error */
  const double most = (limit->factor + 2 * one) * sqrt(staged) / norm + limit->rest + limit->row / 2 * one +
                      (LEFT * sqrt(terms) + sqrt(jumps)) / norm;
  verdict_measure(v, id, -1, sqrt(found) / norm, most, "ideal");
}

static int coarser(int a, int b) {
  if (a == ELEMENT_BF16 || b == ELEMENT_BF16) return ELEMENT_BF16;
  return a == ELEMENT_FP16 || b == ELEMENT_FP16 ? ELEMENT_FP16 : ELEMENT_FP32;
}

/* The coarsest type on the way to a result. The gradient of the router bias sums dlogits as they are stored. */
static int coarsest_element(const struct sample *s, enum tensor id) {
  if (is_router_math(id)) return ELEMENT_FP32;
  const int element = coarser((int)s->problem.config.dtype, s->shape[id].element);
  return id == T_DROUTER_BIAS ? coarser(element, s->shape[T_DLOGITS].element) : element;
}

static void compare_tensor(const struct sample *s, const struct run *run, const struct reference *r,
                           const struct kinks *kinks, enum tensor id, struct verdict *v) {
  struct operand t = {run_data(run, id), s->data[id], oracle_tensor(&r->ideal, id), NULL, r->size[id]};
  const int coarsest = coarsest_element(s, id);
  const bool low = coarsest != ELEMENT_FP32;
  const struct check_limit *limit = check_limit_of((moe_dtype)coarsest);
  if (t.found == NULL || t.ideal == NULL) return;
  if (low) t.staged = oracle_tensor(&r->staged, id);
  compare_rows(s, &r->ideal, id, &t, limit, kinks, v);
  /* The z-loss and balance gradients are judged by rows only: cancellation leaves no norm to speak of. */
  if (low && id != T_DLOGITS && id != T_DROUTER_WEIGHT && id != T_DROUTER_BIAS)
    compare_whole(s, id, &t, limit, kinks, v);
}

/* ---- all of it ------------------------------------------------------------------------------------------------- */

static void compare_results(const struct sample *s, const struct run *run, const struct reference *r,
                            const struct kinks *kinks, struct verdict *v) {
  const struct problem *p = &s->problem;
  check_keys(s, run, &r->ideal, v);
  check_weights(s, run, &r->ideal, v);
  check_integers(run, T_SLOT_ROW, r->ideal.row_of_slot, p->tokens * p->config.topk, v);
  check_integers(run, T_COUNTS, r->ideal.counts, p->config.experts, v);
  check_global_counts(s, run, &r->ideal, v);
  for (int id = T_INPUTS; id < T_RESULTS; id++) compare_tensor(s, run, r, kinks, (enum tensor)id, v);
}

static void compare_all(const struct sample *s, const struct run *run, struct reference *r,
                        struct verdict *v) {
  struct kinks kinks = {0};
  check_choice(s, run, v);
  if (v->failed) return; /* the oracle is not to be led astray */
  if (reference_make(r, s) && reference_run(r, s, run, false) && reference_sizes(r, s, 2) &&
      check_drops(s, run, r, v) && check_kinks(s, r, &kinks))
    compare_results(s, run, r, &kinks, v);
  else
    v->broken = true;
  kinks_free(&kinks);
}

void check_compare(const struct sample *truth, const struct run *run, struct verdict *verdict) {
  struct reference r = {0};
  if (truth->problem.exact) {
    check_exact(truth, run, verdict);
    return;
  }
  compare_all(truth, run, &r, verdict);
  reference_free(&r);
}
