/* SPDX-License-Identifier: Apache-2.0
 *
 * The public edge before a run: names, contexts, plans and sizes. Whatever is wrong is answered by a status
 * and a sentence that names the operation, the argument, what was found and what was wanted. */
#include "test.h"

#include <math.h>
#include <pthread.h>

#include "support.h"

/* ---- memory that runs out on demand */

static int allocations_left = -1; /* -1: no end to it */
static int blocks;                /* that are held */
void *__real_moe_host_alloc(size_t bytes);
void __real_moe_host_free(void *pointer);
void *__wrap_moe_host_alloc(size_t bytes);
void __wrap_moe_host_free(void *pointer);

void *__wrap_moe_host_alloc(size_t bytes) {
  if (allocations_left == 0) return NULL;
  if (allocations_left > 0) allocations_left--;
  blocks++;
  return __real_moe_host_alloc(bytes);
}

void __wrap_moe_host_free(void *pointer) {
  blocks -= pointer != NULL;
  __real_moe_host_free(pointer);
}

/* ---- names */

TEST(names_of_statuses) {
  static const struct {
    int status;
    const char *name;
  } names[] = {{0, "ok"},
               {10, "argument"},
               {20, "unsupported"},
               {30, "workspace"},
               {40, "memory"},
               {50, "device"},
               {60, "internal"},
               {-1, "unknown status"},
               {5, "unknown status"},
               {61, "unknown status"}};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    EXPECT(strcmp(moe_status_name((moe_status)names[i].status), names[i].name) == 0,
           "%d is called %s, wanted %s", names[i].status, moe_status_name((moe_status)names[i].status),
           names[i].name);
}

TEST(names_of_activations) {
  for (int i = 0; i < MOE_ACT_COUNT; i++)
    for (int g = 0; g < 2; g++) {
      const char *name = moe_activation_name((moe_activation)i, g);
      moe_activation kind = MOE_ACT_COUNT;
      int gated = -1;
      REQUIRE(name != NULL, "activation %d has no name", i);
      EXPECT(moe_activation_find(name, &kind, &gated) == MOE_OK && (int)kind == i && gated == g,
             "%s is found as %d gated %d", name, (int)kind, gated);
    }
  EXPECT(moe_activation_name((moe_activation)-1, 0) == NULL, "-1 has a name");
  EXPECT(moe_activation_name(MOE_ACT_COUNT, 1) == NULL, "MOE_ACT_COUNT has a name");
  moe_activation kind;
  int gated;
  REFUSED(moe_activation_find("no such", &kind, &gated), ARGUMENT, "activation_find: name = \"no such\"");
  REFUSED(moe_activation_find("", &kind, &gated), ARGUMENT, "activation_find: name = \"\"");
  REFUSED(moe_activation_find("silu ", &kind, &gated), ARGUMENT, "activation_find: name = \"silu \"");
  REFUSED(moe_activation_find(NULL, &kind, &gated), ARGUMENT, "activation_find: name");
  REFUSED(moe_activation_find("silu", NULL, &gated), ARGUMENT, "kind");
  REFUSED(moe_activation_find("silu", &kind, NULL), ARGUMENT, "gated");
}

TEST(names_of_dtypes) {
  static const char *const names[] = {NULL, "fp32", "bf16", "fp16", NULL};
  static const size_t bytes[] = {0, 4, 2, 2, 0};
  for (int i = 0; i < 5; i++) {
    const char *name = moe_dtype_name((moe_dtype)i);
    EXPECT(names[i] ? name != NULL && strcmp(name, names[i]) == 0 : name == NULL, "dtype %d is called %s", i,
           name ? name : "NULL");
    EXPECT(moe_dtype_bytes((moe_dtype)i) == bytes[i], "dtype %d has %zu bytes", i,
           moe_dtype_bytes((moe_dtype)i));
  }
  EXPECT(moe_dtype_name((moe_dtype)-1) == NULL && moe_dtype_bytes((moe_dtype)-1) == 0, "-1 is a dtype");
}

