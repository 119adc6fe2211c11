/* SPDX-License-Identifier: Apache-2.0
 *
 * See device.h. The kernels and the host talk through memory of the host that both can see: a word for "spared ones may go",
 * one for "all may go", and one a block that says it has begun. Nothing but reads and writes, so that no atomic has
 * to cross the bus. */
#include <cuda_runtime.h>
#include <stdint.h>
#include <time.h>

#include "device.h"

enum {
  SPARED = 0, /* the block that begins gives its multiprocessor back */
  STOP = 1,
  BEGUN = 2, /* and one more a block */
  MOST_BLOCKS = 1024
};

static const int64_t patience_cycles = 100000000000; /* about a minute */
static const double start_seconds = 10;

static struct {
  volatile int *words; /* host and device see them at one address */
  cudaStream_t stream;
  int blocks;
  int shared_bytes;
} holder;

static const char *words_of(cudaError_t result) {
  return result == cudaSuccess ? nullptr : cudaGetErrorString(result);
}
#define DEVICE_TRY(call)                                    \
  do {                                                      \
    if (const char *words_ = words_of(call)) return words_; \
  } while (0)

static __global__ void hold_kernel(volatile int *words, int spare_first, int spare_count, int64_t patience) {
  const int64_t begin = clock64();
  const int block = (int)blockIdx.x, spare = block >= spare_first && block < spare_first + spare_count;
  words[BEGUN + block] = 1;
  while (words[spare ? SPARED : STOP] == 0 && clock64() - begin < patience) __nanosleep(2000);
}

static __global__ void trap_kernel() { __trap(); }

static const char *open_holder() {
  if (holder.words != nullptr) return nullptr;
  void *words;
  DEVICE_TRY(cudaDeviceGetAttribute(&holder.blocks, cudaDevAttrMultiProcessorCount, 0));
  DEVICE_TRY(cudaDeviceGetAttribute(&holder.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
  if (holder.blocks > MOST_BLOCKS) return "more multiprocessors than there are words for";
  DEVICE_TRY(
      cudaFuncSetAttribute(hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, holder.shared_bytes));
  DEVICE_TRY(cudaStreamCreateWithFlags(&holder.stream, cudaStreamNonBlocking));
  DEVICE_TRY(cudaHostAlloc(&words, (BEGUN + MOST_BLOCKS) * sizeof(int), cudaHostAllocMapped));
  holder.words = static_cast<volatile int *>(words);
  return nullptr;
}

static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int blocks_begun() {
  int begun = 0;
  for (int i = 0; i < holder.blocks; i++) begun += holder.words[BEGUN + i];
  return begun;
}

extern "C" const char *device_hold(int spare_first, int spare_count) {
  if (const char *words = open_holder()) return words;
  for (int i = 0; i < BEGUN + holder.blocks; i++) holder.words[i] = 0;
  DEVICE_TRY(cudaDeviceSynchronize()); /* of a device at rest every multiprocessor takes one block */
  hold_kernel<<<holder.blocks, 1, holder.shared_bytes, holder.stream>>>(holder.words, spare_first,
                                                                        spare_count, patience_cycles);
  DEVICE_TRY(cudaGetLastError());
  const double begin = now();
  while (blocks_begun() < holder.blocks)
    if (now() - begin > start_seconds) {
      (void)device_release();
      return "not every multiprocessor could be held: something else runs on the device";
    }
  holder.words[SPARED] = 1;
  return nullptr;
}

extern "C" const char *device_release() {
  const cudaError_t held = cudaStreamQuery(holder.stream);
  holder.words[SPARED] = holder.words[STOP] = 1;
  DEVICE_TRY(cudaStreamSynchronize(holder.stream));
  if (held == cudaErrorNotReady) return nullptr;
  return held == cudaSuccess ? "the multiprocessors were no longer held" : cudaGetErrorString(held);
}

extern "C" const char *device_free_bytes(size_t *bytes) {
  size_t all;
  return words_of(cudaMemGetInfo(bytes, &all));
}

extern "C" const char *device_trap() {
  trap_kernel<<<1, 1>>>();
  return cudaDeviceSynchronize() == cudaSuccess ? "the kernel that traps ended well" : nullptr;
}

extern "C" const char *device_refuse() {
  void *memory;
  return cudaMalloc(&memory, SIZE_MAX / 2) == cudaSuccess ? "an impossible allocation was granted" : nullptr;
}

extern "C" const char *device_reads_host(int *answer) {
  return words_of(cudaDeviceGetAttribute(answer, cudaDevAttrPageableMemoryAccess, 0));
}
