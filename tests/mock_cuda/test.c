/* SPDX-License-Identifier: Apache-2.0
 *
 * What: the host side of the CUDA back end, on a runtime that computes nothing (runtime.h).
 * Idea: the arrays of a problem are addresses that nobody may touch, so a host that looks at device memory ends here. What a pass
 * launches is looked at: how often, how many blocks, on which stream; and what else it asks the runtime for must be nothing.
 * Invariant: every sentence of src/cuda is provoked and found in docs/errors.md. */
#include "runtime.h"

#include "../../src/cuda/device.h"
#include "../../tools/case.h"
#include "../../tools/cli.h"
#include "../../tools/problem_list.h"
#include "../error_page.h"

/* ---- memory that runs out on demand */

static int allocations_left = -1; /* -1: no end to it */
void *__real_moe_host_alloc(size_t bytes);
void *__wrap_moe_host_alloc(size_t bytes);
void *__wrap_moe_host_alloc(size_t bytes) {
  if (allocations_left == 0) return NULL;
  if (allocations_left > 0) allocations_left--;
  return __real_moe_host_alloc(bytes);
}

/* ---- a problem without data */

struct layer {
  moe_context *ctx;
  moe_plan *plan;
  struct sample sample;
  struct run run;
};

static void place(struct span *span, size_t bytes) {
  static uintptr_t next = ((uintptr_t)1 << 45) + 16; /* aligned no better than it must be */
  memcpy(&span->block, &next, sizeof next);
  next += (bytes / 4096 + 2) * 4096;
  span->bytes = bytes;
}

static bool layer_open(struct layer *l, const char *text, int64_t sm_limit) {
  char error[PROBLEM_ERROR] = "";
  *l = (struct layer){.run = {.sample = &l->sample, .bare = true}};
  struct problem *p = &l->sample.problem;
  EXPECT(problem_parse(text, p, error, sizeof error), "%s: %s", text, error);
  p->config.sm_limit = sm_limit;
  const bool made = moe_context_create(&l->ctx, MOE_BACKEND_CUDA, 0) == MOE_OK &&
                    moe_plan_create(&l->plan, l->ctx, &p->config) == MOE_OK;
  EXPECT(made, "%s: %s", text, moe_last_error());
  if (!made) return false;
  struct run *run = &l->run;
  run->plan = l->plan;
  for (int id = 0; id < T_SAVED; id++) {
    const struct shape shape = tensor_shape(p, (enum tensor)id);
    if (shape.present) place(&run->span[id], shape_bytes(&shape));
  }
  run->saved_bytes = moe_plan_saved(l->plan, p->tokens);
  run->workspace_bytes = moe_plan_workspace(l->plan, p->tokens);
  place(&run->span[T_SAVED], run->saved_bytes), place(&run->span[T_WORKSPACE], run->workspace_bytes);
  return true;
}

static void layer_close(struct layer *l) {
  moe_plan_destroy(l->plan);
  moe_context_destroy(l->ctx);
}

/* ---- what a pass launches */

static const char stream_place;

/* Runs a pass and returns how many kernels it launched, all of them as they ought to be. */
static int64_t launches_of(struct layer *l, const char *text, bool backward) {
  const int64_t limit = l->sample.problem.config.sm_limit;
  mock_forget();
  l->run.stream = (moe_stream)(uintptr_t)&stream_place;
  const moe_status status = backward ? run_backward(&l->run) : run_forward(&l->run);
  EXPECT(status == MOE_OK, "%s: %s", text, moe_last_error());
  EXPECT(mock.broken[0] == '\0', "%s: %s", text, mock.broken);
  EXPECT(mock.waits == 0, "%s: a run call asked the runtime for %d things beside launches", text,
         (int)mock.waits);
  EXPECT(mock.launches <= MOCK_LAUNCHES, "%s: %d launches", text, (int)mock.launches);
  for (int64_t i = 0; i < mock.launches && i < MOCK_LAUNCHES; i++) {
    const struct mock_launch *launch = &mock.launch[i];
    EXPECT(launch->stream == (cudaStream_t)l->run.stream, "%s: %s: another stream", text, launch->kernel);
    EXPECT(limit == 0 || launch->blocks <= limit, "%s: %s: %d blocks, the limit is %d", text, launch->kernel,
           (int)launch->blocks, (int)limit);
  }
  return mock.launches;
}

