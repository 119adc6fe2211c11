/* SPDX-License-Identifier: Apache-2.0
 *
 * The fields of a problem string: how each is read, printed and explained. See problem_fields.h. */
#include "problem_fields.h"

#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "presets.h"

bool problem_refuse(struct reply *reply, const char *format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(reply->text, reply->bytes, format, list);
  va_end(list);
  return false;
}

/* ---- numbers and words ----------------------------------------------------------------------------------------- */

static bool parse_integer(const char *text, int64_t min, int64_t max, int64_t *value) {
  const size_t length = strlen(text);
  if (length == 0 || length > 18 || strspn(text, "0123456789") != length) return false;
  *value = strtoll(text, NULL, 10);
  return *value >= min && *value <= max;
}

/* Plain decimal only: no NaN, no infinity, no hexadecimal. */
static bool parse_real(const char *text, float *value) {
  const size_t length = strlen(text);
  if (length == 0 || length > 32 || strspn(text, "0123456789.e-+") != length) return false;
  char *end;
  *value = strtof(text, &end);
  return *end == '\0' && *value >= 0 && *value <= 1e6f;
}

/* The fewest digits that read back as the same number, without an exponent as long as that is no longer. */
static void print_real(float value, char *text) {
  int digits = 0;
  do snprintf(text, 32, "%.*g", ++digits, (double)value);
  while (digits < 9 && (strtof(text, NULL) != value || (digits <= 6 && strchr(text, 'e'))));
}

/* Index of `word` in "a|b|c", or -1. */
static int find_word(const char *words, const char *word) {
  const size_t length = strlen(word);
  for (int i = 0;; i++) {
    const size_t next = strcspn(words, "|");
    if (next == length && memcmp(words, word, length) == 0) return i;
    if (words[next] == '\0') return -1;
    words += next + 1;
  }
}

static void copy_word(const char *words, int index, char *text) {
  for (; index > 0; index--) words += strcspn(words, "|") + 1;
  memcpy(text, words, strcspn(words, "|"));
  text[strcspn(words, "|")] = '\0';
}

static const char dtype_words[] = "fp32|bf16|fp16"; /* from MOE_FP32 = 1 on */

static moe_dtype find_dtype(const char *word) { return (moe_dtype)(find_word(dtype_words, word) + 1); }

/* ---- fields with a rule of their own --------------------------------------------------------------------------- */

static bool set_preset(struct problem *p, const char *value, struct reply *reply) {
  return presets_find(value, p, reply->text, reply->bytes);
}
/* A preset is printed as the fields it stands for, so that the line repeats wherever the file is not. */
static void print_nothing(const struct problem *p, char *value) { (void)p, (void)value; }

static bool set_dtype(struct problem *p, const char *value, struct reply *reply) {
  p->config.dtype = find_dtype(value);
  return p->config.dtype ? true : problem_refuse(reply, "dtype '%.64s': wants fp32, bf16 or fp16", value);
}
static void print_dtype(const struct problem *p, char *value) {
  copy_word(dtype_words, (int)p->config.dtype - 1, value);
}

static void set_limit_of(moe_act_desc *act, float limit) {
  act->gate_max = limit;
  act->up_max = act->gated ? limit : 0;
  act->up_min = act->gated ? -limit : 0;
}

static bool set_act(struct problem *p, const char *value, struct reply *reply) {
  moe_act_desc act = {0};
  const bool oai = strcmp(value, "swigluoai") == 0;
  if (moe_activation_find(oai ? "swiglu" : value, &act.kind, &act.gated) != MOE_OK)
    return problem_refuse(reply, "act '%.64s': no such activation; moeblas info lists them", value);
  if (oai) {
    act.alpha = 1.702f;
    act.up_offset = 1;
    set_limit_of(&act, 7);
  }
  if (act.kind == MOE_ACT_SITU && act.gated) act.up_beta = 25;
  act.layout = act.gated ? p->config.act.layout : MOE_LAYOUT_CONCAT_GATE_FIRST;
  act.interleave = act.gated ? p->config.act.interleave : 0;
  p->config.act = act;
  return true;
}
static void print_act(const struct problem *p, char *value) {
  snprintf(value, 64, "%s", moe_activation_name(p->config.act.kind, p->config.act.gated));
}

