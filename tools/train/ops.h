/* SPDX-License-Identifier: Apache-2.0
 *
 * The parts of the model that are not a matrix product or a MoE layer, forward and backward, in fp32.
 * Loops run on as many threads as OpenMP is set to; no result depends on that number, because every sum belongs to
 * one iteration of a parallel loop and runs in a fixed order. Arrays are row-major and do not overlap. */
#pragma once

#include <stdint.h>

/* out[t,:] = table[byte[t],:]; and dtable (overwritten), summed over ascending t. */
void embed(float *out, const float *table, const uint8_t *byte, int64_t tokens, int64_t dim);
void embed_backward(float *dtable, const float *dout, const uint8_t *byte, int64_t tokens, int64_t dim);

/* rstd[t] = 1 / sqrt(mean x[t,:]^2 + 1e-5);  rmsnorm_apply: out[t,:] = x[t,:] rstd[t] gain. */
void rmsnorm_rstd(float *rstd, const float *x, int64_t tokens, int64_t dim);
void rmsnorm_apply(float *out, const float *x, const float *rstd, const float *gain, int64_t tokens,
                   int64_t dim);
/* dx is added to if `accumulate`, dgain is overwritten. */
void rmsnorm_backward(float *dx, float *dgain, const float *dout, const float *x, const float *rstd,
                      const float *gain, int64_t tokens, int64_t dim, int accumulate);

/* Causal attention of `sequences` sequences of `length` tokens. qkv is [tokens, 3, heads, width]. */
struct attention {
  int64_t sequences;
  int64_t length;
  int64_t heads;
  int64_t width;  /* of a head, even */
  float *scratch; /* attention_scratch floats */
};
int64_t attention_scratch(const struct attention *shape);

/* table [length, width/2, 2] = cos and sin of t 10000^(-2i/width): rope turns the pair (i, i + width/2) of q and k of
 * every token by its angle, or back if `inverse` (which is also the gradient). */
void rope_table(float *table, int64_t length, int64_t width);
void rope(const struct attention *shape, float *qkv, const float *table, int inverse);

/* out [tokens, heads, width] = softmax(q k / sqrt(width)) v;  lse [tokens, heads] is kept for the backward. */
void attention(const struct attention *shape, float *out, float *lse, const float *qkv);
/* out [heads, width] for the last of `tokens` <= length tokens of one sequence alone. Other bits than attention. */
void attention_step(const struct attention *shape, float *out, const float *qkv, int64_t tokens);
/* dqkv is overwritten. The probabilities are computed again from qkv and lse. */
void attention_backward(const struct attention *shape, float *dqkv, const float *dout, const float *out,
                        const float *lse, const float *qkv);

/* Mean over tokens of -log softmax(logits[t,:])[target[t]], in nats. With `gradient`, logits becomes its gradient.
 * row_loss [tokens] receives each token's share of the sum. */
double cross_entropy(float *logits, double *row_loss, const uint8_t *target, int64_t tokens, int64_t classes,
                     int gradient);

/* out[i] = a[i] + b[i]. */
void add(float *out, const float *a, const float *b, int64_t count);
