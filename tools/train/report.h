/* SPDX-License-Identifier: Apache-2.0
 *
 * What a training run leaves to look at: DIR/log.csv, a row at each report, and DIR/report.html, one self-contained page.
 * All functions return 0, 2 (bad input) or 3 (input/output, memory) with one sentence in error. */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct report;

struct report_row {
  int64_t step;
  double loss, train_bpb, val_bpb /* NAN: not measured */, tokens_per_s, grad_norm, learning_rate,
      balance_loss;
  float *load; /* [layers,experts] share of the slots, adds to 1 in each layer; copied */
};

struct report_summary {
  double ngram2_bpb, ngram4_bpb, train_bpb, val_bpb, tokens_per_s, seconds;
  int64_t steps, params, active_params;
  const char *sample; /* any bytes up to a NUL; NULL: none */
  const char *const *op_name;
  const double *op_seconds;
  int ops;
  const char *title;
};

/* Creates DIR and its parents, refuses it while another run writes there, and starts log.csv. resume: the step that training goes on from, of which and before
 * which the rows already in log.csv are kept (a log that is not there has none); 0: a fresh log. */
struct report *report_open(const char *dir, int layers, int experts, int resume, char *error,
                           size_t error_bytes);
/* The row is in the file when this returns. */
int report_add(struct report *r, const struct report_row *row, char *error, size_t error_bytes);
/* Writes report.html from all rows; may be called at any time, any number of times. */
int report_finish(struct report *r, const struct report_summary *s, char *error, size_t error_bytes);
void report_close(struct report *r);
