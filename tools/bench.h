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
  double flops; /* per second, of a large dense product */
  const char *flops_by;
  double bytes; /* per second, read and written, of a large copy */
  const char *bytes_by;
};

struct bench {
  const char *backend_name;
  int64_t threads, repeat;
  double seconds;
  bool csv, json;
  moe_context *ctx;
  moe_timer *from, *to;
  struct ceilings ceilings;
  struct json out;
  char date[16];
  char commit[48];
};

/* One thing that was timed. */
struct bench_line {
  const char *pass; /* "fwd" or "bwd" */
  const char *impl; /* "moeblas", the whole layer, or the op */
  double flops;
  double bytes; /* that must move: inputs and weights once, results once */
  struct timing time;
  double peak_mib; /* memory beyond inputs and results */
};

typedef moe_status (*bench_call)(void *context);
/* Median of up to `repeat` calls within `seconds`, at least 3, after one that is not counted, by the clock of the back
 * end. */
moe_status bench_time(const struct bench *bench, bench_call call, void *context, struct timing *timing);
void bench_report(struct bench *bench, const char *problem, const struct bench_line *line);

/* NULL, or why they could not be measured. */
const char *bench_ceilings(struct bench *bench);

/* Rows that have an expert, and experts that have rows, after a forward call. */
struct load {
  double rows;
  double experts;
};
/* Every op of the layer alone, on the data of `run` (bench_ops.c). Returns CLI_GO_ON or the code to end with. */
int bench_ops(struct bench *bench, const char *problem, const struct run *run, const struct load *load);
