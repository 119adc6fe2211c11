/* SPDX-License-Identifier: Apache-2.0
 *
 * The whole layer, both passes: called (`moeblas`), recorded as one graph and replayed (`moeblas-graph`), and called with
 * a rising number of tokens, which must not get faster. */
#include "bench.h"

static const double slack = 1.15; /* a larger batch may take this much less time */

/* ---- what a pass does ------------------------------------------------------------------------------------------ */

static struct load load_of(const struct run *run) {
  const struct problem *p = &run->sample->problem;
  const int32_t *slot_row = run_data(run, T_SLOT_ROW), *counts = run_data(run, T_COUNTS);
  const int32_t *offset = run_data(run, T_ROW_OFFSET);
  struct load load = {0};
  for (int64_t i = 0; slot_row && i < p->tokens * p->config.topk; i++) load.rows += slot_row[i] >= 0;
  for (int64_t e = 0; e < p->config.experts; e++)
    load.experts += (counts ? counts[e] : offset[e + 1] - offset[e]) > 0;
  if (offset) load.rows = offset[p->config.experts];
  return load;
}

/* Forward; backward is twice that. The router is left out, as is usual. */
static double layer_flops(const struct problem *p, const struct load *load) {
  const moe_config *c = &p->config;
  const double products = (double)problem_halves(p) + 1, tokens = (double)p->tokens,
               hidden = (double)c->hidden;
  return 2 * products * load->rows * (double)problem_width(p) * (double)c->inter +
         2 * products * tokens * hidden * (double)c->shared_inter + 4 * tokens * hidden * (double)c->latent;
}

static double layer_bytes(const struct problem *p, const struct load *load, bool backward) {
  const moe_config *c = &p->config;
  const double element = (double)moe_dtype_bytes(c->dtype), halves = (double)problem_halves(p);
  const double grad = (double)moe_dtype_bytes(c->grad_dtype ? c->grad_dtype : c->dtype);
  const double width = (double)problem_width(p), hidden = (double)c->hidden, tokens = (double)p->tokens;
  const double dense = (halves + 1) * (double)c->shared_inter * hidden + 2 * (double)c->latent * hidden;
  const double expert = (halves + 1) * (double)c->inter * width;
  const double h = c->recompute ? 0 : load->rows * halves * (double)c->inter;
  const double read =
      element * (load->experts * expert + dense + 2 * tokens * hidden + (p->backward ? h : 0));
  return backward ? read + element * tokens * hidden + grad * ((double)c->experts * expert + dense) : read;
}

/* All memory of a pass but its inputs: saved, workspace, and every result there is by then. */
static double layer_mib(const struct run *run, bool backward) {
  size_t bytes = run->saved_bytes + run->workspace_bytes;
  for (int id = T_INPUTS; id < (backward ? T_RESULTS : T_DX); id++) bytes += run->span[id].bytes;
  return (double)bytes / (1 << 20);
}

/* ---- a pass ---------------------------------------------------------------------------------------------------- */

struct pass {
  const char *name;
  bench_call call;
};
static moe_status call_forward(void *run) { return run_forward(run); }
static moe_status call_backward(void *run) { return run_backward(run); }
static const struct pass passes[] = {{"fwd", call_forward}, {"bwd", call_backward}};

/* From the reports of a forward pass of its own, which the ops, timed later, start from too. */
static moe_status take_load(struct run *run, struct load *load) {
  run->bare = false;
  moe_status status = run_forward(run);
  run->bare = true;
  if (status == MOE_OK) status = run_fetch_tensor(run, T_SLOT_ROW);
  if (status == MOE_OK) status = run_fetch_tensor(run, T_COUNTS);
  if (status == MOE_OK) *load = load_of(run);
  return status;
}

/* What is known of a pass besides its time. Pass 0 also finds the load, which pass 1 is counted by. */
static moe_status describe(struct run *run, int pass, struct load *load, struct bench_line *line) {
  const struct problem *p = &run->sample->problem;
  const moe_status status = pass == 0 ? take_load(run, load) : MOE_OK;
  line->pass = passes[pass].name;
  line->flops = layer_flops(p, load) * (pass + 1);
  line->bytes = layer_bytes(p, load, pass);
  line->peak_mib = layer_mib(run, pass);
  return status;
}

/* ---- as a graph ------------------------------------------------------------------------------------------------ */

struct replay {
  moe_graph *graph;
  moe_stream stream;
};
static moe_status call_replay(void *replay) {
  return moe_graph_launch(((struct replay *)replay)->graph, ((struct replay *)replay)->stream);
}

