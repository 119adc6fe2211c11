/* SPDX-License-Identifier: Apache-2.0
 *
 * The table behind problem.c: one row a field. A field knows how to be set from its value and how to be printed; the
 * round says when it is applied, whatever its place in the string. */
#pragma once

#include "problem.h"

struct reply { /* where the sentence of a refusal goes */
  char *text;
  size_t bytes;
};

enum kind {
  SIZE,
  REAL,
  FLAG,
  CHOICE,
  SPECIAL
};
/* A preset first, then what resets other fields (activation, entry), then the rest. */
enum round {
  ROUND_PRESET,
  ROUND_RESET,
  ROUND_REST,
  ROUND_COUNT
};

struct field {
  const char *name;
  enum kind kind;
  enum round round;
  size_t offset; /* of an int64_t (SIZE), float (REAL) or int (FLAG, CHOICE) in struct problem */
  int64_t min;
  int64_t max;
  const char *values; /* CHOICE: the words in the order of their values, separated by '|'; else for people */
  const char *meaning;
  bool (*set)(struct problem *problem, const char *value, struct reply *reply); /* SPECIAL */
  void (*print)(const struct problem *problem,
                char *value); /* SPECIAL: leaves "" where there is nothing to say */
};

extern const struct field problem_fields[];
extern const int problem_field_count;

bool problem_field_set(const struct field *field, struct problem *problem, const char *value,
                       struct reply *reply);
/* `value` holds PROBLEM_PATH bytes. */
void problem_field_print(const struct field *field, const struct problem *problem, char *value);
/* Writes the sentence; returns false. */
bool problem_refuse(struct reply *reply, const char *format, ...) __attribute__((format(printf, 2, 3)));
