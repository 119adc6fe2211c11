/* SPDX-License-Identifier: Apache-2.0
 *
 * What: mask[t] = t >= *token_count or padding_mask[t].
 * Idea: a number of tokens that only the device knows becomes a mask, which every op understands already. */
#include "cpu.h"

size_t moe_cpu_token_mask_scratch(const moe_context *ctx, const moe_token_mask_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cpu_token_mask(moe_context *ctx, const moe_token_mask_args *args, moe_stream stream) {
  (void)ctx, (void)stream;
  const int64_t count = args->token_count ? *args->token_count : args->tokens;
  for (int64_t t = 0; t < args->tokens; t++)
    args->mask[t] = t >= count || (args->padding_mask && args->padding_mask[t]);
  return MOE_OK;
}
