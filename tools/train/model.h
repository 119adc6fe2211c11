/* SPDX-License-Identifier: Apache-2.0
 *
 * The model that `moeblas train` trains: a byte-level decoder-only transformer with MoE feed-forward layers, in fp32
 * on the CPU; the MoE layers may run on another back end and in bf16 (experts.h).
 *
 *     x = embed(bytes)
 *     x = x + attention(rmsnorm(x)) Wproj^T        causal, rotary     } each layer
 *     x = x + moe(rmsnorm(x))                      swiglu experts     }
 *     logits = rmsnorm(x) Whead^T                  of the next byte
 *
 * All memory is had by model_create; the other functions allocate nothing. Parameters, and gradients, lie in one array
 * each, so that the optimizer and the gradient norm see a flat vector. Bits do not depend on the number of threads. */
#pragma once

#include "experts.h"
#include "ops.h"

enum {
  MODEL_BYTES = 256 /* the vocabulary */
};

enum model_balance {
  BALANCE_LOSS, /* softmax router, Switch balancing loss and z-loss */
  BALANCE_BIAS  /* sigmoid router, a correction bias moved against the load after each step */
};

struct model_config {
  int64_t layers;
  int64_t dim;
  int64_t heads;   /* dim / heads is even */
  int64_t experts; /* a multiple of 4: the library wants each layer's biases aligned */
  int64_t topk;
  int64_t inter;
  int64_t sequence; /* longest context, in bytes */
  enum model_balance balance;
  moe_dtype dtype; /* of the MoE layers: MOE_BF16, else fp32 */
};

struct param {
  char name[48];
  int64_t shape[3];
  int rank;
  int64_t offset; /* into value and grad */
  int64_t count;
  float init; /* standard deviation of the first values; 0: all ones */
  int decay;  /* 1: a matrix, subject to weight decay */
};

enum model_time { /* where a step's seconds go */
  TIME_DENSE,
  TIME_ATTENTION,
  TIME_EXPERTS,
  TIME_OTHER,
  TIME_COUNT
};

struct layer {
  float *x; /* input */
  float *rstd1;
  float *qkv; /* rotated; its k and v are what model_step reads of the bytes before */
  float *lse;
  float *mixed; /* what attention gives, before Wproj */
  float *x2;    /* after attention */
  float *rstd2;
  int32_t *counts;              /* [experts] slots of the last forward */
  _Alignas(16) float losses[2]; /* balancing loss, z-loss of the last forward */
};

struct model {
  struct model_config config;
  moe_context *ctx;
  struct experts *experts;
  int64_t tokens;   /* most in a call */
  int64_t position; /* of the first token of the running call in its sequence: 0 but in model_step */
  int training;     /* gradients and one set of activations a layer; else the layers share all but qkv */

  struct param *param;
  int params;
  float *value;
  float *grad;            /* NULL unless training */
  int64_t count;          /* of value and grad, padding included */
  float *correction_bias; /* [layers, experts], all 0 with BALANCE_LOSS */

  struct layer *layer;
  float *x; /* after the last layer */
  float *rstd;
  float *norm; /* scratch [tokens, dim], as dx, dnorm, dmixed */
  float *dx, *dnorm, *dmixed;
  float *dqkv;
  float *step_qkv; /* of the byte of model_step: its place in qkv may not be aligned as moe_gemm wants it */
  float *logits;   /* [tokens, 256], then its gradient */
  double *row_loss;
  float *rope;
  struct attention attention;
  void *workspace; /* of the dense products */
  size_t workspace_bytes;
  void *memory; /* owns all of the above but what the experts have */
  double seconds[TIME_COUNT];
  double mark; /* when the last of them was taken */
};

/* For calls of up to `tokens` tokens. Parameters are 0 until model_init or a checkpoint fills them. ctx is one of the CPU,
 * experts_ctx the one that the MoE layers run on, which may be the same; both must outlive the model. NULL on failure,
 * with a sentence. */
struct model *model_create(moe_context *ctx, moe_context *experts_ctx, const struct model_config *config,
                           int64_t tokens, int training, char *error, size_t error_bytes);
void model_destroy(struct model *m);

/* Random first values: the same for equal seeds and configurations. */
void model_init(struct model *m, uint64_t seed);

/* Parameters, and those that one token uses (topk of the experts, one row of the embedding). */
int64_t model_params(const struct model_config *config);
int64_t model_active_params(const struct model_config *config);

/* input: `sequences` runs of `length` bytes. Leaves m->logits. */
moe_status model_forward(struct model *m, const uint8_t *input, int64_t sequences, int64_t length);
/* One more byte of the one sequence of which bytes 0 .. position-1 went through model_forward or model_step last, with
 * 0 < position < config.sequence. Leaves its logits in m->logits[0..255]. */
moe_status model_step(struct model *m, uint8_t byte, int64_t position);
/* The same as model_forward and *loss = mean of -ln p(target). */
moe_status model_loss(struct model *m, const uint8_t *input, const uint8_t *target, int64_t sequences,
                      int64_t length, double *loss);
/* The same and m->grad = gradient of *loss plus the router losses of all layers. */
moe_status model_gradient(struct model *m, const uint8_t *input, const uint8_t *target, int64_t sequences,
                          int64_t length, double *loss);
/* BALANCE_BIAS: moves the correction biases by `rate` against the load of the last forward; else does nothing. */
moe_status model_rebalance(struct model *m, float rate);
