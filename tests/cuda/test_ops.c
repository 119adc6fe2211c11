/* SPDX-License-Identifier: Apache-2.0
 *
 * What: every op but the matrix products, on random problems, CUDA against the CPU.
 * Idea: twin.h runs and compares; a test here draws the sizes and flags and names the arrays. Integers, and floats that are
 * made by the same operations in the same order, must be the same bits. */
#include "twin.h"

static moe_router_desc any_router(int64_t experts, int64_t topk, uint64_t *seed) {
  moe_router_desc router = {.score = (moe_score)PICK(seed, 0, 1, 2, 3), .renormalize = chance(seed, 50)};
  router.scale = chance(seed, 30) ? 2.5f : 0;
  router.renorm_epsilon = router.renormalize && chance(seed, 30) ? 0.25f : 0;
  const int64_t groups = PICK(seed, 1, 2, 4, 8);
  if (experts % groups != 0 || groups < 2 || topk > experts) return router;
  router.groups = groups;
  router.topk_groups = 1 + (int64_t)(test_random(seed) % (uint64_t)groups);
  while (router.topk_groups * (experts / groups) < topk) router.topk_groups++;
  router.group_score = (moe_group_score)PICK(seed, 0, 1, 2);
  return router;
}

/* Logits with ties and, here and there, NaN and infinities. */
static void fill_logits(void *logits, moe_dtype dtype, int64_t n, uint64_t *seed) {
  static const float special[] = {NAN, INFINITY, -INFINITY, -100, 100};
  const int wild = chance(seed, 30), coarse = chance(seed, 50);
  for (int64_t i = 0; i < n; i++) {
    float v = 4 * test_uniform(seed);
    if (coarse) v = (float)(int)(v * 4) * 0.25f;
    if (wild && chance(seed, 10)) v = special[test_random(seed) % 5];
    moe_store(logits, dtype, i, v);
  }
}

static void fill_mask(uint8_t *mask, int64_t n, uint64_t *seed) {
  for (int64_t i = 0; i < n; i++) mask[i] = (uint8_t)(chance(seed, 20) ? 3 : 0);
}

static void fill_ids(int32_t *ids, int64_t n, int64_t experts, uint64_t *seed) {
  for (int64_t i = 0; i < n; i++)
    ids[i] = chance(seed, 10) ? (int32_t)PICK(seed, -1, -7, experts, INT32_MAX)
                              : (int32_t)(test_random(seed) % (uint64_t)experts);
}

/* On all multiprocessors, one or seven of them: results must not show it. `seed` is that of the test. */
#define RUN_ANYWHERE(t, op, c, g)           \
  do {                                      \
    (g).sm_limit = PICK(&seed, 0, 0, 1, 7); \
    RUN_TWIN(t, op, c, g);                  \
  } while (0)

static int64_t any_tokens(uint64_t *seed) { return PICK(seed, 0, 1, 2, 7, 33, 64, 129, 300); }
static int64_t any_experts(uint64_t *seed) {
  return PICK(seed, 1, 2, 7, 8, 31, 32, 64, 128, 129, 256, 384, 512, 513);
}
static int64_t any_topk(int64_t experts, uint64_t *seed) {
  const int64_t topk = PICK(seed, 1, 1, 2, 4, 6, 8, 8, 33, 64);
  return topk < experts ? topk : experts;
}

