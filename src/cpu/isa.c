/* SPDX-License-Identifier: Apache-2.0
 * Which of the compiled kernels runs: the best one of this machine, or the one that MOE_CPU_ISA names. */
#include <stdlib.h>
#include <string.h>

#include "kernel.h"

static bool runs_here(const struct moe_cpu_kernel *kernel) {
#ifdef __x86_64__
  __builtin_cpu_init();
  if (kernel == &moe_cpu_kernel_avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (kernel == &moe_cpu_kernel_avx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return kernel == &moe_cpu_kernel_base;
}

static const struct moe_cpu_kernel *const kernels[] = {/* best first */
#ifdef __x86_64__
                                                       &moe_cpu_kernel_avx512, &moe_cpu_kernel_avx2,
#endif
                                                       &moe_cpu_kernel_base};
enum {
  KERNELS = sizeof kernels / sizeof *kernels
};

const struct moe_cpu_kernel *moe_cpu_kernel_best(void) {
  int i = 0;
  while (!runs_here(kernels[i])) i++; /* the last one runs everywhere */
  return kernels[i];
}

moe_status moe_cpu_kernel_select(const struct moe_cpu_kernel **out) {
  const char *name = getenv("MOE_CPU_ISA");
  *out = moe_cpu_kernel_best();
  if (name == NULL || *name == '\0') return MOE_OK;
  for (int i = 0; i < KERNELS; i++) {
    if (strcmp(kernels[i]->name, name) != 0) continue;
    CHECK(runs_here(kernels[i]), MOE_ERROR_UNSUPPORTED, "cpu: MOE_CPU_ISA = %s, but this machine has no %s",
          name, name);
    *out = kernels[i];
    return MOE_OK;
  }
  return moe_fail(MOE_ERROR_UNSUPPORTED, "cpu: MOE_CPU_ISA = %s, wanted base, avx2 or avx512 as built", name);
}
