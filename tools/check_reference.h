/* SPDX-License-Identifier: Apache-2.0
 * What the library's results are compared with: the oracle's runs on the data of a sample. See check_reference.c. */
#pragma once

#include "case.h"
#include "oracle.h"

struct reference {
  double *input[T_INPUTS]; /* floating-point inputs in double */
  struct oracle ideal;
  struct oracle staged; /* fp32 has one only where logits are narrower, or where it was asked for */
  bool has_staged;
  double *size[T_RESULTS]; /* by tensor, how large the terms are (reference_sizes); NULL: not known */
};

/* Decodes the inputs. False: memory was short; reference_free is due in either case. */
bool reference_make(struct reference *r, const struct sample *sample);
/* Runs the ideal oracle, and the staged one where roundings are to be seen or `staged` says so. With `run` both follow the
 * library's choice of experts and of slots to drop, else their own. False: memory was short. */
bool reference_run(struct reference *r, const struct sample *sample, const struct run *run, bool staged);
/* Fills in the sizes, after reference_run: with power 1 the sum of the magnitudes of all terms, with 2 the square of what
 * the element would be if the terms' signs were random. False: memory was short. */
bool reference_sizes(struct reference *r, const struct sample *sample, int power);
void reference_free(struct reference *r);

/* The oracle on these inputs, not yet run. */
struct oracle oracle_of(const struct sample *sample, const struct reference *r);
/* A result of the oracle in double; NULL where it has none, or the tensor is no number's. */
double *oracle_tensor(const struct oracle *o, enum tensor id);
