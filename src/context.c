/* SPDX-License-Identifier: Apache-2.0
 * moe_context: a back end on one device. */

#include "backend.h"
#include "util.h"

/* Fastest first: the order in which MOE_BACKEND_AUTO tries them. */
static const struct backend *const backends[] = {
#ifdef MOE_CUDA
    &moe_cuda_backend,
#endif
    &moe_cpu_backend,
};
static const int backend_count = (int)(sizeof backends / sizeof *backends);

static moe_status find_backend(moe_backend id, const struct backend **found) {
  CHECK((int)id >= MOE_BACKEND_AUTO && id <= MOE_BACKEND_CUDA, MOE_ERROR_ARGUMENT,
        "context: backend = %d, wanted MOE_BACKEND_AUTO, _CPU or _CUDA", (int)id);
  for (int i = 0; i < backend_count; i++) {
    if (id != MOE_BACKEND_AUTO && id != backends[i]->id) continue;
    const moe_status status = backends[i]->available();
    if (status != MOE_OK && id != MOE_BACKEND_AUTO) return status;
    if (status != MOE_OK) continue;
    *found = backends[i];
    return MOE_OK;
  }
  return moe_fail(MOE_ERROR_UNSUPPORTED, "context: this build of moeblas has no %s back end",
                  id == MOE_BACKEND_CUDA ? "CUDA" : "usable");
}

moe_status moe_backend_available(moe_backend backend) {
  const struct backend *found;
  return find_backend(backend, &found);
}

moe_status moe_context_create(moe_context **out, moe_backend backend, int device) {
  CHECK(out != NULL, MOE_ERROR_ARGUMENT, "context: out = NULL, wanted a place for the context");
  *out = NULL;
  const struct backend *found;
  TRY(find_backend(backend, &found));
  moe_context *ctx = moe_host_alloc(sizeof *ctx);
  CHECK(ctx != NULL, MOE_ERROR_MEMORY, "context: no memory for %zu bytes", sizeof *ctx);
  ctx->backend = found;
  const moe_status status = found->open(ctx, device);
  if (status != MOE_OK) {
    moe_host_free(ctx);
    return status;
  }
  *out = ctx;
  return MOE_OK;
}

void moe_context_destroy(moe_context *ctx) {
  if (ctx == NULL) return;
  ctx->backend->close(ctx);
  moe_host_free(ctx);
}

moe_backend moe_context_backend(const moe_context *ctx) { return ctx ? ctx->backend->id : MOE_BACKEND_AUTO; }

int moe_context_units(const moe_context *ctx) { return ctx ? ctx->units : 0; }
