/* SPDX-License-Identifier: Apache-2.0
 *
 * Where a derivative jumps. The gradient masks of a clamp, and the slope of relu, are steps: an element of h that fp32 noise
 * puts on the other side of one changes a whole term of dh, and no tolerance for rounding covers that. Such elements are
 * rare and can be told from the oracle's h: the noise must be able to move the stored value across the step. */
#include <math.h>

#include "check.h"
#include "oracle.h"

#define NOISE 1e-5 /* of an fp32 sum, relative to 1 + |h|: the limit of fp32 rows */

/* Behind a latent projection x itself has been rounded, which moves h by about a spacing. */
static double noise_of(const moe_config *config, double h) {
  const double spacing = config->dtype == MOE_BF16 ? 0x1p-8 : 0x1p-11;
  return (config->latent > 0 && config->dtype != MOE_FP32 ? spacing : NOISE) * (1 + fabs(h));
}

static bool is_gate(const moe_act_desc *act, int64_t inter, int64_t column) {
  const int64_t run = act->layout != MOE_LAYOUT_INTERLEAVED ? inter
                      : act->interleave > 0                 ? act->interleave
                                                            : 1;
  const bool first = column / run % 2 == 0;
  return !act->gated || (act->layout == MOE_LAYOUT_CONCAT_UP_FIRST ? !first : first);
}

static bool straddles(double h, double step, const moe_config *config) {
  const double noise = noise_of(config, h);
  const moe_dtype dtype = config->dtype;
  return (oracle_round(h - noise, dtype) <= step) != (oracle_round(h + noise, dtype) <= step) ||
         (oracle_round(h - noise, dtype) < step) != (oracle_round(h + noise, dtype) < step);
}

int64_t check_kinks(const moe_config *config, const struct oracle *o) {
  const moe_act_desc *act = &config->act;
  const int64_t width = act->gated ? 2 * config->inter : config->inter;
  const bool clamped = act->up_min != 0 || act->up_max != 0;
  int64_t found = 0;
  if (o->h == NULL || o->offsets == NULL) return 0;
  for (int64_t r = 0; r < o->offsets[config->experts]; r++)
    for (int64_t c = 0; c < width; c++) {
      const double h = o->h[r * width + c];
      const bool gate = is_gate(act, config->inter, c);
      found += gate ? (act->gate_max > 0 && straddles(h, (double)act->gate_max, config)) ||
                          (act->kind == MOE_ACT_RELU && straddles(h, 0, config))
                    : clamped && (straddles(h, (double)act->up_min, config) ||
                                  straddles(h, (double)act->up_max, config));
    }
  return found;
}