static void route_once(int64_t tokens, int64_t experts, int64_t topk, uint64_t s) {
  uint64_t seed = s;
  struct twin t;
  const moe_router_desc router = any_router(experts, topk, &seed);
  moe_route_args c = {.tokens = tokens, .experts = experts, .topk = topk, .router = &router};
  c.logits_dtype = any_dtype(&seed);
  const int given = chance(&seed, 20), tail = router.score == MOE_SCORE_SQRT_SOFTPLUS;
  moe_route_args g = c;
  twin_open(&t, "route: t%d e%d k%d score %d groups %d/%d by %d dtype %d given %d seed %llu", (int)tokens,
            (int)experts, (int)topk, router.score, (int)router.topk_groups, (int)router.groups,
            router.group_score, c.logits_dtype, given, (unsigned long long)s);
  fill_logits(ARRAY(&t, c, g, logits, bytes_of(c.logits_dtype, tokens * experts)), c.logits_dtype,
              tokens * experts, &seed);
  if (chance(&seed, 40)) fill_random(ARRAY(&t, c, g, router_bias, experts * 4), MOE_FP32, experts, 1, &seed);
  if (chance(&seed, 40))
    fill_random(ARRAY(&t, c, g, correction_bias, experts * 4), MOE_FP32, experts, 1, &seed);
  if (chance(&seed, 40)) fill_mask(ARRAY(&t, c, g, padding_mask, tokens), tokens, &seed);
  if (given) fill_ids(ARRAY(&t, c, g, given_ids, tokens * topk * 4), tokens * topk, experts, &seed);
  ARRAY(&t, c, g, ids, tokens * topk * 4);
  ARRAY(&t, c, g, counts, experts * 4);
  ARRAY(&t, c, g, weights, tokens * topk * 4);
  twin_floats(&t, MOE_FP32, topk,
              tail ? 0x1p-20 : 0x1p-23); /* log1pf is the only operation that is not the same */
  RUN_ANYWHERE(&t, route, c, g);
}

TEST(route) {
  for (uint64_t s = 1; s <= 150; s++) {
    uint64_t seed = s * 7919;
    const int64_t experts = any_experts(&seed);
    route_once(any_tokens(&seed), experts, any_topk(experts, &seed), s);
  }
  for (uint64_t s = 1000; s < 1006; s++) route_once(5, 4096, s % 2 ? 64 : 8, s);
}

static void fill_slopes(float *slopes, int64_t lines, int64_t experts, uint64_t *seed) {
  const int z_loss = chance(seed, 60);
  fill_random(slopes, MOE_FP32, lines * (experts + 1), 0.1f, seed);
  for (int64_t i = 0; i < lines && !z_loss; i++) slopes[i * (experts + 1) + experts] = 0;
}

static void backward_once(int64_t tokens, int64_t experts, int64_t topk, uint64_t s) {
  uint64_t seed = s;
  struct twin t;
  moe_router_desc router = any_router(experts, topk, &seed);
  const int64_t sequence = PICK(&seed, 0, 5, 64);
  if (sequence > 0) router.balance = MOE_BALANCE_SEQUENCE, router.sequence_tokens = sequence;
  const int64_t sequences = sequence > 0 && tokens > sequence ? (tokens + sequence - 1) / sequence : 1;
  moe_route_backward_args c = {.tokens = tokens, .experts = experts, .topk = topk, .router = &router};
  c.logits_dtype = any_dtype(&seed), c.dlogits_dtype = any_dtype(&seed);
  c.loss_scale = chance(&seed, 50) ? 3 : 0;
  moe_route_backward_args g = c;
  twin_open(&t, "route_backward: t%d e%d k%d score %d sequence %d dtypes %d %d seed %llu", (int)tokens,
            (int)experts, (int)topk, router.score, (int)sequence, c.logits_dtype, c.dlogits_dtype,
            (unsigned long long)s);
  fill_logits(ARRAY(&t, c, g, logits, bytes_of(c.logits_dtype, tokens * experts)), c.logits_dtype,
              tokens * experts, &seed);
  fill_ids(ARRAY(&t, c, g, ids, tokens * topk * 4), tokens * topk, experts, &seed);
  if (chance(&seed, 40)) fill_random(ARRAY(&t, c, g, router_bias, experts * 4), MOE_FP32, experts, 1, &seed);
  if (chance(&seed, 40)) fill_mask(ARRAY(&t, c, g, padding_mask, tokens), tokens, &seed);
  if (chance(&seed, 80))
    fill_random(ARRAY(&t, c, g, dweights, tokens * topk * 4), MOE_FP32, tokens * topk, 1, &seed);
  if (chance(&seed, 40))
    fill_ids(ARRAY(&t, c, g, slot_row, tokens * topk * 4), tokens * topk, experts, &seed);
  if (chance(&seed, 60))
    fill_slopes(ARRAY(&t, c, g, slopes, sequences * (experts + 1) * 4), sequences, experts, &seed);
  if (c.slopes != NULL && chance(&seed, 50))
    fill_random(ARRAY(&t, c, g, dlosses, 2 * 4), MOE_FP32, 2, 2, &seed);
  ARRAY(&t, c, g, dlogits, bytes_of(c.dlogits_dtype, tokens * experts));
  twin_floats(&t, c.dlogits_dtype, experts, step_of(c.dlogits_dtype));
  RUN_ANYWHERE(&t, route_backward, c, g);
}

