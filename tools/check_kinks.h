/* SPDX-License-Identifier: Apache-2.0
 * Where a derivative jumps, and which rows of which gradients that may change by a term. See check_kinks.c. */
#pragma once

#include "check_reference.h"

struct kinks {
  int64_t count; /* of elements of h that fp32 noise may put on the other side of a step */
  bool *token;   /* [T] which has one */
  bool *expert;  /* [E] */
  bool *column;  /* [E*F2] of W1 and b1 */
};

/* Finds them after reference_run. False: memory was short; kinks_free is due in either case. */
bool check_kinks(const struct sample *sample, const struct reference *r, struct kinks *kinks);
/* Whether this row of a result may be off by a term for one of them. */
bool kinks_excuse(const struct sample *sample, const struct kinks *kinks, enum tensor id, int64_t row);
void kinks_free(struct kinks *kinks);
