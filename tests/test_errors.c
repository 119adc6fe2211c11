/* SPDX-License-Identifier: Apache-2.0
 *
 * What: every sentence of docs/errors.md, word by word.
 * Idea: a refusal is compared with the whole sentence wanted and then looked up on the page; at the end every row
 * marked "test" must have been met, and no sentence may be missing from the page. */
#include "error_page.h"

#include <inttypes.h>
#include <math.h>

#include "failing_device.h"
#include "plan.h"
#include "support.h"

/* ---- memory that runs out on demand */

static int allocations_left = -1; /* -1: no end to it */
void *__real_moe_host_alloc(size_t bytes);
void *__wrap_moe_host_alloc(size_t bytes);

void *__wrap_moe_host_alloc(size_t bytes) {
  if (allocations_left == 0) return NULL;
  if (allocations_left > 0) allocations_left--;
  return __real_moe_host_alloc(bytes);
}

/* ---- names, contexts, memory, time */

static void names_and_contexts(void) {
  moe_context *ctx;
  moe_activation kind;
  int gated;
  SAYS(moe_activation_find(NULL, &kind, &gated), ARGUMENT,
       "activation_find: name, kind or gated = NULL, wanted all three");
  SAYS(moe_activation_find("swishy", &kind, &gated), ARGUMENT,
       "activation_find: name = \"swishy\", wanted a name of moeblas_act.def");
  SAYS(moe_backend_available((moe_backend)9), ARGUMENT,
       "context: backend = 9, wanted MOE_BACKEND_AUTO, _CPU or _CUDA");
  SAYS(moe_context_create(NULL, MOE_BACKEND_CPU, 0), ARGUMENT,
       "context: out = NULL, wanted a place for the context");
  SAYS(moe_context_create(&ctx, MOE_BACKEND_CPU, 1025), ARGUMENT,
       "context: device = 1025, wanted a number of threads 0 .. 1024 for the CPU");
  setenv("MOE_CPU_ISA", "neon", 1);
  SAYS(moe_context_create(&ctx, MOE_BACKEND_CPU, 1), UNSUPPORTED,
       "cpu: MOE_CPU_ISA = neon, wanted base, avx2 or avx512 as built");
  setenv("MOE_CPU_ISA", "avx512", 1);
  if (moe_context_create(&ctx, MOE_BACKEND_CPU, 1) == MOE_OK)
    moe_context_destroy(ctx);
  else
    look_up("UNSUPPORTED", moe_last_error());
  unsetenv("MOE_CPU_ISA");
  if (moe_backend_available(MOE_BACKEND_CUDA) != MOE_OK) look_up("UNSUPPORTED", moe_last_error());
}

static void memory(void) {
  moe_context *ctx = cpu_context(1);
  moe_timer *timer;
  void *block;
  char byte;
  allocations_left = 0;
  SAYS(moe_memory_alloc(ctx, 7, &block), MEMORY, "memory_alloc: no memory for 7 bytes");
  SAYS(moe_timer_create(ctx, &timer), MEMORY, "timer_create: no memory for 24 bytes");
  allocations_left = 1;
  SAYS(moe_timer_create(ctx, &timer), MEMORY, "timer_create: no memory for %zu bytes",
       sizeof(struct timespec));
  allocations_left = -1;
  SAYS(moe_memory_alloc(ctx, 7, NULL), ARGUMENT, "memory_alloc: out = NULL, wanted a place for the pointer");
  SAYS(moe_memory_alloc(NULL, 7, &block), ARGUMENT, "memory_alloc: ctx = NULL, wanted a context");
  SAYS(moe_memory_alloc(ctx, SIZE_MAX, &block), ARGUMENT, "memory_alloc: bytes = %zu, wanted at most %td",
       SIZE_MAX, (ptrdiff_t)PTRDIFF_MAX);
  SAYS(moe_memory_copy(ctx, NULL, &byte, 1), ARGUMENT,
       "memory_copy: dst or src = NULL, wanted both for 1 bytes");
  SAYS(moe_memory_fill(ctx, NULL, 0, 5), ARGUMENT, "memory_fill: dst = NULL, wanted 5 bytes");
  SAYS(moe_synchronize(ctx, (moe_stream)(void *)&byte), ARGUMENT,
       "synchronize: stream is given, wanted NULL for the CPU");
  moe_context_destroy(ctx);
}

