/* SPDX-License-Identifier: Apache-2.0
 *
 * A training run: what it holds, what it saves, one step of it. */
#pragma once

#include "batch.h"
#include "checkpoint.h"
#include "model.h"
#include "report.h"
#include "settings.h"

enum trainer_time { /* where the time of the steps goes: the model's places, then one more */
  TRAINER_TIME_OPTIMIZER = TIME_COUNT,
  TRAINER_TIME_COUNT
};

struct trainer {
  struct settings settings;
  struct corpus corpus;
  moe_context *ctx;    /* of the CPU */
  moe_context *device; /* of CUDA; NULL: the MoE layers run on the CPU, too */
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

/* Contexts and model for settings.model; with `training` also moments and batches. */
int trainer_open(struct trainer *r, int training, char *error, size_t error_bytes);
void trainer_close(struct trainer *r);

/* "cpu" or "cuda": where the MoE layers run; and what they compute in. */
const char *trainer_backend(const struct trainer *r);
const char *trainer_dtype(const struct trainer *r);

/* One step of training. A loss that is not finite is refused before it reaches the parameters. */
int trainer_step(struct trainer *r, char *error, size_t error_bytes);
/* Mean bits per byte over `windows` >= 1 held-out windows, evenly spread. Its time is not counted as the model's. */
int trainer_validate(struct trainer *r, int64_t windows, double *bits, char *error, size_t error_bytes);
/* As sample_text, its time not counted. */
int trainer_sample(struct trainer *r, uint8_t *text, int64_t have, int64_t more, char *error,
                   size_t error_bytes);

int trainer_save(const struct trainer *r, char *error, size_t error_bytes);
/* Takes preset, balance, seed and steps from the checkpoint in settings.out where they were not given, and refuses those
 * that contradict it. */
int trainer_adopt(struct trainer *r, struct checkpoint *c, char *error, size_t error_bytes);
/* Parameters, and with `training` the rest of the state, from a checkpoint of the same settings. */
int trainer_load(struct trainer *r, const struct checkpoint *c, int training, char *error,
                 size_t error_bytes);
