/* SPDX-License-Identifier: Apache-2.0
 *
 * moeblas check: proves that the library computes what the oracle does, on every problem of a list.
 *
 * A problem is run twice on the same data. In the first run every buffer ends at an unreadable page and what may not be
 * read is filled with NaN; in the second it starts at one and the filling is zero. Both must leave the guard bands and the
 * inputs alone and give the same bits; the first is compared with the oracle. One byte of workspace less is refused. On a
 * back end with memory of its own bands stand for the pages. */
#include "check.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "commands.h"
#include "problem_list.h"

/* The limits of docs/numerics.md. fp32: noise of sums of up to 2^14 terms. bf16 and fp16: fp32 noise makes a few values
 * round the other way than in the staged reference; each is off by one spacing, 2^-7 or 2^-10 of it, what follows from it
 * may be by another, and where it leads its row, so is the row: two spacings. The whole tensor has no such room: there the
 * documented roundings must explain the error but for a tenth. */
static const struct check_limit limits[] = {
    {MOE_FP32, 1e-5, 0, 0, 0},
    {MOE_BF16, 0x1p-6, 1.1, 0x1p-11, 0},
    {MOE_FP16, 0x1p-9, 1.1, 0x1p-14, 0x1p-14},
};

const struct check_limit *check_limit_of(moe_dtype dtype) { return &limits[(int)dtype - MOE_FP32]; }

/* ---- the verdict ----------------------------------------------------------------------------------------------- */

void verdict_fail(struct verdict *v, const char *format, ...) {
  va_list list;
  if (v->text[0] == '\0') {
    va_start(list, format);
    vsnprintf(v->text, sizeof v->text, format, list);
    va_end(list);
  }
  v->failed = true;
}

/* Written so that a NaN fails and is the worst of all. */
void verdict_measure(struct verdict *v, enum tensor tensor, int64_t row, double error, double limit,
                     const char *against) {
  const double ratio = error == 0 ? 0 : isnan(error) ? INFINITY : error / limit;
  if (!(ratio <= 1)) v->failed = true;
  if (ratio < v->ratio || (v->against && ratio == v->ratio)) return;
  v->ratio = ratio;
  v->error = error;
  v->limit = limit;
  v->tensor = tensor;
  v->row = row;
  v->against = against;
}

/* ---- running --------------------------------------------------------------------------------------------------- */

moe_plan *check_plan(moe_context *ctx, const struct problem *problem, struct verdict *v) {
  moe_plan *plan = NULL;
  const moe_status status = moe_plan_create(&plan, ctx, &problem->config);
  if (status == MOE_OK) return plan;
  snprintf(v->text, sizeof v->text, "%s", moe_last_error());
  v->broken = status == MOE_ERROR_MEMORY;
  v->refused = !v->broken;
  return NULL;
}

static bool succeeded(moe_status status, const char *call, struct verdict *v) {
  if (status == MOE_OK) return true;
  verdict_fail(v, "%s: %s: %s", call, moe_status_name(status), moe_last_error());
  return false;
}

static bool opened(struct run *run, const struct sample *sample, moe_context *ctx, moe_plan *plan,
                   enum placement placement, int poison, struct verdict *v) {
  const char *failure = run_open(run, sample, memory_of(ctx), plan, placement, poison);
  if (failure) snprintf(v->text, sizeof v->text, "%s", failure);
  v->broken = failure != NULL;
  return failure == NULL;
}

bool check_calls(struct run *run, int poison, struct verdict *v) {
  if (!succeeded(run_forward(run), "moe_forward", v)) return false;
  if (!succeeded(run_poison_workspace(run, poison), "after moe_forward", v)) return false;
  if (run->sample->problem.backward && !succeeded(run_backward(run), "moe_backward", v)) return false;
  return succeeded(run_fetch(run), "after the calls", v);
}

bool check_run(moe_context *ctx, const struct sample *sample, struct run *run, struct verdict *v) {
  moe_plan *plan = check_plan(ctx, &sample->problem, v);
  *run = (struct run){0};
  if (plan == NULL) return false;
  if (opened(run, sample, ctx, plan, PLACE_START, 0xff, v) && check_calls(run, 0xff, v)) return true;
  check_run_close(run);
  return false;
}

void check_run_close(struct run *run) {
  moe_plan *plan = run->plan;
  run_close(run);
  moe_plan_destroy(plan);
}

static void expect_refusal(struct run *run, size_t *bytes, const char *what, moe_status (*call)(struct run *),
                           struct verdict *v) {
  if (*bytes == 0) return;
  --*bytes;
  const moe_status status = call(run);
  ++*bytes;
  if (status != MOE_ERROR_WORKSPACE || strstr(moe_last_error(), what) == NULL)
    verdict_fail(v, "one byte of %s less gave status %s, not workspace with a sentence: %s", what,
                 moe_status_name(status), moe_last_error());
}

