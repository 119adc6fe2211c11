/* SPDX-License-Identifier: Apache-2.0
 * One Mixture-of-Experts layer, forward and backward, on the CPU: 64 tokens, 8 experts, 2 of them a token. C11 and C++17.
 *     cc layer.c $(pkg-config --cflags --libs moeblas) -lm -o layer && ./layer */
#include <math.h>
#include <moeblas.h>
#include <stdio.h>
#include <stdlib.h>

static const int T = 64, H = 48, F = 80, E = 8, K = 2; /* tokens, hidden, inter, experts, topk */

static void must(moe_status status) {
  if (status == MOE_OK) return;
  fprintf(stderr, "%s: %s\n", moe_status_name(status), moe_last_error());
  exit(1);
}

/* n numbers that look random, of the given amplitude. */
static float *numbers(int n, double amplitude) {
  float *v = (float *)calloc((size_t)n, sizeof *v);
  if (v == NULL) exit(1);
  for (int i = 0; i < n; i++) v[i] = (float)(amplitude * sin(1.7 * i + 0.3 * (i % 31)));
  return v;
}

int main(void) {
  moe_context *ctx;
  must(moe_context_create(&ctx, MOE_BACKEND_CPU, 0));

  moe_config config = MOE_CONFIG_INIT; /* what is not set is 0, and 0 is the default */
  config.hidden = H, config.inter = F, config.experts = E, config.topk = K;
  config.dtype = MOE_FP32;
  config.act.kind = MOE_ACT_SILU, config.act.gated = 1; /* SwiGLU */
  config.router.balance = MOE_BALANCE_BATCH, config.router.balance_coeff = 0.01f;
  moe_plan *plan;
  must(moe_plan_create(&plan, ctx, &config));

  float *w1 = numbers(E * 2 * F * H, 0.15), *w2 = numbers(E * H * F, 0.15);
  moe_params params = MOE_PARAMS_INIT;
  params.router_weight = numbers(E * H, 0.3), params.w1 = w1, params.w2 = w2;

  float *x = numbers(T * H, 1), *out = numbers(T * H, 0), *losses = numbers(2, 0);
  moe_forward_args forward = MOE_FORWARD_ARGS_INIT;
  forward.tokens = T, forward.params = &params, forward.x = x, forward.out = out, forward.losses = losses;
  forward.saved_bytes = moe_plan_saved(plan, T), forward.saved = malloc(forward.saved_bytes);
  forward.workspace_bytes = moe_plan_workspace(plan, T), forward.workspace = malloc(forward.workspace_bytes);
  must(moe_forward(plan, &forward, NULL));

  float *dx = numbers(T * H, 0), *dw2 = numbers(E * H * F, 0);
  moe_param_grads grads = MOE_PARAM_GRADS_INIT; /* gradients that are not wanted stay NULL */
  grads.w2 = dw2;
  moe_backward_args backward = MOE_BACKWARD_ARGS_INIT;
  backward.tokens = T, backward.params = &params, backward.x = x, backward.dx = dx, backward.grads = &grads;
  backward.dout = out; /* of the loss |out|^2 / 2 */
  backward.saved = forward.saved, backward.saved_bytes = forward.saved_bytes;
  backward.workspace = forward.workspace, backward.workspace_bytes = forward.workspace_bytes;
  must(moe_backward(plan, &backward, NULL));

  double square = 0, product = 0; /* out is linear in w2, so <dw2, w2> must be |out|^2 */
  for (int i = 0; i < T * H; i++) square += (double)out[i] * out[i];
  for (int i = 0; i < E * H * F; i++) product += (double)dw2[i] * w2[i];
  printf("|out|^2 = %.6g  <dw2,w2> = %.6g  balancing loss = %.4g\n", square, product, losses[0]);

  moe_plan_destroy(plan);
  moe_context_destroy(ctx);
  return !(fabs(square - product) < 1e-5 * square);
}
