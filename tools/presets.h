/* SPDX-License-Identifier: Apache-2.0
 *
 * The layers of published models, from data/presets.csv: one line a model, one column a field of a problem string. */
#pragma once

#include "problem.h"

/* Called for each line in turn. */
typedef void (*preset_visit)(void *context, const char *name, const struct problem *problem,
                             const char *notes);

/* Reads the whole file: $MOEBLAS_PRESETS, else share/moeblas/presets.csv of the installation, else data/presets.csv beside
 * the build folder of the executable. False with a sentence naming file, line and column if it is missing or malformed. */
bool presets_walk(preset_visit visit, void *context, char *error, size_t bytes);
/* The problem of preset `name`, with the default tokens and dtype. */
bool presets_find(const char *name, struct problem *problem, char *error, size_t bytes);