static bool set_limit(struct problem *p, const char *value, struct reply *reply) {
  float limit;
  if (!parse_real(value, &limit))
    return problem_refuse(reply, "limit '%.64s': wants a number from 0 to 1e6", value);
  set_limit_of(&p->config.act, limit);
  return true;
}
static void print_limit(const struct problem *p, char *value) { print_real(p->config.act.gate_max, value); }

static bool set_layout(struct problem *p, const char *value, struct reply *reply) {
  static const char words[] = "concat|up_first|interleaved";
  int64_t group = 0;
  const bool grouped = strncmp(value, "interleaved:", 12) == 0;
  const int index = find_word(words, grouped ? "interleaved" : value);
  if (index < 0 || (grouped && !parse_integer(value + 12, 1, 1 << 20, &group)))
    return problem_refuse(reply, "layout '%.64s': wants concat, up_first, interleaved or interleaved:N",
                          value);
  p->config.act.layout = (moe_layout)index;
  p->config.act.interleave = group;
  return true;
}
static void print_layout(const struct problem *p, char *value) {
  static const char *const words[] = {"concat", "up_first", "interleaved"};
  const moe_act_desc *act = &p->config.act;
  if (act->interleave)
    snprintf(value, 64, "interleaved:%lld", (long long)act->interleave);
  else
    snprintf(value, 64, "%s", words[act->layout]);
}

/* Without a router there is nothing left of what a preset said about it. */
static void drop_router(struct problem *p) {
  p->config.router = (moe_router_desc){0};
  p->config.router_dtype = MOE_DTYPE_DEFAULT;
  p->router_bias = p->correction_bias = 0;
}

static bool set_entry(struct problem *p, moe_entry entry, const char *value, struct reply *reply) {
  static const char *const names[] = {"router", "logits", "given", "rows"};
  if (p->config.entry != MOE_ENTRY_HIDDEN)
    return problem_refuse(reply, "%s: the problem already has %s", names[entry], names[p->config.entry]);
  if (*value) return problem_refuse(reply, "%s=%.64s: takes no value", names[entry], value);
  p->config.entry = entry;
  if (entry != MOE_ENTRY_LOGITS) drop_router(p);
  if (entry == MOE_ENTRY_ROWS) p->config.topk = 1;
  return true;
}
static bool set_given(struct problem *p, const char *value, struct reply *reply) {
  return set_entry(p, MOE_ENTRY_IDS, value, reply);
}
static bool set_rows(struct problem *p, const char *value, struct reply *reply) {
  return set_entry(p, MOE_ENTRY_ROWS, value, reply);
}
static bool set_logits(struct problem *p, const char *value, struct reply *reply) {
  const moe_dtype dtype = *value ? find_dtype(value) : MOE_FP32;
  if (dtype == MOE_DTYPE_DEFAULT)
    return problem_refuse(reply, "logits '%.64s': wants fp32, bf16 or fp16", value);
  p->config.logits_dtype = dtype;
  return set_entry(p, MOE_ENTRY_LOGITS, "", reply);
}
static void print_given(const struct problem *p, char *value) {
  if (p->config.entry == MOE_ENTRY_IDS) strcpy(value, "given");
}
static void print_rows(const struct problem *p, char *value) {
  if (p->config.entry == MOE_ENTRY_ROWS) strcpy(value, "rows");
}
static void print_logits(const struct problem *p, char *value) {
  if (p->config.entry == MOE_ENTRY_LOGITS) copy_word(dtype_words, (int)p->config.logits_dtype - 1, value);
}

