/* SPDX-License-Identifier: Apache-2.0
 *
 * Where libFuzzer enters the target that TARGET names. */
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) { return TARGET(data, size); }
