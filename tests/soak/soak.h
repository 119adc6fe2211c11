/* SPDX-License-Identifier: Apache-2.0
 *
 * What: what the parts of the soak share: the time they have, a watchdog, levels of memory, streams, graphs, bits.
 * Idea: a part is a program of tests as any other; soak.sh gives it its seconds and adds up what it prints.
 * Invariant: nothing waits for the device without a watchdog, which ends the program with a failure. */
#pragma once

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "../cuda/gpu_layer.h"
#include "device.h"

#define DONE(call)                                                      \
  do {                                                                  \
    const char *const words_ = (call);                                  \
    REQUIRE(words_ == NULL, "%s", words_ != NULL ? words_ : "nothing"); \
  } while (0)

static inline double seconds_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* What SOAK_SECONDS says, shared by `tests` tests of the program. */
static inline double seconds_each(int tests) {
  const char *const text = getenv("SOAK_SECONDS");
  const double seconds = text != NULL ? atof(text) : 10;
  return (seconds > 1 ? seconds : 1) / tests;
}

/* ---- watchdog */

static inline void end_of_patience(int number) {
  (void)number;
  static const char words[] = "  the device did not answer in time: a hang\n0 passed, 1 failed\n";
  if (write(STDOUT_FILENO, words, sizeof words - 1) < 0) _exit(4);
  _exit(3);
}

/* The program ends with a failure unless this is called again within so many seconds; 0: no more. */
static inline void watchdog(unsigned seconds) {
  fflush(stdout);
  signal(SIGALRM, end_of_patience);
  alarm(seconds);
}

/* ---- memory */

enum {
  DEVICE_SLACK = 2 << 20, /* what the driver takes at a time */
  HOST_SLACK = 8 << 20    /* and the allocator, from which no block is lost */
};

struct level {
  size_t device_free, host;
};

static inline struct level level_now(void) {
  struct level level = {0};
  long pages = 0;
  const char *const words = device_free_bytes(&level.device_free);
  EXPECT(words == NULL, "%s", words != NULL ? words : "nothing");
  FILE *const file = fopen("/proc/self/statm", "r");
  EXPECT(file != NULL && fscanf(file, "%*d %ld", &pages) == 1, "no memory in /proc/self/statm");
  if (file != NULL) fclose(file);
  level.host = (size_t)pages * (size_t)sysconf(_SC_PAGESIZE);
  return level;
}

/* Neither memory has grown since. */
static inline void expect_flat(struct level before, const char *what) {
  const struct level now = level_now();
  const double device = (double)before.device_free - (double)now.device_free,
               host = (double)now.host - (double)before.host;
  EXPECT(device <= DEVICE_SLACK, "%s: %.0f bytes of the device are gone", what, device);
  EXPECT(host <= HOST_SLACK, "%s: the host has %.0f bytes more", what, host);
  printf("  %s: device memory %+.0f, host memory %+.0f bytes\n", what, device, host);
}

/* ---- streams, graphs, bits */

static inline moe_stream new_stream(void) {
  moe_stream stream = NULL;
  OK(moe_stream_create(gpu, &stream));
  return stream;
}

/* Forward and backward of one layer as a graph; NULL if that failed. */
static inline moe_graph *recorded(struct layer *g, moe_stream stream) {
  moe_graph *graph = NULL;
  OK(moe_graph_begin(gpu, stream));
  gpu_layer_run(g, stream);
  OK(moe_graph_end(gpu, stream, &graph));
  return graph;
}

/* NULL if what is on the device now is what h holds, bit by bit; else the array that differs, or the sentence. Counts
 * nothing, so that threads may ask. */
static inline const char *first_difference(const struct layer *g, const struct layer *h) {
  for (int id = FIRST_OUTPUT; id < SAVED; id++) {
    const struct layer_array *a = &h->array[id];
    if (a->data == NULL) continue;
    unsigned char *now = must(malloc(a->bytes + 1));
    const int failed = moe_memory_copy(gpu, now, g->array[id].data, a->bytes) != MOE_OK;
    const int differs = !failed && memcmp(now, a->data, a->bytes) != 0;
    free(now);
    if (failed) return moe_last_error();
    if (differs) return a->name;
  }
  return NULL;
}

/* Opens a problem on both sides and leaves in the host's half what one eager run alone gives. 0 if it cannot be opened. */
static inline int open_alone(const struct layer_case *c, int64_t tokens, uint64_t seed, struct layer *h,
                             struct layer *g) {
  const struct layer_options o = {.tokens = tokens, .seed = seed, .without = c->without, .threads = 1};
  const moe_status status = layer_open(h, &c->config, &o);
  EXPECT(status == MOE_OK, "%s: %s", c->name, moe_last_error());
  if (status != MOE_OK) return 0;
  gpu_layer_open(g, h);
  gpu_layer_run(g, NULL);
  OK(moe_synchronize(gpu, NULL));
  gpu_layer_get(g, h);
  return test_failures == 0;
}
