/* SPDX-License-Identifier: Apache-2.0
 *
 * The matrix product grouped by expert, with its three epilogues.
 *
 * A tile is some rows of one expert. Its rows of A are gathered, converted to fp32 and transposed once, in groups no wider
 * than the kernel; then it walks over blocks of columns, and for each block over slices of k:
 *
 *     B [n,k]   p = weights, as they lie in memory (q = rows of A): weights are streamed once, the result is [columns][rows]
 *     B [k,n]   p = rows of A, q = a slice of the weights: the result is [rows][columns]
 *
 * The epilogue reads a block as rows. When h is gated a block holds the gate and the up columns of the same elements.
 * Invariants: blocks depend on the arguments alone, never on rows or threads (dweights are summed block by block), and no
 * two tiles share a row, whatever the offsets say. */
#include <string.h>

#include "cpu.h"

#include "../act.h"
#include "../workspace.h"
#include "kernel.h"

enum {
  TILE_ROWS = 192, /* most experts of a training batch fit in one tile, so that their weights are read once */
  BLOCK = 192,     /* columns of a block, a multiple of 32 */
  SLICE = 128,     /* of k: 64 rows of it are 32 KiB, two thirds of a first-level cache */
  PANEL = BLOCK + 16, /* of B: rows of an odd number of cache lines, so that they spread over the sets */
  STEP = 12,          /* rows of p between two fetches of B: one or two tiles of the kernel */
  STRIP = 16          /* rows transposed together */
};

struct tile {
  int64_t expert, begin, count;
};

struct block {
  int64_t begin, count;   /* elements of the activation; columns of d */
  int64_t segments;       /* of h: 2 if gate and up lie apart */
  int64_t column[2];      /* of h, where a segment begins */
  int64_t length, stride; /* of a segment; its distance in a row of the block */
  int64_t gate_up;        /* gated and in one segment: columns from a gate run to its up run, else 0 */
};

/* Scratch of one thread. */
struct worker {
  float *rows;  /* the tile of A, transposed */
  float *panel; /* a slice of B; or a strip of A on its way to `rows` */
  float *c, *block_rows;
  float *bias, *h, *gate, *up, *a, *da;
  void *rounded;
  float *b_row, *dot, *dweights;
};

struct gemm {
  const moe_gemm_args *args;
  const struct moe_cpu_kernel *kernel;
  int64_t inter; /* columns of d */
  bool gated;
  int64_t tile_rows, splits;
  struct tile *tiles;
  int64_t tile_count;
};

/* ---- tiles and blocks ----------------------------------------------------------------------------------------- */

/* The sums of dweights forbid to split a tile by columns, so few rows are shared out as smaller tiles. */
static int64_t tile_rows(const moe_context *ctx, const moe_gemm_args *args) {
  int64_t rows = TILE_ROWS;
  if (args->epilogue == MOE_EPILOGUE_DACT) rows = ALIGN_UP(CEIL_DIV(args->rows, 4 * ctx->units), 16);
  return rows < 16 ? 16 : rows > TILE_ROWS ? TILE_ROWS : rows;
}

static int64_t tile_bound(const moe_gemm_args *args, int64_t rows) {
  const int64_t busy = args->rows < args->experts ? args->rows : args->experts;
  return args->rows / rows + busy;
}

/* Experts begin where the one before ended, should offsets decrease: so the bound above holds and no row is in two tiles. */
static void find_tiles(struct gemm *g) {
  const moe_gemm_args *args = g->args;
  int64_t end = 0;
  for (int64_t e = 0; e < args->experts; e++) {
    int64_t begin = moe_cpu_offset(args->row_offset, e, args->rows);
    if (begin < end) begin = end;
    const int64_t stop = moe_cpu_offset(args->row_offset, e + 1, args->rows);
    if (stop <= begin) continue;
    const int64_t parts = CEIL_DIV(stop - begin, g->tile_rows);
    const int64_t step = ALIGN_UP(CEIL_DIV(stop - begin, parts), g->kernel->lanes);
    for (; begin < stop; begin += step)
      g->tiles[g->tile_count++] = (struct tile){e, begin, stop - begin < step ? stop - begin : step};
    end = stop;
  }
}