static void timers(void) {
  moe_context *ctx = cpu_context(1), *other = cpu_context(1);
  moe_timer *a, *b;
  double us;
  SAYS(moe_timer_create(ctx, NULL), ARGUMENT, "timer_create: out = NULL, wanted a place for the timer");
  SAYS(moe_timer_record(NULL, NULL), ARGUMENT, "timer_record: timer = NULL, wanted a timer");
  REQUIRE(moe_timer_create(ctx, &a) == MOE_OK && moe_timer_create(other, &b) == MOE_OK, "no timers");
  SAYS(moe_timer_elapsed_us(a, NULL, &us), ARGUMENT,
       "timer_elapsed_us: from, to or out = NULL, wanted two timers and a place for the time");
  SAYS(moe_timer_elapsed_us(a, b, &us), ARGUMENT,
       "timer_elapsed_us: timers of two contexts, wanted two of one");
  SAYS(moe_timer_elapsed_us(a, a, &us), ARGUMENT,
       "timer_elapsed_us: a timer was never recorded, wanted two that were");
  moe_timer_destroy(a), moe_timer_destroy(b);
  moe_context_destroy(ctx), moe_context_destroy(other);
}

static void streams(void) {
  moe_context *ctx = cpu_context(1);
  moe_stream stream;
  moe_graph *graph;
  SAYS(moe_stream_create(ctx, NULL), ARGUMENT, "stream_create: out = NULL, wanted a place for the stream");
  SAYS(moe_stream_create(NULL, &stream), ARGUMENT, "stream_create: ctx = NULL, wanted a context");
  SAYS(moe_graph_begin(NULL, NULL), ARGUMENT, "graph_begin: ctx = NULL, wanted a context");
  SAYS(moe_graph_begin(ctx, NULL), UNSUPPORTED,
       "graph_begin: a context of the cpu back end, wanted one of CUDA: the others have no graphs");
  SAYS(moe_graph_end(ctx, NULL, NULL), ARGUMENT, "graph_end: out = NULL, wanted a place for the graph");
  SAYS(moe_graph_end(NULL, NULL, &graph), ARGUMENT, "graph_end: ctx = NULL, wanted a context");
  SAYS(moe_graph_launch(NULL, NULL), ARGUMENT, "graph_launch: graph = NULL, wanted a graph");
  moe_context_destroy(ctx);
}

/* The CPU has none: on a back end that has. */
static void graphs(void) {
  moe_context *ctx = cpu_context(1);
  moe_graph *graph;
  moe_stream stream;
  fail_on(ctx);
  SAYS(moe_graph_begin(ctx, NULL), ARGUMENT,
       "graph_begin: stream = NULL, wanted one of moe_stream_create: the default stream cannot be recorded");
  REQUIRE(moe_stream_create(ctx, &stream) == MOE_OK && moe_graph_begin(ctx, stream) == MOE_OK, "%s",
          moe_last_error());
  const int held = device.held;
  allocations_left = 0;
  SAYS(moe_graph_end(ctx, stream, &graph), MEMORY, "graph_end: no memory for 24 bytes");
  allocations_left = -1;
  EXPECT(device.held == held && graph == NULL, "what was recorded is kept");
  moe_stream_destroy(ctx, stream);
  moe_context_destroy(ctx);
}

/* ---- configurations */

/* A valid configuration is refused after these assignments to its fields c.x. */
#define PLAN(sentence, ...)                                                  \
  do {                                                                       \
    moe_config c = MOE_CONFIG_INIT;                                          \
    c.hidden = 16, c.inter = 12, c.experts = 8, c.topk = 2, c.act.gated = 1; \
    __VA_ARGS__;                                                             \
    SAYS(plan_status(&c), ARGUMENT, "%s", sentence);                         \
  } while (0)

