/* SPDX-License-Identifier: Apache-2.0
 * What forward.c and backward.c share: how an op is run, and what lies in the saved buffer. See layer.c. */
#pragma once

#include "plan.h"
#include "workspace.h"

/* One run call, or one measurement of what it would need. */
struct run {
  moe_context *ctx;
  const moe_config *config;
  int64_t tokens;
  moe_stream stream;
  bool measure;
  struct arena workspace;
  struct arena saved;
};

/* Which rows belong to which slots. All NULL: token t is row t, one expert. */
struct row_map {
  int32_t *row_offset;
  int32_t *row_slot;
  int32_t *slot_row;
};

/* What moe_forward leaves for moe_backward. Absent parts are NULL. */
struct saved {
  float *logits;       /* [T,E]; MOE_ENTRY_HIDDEN */
  int32_t *ids;        /* [T,k]; where there is a router */
  float *weights;      /* [T,k]; where there is a router */
  float *slopes;       /* [S,E+1]; where there are losses */
  struct row_map map;  /* not for MOE_ENTRY_ROWS */
  void *h;             /* [R,F2] */
  float *gate_logits;  /* [T] of the shared expert; likewise the next three */
  int32_t *gate_ids;   /* [T] */
  float *gate_weights; /* [T] */
  void *shared_h;      /* [T,S2] */
  void *latent_x;      /* [T,L] x in the latent space */
  void *latent_out;    /* [T,L] what the experts gave, before latent_up */
};

/* Something with a row a routed row: row slot(r)/topk of data or, with topk = 0, row r. */
struct operand {
  const void *data;
  int64_t topk;
};

/* A set of experts that rows are sent through: the routed ones, or the shared one (E = 1, k = 1). */
struct experts {
  int64_t width; /* D: columns of x and y */
  int64_t inter; /* F */
  int64_t count; /* E */
  int64_t topk;  /* k */
  int64_t rows;  /* upper bound R */
  const void *x; /* [T,D], read through the map */
  const void *w1, *b1, *w2, *b2;
  const float *weights; /* by slot, or NULL for 1 */
  bool weight_on_input;
  struct row_map map;
};

/* Runs one op with its scratch on top of the workspace; only takes note of the scratch while measuring. */
#define MOE_OP(name) moe_status moe_run_##name(struct run *run, moe_##name##_args *args);
#include "ops.def"
#undef MOE_OP
#define RUN(run, name, ...) \
  TRY(moe_run_##name((run), &(moe_##name##_args){.size = sizeof(moe_##name##_args), __VA_ARGS__}))

/* Elements of `dtype` on the workspace, or on the saved buffer. */
void *moe_take(struct arena *arena, int64_t count, moe_dtype dtype);

bool moe_has_router(const moe_config *config);
bool moe_has_losses(const moe_config *config);

/* Lays the saved parts out on `arena`; h only if it is to be kept and the plan does not recompute it. */
void moe_lay_out_saved(const struct run *run, struct arena *arena, bool keep_h, struct saved *saved);

/* Where there is a count, makes *padding_mask the mask that includes it; it lies on the workspace. */
moe_status moe_mask_tokens(struct run *run, const int32_t *token_count, const uint8_t **padding_mask);

/* The map of the tokens that are not masked, for everything dense that sums over tokens. */
moe_status moe_map_tokens(struct run *run, const uint8_t *padding_mask, struct row_map *map);

/* The gate of the shared expert is a router of one logit with a sigmoid. */
extern const moe_router_desc moe_gate_router;

/* Sum over a token's rows, weighted or not, on top of `addend` [T,D] if there is one. */
moe_status moe_sum_rows(struct run *run, const struct experts *e, const void *rows, bool weighted,
                        const float *addend, void *out, moe_dtype out_dtype);

/* The tokens' rows of data [T,D] as these experts multiply them: through the map, or copied in its order to `buffer` [R,D] if there is one and
 * that is faster; `sums`: in sums over the rows alone. */
moe_status moe_order_rows(struct run *run, const struct experts *e, const void *data, void *buffer, bool sums,
                          struct operand *rows);

struct experts moe_routed_experts(const struct run *run, const moe_params *params, const struct saved *saved);
struct experts moe_shared_experts(const struct run *run, const moe_params *params, const struct saved *saved);

moe_status moe_run_forward(struct run *run, moe_forward_args *io, const moe_params *params);
moe_status moe_run_backward(struct run *run, moe_backward_args *io, const moe_params *params,
                            const moe_param_grads *grads);