/* The block that begins at element `begin`. Interleaved runs of gate and up are kept together if they are short. */
static struct block block_at(const struct gemm *g, int64_t begin) {
  const int64_t block = g->gated ? BLOCK / 2 : BLOCK, left = g->inter - begin;
  const int64_t limit = ALIGN_UP(CEIL_DIV(g->inter, CEIL_DIV(g->inter, block)), 16); /* as even as can be */
  struct block b = {
      .begin = begin, .count = left < limit ? left : limit, .segments = 1, .column = {begin, 0}};
  b.length = b.count;
  if (g->gated) {
    const moe_act_desc *act = g->args->act;
    const bool interleaved = act->layout == MOE_LAYOUT_INTERLEAVED;
    const int64_t run = interleaved ? act->interleave : g->inter;
    if (interleaved && run <= limit) {
      if (b.count > limit / run * run) b.count = limit / run * run;
      b.length = 2 * b.count;
      b.gate_up = run;
    } else {
      if (b.count > run - begin % run) b.count = run - begin % run;
      b.length = b.count;
      b.segments = 2;
    }
    b.column[0] = moe_gate_column(act, g->inter, begin);
    b.column[1] = b.column[0] + moe_up_distance(act, g->inter);
  }
  b.stride = ALIGN_UP(b.length, 16);
  return b;
}

/* ---- the rows of a tile --------------------------------------------------------------------------------------- */

static int64_t slot_of(const moe_gemm_args *args, int64_t row) {
  return args->row_slot ? args->row_slot[row] : row;
}

/* Where group i of `groups` begins, in columns: as even as whole vectors allow. */
static int64_t group_begin(const struct moe_cpu_kernel *kernel, int64_t columns, int64_t i, int64_t groups) {
  return columns / kernel->lanes * i / groups * kernel->lanes;
}

static void read_strip(const struct gemm *g, const struct tile *tile, int64_t row, int64_t count, int64_t k0,
                       int64_t kc, float *dst) {
  const moe_gemm_args *args = g->args;
  for (int64_t i = 0; i < count; i++, dst += kc) {
    int64_t source = tile->begin + row + i;
    if (row + i >= tile->count) { /* a lane that pads: a row of zeros of its own */
      memset(dst, 0, (size_t)kc * sizeof *dst);
      continue;
    }
    if (args->gather_topk > 0) source = slot_of(args, source) / args->gather_topk;
    g->kernel->read(dst, kc, args->a, args->a_dtype, source * args->k + k0, 0, 1, kc);
  }
}

/* w->rows = for each group, [k][width of the group]. */
static void pack_tile(const struct gemm *g, const struct tile *tile, const struct worker *w) {
  const int64_t k = g->args->k, padded = ALIGN_UP(tile->count, g->kernel->lanes);
  const int64_t groups = CEIL_DIV(padded, g->kernel->width), chunk = BLOCK * SLICE / STRIP;
  for (int64_t i = 0; i < groups; i++) {
    const int64_t begin = group_begin(g->kernel, padded, i, groups);
    const int64_t width = group_begin(g->kernel, padded, i + 1, groups) - begin;
    for (int64_t row = 0; row < width; row += STRIP) {
      const int64_t count = width - row < STRIP ? width - row : STRIP;
      for (int64_t k0 = 0; k0 < k; k0 += chunk) {
        const int64_t kc = k - k0 < chunk ? k - k0 : chunk;
        read_strip(g, tile, begin + row, count, k0, kc, w->panel);
        g->kernel->transpose(w->rows + begin * k + k0 * width + row, width, w->panel, kc, count, kc);
      }
    }
  }
}

/* ---- one block of the product --------------------------------------------------------------------------------- */

/* The slice of B that comes next, fetched into cache a few rows at a time: its rows are too short for the hardware to see
 * them coming. */
struct ahead {
  const char *row;
  int64_t rows, row_bytes, stride_bytes;
  int64_t step; /* rows fetched at a time */
};

