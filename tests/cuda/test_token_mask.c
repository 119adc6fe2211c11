/* SPDX-License-Identifier: Apache-2.0
 *
 * The op token_mask, CUDA against the CPU, bit by bit. */
#include "twin.h"

TEST(token_mask) {
  for (uint64_t s = 1; s <= 60; s++) {
    uint64_t seed = s;
    struct twin t;
    const int64_t tokens = PICK(&seed, 0, 1, 7, 1024, 1025, 300000);
    moe_token_mask_args c = {.tokens = tokens};
    moe_token_mask_args g = {.tokens = tokens, .sm_limit = PICK(&seed, 0, 1, 7)};
    const int32_t count =
        (int32_t)PICK(&seed, 0, 1, 5, tokens - 1, tokens, tokens + 1, -4, INT32_MAX, INT32_MIN);
    twin_open(&t, "token_mask: t%d count %d seed %d", (int)tokens, (int)count, (int)s);
    if (chance(&seed, 80)) memcpy(ARRAY(&t, c, g, token_count, 4), &count, sizeof count);
    if (chance(&seed, 60)) {
      uint8_t *padding = ARRAY(&t, c, g, padding_mask, tokens);
      for (int64_t i = 0; i < tokens; i++) padding[i] = (uint8_t)(chance(&seed, 30) ? 1 + i % 255 : 0);
    }
    ARRAY(&t, c, g, mask, tokens);
    RUN_TWIN(&t, token_mask, c, g);
  }
}

TEST_MAIN()
