/* SPDX-License-Identifier: Apache-2.0
 *
 * AdamW, gradient norm, schedule. The norm is summed in slices of a fixed size, in double, so that neither the number
 * of threads nor their timing shows in it. */
#include "optim.h"

#include <math.h>

#include "vector.h"

#define SLICE 4096 /* elements a thread handles at a time */

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

CLONES static void update_slice(const struct adamw *o, float *value, const float *grad, float *first,
                                float *second, int64_t count) {
  const float keep = 1 - o->rate * o->decay;
  const float unbias1 = (float)(1 / (1 - pow(o->beta1, (double)o->step)));
  const float unbias2 = (float)(1 / (1 - pow(o->beta2, (double)o->step)));
  for (int64_t i = 0; i < count; i++) {
    const float g = grad[i] * o->grad_scale;
    first[i] = o->beta1 * first[i] + (1 - o->beta1) * g;
    second[i] = o->beta2 * second[i] + (1 - o->beta2) * g * g;
    value[i] = keep * value[i] - o->rate * first[i] * unbias1 / (sqrtf(second[i] * unbias2) + o->epsilon);
  }
}

void adamw_update(const struct adamw *o, float *value, const float *grad, float *first, float *second,
                  int64_t count) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; i += SLICE)
    update_slice(o, value + i, grad + i, first + i, second + i, least(SLICE, count - i));
}

double gradient_norm(const float *grad, int64_t count) {
  double total = 0;
#pragma omp parallel for ordered schedule(static, 1)
  for (int64_t i = 0; i < count; i += SLICE) {
    const int64_t end = least(i + SLICE, count);
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = i; j < end; j++) sum += (double)grad[j] * (double)grad[j];
#pragma omp ordered
    total += sum;
  }
  return sqrt(total);
}

float clip_scale(double norm, double limit) { return norm > limit ? (float)(limit / norm) : 1; }

double learning_rate(int64_t step, int64_t steps, int64_t warmup, double peak, double floor) {
  if (step < warmup) return peak * (double)(step + 1) / (double)warmup;
  const double done = (double)(step - warmup) / (double)(steps > warmup ? steps - warmup : 1);
  return floor + (peak - floor) * 0.5 * (1 + cos(3.14159265358979323846 * (done < 1 ? done : 1)));
}
