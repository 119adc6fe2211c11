/* SPDX-License-Identifier: Apache-2.0
 *
 * The inner loops of the matrix products, compiled once per instruction set from kernel.c.
 *
 * A product is p, read by scalars, times q, read by vectors of contiguous floats. Invariant: every output element is one
 * chain of multiply-adds over ascending k, begun at 0 and carried through memory between calls; hence its bits do not
 * depend on where it lies in a tile, nor on how k is cut. */
#pragma once

#include "../util.h"

struct moe_cpu_kernel {
  const char *name;
  int64_t lanes; /* floats in a vector, a divisor of 16 */
  int64_t width; /* columns of the widest product, a multiple of lanes */
  /* c[i*ldc + j] (+)= sum over kk of p[i*p_row + kk*p_col] q[kk*ldq + j], i < m, j < width; one of p_row, p_col is 1.
   * `first` starts from 0 instead of from c. */
  void (*product)(float *c, int64_t ldc, const float *p, int64_t p_row, int64_t p_col, int64_t m,
                  const float *q, int64_t ldq, int64_t width, int64_t k, bool first);
  /* dst[i*ldd + j] = element first + i*lds + j of src, i < m, j < n; 0 for n <= j < ldd. */
  void (*read)(float *dst, int64_t ldd, const void *src, moe_dtype dtype, int64_t first, int64_t lds,
               int64_t m, int64_t n);
  /* dst[j*ldd + i] = src[i*lds + j], i < m, j < n; m a multiple of 4. */
  void (*transpose)(float *dst, int64_t ldd, const float *src, int64_t lds, int64_t m, int64_t n);
  /* a[i] = act(gate[i], up[i]); up is NULL when not gated. */
  void (*act)(const moe_act_desc *act, int64_t n, const float *gate, const float *up, float *a);
  /* The same, then gate and up are overwritten by their gradients, from da. */
  void (*dact)(const moe_act_desc *act, int64_t n, float *gate, float *up, const float *da, float *a);
};

extern const struct moe_cpu_kernel moe_cpu_kernel_base;
#ifdef __x86_64__
extern const struct moe_cpu_kernel moe_cpu_kernel_avx2;
extern const struct moe_cpu_kernel moe_cpu_kernel_avx512;
#endif

/* The best one that this machine runs. */
const struct moe_cpu_kernel *moe_cpu_kernel_best(void);
/* The one named by the environment variable MOE_CPU_ISA, else the best. UNSUPPORTED: not known or not run here. */
moe_status moe_cpu_kernel_select(const struct moe_cpu_kernel **out);
