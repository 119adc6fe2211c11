/* SPDX-License-Identifier: Apache-2.0
 *
 * safetensors files of fp32 tensors: a 64-bit little-endian header length, a JSON header, the data.
 * A file is taken to be hostile: the header is checked completely before anything is believed, and the data is read by
 * pread (a file that shrinks under a mapping would be a fatal signal). Invariant after opening: the tensors have
 * distinct names and tile the data exactly, from its first byte to the last of the file. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum {
  SAFETENSORS_MAX_RANK = 4
};

struct tensor {
  const char *name;
  float *data;
  int64_t shape[SAFETENSORS_MAX_RANK];
  int rank;
};
struct checkpoint_meta {
  char key[32];
  char value[128];
};

struct safetensors_entry {
  const char *name;
  int64_t shape[SAFETENSORS_MAX_RANK];
  int rank;
  uint64_t begin, end; /* bytes from the start of the data */
};
struct safetensors {
  int fd;
  uint64_t data_start;
  struct cJSON *json;                /* owns every string */
  const struct cJSON *metadata;      /* NULL: none */
  struct safetensors_entry *entries; /* in the order of the data */
  int count;
};

/* All return 0, 2 (not a file this reader takes) or 3 (input/output, memory) with one sentence in error. */
int safetensors_open(struct safetensors *s, const char *path, char *error, size_t error_bytes);
void safetensors_close(struct safetensors *s);
const char *safetensors_metadata(const struct safetensors *s, const char *key); /* NULL: none */
const struct safetensors_entry *safetensors_find(const struct safetensors *s,
                                                 const char *name); /* NULL: none */
int safetensors_read(const struct safetensors *s, const struct safetensors_entry *e, float *into, char *error,
                     size_t error_bytes);

/* Writes the tensors in the order given. The bytes depend on the arguments alone: no clock, no path. Refuses what
 * safetensors_open would refuse. Write errors are left in the stream for the caller to find with ferror. */
int safetensors_write(FILE *file, const struct tensor *tensors, int count, const struct checkpoint_meta *meta,
                      int meta_count, char *error, size_t error_bytes);