TEST(route_backward) {
  for (uint64_t s = 1; s <= 120; s++) {
    uint64_t seed = s;
    const int64_t tokens = any_tokens(&seed), experts = s % 40 == 0 ? 4096 : any_experts(&seed);
    backward_once(tokens, experts, any_topk(experts, &seed), s);
  }
}

/* Tokens that do not fill a warp, experts that do not fill the lanes of a token, and as many slots as there may be. */
TEST(route_backward_of_ragged_sizes) {
  static const int64_t tokens[] = {1, 3, 5, 33}, experts[] = {1, 7, 8, 33, 64, 65, 128, 129, 256, 500, 512},
                       topk[] = {1, 7, 64};
  for (uint64_t s = 0; s < 4 * 11 * 3; s++)
    backward_once(tokens[s % 4], experts[s / 4 % 11], topk[s / 44], 1000 + s);
}

TEST(router_loss) {
  for (uint64_t s = 1; s <= 120; s++) {
    uint64_t seed = s;
    struct twin t;
    const int64_t tokens = s % 20 == 0 ? 9000 : any_tokens(&seed),
                  experts = s % 39 == 0 ? 4096 : any_experts(&seed);
    const int64_t topk = any_topk(experts, &seed);
    moe_router_desc router = {.score = (moe_score)PICK(&seed, 0, 1, 2, 3),
                              .balance = (moe_balance)PICK(&seed, 0, 1, 2, 3)};
    router.balance_coeff = router.balance != MOE_BALANCE_NONE ? 0.5f : 0,
    router.z_coeff = chance(&seed, 60) ? 0.125f : 0;
    router.sequence_tokens = router.balance == MOE_BALANCE_SEQUENCE ? PICK(&seed, 1, 5, 64, 1000) : 0;
    const int64_t length = router.sequence_tokens,
                  sequences = length > 0 && tokens > length ? (tokens + length - 1) / length : 1;
    moe_router_loss_args c = {.tokens = tokens, .experts = experts, .topk = topk, .router = &router};
    c.logits_dtype = any_dtype(&seed);
    moe_router_loss_args g = c;
    twin_open(&t, "router_loss: t%d e%d k%d score %d balance %d sequence %d seed %d", (int)tokens,
              (int)experts, (int)topk, router.score, router.balance, (int)length, (int)s);
    fill_logits(ARRAY(&t, c, g, logits, bytes_of(c.logits_dtype, tokens * experts)), c.logits_dtype,
                tokens * experts, &seed);
    fill_ids(ARRAY(&t, c, g, ids, tokens * topk * 4), tokens * topk, experts, &seed);
    if (chance(&seed, 40)) fill_mask(ARRAY(&t, c, g, padding_mask, tokens), tokens, &seed);
    if (router.balance == MOE_BALANCE_GLOBAL) {
      int64_t *counts = ARRAY(&t, c, g, global_counts, (experts + 1) * 8);
      for (int64_t e = 0; e <= experts; e++) counts[e] = (int64_t)(test_random(&seed) % 1000);
    }
    if (chance(&seed, 80)) {
      ARRAY(&t, c, g, losses, 8);
      twin_floats(&t, MOE_FP32, 1, 0x1p-20);
    }
    ARRAY(&t, c, g, slopes, sequences * (experts + 1) * 4);
    twin_floats(&t, MOE_FP32, experts + 1, 0x1p-20);
    RUN_ANYWHERE(&t, router_loss, c, g);
  }
}

