/* SPDX-License-Identifier: Apache-2.0
 *
 * Lists of problems from arguments and files, and random problems. See problem_list.h. */
#include "problem_list.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "random.h"

/* ---- reading --------------------------------------------------------------------------------------------------- */

struct list {
  const char *command;
  struct problem *problems;
  int64_t count;
  int64_t room;
};

static int add_problem(struct list *list, const char *text, const char *where) {
  char error[PROBLEM_ERROR];
  if (list->count == list->room) {
    const int64_t room = list->room ? 2 * list->room : 64;
    struct problem *grown = realloc(list->problems, (size_t)room * sizeof *grown);
    if (grown == NULL)
      return cli_fail(list->command, CLI_IO, "memory for %lld problems could not be had", (long long)room);
    list->problems = grown;
    list->room = room;
  }
  if (!problem_parse(text, &list->problems[list->count], error, sizeof error))
    return cli_fail(list->command, CLI_USAGE, "%s%s", where, error);
  list->count++;
  return CLI_GO_ON;
}

static int read_lines(struct list *list, FILE *file, const char *path) {
  char line[PROBLEM_TEXT + 2], where[PROBLEM_PATH + 32];
  for (int number = 1; fgets(line, sizeof line, file); number++) {
    snprintf(where, sizeof where, "%.200s: line %d: ", path, number);
    if (strchr(line, '\n') == NULL && !feof(file))
      return cli_fail(list->command, CLI_USAGE, "%sis too long", where);
    line[strcspn(line, "#\n")] = '\0';
    if (line[strspn(line, " \t\r")] == '\0') continue;
    const int code = add_problem(list, line, where);
    if (code != CLI_GO_ON) return code;
  }
  if (ferror(file)) return cli_fail(list->command, CLI_IO, "%s: %s", path, strerror(errno));
  return CLI_GO_ON;
}

static int read_argument(struct list *list, const char *argument) {
  if (argument[0] != '@') return add_problem(list, argument, "");
  const char *path = argument + 1;
  FILE *file = fopen(path, "r");
  if (file == NULL) return cli_fail(list->command, CLI_IO, "%s: %s", path, strerror(errno));
  const int code = read_lines(list, file, path);
  fclose(file);
  return code;
}

int problem_list(const char *command, char **arguments, int count, problem_visit visit, void *context) {
  struct list list = {.command = command};
  int code = CLI_GO_ON;
  for (int i = 0; i < count && code == CLI_GO_ON; i++) code = read_argument(&list, arguments[i]);
  for (int64_t i = 0; i < list.count && code == CLI_GO_ON; i++) code = visit(context, &list.problems[i]);
  free(list.problems);
  return code;
}

void problem_list_help(void) {
  const char *name, *values, *meaning;
  printf("\nA problem is one argument, of blank-separated fields in any order: 't4096 h2880 f2880 e32 k4 "
         "bf16 bwd'.\n"
         "@FILE holds a problem a line. The fields, in brackets their defaults:\n");
  for (int i = 0; problem_field(i, &name, &values, &meaning); i++) {
    char left[96];
    const bool size = name[1] == '\0';
    snprintf(left, sizeof left, "%s%s%s", name, size || !*values ? "" : "=", values);
    printf("  %-24s %s%s\n", left, strlen(left) > 24 ? "\n                           " : "", meaning);
  }
}

/* ---- random problems ------------------------------------------------------------------------------------------- */

struct draw {
  uint64_t state;
  bool exact;
  char text[PROBLEM_TEXT];
  size_t used;
};

static uint64_t next(struct draw *d) {
  d->state += RANDOM_STEP;
  return random_mix(d->state);
}

static int64_t below(struct draw *d, int64_t n) { return (int64_t)(next(d) % (uint64_t)n); }
static bool one_in(struct draw *d, int64_t n) { return below(d, n) == 0; }

__attribute__((format(printf, 2, 3))) static void say(struct draw *d, const char *format, ...) {
  va_list list;
  va_start(list, format);
  d->used += (size_t)vsnprintf(d->text + d->used, sizeof d->text - d->used, format, list);
  va_end(list);
}

#define PICK(d, ...) \
  ((const char *const[]){__VA_ARGS__}[below(d, sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *))])
#define PICK_SIZE(d, ...) \
  ((const int64_t[]){__VA_ARGS__}[below(d, sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t))])

static void say_layout(struct draw *d, bool eights) {
  say(d, "%s",
      eights && one_in(d, 2) ? " layout=interleaved:8"
                             : PICK(d, "", "", " layout=up_first", " layout=interleaved"));
}

/* Those whose values are known at some points; only the piecewise ones may be clamped anywhere. */
static void say_exact_activation(struct draw *d, bool eights) {
  const bool piecewise = one_in(d, 2);
  const bool gated = !one_in(d, 4);
  if (piecewise)
    say(d, " %s", gated ? PICK(d, "reglu", "reglu2") : PICK(d, "relu", "relu2"));
  else
    say(d, " %s",
        gated ? PICK(d, "swiglu", "geglu", "geglu_tanh", "quick_geglu")
              : PICK(d, "silu", "gelu", "gelu_tanh", "quick_gelu"));
  if (gated) say_layout(d, eights);
  if (piecewise && one_in(d, 4)) say(d, " limit=%s", PICK(d, "0.5", "1", "2"));
}

