/* SPDX-License-Identifier: Apache-2.0
 *
 * What: streams and graphs of the CUDA back end.
 * Idea: a stream is recorded by the runtime's capture, which only this thread's calls enter; what comes out is made
 * executable at once and the recording thrown away.
 * Invariant: a capture that was begun is ended by graph_end, whatever happened in between. */
#include "device.h"

moe_status moe_cuda_stream_create(moe_context *ctx, moe_stream *out) {
  TRY(moe_cuda_enter("stream_create", ctx));
  return moe_cuda_result("stream_create", cudaStreamCreateWithFlags(out, cudaStreamNonBlocking));
}

void moe_cuda_stream_destroy(moe_context *ctx, moe_stream stream) {
  if (moe_cuda_enter("stream_destroy", ctx) != MOE_OK) return;
  (void)moe_cuda_result("stream_destroy", cudaStreamSynchronize(stream));
  (void)moe_cuda_result("stream_destroy", cudaStreamDestroy(stream));
}

moe_status moe_cuda_graph_begin(moe_context *ctx, moe_stream stream) {
  TRY(moe_cuda_enter("graph_begin", ctx));
  return moe_cuda_result("graph_begin", cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}

/* Nodes that make the device work; the rest only orders them. */
static moe_status count_launches(cudaGraph_t graph, int64_t *launches) {
  size_t count = 0;
  *launches = 0;
  CUDA_TRY("graph_end", cudaGraphGetNodes(graph, NULL, &count));
  if (count == 0) return MOE_OK; /* there is nothing to ask for, and asking for it is an error */
  cudaGraphNode_t *nodes = moe_host_alloc(count * sizeof *nodes);
  CHECK(nodes != NULL, MOE_ERROR_MEMORY, "graph_end: no memory for %zu nodes", count);
  cudaError_t result = cudaGraphGetNodes(graph, nodes, &count);
  for (size_t i = 0; i < count && result == cudaSuccess; i++) {
    enum cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    result = cudaGraphNodeGetType(nodes[i], &type);
    *launches +=
        type == cudaGraphNodeTypeKernel || type == cudaGraphNodeTypeMemcpy || type == cudaGraphNodeTypeMemset;
  }
  moe_host_free(nodes);
  return moe_cuda_result("graph_end", result);
}

static moe_status make_executable(cudaGraph_t graph, void **executable, int64_t *launches) {
  cudaGraphExec_t made;
  TRY(count_launches(graph, launches));
  CUDA_TRY("graph_end", cudaGraphInstantiate(&made, graph, 0));
  *executable = made;
  return MOE_OK;
}

moe_status moe_cuda_graph_end(moe_context *ctx, moe_stream stream, void **executable, int64_t *launches) {
  TRY(moe_cuda_enter("graph_end", ctx));
  cudaGraph_t graph = NULL;
  CUDA_TRY("graph_end", cudaStreamEndCapture(stream, &graph));
  const moe_status status = make_executable(graph, executable, launches);
  const cudaError_t result = cudaGraphDestroy(graph);
  if (status != MOE_OK || result == cudaSuccess) return status;
  (void)cudaGraphExecDestroy(*executable);
  return moe_cuda_result("graph_end", result);
}

moe_status moe_cuda_graph_launch(moe_context *ctx, void *executable, moe_stream stream) {
  TRY(moe_cuda_enter("graph_launch", ctx));
  return moe_cuda_result("graph_launch", cudaGraphLaunch(executable, stream));
}

void moe_cuda_graph_destroy(moe_context *ctx, void *executable) {
  if (moe_cuda_enter("graph_destroy", ctx) == MOE_OK)
    (void)moe_cuda_result("graph_destroy", cudaGraphExecDestroy(executable));
}