static void check_refusals(struct run *run, struct verdict *v) {
  expect_refusal(run, &run->workspace_bytes, "workspace", run_forward, v);
  expect_refusal(run, &run->saved_bytes, "saved", run_forward, v);
  if (!run->sample->problem.backward) return;
  expect_refusal(run, &run->workspace_bytes, "workspace", run_backward, v);
  expect_refusal(run, &run->saved_bytes, "saved", run_backward, v);
}

static void check_damage(const struct run *run, struct verdict *v) {
  const enum tensor id = run_damaged(run);
  if (id != T_COUNT) verdict_fail(v, "%s: its guard band, or an input, was written to", tensor_name(id));
}

static void check_equal(const struct run *a, const struct run *b, struct verdict *v) {
  for (int i = T_INPUTS; i < T_RESULTS; i++) {
    const enum tensor id = (enum tensor)i;
    const size_t bytes = a->span[id].bytes;
    if (bytes && memcmp(run_data(a, id), run_data(b, id), bytes))
      verdict_fail(v, "%s: a second run gave other bits", tensor_name(id));
  }
}

static void check_twice(const struct sample *sample, moe_context *ctx, moe_plan *plan, struct verdict *v) {
  struct run first, second = {0};
  if (opened(&first, sample, ctx, plan, PLACE_END, 0xff, v) &&
      opened(&second, sample, ctx, plan, PLACE_START, 0, v)) {
    check_refusals(&first, v);
    if (check_calls(&first, 0xff, v) && check_calls(&second, 0, v)) {
      check_damage(&first, v);
      check_damage(&second, v);
      check_equal(&first, &second, v);
      check_compare(sample, &first, v);
    }
  }
  run_close(&first);
  run_close(&second);
}

/* ---- the command ----------------------------------------------------------------------------------------------- */

struct job {
  const char *backend_name;
  int64_t threads, random, seed;
  bool bitwise, mutate, exact, json;
  moe_context *ctx;
  struct json out;
  int passed, failed, refused;
};

static void check_problem(struct job *job, const struct sample *sample, struct verdict *v) {
  moe_plan *plan = check_plan(job->ctx, &sample->problem, v);
  if (plan == NULL) return;
  check_twice(sample, job->ctx, plan, v);
  if (job->bitwise && !v->failed && !v->broken) check_bitwise(job->ctx, sample, v);
  moe_plan_destroy(plan);
}

/* The command that fails again, the kernels that were chosen by hand included. */
static void print_repeat(const struct job *job, const char *text) {
  const char *isa = getenv("MOE_CPU_ISA");
  printf("     repeat: %s%s%smoeblas check --backend %s --threads %lld%s '%s'\n", isa ? "MOE_CPU_ISA=" : "",
         isa ? isa : "", isa ? " " : "", job->backend_name, (long long)job->threads,
         job->mutate    ? " --mutate"
         : job->bitwise ? " --bitwise"
                        : "",
         text);
}

static void print_verdict(struct job *job, const char *text, const struct verdict *v) {
  const char *word = v->refused ? "REFUSED" : v->failed ? "FAIL" : "PASS";
  const char *colour = v->failed || v->refused ? cli_red(stdout) : cli_green(stdout);
  char where[64] = "all", numbers[160] = "", excuse[64] = "";
  if (v->row >= 0) snprintf(where, sizeof where, "row %lld", (long long)v->row);
  if (v->against)
    snprintf(numbers, sizeof numbers, "  %s %s: %.2g of %.2g (%s)", tensor_name(v->tensor), where, v->error,
             v->limit, v->against);
  if (v->excused)
    snprintf(excuse, sizeof excuse, "; %lld of %lld rows excused at a step", (long long)v->excused,
             (long long)v->rows);
  if (job->json) {
    json_open(&job->out, NULL, '{');
    json_text(&job->out, "problem", text);
    json_text(&job->out, "verdict", word);
    json_text(&job->out, "tensor", v->against ? tensor_name(v->tensor) : NULL);
    json_integer(&job->out, "row", v->row);
    json_real(&job->out, "error", v->error);
    json_real(&job->out, "limit", v->limit);
    json_text(&job->out, "against", v->against);
    json_integer(&job->out, "rows", v->rows);
    json_integer(&job->out, "excused", v->excused);
    json_text(&job->out, "says", v->text);
    json_close(&job->out, '}');
    return;
  }
  printf("%s%s%s %s%s%s\n", colour, word, cli_reset(stdout), text, numbers, excuse);
  if (v->text[0]) printf("     %s\n", v->text);
  if (v->failed) print_repeat(job, text);
  fflush(stdout);
}

