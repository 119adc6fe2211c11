/* SPDX-License-Identifier: Apache-2.0
 *
 * What: the activation and its gradient, unfused.
 * Idea: a block of a row is split into its gate and up halves in fp32, whatever the layout; each step is
 * then one plain loop with one activation in it, which vectorises.
 * Invariant: a block reads and writes the same columns of h, all of it read before any is written, so dh
 * may be h. */
#include "cpu.h"

#include "../act.h"

enum {
  BLOCK = 512
}; /* columns of a */

size_t moe_cpu_act_scratch(const moe_context *ctx, const moe_act_args *args) {
  (void)ctx, (void)args;
  return 0;
}

size_t moe_cpu_act_backward_scratch(const moe_context *ctx, const moe_act_backward_args *args) {
  (void)ctx, (void)args;
  return 0;
}

/* A block of one row: columns first .. first+n-1 of a, and where that row of h starts. */
struct block {
  const moe_act_desc *act;
  moe_dtype dtype;
  int64_t inter;
  int64_t row;
  int64_t first;
  int64_t n;
};

static struct block block_at(const moe_act_desc *act, moe_dtype dtype, int64_t inter, int64_t r,
                             int64_t first) {
  const int64_t n = inter - first < BLOCK ? inter - first : BLOCK;
  return (struct block){act, dtype, inter, r * inter * (act->gated ? 2 : 1), first, n};
}

/* Halves that alternate in short groups, whole groups a block: the block's 2n columns of h lie together. */
static bool is_woven(const struct block *b) {
  return b->act->gated && b->act->layout == MOE_LAYOUT_INTERLEAVED && BLOCK % b->act->interleave == 0;
}

/* How many gate columns of h lie next to one another from element f of the block on. */
static int64_t run_length(const struct block *b, int64_t f) {
  const int64_t left = b->n - f;
  if (!b->act->gated || b->act->layout != MOE_LAYOUT_INTERLEAVED) return left;
  const int64_t run = b->act->interleave - (b->first + f) % b->act->interleave;
  return run < left ? run : left;
}

static int64_t gate_at(const struct block *b, int64_t f) {
  return b->row + (b->act->gated ? moe_gate_column(b->act, b->inter, b->first + f) : b->first + f);
}

static void read_halves(const struct block *b, const void *h, float *gate, float *up) {
  if (is_woven(b)) {
    float both[2 * BLOCK];
    const int64_t group = b->act->interleave;
    moe_cpu_read(both, h, b->dtype, gate_at(b, 0), 2 * b->n);
    for (int64_t f = 0; f < b->n; f += group)
      for (int64_t i = f; i < f + group; i++) gate[i] = both[f + i], up[i] = both[f + i + group];
    return;
  }
  const int64_t distance = moe_up_distance(b->act, b->inter);
  for (int64_t f = 0, run; f < b->n; f += run) {
    run = run_length(b, f);
    moe_cpu_read(gate + f, h, b->dtype, gate_at(b, f), run);
    if (b->act->gated) moe_cpu_read(up + f, h, b->dtype, gate_at(b, f) + distance, run);
  }
}

static void write_halves(const struct block *b, void *h, const float *gate, const float *up) {
  if (is_woven(b)) {
    float both[2 * BLOCK];
    const int64_t group = b->act->interleave;
    for (int64_t f = 0; f < b->n; f += group)
      for (int64_t i = f; i < f + group; i++) both[f + i] = gate[i], both[f + i + group] = up[i];
    moe_cpu_write(h, b->dtype, gate_at(b, 0), both, 2 * b->n);
    return;
  }
  const int64_t distance = moe_up_distance(b->act, b->inter);
  for (int64_t f = 0, run; f < b->n; f += run) {
    run = run_length(b, f);
    moe_cpu_write(h, b->dtype, gate_at(b, f), gate + f, run);
    if (b->act->gated) moe_cpu_write(h, b->dtype, gate_at(b, f) + distance, up + f, run);
  }
}

/* y[i] = f(min(gate[i], gate_max)); the switch is outside of the loop. */
static void gate_values(const moe_act_desc *act, float *restrict y, const float *restrict gate, int64_t n) {
  const float alpha = act->alpha, beta = act->beta, max = act->gate_max;
  switch ((int)act->kind) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, f, df)                                    \
  case value:                                                                                    \
    for (int64_t i = 0; i < n; i++) y[i] = act_##fn(gate[i] > max ? max : gate[i], alpha, beta); \
    break;
