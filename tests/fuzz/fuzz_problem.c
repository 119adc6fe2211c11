/* SPDX-License-Identifier: Apache-2.0
 *
 * Problem strings: any text is a problem or gets a sentence; a problem prints as a string that means the same. */
#include "fuzz.h"

#include "../../tools/problem.h"

int fuzz_problem(const uint8_t *data, size_t size) {
  char *text = strndup((const char *)data, size), error[PROBLEM_ERROR] = "";
  char first[PROBLEM_TEXT], second[PROBLEM_TEXT];
  struct problem problem, again;
  if (!problem_parse(text, &problem, error, sizeof error)) {
    fuzz_sentence(error, sizeof error);
    free(text);
    return 0;
  }
  PROMISE(problem_bytes(&problem) >= 0, "a negative number of bytes: %s", text);
  problem_print(&problem, first);
  PROMISE(problem_parse(first, &again, error, sizeof error), "'%s' prints as '%s': %s", text, first, error);
  problem_print(&again, second);
  PROMISE(strcmp(first, second) == 0, "'%s' prints as '%s'", first, second);
  free(text);
  return 0;
}
