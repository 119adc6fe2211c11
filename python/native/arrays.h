/* SPDX-License-Identifier: Apache-2.0
 * From XLA's buffers to the pointers of a run call. */
#pragma once

#include "plans.h"
#include "xla_ffi.h"

/* The arguments of either run call; the buffers fill in the pointers. */
struct call {
  moe_params params;
  moe_param_grads grads;
  moe_forward_args forward;
  moe_backward_args backward;
  void *new_global_counts; /* the result that is forward.global_counts, brought up to date in place */
};

/* Checks the type and the number of elements of every buffer against the plan, and puts its address into `call`. The
 * names, separated by spaces, are those of the fields in moeblas.h; a gradient of a parameter is d + its name. */
moe_status moe_xla_take_forward(const struct xla_frame *frame, const moe_config *config, struct call *call,
                                struct fault *fault);
moe_status moe_xla_take_backward(const struct xla_frame *frame, const moe_config *config, struct call *call,
                                 struct fault *fault);

/* An attribute of the call by name. */
moe_status moe_xla_attribute(const struct xla_frame *frame, const char *name, enum xla_kind kind, void **out,
                             struct fault *fault);
