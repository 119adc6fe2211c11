/* SPDX-License-Identifier: Apache-2.0
 *
 * Random data of a problem. Number n of a tensor comes from splitmix64 at position n of the tensor's own stream, so that
 * the data are the same for any number of threads. Scales keep what the layer computes at unit size: x is unit normal and
 * weights are normal with variance 1/in; where the activation clamps at L, W1 is larger by L/2, so that a few per cent of
 * the values are clamped and a lost clamp is seen.
 *
 * Skew: every expert has a share. Given ids are drawn by the shares without repetition (Gumbel's trick); logits get the
 * logarithm of the share added. Where logits come from x, its first column is set to 1 and the router weight's to that. */
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case_data.h"

enum {
  LOWEST = -16, /* log share of an expert that nobody shall choose, far outside the spread of unit logits */
  PERIOD = 4194301 /* of repeating samples */
};

/* ---- random numbers -------------------------------------------------------------------------------------------- */

/* In (0,1), never at its ends. */
static double uniform(uint64_t bits) { return ((double)(bits >> 12) + 0.5) * 0x1p-52; }

/* Box and Muller, from the two halves of one word. */
static float normal(uint64_t bits) {
  const float radius = sqrtf(-2 * logf(((float)(uint32_t)(bits >> 40) + 0.5f) * 0x1p-24f));
  return radius * cosf((float)(uint32_t)bits * (6.28318531f * 0x1p-32f));
}

static void fill_normal(struct sample *s, enum tensor id, double scale) {
  const struct shape *shape = &s->shape[id];
  const uint64_t from = stream(s, (int)id);
  const int64_t count = s->data[id] ? shape_count(shape) : 0;
  const int64_t drawn = count < s->period ? count : s->period, repeats = drawn ? (count - 1) / drawn : 0;
  const size_t element = element_bytes(shape->element), bytes = (size_t)drawn * element;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < drawn; i++)
    element_store(s->data[id], shape->element, i, scale * (double)normal(word(from, i)));
#pragma omp parallel for schedule(static)
  for (int64_t i = 1; i <= repeats; i++) {
    const int64_t rest = count - i * drawn;
    memcpy((char *)s->data[id] + (size_t)i * bytes, s->data[id],
           rest < drawn ? (size_t)rest * element : bytes);
  }
}

/* ---- shares of the experts ------------------------------------------------------------------------------------- */

static bool read_shares(const char *path, double *share, int64_t experts, char *error, size_t bytes) {
  FILE *file = fopen(path, "r");
  int64_t count = 0;
  double total = 0, value;
  if (file == NULL) {
    snprintf(error, bytes, "skew: %.200s: %s", path, strerror(errno));
    return false;
  }
  while (count <= experts && fscanf(file, "%lf", &value) == 1 && value >= 0 && value <= 1e30) {
    if (count < experts) share[count] = value;
    total += value;
    count++;
  }
  const bool complete = feof(file) && count == experts && total > 0;
  fclose(file);
  if (!complete)
    snprintf(error, bytes, "skew: %.200s: wants %lld numbers >= 0, not all 0; the first %lld were read", path,
             (long long)experts, (long long)count);
  return complete;
}

/* log(share / largest share), at least LOWEST. */
static bool log_shares(const struct problem *p, double *share, char *error, size_t bytes) {
  const int64_t experts = p->config.experts;
  double largest = 0;
  if (p->skew == SKEW_FILE && !read_shares(p->skew_file, share, experts, error, bytes)) return false;
  for (int64_t e = 0; e < experts; e++) {
    switch (p->skew) {
    case SKEW_UNIFORM: share[e] = 1; break;
    case SKEW_ZIPF: share[e] = 1.0 / (double)(e + 1); break;
    case SKEW_ONE: share[e] = e == (int64_t)(p->seed % (uint64_t)experts); break;
    case SKEW_EMPTY: share[e] = e % 2 == 0; break;
    case SKEW_FILE: break;
    }
    largest = fmax(largest, share[e]);
  }
  for (int64_t e = 0; e < experts; e++)
    share[e] = share[e] > 0 ? fmax(log(share[e] / largest), LOWEST) : LOWEST;
  return true;
}

