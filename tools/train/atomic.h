/* SPDX-License-Identifier: Apache-2.0
 *
 * A file that appears complete or not at all: written under a temporary name in the same folder, synced, renamed.
 * Invariant: after a failure, whatever the file held before is still there, and the temporary name is gone. */
#pragma once

#include <stddef.h>
#include <stdio.h>

struct atomic_file {
  FILE *file;
  char path[4096], temporary[4096];
  char dir[4096];
};

/* All return 0 or 3 with one sentence in error; after a failure nothing is left to close. */
int atomic_open(struct atomic_file *a, const char *dir, const char *name, char *error, size_t error_bytes);
int atomic_commit(struct atomic_file *a, char *error, size_t error_bytes);
void atomic_cancel(struct atomic_file *a);
