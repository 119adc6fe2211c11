/* SPDX-License-Identifier: Apache-2.0
 *
 * A checkpoint: DIR/checkpoint.safetensors, replaced as a whole or not at all.
 * All functions return 0, 2 (bad input) or 3 (input/output, memory) with one sentence in error. */
#pragma once

#include "safetensors.h"

struct checkpoint {
  struct safetensors file;
  char path[4096];
};

/* On any failure the checkpoint that was there stays, and nothing else is left behind. DIR must exist. */
int checkpoint_save(const char *dir, const struct tensor *tensors, int count,
                    const struct checkpoint_meta *meta, int meta_count, char *error, size_t error_bytes);

int checkpoint_open(struct checkpoint *c, const char *dir, char *error, size_t error_bytes);
const char *checkpoint_meta(const struct checkpoint *c, const char *key); /* NULL: none */
/* Fills into->data; the file must hold a tensor of exactly this name and shape. */
int checkpoint_read(const struct checkpoint *c, const struct tensor *into, char *error, size_t error_bytes);
int checkpoint_count(const struct checkpoint *c);
void checkpoint_close(struct checkpoint *c);
