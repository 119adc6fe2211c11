/* SPDX-License-Identifier: Apache-2.0
 *
 * A training run: what it holds, what it saves, one step of it. */
#pragma once

#include "batch.h"
#include "checkpoint.h"
#include "model.h"
#include "report.h"
#include "settings.h"

enum run_time { /* where the time of the steps goes: the model's places, then one more */
  RUN_TIME_OPTIMIZER = TIME_COUNT,
  RUN_TIME_COUNT
};

struct run {
  struct settings settings;
  struct corpus corpus;
  moe_context *ctx;
  struct model *model;
  float *first; /* moments of AdamW, [model->count] each */
  float *second;
  float *load; /* [layers, experts] slots since the last report */
  uint8_t *input;
  uint8_t *target;
  int64_t step; /* done so far */
  double optimizer_seconds;
  /* of the last step */
  double loss;
  double grad_norm;
  double rate;
};

/* All return 0, 2 (bad input) or 3 (input/output, memory) with one sentence in error. */

/* Context and model for settings.model; with `training` also moments and batches. */
int run_open(struct run *r, int training, char *error, size_t error_bytes);
void run_close(struct run *r);

/* One step of training. A loss that is not finite is refused before it reaches the parameters. */
int run_step(struct run *r, char *error, size_t error_bytes);
/* Mean bits per byte over the first `windows` held-out windows. Its time is not counted as the model's. */
int run_validate(struct run *r, int64_t windows, double *bits, char *error, size_t error_bytes);
/* As sample_text, its time not counted. */
int run_sample(struct run *r, uint8_t *text, int64_t have, int64_t more, char *error, size_t error_bytes);

int run_save(const struct run *r, char *error, size_t error_bytes);
/* Takes preset, balance, seed and steps from the checkpoint in settings.out where they were not given, and refuses those
 * that contradict it. */
int run_adopt(struct run *r, struct checkpoint *c, char *error, size_t error_bytes);
/* Parameters, and with `training` the rest of the state, from a checkpoint of the same settings. */
int run_load(struct run *r, const struct checkpoint *c, int training, char *error, size_t error_bytes);
