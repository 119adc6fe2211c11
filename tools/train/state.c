/* SPDX-License-Identifier: Apache-2.0
 *
 * A run to and from its checkpoint. What is saved is all that the next step depends on: parameters, moments, correction
 * biases, the step, and as text the settings that shape them. Nothing of the machine or the clock. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "trainer.h"
#include "text.h"

#define FORMAT "moeblas-train-1"

enum {
  STATE_TENSORS = 3 /* besides the parameters */
};

static struct tensor param_tensor(const struct model *m, int i) {
  const struct param *p = m->param + i;
  struct tensor t = {.name = p->name, .data = m->value + p->offset, .rank = p->rank};
  memcpy(t.shape, p->shape, sizeof p->shape);
  return t;
}

/* The i-th tensor after the parameters. */
static struct tensor state_tensor(const struct trainer *r, int i) {
  const struct model *m = r->model;
  switch (i) {
  case 0:
    return (struct tensor){"correction_bias", m->correction_bias, {m->config.layers, m->config.experts}, 2};
  case 1: return (struct tensor){"adam.first", r->first, {m->count}, 1};
  default: return (struct tensor){"adam.second", r->second, {m->count}, 1};
  }
}

__attribute__((format(printf, 3, 4))) static void add_meta(struct checkpoint_meta **at, const char *key,
                                                           const char *format, ...) {
  va_list list;
  snprintf((*at)->key, sizeof(*at)->key, "%s", key);
  va_start(list, format);
  vsnprintf((*at)->value, sizeof(*at)->value, format, list);
  va_end(list);
  (*at)++;
}

int trainer_save(const struct trainer *r, char *error, size_t error_bytes) {
  const struct settings *s = &r->settings;
  struct checkpoint_meta meta[8], *at = meta;
  char model[128];
  settings_describe(s, model, sizeof model);
  add_meta(&at, "format", "%s", FORMAT);
  add_meta(&at, "preset", "%s", s->preset);
  add_meta(&at, "balance", "%s", s->balance);
  add_meta(&at, "model", "%s", model);
  add_meta(&at, "seed", "%" PRId64, s->seed);
  add_meta(&at, "steps", "%" PRId64, s->steps);
  add_meta(&at, "step", "%" PRId64, r->step);
  add_meta(&at, "text", "%016" PRIx64, corpus_hash(&r->corpus));
  const int params = r->model->params;
  struct tensor *tensors = calloc((size_t)(params + STATE_TENSORS), sizeof *tensors);
  if (!tensors) return text_fail(EXIT_SYSTEM, error, error_bytes, "not enough memory to save");
  for (int i = 0; i < params; i++) tensors[i] = param_tensor(r->model, i);
  for (int i = 0; i < STATE_TENSORS; i++) tensors[params + i] = state_tensor(r, i);
  const int code =
      checkpoint_save(s->out, tensors, params + STATE_TENSORS, meta, (int)(at - meta), error, error_bytes);
  free(tensors);
  return code;
}

/* ---- back ------------------------------------------------------------------------------------------------------ */

static int damaged(const struct checkpoint *c, const char *key, char *error, size_t error_bytes) {
  return text_fail(EXIT_SYSTEM, error, error_bytes,
                   "%s: not a checkpoint of moeblas train: '%s' is missing or bad", c->path, key);
}

/* Fails unless the metadata holds a whole number of least .. 10^15 here. */
static int meta_number(const struct checkpoint *c, const char *key, int64_t least, int64_t *value,
                       char *error, size_t error_bytes) {
  const char *text = checkpoint_meta(c, key);
  char *end = NULL;
  *value = text ? strtoll(text, &end, 10) : -1;
  if (!text || end == text || *end || *value < least || *value > 1000000000000000)
    return damaged(c, key, error, error_bytes);
  return 0;
}

/* *setting becomes the checkpoint's word, unless another was given. */
static int adopt_text(const struct checkpoint *c, const char *key, const char **setting, char *error,
                      size_t error_bytes) {
  const char *saved = checkpoint_meta(c, key);
  char shown[64];
  if (!saved) return damaged(c, key, error, error_bytes);
  if (*setting && strcmp(*setting, saved))
    return text_fail(EXIT_INPUT, error, error_bytes, "--%s %s: the checkpoint %s was trained with --%s %s",
                     key, *setting, c->path, key, text_escape(shown, sizeof shown, saved));
  *setting = saved;
  return 0;
}

static int adopt_number(const struct checkpoint *c, const char *key, int64_t *setting, int fixed, char *error,
                        size_t error_bytes) {
  int64_t saved;
  const int code = meta_number(c, key, 0, &saved, error, error_bytes);
  if (code) return code;
  if (fixed && *setting >= 0 && *setting != saved)
    return text_fail(EXIT_INPUT, error, error_bytes,
                     "--%s %" PRId64 ": the checkpoint %s was trained with --%s %" PRId64, key, *setting,
                     c->path, key, saved);
  if (*setting < 0) *setting = saved;
  return 0;
}

int trainer_adopt(struct trainer *r, struct checkpoint *c, char *error, size_t error_bytes) {
  struct settings *s = &r->settings;
  const char *format = checkpoint_meta(c, "format");
  if (!format || strcmp(format, FORMAT)) return damaged(c, "format", error, error_bytes);
  int code = adopt_text(c, "preset", &s->preset, error, error_bytes);
  if (!code) code = adopt_text(c, "balance", &s->balance, error, error_bytes);
  if (!code) code = adopt_number(c, "seed", &s->seed, !s->sample, error, error_bytes);
  if (!code) code = adopt_number(c, "steps", &s->steps, 0, error, error_bytes);
  if (code) return code;
  if (!settings_resolve(s, error, error_bytes)) return EXIT_INPUT;
  char model[128];
  settings_describe(s, model, sizeof model);
  const char *saved = checkpoint_meta(c, "model");
  if (saved && strcmp(saved, model) == 0) return 0;
  char shown[256];
  return text_fail(EXIT_INPUT, error, error_bytes,
                   "%s: the checkpoint is of the model '%s', preset %s is '%s'", c->path,
                   saved ? text_escape(shown, sizeof shown, saved) : "", s->preset, model);
}

int trainer_load(struct trainer *r, const struct checkpoint *c, int training, char *error,
                 size_t error_bytes) {
  for (int i = 0; i < r->model->params + (training ? STATE_TENSORS : 1); i++) {
    const struct tensor t =
        i < r->model->params ? param_tensor(r->model, i) : state_tensor(r, i - r->model->params);
    const int code = checkpoint_read(c, &t, error, error_bytes);
    if (code) return code;
  }
  if (!training) return 0;
  char hash[32];
  snprintf(hash, sizeof hash, "%016" PRIx64, corpus_hash(&r->corpus));
  const char *text = checkpoint_meta(c, "text");
  if (!text) return damaged(c, "text", error, error_bytes);
  if (strcmp(text, hash))
    return text_fail(EXIT_INPUT, error, error_bytes,
                     "%s: the checkpoint was trained on another text than the one given", c->path);
  return meta_number(c, "step", 0, &r->step, error, error_bytes);
}
