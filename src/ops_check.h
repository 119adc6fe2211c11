/* SPDX-License-Identifier: Apache-2.0
 * The checks of the public ops, one a struct of moeblas_ops.h: sizes, enums and defaults in sizes_X (which also serves
 * the scratch query, where arrays may not be set yet), arrays in arrays_X. */
#pragma once

#include "plan.h"

/* Descriptors with their defaults filled in; the copied arguments are made to point here. */
struct resolved {
  moe_router_desc router;
  moe_act_desc act;
};

#define MOE_OP(name)                                                               \
  moe_status moe_sizes_##name(moe_##name##_args *args, struct resolved *resolved); \
  moe_status moe_arrays_##name(const moe_##name##_args *args);
#include "ops.def"
#undef MOE_OP
