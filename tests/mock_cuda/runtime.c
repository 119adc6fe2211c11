/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime.h"

#include <cuda.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wunused-parameter" /* most are of no interest here */

struct mock mock = {.devices = 1, .capability = {90, 90, 90, 90}};

void mock_forget(void) {
  mock.waits = mock.launches = mock.refuse_after = 0;
  mock.refuse_launch = cudaSuccess;
  mock.refuse_map = false;
  mock.broken[0] = '\0';
}

__attribute__((format(printf, 2, 3))) static void rule(bool kept, const char *format, ...) {
  va_list list;
  if (kept || mock.broken[0] != '\0') return;
  va_start(list, format);
  vsnprintf(mock.broken, sizeof mock.broken, format, list);
  va_end(list);
}

static cudaError_t wait_for(void) {
  mock.waits++;
  return cudaSuccess;
}

/* ---- kernels: registered before main, loaded by cudaFuncGetAttributes */

enum {
  MAX_KERNELS = 256
};
static struct kernel {
  const void *function;
  const char *name;
  bool loaded;
  int shared; /* dynamic bytes that it may have */
} kernels[MAX_KERNELS];
static int kernel_count;

void **__cudaRegisterFatBinary(void *binary);
void __cudaRegisterFatBinaryEnd(void **handle);
void __cudaUnregisterFatBinary(void **handle);
void __cudaRegisterFunction(void **handle, const char *function, char *device, const char *name, int limit,
                            void *thread, void *block, void *block_size, void *grid, int *shared);
void **__cudaRegisterFatBinary(void *binary) { return binary; }
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void **handle, const char *function, char *device, const char *name, int limit,
                            void *thread, void *block, void *block_size, void *grid, int *shared) {
  if (kernel_count == MAX_KERNELS) abort();
  kernels[kernel_count++] = (struct kernel){function, name, false, 48 * 1024};
}

/* What <<<>>> would call, which the library does not. */
cudaError_t __cudaGetKernel(void **kernel, const void *function);
cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **args, size_t shared,
                               cudaStream_t stream);
unsigned __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream);
cudaError_t __cudaGetKernel(void **kernel, const void *function) { abort(); }
cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **args, size_t shared,
                               cudaStream_t stream) {
  abort();
}
unsigned __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) { abort(); }

static struct kernel *kernel_of(const void *function) {
  for (int i = 0; i < kernel_count; i++)
    if (kernels[i].function == function) return &kernels[i];
  rule(false, "a kernel that was never registered");
  return NULL;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  struct kernel *kernel = kernel_of(function);
  memset(attributes, 0, sizeof *attributes);
  if (kernel == NULL) return cudaErrorInvalidDeviceFunction;
  kernel->loaded = true;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute which, int value) {
  struct kernel *kernel = kernel_of(function);
  if (kernel == NULL || which != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaErrorInvalidValue;
  rule(value <= MOCK_SHARED, "%s: may have %d bytes of shared memory", kernel->name, value);
  kernel->shared = value;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **args, size_t shared,
                             cudaStream_t stream) {
  const struct kernel *kernel = kernel_of(function);
  if (mock.refuse_launch != cudaSuccess && mock.launches >= mock.refuse_after) return mock.refuse_launch;
  if (kernel == NULL || args == NULL) return cudaErrorInvalidDeviceFunction;
  rule(kernel->loaded, "%s: launched before it was loaded", kernel->name);
  rule(grid.x > 0 && grid.x <= INT32_MAX && grid.y > 0 && grid.y < 65536 && grid.z > 0 && grid.z < 65536,
       "%s: a grid of %u x %u x %u", kernel->name, grid.x, grid.y, grid.z);
  rule(block.x > 0 && block.x <= 1024 && block.y == 1 && block.z == 1, "%s: blocks of %u x %u x %u",
       kernel->name, block.x, block.y, block.z);
  rule(shared <= (size_t)kernel->shared, "%s: %zu bytes of shared memory, has %d", kernel->name, shared,
       kernel->shared);
  if (mock.launches < MOCK_LAUNCHES)
    mock.launch[mock.launches] =
        (struct mock_launch){kernel->name, (int64_t)grid.x * grid.y * grid.z, (int)block.x, shared, stream};
  mock.launches++;
  return cudaSuccess;
}

/* ---- devices and errors */

cudaError_t cudaGetDeviceCount(int *count) {
  *count = mock.devices;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device < mock.devices ? cudaSuccess : cudaErrorInvalidDevice; }

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
  switch ((int)which) {
  case cudaDevAttrComputeCapabilityMajor: *value = mock.capability[device] / 10; return cudaSuccess;
  case cudaDevAttrComputeCapabilityMinor: *value = mock.capability[device] % 10; return cudaSuccess;
  case cudaDevAttrMultiProcessorCount: *value = MOCK_UNITS; return cudaSuccess;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = MOCK_SHARED; return cudaSuccess;
  default: return cudaErrorInvalidValue;
  }
}

