/* SPDX-License-Identifier: Apache-2.0
 * mbarrier objects in shared memory. PTX ISA 8.0, section 9.7.13.15 (parallel synchronization: mbarrier). */
#pragma once

#include <stdint.h>

__device__ __forceinline__ uint32_t smem_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/* One thread, before a block-wide barrier; then fence_barrier_init. */
__device__ __forceinline__ void mbarrier_init(uint64_t *barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals)
               : "memory");
}

/* Makes initialised barriers visible to the async proxy. */
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t *barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

/* Arrives and announces `bytes` that bulk copies will still bring. */
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t *barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
               "r"(bytes)
               : "memory");
}

/* Arrives once all earlier cp.async of this thread have landed; the arrival counts as one of the expected. */
__device__ __forceinline__ void mbarrier_arrive_cp_async(uint64_t *barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier))
               : "memory");
}

/* Waits until the phase of the given parity has completed. */
__device__ __forceinline__ void mbarrier_wait(uint64_t *barrier, uint32_t parity) {
  asm volatile("{\n"
               ".reg .pred done;\n"
               "again:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@done bra finished;\n"
               "bra again;\n"
               "finished:\n"
               "}" ::"r"(smem_address(barrier)),
               "r"(parity)
               : "memory");
}

/* Whether it has completed now. */
__device__ __forceinline__ bool mbarrier_test(uint64_t *barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n"
               ".reg .pred done;\n"
               "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
               "selp.u32 %0, 1, 0, done;\n"
               "}"
               : "=r"(done)
               : "r"(smem_address(barrier)), "r"(parity)
               : "memory");
  return done != 0;
}
