/* SPDX-License-Identifier: Apache-2.0
 *
 * The numbers of the oracle: rounding to a format by scaling, and the activations as moeblas_act.def writes them. */
#include "oracle_internal.h"

/* v to `bits` significant bits, not below the last place of the smallest normal number 2^lowest. */
static double round_bits(double v, int bits, int lowest, double largest) {
  if (v == 0 || !isfinite(v)) return v;
  const int exponent = ilogb(v) < lowest ? lowest : ilogb(v);
  const double rounded = ldexp(rint(ldexp(v, bits - 1 - exponent)), exponent - bits + 1);
  return fabs(rounded) > largest ? copysign(INFINITY, v) : rounded;
}

double oracle_round(double v, moe_dtype dtype) {
  switch ((int)dtype) {
  case MOE_FP32: return (float)v;
  case MOE_BF16: return round_bits(v, 8, -126, 0x1.fep127);
  case MOE_FP16: return round_bits(v, 11, -14, 65504);
  default: return v;
  }
}

#define SIG logistic

double oracle_act(moe_activation kind, double x, double alpha, double beta) {
  switch ((int)kind) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a, b, f, df) \
  case value:                                               \
    return (void)alpha, (void)beta, (f);
#include "moeblas_act.def"
#undef MOE_ACT
  default: return NAN;
  }
}

double oracle_dact(moe_activation kind, double x, double alpha, double beta) {
  switch ((int)kind) {
#define MOE_ACT(ENUM, value, fn, plain, gated, a, b, f, df) \
  case value:                                               \
    return (void)alpha, (void)beta, (df);
#include "moeblas_act.def"
#undef MOE_ACT
  default: return NAN;
  }
}
