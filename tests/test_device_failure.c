/* SPDX-License-Identifier: Apache-2.0
 *
 * What: the layer and graphs on a device that fails.
 * Invariant: a pass ends at the call that fails, with its status and its sentence, and leaves nothing behind: the next one
 * has the bits of a device that never failed. */
#include "failing_device.h"
#include "support.h"

/* ---- the layer ---------------------------------------------------------------------------------------------------- */

static int status_of(moe_status status) {
  if (status != MOE_OK) snprintf(said, sizeof said, "%s", moe_last_error());
  EXPECT(status == MOE_OK || (status == MOE_ERROR_DEVICE && device.calls == device.fail_at + 1),
         "%s: %s; %d calls, the one that failed was %d", moe_status_name(status), said, (int)device.calls,
         (int)device.fail_at);
  return (int)status;
}
static int forward(void *layer) { return status_of(layer_forward(layer)); }
static int backward(void *layer) { return status_of(layer_backward(layer)); }

static void fails_in_turn(const struct layer_case *c) {
  struct layer whole, broken;
  OPEN(&whole, c, o.seed = 3);
  OPEN(&broken, c, o.seed = 3);
  fail_on(broken.ctx);
  fail_in_turn(&(struct scene){c->name, forward, &broken});
  fail_in_turn(&(struct scene){c->name, backward, &broken});
  EXPECT(layer_overrun(&broken) < 0, "%s: something beside an array was written", c->name);
  if (whole.array[GLOBAL_COUNTS].data != NULL) /* passes that failed have counted, too */
    memcpy(broken.array[GLOBAL_COUNTS].data, whole.array[GLOBAL_COUNTS].data,
           whole.array[GLOBAL_COUNTS].bytes);
  RAN(layer_run(&whole), c);
  RAN(layer_run(&broken), c);
  SAME(&whole, &broken, 0, c, "a pass that failed before");
  layer_close(&whole);
  layer_close(&broken);
}

TEST(a_pass_ends_at_the_call_that_fails) { EACH_CASE(fails_in_turn, true); }

/* ---- graphs ------------------------------------------------------------------------------------------------------- */

static int record_and_launch(void *ctx) {
  moe_stream stream = NULL;
  moe_graph *graph = NULL;
  moe_status status = moe_stream_create(ctx, &stream);
  if (status == MOE_OK) status = moe_graph_begin(ctx, stream);
  if (status == MOE_OK) status = moe_graph_end(ctx, stream, &graph);
  EXPECT(moe_graph_launches(graph) == (status == MOE_OK ? 7 : 0), "%d launches",
         (int)moe_graph_launches(graph));
  if (status == MOE_OK) status = moe_graph_launch(graph, stream);
  if (status != MOE_OK) snprintf(said, sizeof said, "%s", moe_last_error());
  moe_graph_destroy(graph);
  moe_stream_destroy(ctx, stream);
  return (int)status;
}

TEST(a_graph_fails) {
  moe_context *ctx = cpu_context(1);
  fail_on(ctx);
  fail_in_turn(&(struct scene){"a graph", record_and_launch, ctx});
  moe_context_destroy(ctx);
}

TEST_MAIN()