/* "8/4": eight groups, the best four stay. */
static bool set_groups(struct problem *p, const char *value, struct reply *reply) {
  char left[24] = "";
  const size_t slash = strcspn(value, "/");
  if (slash < sizeof left) memcpy(left, value, slash);
  moe_router_desc *r = &p->config.router;
  if (value[slash] == '/' && parse_integer(left, 1, MOE_MAX_EXPERTS, &r->groups) &&
      parse_integer(value + slash + 1, 1, r->groups, &r->topk_groups))
    return true;
  return problem_refuse(reply, "groups '%.64s': wants G/B, B of G groups, 1 <= B <= G <= %d", value,
                        MOE_MAX_EXPERTS);
}
static void print_groups(const struct problem *p, char *value) {
  const moe_router_desc *r = &p->config.router;
  if (r->groups) snprintf(value, 64, "%lld/%lld", (long long)r->groups, (long long)r->topk_groups);
}

static bool set_balance(struct problem *p, const char *value, struct reply *reply) {
  moe_router_desc *r = &p->config.router;
  const bool sequence = strncmp(value, "sequence:", 9) == 0;
  const int index = find_word("none|batch|sequence|global", sequence ? "sequence" : value);
  if (index < 0 || (index == MOE_BALANCE_SEQUENCE) != sequence ||
      (sequence && !parse_integer(value + 9, 1, 1 << 24, &r->sequence_tokens)))
    return problem_refuse(reply, "balance '%.64s': wants none, batch, sequence:N or global", value);
  r->balance = (moe_balance)index;
  r->balance_coeff = index ? 0.01f : 0;
  return true;
}
static void print_balance(const struct problem *p, char *value) {
  static const char *const words[] = {"none", "batch", "sequence", "global"};
  const moe_router_desc *r = &p->config.router;
  snprintf(value, 64, r->balance == MOE_BALANCE_SEQUENCE ? "%s:%lld" : "%s", words[r->balance],
           (long long)r->sequence_tokens);
}

static bool parse_flag(const char *value, int *flag) {
  if (*value && strcmp(value, "0") && strcmp(value, "1")) return false;
  *flag = *value != '0';
  return true;
}

static bool set_z_loss(struct problem *p, const char *value, struct reply *reply) {
  int flag;
  if (!parse_flag(value, &flag)) return problem_refuse(reply, "z_loss '%.64s': wants 0 or 1", value);
  p->config.router.z_coeff = flag ? 0.001f : 0;
  return true;
}
static void print_z_loss(const struct problem *p, char *value) {
  if (p->config.router.z_coeff > 0) strcpy(value, "z_loss");
}

static bool set_wide(moe_dtype *dtype, const char *name, const char *value, struct reply *reply) {
  if (strcmp(value, "fp32"))
    return problem_refuse(reply, "%s '%.64s': wants fp32, or to be left out", name, value);
  *dtype = MOE_FP32;
  return true;
}
static bool set_grad(struct problem *p, const char *value, struct reply *reply) {
  return set_wide(&p->config.grad_dtype, "grad", value, reply);
}
static bool set_router(struct problem *p, const char *value, struct reply *reply) {
  return set_wide(&p->config.router_dtype, "router", value, reply);
}
static void print_grad(const struct problem *p, char *value) {
  if (p->config.grad_dtype) strcpy(value, "fp32");
}
static void print_router(const struct problem *p, char *value) {
  if (p->config.router_dtype) strcpy(value, "fp32");
}

static const char skew_words[] = "uniform|zipf|one|empty";

/* A file is known by its dot or slash, so that a misspelt word is refused here and not looked for on the disk. */
static bool set_skew(struct problem *p, const char *value, struct reply *reply) {
  const int index = find_word(skew_words, value);
  const bool file = strpbrk(value, "./") && strlen(value) < sizeof p->skew_file;
  if (index < 0 && !file)
    return problem_refuse(
        reply, "skew '%.64s': wants uniform, zipf, one, empty or a file (its name has a '.' or '/')", value);
  p->skew = index < 0 ? SKEW_FILE : (enum skew)index;
  snprintf(p->skew_file, sizeof p->skew_file, "%s", index < 0 ? value : "");
  return true;
}
static void print_skew(const struct problem *p, char *value) {
  if (p->skew == SKEW_FILE)
    snprintf(value, PROBLEM_PATH, "%s", p->skew_file);
  else
    copy_word(skew_words, (int)p->skew, value);
}