static void plans(void) {
  moe_context *ctx = cpu_context(1);
  moe_plan *plan;
  moe_config config = MOE_CONFIG_INIT;
  config.hidden = config.inter = config.experts = config.topk = 1;
  SAYS(moe_plan_create(NULL, ctx, &config), ARGUMENT, "plan: out = NULL, wanted a place for the plan");
  SAYS(moe_plan_create(&plan, NULL, &config), ARGUMENT, "plan: ctx = NULL, wanted a context");
  SAYS(moe_plan_create(&plan, ctx, NULL), ARGUMENT, "plan: config: NULL, wanted a struct");
  allocations_left = 0;
  SAYS(moe_plan_create(&plan, ctx, &config), MEMORY, "plan: no memory for %zu bytes", sizeof *plan);
  moe_context *none;
  const moe_status status = moe_context_create(&none, MOE_BACKEND_CPU, 1);
  SAYS(status, MEMORY, "context: no memory for %zu bytes", sizeof *none);
  allocations_left = -1;
  config.size = 3;
  SAYS(moe_plan_create(&plan, ctx, &config), ARGUMENT,
       "plan: config: size = 3, wanted %zu (initialise it with its _INIT macro)", sizeof config);
  struct {
    moe_config config;
    uint64_t tail;
  } longer = {config, 1};
  longer.config.size = sizeof longer;
  SAYS(moe_plan_create(&plan, ctx, &longer.config), UNSUPPORTED,
       "plan: config: size = %zu with a field set beyond the %zu bytes that moeblas %s knows", sizeof longer,
       sizeof config, moe_version());
  moe_context_destroy(ctx);
}

static void configurations(void) {
  PLAN("plan: hidden = 0, wanted 1 .. 16777216", c.hidden = 0);
  PLAN("plan: dtype = 77, wanted MOE_FP32, MOE_BF16 or MOE_FP16", c.dtype = (moe_dtype)77);
  PLAN("plan: router_dtype = 3, wanted MOE_FP32 or dtype", c.router_dtype = MOE_FP16);
  PLAN("plan: grad_dtype = 3, wanted MOE_FP32 or dtype", c.grad_dtype = MOE_FP16);
  PLAN("plan: capacity_factor = inf, wanted a finite number >= 0", c.capacity_factor = INFINITY);
  PLAN("plan: drop = 1, wanted 0 without capacity_factor", c.drop = MOE_DROP_POSITION);
  PLAN("plan: router is set, wanted all zero: MOE_ENTRY_IDS and MOE_ENTRY_ROWS have no router",
       c.entry = MOE_ENTRY_IDS, c.router.scale = 2);
  PLAN("plan: topk = 2, wanted 1 with MOE_ENTRY_ROWS", c.entry = MOE_ENTRY_ROWS);
  PLAN("plan: shared_inter, latent or capacity_factor is set, wanted 0 with MOE_ENTRY_ROWS",
       c.entry = MOE_ENTRY_ROWS, c.topk = 1, c.latent = 4);
  PLAN("plan: act.interleave = 4, wanted a divisor of shared_inter = 6", c.shared_inter = 6,
       c.act.layout = MOE_LAYOUT_INTERLEAVED, c.act.interleave = 4);
}

static void activations(void) {
  PLAN("plan: act.kind = -1, wanted a row of moeblas_act.def (0 .. 7)", c.act.kind = (moe_activation)-1);
  PLAN("plan: act.gated = 2, wanted 0 or 1", c.act.gated = 2);
  PLAN("plan: act.beta = 2, but swiglu has no such parameter", c.act.beta = 2);
  PLAN("plan: act.alpha = -1, wanted a positive number", c.act.alpha = -1);
  PLAN("plan: act.up_* or act.layout set, but silu is not gated", c.act.gated = 0, c.act.up_offset = 1);
  PLAN("plan: act.gate_max = -7, wanted > 0, or 0 for none", c.act.gate_max = -7);
  PLAN("plan: act.up_min = 3, wanted less than act.up_max = 2", c.act.up_min = 3, c.act.up_max = 2);
  PLAN("plan: act.layout = 3, wanted a moe_layout", c.act.layout = (moe_layout)3);
  PLAN("plan: act.interleave = 2, wanted 0 without MOE_LAYOUT_INTERLEAVED", c.act.interleave = 2);
  PLAN("plan: act.interleave = 5, wanted a divisor of inter = 12", c.act.layout = MOE_LAYOUT_INTERLEAVED,
       c.act.interleave = 5);
}

