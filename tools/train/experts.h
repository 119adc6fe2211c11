/* SPDX-License-Identifier: Apache-2.0
 *
 * The MoE layers of the model, on a back end of their own. The caller's arrays are fp32 in host memory; what a layer needs
 * is copied to the back end before it runs and back when it has run, and converted there if the layers run in bf16.
 * With the caller's own context and in fp32 nothing is copied: the layers work on the caller's arrays. */
#pragma once

#include "moeblas.h"

/* One layer's parameters lie in one run of floats: router weights, then w1, then w2. So do their gradients. */
struct experts_run {
  int64_t w1; /* where they start, and the length of the run */
  int64_t w2;
  int64_t floats;
};

struct experts;

/* For calls of up to `tokens` tokens of the plan that `config` describes; grad_dtype and router_dtype must be MOE_FP32.
 * host: the context in whose memory the caller's arrays are. Both contexts must outlive it. NULL on failure, with a
 * sentence. */
struct experts *experts_create(moe_context *host, moe_context *ctx, const moe_config *config,
                               const struct experts_run *run, int64_t layers, int64_t tokens, int training,
                               char *error, size_t error_bytes);
void experts_destroy(struct experts *e);

/* Takes the layer's parameters, which stay as they are until the next call. correction_bias [experts] may be NULL. */
moe_status experts_load(struct experts *e, int64_t layer, const float *params, const float *correction_bias);
/* x, out [tokens,hidden]; counts [experts] and losses [2] as in moe_forward_args. */
moe_status experts_forward(struct experts *e, int64_t layer, int64_t tokens, const float *x, float *out,
                           int32_t *counts, float *losses);
/* After experts_forward with the same x. dx [tokens,hidden]; dparams: a run, overwritten. */
moe_status experts_backward(struct experts *e, int64_t layer, int64_t tokens, const float *x,
                            const float *dout, float *dx, float *dparams);
