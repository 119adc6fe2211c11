/* SPDX-License-Identifier: Apache-2.0
 *
 * What: the matrix products on random problems, CUDA against the CPU: every mix of formats, layouts, maps and epilogues.
 * Idea: half of the problems are bf16 of sizes that the tensor cores take, the others anything; edges of tiles are drawn on
 * purpose. The bound is one step of the output's format relative to the largest of a row, and a k-step left out is
 * dozens of those. */
#include "twin.h"

struct formats {
  moe_dtype a, b, d;
};

static struct formats any_formats(int fast, uint64_t *seed) {
  struct formats f = {any_dtype(seed), any_dtype(seed), any_dtype(seed)};
  if (fast) f = (struct formats){MOE_BF16, MOE_BF16, chance(seed, 30) ? MOE_FP32 : MOE_BF16};
  return f;
}

static int64_t any_size(int fast, uint64_t *seed) {
  if (fast) return PICK(seed, 8, 64, 72, 128, 136, 192, 248, 256, 264, 320, 520);
  return PICK(seed, 1, 2, 15, 16, 17, 31, 63, 64, 65, 100, 129, 200);
}

static struct maps any_maps(int map, uint64_t *seed) {
  struct maps m;
  const int64_t experts = PICK(seed, 1, 2, 3, 8, 40, 130);
  maps_open(&m, PICK(seed, 0, 1, 5, 64, 129, 300), map ? experts : 1, PICK(seed, 1, 2, 8), seed);
  return m;
}

/* The maps of a problem as the arrays of both argument structs; `expert` NULL maps are left away. */
#define MAP_ARRAYS(t, c, g, m)                                                            \
  do {                                                                                    \
    memcpy(ARRAY(t, c, g, row_offset, ((m).experts + 1) * 4), (m).row_offset,             \
           (size_t)((m).experts + 1) * 4);                                                \
    memcpy(ARRAY(t, c, g, row_slot, (m).slots * 4), (m).row_slot, (size_t)(m).slots * 4); \
  } while (0)

static void name_gemm(struct twin *t, const moe_gemm_args *a, const struct maps *m, uint64_t s) {
  const moe_act_desc none = {0}, *act = a->act ? a->act : &none;
  twin_open(t,
            "gemm: epilogue %d t%d e%d k%d n%d k%d gather %d kn %d %d %d to %d acc %d act %d gated %d layout "
            "%d run %d seed %d",
            a->epilogue, (int)m->tokens, (int)m->experts, (int)m->topk, (int)a->n, (int)a->k,
            (int)a->gather_topk, a->b_kn, a->a_dtype, a->b_dtype, a->d_dtype, a->accumulate, act->kind,
            act->gated, act->layout, (int)act->interleave, (int)s);
}

/* A, B, weights and the maps; what all epilogues read. */
static void common_inputs(struct twin *t, moe_gemm_args *c, moe_gemm_args *g, const struct maps *m, int map,
                          uint64_t *seed) {
  const int64_t lines = c->gather_topk > 0 ? m->tokens : m->slots, weights = m->experts * c->n * c->k;
  if (map) MAP_ARRAYS(t, *c, *g, *m);
  fill_random(ARRAY(t, *c, *g, a, bytes_of(c->a_dtype, lines * c->k)), c->a_dtype, lines * c->k, 1, seed);
  fill_random(ARRAY(t, *c, *g, b, bytes_of(c->b_dtype, weights)), c->b_dtype, weights, 0.5f, seed);
  if (chance(seed, 50)) fill_random(ARRAY(t, *c, *g, weights, m->slots * 4), MOE_FP32, m->slots, 1, seed);
}

static void some_bias(struct twin *t, moe_gemm_args *c, moe_gemm_args *g, const struct maps *m, int fast,
                      uint64_t *seed) {
  if (chance(seed, 50)) return;
  c->bias_dtype = g->bias_dtype = fast ? MOE_BF16 : any_dtype(seed);
  fill_random(ARRAY(t, *c, *g, bias, bytes_of(c->bias_dtype, m->experts * c->n)), c->bias_dtype,
              m->experts * c->n, 1, seed);
}