#include "moeblas_act.def"
#undef MOE_ACT
  default: break;
  }
}

/* y[i] = d f(min(gate[i], gate_max)) / d gate[i]. */
static void gate_slopes(const moe_act_desc *act, float *restrict y, const float *restrict gate, int64_t n) {
  const float alpha = act->alpha, beta = act->beta, max = act->gate_max;
  switch ((int)act->kind) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a0, b0, f, df) \
  case value:                                                 \
    for (int64_t i = 0; i < n; i++) {                         \
      const float slope = dact_##fn(gate[i], alpha, beta);    \
      y[i] = gate[i] > max ? 0.0f : slope;                    \
    }                                                         \
    break;
#include "moeblas_act.def"
#undef MOE_ACT
  default: break;
  }
}

/* y[i] *= v(up[i]) + offset, and its derivative. Two loops, because one would compute the tanh of every
 * element and then choose; a constant up_beta lets it go. */
static void times_up(const moe_act_desc *act, float *restrict y, const float *restrict up, int64_t n) {
  moe_act_desc bare = *act;
  bare.up_beta = 0;
  if (act->up_beta > 0)
    for (int64_t i = 0; i < n; i++) y[i] *= moe_act_up(act, up[i]);
  else
    for (int64_t i = 0; i < n; i++) y[i] *= moe_act_up(&bare, up[i]);
}

static void times_dup(const moe_act_desc *act, float *restrict y, const float *restrict up, int64_t n) {
  moe_act_desc bare = *act;
  bare.up_beta = 0;
  if (act->up_beta > 0)
    for (int64_t i = 0; i < n; i++) y[i] *= moe_act_dup(act, up[i]);
  else
    for (int64_t i = 0; i < n; i++) y[i] *= moe_act_dup(&bare, up[i]);
}

static void act_block(const moe_act_args *args, int64_t r, int64_t first) {
  float gate[BLOCK], up[BLOCK], a[BLOCK];
  const struct block b = block_at(args->act, args->dtype, args->inter, r, first);
  read_halves(&b, args->h, gate, up);
  gate_values(args->act, a, gate, b.n);
  if (args->act->gated) times_up(args->act, a, up, b.n);
  moe_cpu_write(args->a, args->dtype, r * args->inter + first, a, b.n);
}

moe_status moe_cpu_act(moe_context *ctx, const moe_act_args *args, moe_stream stream) {
  (void)stream;
#pragma omp parallel for collapse(2) schedule(static) num_threads(ctx->units)
  for (int64_t r = 0; r < args->rows; r++)
    for (int64_t first = 0; first < args->inter; first += BLOCK) act_block(args, r, first);
  return MOE_OK;
}

static void backward_block(const moe_act_backward_args *args, int64_t r, int64_t first) {
  float gate[BLOCK], up[BLOCK], da[BLOCK], dgate[BLOCK], dup[BLOCK];
  const moe_act_desc *act = args->act;
  const struct block b = block_at(act, args->dtype, args->inter, r, first);
  read_halves(&b, args->h, gate, up);
  moe_cpu_read(da, args->da, args->dtype, r * args->inter + first, b.n);
  gate_slopes(act, dgate, gate, b.n);
  if (act->gated) {
    times_up(act, dgate, up, b.n);
    gate_values(act, dup, gate, b.n);
    times_dup(act, dup, up, b.n);
    for (int64_t i = 0; i < b.n; i++) dup[i] *= da[i];
  }
  for (int64_t i = 0; i < b.n; i++) dgate[i] *= da[i];
  write_halves(&b, args->dh, dgate, dup);
}

moe_status moe_cpu_act_backward(moe_context *ctx, const moe_act_backward_args *args, moe_stream stream) {
  (void)stream;
#pragma omp parallel for collapse(2) schedule(static) num_threads(ctx->units)
  for (int64_t r = 0; r < args->rows; r++)
    for (int64_t first = 0; first < args->inter; first += BLOCK) backward_block(args, r, first);
  return MOE_OK;
}
