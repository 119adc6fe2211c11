/* SPDX-License-Identifier: Apache-2.0
 *
 * Problem strings: a string is split into words, each word found in the table of problem_fields.c, and the words applied
 * in rounds, so that their order never matters. Last come the rules that tie fields to one another.
 * Invariant: the table bounds every size before it is multiplied, so that all products fit in 63 bits. */
#include "problem.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "problem_fields.h"

enum {
  WORD_BYTES = PROBLEM_PATH + 32
};

struct word {
  const struct field *field;
  char value[WORD_BYTES];
};

void problem_default(struct problem *p) {
  *p = (struct problem){.tokens = 64, .seed = 1, .config = MOE_CONFIG_INIT};
  p->config.hidden = 64;
  p->config.inter = 48;
  p->config.experts = 8;
  p->config.topk = 2;
  p->config.dtype = MOE_FP32;
  p->config.act.gated = 1;
}

int64_t problem_halves(const struct problem *p) { return p->config.act.gated ? 2 : 1; }
int64_t problem_width(const struct problem *p) {
  return p->config.latent ? p->config.latent : p->config.hidden;
}
bool problem_routed(const struct problem *p) { return p->config.entry <= MOE_ENTRY_LOGITS; }

bool problem_field(int i, const char **name, const char **values, const char **meaning) {
  if (i >= problem_field_count) return false;
  *name = problem_fields[i].name;
  *values = problem_fields[i].values;
  *meaning = problem_fields[i].meaning;
  return true;
}

/* ---- words ----------------------------------------------------------------------------------------------------- */

static const struct field *find_field(const char *name, size_t length) {
  for (int i = 0; i < problem_field_count; i++) {
    const struct field *f = &problem_fields[i];
    if (strlen(f->name) == length && memcmp(f->name, name, length) == 0) return f;
  }
  return NULL;
}

/* The field that a word without '=' speaks of: its own name (a flag), t64, bf16, or swiglu. No word is empty. */
static const struct field *find_bare(const char *text, const char **value) {
  const struct field *f = find_field(text, strlen(text));
  *value = "";
  if (f) return f;
  *value = text + 1;
  if (strchr("thfek", text[0]) && text[1 + strspn(text + 1, "0123456789")] == '\0')
    return find_field(text, 1);
  *value = text;
  struct problem scratch;
  problem_default(&scratch);
  struct reply nowhere = {NULL, 0};
  static const char *const guesses[] = {"dtype", "act"};
  for (int i = 0; i < 2; i++) {
    f = find_field(guesses[i], strlen(guesses[i]));
    if (problem_field_set(f, &scratch, text, &nowhere)) return f;
  }
  return NULL;
}

static bool read_word(const char *text, struct word *word, struct reply *reply) {
  const size_t name = strcspn(text, "=");
  const char *value = text + name + 1;
  word->field = text[name] == '=' ? find_field(text, name) : find_bare(text, &value);
  if (word->field == NULL)
    return problem_refuse(reply, "'%.64s' is no field of a problem; moeblas help check lists them", text);
  if (text[name] == '=' && *value == '\0')
    return problem_refuse(reply, "'%.64s': wants a value after '='", text);
  memcpy(word->value, value, strlen(value) + 1); /* `text` is shorter than WORD_BYTES */
  return true;
}

/* Splits at blanks. Returns the number of words, or -1. No field occurs twice, so there are at most as many as fields. */
static int read_words(const char *text, struct word *words, struct reply *reply) {
  int count = 0;
  for (text += strspn(text, " \t\r\n"); *text; text += strspn(text, " \t\r\n")) {
    char piece[WORD_BYTES];
    const size_t length = strcspn(text, " \t\r\n");
    if (length >= sizeof piece) {
      problem_refuse(reply, "'%.32s...' is too long for a field", text);
      return -1;
    }
    memcpy(piece, text, length);
    piece[length] = '\0';
    struct word word;
    if (!read_word(piece, &word, reply)) return -1;
    for (int i = 0; i < count; i++) {
      if (words[i].field != word.field) continue;
      problem_refuse(reply, "'%.64s': the problem already has a field %s", piece, word.field->name);
      return -1;
    }
    words[count++] = word;
    text += length;
  }
  return count;
}

