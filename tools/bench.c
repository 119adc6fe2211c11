/* SPDX-License-Identifier: Apache-2.0
 *
 * moeblas bench: times the whole layer, and each op alone, on problems, and sets the times against two floors: operations
 * over the rate of a large dense product, bytes that must move over the rate of a large copy, both measured in the same
 * run. Medians with the spread between the quartiles; random data; nothing is allocated or copied to or from a device while
 * the clock runs, which is the back end's own. */
#include "bench.h"

#include <inttypes.h>
#include <stdlib.h>
#include <time.h>

#include "commands.h"
#include "problem_list.h"

/* ---- timing ---------------------------------------------------------------------------------------------------- */

enum {
  MOST_REPEATS = 1000,
  LEAST_REPEATS = 3,
  MOST_TIMED = 2,
  FLUSH_BYTES = 1 << 28 /* several times the cache of any device */
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

/* On a device the flush makes the caches cold, and keeps it busy until the first launch of the call has come. */
static moe_status time_once(const struct bench *bench, const struct timed *timed, double *us,
                            double *host_us) {
  moe_status status = bench->apart ? moe_zero(bench->ctx, &bench->flush, timed->stream) : MOE_OK;
  if (status == MOE_OK) status = moe_timer_record(bench->from, timed->stream);
  const double start = now_us();
  if (status == MOE_OK) status = timed->call(timed->context);
  *host_us = now_us() - start;
  if (status == MOE_OK) status = moe_timer_record(bench->to, timed->stream);
  return status == MOE_OK ? moe_timer_elapsed_us(bench->from, bench->to, us) : status;
}

/* Sorts. */
static double median(double *values, int count) {
  qsort(values, (size_t)count, sizeof *values, compare_doubles);
  return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

static struct timing timing_of(double *times, double *hosts, int count) {
  const double middle = median(times, count), quartiles = times[(3 * count) / 4] - times[count / 4];
  return (struct timing){middle, 100 * quartiles / middle, median(hosts, count)};
}

moe_status bench_time_turns(const struct bench *bench, const struct timed *timed, int count) {
  double times[MOST_TIMED][MOST_REPEATS], hosts[MOST_TIMED][MOST_REPEATS];
  moe_status status = MOE_OK;
  for (int i = 0; status == MOE_OK && i < count; i++) {
    status = timed[i].call(timed[i].context);
    if (status == MOE_OK) status = moe_synchronize(bench->ctx, timed[i].stream);
  }
  const double start = now_us();
  int round = 0;
  for (; status == MOE_OK && round < (int)bench->repeat; round++) {
    if (round >= LEAST_REPEATS && now_us() - start > count * bench->seconds * 1e6) break;
    for (int i = 0; status == MOE_OK && i < count; i++)
      status = time_once(bench, &timed[i], &times[i][round], &hosts[i][round]);
  }
  for (int i = 0; status == MOE_OK && i < count; i++) *timed[i].timing = timing_of(times[i], hosts[i], round);
  return status;
}

moe_status bench_time(const struct bench *bench, bench_call call, void *context, struct timing *timing) {
  return bench_time_turns(bench, &(struct timed){call, context, NULL, timing}, 1);
}

/* ---- one problem ----------------------------------------------------------------------------------------------- */

static int bench_run(struct bench *bench, const char *text, struct sample *sample, struct run *run) {
  struct load load;
  if (bench->sweep) return bench_sweep(bench, sample, run);
  if (!bench->json && !bench->csv) printf("%s\n", text);
  const int code = bench_layer(bench, text, run, &load);
  return code == CLI_GO_ON ? bench_ops(bench, text, run, &load) : code;
}

static int bench_sample(struct bench *bench, const char *text, struct sample *sample) {
  moe_plan *plan = NULL;
  struct run run;
  const moe_status status = moe_plan_create(&plan, bench->ctx, &sample->problem.config);
  if (status != MOE_OK) return cli_fail_status("bench", status);
  const char *failure = run_open(&run, sample, memory_of(bench->ctx), plan, PLACE_PLAIN, 0);
  run.bare = true; /* as a step of training calls it */
  const int code =
      failure ? cli_fail("bench", CLI_IO, "%s: %s", text, failure) : bench_run(bench, text, sample, &run);
  run_close(&run);
  moe_plan_destroy(plan);
  return code;
}

static int take_problem(void *context, const struct problem *problem) {
  struct bench *bench = context;
  struct problem largest = *problem;
  struct sample sample;
  char text[PROBLEM_TEXT], error[PROBLEM_ERROR];
  if (bench->sweep) largest.tokens = bench->sweep_to;
  bench_problem(&largest, text);
  if (largest.tokens == 0) return cli_fail("bench", CLI_USAGE, "%s: t = 0 takes no time", text);
  const int code = sample_make_repeating(&sample, &largest, error, sizeof error)
                       ? bench_sample(bench, text, &sample)
                       : cli_fail("bench", CLI_IO, "%s", error);
  sample_free(&sample);
  return code;
}

/* ---- the command ----------------------------------------------------------------------------------------------- */

static int run_problems(struct bench *bench, char **arguments, int count) {
  struct ceilings after;
  const char *failure = bench_ceilings(bench, &bench->ceilings);
  if (failure) return cli_fail("bench", CLI_IO, "the ceilings: %s", failure);
  bench_begin(bench);
  int code = problem_list("bench", arguments, count, take_problem, bench);
  if (code == CLI_GO_ON) {
    failure = bench_ceilings(bench, &after);
    code = failure ? cli_fail("bench", CLI_IO, "the ceilings: %s", failure) : CLI_GO_ON;
  }
  bench_end(bench, code == CLI_GO_ON ? &after : NULL);
  if (code == CLI_GO_ON) code = bench->cliffs ? CLI_FAILED : CLI_OK;
  return cli_finish("bench", code);
}

/* What a device needs beside the context. Scratch of the flush is none: it only writes. */
static moe_status open_device(struct bench *bench) {
  moe_status status = moe_timer_create(bench->ctx, &bench->from);
  if (status == MOE_OK) status = moe_timer_create(bench->ctx, &bench->to);
  if (status == MOE_OK) status = moe_stream_create(bench->ctx, &bench->side);
  bench->apart = memory_of(bench->ctx).apart;
  bench->flush = (moe_zero_args){.size = sizeof bench->flush, .bytes = bench->apart ? FLUSH_BYTES : 0};
  if (status == MOE_OK) status = moe_memory_alloc(bench->ctx, bench->flush.bytes, &bench->flush.data);
  return status;
}

static int run_bench(struct bench *bench, char **arguments, int count) {
  int code = bench_targets_read(bench);
  if (code == CLI_GO_ON) code = cli_context("bench", bench->backend_name, bench->threads, &bench->ctx);
  if (code == CLI_GO_ON) {
    const moe_status status = open_device(bench);
    code = status == MOE_OK ? run_problems(bench, arguments, count) : cli_fail_status("bench", status);
  }
  moe_timer_destroy(bench->from);
  moe_timer_destroy(bench->to);
  if (bench->ctx) moe_stream_destroy(bench->ctx, bench->side);
  if (bench->ctx) moe_memory_free(bench->ctx, bench->flush.data);
  moe_context_destroy(bench->ctx);
  free(bench->targets);
  return code;
}

/* "t=1..65536" */
static bool read_sweep(struct bench *bench) {
  int length = 0;
  if (bench->sweep == NULL) return true;
  const int found =
      sscanf(bench->sweep, "t=%" SCNd64 "..%" SCNd64 "%n", &bench->sweep_from, &bench->sweep_to, &length);
  return found == 2 && bench->sweep[length] == '\0' && bench->sweep_from >= 1 &&
         bench->sweep_from < bench->sweep_to && bench->sweep_to <= (int64_t)1 << 24;
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
      {"--unfused", NULL, "each product also without what is fused into it", OPTION_FLAG, &bench.unfused, 0,
       0},
      {"--sweep", "t=A..B", "the layer alone, at A to B tokens; fails where more tokens take less time",
       OPTION_TEXT, &bench.sweep, 0, 0},
      {"--targets", "FILE", "CSV of what peers measured: prints where we lose first", OPTION_TEXT,
       &bench.targets_path, 0, 0},
      {"--csv", NULL, "comma-separated values", OPTION_FLAG, &bench.csv, 0, 0},
      {"--json", NULL, "one JSON document on stdout", OPTION_FLAG, &bench.json, 0, 0},
  };
  const struct command command = {
      "bench",           PROBLEM_ARGUMENTS, "Times problems against the limits of the machine.",
      problem_list_help, options,           sizeof options / sizeof *options};
  int count;
  const int code = cli_parse(&command, argc, argv, &count);
  if (code != CLI_GO_ON) return code;
  if (bench.csv && bench.json) return cli_fail("bench", CLI_USAGE, "--csv and --json exclude each other");
  if (count == 0)
    return cli_fail("bench", CLI_USAGE, "wants a problem or @FILE; moeblas bench --help explains them");
  if (!read_sweep(&bench))
    return cli_fail("bench", CLI_USAGE, "--sweep '%s': wants t=A..B with 1 <= A < B <= 2^24", bench.sweep);
  return run_bench(&bench, argv + 1, count);
}
