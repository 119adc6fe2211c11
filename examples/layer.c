/* SPDX-License-Identifier: Apache-2.0
 * One Mixture-of-Experts layer, forward and backward, on the CPU: 64 tokens, 8 experts, 2 of them a token. C11 and C++17.
 *     cc layer.c -lmoeblas -lm && ./a.out */
#include <math.h>
#include <moeblas.h>
#include <stdio.h>
#include <stdlib.h>

enum {
  TOKENS = 64,
  HIDDEN = 48,
  INTER = 80,
  EXPERTS = 8,
  TOPK = 2
};

static void must(moe_status status) {
  if (status == MOE_OK) return;
  fprintf(stderr, "%s: %s\n", moe_status_name(status), moe_last_error());
  exit(1);
}

/* n numbers that look random and have the given amplitude. */
static float *numbers(size_t n, double amplitude) {
  float *v = (float *)calloc(n, sizeof *v);
  if (v == NULL) exit(1);
  for (size_t i = 0; i < n; i++) v[i] = (float)(amplitude * sin(1.7 * (double)i + 0.3 * (double)(i % 31)));
  return v;
}

int main(void) {
  moe_context *ctx = NULL;
  must(moe_context_create(&ctx, MOE_BACKEND_CPU, 0));

  moe_config config = MOE_CONFIG_INIT;
  config.hidden = HIDDEN, config.inter = INTER, config.experts = EXPERTS, config.topk = TOPK;
  config.dtype = MOE_FP32, config.act.kind = MOE_ACT_SILU, config.act.gated = 1; /* SwiGLU */
  config.router.renormalize = 1, config.router.balance = MOE_BALANCE_BATCH,
  config.router.balance_coeff = 0.01f;
  config.router.z_coeff = 1e-3f;
  moe_plan *plan = NULL;
  must(moe_plan_create(&plan, ctx, &config));

  moe_params params = MOE_PARAMS_INIT;
  params.router_weight = numbers(EXPERTS * HIDDEN, 0.3);
  params.w1 = numbers(EXPERTS * 2 * INTER * HIDDEN, 0.15),
  params.w2 = numbers(EXPERTS * HIDDEN * INTER, 0.15);

  float losses[2];
  moe_forward_args forward = MOE_FORWARD_ARGS_INIT;
  forward.tokens = TOKENS, forward.params = &params, forward.x = numbers(TOKENS * HIDDEN, 1);
  forward.out = numbers(TOKENS * HIDDEN, 0), forward.losses = losses;
  forward.saved_bytes = moe_plan_saved(plan, TOKENS), forward.saved = malloc(forward.saved_bytes);
  forward.workspace_bytes = moe_plan_workspace(plan, TOKENS),
  forward.workspace = malloc(forward.workspace_bytes);
  must(moe_forward(plan, &forward, NULL));

  moe_param_grads grads = MOE_PARAM_GRADS_INIT;
  float *dw2 = numbers(EXPERTS * HIDDEN * INTER, 0), *dx = numbers(TOKENS * HIDDEN, 0);
  grads.w2 = dw2;
  moe_backward_args backward = MOE_BACKWARD_ARGS_INIT;
  backward.tokens = TOKENS, backward.params = &params, backward.x = forward.x, backward.grads = &grads;
  backward.dout = forward.out, backward.dx = dx; /* the gradient of |out|^2 / 2 is out */
  backward.saved = forward.saved, backward.saved_bytes = forward.saved_bytes;
  backward.workspace = forward.workspace, backward.workspace_bytes = forward.workspace_bytes;
  must(moe_backward(plan, &backward, NULL));

  double out2 = 0, dx2 = 0, dw2_w2 = 0; /* |out|^2 is what <dw2, w2> must give too: out is linear in w2 */
  for (int i = 0; i < TOKENS * HIDDEN; i++) out2 += pow(((float *)forward.out)[i], 2), dx2 += pow(dx[i], 2);
  for (int i = 0; i < EXPERTS * HIDDEN * INTER; i++) dw2_w2 += (double)dw2[i] * ((const float *)params.w2)[i];
  printf("moeblas %s: |out|^2 %.5g  <dw2,w2> %.5g  |dx|^2 %.5g  balance loss %.5g  z loss %.5g\n",
         moe_version(), out2, dw2_w2, dx2, losses[0], losses[1]);
  return !(fabs(out2 - dw2_w2) <
           1e-4 * out2); /* the process gives its memory back; plan and context likewise */
}