TEST(sort) {
  for (uint64_t s = 1; s <= 150; s++) {
    uint64_t seed = s;
    struct twin t;
    const int64_t experts = s % 40 == 0 ? 4096 : any_experts(&seed), topk = PICK(&seed, 1, 2, 3, 8, 10, 64);
    const int64_t tokens = s % 10 == 0 ? 20000 / topk * 8 : any_tokens(&seed), slots = tokens * topk;
    moe_sort_args c = {
        .tokens = tokens, .experts = experts, .topk = topk, .drop = (moe_drop)PICK(&seed, 0, 1)};
    c.capacity = PICK(&seed, 0, 0, 1, 3, slots / experts + 1, slots / 2 + 1);
    moe_sort_args g = c;
    twin_open(&t, "sort: t%d e%d k%d capacity %d by %d seed %d", (int)tokens, (int)experts, (int)topk,
              (int)c.capacity, c.drop, (int)s);
    if (experts > 1 || chance(&seed, 50)) {
      int32_t *ids = ARRAY(&t, c, g, ids, slots * 4);
      fill_ids(ids, slots, experts, &seed);
      if (chance(&seed, 20))
        for (int64_t i = 0; i < slots; i++) ids[i] = (int32_t)(experts - 1);
    }
    if (chance(&seed, 40)) fill_mask(ARRAY(&t, c, g, padding_mask, tokens), tokens, &seed);
    float *weights = ARRAY(&t, c, g, weights, slots * 4);
    fill_logits(weights, MOE_FP32, slots, &seed);
    ARRAY(&t, c, g, row_offset, (experts + 1) * 4);
    ARRAY(&t, c, g, row_slot, slots * 4);
    ARRAY(&t, c, g, slot_row, slots * 4);
    if (chance(&seed, 70)) ARRAY(&t, c, g, counts, experts * 4);
    RUN_ANYWHERE(&t, sort, c, g);
  }
}

TEST(balance) {
  for (uint64_t s = 1; s <= 30; s++) {
    uint64_t seed = s;
    struct twin t, u;
    const int64_t experts = s % 10 == 0 ? 4096 : any_experts(&seed);
    moe_bias_update_args c = {.experts = experts, .rate = 0.001f}, g = c;
    moe_load_stats_args lc = {.experts = experts}, lg = lc;
    twin_open(&t, "bias_update: e%d seed %d", (int)experts, (int)s);
    twin_open(&u, "load_stats: e%d seed %d", (int)experts, (int)s);
    int32_t *counts = ARRAY(&t, c, g, counts, experts * 4), *loads = ARRAY(&u, lc, lg, counts, experts * 4);
    for (int64_t e = 0; e < experts; e++)
      counts[e] = (int32_t)(test_random(&seed) % 5), loads[e] = s % 7 == 0 ? 0 : counts[e] * 100 - 50;
    fill_random(ARRAY(&t, c, g, bias, experts * 4), MOE_FP32, experts, 1, &seed);
    ARRAY(&u, lc, lg, load, sizeof(moe_load_summary));
    twin_floats(&u, MOE_FP32, 1, 0x1p-20);
    RUN_ANYWHERE(&t, bias_update, c, g);
    RUN_ANYWHERE(&u, load_stats, lc, lg);
  }
}

static int64_t any_hidden(uint64_t *seed) {
  return PICK(seed, 1, 7, 8, 65, 100, 120, 248, 264, 520, 1028, 1032, 2056);
}

