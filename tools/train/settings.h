/* SPDX-License-Identifier: Apache-2.0
 *
 * What the user asked for: presets and the command line. */
#pragma once

#include <stdbool.h>

#include "model.h"

struct settings {
  /* as given; -1 or NULL where not given */
  const char *preset;
  const char *balance;
  const char *backend;
  const char *dtype;
  const char *out;
  const char *sample;
  int64_t steps;
  int64_t stop;
  int64_t seed;
  int64_t threads;
  int64_t sample_bytes;
  double minutes;
  bool resume;
  bool json;
  char **files; /* NULL: the default text */
  int file_count;
  /* what follows */
  struct model_config model;
  int64_t sequences; /* a step */
  double rate;       /* peak */
};

/* Reads the command line; CLI_GO_ON (cli.h) or the code to exit with. */
int settings_parse(struct settings *s, int argc, char **argv);

/* Looks the preset up (NULL: the default) and fills model, rate, sequences, and steps if not given.
 * False with a sentence for a name that is none. */
bool settings_resolve(struct settings *s, char *error, size_t error_bytes);

/* "layers=4 dim=128 ...": everything about the model and the batch that a checkpoint must agree on. Not the
 * back end and its dtype: parameters and moments are fp32 wherever the layers run. */
void settings_describe(const struct settings *s, char *text, size_t bytes);
