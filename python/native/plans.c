/* SPDX-License-Identifier: Apache-2.0
 *
 * The plans of this process. An executable of XLA carries the configuration itself, never a pointer, so that it may be
 * cached on disk or sent to another process; this list turns it back into a plan.
 * Invariant: entries are complete before they are linked in, and never change or go away, so reading needs no lock. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "plans.h"

struct device {
  moe_backend backend;
  int device;
  moe_context *ctx;
  struct device *next;
};

static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
static struct device *devices; /* under `making` */
static _Atomic(const struct known_plan *) plans;

static const struct known_plan *look_up(const struct known_plan *wanted) {
  const struct known_plan *p = atomic_load_explicit(&plans, memory_order_acquire);
  while (p != NULL && (p->backend != wanted->backend || p->device != wanted->device ||
                       memcmp(&p->config, &wanted->config, sizeof p->config) != 0))
    p = p->next;
  return p;
}

static moe_status find_context(moe_backend backend, int device, moe_context **out, struct fault *fault) {
  for (const struct device *d = devices; d != NULL; d = d->next) {
    *out = d->ctx;
    if (d->backend == backend && d->device == device) return MOE_OK;
  }
  struct device *d = malloc(sizeof *d);
  CHECK(d != NULL, fault, MOE_ERROR_MEMORY, "moeblas: no memory for %zu bytes", sizeof *d);
  *d = (struct device){backend, device, NULL, devices};
  const moe_status status = moe_xla_check(fault, moe_context_create(&d->ctx, backend, device));
  if (status != MOE_OK) {
    free(d);
    return status;
  }
  devices = d;
  *out = d->ctx;
  return MOE_OK;
}

static moe_status make_plan(struct known_plan *wanted, moe_stream stream, const struct known_plan **out,
                            struct fault *fault) {
  moe_context *ctx = NULL;
  TRY(find_context(wanted->backend, wanted->device, &ctx, fault));
  struct known_plan *made = malloc(sizeof *made);
  CHECK(made != NULL, fault, MOE_ERROR_MEMORY, "moeblas: no memory for %zu bytes", sizeof *made);
  memcpy(made, wanted, sizeof *made);
  moe_status status = moe_xla_check(fault, moe_plan_create(&made->plan, ctx, &made->config));
  if (status == MOE_OK) status = moe_xla_check(fault, moe_warmup(made->plan, stream));
  if (status != MOE_OK) {
    moe_plan_destroy(made->plan);
    free(made);
    return status;
  }
  made->next = atomic_load_explicit(&plans, memory_order_relaxed);
  atomic_store_explicit(&plans, made, memory_order_release);
  *out = made;
  return MOE_OK;
}

moe_status moe_xla_find_plan(const void *config, size_t bytes, moe_backend backend, int device,
                             moe_stream stream, const struct known_plan **out, struct fault *fault) {
  struct known_plan wanted;
  memset(&wanted, 0, sizeof wanted);
  CHECK(bytes >= sizeof wanted.config.size && bytes <= sizeof wanted.config, fault, MOE_ERROR_ARGUMENT,
        "moeblas: config has %zu bytes, wanted up to %zu: it was made by another version than %s", bytes,
        sizeof wanted.config, moe_version());
  memcpy(&wanted.config, config, bytes);
  CHECK(wanted.config.size == bytes, fault, MOE_ERROR_ARGUMENT, "moeblas: config.size = %zu, wanted %zu",
        wanted.config.size, bytes);
  wanted.config.size = sizeof wanted.config;
  wanted.backend = backend;
  wanted.device = device;
  *out = look_up(&wanted);
  if (*out != NULL) return MOE_OK;
  pthread_mutex_lock(&making);
  *out = look_up(&wanted);
  const moe_status status = *out != NULL ? MOE_OK : make_plan(&wanted, stream, out, fault);
  pthread_mutex_unlock(&making);
  return status;
}