/* For a slice of `rows` rows that lies `offset` elements from the start of B, to be fetched during `m` rows of products. */
static struct ahead ahead_of(const moe_gemm_args *args, int64_t offset, int64_t rows, int64_t columns,
                             int64_t stride, int64_t m) {
  const int64_t size = (int64_t)moe_dtype_bytes(args->b_dtype);
  return (struct ahead){.row = (const char *)args->b + offset * size,
                        .rows = rows,
                        .row_bytes = columns * size,
                        .stride_bytes = stride * size,
                        .step = 1 + rows * STEP / (m + 1)};
}

static void fetch(struct ahead *next) {
  for (int64_t i = 0; i < next->step && next->rows > 0; i++, next->rows--, next->row += next->stride_bytes)
    for (int64_t byte = 0; byte < next->row_bytes; byte += 64) __builtin_prefetch(next->row + byte, 0, 2);
}

/* c[j*padded + r] += sum over the slice of p[j,:] A[r,:], for all rows of the tile. */
static void times_rows(const struct gemm *g, const struct tile *tile, const struct worker *w,
                       struct ahead *next, float *c, const float *p, int64_t p_row, int64_t columns,
                       int64_t k0, int64_t kc) {
  const int64_t k = g->args->k, padded = ALIGN_UP(tile->count, g->kernel->lanes);
  const int64_t groups = CEIL_DIV(padded, g->kernel->width);
  for (int64_t i = 0; i < groups; i++) {
    const int64_t begin = group_begin(g->kernel, padded, i, groups);
    const int64_t width = group_begin(g->kernel, padded, i + 1, groups) - begin;
    const float *q = w->rows + begin * k + k0 * width;
    for (int64_t j = 0; j < columns; j += STEP, fetch(next))
      g->kernel->product(c + j * padded + begin, padded, p + j * p_row, p_row, 1,
                         columns - j < STEP ? columns - j : STEP, q, width, width, kc, k0 == 0);
  }
}

static void slice_nk(const struct gemm *g, const struct tile *tile, const struct worker *w, int64_t column,
                     int64_t columns, float *c, int64_t k0, int64_t kc) {
  const moe_gemm_args *args = g->args;
  const int64_t first = (tile->expert * args->n + column) * args->k + k0, left = args->k - k0 - kc;
  const int64_t groups = CEIL_DIV(tile->count, g->kernel->width);
  struct ahead next =
      ahead_of(args, first + kc, left > 0 ? columns : 0, left < kc ? left : kc, args->k, groups * columns);
  const float *p = (const float *)args->b + first;
  int64_t p_row = args->k;
  if (args->b_dtype != MOE_FP32) {
    g->kernel->read(w->panel, kc, args->b, args->b_dtype, first, args->k, columns, kc);
    p = w->panel, p_row = kc;
  }
  times_rows(g, tile, w, &next, c, p, p_row, columns, k0, kc);
}

/* c[r*ldc + j] += sum over the slice of A[r,:] B[:,j]. */
static void slice_kn(const struct gemm *g, const struct tile *tile, const struct worker *w, int64_t column,
                     int64_t columns, float *c, int64_t ldc, int64_t k0, int64_t kc) {
  const moe_gemm_args *args = g->args;
  const int64_t k = args->k, padded = ALIGN_UP(tile->count, g->kernel->lanes), left = k - k0 - kc;
  const int64_t lines = ALIGN_UP(columns, g->kernel->lanes), parts = CEIL_DIV(lines, g->kernel->width);
  const int64_t groups = CEIL_DIV(padded, g->kernel->width),
                first = (tile->expert * k + k0) * args->n + column;
  struct ahead next =
      ahead_of(args, first + kc * args->n, left < kc ? left : kc, columns, args->n, parts * tile->count);
  g->kernel->read(w->panel, PANEL, args->b, args->b_dtype, first, args->n, kc, columns);
  for (int64_t j = 0; j < parts; j++) {
    const int64_t from = group_begin(g->kernel, lines, j, parts);
    const int64_t wide = group_begin(g->kernel, lines, j + 1, parts) - from;
    for (int64_t i = 0; i < groups; i++) {
      const int64_t begin = group_begin(g->kernel, padded, i, groups);
      const int64_t width = group_begin(g->kernel, padded, i + 1, groups) - begin;
      const int64_t end = tile->count - begin < width ? tile->count - begin : width;
      const float *p = w->rows + begin * k + k0 * width;
      for (int64_t r = 0; r < end; r += STEP, fetch(&next))
        g->kernel->product(c + (begin + r) * ldc + from, ldc, p + r, 1, width,
                           end - r < STEP ? end - r : STEP, w->panel + from, PANEL, wide, kc, k0 == 0);
    }
  }
}

