/* SPDX-License-Identifier: Apache-2.0
 * The plans of this process, by configuration and device. */
#pragma once

#include "fault.h"

struct known_plan {
  moe_backend backend;
  int device;
  moe_config config; /* zero-extended to this build's size */
  moe_plan *plan;
  const struct known_plan *next;
};

/* Finds the plan of `bytes` bytes of a moe_config (any alignment) or makes it, and warms it up on `stream`. The result
 * lives as long as the process. */
moe_status moe_xla_find_plan(const void *config, size_t bytes, moe_backend backend, int device,
                             moe_stream stream, const struct known_plan **out, struct fault *fault);
