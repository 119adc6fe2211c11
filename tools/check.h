/* SPDX-License-Identifier: Apache-2.0
 * What the files of `moeblas check` share: the verdict on one problem, and who gives it. */
#pragma once

#include <stdio.h>

#include "case.h"

enum {
  VERDICT_TEXT = 512
};

/* The worst that was found. ratio = error / limit: above 1 the problem has failed. */
struct verdict {
  bool failed;
  bool refused; /* by the library, with a sentence in `text`: neither passed nor failed */
  bool broken;  /* memory was short: nothing is known */
  double ratio;
  double error;
  double limit;
  enum tensor tensor;
  int64_t row;
  int64_t rows;            /* that were compared */
  int64_t excused;         /* of them, beyond their limit beside a step of the derivative (check_kinks.c) */
  const char *against;     /* "ideal" or "staged": the reference that the worst was measured against */
  char text[VERDICT_TEXT]; /* what failed other than a number, "" if nothing */
};

/* How far a result may be from the reference, see docs/numerics.md. */
struct check_limit {
  moe_dtype dtype;
  double row; /* of a row, relative: against ideal for fp32, else against staged */
  /* Whole tensor of n terms, not for fp32: error to ideal <= (factor + 2/sqrt(n)) (staged to ideal) + rest + row/2/sqrt(n) */
  double factor, rest;
  double normal; /* the smallest normal number, below which spacings shrink no more; 0: out of reach */
};
const struct check_limit *check_limit_of(moe_dtype dtype);

/* Fails the verdict with a sentence; the first one is kept. */
void verdict_fail(struct verdict *verdict, const char *format, ...) __attribute__((format(printf, 2, 3)));
void verdict_measure(struct verdict *verdict, enum tensor tensor, int64_t row, double error, double limit,
                     const char *against);

/* Creates the plan of `problem`; a refusal goes to the verdict. NULL then. */
moe_plan *check_plan(moe_context *ctx, const struct problem *problem, struct verdict *verdict);
/* Forward, and backward where the problem has one, with `poison` where nothing may be read. False: verdict has failed. */
bool check_calls(struct run *run, int poison, struct verdict *verdict);
/* sample -> plan -> one run, with a sentence in the verdict when one of them is not to be had. False: nothing to close. */
bool check_run(moe_context *ctx, const struct sample *sample, struct run *run, struct verdict *verdict);
void check_run_close(struct run *run); /* the plan as well */

struct oracle;
/* Compares the results of `run` with the oracle on the data of `truth` (check_compare.c). */
void check_compare(const struct sample *truth, const struct run *run, struct verdict *verdict);
#define CHECK_KEY_TOLERANCE 1e-5 /* of a selection key: fp32 sums of unit terms, docs/numerics.md */
/* Whether the ids are such as can be followed; whether they, and the weights, are those of the oracle's keys up to fp32 noise
 * (check_keys.c). */
void check_choice(const struct sample *truth, const struct run *run, struct verdict *verdict);
void check_keys(const struct sample *truth, const struct run *run, const struct oracle *o,
                struct verdict *verdict);
void check_weights(const struct sample *truth, const struct run *run, const struct oracle *o,
                   struct verdict *verdict);
bool check_masked(const struct sample *sample, int64_t token);
/* Equal numbers, one by one; either may be absent (check_compare.c). */
void check_integers(const struct run *run, enum tensor id, const int32_t *wanted, int64_t count,
                    struct verdict *verdict);
/* The same as check_compare for an exact problem, to the bit (check_exact.c). */
void check_exact(const struct sample *truth, const struct run *run, struct verdict *verdict);
/* Equal bits of what must be equal (check_bits.c). */
void check_bitwise(moe_context *ctx, const struct sample *sample, struct verdict *verdict);
enum {
  MUTATION_LIMIT = 64
};
struct mutation_count {
  int passed;
  int failed;
  const char *unnoticed[MUTATION_LIMIT]; /* names of those that failed */
};
/* Plants every mutation that applies, and looks whether check_compare notices (mutate.c). False: one could not be run. */
bool check_mutations(moe_context *ctx, const struct sample *sample, struct mutation_count *count);
