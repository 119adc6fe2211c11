/* SPDX-License-Identifier: Apache-2.0
 *
 * Exact problems: the library must give the bits of the staged oracle, its own choice of experts included. That this may be
 * asked is not taken on trust: of every result the sum of the magnitudes of all its terms, in units of the last binary place
 * that any of its numbers has, must leave some of the 24 bits of fp32 unused. A problem whose data are too large is refused. */
#include <math.h>
#include <string.h>

#include "check.h"
#include "check_reference.h"

enum {
  INFINITE = 2000,
  SPARE = 2 /* bits of fp32 that a sum must not need: the unit is one seen, not one proved */
};

/* How many binary digits a number has behind the point. */
static int digits(double value) {
  int behind = 0;
  for (; value != (double)(int64_t)value && behind < 64; behind++) value *= 2;
  return behind;
}

/* Bits that a sum of this tensor's terms may need; 0 where there is none, INFINITE where the format has no such number. */
static int bits_of(const double *size, const double *value, int64_t count) {
  double most = 0;
  int behind = 0;
  for (int64_t i = 0; i < count; i++) {
    const double terms = (double)(float)size[i], result = (double)(float)value[i];
    if (!isfinite(value[i]) || !isfinite(size[i])) return INFINITE;
    if (terms == 0) continue;
    if (terms >= 0x1p62) return INFINITE;
    most = terms > most ? terms : most;
    behind = behind > digits(terms) ? behind : digits(terms);
    behind = behind > digits(result) ? behind : digits(result);
  }
  return most > 0 ? ilogb(most) + 1 + behind : 0;
}

static bool is_exact(const struct sample *s, const struct reference *r, struct verdict *v) {
  for (int i = T_INPUTS; i < T_RESULTS; i++) {
    const enum tensor id = (enum tensor)i;
    const double *value = oracle_tensor(&r->staged, id);
    if (r->size[id] == NULL || value == NULL) continue;
    const int bits = bits_of(r->size[id], value, shape_count(&s->shape[id]));
    if (bits <= 24 - SPARE) continue;
    v->refused = true;
    if (bits == INFINITE)
      snprintf(v->text, sizeof v->text, "exact: %s: its format cannot hold all of its numbers",
               tensor_name(id));
    else
      snprintf(v->text, sizeof v->text, "exact: sums of %s may need %d bits, wanted at most %d",
               tensor_name(id), bits, 24 - SPARE);
    return false;
  }
  return true;
}

/* Equal as numbers: the sign of a zero depends on the order of a sum. */
static void compare_numbers(const struct sample *s, const struct run *run, const double *wanted,
                            enum tensor id, struct verdict *v) {
  const struct shape *shape = &s->shape[id];
  const void *found = run_data(run, id), *before = s->data[id];
  for (int64_t i = 0; found && wanted && i < shape_count(shape); i++) {
    const double sum = wanted[i] + (before ? element_load(before, shape->element, i) : 0);
    const double exact = oracle_round(sum, (moe_dtype)shape->element),
                 value = element_load(found, shape->element, i);
    if (!(value == exact))
      verdict_fail(v, "%s[%lld] = %a, exactly it is %a", tensor_name(id), (long long)i, value, exact);
  }
}

static bool run_references(const struct sample *s, struct reference *r) {
  return reference_make(r, s) && reference_run(r, s, NULL, true) && reference_sizes(r, s, 1);
}

void check_exact(const struct sample *truth, const struct run *run, struct verdict *v) {
  const struct problem *p = &truth->problem;
  struct reference r = {0};
  if (!run_references(truth, &r)) {
    v->broken = true;
  } else if (is_exact(truth, &r, v)) {
    const int64_t slots = p->tokens * p->config.topk;
    check_integers(run, T_TOPK_IDS, r.staged.ids, slots, v);
    check_integers(run, T_SLOT_ROW, r.staged.row_of_slot, slots, v);
    check_integers(run, T_COUNTS, r.staged.counts, p->config.experts, v);
    for (int id = T_INPUTS; id < T_RESULTS; id++)
      compare_numbers(truth, run, oracle_tensor(&r.staged, (enum tensor)id), (enum tensor)id, v);
  }
  reference_free(&r);
}
