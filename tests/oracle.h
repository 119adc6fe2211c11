/* SPDX-License-Identifier: Apache-2.0
 *
 * The oracle: the layer of moeblas.h in double, by plain loops, forward and backward. It shares no code with src/ (only the
 * public enums, the config struct, and the formulas of moeblas_act.def) and is itself checked by finite differences.
 *
 * Two references. Ideal (staged = MOE_DTYPE_DEFAULT): double throughout. Staged (staged = a dtype): values are rounded
 * to that dtype exactly where the library rounds, so that what is left is fp32 accumulation error:
 *     xl, h, act(h rounded), y, the latent combine, out; and backward: latent dout, dh, weight*act(h), dx rows, latent dx, dx;
 *     parameter gradients to grad_dtype; dlogits of MOE_ENTRY_LOGITS to logits_dtype. Router math is never rounded. */
#pragma once

#include "moeblas.h"

struct oracle {
  /* in: the caller's arrays, in double; NULL as in moe_forward_args. Layouts are those of moeblas.h */
  const moe_config *config;
  moe_dtype staged;
  int64_t tokens;
  const double *x, *logits, *router_weight, *router_bias, *correction_bias;
  const int32_t *given_ids; /* as moe_forward_args */
  const double *given_weights;
  const int32_t *row_offset;
  const uint8_t *padding_mask;
  const int64_t *global_counts; /* [E+1] before the call; MOE_BALANCE_GLOBAL */
  const double *w1, *b1, *w2, *b2, *shared_w1, *shared_w2, *shared_gate, *latent_down, *latent_up;
  const double *dout; /* NULL: forward only */
  double loss_scale;  /* 0: 1 */
  int skip_losses;
  /* Decisions to follow instead of the oracle's own, so that a near tie that fp32 breaks otherwise is not an error:
   * the chosen ids [T,k], and which slots have no row (slot_row < 0). NULL: decide here. */
  const int32_t *use_ids;
  const int32_t *use_slot_row;
  const float *
      use_weights; /* [T,k] what the experts are weighed with; `weights` and the router stay the oracle's own */

  /* out: allocated by oracle_run, freed by oracle_free; NULL where the configuration has no such thing */
  double *out;      /* [T,H] */
  double *keys;     /* [T,E] selection keys of the router, -inf where the group was not chosen or z is NaN */
  double *raw_keys; /* [T,E] the same before groups are chosen */
  double *z;        /* [T,E] logits, their bias included */
  int32_t *ids;     /* [T,k] */
  double *weights;  /* [T,k] */
  int32_t *counts;  /* [E] before drops */
  int32_t *row_of_slot; /* [T,k] row or -1 */
  int32_t *offsets;     /* [E+1] */
  double *h;            /* [R,F2] */
  double *h_sums;       /* [R,F2] h before it is rounded */
  double *dh_most;      /* [R,F2] |dh| where every slope was 1 and nothing clamped */
  double *latent_x;     /* [T,L] */
  double losses[2];
  double *dx, *dlogits,
      *dtopk_weights; /* dlogits for HIDDEN and LOGITS; dtopk_weights [T,k] for all entries but ROWS ([T]) */
  double *drouter_weight, *drouter_bias, *dw1, *db1, *dw2, *db2;
  double *dshared_w1, *dshared_w2, *dshared_gate, *dlatent_down, *dlatent_up;
};

/* Fills the outputs. Returns 0, or -1 when memory is short. The configuration is taken to be one that moe_plan_create
 * accepts (defaults need not be filled in). */
int oracle_run(struct oracle *o);
void oracle_free(struct oracle *o);

/* v rounded to the nearest value of dtype, ties to even; MOE_DTYPE_DEFAULT returns v. Written independently of src/format.h. */
double oracle_round(double v, moe_dtype dtype);
/* f and f' of an activation, in double, from the rows of moeblas_act.def. */
double oracle_act(moe_activation kind, double x, double alpha, double beta);
double oracle_dact(moe_activation kind, double x, double alpha, double beta);
