/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the oracle share: the run with its resolved configuration, and the vector loops. Letters of
 * moeblas.h in comments: T tokens, H hidden, F inter, E experts, k topk, D = L when latent, else H. */
#pragma once

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "oracle.h"

/* A bank of experts with their rows: the routed ones, or the shared expert as a bank of one whose rows are the live
 * tokens. Weights and their gradients are [out,in] here whatever the configuration says. */
struct mlp {
  const moe_act_desc *act;
  int weight_on_input;
  moe_dtype rounding;                     /* of h, act(h), y, dh, weight*act(h) and the dx rows */
  int64_t experts, width, inter, columns; /* E, D, F, and 2F when gated, else F */
  const double *x, *dcombined;            /* [T,D] */
  const double *w1, *b1, *w2, *b2;
  int32_t *offsets;     /* [E+1] */
  int64_t *token;       /* [R] or -1: the row takes no part */
  double *weight;       /* [R] */
  double *h, *a, *y;    /* [R,columns], [R,F], [R,D] */
  double *h_sums;       /* [R,columns] h before it is rounded, or NULL */
  double *dh_most;      /* [R,columns] |dh| where every slope was 1, or NULL */
  double *da, *dh, *dx; /* [R,F], [R,columns], [R,D]; dx includes the weight when that is on the input */
  double *dweight;      /* [R] */
  double *dw1, *db1, *dw2, *db2;
};

struct run {
  struct oracle *o;
  moe_config c; /* no 0 that stands for a default */
  int has_router;
  int64_t tokens, hidden, experts, topk, width;
  void *block[64]; /* scratch memory, freed at the end */
  int blocks;
  int failed;    /* an allocation did */
  uint8_t *live; /* [T]: neither masked nor a tail row */
  int64_t live_tokens;
  struct mlp routed, shared;
  const double *latent_down, *latent_up;               /* [L,H], [H,L] */
  double *latent_x, *latent_y, *latent_dy, *latent_dx; /* [T,L] */
  double *transposer;
  /* router */
  double *z, *score, *share; /* [T,E] logits without NaN, score, score normalised to sum 1 */
  double *logsumexp;         /* [T] */
  double *raw;               /* [T,k] weights before renormalisation and scale */
  double *slope;             /* [sequences,E] gradient of the balancing loss with respect to share */
  double *slot_logit, *group_key, *dscore, *dshare;
  uint8_t *taken, *group_taken;
  int32_t *slot_list; /* slots of one expert, before drops */
};

/* oracle_router.c */
void oracle_route(struct run *w);          /* ids, weights, counts, losses */
void oracle_sort(struct run *w);           /* offsets, row_of_slot, token and weight of the routed rows */
void oracle_route_backward(struct run *w); /* dlogits from dtopk_weights and the losses */
int64_t oracle_sequences(const struct run *w);

static inline double dot(const double *a, const double *b, int64_t n) {
  double even = 0, odd = 0; /* two chains, for speed */
  int64_t i = 0;
  for (; i + 1 < n; i += 2) {
    even += a[i] * b[i];
    odd += a[i + 1] * b[i + 1];
  }
  return even + odd + (i < n ? a[i] * b[i] : 0);
}

static inline void add_scaled(double *y, double scale, const double *x, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] += scale * x[i];
}

static inline double logistic(double v) { return 1 / (1 + exp(-v)); }
