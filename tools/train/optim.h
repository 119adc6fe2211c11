/* SPDX-License-Identifier: Apache-2.0
 *
 * AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101), gradient norm, learning rate schedule. */
#pragma once

#include <stdint.h>

struct adamw {
  float beta1;
  float beta2;
  float epsilon;
  float decay; /* decoupled: value -= rate decay value */
  float rate;
  float grad_scale; /* multiplies the gradient first: clipping */
  int64_t step;     /* of this update, from 1: corrects the bias of the moments */
};

/* Updates value, and the moments `first` and `second`. */
void adamw_update(const struct adamw *o, float *value, const float *grad, float *first, float *second,
                  int64_t count);

/* sqrt(sum grad^2), the same for any number of threads. */
double gradient_norm(const float *grad, int64_t count);

/* Factor that brings a gradient of this norm down to at most `limit`. */
float clip_scale(double norm, double limit);

/* Learning rate of step 0 .. steps-1: up to `peak` linearly over `warmup` steps, then by a half cosine to `floor`. */
double learning_rate(int64_t step, int64_t steps, int64_t warmup, double peak, double floor);
