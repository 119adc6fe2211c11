/* SPDX-License-Identifier: Apache-2.0
 * Random numbers of a sample: number n of a stream is a function of both, whoever asks and in whatever order. */
#pragma once

#include "case.h"
#include "random.h"

static inline uint64_t stream(const struct sample *s, int id) {
  return random_mix(s->problem.seed * 64 + (uint64_t)id + 1);
}

static inline uint64_t word(uint64_t stream, int64_t n) {
  return random_mix(stream + (uint64_t)n * RANDOM_STEP);
}

/* k distinct experts, drawn by their shares; slots beyond E repeat. `t` is the number of the draw. */
void draw_experts(const struct sample *s, const double *log_share, int64_t t, int32_t *ids);
/* All tensors of numbers, for a problem that is `exact` (case_exact.c). */
void fill_exact(struct sample *s, const double *log_share);
