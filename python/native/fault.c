/* SPDX-License-Identifier: Apache-2.0
 * A refusal on its way to XLA; see fault.h. */

#include <stdarg.h>
#include <stdio.h>

#include "fault.h"

moe_status moe_xla_fail(struct fault *fault, moe_status status, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(fault->text, sizeof fault->text, format, args);
  va_end(args);
  return fault->status = status;
}

moe_status moe_xla_check(struct fault *fault, moe_status status) {
  return status == MOE_OK ? status : moe_xla_fail(fault, status, "%s", moe_last_error());
}
