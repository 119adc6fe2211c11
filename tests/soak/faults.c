/* SPDX-License-Identifier: Apache-2.0
 *
 * Faults of the caller that CUDA reports come back as a status with a sentence: host pointers, freed pointers, an error that
 * was there before the call. Most of them break the CUDA context for good, so that each has a process of its own, and this
 * one never touches CUDA. In a broken context every call says so, and everything can still be destroyed. */
#include <sys/mman.h>
#include <sys/wait.h>

#include "soak.h"

enum {
  BLOCK_BYTES = 64 << 20, /* large enough that CUDA gives the pages back when it is freed */
  NO_GPU = 77
};

static int in_child(void (*body)(void)) {
  int status = 0;
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    watchdog(60);
    body();
    fflush(stdout);
    _exit(test_failures != 0);
  }
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

static void look_for_gpu(void) {
  if (moe_backend_available(MOE_BACKEND_CUDA) == MOE_OK) return;
  printf("skipped: %s\n0 passed, 0 failed, 1 skipped\n", moe_last_error());
  fflush(stdout);
  _exit(NO_GPU);
}

static void begin_without_contexts(void) {
  if (in_child(look_for_gpu) == NO_GPU) exit(0);
}
/* Stands after the one of twin.h and so has the last word. */
__attribute__((constructor)) static void choose_begin(void) { test_begin = begin_without_contexts; }