static int take_mutations(struct job *job, const char *text, const struct sample *sample) {
  struct mutation_count count;
  if (!check_mutations(job->ctx, sample, &count))
    return cli_fail("check", CLI_IO, "%s: a mutation could not be run: %s", text, moe_last_error());
  json_open(&job->out, NULL, '{');
  json_text(&job->out, "problem", text);
  json_integer(&job->out, "noticed", count.passed);
  json_open(&job->out, "unnoticed", '[');
  for (int i = 0; i < count.failed; i++) json_text(&job->out, NULL, count.unnoticed[i]);
  json_close(&job->out, ']');
  json_close(&job->out, '}');
  job->passed += count.passed;
  job->failed += count.failed;
  if (job->json) return CLI_GO_ON;
  printf("%s%s%s %s: %d mutations noticed\n", count.failed ? cli_red(stdout) : cli_green(stdout),
         count.failed ? "FAIL" : "PASS", cli_reset(stdout), text, count.passed);
  for (int i = 0; i < count.failed; i++) printf("     unnoticed: %s\n", count.unnoticed[i]);
  if (count.failed) print_repeat(job, text);
  fflush(stdout);
  return CLI_GO_ON;
}

static int take_sample(struct job *job, const char *text, const struct sample *sample) {
  struct verdict v = {.row = -1};
  if (job->mutate) return take_mutations(job, text, sample);
  check_problem(job, sample, &v);
  if (v.broken) return cli_fail("check", CLI_IO, "%s: %s", text, v.text[0] ? v.text : "memory was short");
  print_verdict(job, text, &v);
  *(v.refused ? &job->refused : v.failed ? &job->failed : &job->passed) += 1;
  return CLI_GO_ON;
}

/* Returns CLI_GO_ON, or why the command must end. */
static int take_problem(void *context, const struct problem *problem) {
  struct job *job = context;
  struct sample sample;
  char text[PROBLEM_TEXT], error[PROBLEM_ERROR];
  problem_print(problem, text);
  const int code = sample_make(&sample, problem, error, sizeof error)
                       ? take_sample(job, text, &sample)
                       : cli_fail("check", CLI_IO, "%s", error);
  sample_free(&sample);
  return code;
}

static int take_all(struct job *job, char **arguments, int count) {
  int code = problem_list("check", arguments, count, take_problem, job);
  for (int64_t i = 0; i < job->random && code == CLI_GO_ON; i++) {
    struct problem problem;
    (job->exact ? problem_random_exact : problem_random)(&problem, (uint64_t)job->seed, (uint64_t)i);
    code = take_problem(job, &problem);
  }
  return code;
}

static int finish(struct job *job, int code) {
  if (job->json) {
    json_close(&job->out, ']');
    json_integer(&job->out, "passed", job->passed);
    json_integer(&job->out, "failed", job->failed);
    json_integer(&job->out, "refused", job->refused);
    json_close(&job->out, '}');
  } else if (code == CLI_GO_ON) {
    if (job->refused) printf("%d refused\n", job->refused);
    printf("%d passed, %d failed\n", job->passed, job->failed);
  }
  if (code == CLI_GO_ON) code = job->failed ? CLI_FAILED : job->refused && !job->exact ? CLI_USAGE : CLI_OK;
  return cli_finish("check", code);
}

int cmd_check(int argc, char **argv) {
  struct job job = {.backend_name = "auto", .seed = 1, .out = {.stream = NULL}};
  const struct option options[] = {
      {"--backend", "NAME", "auto, cpu or cuda", OPTION_TEXT, &job.backend_name, 0, 0},
      {"--threads", "N", "of the CPU, which it implies; 0: all. With --backend cuda: the device",
       OPTION_INTEGER, &job.threads, 0, 4096},
      {"--bitwise", NULL, "what must be equal to the bit is, too; on the CPU also for 1 .. 4 threads",
       OPTION_FLAG, &job.bitwise, 0, 0},
      {"--mutate", NULL, "plant errors; one that goes unnoticed fails", OPTION_FLAG, &job.mutate, 0, 0},
      {"--random", "N", "N random problems as well", OPTION_INTEGER, &job.random, 0, 1e9},
      {"--seed", "S", "of --random", OPTION_INTEGER, &job.seed, 0, 1e18},
      {"--exact", NULL,
       "the random problems have exact answers; those whose sums turn out too large are refused", OPTION_FLAG,
       &job.exact, 0, 0},
      {"--json", NULL, "one JSON document on stdout", OPTION_FLAG, &job.json, 0, 0},
  };
  const struct command command = {
      "check",           PROBLEM_ARGUMENTS, "Compares the library with the oracle on problems.",
      problem_list_help, options,           sizeof options / sizeof *options};
  int count;
  int code = cli_parse(&command, argc, argv, &count);
  if (code != CLI_GO_ON) return code;
  if (count == 0 && job.random == 0)
    return cli_fail("check", CLI_USAGE,
                    "wants a problem, @FILE or --random N; moeblas check --help explains them");
  code = cli_context("check", job.backend_name, job.threads, &job.ctx);
  if (code != CLI_GO_ON) return code;
  if (job.json) {
    job.out.stream = stdout;
    json_open(&job.out, NULL, '{');
    json_open(&job.out, "problems", '[');
  }
  code = finish(&job, take_all(&job, argv + 1, count));
  moe_context_destroy(job.ctx);
  return code;
}
