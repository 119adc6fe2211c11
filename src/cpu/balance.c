/* SPDX-License-Identifier: Apache-2.0
 *
 * What: the load of the experts, measured (load_stats) and evened out without a loss term (bias_update).
 * Idea: both are one pass over counts[E]. Comparisons with the mean are made in integers, sums in double.
 * Invariant: an expert at exactly the mean load keeps its bias. */
#include "cpu.h"

#include <math.h>

size_t moe_cpu_bias_update_scratch(const moe_context *ctx, const moe_bias_update_args *args) {
  (void)ctx, (void)args;
  return 0;
}

moe_status moe_cpu_bias_update(moe_context *ctx, const moe_bias_update_args *args, moe_stream stream) {
  (void)ctx, (void)stream;
  int64_t total = 0;
  for (int64_t e = 0; e < args->experts; e++) total += args->counts[e];
  for (int64_t e = 0; e < args->experts; e++) {
    const int64_t load = args->counts[e] * args->experts; /* against the mean, both times E */
    args->bias[e] += args->rate * (float)((load < total) - (load > total));
  }
  return MOE_OK;
}

size_t moe_cpu_load_stats_scratch(const moe_context *ctx, const moe_load_stats_args *args) {
  (void)ctx, (void)args;
  return 0;
}

/* Counts come from a tensor: a negative one is taken as 0. */
static double count_of(const moe_load_stats_args *args, int64_t e) {
  return args->counts[e] > 0 ? args->counts[e] : 0;
}

moe_status moe_cpu_load_stats(moe_context *ctx, const moe_load_stats_args *args, moe_stream stream) {
  (void)ctx, (void)stream;
  double total = 0, max = 0, squares = 0, entropy = 0;
  for (int64_t e = 0; e < args->experts; e++) {
    total += count_of(args, e);
    max = fmax(max, count_of(args, e));
  }
  *args->load = (moe_load_summary){0};
  if (total == 0) return MOE_OK;
  const double mean = total / (double)args->experts;
  for (int64_t e = 0; e < args->experts; e++) {
    const double count = count_of(args, e), share = count / total;
    squares += (count - mean) * (count - mean);
    if (count > 0) entropy -= share * log(share);
  }
  *args->load = (moe_load_summary){.total = (float)total,
                                   .max = (float)max,
                                   .mean = (float)mean,
                                   .cv = (float)(sqrt(squares / (double)args->experts) / mean),
                                   .max_over_mean = (float)(max / mean),
                                   .entropy = (float)entropy};
  return MOE_OK;
}