static void routers(void) {
  PLAN("plan: router.score = 4, wanted a moe_score", c.router.score = (moe_score)4);
  PLAN("plan: router.renormalize = 3, wanted 0 or 1", c.router.renormalize = 3);
  PLAN("plan: router.renorm_epsilon = 0.5, wanted 0 without router.renormalize",
       c.router.renorm_epsilon = 0.5f);
  PLAN("plan: router.groups = 3, wanted a divisor of experts = 8", c.router.groups = 3);
  PLAN("plan: router.topk_groups = 1 groups of 2 experts, wanted at least topk = 3 experts",
       c.router.groups = 4, c.router.topk_groups = 1, c.topk = 3);
  PLAN("plan: router.group_score = 3, wanted a moe_group_score", c.router.group_score = (moe_group_score)3);
  PLAN("plan: router.group_score = 1, wanted 0 without router.groups",
       c.router.group_score = MOE_GROUP_TOP2_SUM);
  PLAN("plan: router.balance = 4, wanted a moe_balance", c.router.balance = (moe_balance)4);
  PLAN("plan: router.balance_coeff = 1, wanted 0 with MOE_BALANCE_NONE", c.router.balance_coeff = 1);
  PLAN("plan: router.sequence_tokens = 4, wanted > 0 with MOE_BALANCE_SEQUENCE, else 0",
       c.router.sequence_tokens = 4);
}

/* ---- run calls of the layer */

/* moe_forward is refused after these assignments. */
#define FORWARD(status, assignment, ...)                              \
  do {                                                                \
    layer_bind(&l);                                                   \
    assignment;                                                       \
    SAYS(moe_forward(l.plan, &l.forward, NULL), status, __VA_ARGS__); \
  } while (0)

static void layers(void) {
  const struct layer_case *c = &layer_cases[0];
  struct layer l;
  OPEN(&l, c, o.seed = 2);
  void *const odd = (char *)l.array[X].data + 2;
  const moe_stream stream = (moe_stream)(void *)&l;
  SAYS(moe_warmup(NULL, NULL), ARGUMENT, "warmup: plan = NULL, wanted a plan");
  SAYS(moe_warmup(l.plan, stream), ARGUMENT, "warmup: stream is given, wanted NULL for the CPU");
  SAYS(moe_forward(NULL, &l.forward, NULL), ARGUMENT, "forward: plan = NULL, wanted a plan");
  SAYS(moe_backward(NULL, &l.backward, NULL), ARGUMENT, "backward: plan = NULL, wanted a plan");
  SAYS(moe_forward(l.plan, &l.forward, stream), ARGUMENT,
       "forward: stream is given, wanted NULL for the CPU");
  FORWARD(ARGUMENT, l.forward.tokens = -1,
          "forward: tokens = -1, wanted 0 .. 1073741823 (tokens * topk below 2^31)");
  FORWARD(ARGUMENT, l.forward.x = NULL, "forward: x = NULL, wanted an array for this plan");
  FORWARD(ARGUMENT, l.forward.logits = l.forward.x,
          "forward: logits is given, wanted NULL: this plan has no use for it");
  FORWARD(ARGUMENT, l.forward.x = odd, "forward: x = %p, wanted an address aligned to 16 bytes", odd);
  FORWARD(ARGUMENT, l.forward.token_count = odd,
          "forward: token_count = %p, wanted an address aligned to 4 bytes", odd);
  FORWARD(WORKSPACE, l.forward.workspace_bytes = 1, "forward: workspace_bytes = 1, wanted at least %zu",
          moe_plan_workspace(l.plan, l.tokens));
  FORWARD(WORKSPACE, l.forward.workspace = NULL, "forward: workspace = NULL, wanted %zu bytes",
          moe_plan_workspace(l.plan, l.tokens));
  layer_bind(&l);
  l.backward.loss_scale = NAN;
  SAYS(moe_backward(l.plan, &l.backward, NULL), ARGUMENT,
       "backward: loss_scale = nan, wanted a finite number");
  layer_close(&l);
}

