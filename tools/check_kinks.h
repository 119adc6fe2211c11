/* SPDX-License-Identifier: Apache-2.0
 * Where a derivative jumps, and which rows of which gradients that may change by a term. See check_kinks.c. */
#pragma once

#include "check_reference.h"

/* Norms of what the terms of elements that fp32 noise may put on the other side of a step change, by row. */
struct kinks {
  double *token;  /* of dx */
  double *weight; /* of the gradient of weights, or of logits */
  double *bias;   /* of db1 */
  double *w1;
  double *latent;                    /* of latent_down */
  double router_weight, router_bias; /* of any row */
};

/* Finds them after reference_run. False: memory was short; kinks_free is due in either case. */
bool check_kinks(const struct sample *sample, const struct reference *r, struct kinks *kinks);
/* How far this row of a result may be off for them. */
double kinks_excuse(const struct kinks *kinks, enum tensor id, int64_t row);
void kinks_free(struct kinks *kinks);