TEST(permute) {
  for (uint64_t s = 1; s <= 60; s++) {
    uint64_t seed = s;
    struct twin t;
    struct maps m;
    const int64_t hidden = any_hidden(&seed);
    maps_open(&m, PICK(&seed, 0, 1, 5, 40), PICK(&seed, 1, 2, 8, 60), PICK(&seed, 1, 2, 8), &seed);
    moe_permute_args c = {.rows = m.slots,
                          .hidden = hidden,
                          .topk = m.topk,
                          .experts = m.experts,
                          .dtype = any_dtype(&seed)},
                     g = c;
    twin_open(&t, "permute: t%d e%d k%d h%d dtype %d seed %d", (int)m.tokens, (int)m.experts, (int)m.topk,
              (int)hidden, c.dtype, (int)s);
    memcpy(ARRAY(&t, c, g, row_offset, (m.experts + 1) * 4), m.row_offset, (size_t)(m.experts + 1) * 4);
    memcpy(ARRAY(&t, c, g, row_slot, m.slots * 4), m.row_slot, (size_t)m.slots * 4);
    if (m.slots > 3) ((int32_t *)(void *)t.array[1].host)[1] = -1; /* a row without a slot is 0 */
    if (chance(&seed, 50)) fill_random(ARRAY(&t, c, g, weights, m.slots * 4), MOE_FP32, m.slots, 1, &seed);
    fill_random(ARRAY(&t, c, g, x, bytes_of(c.dtype, m.tokens * hidden)), c.dtype, m.tokens * hidden, 1,
                &seed);
    ARRAY(&t, c, g, y, bytes_of(c.dtype, m.slots * hidden));
    RUN_ANYWHERE(&t, permute, c, g);
    maps_close(&m);
  }
}

TEST(combine) {
  for (uint64_t s = 1; s <= 100; s++) {
    uint64_t seed = s;
    struct twin t;
    struct maps m;
    const int64_t hidden = any_hidden(&seed), topk = (int64_t)(s % 18);
    maps_open(&m, PICK(&seed, 0, 1, 5, 40), PICK(&seed, 1, 2, 8, 60), topk, &seed);
    moe_combine_args c = {.tokens = m.tokens, .hidden = hidden, .topk = topk, .rows = m.slots};
    c.y_dtype = any_dtype(&seed), c.out_dtype = any_dtype(&seed);
    moe_combine_args g = c;
    twin_open(&t, "combine: t%d e%d k%d h%d %d to %d seed %d", (int)m.tokens, (int)m.experts, (int)topk,
              (int)hidden, c.y_dtype, c.out_dtype, (int)s);
    if (chance(&seed, 80)) memcpy(ARRAY(&t, c, g, slot_row, m.slots * 4), m.slot_row, (size_t)m.slots * 4);
    if (chance(&seed, 50)) *(int32_t *)ARRAY(&t, c, g, row_end, 4) = m.row_offset[m.experts] - (int)(s % 2);
    if (chance(&seed, 60)) fill_random(ARRAY(&t, c, g, weights, m.slots * 4), MOE_FP32, m.slots, 1, &seed);
    if (chance(&seed, 50))
      fill_random(ARRAY(&t, c, g, addend, m.tokens * hidden * 4), MOE_FP32, m.tokens * hidden, 1, &seed);
    fill_random(ARRAY(&t, c, g, y, bytes_of(c.y_dtype, m.slots * hidden)), c.y_dtype, m.slots * hidden, 1,
                &seed);
    ARRAY(&t, c, g, out, bytes_of(c.out_dtype, m.tokens * hidden));
    RUN_ANYWHERE(&t, combine, c, g);
    maps_close(&m);
  }
}

