/* SPDX-License-Identifier: Apache-2.0
 *
 * What: memory and time of the CPU back end.
 * Idea: memory is the host's; an event is a reading of the monotonic clock, as every op is finished when it returns.
 * Invariant: all memory passes the one allocation hook, moe_host_alloc. */
#include "cpu.h"

#include <string.h>
#include <time.h>

/* The address that moe_host_alloc gave stands just before the aligned block. */
moe_status moe_cpu_memory_alloc(moe_context *ctx, size_t bytes, void **out) {
  (void)ctx;
  char *base = moe_host_alloc(bytes + MOE_ALIGN + sizeof(void *));
  CHECK(base != NULL, MOE_ERROR_MEMORY, "memory_alloc: no memory for %zu bytes", bytes);
  const size_t first = sizeof(void *), past = ((uintptr_t)base + first) % MOE_ALIGN;
  char *aligned = base + first + (past ? MOE_ALIGN - past : 0);
  memcpy(aligned - sizeof base, &base, sizeof base);
  *out = aligned;
  return MOE_OK;
}

void moe_cpu_memory_free(moe_context *ctx, void *memory) {
  (void)ctx;
  void *base;
  memcpy(&base, (char *)memory - sizeof base, sizeof base);
  moe_host_free(base);
}

moe_status moe_cpu_memory_copy(moe_context *ctx, void *dst, const void *src, size_t bytes) {
  (void)ctx;
  memcpy(dst, src, bytes);
  return MOE_OK;
}

moe_status moe_cpu_memory_fill(moe_context *ctx, void *dst, int byte, size_t bytes) {
  (void)ctx;
  memset(dst, byte, bytes);
  return MOE_OK;
}

moe_status moe_cpu_synchronize(moe_context *ctx, moe_stream stream) {
  (void)ctx, (void)stream;
  return MOE_OK;
}

moe_status moe_cpu_stream_create(moe_context *ctx, moe_stream *out) {
  (void)ctx;
  *out = NULL;
  return MOE_OK;
}

void moe_cpu_stream_destroy(moe_context *ctx, moe_stream stream) { (void)ctx, (void)stream; }

moe_status moe_cpu_event_create(moe_context *ctx, void **event) {
  (void)ctx;
  *event = moe_host_alloc(sizeof(struct timespec));
  CHECK(*event != NULL, MOE_ERROR_MEMORY, "timer_create: no memory for %zu bytes", sizeof(struct timespec));
  return MOE_OK;
}

moe_status moe_cpu_event_record(moe_context *ctx, void *event, moe_stream stream) {
  (void)ctx, (void)stream;
  clock_gettime(CLOCK_MONOTONIC, event);
  return MOE_OK;
}

moe_status moe_cpu_event_elapsed_us(moe_context *ctx, void *from, void *to, double *out) {
  (void)ctx;
  const struct timespec *a = from, *b = to;
  *out = (double)(b->tv_sec - a->tv_sec) * 1e6 + (double)(b->tv_nsec - a->tv_nsec) * 1e-3;
  return MOE_OK;
}

void moe_cpu_event_destroy(moe_context *ctx, void *event) {
  (void)ctx;
  moe_host_free(event);
}
