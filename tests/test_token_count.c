/* SPDX-License-Identifier: Apache-2.0
 *
 * A number of tokens that lies where the arrays do: the bits are those of a mask that says the same, whatever the number,
 * and what the tokens past it hold does not matter. */
#include "test.h"

#include <limits.h>
#include <math.h>

#include "moeblas_ops.h"
#include "support.h"

static moe_status run_counted(struct layer *l, const int32_t *count) {
  layer_bind(l);
  l->forward.token_count = l->backward.token_count = count;
  const moe_status status = moe_forward(l->plan, &l->forward, NULL);
  return status == MOE_OK ? moe_backward(l->plan, &l->backward, NULL) : status;
}

/* NaN in everything that the tokens from `count` on bring along. */
static void poison_from(struct layer *l, int64_t count) {
  static const int ids[] = {X, DOUT, LOGITS, GIVEN_WEIGHTS};
  for (int i = 0; i < 4; i++) {
    const int64_t all = l->array[ids[i]].count, each = all / l->tokens;
    for (int64_t j = count < 0 ? 0 : count * each; j < all; j++) layer_set(l, ids[i], j, NAN);
  }
}

static void check_count(const struct layer_case *c, int32_t count, int masked) {
  struct layer mask, counted;
  OPEN(&mask, c, o.seed = 21, o.without &= ~BIT(MASK));
  OPEN(&counted, c, o.seed = 21, o.without = masked ? o.without & ~BIT(MASK) : o.without | BIT(MASK));
  uint8_t *const bytes = mask.array[MASK].data;
  for (int64_t t = 0; t < mask.tokens; t++) bytes[t] = (masked && bytes[t]) || t >= count;
  if (counted.array[GLOBAL_COUNTS].bytes > 0) /* drawn after the mask, so they differ without one */
    memcpy(counted.array[GLOBAL_COUNTS].data, mask.array[GLOBAL_COUNTS].data,
           mask.array[GLOBAL_COUNTS].bytes);
  poison_from(&counted, count);
  RAN(layer_run(&mask), c);
  RAN(run_counted(&counted, &count), c);
  SAME(&mask, &counted, BIT(MASK) | BIT(X) | BIT(DOUT) | BIT(LOGITS) | BIT(GIVEN_WEIGHTS), c, "a count");
  const int id = layer_overrun(&counted);
  EXPECT(id < 0, "%s: something was written next to %s", c->name, counted.array[id].name);
  layer_close(&mask), layer_close(&counted);
}

static void check_counts(const struct layer_case *c) {
  static const int32_t counts[] = {0, 1, 17, 32, 33, 34, -1, INT_MAX, INT_MIN}; /* of 33 tokens */
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
    for (int masked = 0; masked < 2; masked++) check_count(c, counts[i], masked);
}
TEST(a_count_is_a_mask) { EACH_CASE(check_counts, c->entry != MOE_ENTRY_ROWS); }

static void check_refused(const struct layer_case *c) {
  static const int32_t counts[2] = {3, 3};
  struct layer l;
  OPEN(&l, c, o.seed = 1);
  if (c->config.entry == MOE_ENTRY_ROWS)
    REFUSED(run_counted(&l, counts), ARGUMENT, "forward: token_count is given, wanted NULL");
  else
    REFUSED(run_counted(&l, (const int32_t *)(const void *)((const char *)counts + 2)), ARGUMENT,
            "forward: token_count = 0x");
  layer_close(&l);
}
TEST(useless_and_misaligned_counts_are_refused) { EACH_CASE(check_refused, 1); }

TEST(the_op_alone) {
  moe_context *ctx;
  REQUIRE(moe_context_create(&ctx, MOE_BACKEND_CPU, 2) == MOE_OK, "%s", moe_last_error());
  uint8_t padding[6] = {0, 7, 0, 1, 0, 1}, mask[7] = {9, 9, 9, 9, 9, 9, 9};
  const int32_t count = 4;
  moe_token_mask_args args = {.size = sizeof args, .tokens = 6, .token_count = &count, .mask = mask};
  EXPECT(moe_token_mask(ctx, &args, NULL) == MOE_OK, "%s", moe_last_error());
  EXPECT(memcmp(mask, (const uint8_t[]){0, 0, 0, 0, 1, 1, 9}, 7) == 0, "a count alone");
  args.padding_mask = padding;
  EXPECT(moe_token_mask(ctx, &args, NULL) == MOE_OK, "%s", moe_last_error());
  EXPECT(memcmp(mask, (const uint8_t[]){0, 1, 0, 1, 1, 1, 9}, 7) == 0, "both");
  args.token_count = NULL, args.mask = padding;
  EXPECT(moe_token_mask(ctx, &args, NULL) == MOE_OK, "%s", moe_last_error());
  EXPECT(memcmp(padding, (const uint8_t[]){0, 1, 0, 1, 0, 1}, 6) == 0, "a mask in place");
  args.mask = NULL;
  REFUSED(moe_token_mask(ctx, &args, NULL), ARGUMENT, "token_mask: mask = NULL");
  args.token_count = (const int32_t *)(const void *)((const char *)&count + 1);
  REFUSED(moe_token_mask(ctx, &args, NULL), ARGUMENT, "token_mask: token_count = 0x");
  args.tokens = -1;
  REFUSED(moe_token_mask(ctx, &args, NULL), ARGUMENT, "token_mask: tokens = -1");
  moe_context_destroy(ctx);
}

TEST_MAIN()
