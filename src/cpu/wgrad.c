/* SPDX-License-Identifier: Apache-2.0
 *
 * The contraction grouped by expert, d[e] = sum over its rows of (weight A row)^T (B row).
 *
 * A task is a piece [BLOCK_M, BLOCK_N] of one d[e]. It reads its columns of A and B, a chunk of rows at a time, as fp32
 * panels [rows][columns] (gathered, A weighted), multiplies them into an fp32 piece, and converts that into d at the end; an
 * fp32 d that is overwritten is itself the piece.
 * Invariant: one chain over ascending rows an element, whatever the chunks. */
#include "cpu.h"

#include "../workspace.h"
#include "kernel.h"

enum {
  BLOCK_M = 192,
  BLOCK_N = 512,
  CHUNK = 128, /* rows; 64 columns of it are 32 KiB, two thirds of a first-level cache */
  PAD =
      16 /* makes the length of a panel row an odd number of cache lines, so that rows spread over the sets */
};

/* Scratch of one thread. */
struct worker {
  float *a, *b, *c, *row;
};

struct piece {
  int64_t expert, m0, m, n0, n;
};

static int64_t source_row(const moe_wgrad_args *args, int64_t row, int64_t gather_topk) {
  return gather_topk == 0 ? row : (args->row_slot ? args->row_slot[row] : row) / gather_topk;
}

static void read_panels(const moe_wgrad_args *args, const struct moe_cpu_kernel *kernel,
                        const struct piece *p, const struct worker *w, int64_t begin, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t row = begin + i;
    float *a = w->a + i * (BLOCK_M + PAD), *b = w->b + i * (BLOCK_N + PAD);
    kernel->read(a, p->m, args->a, args->a_dtype,
                 source_row(args, row, args->a_gather_topk) * args->m + p->m0, 0, 1, p->m);
    kernel->read(b, ALIGN_UP(p->n, kernel->lanes), args->b, args->b_dtype,
                 source_row(args, row, args->b_gather_topk) * args->n + p->n0, 0, 1, p->n);
    if (args->weights == NULL) continue;
    const float weight = args->weights[args->row_slot ? args->row_slot[row] : row];
    for (int64_t j = 0; j < p->m; j++) a[j] *= weight;
  }
}

static void store_piece(const moe_wgrad_args *args, const struct moe_cpu_kernel *kernel,
                        const struct piece *p, const struct worker *w) {
  for (int64_t i = 0; i < p->m; i++) {
    float *c = w->c + i * BLOCK_N;
    const int64_t first = (p->expert * args->m + p->m0 + i) * args->n + p->n0;
    if (args->accumulate) {
      kernel->read(w->row, p->n, args->d, args->d_dtype, first, 0, 1, p->n);
      for (int64_t j = 0; j < p->n; j++) c[j] += w->row[j];
    }
    moe_cpu_write(args->d, args->d_dtype, first, c, p->n);
  }
}

static void run_piece(const moe_wgrad_args *args, const struct moe_cpu_kernel *kernel, const struct piece *p,
                      const struct worker *w) {
  const int64_t begin = moe_cpu_offset(args->row_offset, p->expert, args->rows);
  const int64_t end = moe_cpu_offset(args->row_offset, p->expert + 1, args->rows);
  if (end <= begin && args->accumulate) return;
  const bool direct = args->d_dtype == MOE_FP32 && !args->accumulate && p->n % kernel->lanes == 0;
  const int64_t ldc = direct ? args->n : BLOCK_N;
  float *c = direct ? (float *)args->d + (p->expert * args->m + p->m0) * args->n + p->n0 : w->c;
  int64_t row = begin;
  do { /* at least once: without rows the sums are 0 */
    const int64_t count = end - row < 0 ? 0 : end - row < CHUNK ? end - row : CHUNK;
    read_panels(args, kernel, p, w, row, count);
    for (int64_t j = 0; j < p->n; j += kernel->width) {
      const int64_t left = ALIGN_UP(p->n - j, kernel->lanes);
      kernel->product(c + j, ldc, w->a, 1, BLOCK_M + PAD, p->m, w->b + j, BLOCK_N + PAD,
                      left < kernel->width ? left : kernel->width, count, row == begin);
    }
    row += count;
  } while (row < end);
  if (!direct) store_piece(args, kernel, p, w);
}

static struct worker take_worker(struct arena *arena) {
  const size_t size = sizeof(float);
  return (struct worker){
      .a = arena_take(arena, CHUNK * (BLOCK_M + PAD) * size),
      .b = arena_take(arena, CHUNK * (BLOCK_N + PAD) * size),
      .c = arena_take(arena, BLOCK_M * BLOCK_N * size),
      .row = arena_take(arena, BLOCK_N * size),
  };
}

static size_t worker_bytes(void) {
  struct arena arena = {0};
  take_worker(&arena);
  return arena.used;
}

size_t moe_cpu_wgrad_scratch(const moe_context *ctx, const moe_wgrad_args *args) {
  (void)args;
  return (size_t)ctx->units * worker_bytes() + MOE_ALIGN;
}

moe_status moe_cpu_wgrad(moe_context *ctx, const moe_wgrad_args *args, moe_stream stream) {
  (void)stream;
  const int64_t across = CEIL_DIV(args->n, BLOCK_N), pieces = CEIL_DIV(args->m, BLOCK_M) * across;
#pragma omp parallel num_threads(ctx->units)
  {
    struct arena own = {.base = ALIGN_UP((uintptr_t)args->scratch, MOE_ALIGN),
                        .used = (size_t)omp_get_thread_num() * worker_bytes()};
    const struct worker w = take_worker(&own);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < args->experts * pieces; task++) {
      const int64_t m0 = task % pieces / across * BLOCK_M, n0 = task % across * BLOCK_N;
      const struct piece p = {.expert = task / pieces,
                              .m0 = m0,
                              .m = args->m - m0 < BLOCK_M ? args->m - m0 : BLOCK_M,
                              .n0 = n0,
                              .n = args->n - n0 < BLOCK_N ? args->n - n0 : BLOCK_N};
      run_piece(args, ctx->state, &p, &w);
    }
  }
  return MOE_OK;
}