/* The block as rows; the distance from row to row is segments * stride. */
static float *multiply_block(const struct gemm *g, const struct tile *tile, const struct block *b,
                             const struct worker *w) {
  const moe_gemm_args *args = g->args;
  const int64_t padded = ALIGN_UP(tile->count, g->kernel->lanes), ldc = b->segments * b->stride;
  int64_t k0 = 0;
  do { /* at least once: without any k the sums are 0 */
    const int64_t kc = args->k - k0 < SLICE ? args->k - k0 : SLICE;
    for (int64_t s = 0; s < b->segments; s++)
      if (args->b_kn)
        slice_kn(g, tile, w, b->column[s], b->length, w->c + s * b->stride, ldc, k0, kc);
      else
        slice_nk(g, tile, w, b->column[s], b->length, w->c + s * b->stride * padded, k0, kc);
    k0 += kc;
  } while (k0 < args->k);
  if (args->b_kn) return w->c;
  g->kernel->transpose(w->block_rows, ldc, w->c, padded, ldc, tile->count);
  return w->block_rows;
}

/* ---- epilogues: one row of a block ---------------------------------------------------------------------------- */

static void store_row(const struct gemm *g, const struct block *b, const struct worker *w, int64_t row,
                      float weight, float *acc) {
  const moe_gemm_args *args = g->args;
  const int64_t first = row * args->n + b->begin;
  for (int64_t j = 0; j < b->count; j++) acc[j] = acc[j] * weight + w->bias[j];
  if (args->accumulate) {
    float *d = (float *)args->d + first;
    for (int64_t j = 0; j < b->count; j++) d[j] += acc[j];
  } else {
    moe_cpu_write(args->d, args->d_dtype, first, acc, b->count);
  }
}

/* Gate and up elements of a row h of the block: where they are, or copied apart when they alternate. */
static void split_row(const struct gemm *g, const struct block *b, const struct worker *w, float *h,
                      float **gate, float **up) {
  *gate = h;
  *up = g->gated ? h + b->stride : NULL;
  if (b->gate_up == 0) return;
  for (int64_t i = 0; i < b->count; i += b->gate_up)
    for (int64_t j = i; j < i + b->gate_up; j++) {
      w->gate[j] = h[i + j];
      w->up[j] = h[i + j + b->gate_up];
    }
  *gate = w->gate;
  *up = w->up;
}

static void join_row(const struct block *b, float *h, const float *gate, const float *up) {
  for (int64_t i = 0; i < b->count && b->gate_up > 0; i += b->gate_up)
    for (int64_t j = i; j < i + b->gate_up; j++) {
      h[i + j] = gate[j];
      h[i + j + b->gate_up] = up[j];
    }
}

static void act_row(const struct gemm *g, const struct block *b, const struct worker *w, int64_t row,
                    float weight, float *acc) {
  const moe_gemm_args *args = g->args;
  for (int64_t j = 0; j < b->segments * b->stride; j++) acc[j] = acc[j] * weight + w->bias[j];
  for (int64_t s = 0; s < b->segments; s++) {
    void *h = args->h ? args->h : w->rounded;
    const int64_t first = args->h ? row * args->n + b->column[s] : 0;
    moe_cpu_write(h, args->d_dtype, first, acc + s * b->stride, b->length);
    g->kernel->read(acc + s * b->stride, b->length, h, args->d_dtype, first, 0, 1, b->length);
  }
  float *gate, *up;
  split_row(g, b, w, acc, &gate, &up);
  g->kernel->act(args->act, b->count, gate, up, w->a);
  moe_cpu_write(args->d, args->d_dtype, row * g->inter + b->begin, w->a, b->count);
}

