/* SPDX-License-Identifier: Apache-2.0
 *
 * moeblas bench: times the whole layer, and each op alone, on problems, and sets the times against two floors: operations
 * over the rate of a large dense product, bytes that must move over the rate of a large copy, both measured in the same
 * run. Medians with the spread between the quartiles; random data; nothing is allocated or copied to or from a device while
 * the clock runs, which is the back end's own. */
#include "bench.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "commands.h"
#include "problem_list.h"

/* ---- timing ---------------------------------------------------------------------------------------------------- */

enum {
  MOST_REPEATS = 1000,
  LEAST_REPEATS = 3
};

static double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int compare_doubles(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static moe_status time_once(const struct bench *bench, bench_call call, void *context, double *us) {
  moe_status status = moe_timer_record(bench->from, NULL);
  if (status == MOE_OK) status = call(context);
  if (status == MOE_OK) status = moe_timer_record(bench->to, NULL);
  return status == MOE_OK ? moe_timer_elapsed_us(bench->from, bench->to, us) : status;
}

moe_status bench_time(const struct bench *bench, bench_call call, void *context, struct timing *timing) {
  double times[MOST_REPEATS];
  int count = 0;
  moe_status status = call(context);
  if (status == MOE_OK) status = moe_synchronize(bench->ctx, NULL);
  const double start = now_us();
  while (status == MOE_OK && count < (int)bench->repeat) {
    if (count >= LEAST_REPEATS && now_us() - start > bench->seconds * 1e6) break;
    status = time_once(bench, call, context, &times[count++]);
  }
  if (status != MOE_OK) return status;
  qsort(times, (size_t)count, sizeof *times, compare_doubles);
  timing->median_us = count % 2 ? times[count / 2] : (times[count / 2 - 1] + times[count / 2]) / 2;
  timing->spread_pct = 100 * (times[(3 * count) / 4] - times[count / 4]) / timing->median_us;
  return MOE_OK;
}

/* ---- the report ------------------------------------------------------------------------------------------------ */

static const char csv_header[] =
    "date,commit,problem,pass,impl,time_us,tflops,gbps,pct_of_floor,launches,peak_mib,spread_pct,note\n";

struct rates {
  double tflops, gbps, pct_of_floor, pct_of_dense;
  bool compute_bound;
};

static struct rates rates_of(const struct bench *bench, const struct bench_line *line) {
  const double compute_us = line->flops / bench->ceilings.flops * 1e6;
  const double memory_us = line->bytes / bench->ceilings.bytes * 1e6, us = line->time.median_us;
  return (struct rates){.tflops = line->flops / us * 1e-6,
                        .gbps = line->bytes / us * 1e-3,
                        .pct_of_floor = 100 * (compute_us > memory_us ? compute_us : memory_us) / us,
                        .pct_of_dense = 100 * compute_us / us,
                        .compute_bound = compute_us > memory_us};
}

static void report_json(struct bench *bench, const char *problem, const struct bench_line *line,
                        const struct rates *r) {
  struct json *out = &bench->out;
  json_open(out, NULL, '{');
  json_text(out, "problem", problem);
  json_text(out, "pass", line->pass);
  json_text(out, "impl", line->impl);
  json_real(out, "time_us", line->time.median_us);
  json_real(out, "spread_pct", line->time.spread_pct);
  json_real(out, "tflops", r->tflops);
  json_real(out, "gbps", r->gbps);
  json_text(out, "floor", r->compute_bound ? "compute" : "memory");
  json_real(out, "pct_of_floor", r->pct_of_floor);
  json_real(out, "pct_of_dense", r->pct_of_dense);
  json_real(out, "peak_mib", line->peak_mib);
  json_close(out, '}');
}

/* The column `launches` is for implementations that can count them, which the library cannot. */
void bench_report(struct bench *bench, const char *problem, const struct bench_line *line) {
  const struct rates r = rates_of(bench, line);
  if (bench->json)
    report_json(bench, problem, line, &r);
  else if (bench->csv)
    printf("%s,%s,%s,%s,%s,%.1f,%.6f,%.3f,%.1f,,%.1f,%.1f,%s floor; pct_of_dense %.1f\n", bench->date,
           bench->commit, problem, line->pass, line->impl, line->time.median_us, r.tflops, r.gbps,
           r.pct_of_floor, line->peak_mib, line->time.spread_pct, r.compute_bound ? "compute" : "memory",
           r.pct_of_dense);
  else
    printf(
        "  %-3s %-14s %12.1f us +-%4.1f%%  %9.2f %s  %7.2f GB/s  %5.1f%% of the %s floor  %5.1f%% of dense\n",
        line->pass, line->impl, line->time.median_us, line->time.spread_pct / 2,
        r.tflops >= 1 ? r.tflops : 1000 * r.tflops, r.tflops >= 1 ? "TFLOP/s" : "GFLOP/s", r.gbps,
        r.pct_of_floor, r.compute_bound ? "compute" : "memory ", r.pct_of_dense);
  fflush(stdout);
}

/* ---- the layer ------------------------------------------------------------------------------------------------- */

static struct load load_of(const struct run *run) {
  const struct problem *p = &run->sample->problem;
  const int32_t *slot_row = run_data(run, T_SLOT_ROW), *counts = run_data(run, T_COUNTS);
  const int32_t *offset = run_data(run, T_ROW_OFFSET);
  struct load load = {0};
  for (int64_t i = 0; slot_row && i < p->tokens * p->config.topk; i++) load.rows += slot_row[i] >= 0;
  for (int64_t e = 0; e < p->config.experts; e++)
    load.experts += (counts ? counts[e] : offset[e + 1] - offset[e]) > 0;
  if (offset) load.rows = offset[p->config.experts];
  return load;
}

/* Forward; backward is twice that. The router is left out, as is usual. */
static double layer_flops(const struct problem *p, const struct load *load) {
  const moe_config *c = &p->config;
  const double products = (double)problem_halves(p) + 1, tokens = (double)p->tokens,
               hidden = (double)c->hidden;
  return 2 * products * load->rows * (double)problem_width(p) * (double)c->inter +
         2 * products * tokens * hidden * (double)c->shared_inter + 4 * tokens * hidden * (double)c->latent;
}

static double layer_bytes(const struct problem *p, const struct load *load, bool backward) {
  const moe_config *c = &p->config;
  const double element = (double)moe_dtype_bytes(c->dtype), halves = (double)problem_halves(p);
  const double grad = (double)moe_dtype_bytes(c->grad_dtype ? c->grad_dtype : c->dtype);
  const double width = (double)problem_width(p), hidden = (double)c->hidden, tokens = (double)p->tokens;
  const double dense = (halves + 1) * (double)c->shared_inter * hidden + 2 * (double)c->latent * hidden;
  const double expert = (halves + 1) * (double)c->inter * width;
  const double h = c->recompute ? 0 : load->rows * halves * (double)c->inter;
  const double read =
      element * (load->experts * expert + dense + 2 * tokens * hidden + (p->backward ? h : 0));
  return backward ? read + element * tokens * hidden + grad * ((double)c->experts * expert + dense) : read;
}

static moe_status call_forward(void *run) { return run_forward(run); }
static moe_status call_backward(void *run) { return run_backward(run); }

static int bench_layer(struct bench *bench, const char *problem, struct run *run) {
  const struct problem *p = &run->sample->problem;
  struct bench_line line = {.impl = "moeblas", .pass = "fwd"};
  line.peak_mib = (double)(run->workspace_bytes + run->saved_bytes) / (1 << 20);
  moe_status status = bench_time(bench, call_forward, run, &line.time);
  if (status == MOE_OK) status = run_fetch_tensor(run, T_SLOT_ROW);
  if (status == MOE_OK) status = run_fetch_tensor(run, T_COUNTS);
  if (status != MOE_OK) return cli_fail_status("bench", status);
  const struct load load = load_of(run);
  line.flops = layer_flops(p, &load);
  line.bytes = layer_bytes(p, &load, false);
  bench_report(bench, problem, &line);
  if (p->backward) {
    status = bench_time(bench, call_backward, run, &line.time);
    if (status != MOE_OK) return cli_fail_status("bench", status);
    line.pass = "bwd";
    line.flops *= 2;
    line.bytes = layer_bytes(p, &load, true);
    bench_report(bench, problem, &line);
  }
  return bench_ops(bench, problem, run, &load);
}

static int bench_sample(struct bench *bench, const char *text, const struct sample *sample) {
  moe_plan *plan = NULL;
  struct run run;
  const moe_status status = moe_plan_create(&plan, bench->ctx, &sample->problem.config);
  if (status != MOE_OK) return cli_fail_status("bench", status);
  if (!bench->json && !bench->csv) printf("%s\n", text);
  const char *failure = run_open(&run, sample, memory_of(bench->ctx), plan, PLACE_PLAIN, 0);
  const int code =
      failure ? cli_fail("bench", CLI_IO, "%s: %s", text, failure) : bench_layer(bench, text, &run);
  run_close(&run);
  moe_plan_destroy(plan);
  return code;
}

static int take_problem(void *context, const struct problem *problem) {
  struct bench *bench = context;
  struct sample sample;
  char text[PROBLEM_TEXT], error[PROBLEM_ERROR];
  problem_print(problem, text);
  if (problem->tokens == 0) return cli_fail("bench", CLI_USAGE, "%s: t = 0 takes no time", text);
  const int code = sample_make(&sample, problem, error, sizeof error)
                       ? bench_sample(bench, text, &sample)
                       : cli_fail("bench", CLI_IO, "%s", error);
  sample_free(&sample);
  return code;
}

/* ---- the command ----------------------------------------------------------------------------------------------- */

/* The commit of the folder that the tool runs in, so that a line of results can be traced; "unknown" without git. */
static void stamp(struct bench *bench) {
  const time_t now = time(NULL);
  struct tm day;
  strftime(bench->date, sizeof bench->date, "%Y-%m-%d", gmtime_r(&now, &day));
  FILE *git = popen("git rev-parse --short HEAD 2>/dev/null", "r");
  if (git == NULL || fgets(bench->commit, sizeof bench->commit, git) == NULL)
    strcpy(bench->commit, "unknown");
  if (git) pclose(git);
  bench->commit[strcspn(bench->commit, "\n")] = '\0';
}

static void begin(struct bench *bench) {
  const struct ceilings *c = &bench->ceilings;
  stamp(bench);
  if (bench->json) bench->out.stream = stdout;
  json_open(&bench->out, NULL, '{');
  json_text(&bench->out, "date", bench->date);
  json_text(&bench->out, "commit", bench->commit);
  json_real(&bench->out, "ceiling_gflops", c->flops * 1e-9);
  json_text(&bench->out, "ceiling_gflops_by", c->flops_by);
  json_real(&bench->out, "ceiling_gbps", c->bytes * 1e-9);
  json_text(&bench->out, "ceiling_gbps_by", c->bytes_by);
  json_open(&bench->out, "lines", '[');
  if (bench->csv)
    printf("%s%s,%s,ceiling,,%s,,%.6f,,,,,,\n%s,%s,ceiling,,%s,,,%.3f,,,,,\n", csv_header, bench->date,
           bench->commit, c->flops_by, c->flops * 1e-12, bench->date, bench->commit, c->bytes_by,
           c->bytes * 1e-9);
  if (!bench->json && !bench->csv)
    printf("ceilings on %d %s: %.1f GFLOP/s (%s), %.1f GB/s (%s)\n", moe_context_units(bench->ctx),
           moe_context_backend(bench->ctx) == MOE_BACKEND_CPU ? "threads" : "multiprocessors",
           c->flops * 1e-9, c->flops_by, c->bytes * 1e-9, c->bytes_by);
}

static int run_bench(struct bench *bench, char **arguments, int count) {
  const char *failure = bench_ceilings(bench);
  if (failure) return cli_fail("bench", CLI_IO, "the ceilings: %s", failure);
  begin(bench);
  const int code = problem_list("bench", arguments, count, take_problem, bench);
  json_close(&bench->out, ']');
  json_close(&bench->out, '}');
  return cli_finish("bench", code == CLI_GO_ON ? CLI_OK : code);
}

int cmd_bench(int argc, char **argv) {
  struct bench bench = {.backend_name = "auto", .repeat = 20, .seconds = 2};
  const struct option options[] = {
      {"--backend", "NAME", "auto, cpu or cuda", OPTION_TEXT, &bench.backend_name, 0, 0},
      {"--threads", "N", "of the CPU, which it implies; 0: all. With --backend cuda: the device",
       OPTION_INTEGER, &bench.threads, 0, 4096},
      {"--repeat", "N", "timed calls at most (20)", OPTION_INTEGER, &bench.repeat, LEAST_REPEATS,
       MOST_REPEATS},
      {"--seconds", "S", "end after S seconds and 3 calls (2)", OPTION_REAL, &bench.seconds, 0, 3600},
      {"--csv", NULL, "comma-separated values", OPTION_FLAG, &bench.csv, 0, 0},
      {"--json", NULL, "one JSON document on stdout", OPTION_FLAG, &bench.json, 0, 0},
  };
  const struct command command = {
      "bench",           PROBLEM_ARGUMENTS, "Times problems against the limits of the machine.",
      problem_list_help, options,           sizeof options / sizeof *options};
  int count;
  int code = cli_parse(&command, argc, argv, &count);
  if (code != CLI_GO_ON) return code;
  if (bench.csv && bench.json) return cli_fail("bench", CLI_USAGE, "--csv and --json exclude each other");
  if (count == 0)
    return cli_fail("bench", CLI_USAGE, "wants a problem or @FILE; moeblas bench --help explains them");
  code = cli_context("bench", bench.backend_name, bench.threads, &bench.ctx);
  if (code != CLI_GO_ON) return code;
  moe_status status = moe_timer_create(bench.ctx, &bench.from);
  if (status == MOE_OK) status = moe_timer_create(bench.ctx, &bench.to);
  code = status == MOE_OK ? run_bench(&bench, argv + 1, count) : cli_fail_status("bench", status);
  moe_timer_destroy(bench.from);
  moe_timer_destroy(bench.to);
  moe_context_destroy(bench.ctx);
  return code;
}
