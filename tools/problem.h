/* SPDX-License-Identifier: Apache-2.0
 *
 * Problem strings: one line of text that says everything about a case, "t4096 h2880 f2880 e32 k4 bf16 swiglu bwd".
 * docs/problems.md lists the fields. check, bench and the fuzzers share this one parser; its input is not trusted. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "moeblas.h"

enum {
  PROBLEM_TEXT = 2048, /* the longest problem string, and the longest that problem_print writes */
  PROBLEM_PATH = 256,
  PROBLEM_ERROR = 512 /* room for any sentence of this file */
};

enum skew {
  SKEW_UNIFORM,
  SKEW_ZIPF,
  SKEW_ONE,
  SKEW_EMPTY,
  SKEW_FILE
};

struct problem {
  moe_config config;
  int64_t tokens;
  uint64_t seed;
  int backward;
  int router_bias;
  int correction_bias;
  int bias;
  int shared_gate;
  int replay;     /* given ids on top of a router */
  int mask;       /* some tokens are padding */
  int invalid;    /* some given ids are no experts, or twice the same */
  int accumulate; /* parameter gradients are added to what is there */
  int exact;      /* small integers, of which every sum is exact: results are determined to the bit */
  enum skew skew;
  char skew_file[PROBLEM_PATH]; /* SKEW_FILE */
};

/* A small fp32 SwiGLU layer. */
void problem_default(struct problem *problem);
/* Reads `text`; false with a sentence in `error` if it is not a problem. */
bool problem_parse(const char *text, struct problem *problem, char *error, size_t bytes);
/* Writes the canonical string, which parses back to the same problem. `text` holds PROBLEM_TEXT bytes. */
void problem_print(const struct problem *problem, char *text);
/* Sets one field by its name, as a column of presets.csv does. */
bool problem_set(struct problem *problem, const char *name, const char *value, char *error, size_t bytes);
/* Bytes of all tensors of the problem, gradients included. */
int64_t problem_bytes(const struct problem *problem);
/* One sentence a field, for --help: name, values, meaning. False when there is no field `i`. */
bool problem_field(int i, const char **name, const char **values, const char **meaning);

/* 2 when h has a gate and an up half, else 1. */
int64_t problem_halves(const struct problem *problem);
/* Width that the experts see: latent, else hidden. */
int64_t problem_width(const struct problem *problem);
/* True when the layer computes weights from logits: MOE_ENTRY_HIDDEN and MOE_ENTRY_LOGITS. */
bool problem_routed(const struct problem *problem);