TEST(version_is_that_of_the_header) {
  char text[32];
  snprintf(text, sizeof text, "%d.%d.%d", MOE_VERSION_MAJOR, MOE_VERSION_MINOR, MOE_VERSION_PATCH);
  EXPECT(strcmp(moe_version(), text) == 0, "%s, wanted %s", moe_version(), text);
}

/* ---- the last error */

static void *other_thread(void *result) {
  const int empty = moe_last_error()[0] == '\0';
  moe_backend_available((moe_backend)99);
  *(int *)result = empty && strstr(moe_last_error(), "99") != NULL;
  return NULL;
}

TEST(last_error_belongs_to_its_thread) {
  pthread_t thread;
  int result = 0;
  REFUSED(moe_backend_available((moe_backend)77), ARGUMENT, "context: backend = 77, wanted MOE_BACKEND_AUTO");
  REQUIRE(pthread_create(&thread, NULL, other_thread, &result) == 0, "no thread");
  pthread_join(thread, NULL);
  EXPECT(result, "the other thread does not have its own sentence");
  EXPECT(moe_backend_available(MOE_BACKEND_CPU) == MOE_OK, "%s", moe_last_error());
  EXPECT(strstr(moe_last_error(), "77") != NULL, "the sentence is now \"%s\"", moe_last_error());
}

/* ---- contexts */

TEST(contexts) {
  static const struct {
    int backend, device;
    moe_status status;
    const char *sentence;
  } bad[] = {{-1, 0, MOE_ERROR_ARGUMENT, "context: backend = -1, wanted"},
             {3, 0, MOE_ERROR_ARGUMENT, "context: backend = 3, wanted"},
             {MOE_BACKEND_CPU, -1, MOE_ERROR_ARGUMENT, "context: device = -1, wanted a number of threads"},
             {MOE_BACKEND_CPU, 1 << 20, MOE_ERROR_ARGUMENT, "context: device = 1048576, wanted"}};
  moe_context *ctx;
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    ctx = (moe_context *)&ctx;
    const moe_status status = moe_context_create(&ctx, (moe_backend)bad[i].backend, bad[i].device);
    EXPECT(status == bad[i].status && strstr(moe_last_error(), bad[i].sentence), "%s: %s",
           moe_status_name(status), moe_last_error());
    EXPECT(ctx == NULL, "a refused context is not NULL");
  }
  /* whether there is CUDA depends on the build and on the machine */
  const moe_status cuda = moe_backend_available(MOE_BACKEND_CUDA);
  EXPECT(cuda == MOE_OK || (cuda == MOE_ERROR_UNSUPPORTED && strstr(moe_last_error(), "CUDA")), "%s: %s",
         moe_status_name(cuda), moe_last_error());
  if (cuda != MOE_OK) REFUSED(moe_context_create(&ctx, MOE_BACKEND_CUDA, 0), UNSUPPORTED, "context: ");
  REFUSED(moe_context_create(NULL, MOE_BACKEND_CPU, 0), ARGUMENT, "context: out = NULL, wanted");
  EXPECT(moe_context_create(&ctx, MOE_BACKEND_AUTO, 0) == MOE_OK, "%s", moe_last_error());
  EXPECT(moe_context_backend(ctx) == (cuda == MOE_OK ? MOE_BACKEND_CUDA : MOE_BACKEND_CPU) &&
             moe_context_units(ctx) >= 1,
         "AUTO is not the fastest");
  moe_context_destroy(ctx);
  EXPECT(moe_context_create(&ctx, MOE_BACKEND_CPU, 3) == MOE_OK, "%s", moe_last_error());
  EXPECT(moe_context_units(ctx) == 3, "%d units, wanted 3 threads", moe_context_units(ctx));
  moe_context_destroy(ctx);
  moe_context_destroy(NULL);
  moe_plan_destroy(NULL);
  EXPECT(moe_context_units(NULL) == 0 && moe_context_backend(NULL) == MOE_BACKEND_AUTO, "NULL has units");
  EXPECT(blocks == 0, "%d blocks are still held", blocks);
}

/* ---- configurations */

