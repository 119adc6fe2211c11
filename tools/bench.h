/* SPDX-License-Identifier: Apache-2.0
 * What the files of `moeblas bench` share: timing, the ceilings of the machine, and the lines of the report. */
#pragma once

#include "case.h"
#include "cli.h"

struct timing {
  double median_us;
  double spread_pct; /* between the quartiles, of the median */
};

/* What the machine can do, measured in the same run. */
struct ceilings {
  double flops; /* per second, of a large dense fp32 product */
  const char *flops_by;
  double bytes; /* per second, read and written, of a large copy on all threads */
};

struct bench {
  const char *backend_name;
  int64_t threads, repeat;
  double seconds;
  bool csv, json;
  moe_context *ctx;
  struct ceilings ceilings;
  struct json out;
  char date[16];
  char commit[48];
};

/* One thing that was timed. */
struct bench_line {
  const char *pass; /* "fwd" or "bwd" */
  const char *impl; /* "layer", or the op */
  double flops;
  double bytes; /* that must move: inputs and weights once, results once */
  struct timing time;
  double peak_mib; /* memory beyond inputs and results */
};

typedef moe_status (*bench_call)(void *context);
/* Median of up to `repeat` calls within `seconds`, at least 3, after one that is not counted. */
moe_status bench_time(const struct bench *bench, bench_call call, void *context, struct timing *timing);
void bench_report(struct bench *bench, const char *problem, const struct bench_line *line);

/* False: memory was short, or the library failed. */
bool bench_ceilings(struct bench *bench);

/* Rows that have an expert, and experts that have rows, after a forward call. */
struct load {
  double rows;
  double experts;
};
/* Every op of the layer alone, on the data of `run` (bench_ops.c). Returns CLI_GO_ON or the code to end with. */
int bench_ops(struct bench *bench, const char *problem, const struct run *run, const struct load *load);