static int take_problem(void *limit, const struct problem *problem) {
  char text[PROBLEM_TEXT];
  struct layer l;
  problem_print(problem, text);
  if (layer_open(&l, text, *(const int64_t *)limit)) {
    launches_of(&l, text, false);
    l.run.bare = false;
    launches_of(&l, text, false);
    if (problem->backward) launches_of(&l, text, true);
  }
  layer_close(&l);
  return CLI_GO_ON;
}

static void every_problem(int64_t limit) {
  char *lists[] = {"@tests/problems/smoke.txt", "@tests/problems/ci.txt", "@tests/problems/edge.txt",
                   "@tests/problems/presets.txt", "@tests/problems/bench_cuda.txt"};
  EXPECT(problem_list("mock_cuda", lists, 5, take_problem, &limit) == CLI_GO_ON,
         "a list that cannot be read");
}

TEST(passes_launch_kernels_and_nothing_else) { every_problem(0); }
TEST(a_limit_of_multiprocessors_holds_for_every_kernel) { every_problem(7); }

TEST(random_problems_do_so_too) {
  for (uint64_t n = 0; n < 20000; n++) {
    struct problem problem;
    problem_random(&problem, 1, n);
    int64_t limit = n % 2 == 0 ? 0 : 1 + (int64_t)(n % 131);
    take_problem(&limit, &problem);
  }
}

/* Each launch of a pass is refused in turn: that is the end of the pass, and its sentence arrives. */
static void fail_in_turn(struct layer *l, const char *text, bool backward) {
  const int64_t count = launches_of(l, text, backward);
  for (int64_t n = 0; n < count; n++) {
    mock_forget();
    mock.refuse_launch = cudaErrorLaunchFailure, mock.refuse_after = n;
    const moe_status status = backward ? run_backward(&l->run) : run_forward(&l->run);
    EXPECT(status == MOE_ERROR_DEVICE && mock.launches == n &&
               strstr(moe_last_error(), ": CUDA: launch failure (cudaErrorLaunchFailure)") != NULL,
           "%s: launch %d is refused: %s, \"%s\" after %d launches", text, (int)n, moe_status_name(status),
           moe_last_error(), (int)mock.launches);
  }
  mock_forget();
}

static int fail_problem(void *unused, const struct problem *problem) {
  char text[PROBLEM_TEXT];
  struct layer l;
  (void)unused;
  problem_print(problem, text);
  if (layer_open(&l, text, 0)) {
    l.run.bare = false;
    fail_in_turn(&l, text, false);
    if (problem->backward) fail_in_turn(&l, text, true);
  }
  layer_close(&l);
  return CLI_GO_ON;
}

TEST(a_pass_ends_at_the_launch_that_is_refused) {
  char *lists[] = {"@tests/problems/smoke.txt", "@tests/problems/edge.txt"};
  EXPECT(problem_list("mock_cuda", lists, 2, fail_problem, NULL) == CLI_GO_ON, "a list that cannot be read");
}

/* From ready logits or ids; experts of 1024 and more have their rows put in order. */
TEST(a_pass_takes_so_many_launches) {
  static const struct {
    const char *text;
    int forward, backward;
  } wanted[] = {{"t16384 h2048 f768 e128 k8 bf16 swiglu given bwd", 5, 7},
                {"t16384 h2048 f768 e128 k8 bf16 swiglu logits=fp32 bwd", 6, 7},
                {"t16384 h2048 f1024 e64 k8 bf16 swiglu given bwd", 5, 8},
                {"t16384 h2880 f2880 e32 k4 bf16 swiglu given bwd", 6, 9}};
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
    struct layer l;
    if (layer_open(&l, wanted[i].text, 0)) {
      const int64_t forward = launches_of(&l, wanted[i].text, false),
                    backward = launches_of(&l, wanted[i].text, true);
      EXPECT(forward == wanted[i].forward && backward == wanted[i].backward,
             "%s: %d and %d launches, wanted %d and %d", wanted[i].text, (int)forward, (int)backward,
             wanted[i].forward, wanted[i].backward);
    }
    layer_close(&l);
  }
}

/* ---- every sentence */

