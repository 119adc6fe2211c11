/* SPDX-License-Identifier: Apache-2.0
 * Copies and fences. PTX ISA 8.0, section numbers at each. */
#pragma once

#include "mbarrier.cuh"

/* 16 bytes from global to shared, asynchronously; zeros instead of the source when `valid` is false (9.7.8.22.3). The
 * source is not read then, but must be an address. */
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void *src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0)
               : "memory");
}

/* 16 bytes to global memory by one instruction: the compiler takes an element of an array apart and stores words (9.7.9.12). */
__device__ __forceinline__ void store_16(void *to, const uint4 &v) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

/* Orders this thread's ordinary shared-memory accesses with those of the async proxy (wgmma, bulk copies) (9.7.12.4). */
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* A tile of a 2-D or 3-D tensor map into shared memory; coordinates innermost first (9.7.8.24.2). One thread. */
__device__ __forceinline__ void tma_load_2d(void *dst, const void *map, uint64_t *barrier, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4}], [%2];" ::"r"(smem_address(dst)),
               "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y)
               : "memory");
}
__device__ __forceinline__ void tma_load_3d(void *dst, const void *map, uint64_t *barrier, int x, int y,
                                            int z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem_address(dst)),
               "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z)
               : "memory");
}
/* A tile of shared memory to where a 3-D tensor map has it, what lies past an edge left out; the copies of a thread up to here form a
 * group, and wait until at most none of its groups still reads shared memory, or writes (9.7.8.24.6, .7). One thread. */
__device__ __forceinline__ void tma_store_3d(const void *map, const void *src, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(smem_address(src)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void tma_prefetch(const void *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Four 8x8 matrices of 16-bit elements (9.7.14.5.16): lane l names the 16-byte row l % 8 of matrix l / 8 and has of each matrix
 * elements 2 (l%4) and 2 (l%4) + 1 of row l / 4. All lanes of the warp. */
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(m[0]),
               "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

/* Barrier `name` of 1 to 15 among `threads` threads (9.7.13.1). */
__device__ __forceinline__ void named_barrier(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

/* Registers a thread of this warpgroup may use from here on (9.7.19.5). All warps of the warpgroup. */
template <int COUNT> __device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