static void say_activation(struct draw *d, bool eights) {
  if (d->exact) {
    say_exact_activation(d, eights);
  } else if (one_in(d, 4)) {
    say(d, " %s",
        PICK(d, "silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "relu2_tanh", "situ_plain"));
  } else {
    say(d, " %s",
        PICK(d, "swiglu", "geglu", "geglu_tanh", "quick_geglu", "reglu", "reglu2", "situ", "swigluoai"));
    say_layout(d, eights);
  }
  if (!d->exact && one_in(d, 4)) say(d, " limit=%s", PICK(d, "0.5", "2", "7"));
}

static void say_exact_router(struct draw *d, int64_t experts, int64_t topk, bool replay) {
  const bool slots = !replay && one_in(d, 3), renorm = !slots && !replay && one_in(d, 3);
  say(d, " score=%s", slots ? "topk_softmax" : PICK(d, "softmax", "sigmoid", "sqrtsoftplus"));
  if (renorm) say(d, " renorm");
  if (one_in(d, 3)) say(d, " scale=%s", PICK(d, "0.5", "2"));
  if (one_in(d, 3)) say(d, " router_bias");
  if (!renorm && one_in(d, 3)) say(d, " correction_bias");
  if (!slots && !renorm && one_in(d, 3) && experts % 4 == 0 && topk <= experts / 2)
    say(d, " groups=4/2 group_score=%s", topk % 2 ? PICK(d, "max", "top2") : PICK(d, "max", "top2", "topk"));
}

static void say_router(struct draw *d, int64_t experts, int64_t topk) {
  say(d, " score=%s", PICK(d, "softmax", "topk_softmax", "sigmoid", "sqrtsoftplus"));
  if (one_in(d, 2)) say(d, " renorm");
  if (one_in(d, 3)) say(d, " scale=2.5");
  if (one_in(d, 3)) say(d, " router_bias");
  if (one_in(d, 3)) say(d, " correction_bias");
  if (one_in(d, 3)) say(d, " z_loss");
  if (one_in(d, 2)) say(d, "%s", PICK(d, " balance=batch", " balance=sequence:7", " balance=global"));
  if (one_in(d, 3) && experts % 4 == 0 && topk <= experts / 2)
    say(d, " groups=4/2 group_score=%s", topk % 2 ? PICK(d, "max", "top2") : PICK(d, "max", "top2", "topk"));
}

/* Who enters how, and what goes with it. */
static void say_entry(struct draw *d, int64_t experts, int64_t topk) {
  switch (below(d, 4)) {
  case 0:
    say(d, " given");
    if (one_in(d, 2)) say(d, " invalid");
    return;
  case 1: say(d, " logits=%s", PICK(d, "fp32", "bf16", "fp16")); break;
  default:
    if (one_in(d, 3)) say(d, " router=fp32");
  }
  const bool replay = one_in(d, 5);
  if (replay) say(d, " replay");
  if (d->exact)
    say_exact_router(d, experts, topk, replay);
  else
    say_router(d, experts, topk);
}

static void say_extras(struct draw *d, bool rows) {
  if (one_in(d, 3)) say(d, " bias");
  if (one_in(d, 4)) say(d, " transposed");
  if (one_in(d, 4)) say(d, " weight_on_input");
  if (one_in(d, 3)) say(d, " recompute");
  if (one_in(d, 4)) say(d, " grad=fp32");
  say(d, "%s", PICK(d, "", " skew=zipf", " skew=one", " skew=empty"));
  if (one_in(d, 3)) say(d, "%s", PICK(d, " bwd accumulate", " bwd", " bwd"));
  if (rows) return;
  if (one_in(d, 4)) say(d, " mask");
  if (one_in(d, 4)) say(d, " latent=%lld", (long long)PICK_SIZE(d, 8, 24, 33));
  if (one_in(d, 4)) say(d, " shared=%lld%s", (long long)PICK_SIZE(d, 8, 16, 40), PICK(d, "", " shared_gate"));
  if (one_in(d, 5))
    say(d, " capacity=%s drop=%s", PICK(d, "0.5", "1", "1.25"), PICK(d, "weight", "position"));
}

/* Seed and number are mixed, so that no two problems draw from shifted copies of one stream. */
static void draw_problem(struct problem *problem, uint64_t seed, uint64_t n, bool exact) {
  struct draw d = {.state = random_at(random_mix(seed), n), .exact = exact};
  char error[PROBLEM_ERROR];
  const bool rows = one_in(&d, 8);
  const int64_t tokens = PICK_SIZE(&d, 0, 1, 2, 7, 16, 33, 64),
                hidden = PICK_SIZE(&d, 1, 3, 7, 16, 17, 33, 64, 96);
  const int64_t inter = PICK_SIZE(&d, 1, 3, 8, 17, 24, 48, 64),
                experts = PICK_SIZE(&d, 1, 2, 3, 4, 8, 16, 17, 64);
  int64_t topk = rows ? 1 : 1 + below(&d, experts < 8 ? experts : 8);
  while (exact && topk & (topk - 1)) topk &= topk - 1;
  say(&d, "t%lld h%lld f%lld e%lld k%lld %s", (long long)tokens, (long long)hidden, (long long)inter,
      (long long)experts, (long long)topk, PICK(&d, "fp32", "bf16", "fp16"));
  say_activation(&d, inter % 8 == 0);
  if (rows)
    say(&d, " rows");
  else
    say_entry(&d, experts, topk);
  say_extras(&d, rows);
  say(&d, " seed=%llu%s", (unsigned long long)(next(&d) % 1000), exact ? " exact" : "");
  if (!problem_parse(d.text, problem, error, sizeof error))
    problem_default(problem); /* a field list at odds: never */
}

void problem_random(struct problem *problem, uint64_t seed, uint64_t n) {
  draw_problem(problem, seed, n, false);
}

void problem_random_exact(struct problem *problem, uint64_t seed, uint64_t n) {
  draw_problem(problem, seed, n, true);
}