static void rows_from_outside(void) {
  const struct layer_case *c = layer_cases;
  struct layer l;
  while (c->config.entry != MOE_ENTRY_ROWS) c++;
  OPEN(&l, c, o.seed = 2);
  FORWARD(ARGUMENT, l.forward.token_count = l.forward.row_offset,
          "forward: token_count is given, wanted NULL: with MOE_ENTRY_ROWS row_offset[E] says how many there "
          "are");
  layer_close(&l);
}

/* ---- single ops */

/* Zeros for every array that the calls below get as far as looking at. */
static _Alignas(16) char some[256];
#define OP(op, sentence, ...)                                                                           \
  SAYS(moe_##op(ctx, &(moe_##op##_args){.size = sizeof(moe_##op##_args), __VA_ARGS__}, NULL), ARGUMENT, \
       "%s", sentence)
#define ROUTE .tokens = 4, .experts = 2, .logits_dtype = MOE_FP32

static void routing_ops(void) {
  moe_context *ctx = cpu_context(2);
  const moe_router_desc router = {0};
  void *const odd = some + 1;
  SAYS(moe_sort(NULL, NULL, NULL), ARGUMENT, "sort: ctx = NULL, wanted a context");
  SAYS(moe_sort(ctx, NULL, (moe_stream)(void *)some), ARGUMENT,
       "sort: stream is given, wanted NULL for the CPU");
  OP(route, "route: router = NULL, wanted a moe_router_desc", ROUTE, .topk = 1);
  OP(route, "route: topk = 3, wanted at most experts = 2 without given_ids", ROUTE, .topk = 3,
     .router = &router);
  OP(route, "route: tokens = -4, wanted 0 .. 2147483647 (tokens * topk below 2^31)", .experts = 1, .topk = 1,
     .tokens = -4);
  OP(route, "route: logits = NULL, wanted an array", ROUTE, .topk = 1, .router = &router);
  SAYS(moe_load_stats(
           ctx, &(moe_load_stats_args){.size = sizeof(moe_load_stats_args), .experts = 1, .counts = odd},
           NULL),
       ARGUMENT, "load_stats: counts = %p, wanted an aligned address", odd);
  OP(token_mask, "token_mask: mask = NULL, wanted an array", .tokens = 1);
  SAYS(moe_token_mask(ctx, &(moe_token_mask_args){.size = sizeof(moe_token_mask_args), .token_count = odd},
                      NULL),
       ARGUMENT, "token_mask: token_count = %p, wanted an address aligned to 4 bytes", odd);
  OP(bias_update, "bias_update: rate = inf, wanted a finite number", .experts = 1, .rate = INFINITY);
  moe_context_destroy(ctx);
}

static void scratch(void) {
  moe_context *ctx = cpu_context(2);
  moe_bias_grad_args a = {
      .size = sizeof a, .n = 8, .experts = 1, .v_dtype = MOE_FP32, .d = some, .d_dtype = MOE_FP32};
  const size_t wanted = moe_bias_grad_scratch(ctx, &a);
  SAYS(moe_bias_grad(ctx, &a, NULL), WORKSPACE, "bias_grad: scratch_bytes = 0, wanted at least %zu", wanted);
  a.scratch_bytes = wanted;
  SAYS(moe_bias_grad(ctx, &a, NULL), WORKSPACE, "bias_grad: scratch = NULL, wanted %zu bytes", wanted);
  a.scratch = some + 8;
  SAYS(moe_bias_grad(ctx, &a, NULL), ARGUMENT,
       "bias_grad: scratch = %p, wanted an address aligned to 16 bytes", a.scratch);
  moe_context_destroy(ctx);
}