/* ---- rules ----------------------------------------------------------------------------------------------------- */

static bool check_router(const struct problem *p, struct reply *reply) {
  const moe_router_desc none = {0}, *r = &p->config.router;
  if (problem_routed(p)) return true;
  const bool set = r->score || r->renormalize || r->scale > 0 || r->groups || r->group_score || r->balance ||
                   r->z_coeff > none.z_coeff || p->config.router_dtype || p->router_bias ||
                   p->correction_bias;
  const char *entry = p->config.entry == MOE_ENTRY_ROWS ? "rows" : "given";
  if (set) return problem_refuse(reply, "%s: leaves no router, but the problem has fields of one", entry);
  if (p->replay) return problem_refuse(reply, "replay: wants a router, but the problem has %s", entry);
  return true;
}

/* Why the data of an exact problem could not be so: only what is a power of two may be divided by, and a sigmoid or a tanh is
 * exact at 0 and where it has become 1. */
static const char *inexact(const struct problem *p) {
  const moe_config *c = &p->config;
  const moe_router_desc *r = &c->router;
  const moe_act_desc *act = &c->act;
  const bool linear = act->kind == MOE_ACT_RELU || act->kind == MOE_ACT_RELU2;
  const bool slots = r->score == MOE_SCORE_TOPK_SOFTMAX, over = slots || r->renormalize;
  const bool divides = problem_routed(p) && (over || r->score == MOE_SCORE_SOFTMAX);
  if (act->kind == MOE_ACT_RELU2_TANH || act->kind == MOE_ACT_SITU || act->up_beta > 0)
    return "a tanh is not";
  if (!linear && (act->gate_max > 0 || act->alpha > 0))
    return "such an activation is not, clamped or stretched";
  if (r->balance || r->z_coeff > 0) return "the losses of a router are not";
  if (divides && c->topk & (c->topk - 1)) return "weights 1/k are only where k is a power of two";
  if (over && (p->replay || r->groups > 1 || (p->correction_bias && !slots)))
    return "weights that are divided by their sum are not, unless the best logits are chosen";
  return NULL;
}

static bool check_rules(const struct problem *p, struct reply *reply) {
  const moe_config *c = &p->config;
  if (c->entry == MOE_ENTRY_ROWS && c->topk != 1)
    return problem_refuse(reply, "k = %lld: rows have one expert each, so k is 1", (long long)c->topk);
  if (problem_routed(p) && !p->replay && c->topk > c->experts)
    return problem_refuse(reply, "k = %lld: wants at most e = %lld", (long long)c->topk,
                          (long long)c->experts);
  if (c->entry == MOE_ENTRY_ROWS && p->mask) return problem_refuse(reply, "mask: rows have no padding mask");
  if (p->invalid && !p->replay && c->entry != MOE_ENTRY_IDS)
    return problem_refuse(reply, "invalid: speaks of given ids, so it wants given or replay");
  if (p->shared_gate && !c->shared_inter)
    return problem_refuse(reply, "shared_gate: wants a shared expert (shared=N)");
  if (!c->act.gated && (c->act.layout || c->act.up_beta > 0 || c->act.up_offset > 0))
    return problem_refuse(reply, "layout, up_beta, offset: speak of the up half, but %s is not gated",
                          moe_activation_name(c->act.kind, 0));
  const char *const reason = p->exact ? inexact(p) : NULL;
  if (reason) return problem_refuse(reply, "exact: %s", reason);
  if (p->accumulate && !p->backward) return problem_refuse(reply, "accumulate: wants bwd");
  if (problem_bytes(p) > (int64_t)1 << 40)
    return problem_refuse(reply, "t, h, f, e, k: the tensors are %lld bytes together, wants at most 2^40",
                          (long long)problem_bytes(p));
  return check_router(p, reply);
}