/* ---- integers -------------------------------------------------------------------------------------------------- */

void draw_experts(const struct sample *s, const double *log_share, int64_t t, int32_t *ids) {
  const int64_t experts = s->problem.config.experts;
  const uint64_t from = stream(s, T_GIVEN_IDS);
  double key[MOE_MAX_EXPERTS];
  for (int64_t e = 0; e < experts; e++)
    key[e] = log_share[e] - log(-log(uniform(word(from, t * experts + e))));
  for (int64_t j = 0; j < s->problem.config.topk; j++) {
    int64_t best = j % experts;
    for (int64_t e = 0; e < experts; e++)
      if (key[e] > key[best]) best = e;
    key[best] = -INFINITY;
    ids[j] = (int32_t)best;
  }
}

static void draw_ids(struct sample *s, const double *log_share) {
  int32_t *ids = s->data[T_GIVEN_IDS];
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < s->problem.tokens; t++)
    draw_experts(s, log_share, t, ids + t * s->problem.config.topk);
}

/* An eighth of the slots is spoiled, in turn by -1, E, INT_MIN and the id of the slot before. */
static void spoil_ids(struct sample *s) {
  const int64_t slots = s->problem.tokens * s->problem.config.topk;
  int32_t *ids = s->data[T_GIVEN_IDS];
  for (int64_t i = 0; i < slots; i++) {
    const uint64_t bits = word(stream(s, T_COUNT), i);
    if (bits % 8) continue;
    const int32_t spoiled[] = {-1, (int32_t)s->problem.config.experts, INT_MIN, ids[i ? i - 1 : 0]};
    ids[i] = spoiled[(bits >> 8) % 4];
  }
}

/* An eighth of the rows lies behind the last expert's. */
static void draw_offsets(struct sample *s, const double *log_share) {
  const int64_t experts = s->problem.config.experts, live = s->problem.tokens - s->problem.tokens / 8;
  int32_t *offset = s->data[T_ROW_OFFSET];
  double total = 0, sum = 0;
  for (int64_t e = 0; e < experts; e++) total += log_share[e] > LOWEST ? exp(log_share[e]) : 0;
  for (int64_t e = 0; e < experts; e++) {
    offset[e] = (int32_t)((double)live * (sum / total));
    sum += log_share[e] > LOWEST ? exp(log_share[e]) : 0;
  }
  offset[experts] = (int32_t)live;
}

static void draw_small(struct sample *s) {
  const int64_t tokens = s->problem.tokens, slots = tokens * s->problem.config.topk;
  uint8_t *mask = s->data[T_MASK];
  int64_t *counts = s->data[T_GLOBAL_COUNTS];
  float *weights = s->data[T_GIVEN_WEIGHTS];
  for (int64_t t = 0; mask && t < tokens; t++) {
    const uint64_t bits = word(stream(s, T_MASK), t);
    mask[t] = (uint8_t)(bits % 8 ? 0 : (bits >> 8) | 1);
  }
  if (counts) counts[s->problem.config.experts] = 0;
  for (int64_t e = 0; counts && e < s->problem.config.experts; e++) {
    counts[e] = (int64_t)(word(stream(s, T_GLOBAL_COUNTS), e) % 100);
    counts[s->problem.config.experts] += counts[e];
  }
  for (int64_t i = 0; weights && i < slots; i++)
    weights[i] = (float)(2 * uniform(word(stream(s, T_GIVEN_WEIGHTS), i)) / (double)s->problem.config.topk);
}

/* ---- all of it ------------------------------------------------------------------------------------------------- */

