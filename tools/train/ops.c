/* SPDX-License-Identifier: Apache-2.0
 *
 * Embedding, RMSNorm, rotary embedding, cross-entropy. Attention is in attention.c.
 * Gradients of shared parameters (embedding rows, gains) are parallel over columns, so that each column is summed over
 * ascending tokens by one thread whatever the number of threads. */
#include "ops.h"

#include <math.h>
#include <string.h>

#include "vector.h"

#define COLUMNS 16 /* of a parameter gradient that one iteration owns: one cache line */

void embed(float *out, const float *table, const uint8_t *byte, int64_t tokens, int64_t dim) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tokens; t++)
    memcpy(out + t * dim, table + byte[t] * dim, (size_t)dim * sizeof *out);
}

void embed_backward(float *dtable, const float *dout, const uint8_t *byte, int64_t tokens, int64_t dim) {
  memset(dtable, 0, (size_t)(256 * dim) * sizeof *dtable);
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < dim; first += COLUMNS) {
    const int64_t end = first + COLUMNS < dim ? first + COLUMNS : dim;
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t i = first; i < end; i++) dtable[byte[t] * dim + i] += dout[t * dim + i];
  }
}

void rmsnorm_rstd(float *rstd, const float *x, int64_t tokens, int64_t dim) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tokens; t++) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < dim; i++) sum += x[t * dim + i] * x[t * dim + i];
    rstd[t] = 1.0f / sqrtf(sum / (float)dim + 1e-5f);
  }
}

void rmsnorm_apply(float *out, const float *x, const float *rstd, const float *gain, int64_t tokens,
                   int64_t dim) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t i = 0; i < dim; i++) out[t * dim + i] = x[t * dim + i] * rstd[t] * gain[i];
}

/* With n = x rstd:  dx = rstd (gain dout - n mean(gain dout n)). */
CLONES static void rmsnorm_dx(float *dx, const float *dout, const float *x, float rstd, const float *gain,
                              int64_t dim, int accumulate) {
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t i = 0; i < dim; i++) dot += gain[i] * dout[i] * x[i];
  const float pull = dot * rstd * rstd / (float)dim;
  for (int64_t i = 0; i < dim; i++) {
    const float d = rstd * (gain[i] * dout[i] - x[i] * pull);
    dx[i] = accumulate ? dx[i] + d : d;
  }
}

void rmsnorm_backward(float *dx, float *dgain, const float *dout, const float *x, const float *rstd,
                      const float *gain, int64_t tokens, int64_t dim, int accumulate) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tokens; t++)
    rmsnorm_dx(dx + t * dim, dout + t * dim, x + t * dim, rstd[t], gain, dim, accumulate);
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < dim; first += COLUMNS) {
    const int64_t width = first + COLUMNS < dim ? COLUMNS : dim - first;
    float sum[COLUMNS] = {0};
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t i = 0; i < width; i++)
        sum[i] += dout[t * dim + first + i] * x[t * dim + first + i] * rstd[t];
    memcpy(dgain + first, sum, (size_t)width * sizeof *sum);
  }
}

void rope_table(float *table, int64_t length, int64_t width) {
  for (int64_t t = 0; t < length; t++)
    for (int64_t i = 0; i < width / 2; i++) {
      const double angle = (double)t * pow(10000, -2.0 * (double)i / (double)width);
      table[t * width + 2 * i] = (float)cos(angle);
      table[t * width + 2 * i + 1] = (float)sin(angle);
    }
}

/* One head of one token, two halves of `half` numbers. */
CLONES static void turn(float *v, const float *angle, int64_t half, float sign) {
  for (int64_t i = 0; i < half; i++) {
    const float cosine = angle[2 * i], sine = sign * angle[2 * i + 1];
    const float a = v[i], b = v[i + half];
    v[i] = a * cosine - b * sine;
    v[i + half] = a * sine + b * cosine;
  }
}

void rope(const struct attention *shape, float *qkv, const float *table, int inverse) {
  const int64_t heads = shape->heads, width = shape->width;
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < shape->sequences * shape->length; t++)
    for (int64_t h = 0; h < 2 * heads; h++) /* q, then k; v stays */
      turn(qkv + (t * 3 * heads + h) * width, table + t % shape->length * width, width / 2, inverse ? -1 : 1);
}

/* One token: its loss; with `scale` not 0, its logits become scale times the gradient. */
CLONES static double cross_entropy_row(float *logits, uint8_t target, int64_t classes, float scale) {
  float max = logits[0], sum = 0;
  for (int64_t i = 1; i < classes; i++) max = logits[i] > max ? logits[i] : max;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < classes; i++) sum += fast_exp(logits[i] - max);
  const double loss = log((double)sum) + (double)max - (double)logits[target];
  if (scale == 0) return loss;
  for (int64_t i = 0; i < classes; i++) logits[i] = scale / sum * fast_exp(logits[i] - max);
  logits[target] -= scale;
  return loss;
}

double cross_entropy(float *logits, double *row_loss, const uint8_t *target, int64_t tokens, int64_t classes,
                     int gradient) {
  const float scale = gradient ? 1.0f / (float)tokens : 0;
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tokens; t++)
    row_loss[t] = cross_entropy_row(logits + t * classes, target[t], classes, scale);
  double sum = 0;
  for (int64_t t = 0; t < tokens; t++) sum += row_loss[t];
  return sum / (double)tokens;
}

void add(float *out, const float *a, const float *b, int64_t count) {
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < count; i++) out[i] = a[i] + b[i];
}
