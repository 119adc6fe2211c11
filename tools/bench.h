/* SPDX-License-Identifier: Apache-2.0
 * What the files of `moeblas bench` share: timing, the ceilings of the machine, targets, and the lines of the report. */
#pragma once

#include "case.h"
#include "cli.h"

struct timing {
  double median_us;
  double spread_pct; /* between the quartiles, of the median */
  double host_us;    /* median of the time until the call returned, its work still going on */
};

/* What the machine can do, measured in the same run. */
struct ceilings {
  double flops; /* per second, of a large dense product */
  const char *flops_by;
  double bytes; /* per second, read and written, of a large copy */
  const char *bytes_by;
};

/* A row of --targets, and what this run reached. */
struct target {
  char problem[PROBLEM_TEXT]; /* canonical, without bwd */
  char name[64];
  char pass[8];
  double best_peer_tflops;
  double reach_tflops;
  double tflops; /* of impl moeblas; 0 until it was timed */
};

struct bench {
  const char *backend_name, *targets_path, *sweep;
  int64_t threads, repeat;
  int64_t sweep_from, sweep_to; /* 0: each problem has its own tokens */
  double seconds;
  bool csv, json, unfused;
  bool apart; /* a device: calls return before their work is done, caches are swept */
  moe_context *ctx;
  moe_stream side; /* for graphs; NULL on the CPU */
  moe_timer *from, *to;
  moe_zero_args flush; /* runs before each timed call where `apart` */
  struct ceilings ceilings;
  struct target *targets;
  int target_count;
  int cliffs; /* a larger batch that took less time, in a sweep */
  struct json out;
  char date[16];
  char commit[48];
};

/* One thing that was timed. */
struct bench_line {
  const char *pass; /* "fwd" or "bwd" */
  const char *impl; /* "moeblas" or "moeblas-graph", the whole layer, or the op */
  double flops;
  double bytes; /* that must move: inputs and weights once, results once */
  struct timing time;
  int64_t launches;    /* of one call; 0: not counted */
  double peak_mib;     /* layer: saved, workspace and results; op: scratch */
  const char *refused; /* why there is no time, or NULL */
};

typedef moe_status (*bench_call)(void *context);
struct timed {
  bench_call call;
  void *context;
  moe_stream stream; /* that the call goes to */
  struct timing *timing;
};
/* Median of up to `repeat` calls within `seconds`, at least 3, after one that is not counted, by the clock of the back
 * end. */
moe_status bench_time(const struct bench *bench, bench_call call, void *context, struct timing *timing);
/* The same of one or two, in turns: what a device was doing before decides how fast it is. */
moe_status bench_time_turns(const struct bench *bench, const struct timed *timed, int count);

/* The report (bench_report.c). */
void bench_begin(struct bench *bench);
void bench_report(struct bench *bench, const char *problem, const struct bench_line *line);
/* The ceilings once more and where we lose first, unless the run broke off (NULL); the end of the document. */
void bench_end(struct bench *bench, const struct ceilings *after);
/* The text of a problem in every report: the pass has a column of its own. */
void bench_problem(const struct problem *problem, char *text);

/* NULL, or why they could not be measured. */
const char *bench_ceilings(const struct bench *bench, struct ceilings *ceilings);

/* Reads --targets; CLI_GO_ON or the code to end with (bench_targets.c). */
int bench_targets_read(struct bench *bench);
struct target *bench_target(const struct bench *bench, const char *problem, const char *pass);
/* Rows that were timed, the farthest behind the best peer first. */
void bench_targets_report(const struct bench *bench, FILE *out);

/* Rows that have an expert, and experts that have rows, after a forward call. */
struct load {
  double rows;
  double experts;
};
/* The whole layer, eager, and recorded and replayed (bench_layer.c). These return CLI_GO_ON or the code
 * to end with. */
int bench_layer(struct bench *bench, const char *problem, struct run *run, struct load *load);
/* Every op of the layer alone, on the data of `run` (bench_ops.c). */
int bench_ops(struct bench *bench, const char *problem, const struct run *run, const struct load *load);
/* The layer at sweep_from .. sweep_to tokens, on the first tokens of the sample, which is that of `run`. */
int bench_sweep(struct bench *bench, struct sample *sample, struct run *run);