const char *cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? "cudaErrorLaunchFailure" : "other";
}
const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? "launch failure" : "another error";
}

/* The rules of cuTensorMapEncodeTiled for two-byte elements and a swizzle of 128 bytes. */
static CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                       const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box,
                       const cuuint32_t *step, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if (mock.refuse_map) return CUDA_ERROR_INVALID_VALUE;
  rule((uintptr_t)map % 64 == 0, "a tensor map at %p", (void *)map);
  rule(base != NULL && (uintptr_t)base % 16 == 0, "a tensor map of %p", base);
  rule(rank == 2 || rank == 3, "a tensor map of rank %u", rank);
  for (cuuint32_t i = 0; i < rank; i++) {
    rule(size[i] > 0 && size[i] <= (cuuint64_t)1 << 32, "a tensor map of size %llu",
         (unsigned long long)size[i]);
    rule(box[i] > 0 && box[i] <= 256 && step[i] == 1, "a box of %u", box[i]);
  }
  for (cuuint32_t i = 0; i + 1 < rank; i++)
    rule(stride[i] % 16 == 0 && stride[i] < (cuuint64_t)1 << 40, "a stride of %llu bytes",
         (unsigned long long)stride[i]);
  rule(box[0] * 2 <= 128, "a box of %u bytes in a row", box[0] * 2);
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
  if (strcmp(name, "cuTensorMapEncodeTiled") != 0 || mock.no_tensor_maps) {
    *result = cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
  }
  CUresult (*const found)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                          const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                          CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) = encode;
  memcpy(function, &found, sizeof found);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

/* ---- memory, time, streams: addresses that nobody may touch */

static void *address(void) {
  static uintptr_t next = (uintptr_t)1 << 46;
  next += (uintptr_t)1 << 32;
  void *made;
  memcpy(&made, &next, sizeof made);
  return made;
}

cudaError_t cudaMalloc(void **memory, size_t bytes) {
  *memory = address();
  return wait_for();
}
cudaError_t cudaFree(void *memory) { return wait_for(); }
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return wait_for();
}
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream) { return wait_for(); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return wait_for(); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  *stream = address();
  return wait_for();
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return wait_for(); }
cudaError_t cudaEventCreate(cudaEvent_t *event) {
  *event = address();
  return wait_for();
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return wait_for(); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return wait_for(); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return wait_for(); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
  *ms = 1;
  return wait_for();
}

/* ---- graphs: a graph is what was launched since the capture began */

static int64_t captured;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  captured = mock.launches;
  return wait_for();
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  captured = mock.launches - captured;
  *graph = address();
  return wait_for();
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  *count = (size_t)captured;
  for (int64_t i = 0; nodes != NULL && i < captured; i++) nodes[i] = address();
  return wait_for();
}
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, enum cudaGraphNodeType *type) {
  *type = cudaGraphNodeTypeKernel;
  return wait_for();
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
  *made = address();
  return wait_for();
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) { return wait_for(); }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return wait_for(); }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return wait_for(); }
