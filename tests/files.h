/* SPDX-License-Identifier: Apache-2.0
 *
 * Folders and files for the tests that need real ones: made under TMPDIR, removed by the test that made them. */
#pragma once

#include <dirent.h>
#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include "test.h"

struct bytes { /* of a file, with a NUL after the last */
  char *data;
  size_t count;
};

static inline int files_remove_entry(const char *path, const struct stat *status, int kind, struct FTW *at) {
  (void)status, (void)kind, (void)at;
  return remove(path);
}
static inline void files_remove(const char *dir) { nftw(dir, files_remove_entry, 8, FTW_DEPTH | FTW_PHYS); }

/* Writes the name of a new, empty folder. */
static inline void files_make(char dir[128]) {
  const char *base = getenv("TMPDIR");
  snprintf(dir, 128, "%.100s/moeblas-XXXXXX", base ? base : "/tmp");
  if (mkdtemp(dir) == NULL) {
    perror(dir);
    exit(1);
  }
}

static inline const char *files_path(char path[256], const char *dir, const char *name) {
  snprintf(path, 256, "%s/%s", dir, name);
  return path;
}

static inline void files_write(const char *path, const void *data, size_t count) {
  FILE *f = fopen(path, "wb");
  if (f == NULL || fwrite(data, 1, count, f) != count || fclose(f) != 0) {
    perror(path);
    exit(1);
  }
}

/* data is NULL when there is no such file. */
static inline struct bytes files_read(const char *path) {
  struct bytes b = {0};
  FILE *f = fopen(path, "rb");
  if (f == NULL) return b;
  fseek(f, 0, SEEK_END);
  b.count = (size_t)ftell(f);
  rewind(f);
  b.data = calloc(1, b.count + 1);
  b.count = fread(b.data, 1, b.count, f);
  fclose(f);
  return b;
}

/* Entries of a folder, without . and .. */
static inline int files_count(const char *dir) {
  DIR *open = opendir(dir);
  int count = -2;
  while (open && readdir(open)) count++;
  if (open) closedir(open);
  return count;
}
