/* SPDX-License-Identifier: Apache-2.0
 *
 * The whole test framework. A file of tests is:
 *     #include "test.h"
 *     TEST(sort_is_stable) { EXPECT(got == want, "expert %d: got %d, want %d", e, got, want); }
 *     TEST_MAIN()
 * Each TEST registers itself; EXPECT prints and goes on, REQUIRE prints and leaves the test. An argument on the command
 * line runs only the tests whose name contains it. Closing line: "N passed, N failed"; exit status 1 if any failed. */
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct test {
  const char *name;
  void (*run)(void);
  struct test *next;
};
static struct test *test_list;
static int test_failures; /* of the running test */

#define TEST(id)                                                      \
  static void test_##id(void);                                        \
  static struct test test_entry_##id = {#id, test_##id, NULL};        \
  __attribute__((constructor)) static void test_register_##id(void) { \
    struct test **tail = &test_list;                                  \
    while (*tail) tail = &(*tail)->next;                              \
    *tail = &test_entry_##id;                                         \
  }                                                                   \
  static void test_##id(void)

#define EXPECT(condition, ...)                                          \
  do {                                                                  \
    if (!(condition) && test_failures++ < 10) {                         \
      printf("  %s:%d: %s is false: ", __FILE__, __LINE__, #condition); \
      printf(__VA_ARGS__);                                              \
      printf("\n");                                                     \
    }                                                                   \
  } while (0)

#define REQUIRE(condition, ...)                    \
  do {                                             \
    const int failures_before_ = test_failures;    \
    EXPECT(condition, __VA_ARGS__);                \
    if (test_failures != failures_before_) return; \
  } while (0)

/* Called before the first test, if set. */
static void (*test_begin)(void) __attribute__((unused));

#define TEST_MAIN()                                                \
  int main(int argc, char **argv) {                                \
    if (test_begin) test_begin();                                  \
    int passed = 0, failed = 0;                                    \
    for (struct test *t = test_list; t; t = t->next) {             \
      if (argc > 1 && strstr(t->name, argv[1]) == NULL) continue;  \
      test_failures = 0;                                           \
      t->run();                                                    \
      printf("%s %s\n", test_failures ? "FAIL" : "ok  ", t->name); \
      fflush(stdout);                                              \
      test_failures ? failed++ : passed++;                         \
    }                                                              \
    printf("%d passed, %d failed\n", passed, failed);              \
    return failed != 0;                                            \
  }

/* Random numbers: splitmix64 on a seed of the test's own, so that every failure repeats. */
static inline uint64_t test_random(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
/* Uniform in [-1,1); variance 1/3. */
static inline float test_uniform(uint64_t *state) {
  return (float)(int64_t)(test_random(state) >> 40) * 0x1p-23f - 1.0f;
}