static moe_status record(struct bench *bench, struct run *run, int pass, moe_graph **graph) {
  moe_status status = moe_graph_begin(bench->ctx, bench->side);
  if (status != MOE_OK) return status;
  run->stream = bench->side;
  const moe_status called = passes[pass].call(run);
  run->stream = NULL;
  status = moe_graph_end(bench->ctx, bench->side, graph);
  return called == MOE_OK ? status : called;
}

/* In turns, as calls and as a replay of what they launch. */
static moe_status time_pass(struct bench *bench, struct run *run, int pass, struct load *load,
                            struct bench_line *eager, struct bench_line *graph) {
  struct replay replay = {NULL, bench->side};
  *eager = (struct bench_line){.impl = "moeblas"};
  moe_status status = record(bench, run, pass, &replay.graph);
  const bool refused = status == MOE_ERROR_UNSUPPORTED;
  const char *sentence = refused ? moe_last_error() : NULL;
  struct timing replayed = {0};
  const struct timed timed[] = {{passes[pass].call, run, NULL, &eager->time},
                                {call_replay, &replay, bench->side, &replayed}};
  if (status == MOE_OK || refused) status = bench_time_turns(bench, timed, refused ? 1 : 2);
  eager->launches = moe_graph_launches(replay.graph);
  moe_graph_destroy(replay.graph);
  if (status == MOE_OK) status = describe(run, pass, load, eager);
  *graph = *eager;
  graph->impl = "moeblas-graph";
  graph->time = replayed;
  graph->refused = sentence;
  return status;
}

int bench_layer(struct bench *bench, const char *problem, struct run *run, struct load *load) {
  moe_status status = moe_warmup(run->plan, NULL);
  for (int pass = 0; status == MOE_OK && pass <= run->sample->problem.backward; pass++) {
    struct bench_line eager, graph;
    status = time_pass(bench, run, pass, load, &eager, &graph);
    if (status != MOE_OK) break;
    bench_report(bench, problem, &eager);
    bench_report(bench, problem, &graph);
  }
  return status == MOE_OK ? CLI_GO_ON : cli_fail_status("bench", status);
}

/* ---- with a rising number of tokens ---------------------------------------------------------------------------- */

/* 1, 2, 3, 4, 6, 8, 12, ...: a step is between a third and the half. */
static int64_t next_tokens(int64_t tokens, int64_t last) {
  const int64_t step = (tokens & (tokens - 1)) == 0 ? tokens / 2 : tokens / 3;
  const int64_t next = tokens + (step ? step : 1);
  return tokens < last && next > last ? last : next;
}

struct peak {
  int64_t tokens;
  double us;
};

static void check_climb(struct bench *bench, const struct bench_line *line, int64_t tokens,
                        struct peak *peak) {
  if (line->time.median_us * slack < peak->us) {
    cli_fail("bench", 0, "a cliff: %s of t = %lld took %.1f us, of t = %lld only %.1f us", line->pass,
             (long long)peak->tokens, peak->us, (long long)tokens, line->time.median_us);
    bench->cliffs++;
  }
  if (line->time.median_us > peak->us) *peak = (struct peak){tokens, line->time.median_us};
}

int bench_sweep(struct bench *bench, struct sample *sample, struct run *run) {
  struct peak peak[2] = {{0, 0}, {0, 0}};
  struct load load = {0};
  char text[PROBLEM_TEXT];
  if (sample->problem.config.entry == MOE_ENTRY_ROWS)
    return cli_fail("bench", CLI_USAGE, "--sweep: the offsets of rows are for one t; wants another entry");
  moe_status status = moe_warmup(run->plan, NULL);
  for (int64_t t = bench->sweep_from; status == MOE_OK && t <= bench->sweep_to;
       t = next_tokens(t, bench->sweep_to)) {
    sample->problem.tokens = t;
    bench_problem(&sample->problem, text);
    if (!bench->json && !bench->csv) printf("%s\n", text);
    for (int pass = 0; status == MOE_OK && pass <= sample->problem.backward; pass++) {
      struct bench_line line = {.impl = "moeblas"};
      status = bench_time(bench, passes[pass].call, run, &line.time);
      if (status == MOE_OK) status = describe(run, pass, &load, &line);
      if (status != MOE_OK) break;
      bench_report(bench, text, &line);
      check_climb(bench, &line, t, &peak[pass]);
    }
  }
  return status == MOE_OK ? CLI_GO_ON : cli_fail_status("bench", status);
}
