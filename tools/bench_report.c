/* SPDX-License-Identifier: Apache-2.0
 *
 * The lines of `moeblas bench`: for people, as CSV, or as one JSON document. A line whose thing could not be timed says
 * why, in its place. What is said to people beside CSV and JSON goes to stderr. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench.h"

static const char csv_header[] =
    "date,commit,problem,pass,impl,time_us,tflops,gbps,pct_of_floor,launches,peak_mib,spread_pct,note\n";

void bench_problem(const struct problem *problem, char *text) {
  struct problem plain = *problem;
  plain.backward = problem->accumulate; /* which wants it */
  problem_print(&plain, text);
}

/* ---- rates ----------------------------------------------------------------------------------------------------- */

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

/* ---- one line -------------------------------------------------------------------------------------------------- */

static void report_json(struct bench *bench, const char *problem, const struct bench_line *line,
                        const struct rates *r, const struct target *target) {
  struct json *out = &bench->out;
  json_open(out, NULL, '{');
  json_text(out, "problem", problem);
  json_text(out, "pass", line->pass);
  json_text(out, "impl", line->impl);
  json_text(out, "refused", line->refused);
  if (!line->refused) {
    json_real(out, "time_us", line->time.median_us);
    json_real(out, "spread_pct", line->time.spread_pct);
    json_real(out, "tflops", r->tflops);
    json_real(out, "gbps", r->gbps);
    json_text(out, "floor", r->compute_bound ? "compute" : "memory");
    json_real(out, "pct_of_floor", r->pct_of_floor);
    json_real(out, "pct_of_dense", r->pct_of_dense);
    json_real(out, "peak_mib", line->peak_mib);
    if (line->launches) json_integer(out, "launches", line->launches);
    if (bench->apart) json_real(out, "host_us", line->time.host_us);
  }
  if (target) json_real(out, "best_peer_tflops", target->best_peer_tflops);
  if (target) json_real(out, "reach_tflops", target->reach_tflops);
  json_close(out, '}');
}

static void report_csv(const struct bench *bench, const char *problem, const struct bench_line *line,
                       const struct rates *r, const struct target *target) {
  printf("%s,%s,%s,%s,%s,", bench->date, bench->commit, problem, line->pass, line->impl);
  if (line->refused) {
    char note[PROBLEM_ERROR];
    snprintf(note, sizeof note, "%s", line->refused);
    for (char *c = note; (c = strchr(c, ',')) != NULL;) *c = ';';
    printf(",,,,,,,not run: %s\n", note);
    return;
  }
  printf("%.1f,%.6f,%.3f,%.1f,", line->time.median_us, r->tflops, r->gbps, r->pct_of_floor);
  if (line->launches) printf("%lld", (long long)line->launches);
  printf(",%.1f,%.1f,%s floor; pct_of_dense %.1f", line->peak_mib, line->time.spread_pct,
         r->compute_bound ? "compute" : "memory", r->pct_of_dense);
  if (bench->apart) printf("; host_us %.1f", line->time.host_us);
  if (target) printf("; best_peer %.0f; reach %.0f", target->best_peer_tflops, target->reach_tflops);
  printf("\n");
}

static void report_text(const struct bench *bench, const struct bench_line *line, const struct rates *r,
                        const struct target *target) {
  printf("  %-3s %-14s ", line->pass, line->impl);
  if (line->refused) {
    printf("not run: %s\n", line->refused);
    return;
  }
  printf("%12.1f us +-%4.1f%%  %9.2f %s  %7.2f GB/s  %5.1f%% of the %s floor  %5.1f%% of dense",
         line->time.median_us, line->time.spread_pct / 2, r->tflops >= 1 ? r->tflops : 1000 * r->tflops,
         r->tflops >= 1 ? "TFLOP/s" : "GFLOP/s", r->gbps, r->pct_of_floor,
         r->compute_bound ? "compute" : "memory ", r->pct_of_dense);
  if (line->launches) printf("  %lld launches", (long long)line->launches);
  if (bench->apart) printf("  host %.1f us", line->time.host_us);
  if (target) printf("  best peer %.0f, reach %.0f", target->best_peer_tflops, target->reach_tflops);
  printf("\n");
}

void bench_report(struct bench *bench, const char *problem, const struct bench_line *line) {
  const struct rates r = rates_of(bench, line);
  struct target *target = bench_target(bench, problem, line->pass);
  const bool layer = strncmp(line->impl, "moeblas", strlen("moeblas")) == 0;
  if (!layer) target = NULL;
  if (target && strcmp(line->impl, "moeblas") == 0) target->tflops = r.tflops;
  if (bench->json)
    report_json(bench, problem, line, &r, target);
  else if (bench->csv)
    report_csv(bench, problem, line, &r, target);
  else
    report_text(bench, line, &r, target);
  fflush(stdout);
}

/* ---- begin and end --------------------------------------------------------------------------------------------- */

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

static void report_ceilings(const struct bench *bench, const struct ceilings *c, const char *when) {
  if (bench->csv)
    printf("%s,%s,ceiling,,%s,,%.6f,,,,,,%s\n%s,%s,ceiling,,%s,,,%.3f,,,,,%s\n", bench->date, bench->commit,
           c->flops_by, c->flops * 1e-12, when, bench->date, bench->commit, c->bytes_by, c->bytes * 1e-9,
           when);
  else if (!bench->json)
    printf("ceilings %s on %d %s: %.1f GFLOP/s (%s), %.1f GB/s (%s)\n", when, moe_context_units(bench->ctx),
           bench->apart ? "multiprocessors" : "threads", c->flops * 1e-9, c->flops_by, c->bytes * 1e-9,
           c->bytes_by);
}

void bench_begin(struct bench *bench) {
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
  if (bench->csv) printf("%s", csv_header);
  report_ceilings(bench, c, "before");
}

void bench_end(struct bench *bench, const struct ceilings *after) {
  json_close(&bench->out, ']');
  if (after) json_real(&bench->out, "ceiling_gflops_after", after->flops * 1e-9);
  if (after) json_real(&bench->out, "ceiling_gbps_after", after->bytes * 1e-9);
  json_close(&bench->out, '}');
  if (after == NULL) return;
  report_ceilings(bench, after, "after");
  bench_targets_report(bench, bench->csv || bench->json ? stderr : stdout);
}