/* Sixteen running sums, so that the loop is vector code of the same bits everywhere. */
static float dot_product(const float *x, const float *y, int64_t n) {
  float sums[16] = {0}, sum = 0;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int64_t j = 0; j < 16; j++) sums[j] += x[i + j] * y[i + j];
  for (; i < n; i++) sums[i % 16] += x[i] * y[i];
  for (int64_t j = 0; j < 16; j++) sum += sums[j];
  return sum;
}

/* Rounds acc, then returns what this block adds to dweights. */
static float dact_row(const struct gemm *g, const struct block *b, const struct worker *w, int64_t row,
                      float weight, float *acc) {
  const moe_gemm_args *args = g->args;
  moe_cpu_write(w->rounded, args->d_dtype, 0, acc, b->count);
  moe_cpu_read(acc, w->rounded, args->d_dtype, 0, b->count);
  const int64_t h_row = row * (g->gated ? 2 * g->inter : g->inter);
  for (int64_t s = 0; s < b->segments; s++)
    g->kernel->read(w->h + s * b->stride, b->length, args->h, args->d_dtype, h_row + b->column[s], 0, 1,
                    b->length);
  float *gate, *up;
  split_row(g, b, w, w->h, &gate, &up);
  for (int64_t j = 0; j < b->count; j++) w->da[j] = weight * acc[j];
  g->kernel->dact(args->act, b->count, gate, up, w->da, w->a);
  join_row(b, w->h, gate, up);
  for (int64_t s = 0; s < b->segments; s++)
    moe_cpu_write(args->dh, args->d_dtype, h_row + b->column[s], w->h + s * b->stride, b->length);
  const float sum = dot_product(acc, w->a, b->count);
  if (args->d) {
    for (int64_t j = 0; j < b->count; j++) w->a[j] *= weight;
    moe_cpu_write(args->d, args->d_dtype, row * g->inter + b->begin, w->a, b->count);
  }
  return sum;
}

/* ---- tasks ---------------------------------------------------------------------------------------------------- */

static void read_bias(const struct gemm *g, const struct tile *tile, const struct block *b,
                      const struct worker *w) {
  const moe_gemm_args *args = g->args;
  memset(w->bias, 0, (size_t)(b->segments * b->stride) * sizeof *w->bias);
  for (int64_t s = 0; s < b->segments && args->bias; s++)
    g->kernel->read(w->bias + s * b->stride, b->length, args->bias, args->bias_dtype,
                    tile->expert * args->n + b->column[s], 0, 1, b->length);
}

static void run_block(const struct gemm *g, const struct tile *tile, const struct block *b,
                      const struct worker *w) {
  const moe_gemm_args *args = g->args;
  struct block product = *b;
  if (args->epilogue == MOE_EPILOGUE_DACT) { /* here the block of h is not that of the product */
    product.segments = 1;
    product.column[0] = b->begin;
    product.length = b->count;
    product.stride = ALIGN_UP(b->count, 16);
  }
  float *acc = multiply_block(g, tile, &product, w);
  if (args->epilogue != MOE_EPILOGUE_DACT) read_bias(g, tile, b, w);
  for (int64_t i = 0; i < tile->count; i++, acc += product.segments * product.stride) {
    const int64_t row = tile->begin + i;
    const float weight = args->weights ? args->weights[slot_of(args, row)] : 1.0f;
    switch (args->epilogue) {
    case MOE_EPILOGUE_STORE: store_row(g, b, w, row, weight, acc); break;
    case MOE_EPILOGUE_ACT: act_row(g, b, w, row, weight, acc); break;
    case MOE_EPILOGUE_DACT: w->dweights[i] += dact_row(g, b, w, row, weight, acc); break;
    }
  }
}

/* dweights of the tile: what the blocks summed, and <A row, dot_bias>, which is one more column of the product. */
static void store_dweights(const struct gemm *g, const struct tile *tile, const struct worker *w) {
  const moe_gemm_args *args = g->args;
  if (args->dot_bias) {
    g->kernel->read(w->b_row, args->k, args->dot_bias, args->bias_dtype, tile->expert * args->k, 0, 1,
                    args->k);
    struct ahead nothing = {0};
    times_rows(g, tile, w, &nothing, w->dot, w->b_row, args->k, 1, 0, args->k);
  }
  for (int64_t i = 0; i < tile->count; i++)
    args->dweights[slot_of(args, tile->begin + i)] = w->dweights[i] + (args->dot_bias ? w->dot[i] : 0.0f);
}