#define FAULT(id)                                                            \
  static void fault_##id(void);                                              \
  TEST(id) {                                                                 \
    const int status = in_child(fault_##id);                                 \
    EXPECT(status == 0, "the child ended with %d, -1: by a signal", status); \
  }                                                                          \
  static void fault_##id(void)

/* ---- what is expected */

static moe_status run_once(struct layer *g) {
  moe_status status = moe_forward(g->plan, &g->forward, NULL);
  if (status == MOE_OK) status = moe_backward(g->plan, &g->backward, NULL);
  return status == MOE_OK ? moe_synchronize(gpu, NULL) : status;
}

/* The words of CUDA and the name of its error, behind the name of the call. */
static void expect_broken(moe_status status, const char *call) {
  const char *const sentence = moe_last_error(), *const words = strstr(sentence, ": CUDA: ");
  EXPECT(status == MOE_ERROR_DEVICE, "%s: status %s, wanted device", call, moe_status_name(status));
  EXPECT(words != NULL && words > sentence && strstr(words, "(cudaError") != NULL, "%s: \"%s\"", call,
         sentence);
}

/* Of calls that need not reach the device: if it fails, then in words. */
static void expect_said(moe_status status, const char *call) {
  if (status != MOE_OK) expect_broken(status, call);
}

static void expect_all_broken(struct layer *h, struct layer *g) {
  void *memory = NULL;
  moe_stream stream = NULL;
  moe_context *another = NULL;
  printf("  %s\n", moe_last_error());
  expect_broken(moe_forward(g->plan, &g->forward, NULL), "forward");
  expect_broken(moe_backward(g->plan, &g->backward, NULL), "backward");
  expect_broken(moe_synchronize(gpu, NULL), "synchronize");
  expect_broken(moe_memory_alloc(gpu, 256, &memory), "memory_alloc");
  expect_broken(moe_memory_copy(gpu, h->array[OUT].data, g->array[OUT].data, h->array[OUT].bytes),
                "memory_copy");
  expect_broken(moe_stream_create(gpu, &stream), "stream_create");
  expect_said(moe_warmup(g->plan, NULL), "warmup");
  expect_said(moe_context_create(&another, MOE_BACKEND_CUDA, 0), "context_create");
  EXPECT(memory == NULL && stream == NULL, "a failed call left something");
  gpu_layer_close(g), layer_close(h);
  moe_context_destroy(another), moe_context_destroy(gpu), moe_context_destroy(cpu);
}

static void expect_unharmed(struct layer *h, struct layer *g) {
  gpu_layer_put(g, h, 0);
  OK(run_once(g));
  const char *const differs = first_difference(g, h);
  EXPECT(differs == NULL, "%s", differs ? differs : "");
  gpu_layer_close(g), layer_close(h);
  moe_context_destroy(gpu), moe_context_destroy(cpu);
}

/* Contexts and a layer that has run well once. */
static int begin(struct layer *h, struct layer *g) {
  open_contexts();
  return open_alone(&tiled_ids, 100, 1, h, g);
}
#define BEGIN(h, g) REQUIRE(begin((h), (g)), "no layer to start with")

/* Host memory that not even the host may read. */
static void *forbidden_memory(void) {
  void *const memory = mmap(NULL, BLOCK_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return must(memory == MAP_FAILED ? NULL : memory);
}

/* ---- pointers into the host */

FAULT(x_is_a_host_pointer) {
  struct layer h, g;
  BEGIN(&h, &g);
  g.forward.x = g.backward.x = forbidden_memory();
  expect_broken(run_once(&g), "forward, backward, synchronize");
  expect_all_broken(&h, &g);
}

FAULT(ids_are_a_host_pointer) {
  struct layer h, g;
  BEGIN(&h, &g);
  g.forward.given_ids = forbidden_memory();
  expect_broken(run_once(&g), "forward, backward, synchronize");
  expect_all_broken(&h, &g);
}

FAULT(token_count_is_a_host_pointer) {
  struct layer h, g;
  BEGIN(&h, &g);
  g.forward.token_count = g.backward.token_count = forbidden_memory();
  expect_broken(run_once(&g), "forward, backward, synchronize");
  expect_all_broken(&h, &g);
}

FAULT(out_is_a_host_pointer) {
  struct layer h, g;
  BEGIN(&h, &g);
  g.forward.out = forbidden_memory();
  expect_broken(run_once(&g), "forward, backward, synchronize");
  expect_all_broken(&h, &g);
}

/* No fault where the device reads all of the host's memory: then the result must be right. */
FAULT(x_is_an_ordinary_host_pointer) {
  struct layer h, g;
  int no_fault = 0;
  BEGIN(&h, &g);
  DONE(device_reads_host(&no_fault));
  g.forward.x = g.backward.x = h.array[X].data;
  if (no_fault) {
    printf("  this device reads host memory\n");
    expect_unharmed(&h, &g);
  } else {
    expect_broken(run_once(&g), "forward, backward, synchronize");
    expect_all_broken(&h, &g);
  }
}

/* ---- freed pointers */

FAULT(x_was_freed) {
  struct layer h, g;
  BEGIN(&h, &g);
  void *const block = on_gpu(BLOCK_BYTES);
  moe_memory_free(gpu, block);
  g.forward.x = g.backward.x = block;
  expect_broken(run_once(&g), "forward, backward, synchronize");
  expect_all_broken(&h, &g);
}

FAULT(x_was_freed_after_it_was_recorded) {
  struct layer h, g;
  BEGIN(&h, &g);
  void *const block = on_gpu(BLOCK_BYTES);
  const moe_stream stream = new_stream();
  g.forward.x = g.backward.x = block;
  moe_graph *const graph = recorded(&g, stream);
  REQUIRE(graph != NULL, "no graph");
  moe_memory_free(gpu, block);
  const moe_status launched = moe_graph_launch(graph, stream);
  expect_broken(launched != MOE_OK ? launched : moe_synchronize(gpu, stream), "graph_launch, synchronize");
  moe_graph_destroy(graph);
  moe_stream_destroy(gpu, stream);
  expect_broken(moe_synchronize(gpu, NULL), "synchronize");
  expect_all_broken(&h, &g);
}

/* ---- errors that others made before */

FAULT(the_context_was_broken_before) {
  struct layer h, g;
  BEGIN(&h, &g);
  DONE(device_trap());
  expect_broken(moe_forward(g.plan, &g.forward, NULL), "forward");
  expect_all_broken(&h, &g);
}

FAULT(the_context_breaks_before_ours_is_made) {
  DONE(device_trap());
  moe_context *ctx = NULL;
  void *memory = NULL;
  moe_status status = moe_context_create(&ctx, MOE_BACKEND_CUDA, 0);
  EXPECT((status == MOE_OK) == (ctx != NULL), "status %s, context %p", moe_status_name(status), (void *)ctx);
  if (status == MOE_OK) status = moe_memory_alloc(ctx, 256, &memory);
  expect_broken(status, "context_create, memory_alloc");
  printf("  %s\n", moe_last_error());
  moe_context_destroy(ctx);
}

FAULT(an_error_that_is_not_ours_does_no_harm) {
  struct layer h, g;
  BEGIN(&h, &g);
  DONE(device_refuse());
  expect_unharmed(&h, &g);
}

/* ---- refusals after which all is well */

FAULT(more_memory_than_there_is) {
  struct layer h, g;
  void *memory = NULL;
  BEGIN(&h, &g);
  REFUSED(moe_memory_alloc(gpu, (size_t)1 << 60, &memory), MEMORY, "memory_alloc: CUDA: ");
  printf("  %s\n", moe_last_error());
  expect_unharmed(&h, &g);
}

FAULT(x_is_not_aligned) {
  struct layer h, g;
  BEGIN(&h, &g);
  g.forward.x = (const char *)g.array[X].data + 2;
  REFUSED(moe_forward(g.plan, &g.forward, NULL), ARGUMENT, "aligned to 16 bytes");
  g.forward.x = g.array[X].data;
  expect_unharmed(&h, &g);
}

TEST_MAIN()
