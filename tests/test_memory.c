/* SPDX-License-Identifier: Apache-2.0
 *
 * What: memory, streams and timers of a context, on the CPU.
 * Idea: bytes that go in come out, blocks do not overlap, every refusal has its sentence. */
#include <time.h>

#include "../src/backend.h"
#include "../src/util.h"
#include "moeblas_ops.h"
#include "support.h"
#include "test.h"

TEST(blocks_are_aligned_and_apart) {
  moe_context *ctx = cpu_context(1);
  static const size_t sizes[] = {0, 1, 255, 256, 257, 100000};
  enum {
    COUNT = sizeof sizes / sizeof *sizes
  };
  unsigned char *block[COUNT];
  for (int i = 0; i < COUNT; i++) {
    void *memory;
    REQUIRE(moe_memory_alloc(ctx, sizes[i], &memory) == MOE_OK, "%s", moe_last_error());
    block[i] = memory;
    EXPECT(memory != NULL && (uintptr_t)memory % 256 == 0, "address %p", memory);
    EXPECT(moe_memory_fill(ctx, memory, 0x100 + i, sizes[i]) == MOE_OK, "%s", moe_last_error());
  }
  for (int i = 0; i < COUNT; i++) {
    for (size_t j = 0; j < sizes[i]; j++) REQUIRE(block[i][j] == i, "byte %zu of block %d", j, i);
    moe_memory_free(ctx, block[i]);
  }
  moe_memory_free(ctx, NULL);
  moe_context_destroy(ctx);
}

TEST(copies_every_byte_and_no_more) {
  moe_context *ctx = cpu_context(1);
  char from[9] = "12345678", to[9] = "abcdefgh";
  EXPECT(moe_memory_copy(ctx, to + 2, from, 3) == MOE_OK, "%s", moe_last_error());
  EXPECT(strcmp(to, "ab123fgh") == 0, "%s", to);
  EXPECT(moe_memory_copy(ctx, NULL, NULL, 0) == MOE_OK, "nothing to copy");
  EXPECT(moe_synchronize(ctx, NULL) == MOE_OK, "%s", moe_last_error());
  moe_context_destroy(ctx);
}

TEST(a_timer_measures_a_pause) {
  moe_context *ctx = cpu_context(1);
  moe_timer *a, *b;
  REQUIRE(moe_timer_create(ctx, &a) == MOE_OK && moe_timer_create(ctx, &b) == MOE_OK, "%s", moe_last_error());
  double us = -1;
  EXPECT(moe_timer_record(a, NULL) == MOE_OK, "%s", moe_last_error());
  EXPECT(moe_timer_elapsed_us(a, b, &us) == MOE_ERROR_ARGUMENT, "b was not recorded");
  nanosleep(&(struct timespec){.tv_nsec = 3000000}, NULL);
  EXPECT(moe_timer_record(b, NULL) == MOE_OK, "%s", moe_last_error());
  EXPECT(moe_timer_elapsed_us(a, b, &us) == MOE_OK && us >= 3000 && us < 60e6, "%g us", us);
  moe_timer_destroy(a), moe_timer_destroy(b), moe_timer_destroy(NULL);
  moe_context_destroy(ctx);
}

TEST(the_cpu_has_one_stream_and_no_graphs) {
  moe_context *ctx = cpu_context(1);
  moe_stream stream = (moe_stream)(void *)ctx;
  moe_graph *graph = (moe_graph *)(void *)ctx;
  EXPECT(moe_stream_create(ctx, &stream) == MOE_OK && stream == NULL, "%s", moe_last_error());
  moe_stream_destroy(ctx, stream);
  EXPECT(moe_graph_begin(ctx, stream) == MOE_ERROR_UNSUPPORTED &&
             strstr(moe_last_error(), "graph_begin: a context of the cpu back end, wanted one of CUDA") !=
                 NULL,
         "says: %s", moe_last_error());
  EXPECT(moe_graph_end(ctx, stream, &graph) == MOE_ERROR_UNSUPPORTED && graph == NULL, "says: %s",
         moe_last_error());
  EXPECT(moe_graph_launches(graph) == 0, "a graph of nothing");
  moe_graph_destroy(graph);
  moe_context_destroy(ctx);
}