TEST(combine_backward) {
  for (uint64_t s = 1; s <= 100; s++) {
    uint64_t seed = s;
    struct twin t;
    struct maps m;
    const int copies = s % 4 == 0; /* dy is dout, row by row */
    const int64_t hidden = copies ? PICK(&seed, 8, 136, 1032, 2056) : any_hidden(&seed);
    maps_open(&m, PICK(&seed, 0, 1, 5, 40), PICK(&seed, 1, 2, 8, 60), PICK(&seed, 1, 2, 8, 40), &seed);
    moe_combine_backward_args c = {.tokens = m.tokens, .hidden = hidden, .topk = m.topk, .rows = m.slots};
    c.y_dtype = any_dtype(&seed), c.dout_dtype = copies ? c.y_dtype : any_dtype(&seed);
    moe_combine_backward_args g = c;
    twin_open(&t, "combine_backward: t%d e%d k%d h%d %d %d seed %d", (int)m.tokens, (int)m.experts,
              (int)m.topk, (int)hidden, c.y_dtype, c.dout_dtype, (int)s);
    if (chance(&seed, 80)) memcpy(ARRAY(&t, c, g, slot_row, m.slots * 4), m.slot_row, (size_t)m.slots * 4);
    if (chance(&seed, 50)) *(int32_t *)ARRAY(&t, c, g, row_end, 4) = m.row_offset[m.experts];
    if (!copies && chance(&seed, 60))
      fill_random(ARRAY(&t, c, g, weights, m.slots * 4), MOE_FP32, m.slots, 1, &seed);
    fill_random(ARRAY(&t, c, g, y, bytes_of(c.y_dtype, m.slots * hidden)), c.y_dtype, m.slots * hidden, 1,
                &seed);
    fill_random(ARRAY(&t, c, g, dout, bytes_of(c.dout_dtype, m.tokens * hidden)), c.dout_dtype,
                m.tokens * hidden, 1, &seed);
    if (copies || chance(&seed, 80)) ARRAY(&t, c, g, dy, bytes_of(c.y_dtype, m.slots * hidden));
    if (!copies && chance(&seed, 80)) {
      ARRAY(&t, c, g, dweights, m.slots * 4);
      twin_floats(&t, MOE_FP32, m.slots, 0x1p-16);
    }
    RUN_ANYWHERE(&t, combine_backward, c, g);
    maps_close(&m);
  }
}

TEST(act) {
  for (uint64_t s = 1; s <= 150; s++) {
    uint64_t seed = s;
    struct twin t, u;
    const int64_t rows = PICK(&seed, 0, 1, 3, 40), inter = PICK(&seed, 1, 7, 8, 64, 65, 96, 100, 320);
    const moe_act_desc act = any_act(inter, &seed);
    const int64_t width = inter * (act.gated ? 2 : 1);
    moe_act_args c = {.rows = rows, .inter = inter, .act = &act, .dtype = any_dtype(&seed)}, g = c;
    moe_act_backward_args bc = {.rows = rows, .inter = inter, .act = &act, .dtype = c.dtype}, bg = bc;
    twin_open(&t, "act: r%d f%d kind %d gated %d layout %d run %d dtype %d seed %d", (int)rows, (int)inter,
              act.kind, act.gated, act.layout, (int)act.interleave, c.dtype, (int)s);
    twin_open(&u, "backward of %.200s", t.what);
    void *h = ARRAY(&t, c, g, h, bytes_of(c.dtype, rows * width)),
         *h2 = ARRAY(&u, bc, bg, h, bytes_of(c.dtype, rows * width));
    fill_random(h, c.dtype, rows * width, 3, &seed);
    memcpy(h2, h, (size_t)bytes_of(c.dtype, rows * width));
    fill_random(ARRAY(&u, bc, bg, da, bytes_of(c.dtype, rows * inter)), c.dtype, rows * inter, 1, &seed);
    ARRAY(&t, c, g, a, bytes_of(c.dtype, rows * inter));
    twin_floats(&t, c.dtype, inter, step_of(c.dtype));
    if (s % 2) {
      ARRAY(&u, bc, bg, dh, bytes_of(c.dtype, rows * width));
    } else { /* dh is h */
      bc.dh = (void *)bc.h, bg.dh = (void *)bg.h;
      u.array[u.count++] = u.array[0];
      u.array[0] = u.array[1], u.array[1] = u.array[--u.count];
    }
    twin_floats(&u, c.dtype, width, step_of(c.dtype));
    RUN_ANYWHERE(&t, act, c, g);
    RUN_ANYWHERE(&u, act_backward, bc, bg);
  }
}