/* Largest term: 2^12 experts of 2^21 x 2^20 weights of 4 bytes, with gradients 2^56. */
int64_t problem_bytes(const struct problem *p) {
  const moe_config *c = &p->config;
  const int64_t element = (int64_t)moe_dtype_bytes(c->dtype);
  const int64_t grad = p->backward ? (int64_t)moe_dtype_bytes(c->grad_dtype ? c->grad_dtype : c->dtype) : 0;
  const int64_t halves = problem_halves(p), width = problem_width(p), rows = p->tokens * c->topk;
  const int64_t weights = c->experts * (halves + 1) * c->inter * width + c->experts * c->hidden +
                          (halves + 1) * c->shared_inter * c->hidden + 2 * c->latent * c->hidden;
  const int64_t per_token = 2 * c->hidden + c->shared_inter * (halves + 1) + c->latent * 2;
  const int64_t per_row = (halves + 1) * c->inter + width;
  return weights * (element + grad) + (1 + p->backward) * element * (p->tokens * per_token + rows * per_row) +
         8 * (p->tokens * c->experts + rows);
}

/* ---- the three entries ----------------------------------------------------------------------------------------- */

bool problem_parse(const char *text, struct problem *problem, char *error, size_t bytes) {
  struct reply reply = {error, bytes};
  struct word words[64];
  _Static_assert(sizeof words / sizeof *words >= 64, "one place a field");
  problem_default(problem);
  if (strlen(text) >= PROBLEM_TEXT)
    return problem_refuse(&reply, "the problem is longer than %d bytes", PROBLEM_TEXT - 1);
  for (const char *c = text; *c; c++)
    if (iscntrl((unsigned char)*c) && !strchr("\t\r\n", *c))
      return problem_refuse(&reply, "byte 0x%02x in the problem: wants text", (unsigned char)*c);
  const int count = read_words(text, words, &reply);
  if (count < 0) return false;
  for (int round = 0; round < ROUND_COUNT; round++) {
    for (int i = 0; i < count; i++) {
      if ((int)words[i].field->round != round) continue;
      if (!problem_field_set(words[i].field, problem, words[i].value, &reply)) return false;
    }
  }
  if (problem->accumulate) problem->config.grad_dtype = MOE_FP32;
  return check_rules(problem, &reply);
}

bool problem_set(struct problem *problem, const char *name, const char *value, char *error, size_t bytes) {
  struct reply reply = {error, bytes};
  const struct field *f = find_field(name, strlen(name));
  if (f == NULL) return problem_refuse(&reply, "'%.64s' is no field of a problem", name);
  return problem_field_set(f, problem, value, &reply);
}

/* A field is printed where it differs from what the activation leaves of the default; sizes, dtype and name always. */
void problem_print(const struct problem *p, char *text) {
  struct problem base;
  struct reply nowhere = {NULL, 0};
  size_t used = 0;
  problem_default(&base);
  text[0] = '\0';
  const char *activation = moe_activation_name(p->config.act.kind, p->config.act.gated);
  problem_field_set(find_field("act", 3), &base, activation, &nowhere);
  for (int i = 0; i < problem_field_count; i++) {
    const struct field *f = &problem_fields[i];
    char value[PROBLEM_PATH], usual[PROBLEM_PATH];
    problem_field_print(f, p, value);
    problem_field_print(f, &base, usual);
    const bool size = f->kind == SIZE && f->name[1] == '\0';
    const bool bare =
        strcmp(f->name, "act") == 0 || strcmp(f->name, "dtype") == 0 || strcmp(f->name, value) == 0;
    const bool plain = f->kind == FLAG && value[0] == '1';
    if (strcmp(value, usual) == 0 && !size && !bare) continue;
    used += (size_t)snprintf(text + used, PROBLEM_TEXT - used, "%s%s%s%s", used ? " " : "",
                             bare ? "" : f->name, bare || plain || size ? "" : "=", plain ? "" : value);
  }
}
