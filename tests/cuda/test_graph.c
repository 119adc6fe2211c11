/* SPDX-License-Identifier: Apache-2.0
 *
 * Forward and backward recorded once as a graph and launched again with other contents give the bits of the same calls made
 * one by one; also where two layers share a workspace, and where two streams are busy at once. */
#include "gpu_layer.h"

static moe_stream new_stream(void) {
  moe_stream stream = NULL;
  OK(moe_stream_create(gpu, &stream));
  return stream;
}

static moe_graph *recorded(struct layer *const *layers, int count, moe_stream stream) {
  moe_graph *graph = NULL;
  OK(moe_graph_begin(gpu, stream));
  for (int i = 0; i < count; i++) OK(moe_forward(layers[i]->plan, &layers[i]->forward, stream));
  for (int i = count - 1; i >= 0; i--) OK(moe_backward(layers[i]->plan, &layers[i]->backward, stream));
  OK(moe_graph_end(gpu, stream, &graph));
  return graph;
}

/* What is on the device now is what h holds, bit by bit. */
static void expect_same(const struct layer *g, const struct layer *h, const char *what, int run) {
  for (int id = 0; id < SAVED; id++) {
    const struct layer_array *a = &h->array[id];
    if (a->data == NULL || (id < FIRST_OUTPUT && id != GLOBAL_COUNTS)) continue;
    unsigned char *now = must(malloc(a->bytes + 1));
    OK(moe_memory_copy(gpu, now, g->array[id].data, a->bytes));
    EXPECT(memcmp(now, a->data, a->bytes) == 0, "%s, run %d: %s differs", what, run, a->name);
    free(now);
  }
}

/* ---- one layer, other contents in every launch */

static void draw_count(int32_t *device, int64_t tokens, uint64_t *seed) {
  const int32_t counts[] = {0, 1, (int32_t)tokens, (int32_t)tokens + 7, -3};
  const int32_t any = (int32_t)(test_random(seed) % (uint64_t)(tokens + 1));
  const int32_t count = chance(seed, 20) ? counts[test_random(seed) % 5] : any;
  OK(moe_memory_copy(gpu, device, &count, sizeof count));
}

static void replay(const struct layer_case *c, int64_t tokens, int launches) {
  struct layer h, g;
  uint64_t seed = 5;
  OPEN(&h, c, o.tokens = tokens, o.seed = 1);
  gpu_layer_open(&g, &h);
  layer_close(&h);
  int32_t *count = on_gpu(sizeof *count);
  if (c->config.entry != MOE_ENTRY_ROWS) g.forward.token_count = g.backward.token_count = count;
  const moe_stream stream = new_stream();
  moe_graph *graph = recorded((struct layer *[]){&g}, 1, stream);
  REQUIRE(graph != NULL, "%s: no graph", c->name);
  EXPECT(moe_graph_launches(graph) >= 6, "%s: %lld launches", c->name, (long long)moe_graph_launches(graph));
  for (int run = 0; run < launches && test_failures == 0; run++) {
    OPEN(&h, c, o.tokens = tokens, o.seed = (uint64_t)run + 2);
    draw_count(count, tokens, &seed);
    gpu_layer_put(&g, &h, 1);
    gpu_layer_run(&g, stream);
    OK(moe_synchronize(gpu, stream));
    struct layer inputs = h; /* global_counts are overwritten below */
    const struct layer_array *counts = &h.array[GLOBAL_COUNTS];
    void *before = must(malloc(counts->bytes + 1));
    if (counts->bytes > 0) memcpy(before, counts->data, counts->bytes);
    gpu_layer_get(&g, &h);
    inputs.array[GLOBAL_COUNTS].data = counts->bytes > 0 ? before : NULL;
    gpu_layer_put(&g, &inputs, 0);
    OK(moe_graph_launch(graph, stream));
    OK(moe_synchronize(gpu, stream));
    expect_same(&g, &h, c->name, run);
    free(before);
    layer_close(&h);
  }
  printf("  %s: a graph of %lld launches\n", c->name, (long long)moe_graph_launches(graph));
  moe_graph_destroy(graph);
  moe_stream_destroy(gpu, stream);
  moe_memory_free(gpu, count);
  gpu_layer_close(&g);
}

TEST(a_thousand_launches_of_given_ids) { replay(&tiled_ids, 300, 1000); }
TEST(a_thousand_launches_of_a_whole_layer) { replay(&tiled_router, 200, 1000); }

static void replay_few(const struct layer_case *c) { replay(c, 33, 10); }
TEST(every_case_of_the_layer) { EACH_CASE(replay_few, 1); }

/* ---- several layers at once */

/* Opens `count` layers and leaves in their host halves what each gives alone. */
static void open_alone(const struct layer_case *const *cases, int count, int64_t tokens, struct layer *h,
                       struct layer *g) {
  for (int i = 0; i < count; i++) {
    struct layer_options o = {.tokens = tokens, .seed = 40 + (uint64_t)i, .without = cases[i]->without};
    if (layer_open(&h[i], &cases[i]->config, &o) != MOE_OK) exit(2);
    gpu_layer_open(&g[i], &h[i]);
    gpu_layer_run(&g[i], NULL);
    OK(moe_synchronize(gpu, NULL));
    gpu_layer_get(&g[i], &h[i]);
    gpu_layer_put(&g[i], &h[i], 0);
  }
}

static const struct layer_case *const both[] = {&tiled_ids, &tiled_router};

