/* SPDX-License-Identifier: Apache-2.0
 * What model.c and pass.c share: where a parameter is. */
#pragma once

#include "model.h"

/* The parameters of a layer. param[0] is the embedding, then come the layers. */
enum model_part {
  PART_NORM1,
  PART_QKV,
  PART_PROJ,
  PART_NORM2,
  PART_ROUTER,
  PART_W1,
  PART_W2,
  PART_COUNT,
  PART_LAST_NORM = PART_NORM1, /* the last norm and the head are counted as of the layer after the last */
  PART_HEAD = PART_QKV
};

static inline int64_t model_offset(const struct model *m, int64_t layer, enum model_part part) {
  return m->param[1 + layer * PART_COUNT + part].offset;
}
static inline float *model_value(const struct model *m, int64_t layer, enum model_part part) {
  return m->value + model_offset(m, layer, part);
}
static inline float *model_grad(const struct model *m, int64_t layer, enum model_part part) {
  return m->grad + model_offset(m, layer, part);
}
/* Bytes of m->workspace: enough for every dense product of a pass. SIZE_MAX on bad sizes. */
size_t model_workspace(const struct model *m);
