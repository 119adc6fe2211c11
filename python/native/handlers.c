/* SPDX-License-Identifier: Apache-2.0
 *
 * The layer as custom calls of XLA: moe_forward and moe_backward on XLA's buffers, stream and device, for the platforms
 * "Host" and "CUDA". This library exports the four handlers and the size query, and links nothing but libmoeblas.so.
 * Idea: the call carries the configuration and the names of its buffers as attributes. XLA's initialize stage, which runs
 * before any capture, makes the plan; the execute stage only finds it, fills in pointers and runs.
 * Invariant: on CUDA, executing launches kernels on XLA's stream and does nothing else, so it may be part of a command buffer;
 * all memory, workspace included, is XLA's. */

#include <string.h>

#include "arrays.h"

#define EXPORT __attribute__((visibility("default")))

typedef moe_status take_function(const struct xla_frame *frame, const moe_config *config, struct call *call,
                                 struct fault *fault);
typedef moe_status run_function(const moe_plan *plan, const struct call *call, moe_stream stream);

static moe_status run_forward(const moe_plan *plan, const struct call *call, moe_stream stream) {
  return moe_forward(plan, &call->forward, stream);
}

static moe_status run_backward(const moe_plan *plan, const struct call *call, moe_stream stream) {
  return moe_backward(plan, &call->backward, stream);
}

static enum xla_code code_of(moe_status status) {
  switch (status) {
  case MOE_ERROR_ARGUMENT:
  case MOE_ERROR_WORKSPACE: return XLA_INVALID_ARGUMENT;
  case MOE_ERROR_UNSUPPORTED: return XLA_UNIMPLEMENTED;
  case MOE_ERROR_MEMORY: return XLA_RESOURCE_EXHAUSTED;
  default: return XLA_INTERNAL;
  }
}

/* Asked at registration: the version of the ABI, and what the handler may be used for. */
static void describe(struct xla_metadata *metadata, moe_backend backend) {
  metadata->version =
      (struct xla_version){.size = sizeof metadata->version, .major = XLA_MAJOR, .minor = XLA_MINOR};
  metadata->traits = backend == MOE_BACKEND_CUDA ? XLA_COMMAND_BUFFER : 0;
}

/* The error of a failed query is as good as ours and goes straight back to XLA. */
static xla_error *ask(const struct xla_frame *frame, xla_error *(*query)(struct xla_context_args *args),
                      struct xla_context_args *args) {
  *args = (struct xla_context_args){.size = sizeof *args, .context = frame->context};
  return query(args);
}

static moe_status serve(const struct xla_frame *frame, moe_backend backend, int device, moe_stream stream,
                        take_function *take, run_function *run, struct fault *fault) {
  void *config;
  TRY(moe_xla_attribute(frame, "config", XLA_ARRAY, &config, fault));
  const struct xla_array *bytes = config;
  CHECK(bytes->dtype == XLA_U8, fault, MOE_ERROR_ARGUMENT,
        "moeblas: attribute config has XLA's element type %d, wanted %d", (int)bytes->dtype, XLA_U8);
  const struct known_plan *known;
  TRY(moe_xla_find_plan(bytes->data, bytes->length, backend, device, stream, &known, fault));
  if (frame->stage != XLA_EXECUTE) return MOE_OK;
  struct call call;
  TRY(take(frame, &known->config, &call, fault));
  return moe_xla_check(fault, run(known->plan, &call, stream));
}

static xla_error *handle(struct xla_frame *frame, moe_backend backend, take_function *take,
                         run_function *run) {
  for (struct xla_extension *e = frame->extensions; e != NULL; e = e->next) {
    if (e->type != XLA_METADATA) continue;
    describe(((struct xla_metadata_extension *)e)->metadata, backend);
    return NULL;
  }
  struct xla_context_args stream = {.size = 0}, device = {.size = 0};
  if (backend == MOE_BACKEND_CUDA) {
    xla_error *error = ask(frame, frame->api->get_stream, &stream);
    if (error == NULL) error = ask(frame, frame->api->get_device, &device);
    if (error != NULL) return error;
  }
  struct fault fault = {.status = MOE_OK};
  const moe_status status =
      serve(frame, backend, device.value.device, stream.value.stream, take, run, &fault);
  if (status == MOE_OK) return NULL;
  struct xla_error_args args = {.size = sizeof args, .message = fault.text, .code = code_of(status)};
  return frame->api->create_error(&args);
}

EXPORT xla_error *moe_xla_forward_cpu(struct xla_frame *frame) {
  return handle(frame, MOE_BACKEND_CPU, moe_xla_take_forward, run_forward);
}

EXPORT xla_error *moe_xla_backward_cpu(struct xla_frame *frame) {
  return handle(frame, MOE_BACKEND_CPU, moe_xla_take_backward, run_backward);
}

EXPORT xla_error *moe_xla_forward_cuda(struct xla_frame *frame) {
  return handle(frame, MOE_BACKEND_CUDA, moe_xla_take_forward, run_forward);
}

EXPORT xla_error *moe_xla_backward_cuda(struct xla_frame *frame) {
  return handle(frame, MOE_BACKEND_CUDA, moe_xla_take_backward, run_backward);
}

/* What a call of `tokens` tokens needs, from the very plan that will run. Writes a refusal into `text`, 512 bytes. */
EXPORT moe_status moe_xla_sizes(const void *config, size_t bytes, moe_backend backend, int device,
                                int64_t tokens, size_t *workspace, size_t *saved, char *text) {
  struct fault fault = {.status = MOE_OK};
  const struct known_plan *known;
  moe_status status = moe_xla_find_plan(config, bytes, backend, device, NULL, &known, &fault);
  if (status == MOE_OK) {
    *workspace = moe_plan_workspace(known->plan, tokens);
    *saved = moe_plan_saved(known->plan, tokens);
    if (*workspace == SIZE_MAX || *saved == SIZE_MAX)
      status = moe_xla_fail(&fault, MOE_ERROR_ARGUMENT,
                            "moeblas: tokens = %lld, wanted 0 or more with tokens * topk below 2^31",
                            (long long)tokens);
  }
  memcpy(text, fault.text, sizeof fault.text);
  return status;
}
