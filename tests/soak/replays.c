/* SPDX-License-Identifier: Apache-2.0
 *
 * A graph of forward and backward launched up to 10^5 times, each time with other ids, another number of tokens and other
 * contents, gives the bits of eager calls wherever one looks. Contents are put together on the device from parts
 * that lie there, in the order of the stream, so that launches follow each other without a wait; one in ten or so is looked
 * at, which also shows what the others left behind. */
#include "soak.h"

enum {
  REPLAYS = 100000,
  SAMPLE = 10, /* one in so many */
  BATCHES = 16,
  TOKENS = 300,
  NUMBERS = TOKENS + 3 /* 0 .. TOKENS, more than there are, fewer than none */
};

struct replayer {
  const struct layer_case *c;
  struct layer h, g;
  void *batch[BATCHES][FIRST_OUTPUT]; /* on the device, as `counts` */
  int32_t *counts, *count;
  moe_stream stream;
  moe_graph *graph;
  uint64_t seed;
  int64_t replays, samples;
};

static void open_batches(struct replayer *r) {
  for (int b = 0; b < BATCHES; b++) {
    struct layer part;
    OPEN(&part, r->c, o.tokens = TOKENS, o.seed = (uint64_t)b + 2);
    for (int id = 0; id < FIRST_OUTPUT; id++) {
      const struct layer_array *const a = &part.array[id];
      if (a->data == NULL) continue;
      r->batch[b][id] = on_gpu(a->bytes);
      OK(moe_memory_copy(gpu, r->batch[b][id], a->data, a->bytes));
    }
    layer_close(&part);
  }
}

static void open_counts(struct replayer *r) {
  int32_t counts[NUMBERS];
  for (int i = 0; i <= TOKENS; i++) counts[i] = i;
  counts[TOKENS + 1] = TOKENS + 7, counts[TOKENS + 2] = -3;
  r->counts = on_gpu(sizeof counts), r->count = on_gpu(sizeof *r->count);
  OK(moe_memory_copy(gpu, r->counts, counts, sizeof counts));
  OK(moe_memory_copy(gpu, r->count, &counts[TOKENS], sizeof *counts));
  r->g.forward.token_count = r->g.backward.token_count = r->count;
}

static void open_replayer(struct replayer *r, const struct layer_case *c) {
  *r = (struct replayer){.c = c, .seed = 11};
  OPEN(&r->h, c, o.tokens = TOKENS, o.seed = 1);
  gpu_layer_open(&r->g, &r->h);
  open_batches(r);
  open_counts(r);
  r->stream = new_stream();
  r->graph = recorded(&r->g, r->stream);
}

static void close_replayer(struct replayer *r) {
  moe_graph_destroy(r->graph);
  moe_stream_destroy(gpu, r->stream);
  for (int b = 0; b < BATCHES; b++)
    for (int id = 0; id < FIRST_OUTPUT; id++) moe_memory_free(gpu, r->batch[b][id]);
  moe_memory_free(gpu, r->counts), moe_memory_free(gpu, r->count);
  gpu_layer_close(&r->g), layer_close(&r->h);
}

static void queue_copy(struct replayer *r, void *dst, const void *src, size_t bytes) {
  const moe_copy_args args = {.size = sizeof args, .dst = dst, .src = src, .bytes = bytes};
  OK(moe_copy(gpu, &args, r->stream));
}

/* Every input from a batch of its own. */
static void change_contents(struct replayer *r) {
  for (int id = 0; id < FIRST_OUTPUT; id++)
    if (r->g.array[id].data != NULL)
      queue_copy(r, r->g.array[id].data, r->batch[test_random(&r->seed) % BATCHES][id], r->g.array[id].bytes);
  queue_copy(r, r->count, r->counts + test_random(&r->seed) % NUMBERS, sizeof *r->count);
}

static void poison(struct replayer *r) {
  OK(moe_synchronize(gpu, r->stream));
  for (int id = FIRST_OUTPUT; id < LAYER_ARRAY_COUNT; id++)
    if (r->g.array[id].data != NULL)
      OK(moe_memory_fill(gpu, r->g.array[id].data, 0xff, r->g.array[id].bytes));
}

/* The same inputs by a launch and by calls one by one. */
static void look(struct replayer *r) {
  watchdog(60);
  poison(r);
  OK(moe_graph_launch(r->graph, r->stream));
  OK(moe_synchronize(gpu, r->stream));
  gpu_layer_get(&r->g, &r->h);
  poison(r);
  gpu_layer_run(&r->g, r->stream);
  OK(moe_synchronize(gpu, r->stream));
  const char *const differs = first_difference(&r->g, &r->h);
  EXPECT(differs == NULL, "%s, replay %lld: %s", r->c->name, (long long)r->replays, differs ? differs : "");
  r->samples++;
}

static void replay_until(struct replayer *r, int64_t replays, double end) {
  for (; r->replays < replays && test_failures == 0 && seconds_now() < end; r->replays++) {
    change_contents(r);
    if (test_random(&r->seed) % SAMPLE == 0)
      look(r);
    else
      OK(moe_graph_launch(r->graph, r->stream));
  }
  OK(moe_synchronize(gpu, r->stream));
}

static void soak(const struct layer_case *c) {
  struct replayer r;
  const double end = seconds_now() + seconds_each(2);
  watchdog(120);
  open_replayer(&r, c);
  REQUIRE(r.graph != NULL && test_failures == 0, "%s: no graph", c->name);
  replay_until(&r, REPLAYS / 100, end);
  const struct level before = level_now();
  replay_until(&r, REPLAYS, end);
  expect_flat(before, c->name);
  EXPECT(r.samples > 0, "%s: no replay was looked at", c->name);
  printf("  %s: %lld of %d replays, %lld compared with eager calls\n", c->name, (long long)r.replays, REPLAYS,
         (long long)r.samples);
  watchdog(60);
  close_replayer(&r);
  watchdog(0);
}

TEST(replays_of_given_ids) { soak(&tiled_ids); }
TEST(replays_of_a_whole_layer) { soak(&tiled_router); }

TEST_MAIN()