static void run_task(const struct gemm *g, int64_t task, const struct worker *w) {
  const struct tile *tile = &g->tiles[task / g->splits];
  pack_tile(g, tile, w);
  memset(w->dweights, 0, (size_t)tile->count * sizeof *w->dweights);
  int64_t index = 0;
  for (int64_t begin = 0; begin < g->inter; index++) {
    const struct block b = block_at(g, begin);
    if (index % g->splits == task % g->splits) run_block(g, tile, &b, w);
    begin += b.count;
  }
  if (g->args->dweights && g->args->epilogue == MOE_EPILOGUE_DACT) store_dweights(g, tile, w);
}

/* Few tiles (decoding) are split by columns too. */
static int64_t choose_splits(const struct gemm *g, int units) {
  const int64_t blocks = CEIL_DIV(g->inter, BLOCK), wanted = CEIL_DIV(4 * (int64_t)units, g->tile_count);
  if (units == 1 || g->args->epilogue == MOE_EPILOGUE_DACT || blocks <= 1) return 1;
  return wanted < blocks ? wanted : blocks;
}

static struct worker take_worker(struct arena *arena, const moe_gemm_args *args, int64_t rows) {
  const size_t size = sizeof(float), block = BLOCK * size, c = (size_t)rows * block,
               k = (size_t)args->k * size;
  return (struct worker){
      .rows = arena_take(arena, (size_t)rows * k),
      .panel = arena_take(arena, SLICE * PANEL * size),
      .c = arena_take(arena, c),
      .block_rows = arena_take(arena, args->b_kn ? 0 : c),
      .bias = arena_take(arena, block),
      .h = arena_take(arena, block),
      .gate = arena_take(arena, block),
      .up = arena_take(arena, block),
      .a = arena_take(arena, block),
      .da = arena_take(arena, block),
      .rounded = arena_take(arena, block),
      .b_row = arena_take(arena, k),
      .dot = arena_take(arena, (size_t)rows * size),
      .dweights = arena_take(arena, (size_t)rows * size),
  };
}

size_t moe_cpu_gemm_scratch(const moe_context *ctx, const moe_gemm_args *args) {
  struct arena arena = {0};
  const int64_t rows = tile_rows(ctx, args);
  arena_take(&arena, (size_t)tile_bound(args, rows) * sizeof(struct tile));
  const size_t tiles = arena.used;
  take_worker(&arena, args, rows);
  return tiles + (size_t)ctx->units * (arena.used - tiles) + MOE_ALIGN;
}

moe_status moe_cpu_gemm(moe_context *ctx, const moe_gemm_args *args, moe_stream stream) {
  (void)stream;
  struct arena arena = {.base = ALIGN_UP((uintptr_t)args->scratch, MOE_ALIGN)};
  struct gemm g = {.args = args, .kernel = ctx->state, .inter = args->n, .tile_rows = tile_rows(ctx, args)};
  g.gated = args->epilogue != MOE_EPILOGUE_STORE && args->act->gated;
  if (g.gated && args->epilogue == MOE_EPILOGUE_ACT) g.inter = args->n / 2;
  g.tiles = arena_take(&arena, (size_t)tile_bound(args, g.tile_rows) * sizeof *g.tiles);
  find_tiles(&g);
  if (g.tile_count == 0) return MOE_OK;
  g.splits = choose_splits(&g, ctx->units);
  const size_t tiles_bytes = arena.used;
  take_worker(&arena, args, g.tile_rows);
  const size_t worker_bytes = arena.used - tiles_bytes;
#pragma omp parallel num_threads(ctx->units)
  {
    struct arena own = {.base = arena.base,
                        .used = tiles_bytes + (size_t)omp_get_thread_num() * worker_bytes};
    const struct worker w = take_worker(&own, args, g.tile_rows);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < g.tile_count * g.splits; task++) run_task(&g, task, &w);
  }
  return MOE_OK;
}