static void skew_router(struct sample *s, const double *log_share) {
  const int64_t tokens = s->problem.tokens, experts = s->problem.config.experts,
                hidden = s->problem.config.hidden;
  const struct shape *logits = &s->shape[T_LOGITS];
  if (s->problem.skew == SKEW_UNIFORM) return;
  for (int64_t i = 0; s->data[T_LOGITS] && i < tokens * experts; i++)
    element_store(s->data[T_LOGITS], logits->element, i,
                  element_load(s->data[T_LOGITS], logits->element, i) + log_share[i % experts]);
  if (s->data[T_ROUTER_WEIGHT] == NULL || hidden == 1) return; /* one column would make all tokens the same */
  for (int64_t t = 0; t < tokens; t++) element_store(s->data[T_X], s->shape[T_X].element, t * hidden, 1);
  for (int64_t e = 0; e < experts; e++)
    element_store(s->data[T_ROUTER_WEIGHT], s->shape[T_ROUTER_WEIGHT].element, e * hidden, log_share[e]);
}

static void fill_normals(struct sample *s) {
  const struct problem *p = &s->problem;
  const double hidden = 1 / sqrt((double)p->config.hidden), width = 1 / sqrt((double)problem_width(p));
  const double gain = fmax(1, (double)p->config.act.gate_max / 2);
  fill_normal(s, T_X, 1);
  fill_normal(s, T_LOGITS, 1);
  fill_normal(s, T_DOUT, 1);
  fill_normal(s, T_ROUTER_WEIGHT, hidden);
  fill_normal(s, T_ROUTER_BIAS, 0.5);
  fill_normal(s, T_CORRECTION_BIAS, 0.5);
  fill_normal(s, T_W1, gain * width);
  fill_normal(s, T_B1, 0.5);
  fill_normal(s, T_W2, 1 / sqrt((double)p->config.inter));
  fill_normal(s, T_B2, 0.5);
  fill_normal(s, T_SHARED_W1, gain * hidden);
  fill_normal(s, T_SHARED_W2, 1 / sqrt(fmax(1, (double)p->config.shared_inter)));
  fill_normal(s, T_SHARED_GATE, hidden);
  fill_normal(s, T_LATENT_DOWN, hidden);
  fill_normal(s, T_LATENT_UP, width);
  for (int id = T_DROUTER_WEIGHT; id < T_RESULTS; id++) fill_normal(s, (enum tensor)id, 1);
}

static void fill(struct sample *s, const double *log_share) {
  draw_small(s);
  if (s->problem.exact) {
    fill_exact(s, log_share);
  } else {
    fill_normals(s);
    skew_router(s, log_share);
  }
  if (s->data[T_GIVEN_IDS]) draw_ids(s, log_share);
  if (s->data[T_GIVEN_IDS] && s->problem.invalid) spoil_ids(s);
  if (s->data[T_ROW_OFFSET]) draw_offsets(s, log_share);
}

static bool make(struct sample *s, const struct problem *problem, int64_t period, char *error, size_t bytes) {
  double log_share[MOE_MAX_EXPERTS];
  *s = (struct sample){.problem = *problem, .period = period};
  if (!log_shares(problem, log_share, error, bytes)) return false;
  for (int i = 0; i < T_SAVED; i++) {
    const enum tensor id = (enum tensor)i;
    s->shape[id] = tensor_shape(problem, id);
    const bool wanted = id < T_INPUTS || (problem->accumulate && id >= T_DROUTER_WEIGHT);
    if (!wanted || !s->shape[id].present) continue;
    const size_t size = shape_bytes(&s->shape[id]);
    s->data[id] = aligned_alloc(64, (size + 64) / 64 * 64);
    if (s->data[id] == NULL) {
      snprintf(error, bytes, "%s: %zu bytes of memory could not be had", tensor_name(id), size);
      return false;
    }
  }
  fill(s, log_share);
  return true;
}

bool sample_make(struct sample *s, const struct problem *problem, char *error, size_t bytes) {
  return make(s, problem, INT64_MAX, error, bytes);
}

bool sample_make_repeating(struct sample *s, const struct problem *problem, char *error, size_t bytes) {
  return make(s, problem, PERIOD, error, bytes);
}

void sample_free(struct sample *s) {
  for (int id = 0; id < T_COUNT; id++) free(s->data[id]);
}