static moe_config valid(void) {
  return (moe_config){
      .size = sizeof(moe_config), .hidden = 16, .inter = 12, .experts = 8, .topk = 2, .act = {.gated = 1}};
}

static moe_status try_config(const moe_config *config, int *is_null) {
  moe_context *ctx;
  moe_status status = moe_context_create(&ctx, MOE_BACKEND_CPU, 1);
  if (status != MOE_OK) return status;
  moe_plan *plan = (moe_plan *)&ctx;
  status = moe_plan_create(&plan, ctx, config);
  *is_null = plan == NULL;
  if (status == MOE_OK) moe_plan_destroy(plan);
  moe_context_destroy(ctx);
  return status;
}

/* A valid configuration is refused after these assignments to its fields c.x. */
#define REFUSE(want, sentence, ...)                               \
  do {                                                            \
    moe_config c = valid();                                       \
    int is_null = 0;                                              \
    __VA_ARGS__;                                                  \
    REFUSED(try_config(&c, &is_null), want, sentence);            \
    EXPECT(is_null, "a refused plan is not NULL (%s)", sentence); \
  } while (0)
#define ACCEPT(...)                                                                                   \
  do {                                                                                                \
    moe_config c = valid();                                                                           \
    int is_null = 1;                                                                                  \
    __VA_ARGS__;                                                                                      \
    EXPECT(try_config(&c, &is_null) == MOE_OK && !is_null, "%s: %s", #__VA_ARGS__, moe_last_error()); \
  } while (0)

TEST(config_sizes) {
  REFUSE(ARGUMENT, "plan: hidden = 0, wanted 1", c.hidden = 0);
  REFUSE(ARGUMENT, "plan: hidden = -5, wanted 1", c.hidden = -5);
  REFUSE(ARGUMENT, "plan: hidden = 9223372036854775807, wanted", c.hidden = INT64_MAX);
  REFUSE(ARGUMENT, "plan: inter = 0, wanted 1", c.inter = 0);
  REFUSE(ARGUMENT, "plan: inter = 1099511627776, wanted", c.inter = (int64_t)1 << 40);
  REFUSE(ARGUMENT, "plan: experts = 0, wanted 1 .. 4096", c.experts = 0);
  REFUSE(ARGUMENT, "plan: experts = 4097, wanted 1 .. 4096", c.experts = MOE_MAX_EXPERTS + 1);
  REFUSE(ARGUMENT, "plan: topk = 0, wanted 1 .. 64", c.topk = 0);
  REFUSE(ARGUMENT, "plan: topk = 65, wanted 1 .. 64", c.experts = 128, c.topk = MOE_MAX_TOPK + 1);
  REFUSE(ARGUMENT, "plan: shared_inter = -1, wanted 0", c.shared_inter = -1);
  REFUSE(ARGUMENT, "plan: latent = -1, wanted 0", c.latent = -1);
  REFUSE(ARGUMENT, "plan: latent = -9223372036854775808, wanted", c.latent = INT64_MIN);
  REFUSE(ARGUMENT, "plan: capacity_factor = -1, wanted", c.capacity_factor = -1);
  REFUSE(ARGUMENT, "plan: capacity_factor = nan, wanted", c.capacity_factor = NAN);
  REFUSE(ARGUMENT, "plan: capacity_factor = inf, wanted", c.capacity_factor = INFINITY);
  ACCEPT(c.hidden = 1, c.inter = 1, c.experts = 1, c.topk = 1);
  ACCEPT(c.experts = MOE_MAX_EXPERTS, c.topk = MOE_MAX_TOPK);
  ACCEPT(c.experts = 2, c.topk = 5, c.entry = MOE_ENTRY_IDS);
}

TEST(config_enums_and_flags) {
  REFUSE(ARGUMENT, "plan: dtype = 4, wanted MOE_FP32", c.dtype = (moe_dtype)4);
  REFUSE(ARGUMENT, "plan: dtype = -1, wanted", c.dtype = (moe_dtype)-1);
  REFUSE(ARGUMENT, "plan: logits_dtype = 9, wanted", c.logits_dtype = (moe_dtype)9);
  REFUSE(ARGUMENT, "plan: router_dtype = 3, wanted MOE_FP32 or dtype", c.router_dtype = MOE_FP16);
  REFUSE(ARGUMENT, "plan: grad_dtype = 2, wanted MOE_FP32 or dtype", c.grad_dtype = MOE_BF16,
         c.dtype = MOE_FP16);
  REFUSE(ARGUMENT, "plan: grad_dtype = 7, wanted", c.grad_dtype = (moe_dtype)7);
  REFUSE(ARGUMENT, "plan: entry = 4, wanted 0 .. 3", c.entry = (moe_entry)4);
  REFUSE(ARGUMENT, "plan: entry = ", c.entry = (moe_entry)-1);
  REFUSE(ARGUMENT, "plan: drop = 2, wanted 0 .. 1", c.drop = (moe_drop)2);
  REFUSE(ARGUMENT, "plan: drop = 1, wanted 0 without capacity_factor", c.drop = MOE_DROP_POSITION);
  REFUSE(ARGUMENT, "router.group_score = 1, wanted 0 without router.groups",
         c.router.group_score = MOE_GROUP_TOP2_SUM);
  REFUSE(ARGUMENT, "router.renorm_epsilon = 0.5, wanted 0 without router.renormalize",
         c.router.renorm_epsilon = 0.5f);
  REFUSE(ARGUMENT, "plan: recompute = 2, wanted 0 .. 1", c.recompute = (moe_recompute)2);
  REFUSE(ARGUMENT, "plan: sm_limit = -1, wanted 0 .. ", c.sm_limit = -1);
  REFUSE(ARGUMENT, "plan: sm_limit = 4096, wanted 0 .. ", c.sm_limit = 4096);
  REFUSE(ARGUMENT, "plan: schedule = 2, wanted 0 .. 1", c.schedule = (moe_schedule)2);
  REFUSE(ARGUMENT, "plan: weight_on_input = 2, wanted 0 .. 1", c.weight_on_input = 2);
  REFUSE(ARGUMENT, "plan: transposed = -1, wanted 0 .. 1", c.transposed = -1);
  ACCEPT(c.sm_limit = 1, c.schedule = MOE_SCHEDULE_DYNAMIC);
  ACCEPT(c.dtype = MOE_FP16, c.router_dtype = MOE_FP16, c.grad_dtype = MOE_FP32);
}

TEST(config_activation) {
  REFUSE(ARGUMENT, "plan: act.kind = ", c.act.kind = MOE_ACT_COUNT);
  REFUSE(ARGUMENT, "plan: act.kind = -1, wanted", c.act.kind = (moe_activation)-1);
  REFUSE(ARGUMENT, "plan: act.gated = 2, wanted 0 or 1", c.act.gated = 2);
  REFUSE(ARGUMENT, "plan: act.alpha = 1, but geglu has no", c.act.kind = MOE_ACT_GELU, c.act.alpha = 1);
  REFUSE(ARGUMENT, "plan: act.beta = 2, but swiglu has no", c.act.beta = 2);
  REFUSE(ARGUMENT, "plan: act.alpha = -1, wanted", c.act.alpha = -1);
  REFUSE(ARGUMENT, "plan: act.alpha = nan, wanted", c.act.alpha = NAN);
  REFUSE(ARGUMENT, "plan: act.beta = inf, wanted", c.act.kind = MOE_ACT_SITU, c.act.beta = INFINITY);
  REFUSE(ARGUMENT, "plan: act.gate_max = -7, wanted", c.act.gate_max = -7);
  REFUSE(ARGUMENT, "plan: act.gate_max = nan, wanted", c.act.gate_max = NAN);
  REFUSE(ARGUMENT, "plan: act.up_min = 3, wanted less than act.up_max = 2", c.act.up_min = 3,
         c.act.up_max = 2);
  REFUSE(ARGUMENT, "plan: act.up_min = 1, wanted less than act.up_max = 1", c.act.up_min = 1,
         c.act.up_max = 1);
  REFUSE(ARGUMENT, "act.up_max = nan", c.act.up_max = NAN);
  REFUSE(ARGUMENT, "plan: act.up_offset = inf, wanted a finite", c.act.up_offset = INFINITY);
  REFUSE(ARGUMENT, "plan: act.up_beta = -1, wanted", c.act.up_beta = -1);
  REFUSE(ARGUMENT, "act.up_* or act.layout set, but silu is not gated", c.act.gated = 0, c.act.up_offset = 1);
  REFUSE(ARGUMENT, "but silu is not gated", c.act.gated = 0, c.act.layout = MOE_LAYOUT_CONCAT_UP_FIRST);
  REFUSE(ARGUMENT, "plan: act.layout = 3, wanted", c.act.layout = (moe_layout)3);
  REFUSE(ARGUMENT, "plan: act.interleave = 2, wanted 0 without", c.act.interleave = 2);
  REFUSE(ARGUMENT, "plan: act.interleave = 5, wanted a divisor of inter = 12", c.act.interleave = 5,
         c.act.layout = MOE_LAYOUT_INTERLEAVED);
  REFUSE(ARGUMENT, "plan: act.interleave = -3, wanted", c.act.interleave = -3,
         c.act.layout = MOE_LAYOUT_INTERLEAVED);
  REFUSE(ARGUMENT, "plan: act.interleave = 4, wanted a divisor of shared_inter = 6", c.act.interleave = 4,
         c.act.layout = MOE_LAYOUT_INTERLEAVED, c.shared_inter = 6);
  ACCEPT(c.act.gate_max = INFINITY, c.act.up_min = -INFINITY, c.act.up_max = 7);
}

TEST(config_router) {
  REFUSE(ARGUMENT, "plan: router.score = 4, wanted", c.router.score = (moe_score)4);
  REFUSE(ARGUMENT, "plan: router.renormalize = 3, wanted 0 or 1", c.router.renormalize = 3);
  REFUSE(ARGUMENT, "plan: router.renorm_epsilon = -1, wanted", c.router.renorm_epsilon = -1);
  REFUSE(ARGUMENT, "plan: router.scale = nan, wanted", c.router.scale = NAN);
  REFUSE(ARGUMENT, "plan: router.groups = 3, wanted a divisor of experts = 8", c.router.groups = 3);
  REFUSE(ARGUMENT, "plan: router.groups = -1, wanted", c.router.groups = -1);
  REFUSE(ARGUMENT, "plan: router.topk_groups = 0, wanted 1 .. 4", c.router.groups = 4);
  REFUSE(ARGUMENT, "plan: router.topk_groups = 5, wanted 1 .. 4", c.router.groups = 4,
         c.router.topk_groups = 5);
  REFUSE(ARGUMENT, "router.topk_groups = 1 groups of 2 experts, wanted at least topk = 3",
         c.router.groups = 4, c.router.topk_groups = 1, c.topk = 3);
  REFUSE(ARGUMENT, "plan: router.group_score = 3, wanted", c.router.group_score = (moe_group_score)3);
  REFUSE(ARGUMENT, "plan: router.balance = 4, wanted", c.router.balance = (moe_balance)4);
  REFUSE(ARGUMENT, "plan: router.balance_coeff = 1, wanted 0 with MOE_BALANCE_NONE",
         c.router.balance_coeff = 1);
  REFUSE(ARGUMENT, "plan: router.balance_coeff = -1, wanted", c.router.balance = MOE_BALANCE_BATCH,
         c.router.balance_coeff = -1);
  REFUSE(ARGUMENT, "plan: router.z_coeff = inf, wanted", c.router.z_coeff = INFINITY);
  REFUSE(ARGUMENT, "plan: router.sequence_tokens = 0, wanted > 0", c.router.balance = MOE_BALANCE_SEQUENCE);
  REFUSE(ARGUMENT, "plan: router.sequence_tokens = 4, wanted", c.router.sequence_tokens = 4);
  REFUSE(ARGUMENT, "plan: router.sequence_tokens = -4, wanted", c.router.sequence_tokens = -4);
}

TEST(config_contradictions) {
  REFUSE(ARGUMENT, "plan: router is set, wanted all zero", c.entry = MOE_ENTRY_IDS, c.router.renormalize = 1);
  REFUSE(ARGUMENT, "plan: router is set, wanted all zero", c.entry = MOE_ENTRY_ROWS, c.topk = 1,
         c.router.scale = 2);
  REFUSE(ARGUMENT, "plan: topk = 2, wanted 1 with MOE_ENTRY_ROWS", c.entry = MOE_ENTRY_ROWS);
  REFUSE(ARGUMENT, "shared_inter, latent or capacity_factor is set, wanted 0", c.entry = MOE_ENTRY_ROWS,
         c.topk = 1, c.shared_inter = 8);
  REFUSE(ARGUMENT, "wanted 0 with MOE_ENTRY_ROWS", c.entry = MOE_ENTRY_ROWS, c.topk = 1, c.latent = 8);
  REFUSE(ARGUMENT, "wanted 0 with MOE_ENTRY_ROWS", c.entry = MOE_ENTRY_ROWS, c.topk = 1,
         c.capacity_factor = 1);
  moe_context *ctx;
  moe_plan *plan;
  REQUIRE(moe_context_create(&ctx, MOE_BACKEND_CPU, 1) == MOE_OK, "%s", moe_last_error());
  const moe_config config = valid();
  REFUSED(moe_plan_create(NULL, ctx, &config), ARGUMENT, "plan: out = NULL, wanted");
  REFUSED(moe_plan_create(&plan, NULL, &config), ARGUMENT, "plan: ctx = NULL, wanted a context");
  REFUSED(moe_plan_create(&plan, ctx, NULL), ARGUMENT, "plan: config: NULL, wanted a struct");
  moe_context_destroy(ctx);
}

TEST(config_struct_sizes) {
  struct {
    moe_config config;
    char tail[40];
  } longer = {.config = valid()};
  int is_null;
  REFUSE(ARGUMENT, "plan: config: size = 0, wanted", c.size = 0);
  REFUSE(ARGUMENT, "plan: config: size = 7, wanted", c.size = 7);
  REFUSE(ARGUMENT, "plan: config: size = 18446744073709551615, wanted", c.size = SIZE_MAX);
  longer.config.size = sizeof longer;
  EXPECT(try_config(&longer.config, &is_null) == MOE_OK, "a zero tail is refused: %s", moe_last_error());
  longer.tail[39] = 1;
  REFUSED(try_config(&longer.config, &is_null), UNSUPPORTED, "plan: config: size = ");
  longer.config.size = sizeof(moe_config) + 39;
  EXPECT(try_config(&longer.config, &is_null) == MOE_OK, "bytes beyond size are read: %s", moe_last_error());
  ACCEPT(c.size = offsetof(moe_config, latent), c.latent = -1); /* an older header knows no latent */
}

TEST(no_memory) {
  moe_context *ctx = NULL;
  moe_plan *plan = NULL;
  const moe_config config = valid();
  allocations_left = 0;
  REFUSED(moe_context_create(&ctx, MOE_BACKEND_CPU, 1), MEMORY, "context: no memory for ");
  allocations_left = -1;
  EXPECT(moe_context_create(&ctx, MOE_BACKEND_CPU, 1) == MOE_OK, "%s", moe_last_error());
  allocations_left = 0;
  REFUSED(moe_plan_create(&plan, ctx, &config), MEMORY, "plan: no memory for ");
  EXPECT(plan == NULL, "a plan without memory");
  allocations_left = -1;
  moe_context_destroy(ctx);
  EXPECT(blocks == 0, "%d blocks are still held", blocks);
}

/* ---- sizes */

static void check_monotone(const struct layer_case *c) {
  struct layer l;
  OPEN(&l, c, o.tokens = 1, o.threads = 7);
  const int64_t most = INT32_MAX / c->config.topk;
  size_t workspace = 0, saved = 0;
  for (int64_t t = 0; t <= most; t += t < 600 ? 1 : t / 5) {
    const size_t w = moe_plan_workspace(l.plan, t), s = moe_plan_saved(l.plan, t);
    EXPECT(w >= workspace && s >= saved && w != SIZE_MAX && s != SIZE_MAX,
           "%s: %lld tokens need workspace %zu after %zu, saved %zu after %zu", c->name, (long long)t, w,
           workspace, s, saved);
    workspace = w, saved = s;
  }
  EXPECT(moe_plan_workspace(l.plan, most) != SIZE_MAX, "%s: the most tokens are refused", c->name);
  const int64_t bad[] = {-1, INT64_MIN, most + 1, INT64_MAX};
  for (int i = 0; i < 4; i++)
    EXPECT(moe_plan_workspace(l.plan, bad[i]) == SIZE_MAX && moe_plan_saved(l.plan, bad[i]) == SIZE_MAX,
           "%s: %lld tokens have a size", c->name, (long long)bad[i]);
  layer_close(&l);
}

TEST(sizes_grow_with_tokens) {
  EACH_CASE(check_monotone, 1);
  EXPECT(moe_plan_workspace(NULL, 1) == SIZE_MAX && moe_plan_saved(NULL, 1) == SIZE_MAX, "NULL has a size");
}

/* dh beside the rows of dx, or beside weight * a before them; the rest is maps and what a product needs of its own. */
TEST(workspace_is_what_the_widest_moment_needs) {
  static const int64_t shapes[][4] = {{2048, 768, 128, 8}, {768, 2048, 8, 2}, {2880, 2880, 32, 4}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int entry = MOE_ENTRY_HIDDEN; entry <= MOE_ENTRY_IDS; entry++) {
      moe_context *ctx;
      moe_plan *plan;
      moe_config c = MOE_CONFIG_INIT;
      c.hidden = shapes[i][0], c.inter = shapes[i][1], c.experts = shapes[i][2], c.topk = shapes[i][3];
      c.act.gated = 1, c.entry = (moe_entry)entry;
      REQUIRE(moe_context_create(&ctx, MOE_BACKEND_CPU, 1) == MOE_OK, "%s", moe_last_error());
      REQUIRE(moe_plan_create(&plan, ctx, &c) == MOE_OK, "%s", moe_last_error());
      const int64_t tokens = 16384, rows = tokens * c.topk;
      const int64_t columns = 2 * c.inter + (c.hidden > c.inter ? c.hidden : c.inter);
      const int64_t limit = 2 * rows * columns + rows * 16 + tokens * c.experts * 4 + (4 << 20);
      const size_t found = moe_plan_workspace(plan, tokens);
      EXPECT(found <= (size_t)limit, "shape %zu, entry %d: %zu bytes, wanted at most %lld", i, entry, found,
             (long long)limit);
      moe_plan_destroy(plan), moe_context_destroy(ctx);
    }
}

TEST(describe_and_warmup) {
  struct layer l;
  OPEN(&l, &layer_cases[0], o.tokens = 4);
  char text[1024] = "", few[8] = "abcdefg";
  const size_t length = moe_plan_describe(l.plan, 4, text, sizeof text);
  EXPECT(length == strlen(text) && length > 50, "%zu, but %zu characters", length, strlen(text));
  snprintf(few, sizeof few, "%zu", moe_plan_workspace(l.plan, 4));
  EXPECT(strstr(text, few) != NULL && strstr(text, "swiglu") != NULL, "incomplete: %s", text);
  EXPECT(moe_plan_describe(l.plan, 4, few, 4) == length && strlen(few) == 3, "cut to \"%s\"", few);
  EXPECT(moe_plan_describe(l.plan, 4, NULL, 0) == length, "no length without a buffer");
  EXPECT(moe_plan_describe(NULL, 4, few, 4) == 0 && few[0] == '\0', "NULL has a description");
  EXPECT(moe_warmup(l.plan, NULL) == MOE_OK, "%s", moe_last_error());
  REFUSED(moe_warmup(NULL, NULL), ARGUMENT, "warmup: plan = NULL, wanted a plan");
  REFUSED(moe_warmup(l.plan, (moe_stream)(void *)&l), ARGUMENT,
          "warmup: stream is given, wanted NULL for the CPU");
  layer_close(&l);
}

TEST_MAIN()
