/* SPDX-License-Identifier: Apache-2.0
 *
 * The safetensors reader: a file is refused with a sentence, or its tensors tile its data and each can be read. */
#include "fuzz.h"

#include "../../tools/train/safetensors.h"

static void read_tensors(const struct safetensors *s) {
  char error[512];
  uint64_t at = 0;
  for (int i = 0; i < s->count; i++) {
    const struct safetensors_entry *e = &s->entries[i];
    const uint64_t bytes = e->end - e->begin;
    PROMISE(e->begin == at && e->end >= at, "tensor %d leaves a gap", i);
    PROMISE(safetensors_find(s, e->name) == e, "tensor %d is not found by its name", i);
    float *into = malloc(bytes + 1);
    PROMISE(into != NULL && safetensors_read(s, e, into, error, sizeof error) == 0, "%s", error);
    free(into);
    at = e->end;
  }
}

int fuzz_safetensors(const uint8_t *data, size_t size) {
  struct fuzz_file file = fuzz_file(data, size);
  struct safetensors s;
  char error[512] = "";
  const int failed = safetensors_open(&s, file.path, error, sizeof error);
  if (failed) {
    PROMISE(failed == 2, "status %d: %s", failed, error);
    fuzz_sentence(error, sizeof error);
  } else {
    read_tensors(&s);
    safetensors_metadata(&s, "format");
    safetensors_close(&s);
  }
  close(file.fd);
  return 0;
}