static bool set_seed(struct problem *p, const char *value, struct reply *reply) {
  char *end;
  errno = 0;
  const unsigned long long seed = strtoull(value, &end, 10);
  if (errno || *end || *value < '0') /* strtoull takes blanks and signs first, which lie below the digits */
    return problem_refuse(reply, "seed '%.64s': wants 0 to 2^64-1", value);
  p->seed = seed;
  return true;
}
static void print_seed(const struct problem *p, char *value) {
  snprintf(value, 64, "%llu", (unsigned long long)p->seed);
}

/* ---- the table ------------------------------------------------------------------------------------------------- */

#define AT(member) offsetof(struct problem, member)
#define SIZES(name, member, max, say) \
  { name, SIZE, ROUND_REST, AT(member), 0, max, "N", say, NULL, NULL }
#define COUNT(name, member, max, say) \
  { name, SIZE, ROUND_REST, AT(member), 1, max, "N", say, NULL, NULL }
#define NUMBER(name, member, say) \
  { name, REAL, ROUND_REST, AT(member), 0, 0, "X", say, NULL, NULL }
#define SWITCH(name, member, say) \
  { name, FLAG, ROUND_REST, AT(member), 0, 1, "", say, NULL, NULL }
#define WORD(name, member, words, say) \
  { name, CHOICE, ROUND_REST, AT(member), 0, 0, words, say, NULL, NULL }