TEST(two_layers_share_a_workspace) {
  struct layer h[2], g[2];
  open_alone(both, 2, 500, h, g);
  const int larger = g[1].array[WORKSPACE].bytes > g[0].array[WORKSPACE].bytes;
  for (int i = 0; i < 2; i++) {
    g[i].forward.workspace = g[i].backward.workspace = g[larger].array[WORKSPACE].data;
    g[i].forward.workspace_bytes = g[i].backward.workspace_bytes = g[larger].array[WORKSPACE].bytes;
  }
  const moe_stream stream = new_stream();
  moe_graph *graph = recorded((struct layer *[]){&g[0], &g[1]}, 2, stream);
  for (int run = 0; run < 50 && graph != NULL; run++) {
    for (int i = 0; i < 2; i++) gpu_layer_put(&g[i], &h[i], 0);
    OK(moe_graph_launch(graph, stream));
    OK(moe_synchronize(gpu, stream));
    for (int i = 0; i < 2; i++) expect_same(&g[i], &h[i], both[i]->name, run);
  }
  moe_graph_destroy(graph);
  moe_stream_destroy(gpu, stream);
  for (int i = 0; i < 2; i++) gpu_layer_close(&g[i]), layer_close(&h[i]);
}

TEST(two_streams_at_once) {
  enum {
    STREAMS = 2,
    RUNS = 40
  };
  struct layer h[STREAMS], g[STREAMS];
  moe_stream stream[STREAMS];
  moe_graph *graph[STREAMS];
  open_alone(both, STREAMS, 3000, h, g);
  for (int i = 0; i < STREAMS; i++) {
    stream[i] = new_stream();
    graph[i] = recorded((struct layer *[]){&g[i]}, 1, stream[i]);
    REQUIRE(graph[i] != NULL, "no graph");
  }
  for (int graphs = 0; graphs < 2; graphs++) {
    for (int i = 0; i < STREAMS; i++) gpu_layer_put(&g[i], &h[i], 0);
    for (int run = 0; run < RUNS; run++)
      for (int i = 0; i < STREAMS; i++) {
        if (graphs) OK(moe_graph_launch(graph[i], stream[i]));
        if (!graphs) gpu_layer_run(&g[i], stream[i]);
      }
    for (int i = 0; i < STREAMS; i++) OK(moe_synchronize(gpu, stream[i]));
    for (int i = 0; i < STREAMS; i++) expect_same(&g[i], &h[i], both[i]->name, graphs);
  }
  for (int i = 0; i < STREAMS; i++) {
    moe_graph_destroy(graph[i]);
    moe_stream_destroy(gpu, stream[i]);
    gpu_layer_close(&g[i]), layer_close(&h[i]);
  }
}

/* ---- fewer multiprocessors, tiles dealt out as they are wanted */

static void check_use(const struct layer_case *c, int64_t sm_limit, moe_schedule schedule) {
  struct layer h, whole, part;
  open_alone(&c, 1, 700, &h, &whole);
  struct layer limited = h;
  limited.config.sm_limit = sm_limit, limited.config.schedule = schedule;
  gpu_layer_open(&part, &limited);
  const moe_stream stream = new_stream();
  moe_graph *graph = recorded((struct layer *[]){&part}, 1, stream);
  for (int run = 0; run < 20 && graph != NULL; run++) {
    gpu_layer_put(&part, &h, 0);
    if (run % 2) OK(moe_graph_launch(graph, stream));
    if (run % 2 == 0) gpu_layer_run(&part, stream);
    OK(moe_synchronize(gpu, stream));
    expect_same(&part, &h, schedule == MOE_SCHEDULE_DYNAMIC ? "dynamic" : "static", (int)sm_limit);
  }
  moe_graph_destroy(graph);
  moe_stream_destroy(gpu, stream);
  gpu_layer_close(&whole), gpu_layer_close(&part), layer_close(&h);
}

TEST(limits_and_schedules_change_no_bit) {
  const int64_t limits[] = {0, 1, 7, moe_context_units(gpu) / 2};
  for (int i = 0; i < 8; i++)
    for (int both_cases = 0; both_cases < 2; both_cases++)
      check_use(both[both_cases], limits[i / 2], i % 2 ? MOE_SCHEDULE_DYNAMIC : MOE_SCHEDULE_STATIC);
}

/* ---- a recording that fails */

TEST(a_broken_recording_is_reported_and_over) {
  const moe_stream stream = new_stream();
  moe_graph *graph = (moe_graph *)(void *)stream;
  EXPECT(moe_graph_begin(gpu, NULL) == MOE_ERROR_ARGUMENT, "the default stream was recorded");
  OK(moe_graph_begin(gpu, stream));
  EXPECT(moe_graph_begin(gpu, stream) == MOE_ERROR_DEVICE, "recorded twice at once");
  EXPECT(moe_synchronize(gpu, stream) == MOE_ERROR_DEVICE, "waited for work that is only noted down");
  EXPECT(moe_graph_end(gpu, stream, &graph) == MOE_ERROR_DEVICE && graph == NULL, "a graph of that");
  OK(moe_synchronize(gpu, stream));
  OK(moe_graph_begin(gpu, stream));
  OK(moe_graph_end(gpu, stream, &graph));
  EXPECT(graph != NULL && moe_graph_launches(graph) == 0, "%lld launches of nothing",
         (long long)moe_graph_launches(graph));
  OK(moe_graph_launch(graph, stream));
  OK(moe_synchronize(gpu, stream));
  moe_graph_destroy(graph);
  moe_stream_destroy(gpu, stream);
}

TEST_MAIN()
