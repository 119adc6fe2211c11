/* SPDX-License-Identifier: Apache-2.0
 * What needs no context: version, names, the last error, host memory. */

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format.h"
#include "util.h"

#define STRING_(x) #x
#define STRING(x)  STRING_(x)

/* The one piece of state outside the caller's hands: per thread, as errno is. */
static _Thread_local char last_error[512];

moe_status moe_fail(moe_status status, const char *format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(last_error, sizeof last_error, format, list);
  va_end(list);
  return status;
}

const char *moe_last_error(void) { return last_error; }

const char *moe_version(void) {
  return STRING(MOE_VERSION_MAJOR) "." STRING(MOE_VERSION_MINOR) "." STRING(MOE_VERSION_PATCH);
}

const char *moe_status_name(moe_status status) {
  switch ((int)status) {
  case MOE_OK: return "ok";
  case MOE_ERROR_ARGUMENT: return "argument";
  case MOE_ERROR_UNSUPPORTED: return "unsupported";
  case MOE_ERROR_WORKSPACE: return "workspace";
  case MOE_ERROR_MEMORY: return "memory";
  case MOE_ERROR_DEVICE: return "device";
  case MOE_ERROR_INTERNAL: return "internal";
  default: return "unknown status";
  }
}

static const struct activation_name {
  const char *plain, *gated;
} activation_names[] = {
#define MOE_ACT(ENUM, value, fn, plain, gated, alpha, beta, f, df) [value] = {plain, gated},
#include "moeblas_act.def"
#undef MOE_ACT
};

const char *moe_activation_name(moe_activation kind, int gated) {
  if ((int)kind < 0 || kind >= MOE_ACT_COUNT) return NULL;
  return gated ? activation_names[kind].gated : activation_names[kind].plain;
}

moe_status moe_activation_find(const char *name, moe_activation *kind, int *gated) {
  CHECK(name != NULL && kind != NULL && gated != NULL, MOE_ERROR_ARGUMENT,
        "activation_find: name, kind or gated = NULL, wanted all three");
  for (int i = 0; i < MOE_ACT_COUNT; i++) {
    const bool is_gated = strcmp(name, activation_names[i].gated) == 0;
    if (!is_gated && strcmp(name, activation_names[i].plain) != 0) continue;
    *kind = (moe_activation)i;
    *gated = is_gated;
    return MOE_OK;
  }
  return moe_fail(MOE_ERROR_ARGUMENT, "activation_find: name = \"%.64s\", wanted a name of moeblas_act.def",
                  name);
}

const char *moe_dtype_name(moe_dtype dtype) {
  switch ((int)dtype) {
#define MOE_FORMAT(ENUM, name, type, codec) \
  case ENUM:                                \
    return name;
#include "format.def"
#undef MOE_FORMAT
  default: return NULL;
  }
}

size_t moe_dtype_bytes(moe_dtype dtype) {
  switch ((int)dtype) {
#define MOE_FORMAT(ENUM, name, type, codec) \
  case ENUM:                                \
    return sizeof(type);
#include "format.def"
#undef MOE_FORMAT
  default: return 0;
  }
}

void *moe_host_alloc(size_t bytes) { return calloc(1, bytes); }
void moe_host_free(void *pointer) { free(pointer); }
