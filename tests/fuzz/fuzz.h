/* SPDX-License-Identifier: Apache-2.0
 *
 * Fuzz targets: functions that take any bytes and stop the process when moeblas breaks a promise.
 *
 * A target is fuzz_NAME in fuzz_NAME.c. `make fuzz` puts libFuzzer in front of each; tests/test_fuzz.c replays what it has
 * found, without clang. Invariant: a target leaves nothing behind, so that an input fails alone as it fails in a row. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int fuzz_api(const uint8_t *data, size_t size);
int fuzz_checkpoint(const uint8_t *data, size_t size);
int fuzz_cli(const uint8_t *data, size_t size);
int fuzz_presets(const uint8_t *data, size_t size);
int fuzz_problem(const uint8_t *data, size_t size);
int fuzz_safetensors(const uint8_t *data, size_t size);

/* A promise; the process ends with the place and the sentence when it is broken. */
#define PROMISE(condition, ...)                                               \
  do {                                                                        \
    if (!(condition)) {                                                       \
      fprintf(stderr, "%s:%d: broken: %s: ", __FILE__, __LINE__, #condition); \
      fprintf(stderr, __VA_ARGS__);                                           \
      fprintf(stderr, "\n");                                                  \
      abort();                                                                \
    }                                                                         \
  } while (0)

/* A file that is nowhere but in memory, and its path. */
struct fuzz_file {
  int fd;
  char path[32];
};

static inline struct fuzz_file fuzz_file(const void *data, size_t size) {
  struct fuzz_file file = {.fd = memfd_create("fuzz", MFD_CLOEXEC)};
  PROMISE(file.fd >= 0 && write(file.fd, data, size) == (ssize_t)size, "no memory for a file");
  snprintf(file.path, sizeof file.path, "/proc/self/fd/%d", file.fd);
  return file;
}

/* One line that can be shown to a person: not empty, whole, printable. */
static inline void fuzz_sentence(const char *text, size_t room) {
  const size_t length = strnlen(text, room);
  PROMISE(length > 0 && length < room, "a refusal without a sentence");
  for (size_t i = 0; i < length; i++)
    PROMISE((unsigned char)text[i] >= 0x20 && text[i] != 0x7f, "control character %d in: %s", text[i], text);
}

/* Bytes as a row of choices; 0 once they are used up. */
struct feed {
  const uint8_t *data;
  size_t size;
};

static inline void feed_bytes(struct feed *feed, void *into, size_t bytes) {
  const size_t have = feed->size < bytes ? feed->size : bytes;
  memset(into, 0, bytes);
  if (have > 0) memcpy(into, feed->data, have);
  feed->data += have;
  feed->size -= have;
}

static inline unsigned feed_below(struct feed *feed, unsigned count) {
  uint8_t byte;
  feed_bytes(feed, &byte, 1);
  return byte % count;
}
