/* SPDX-License-Identifier: Apache-2.0
 * Random numbers of a sample: number n of a stream is a function of both, whoever asks and in whatever order. */
#pragma once

#include "case.h"

static inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

static inline uint64_t stream(const struct sample *s, int id) {
  return mix(s->problem.seed * 64 + (uint64_t)id + 1);
}

static inline uint64_t word(uint64_t stream, int64_t n) {
  return mix(stream + (uint64_t)n * 0x9e3779b97f4a7c15u);
}

/* k distinct experts, drawn by their shares; slots beyond E repeat. `t` is the number of the draw. */
void draw_experts(const struct sample *s, const double *log_share, int64_t t, int32_t *ids);
/* All tensors of numbers, for a problem that is `exact` (case_exact.c). */
void fill_exact(struct sample *s, const double *log_share);
