/* SPDX-License-Identifier: Apache-2.0
 *
 * A checkpoint: one safetensors file in a folder, replaced as a whole or not at all. */
#include "checkpoint.h"

#include <string.h>

#include "atomic.h"
#include "text.h"

static const char file_name[] = "checkpoint.safetensors";

int checkpoint_save(const char *dir, const struct tensor *tensors, int count,
                    const struct checkpoint_meta *meta, int meta_count, char *error, size_t error_bytes) {
  struct atomic_file out;
  int failed = atomic_open(&out, dir, file_name, error, error_bytes);
  if (failed) return failed;
  failed = safetensors_write(out.file, tensors, count, meta, meta_count, error, error_bytes);
  if (!failed) return atomic_commit(&out, error, error_bytes);
  atomic_cancel(&out);
  return failed;
}

int checkpoint_open(struct checkpoint *c, const char *dir, char *error, size_t error_bytes) {
  c->file = (struct safetensors){.fd = -1};
  if ((size_t)snprintf(c->path, sizeof c->path, "%s/%s", dir, file_name) >= sizeof c->path)
    return text_fail(EXIT_INPUT, error, error_bytes, "the path of the folder for %s is too long", file_name);
  return safetensors_open(&c->file, c->path, error, error_bytes);
}

const char *checkpoint_meta(const struct checkpoint *c, const char *key) {
  return safetensors_metadata(&c->file, key);
}

/* [2,3] */
static const char *print_shape(char *out, size_t bytes, const int64_t *shape, int rank) {
  size_t used = (size_t)snprintf(out, bytes, "[");
  for (int i = 0; i < rank; i++)
    used += (size_t)snprintf(out + used, bytes - used, "%s%lld", i ? "," : "", (long long)shape[i]);
  snprintf(out + used, bytes - used, "]");
  return out;
}

int checkpoint_read(const struct checkpoint *c, const struct tensor *into, char *error, size_t error_bytes) {
  char name[80], found[96], wanted[96]; /* four 64-bit numbers fit */
  text_escape(name, sizeof name, into->name);
  const struct safetensors_entry *e = safetensors_find(&c->file, into->name);
  if (e == NULL) return text_fail(EXIT_INPUT, error, error_bytes, "%s: has no tensor %s", c->path, name);
  if (e->rank != into->rank || memcmp(e->shape, into->shape, (size_t)e->rank * sizeof *e->shape) != 0)
    return text_fail(EXIT_INPUT, error, error_bytes, "%s: tensor %s has shape %s, wanted %s", c->path, name,
                     print_shape(found, sizeof found, e->shape, e->rank),
                     print_shape(wanted, sizeof wanted, into->shape, into->rank));
  return safetensors_read(&c->file, e, into->data, error, error_bytes);
}

int checkpoint_count(const struct checkpoint *c) { return c->file.count; }

void checkpoint_close(struct checkpoint *c) { safetensors_close(&c->file); }
