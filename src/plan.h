/* SPDX-License-Identifier: Apache-2.0
 * The plan: a checked configuration in which no field stands for a default any more; and the checks it shares with ops.c. */
#pragma once

#include "backend.h"
#include "util.h"

#define MOE_MAX_WIDTH \
  (1 << 24) /* of hidden, inter, latent, shared_inter: keeps every product of sizes in 63 bits */

struct moe_plan {
  moe_context *ctx;
  moe_config config;
};

/* Columns of h for an inner width. */
static inline int64_t moe_preact_width(const moe_act_desc *act, int64_t inter) {
  return act->gated ? 2 * inter : inter;
}

/* Copies a size-first struct of the caller: a shorter one (older header) is filled up with zeros, a longer one is refused
 * unless what this library does not know is zero. `what` names it in the sentence. */
moe_status moe_take_struct(const char *what, void *copy, size_t copy_size, const void *given);

/* Check a descriptor and replace its zeros by what they stand for. `what` opens the sentence. */
moe_status moe_resolve_act(const char *what, moe_act_desc *act, int64_t inter);
moe_status moe_resolve_router(const char *what, moe_router_desc *router, int64_t experts, int64_t topk);
moe_status moe_check_dtype(const char *what, const char *field, moe_dtype dtype);
moe_status moe_check_range(const char *what, const char *field, int64_t value, int64_t low, int64_t high);