static void devices(void) {
  moe_context *ctx;
  mock.devices = 0;
  SAYS(moe_backend_available(MOE_BACKEND_CUDA), UNSUPPORTED,
       "context: no CUDA device that can be used: the driver lists none");
  mock.devices = 3;
  for (int i = 0; i < 3; i++) mock.capability[i] = 89;
  SAYS(moe_backend_available(MOE_BACKEND_CUDA), UNSUPPORTED,
       "context: the last of 3 CUDA devices has compute capability 8.9, wanted one of 9.0 (Hopper)");
  mock.capability[0] = 90;
  SAYS(moe_context_create(&ctx, MOE_BACKEND_CUDA, 1), UNSUPPORTED,
       "context: CUDA device 1 has compute capability 8.9, wanted 9.0 (Hopper)");
  mock.capability[1] = mock.capability[2] = 90;
  allocations_left = 0;
  SAYS(moe_context_create(&ctx, MOE_BACKEND_CUDA, 1), MEMORY, "context: no memory for %zu bytes",
       sizeof(moe_context));
  allocations_left = 1;
  SAYS(moe_context_create(&ctx, MOE_BACKEND_CUDA, 1), MEMORY, "context: no memory for %zu bytes",
       sizeof(struct cuda_device));
  allocations_left = -1;
  SAYS(moe_context_create(&ctx, MOE_BACKEND_CUDA, 3), ARGUMENT,
       "context: device = 3, wanted a CUDA ordinal 0 .. 2");
  mock.devices = 1;
}

static void launches(moe_context *ctx) {
  const size_t bytes = 1;
  void *const data = (void *)((uintptr_t)1 << 45);
  const moe_zero_args zero = {.size = sizeof zero, .data = data, .bytes = bytes};
  mock.refuse_launch = cudaErrorLaunchFailure;
  SAYS(moe_zero(ctx, &zero, NULL), DEVICE, "zero: CUDA: launch failure (cudaErrorLaunchFailure)");
  mock_forget();
  moe_gemm_args gemm = {.size = sizeof gemm,
                        .rows = INT32_MAX,
                        .n = 16384,
                        .k = 8,
                        .experts = 1,
                        .a = data,
                        .a_dtype = MOE_FP32,
                        .b = data,
                        .b_dtype = MOE_FP32,
                        .d = data,
                        .d_dtype = MOE_FP32};
  gemm.scratch_bytes = moe_gemm_scratch(ctx, &gemm), gemm.scratch = data;
  SAYS(moe_gemm(ctx, &gemm, NULL), UNSUPPORTED,
       "gemm: a grid of 8589934848 x 1 x 1 blocks, wanted at most 2147483647 x 65535 x 65535");
}

static void tensor_maps(moe_context *ctx, const char *sentence) {
  void *const data = (void *)((uintptr_t)1 << 45);
  const moe_gemm_args gemm = {.size = sizeof gemm,
                              .rows = 128,
                              .n = 128,
                              .k = 128,
                              .experts = 1,
                              .a = data,
                              .a_dtype = MOE_BF16,
                              .b = data,
                              .b_dtype = MOE_BF16,
                              .d = data,
                              .d_dtype = MOE_BF16};
  SAYS(moe_gemm(ctx, &gemm, NULL), DEVICE, "%s", sentence);
}

static void graphs(moe_context *ctx) {
  const moe_zero_args zero = {.size = sizeof zero, .data = (void *)((uintptr_t)1 << 45), .bytes = 1};
  moe_stream stream;
  moe_graph *graph;
  REQUIRE(moe_stream_create(ctx, &stream) == MOE_OK && moe_graph_begin(ctx, stream) == MOE_OK &&
              moe_zero(ctx, &zero, stream) == MOE_OK,
          "%s", moe_last_error());
  allocations_left = 0;
  SAYS(moe_graph_end(ctx, stream, &graph), MEMORY, "graph_end: no memory for 1 nodes");
  allocations_left = -1;
  moe_stream_destroy(ctx, stream);
}

TEST(every_sentence_of_the_back_end) {
  moe_context *ctx;
  REQUIRE(read_page(), "docs/errors.md cannot be read");
  mock_forget();
  devices();
  REQUIRE(moe_context_create(&ctx, MOE_BACKEND_CUDA, 0) == MOE_OK, "%s", moe_last_error());
  launches(ctx);
  mock.refuse_map = true;
  tensor_maps(ctx, "gemm: 0x200000000000: the driver made no tensor map of it (CUresult 1)");
  mock_forget();
  graphs(ctx);
  moe_context_destroy(ctx);
  mock.no_tensor_maps = true;
  REQUIRE(moe_context_create(&ctx, MOE_BACKEND_CUDA, 0) == MOE_OK, "%s", moe_last_error());
  tensor_maps(ctx, "gemm: the driver has no tensor maps, wanted one for CUDA 12.0 or later");
  moe_context_destroy(ctx);
  mock.no_tensor_maps = false;
  for (const struct row *r = page; r < page + page_rows; r++)
    EXPECT(r->seen > 0 || strcmp(r->shown_by, "mock ") != 0, "%s: nothing says \"%s\"", r->file, r->sentence);
}

TEST_MAIN()