#define RULE(name, round, values, say, rule) \
  { name, SPECIAL, round, 0, 0, 0, values, say, set_##rule, print_##rule }
#define print_preset print_nothing

const struct field problem_fields[] = {
    SIZES("t", tokens, 1 << 24, "tokens (t64); rows of x with `rows`"),
    COUNT("h", config.hidden, 1 << 20, "hidden width (h64)"),
    COUNT("f", config.inter, 1 << 20, "inner width of an expert (f48)"),
    COUNT("e", config.experts, MOE_MAX_EXPERTS, "experts (e8)"),
    COUNT("k", config.topk, MOE_MAX_TOPK, "experts a token (k2)"),
    RULE("dtype", ROUND_REST, "fp32|bf16|fp16", "of x, weights and out; the bare word will do", dtype),
    RULE("act", ROUND_RESET, "NAME", "activation; the bare name will do; swigluoai is that of GPT-OSS", act),
    SWITCH("bwd", backward, "backward as well"),
    RULE("preset", ROUND_PRESET, "NAME", "a published layer; every other field overrides it", preset),
    RULE("limit", ROUND_REST, "X", "clamp of the activation: gate <= X, up in -X..X; 0: none", limit),
    NUMBER("alpha", config.act.alpha, "parameter of the activation; 0: its default"),
    NUMBER("beta", config.act.beta, "parameter of the activation; 0: its default"),
    NUMBER("up_beta", config.act.up_beta, "soft bound of the up half; 0: none"),
    NUMBER("offset", config.act.up_offset, "added to the up half"),
    RULE("layout", ROUND_REST, "concat|up_first|interleaved[:N]", "order of gate and up rows", layout),
    SWITCH("transposed", config.transposed, "weights are [in,out]"),
    SWITCH("bias", bias, "experts have biases b1 and b2"),
    WORD("score", config.router.score, "softmax|topk_softmax|sigmoid|sqrtsoftplus", "of the router"),
    SWITCH("renorm", config.router.renormalize, "weights of a token are divided by their sum"),
    NUMBER("scale", config.router.scale, "of the weights; 0: 1"),
    RULE("groups", ROUND_REST, "G/B", "experts come from the best B of G groups", groups),
    WORD("group_score", config.router.group_score, "max|top2|topk", "what makes a group good"),
    SWITCH("correction_bias", correction_bias, "bias of the selection only"),
    SWITCH("router_bias", router_bias, "bias of the logits"),
    RULE("balance", ROUND_REST, "none|batch|sequence:N|global", "balancing loss, coefficient 0.01", balance),
    RULE("z_loss", ROUND_REST, "", "z-loss, coefficient 0.001", z_loss),
    RULE("router", ROUND_REST, "fp32", "dtype of the router weight", router),
    RULE("given", ROUND_RESET, "", "ids and weights are given, no router", given),
    RULE("logits", ROUND_RESET, "[fp32|bf16|fp16]", "logits are given", logits),
    RULE("rows", ROUND_RESET, "", "rows sorted by expert are given (k1)", rows),
    SWITCH("replay", replay, "ids are given, their weights come from the router"),
    SIZES("shared", config.shared_inter, 1 << 20, "inner width of the shared expert; 0: none"),
    SWITCH("shared_gate", shared_gate, "sigmoid gate of the shared expert"),
    SIZES("latent", config.latent, 1 << 20, "width that the experts see; 0: hidden"),
    SWITCH("weight_on_input", config.weight_on_input, "weights multiply the input, not the output"),
    NUMBER("capacity", config.capacity_factor, "capacity factor of an expert; 0: none"),
    WORD("drop", config.drop, "weight|position", "what is kept at capacity"),
    SWITCH("mask", mask, "an eighth of the tokens is padding"),
    SWITCH("invalid", invalid, "some given ids are -1, E, INT_MIN or repeated"),
    SWITCH("accumulate", accumulate, "gradients are added in fp32 to what is there"),
    RULE("grad", ROUND_REST, "fp32", "dtype of the parameter gradients", grad),
    SWITCH("recompute", config.recompute, "backward repeats the up projection"),
    RULE("skew", ROUND_REST, "uniform|zipf|one|empty|FILE", "load of the experts; FILE: E weights", skew),
    SWITCH("exact", exact, "small integers, results compared to the bit"),
    RULE("seed", ROUND_REST, "N", "of the random data", seed),
};
const int problem_field_count = sizeof problem_fields / sizeof *problem_fields;

/* ---- one field ------------------------------------------------------------------------------------------------- */

bool problem_field_set(const struct field *f, struct problem *p, const char *value, struct reply *reply) {
  char *const at = (char *)p + f->offset;
  int64_t whole;
  float real;
  int word;
  switch (f->kind) {
  case SIZE:
    if (!parse_integer(value, f->min, f->max, &whole))
      return problem_refuse(reply, "%s '%.64s': wants a whole number from %lld to %lld", f->name, value,
                            (long long)f->min, (long long)f->max);
    memcpy(at, &whole, sizeof whole);
    return true;
  case REAL:
    if (!parse_real(value, &real))
      return problem_refuse(reply, "%s '%.64s': wants a number from 0 to 1e6", f->name, value);
    memcpy(at, &real, sizeof real);
    return true;
  case FLAG:
    if (!parse_flag(value, &word)) return problem_refuse(reply, "%s '%.64s': wants 0 or 1", f->name, value);
    memcpy(at, &word, sizeof word);
    return true;
  case CHOICE:
    word = find_word(f->values, value);
    if (word < 0) return problem_refuse(reply, "%s '%.64s': wants %s", f->name, value, f->values);
    memcpy(at, &word, sizeof word);
    return true;
  default: return f->set(p, value, reply);
  }
}

void problem_field_print(const struct field *f, const struct problem *p, char *value) {
  const char *const at = (const char *)p + f->offset;
  int64_t whole;
  float real;
  int word;
  value[0] = '\0';
  switch (f->kind) {
  case SIZE:
    memcpy(&whole, at, sizeof whole);
    snprintf(value, 32, "%lld", (long long)whole);
    break;
  case REAL:
    memcpy(&real, at, sizeof real);
    print_real(real, value);
    break;
  case FLAG:
  case CHOICE:
    memcpy(&word, at, sizeof word);
    if (f->kind == CHOICE)
      copy_word(f->values, word, value);
    else
      strcpy(value, word ? "1" : "0");
    break;
  default: f->print(p, value);
  }
}
