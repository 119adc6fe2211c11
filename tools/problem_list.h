/* SPDX-License-Identifier: Apache-2.0
 * Lists of problems: the arguments of check and bench, files of them, and random ones. */
#pragma once

#include "problem.h"

#define PROBLEM_ARGUMENTS "PROBLEM|@FILE..."

/* Called for each problem; returns CLI_GO_ON, or the code to end with. */
typedef int (*problem_visit)(void *context, const struct problem *problem);

/* Each argument is one problem, or @FILE: a problem a line, blank lines and what follows a # left out. All are read before
 * the first is visited, so that a mistake in the last line costs no time. Says what is wrong itself. */
int problem_list(const char *command, char **arguments, int count, problem_visit visit, void *context);
/* A small problem of any kind that the library takes; number n of the sequence of `seed`. */
void problem_random_exact(struct problem *problem, uint64_t seed, uint64_t n); /* of those that are `exact` */
void problem_random(struct problem *problem, uint64_t seed, uint64_t n);
/* Prints the fields of a problem string, for --help. */
void problem_list_help(void);