TEST(convert_copy_zero) {
  for (uint64_t s = 1; s <= 60; s++) {
    uint64_t seed = s;
    struct twin t, u, v;
    const int64_t n = PICK(&seed, 0, 1, 7, 8, 9, 1000, 70001);
    moe_convert_args c = {.count = n, .x_dtype = any_dtype(&seed), .y_dtype = any_dtype(&seed)}, g = c;
    moe_copy_args cc = {.bytes = (size_t)n}, cg = cc;
    moe_zero_args zc = {.bytes = (size_t)n}, zg = zc;
    twin_open(&t, "convert: %d of %d to %d seed %d", (int)n, c.x_dtype, c.y_dtype, (int)s);
    twin_open(&u, "copy: %d", (int)n), twin_open(&v, "zero: %d", (int)n);
    unsigned char *x = ARRAY(&t, c, g, x, bytes_of(c.x_dtype, n)), *from = ARRAY(&u, cc, cg, src, n);
    for (int64_t i = 0; i < bytes_of(c.x_dtype, n); i++)
      x[i] = (unsigned char)test_random(&seed); /* every kind of bits */
    for (int64_t i = 0; i < n; i++) from[i] = (unsigned char)test_random(&seed);
    ARRAY(&t, c, g, y, bytes_of(c.y_dtype, n));
    ARRAY(&u, cc, cg, dst, n), ARRAY(&v, zc, zg, data, n);
    RUN_ANYWHERE(&t, convert, c, g);
    RUN_ANYWHERE(&u, copy, cc, cg);
    RUN_ANYWHERE(&v, zero, zc, zg);
  }
}

TEST(bias_grad) {
  for (uint64_t s = 1; s <= 80; s++) {
    uint64_t seed = s;
    struct twin t;
    struct maps m;
    const int64_t n = any_hidden(&seed);
    const int map = chance(&seed, 80);
    maps_open(&m, PICK(&seed, 0, 1, 5, 40, 700), map ? PICK(&seed, 1, 2, 8, 60, 300) : 1,
              PICK(&seed, 1, 2, 4), &seed);
    moe_bias_grad_args c = {
        .rows = m.slots, .n = n, .experts = m.experts, .gather_topk = chance(&seed, 50) ? m.topk : 0};
    c.v_dtype = any_dtype(&seed), c.d_dtype = any_dtype(&seed), c.accumulate = chance(&seed, 40);
    moe_bias_grad_args g = c;
    const int64_t count = (c.gather_topk > 0 ? m.tokens : m.slots) * n;
    twin_open(&t, "bias_grad: t%d e%d k%d n%d gather %d %d to %d acc %d seed %d", (int)m.tokens,
              (int)m.experts, (int)m.topk, (int)n, (int)c.gather_topk, c.v_dtype, c.d_dtype, c.accumulate,
              (int)s);
    if (map)
      memcpy(ARRAY(&t, c, g, row_offset, (m.experts + 1) * 4), m.row_offset, (size_t)(m.experts + 1) * 4);
    if (map) memcpy(ARRAY(&t, c, g, row_slot, m.slots * 4), m.row_slot, (size_t)m.slots * 4);
    if (chance(&seed, 50)) fill_random(ARRAY(&t, c, g, weights, m.slots * 4), MOE_FP32, m.slots, 1, &seed);
    fill_random(ARRAY(&t, c, g, v, bytes_of(c.v_dtype, count)), c.v_dtype, count, 1, &seed);
    void *d = ARRAY(&t, c, g, d, bytes_of(c.d_dtype, m.experts * n));
    if (c.accumulate) fill_random(d, c.d_dtype, m.experts * n, 1, &seed);
    twin_floats(&t, c.d_dtype, m.experts * n, step_of(c.d_dtype));
    RUN_ANYWHERE(&t, bias_grad, c, g);
    maps_close(&m);
  }
}

TEST_MAIN()
