/* SPDX-License-Identifier: Apache-2.0
 *
 * A corpus as a test: REPLAY(problem) feeds every file of corpus/problem to its target. A broken promise stops the program
 * after the sentence; the path printed last is the input's. */
#pragma once

#include <signal.h>

#include "../files.h"
#include "fuzz.h"

/* Calls `visit` on every file of a folder whose name ends so, in the order of names; how many there were. */
static inline int each_file(const char *dir, const char *ending,
                            void (*visit)(const char *path, struct bytes content)) {
  struct dirent **entries;
  char path[512];
  int visited = 0;
  const int count = scandir(dir, &entries, NULL, alphasort);
  for (int i = 0; i < count; i++) {
    const char *name = entries[i]->d_name;
    const size_t length = strlen(name), end = strlen(ending);
    if (name[0] != '.' && length >= end && strcmp(name + length - end, ending) == 0) {
      snprintf(path, sizeof path, "%s/%s", dir, name);
      const struct bytes content = files_read(path);
      visit(path, content);
      free(content.data);
      visited++;
    }
    free(entries[i]);
  }
  if (count >= 0) free(entries);
  return visited;
}

static const char *replay_path;
static inline void replay_stopped(int number) {
  (void)number;
  _exit(write(STDOUT_FILENO, replay_path, strlen(replay_path)) < 0 ? 2 : 1);
}

#define REPLAY(target)                                                              \
  static void replay_##target(const char *path, struct bytes content) {             \
    replay_path = path;                                                             \
    fuzz_##target((const uint8_t *)content.data, content.count);                    \
  }                                                                                 \
  TEST(the_corpus_of_##target##_keeps_its_promises) {                               \
    signal(SIGABRT, replay_stopped), signal(SIGSEGV, replay_stopped);               \
    const int count = each_file("tests/fuzz/corpus/" #target, "", replay_##target); \
    EXPECT(count >= 3, "%d inputs, wanted at least the seeds", count);              \
  }