/* A back end whose calls write their result before they fail, as those of CUDA may. */
static moe_status fail_to_allocate(moe_context *ctx, size_t bytes, void **out) {
  *out = ctx;
  return moe_fail(MOE_ERROR_DEVICE, "memory_alloc: %zu bytes: broken", bytes);
}
static moe_status fail_to_create(moe_context *ctx, moe_stream *out) {
  *out = (moe_stream)(void *)ctx;
  return moe_fail(MOE_ERROR_DEVICE, "stream_create: broken");
}

TEST(failed_calls_leave_nothing) {
  struct backend broken = moe_cpu_backend;
  broken.memory_alloc = fail_to_allocate;
  broken.stream_create = fail_to_create;
  moe_context ctx = {.backend = &broken};
  void *memory = &ctx;
  moe_stream stream = (moe_stream)(void *)&ctx;
  REFUSED(moe_memory_alloc(&ctx, 8, &memory), DEVICE, "memory_alloc: 8 bytes: broken");
  REFUSED(moe_stream_create(&ctx, &stream), DEVICE, "stream_create: broken");
  EXPECT(memory == NULL && stream == NULL, "a failed call left something");
}

TEST(refusals_have_a_sentence) {
  moe_context *ctx = cpu_context(1), *other = cpu_context(1);
  moe_stream stream = (moe_stream)(void *)ctx, none;
  moe_timer *a, *b;
  void *memory;
  double us;
  REQUIRE(moe_timer_create(ctx, &a) == MOE_OK && moe_timer_create(other, &b) == MOE_OK, "%s",
          moe_last_error());
  REFUSED(moe_memory_alloc(NULL, 1, &memory), ARGUMENT, "memory_alloc: ctx");
  REFUSED(moe_memory_alloc(ctx, 1, NULL), ARGUMENT, "memory_alloc: out");
  REFUSED(moe_memory_alloc(ctx, SIZE_MAX, &memory), ARGUMENT, "memory_alloc: bytes");
  REFUSED(moe_memory_copy(ctx, &us, NULL, 1), ARGUMENT, "memory_copy: dst or src");
  REFUSED(moe_memory_copy(NULL, &us, &us, 0), ARGUMENT, "memory_copy: ctx");
  REFUSED(moe_memory_fill(ctx, NULL, 0, 1), ARGUMENT, "memory_fill: dst");
  REFUSED(moe_synchronize(ctx, stream), ARGUMENT, "synchronize: stream");
  REFUSED(moe_synchronize(NULL, NULL), ARGUMENT, "synchronize: ctx");
  REFUSED(moe_stream_create(ctx, NULL), ARGUMENT, "stream_create: out");
  REFUSED(moe_stream_create(NULL, &none), ARGUMENT, "stream_create: ctx");
  REFUSED(moe_graph_begin(NULL, stream), ARGUMENT, "graph_begin: ctx");
  REFUSED(moe_graph_end(ctx, stream, NULL), ARGUMENT, "graph_end: out");
  REFUSED(moe_graph_launch(NULL, stream), ARGUMENT, "graph_launch: graph");
  REFUSED(moe_timer_create(ctx, NULL), ARGUMENT, "timer_create: out");
  REFUSED(moe_timer_record(NULL, NULL), ARGUMENT, "timer_record: timer");
  REFUSED(moe_timer_record(a, stream), ARGUMENT, "timer_record: stream");
  REFUSED(moe_timer_elapsed_us(a, NULL, &us), ARGUMENT, "timer_elapsed_us: from");
  REFUSED(moe_timer_elapsed_us(a, b, &us), ARGUMENT, "two contexts");
  moe_timer_destroy(a), moe_timer_destroy(b);
  moe_context_destroy(ctx), moe_context_destroy(other);
}

TEST_MAIN()