static void gemm_store(uint64_t s) {
  uint64_t seed = s;
  struct twin t;
  const int fast = chance(&seed, 50), map = chance(&seed, 80);
  struct maps m = any_maps(map, &seed);
  const struct formats f = any_formats(fast, &seed);
  moe_gemm_args c = {
      .rows = m.slots, .n = any_size(fast, &seed), .k = any_size(fast, &seed), .experts = m.experts};
  c.a_dtype = f.a, c.b_dtype = f.b, c.d_dtype = f.d, c.b_kn = chance(&seed, 50);
  c.gather_topk = chance(&seed, 50) ? m.topk : 0, c.accumulate = f.d == MOE_FP32 && chance(&seed, 50);
  moe_gemm_args g = c;
  name_gemm(&t, &c, &m, s);
  common_inputs(&t, &c, &g, &m, map, &seed);
  some_bias(&t, &c, &g, &m, fast, &seed);
  void *d = ARRAY(&t, c, g, d, bytes_of(f.d, m.slots * c.n));
  if (c.accumulate) fill_random(d, f.d, m.slots * c.n, 1, &seed);
  twin_floats(&t, f.d, c.n, step_of(f.d));
  RUN_TWIN(&t, gemm, c, g);
  maps_close(&m);
}

static void gemm_act(uint64_t s) {
  uint64_t seed = s;
  struct twin t;
  const int fast = chance(&seed, 50);
  struct maps m = any_maps(1, &seed);
  struct formats f = any_formats(fast, &seed);
  if (fast) f.d = MOE_BF16;
  const int64_t inter = any_size(fast, &seed);
  const moe_act_desc act = any_act(inter, &seed);
  moe_gemm_args c = {
      .rows = m.slots, .n = inter * (act.gated ? 2 : 1), .k = any_size(fast, &seed), .experts = m.experts};
  c.a_dtype = f.a, c.b_dtype = f.b, c.d_dtype = f.d, c.b_kn = chance(&seed, 50);
  c.epilogue = MOE_EPILOGUE_ACT, c.act = &act, c.gather_topk = chance(&seed, 70) ? m.topk : 0;
  moe_gemm_args g = c;
  name_gemm(&t, &c, &m, s);
  common_inputs(&t, &c, &g, &m, 1, &seed);
  some_bias(&t, &c, &g, &m, fast, &seed);
  if (chance(&seed, 60)) {
    ARRAY(&t, c, g, h, bytes_of(f.d, m.slots * c.n));
    twin_floats(&t, f.d, c.n, step_of(f.d));
  }
  ARRAY(&t, c, g, d, bytes_of(f.d, m.slots * inter));
  /* h may round the other way, and an activation is up to quadratic in it and its halves multiply: a few steps */
  twin_floats(&t, f.d, inter, 8 * step_of(f.d));
  RUN_TWIN(&t, gemm, c, g);
  maps_close(&m);
}

