/* SPDX-License-Identifier: Apache-2.0
 *
 * What: streams, and the recording of calls on one as a graph, for callers that know no CUDA.
 * Idea: check the arguments, call the table. A graph is a context and an executable of its back end.
 * Invariant: nothing here is called by the layer, whose run calls never allocate. */
#include "backend.h"
#include "util.h"

struct moe_graph {
  moe_context *ctx;
  void *executable;
  int64_t launches;
};

moe_status moe_stream_create(moe_context *ctx, moe_stream *out) {
  CHECK(out != NULL, MOE_ERROR_ARGUMENT, "stream_create: out = NULL, wanted a place for the stream");
  *out = NULL;
  CHECK(ctx != NULL, MOE_ERROR_ARGUMENT, "stream_create: ctx = NULL, wanted a context");
  const moe_status status = ctx->backend->stream_create(ctx, out);
  if (status != MOE_OK) *out = NULL; /* a failed call of CUDA may have written it */
  return status;
}

void moe_stream_destroy(moe_context *ctx, moe_stream stream) {
  if (ctx != NULL && stream != NULL) ctx->backend->stream_destroy(ctx, stream);
}

static moe_status check_capture(const char *op, const moe_context *ctx, moe_stream stream) {
  CHECK(ctx != NULL, MOE_ERROR_ARGUMENT, "%s: ctx = NULL, wanted a context", op);
  CHECK(ctx->backend->graph_begin != NULL, MOE_ERROR_UNSUPPORTED,
        "%s: a context of the %s back end, wanted one of CUDA: the others have no graphs", op,
        ctx->backend->name);
  CHECK(stream != NULL, MOE_ERROR_ARGUMENT,
        "%s: stream = NULL, wanted one of moe_stream_create: the default stream cannot be recorded", op);
  return MOE_OK;
}

moe_status moe_graph_begin(moe_context *ctx, moe_stream stream) {
  TRY(check_capture("graph_begin", ctx, stream));
  return ctx->backend->graph_begin(ctx, stream);
}

moe_status moe_graph_end(moe_context *ctx, moe_stream stream, moe_graph **out) {
  CHECK(out != NULL, MOE_ERROR_ARGUMENT, "graph_end: out = NULL, wanted a place for the graph");
  *out = NULL;
  TRY(check_capture("graph_end", ctx, stream));
  void *executable;
  int64_t launches;
  TRY(ctx->backend->graph_end(ctx, stream, &executable, &launches));
  moe_graph *graph = moe_host_alloc(sizeof *graph);
  if (graph == NULL) {
    ctx->backend->graph_destroy(ctx, executable);
    return moe_fail(MOE_ERROR_MEMORY, "graph_end: no memory for %zu bytes", sizeof *graph);
  }
  *graph = (moe_graph){ctx, executable, launches};
  *out = graph;
  return MOE_OK;
}

moe_status moe_graph_launch(moe_graph *graph, moe_stream stream) {
  CHECK(graph != NULL, MOE_ERROR_ARGUMENT, "graph_launch: graph = NULL, wanted a graph");
  return graph->ctx->backend->graph_launch(graph->ctx, graph->executable, stream);
}

int64_t moe_graph_launches(const moe_graph *graph) { return graph ? graph->launches : 0; }

void moe_graph_destroy(moe_graph *graph) {
  if (graph == NULL) return;
  graph->ctx->backend->graph_destroy(graph->ctx, graph->executable);
  moe_host_free(graph);
}