#define PRODUCT .rows = 4, .n = 7, .experts = 2, .d_dtype = MOE_FP32
#define GEMM    PRODUCT, .k = 8, .a_dtype = MOE_FP32, .b_dtype = MOE_FP32

static void other_ops(void) {
  moe_context *ctx = cpu_context(2);
  const moe_act_desc act = {.gated = 1};
  OP(gemm, "gemm: accumulate = 1, wanted MOE_EPILOGUE_STORE with fp32 d", GEMM, .accumulate = 1,
     .epilogue = MOE_EPILOGUE_ACT);
  OP(gemm, "gemm: act = NULL, wanted a moe_act_desc", GEMM, .epilogue = MOE_EPILOGUE_ACT);
  OP(gemm, "gemm: n = 7, wanted an even number (2F)", GEMM, .epilogue = MOE_EPILOGUE_ACT, .act = &act);
  OP(gemm, "gemm: row_offset = NULL, wanted an array for experts = 2", GEMM);
  void *const eight = some + 8;
  SAYS(moe_gemm(ctx, &(moe_gemm_args){.size = sizeof(moe_gemm_args), GEMM, .row_offset = eight, .a = eight},
                NULL),
       ARGUMENT, "gemm: a = %p, wanted an address aligned to 16 bytes", eight);
  SAYS(moe_wgrad(ctx,
                 &(moe_wgrad_args){.size = sizeof(moe_wgrad_args),
                                   .m = 8,
                                   .n = 8,
                                   .experts = 1,
                                   .d = eight,
                                   .a_dtype = MOE_BF16,
                                   .b_dtype = MOE_BF16,
                                   .d_dtype = MOE_FP32},
                 NULL),
       ARGUMENT, "wgrad: d = %p, wanted an address aligned to 16 bytes", eight);
  OP(wgrad, "wgrad: row_offset = NULL, wanted an array for experts = 2", PRODUCT, .m = 8, .a_dtype = MOE_FP32,
     .b_dtype = MOE_FP32);
  OP(bias_grad, "bias_grad: row_offset = NULL, wanted an array for experts = 2", PRODUCT,
     .v_dtype = MOE_FP32);
  OP(copy, "copy: dst or src = NULL, wanted both for 3 bytes", .bytes = 3);
  OP(copy, "copy: bytes = 18446744073709551615, wanted at most 9223372036854775807", .bytes = SIZE_MAX);
  OP(zero, "zero: data = NULL, wanted 3 bytes", .bytes = 3);
  OP(zero, "zero: bytes = 18446744073709551615, wanted at most 9223372036854775807", .bytes = SIZE_MAX);
  moe_context_destroy(ctx);
}

TEST(every_sentence_of_the_page) {
  static void (*const groups[])(void) = {
      names_and_contexts, memory,  timers, streams,           graphs,      plans,   configurations,
      activations,        routers, layers, rows_from_outside, routing_ops, scratch, other_ops};
  REQUIRE(read_page() && page_rows > 50, "docs/errors.md has %d rows", page_rows);
  for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) groups[i]();
  for (const struct row *r = page; r < page + page_rows; r++)
    EXPECT(r->seen > 0 || strcmp(r->shown_by, "test ") != 0, "%s: nothing says \"%s\"", r->file, r->sentence);
}

/* The rule by which a sentence finds its row. */
TEST(sentences_fit_their_patterns) {
  EXPECT(fit("a: <x> = <y>, wanted", "a: b = 3, wanted") == 14, "%d",
         fit("a: <x> = <y>, wanted", "a: b = 3, wanted"));
  EXPECT(fit("a: <x>", "a: ") == 3 && fit("<x>", "anything") == 0, "a placeholder stands for anything");
  EXPECT(fit("a: b", "a: bc") < 0 && fit("a: bc", "a: b") < 0 && fit("<x> c", "a b") < 0,
         "fits what it should not");
}

TEST_MAIN()