static void gemm_dact(uint64_t s) {
  uint64_t seed = s;
  struct twin t;
  const int fast = chance(&seed, 50);
  struct maps m = any_maps(1, &seed);
  struct formats f = any_formats(fast, &seed);
  if (fast) f.d = MOE_BF16;
  const int64_t inter = any_size(fast, &seed);
  const moe_act_desc act = any_act(inter, &seed);
  const int64_t width = inter * (act.gated ? 2 : 1);
  moe_gemm_args c = {.rows = m.slots, .n = inter, .k = any_size(fast, &seed), .experts = m.experts};
  c.a_dtype = f.a, c.b_dtype = f.b, c.d_dtype = f.d, c.b_kn = chance(&seed, 50);
  c.epilogue = MOE_EPILOGUE_DACT, c.act = &act, c.gather_topk = chance(&seed, 70) ? m.topk : 0;
  c.bias_dtype = fast ? MOE_BF16 : any_dtype(&seed);
  moe_gemm_args g = c;
  name_gemm(&t, &c, &m, s);
  common_inputs(&t, &c, &g, &m, 1, &seed);
  if (chance(&seed, 50))
    fill_random(ARRAY(&t, c, g, dot_bias, bytes_of(c.bias_dtype, m.experts * c.k)), c.bias_dtype,
                m.experts * c.k, 1, &seed);
  if (chance(&seed, 70)) {
    ARRAY(&t, c, g, d, bytes_of(f.d, m.slots * inter));
    twin_floats(&t, f.d, inter, step_of(f.d));
  }
  if (chance(&seed, 70)) {
    ARRAY(&t, c, g, dweights, m.slots * 4);
    twin_floats(&t, MOE_FP32, m.slots, f.d == MOE_FP32 ? 0x1p-14 : step_of(f.d)); /* of da as rounded */
  }
  if (s % 2) {
    fill_random(ARRAY(&t, c, g, h, bytes_of(f.d, m.slots * width)), f.d, m.slots * width, 2, &seed);
    ARRAY(&t, c, g, dh, bytes_of(f.d, m.slots * width));
  } else { /* dh is h */
    fill_random(ARRAY(&t, c, g, h, bytes_of(f.d, m.slots * width)), f.d, m.slots * width, 2, &seed);
    c.dh = c.h, g.dh = g.h;
  }
  twin_floats(&t, f.d, width, 2 * step_of(f.d)); /* da may round the other way, and then dh */
  RUN_TWIN(&t, gemm, c, g);
  maps_close(&m);
}

static void wgrad(uint64_t s) {
  uint64_t seed = s;
  struct twin t;
  const int fast = chance(&seed, 50), map = chance(&seed, 80);
  struct maps m = any_maps(map, &seed);
  const struct formats f = any_formats(fast, &seed);
  moe_wgrad_args c = {
      .rows = m.slots, .m = any_size(fast, &seed), .n = any_size(fast, &seed), .experts = m.experts};
  c.a_dtype = f.a, c.b_dtype = f.b, c.d_dtype = f.d, c.accumulate = chance(&seed, 50);
  c.a_gather_topk = chance(&seed, 50) ? m.topk : 0, c.b_gather_topk = chance(&seed, 50) ? m.topk : 0;
  moe_wgrad_args g = c;
  const int64_t a_count = (c.a_gather_topk > 0 ? m.tokens : m.slots) * c.m,
                b_count = (c.b_gather_topk > 0 ? m.tokens : m.slots) * c.n;
  twin_open(&t, "wgrad: t%d e%d k%d m%d n%d gather %d %d, %d %d to %d acc %d seed %d", (int)m.tokens,
            (int)m.experts, (int)m.topk, (int)c.m, (int)c.n, (int)c.a_gather_topk, (int)c.b_gather_topk, f.a,
            f.b, f.d, c.accumulate, (int)s);
  if (map) MAP_ARRAYS(&t, c, g, m);
  fill_random(ARRAY(&t, c, g, a, bytes_of(f.a, a_count)), f.a, a_count, 1, &seed);
  fill_random(ARRAY(&t, c, g, b, bytes_of(f.b, b_count)), f.b, b_count, 1, &seed);
  if (chance(&seed, 30)) fill_random(ARRAY(&t, c, g, weights, m.slots * 4), MOE_FP32, m.slots, 1, &seed);
  const int64_t count = m.experts * c.m * c.n;
  void *d = ARRAY(&t, c, g, d, bytes_of(f.d, count));
  if (c.accumulate) fill_random(d, f.d, count, 1, &seed);
  twin_floats(&t, f.d, c.m * c.n, step_of(f.d));
  RUN_TWIN(&t, wgrad, c, g);
  maps_close(&m);
}

TEST(gemm_store) {
  for (uint64_t s = 1; s <= 200; s++) gemm_store(s);
}
TEST(gemm_act) {
  for (uint64_t s = 1; s <= 200; s++) gemm_act(s);
}
TEST(gemm_dact) {
  for (uint64_t s = 1; s <= 200; s++) gemm_dact(s);
}
TEST(wgrad) {
  for (uint64_t s = 1; s <= 200; s++) wgrad(s);
}

TEST_MAIN()
