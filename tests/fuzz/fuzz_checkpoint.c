/* SPDX-License-Identifier: Apache-2.0
 *
 * The checkpoint loader behind the reader. The input is the header of a file: its length is put before it and zeros for
 * data behind it, as many as a whole checkpoint has (one more or less by the first byte), so that bytes that are mutated
 * meet the loader's own checks. Loaded or refused with a sentence; what a refusal leaves is not used. */
#include "fuzz.h"

#include <fcntl.h>

#include "../../tools/cli.h"
#include "../../tools/train/text.h"
#include "../../tools/train/trainer.h"

enum {
  TRUNCATED = 't',
  PROLONGED = 'p'
};

/* Of the preset tiny: parameters and two moments, correction biases. */
static uint64_t data_bytes(void) {
  static uint64_t bytes;
  struct trainer r = {.step = 0};
  char error[512];
  if (bytes > 0) return bytes;
  PROMISE(settings_resolve(&r.settings, error, sizeof error), "%s", error);
  PROMISE(trainer_open(&r, 0, error, sizeof error) == 0, "%s", error);
  for (int i = 0; i < r.model->params; i++) bytes += (uint64_t)r.model->param[i].count;
  bytes += 2 * (uint64_t)r.model->count + (uint64_t)(r.settings.model.layers * r.settings.model.experts);
  bytes *= sizeof(float);
  trainer_close(&r);
  return bytes;
}

static void write_checkpoint(const char *dir, const uint8_t *header, size_t size, char kind) {
  char path[128];
  const uint64_t length = size, data = data_bytes() + (kind == PROLONGED) - (kind == TRUNCATED);
  snprintf(path, sizeof path, "%s/checkpoint.safetensors", dir);
  const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  PROMISE(fd >= 0 && write(fd, &length, 8) == 8 && write(fd, header, size) == (ssize_t)size, "%s", path);
  PROMISE(ftruncate(fd, (off_t)(8 + size + data)) == 0, "%s", path);
  close(fd);
}

/* As `moeblas train --sample` does, and as --resume does but for the text. */
static int load(const char *dir, int training, char *error, size_t error_bytes) {
  struct trainer r = {.settings = {.out = dir, .steps = -1, .stop = -1, .seed = -1}};
  struct checkpoint c;
  r.settings.sample = training ? NULL : "x";
  int code = checkpoint_open(&c, dir, error, error_bytes);
  if (code) return code;
  code = trainer_adopt(&r, &c, error, error_bytes);
  if (!code && strcmp(r.settings.preset, "tiny") == 0) {
    code = trainer_open(&r, training, error, error_bytes);
    if (!code) code = trainer_load(&r, &c, training, error, error_bytes);
  }
  checkpoint_close(&c);
  trainer_close(&r);
  return code;
}

int fuzz_checkpoint(const uint8_t *data, size_t size) {
  char dir[64] = "/dev/shm/moeblas-fuzz-XXXXXX", path[128];
  if (size == 0) return 0;
  PROMISE(mkdtemp(dir) != NULL, "no folder");
  write_checkpoint(dir, data + 1, size - 1, (char)data[0]);
  for (int training = 0; training < 2; training++) {
    char error[512] = "";
    const int code = load(dir, training, error, sizeof error);
    PROMISE(code == 0 || code == EXIT_INPUT || code == EXIT_SYSTEM, "status %d", code);
    if (code) fuzz_sentence(error, sizeof error);
  }
  snprintf(path, sizeof path, "%s/checkpoint.safetensors", dir);
  unlink(path);
  rmdir(dir);
  return 0;
}
