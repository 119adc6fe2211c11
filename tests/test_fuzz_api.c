/* SPDX-License-Identifier: Apache-2.0
 *
 * The corpus of the C interface, see test_fuzz.c: the tool's and the trainer's names do not go together. */
#include "fuzz/replay.h"

#include "fuzz/fuzz_api.c"

REPLAY(api)

TEST_MAIN()
