/* SPDX-License-Identifier: Apache-2.0
 *
 * What: the device of a context, errors of the CUDA runtime as sentences, and the launch of a kernel.
 * Idea: the runtime is linked statically and hidden, so its per-thread error state is moeblas's own; the driver is
 * reached through it and never linked, so that the library loads where there is none.
 * Invariant: every call of the runtime has its result looked at where it is made. */
#include "device.h"

enum {
  TENSOR_MAP_SINCE = 12000 /* CUDA version of cuTensorMapEncodeTiled as it is called */
};

moe_status moe_cuda_result(const char *op, cudaError_t result) {
  if (result == cudaSuccess) return MOE_OK;
  return moe_fail(result == cudaErrorMemoryAllocation ? MOE_ERROR_MEMORY : MOE_ERROR_DEVICE,
                  "%s: CUDA: %s (%s)", op, cudaGetErrorString(result), cudaGetErrorName(result));
}

static moe_status attribute(int *value, enum cudaDeviceAttr which, int device) {
  return moe_cuda_result("context", cudaDeviceGetAttribute(value, which, device));
}

static moe_status capability(int device, int *value) {
  int major, minor;
  TRY(attribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  TRY(attribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  *value = 10 * major + minor;
  return MOE_OK;
}

static moe_status device_count(int *count) {
  const cudaError_t result = cudaGetDeviceCount(count);
  CHECK(result == cudaSuccess && *count > 0, MOE_ERROR_UNSUPPORTED,
        "context: no CUDA device that can be used: %s",
        result == cudaSuccess ? "the driver lists none" : cudaGetErrorString(result));
  return MOE_OK;
}

moe_status moe_cuda_available(void) {
  int count, found = 0;
  TRY(device_count(&count));
  for (int device = 0; device < count; device++) {
    TRY(capability(device, &found));
    if (found == 90) return MOE_OK;
  }
  return moe_fail(
      MOE_ERROR_UNSUPPORTED,
      "context: the last of %d CUDA devices has compute capability %d.%d, wanted one of 9.0 (Hopper)", count,
      found / 10, found % 10);
}

/* NULL where the driver is too old: then no kernel is chosen that needs it. */
static void *tensor_map_encoder(void) {
  void *function = NULL;
  enum cudaDriverEntryPointQueryResult found;
  const cudaError_t result = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                              TENSOR_MAP_SINCE, cudaEnableDefault, &found);
  return result == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : NULL;
}

moe_status moe_cuda_open(moe_context *ctx, int device) {
  int count, found, units;
  TRY(device_count(&count));
  CHECK(device >= 0 && device < count, MOE_ERROR_ARGUMENT,
        "context: device = %d, wanted a CUDA ordinal 0 .. %d", device, count - 1);
  TRY(capability(device, &found));
  CHECK(found == 90, MOE_ERROR_UNSUPPORTED,
        "context: CUDA device %d has compute capability %d.%d, wanted 9.0 (Hopper)", device, found / 10,
        found % 10);
  TRY(attribute(&units, cudaDevAttrMultiProcessorCount, device));
  CUDA_TRY("context", cudaSetDevice(device));
  struct cuda_device *state = moe_host_alloc(sizeof *state);
  CHECK(state != NULL, MOE_ERROR_MEMORY, "context: no memory for %zu bytes", sizeof *state);
  *state = (struct cuda_device){tensor_map_encoder()};
  ctx->device = device;
  ctx->units = units;
  ctx->state = state;
  return MOE_OK;
}

void moe_cuda_close(moe_context *ctx) { moe_host_free(ctx->state); }

moe_status moe_cuda_enter(const char *op, const moe_context *ctx) {
  int current;
  CUDA_TRY(op, cudaGetDevice(&current));
  return current == ctx->device ? MOE_OK : moe_cuda_result(op, cudaSetDevice(ctx->device));
}

moe_status moe_cuda_launch(const char *op, const void *kernel, struct cuda_grid grid, void *argument,
                           moe_stream stream) {
  CHECK(grid.x <= INT32_MAX && grid.y <= 65535 && grid.z <= 65535, MOE_ERROR_UNSUPPORTED,
        "%s: a grid of %lld x %lld x %lld blocks, wanted at most 2147483647 x 65535 x 65535", op,
        (long long)grid.x, (long long)grid.y, (long long)grid.z);
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return MOE_OK;
  const dim3 blocks = {(unsigned)grid.x, (unsigned)grid.y, (unsigned)grid.z},
             threads = {(unsigned)grid.threads, 1, 1};
  return moe_cuda_result(op, cudaLaunchKernel(kernel, blocks, threads, &argument, grid.shared, stream));
}

moe_status moe_cuda_load(const void *const *kernels, int count) {
  int device, shared_bytes;
  CUDA_TRY("load", cudaGetDevice(&device));
  TRY(attribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  for (int i = 0; i < count; i++) {
    struct cudaFuncAttributes found;
    CUDA_TRY("load", cudaFuncGetAttributes(&found, kernels[i]));
    CUDA_TRY("load", cudaFuncSetAttribute(kernels[i], cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          shared_bytes - (int)found.sharedSizeBytes));
  }
  return MOE_OK;
}
