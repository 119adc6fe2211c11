/* SPDX-License-Identifier: Apache-2.0
 *
 * moeblas_ops: the blocks that moe_forward and moe_backward are made of, one by one. May change until 1.0.
 *
 * Every op has one argument struct and two functions:
 *     size_t     moe_X_scratch(const moe_context *ctx, const moe_X_args *args);   bytes, from sizes and flags only;
 *                                                                                 SIZE_MAX if the arguments are bad
 *     moe_status moe_X(moe_context *ctx, const moe_X_args *args, moe_stream stream);
 * Run calls never allocate and never synchronise. Common to all of them, on top of moeblas.h:
 *   - arrays are contiguous and row-major; outputs may not overlap inputs unless a comment allows it;
 *   - `scratch` is caller memory of at least moe_X_scratch bytes, NULL when that is 0;
 *   - "slot" s = t*k + j is the j-th choice of token t; row_slot[r] is the slot of row r, slot_row[s] the row of slot s
 *     or -1; rows of expert e are row_offset[e] .. row_offset[e+1]-1. Rows from row_offset[E] on are not touched.
 *     These maps are made by moe_sort. Offsets are clamped into 0 .. rows, so that bad ones cannot reach outside. */
#ifndef MOEBLAS_OPS_H
#define MOEBLAS_OPS_H

#include "moeblas.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The first fields of every op's struct. sm_limit as in moe_config; schedule matters to gemm and wgrad, the others have
 * no tiles to hand out. */
#define MOE_OP_HEAD     \
  size_t size;          \
  void *scratch;        \
  size_t scratch_bytes; \
  int64_t sm_limit;     \
  moe_schedule schedule;

/* ---- routing -------------------------------------------------------------------------------------------------- */

/* Chooses experts and weighs them (moe_router_desc has the formulas); counts the slots of each expert.
 * A masked token gets ids -1 and weights 0. With given_ids those are copied to `ids` instead, and slots whose id is
 * outside [0,E) weigh 0; duplicates are independent slots. */
typedef struct moe_route_args {
  MOE_OP_HEAD
  int64_t tokens;
  int64_t experts;
  int64_t topk;
  const moe_router_desc *router;
  const void *logits; /* [T,E] */
  moe_dtype logits_dtype;
  const float *router_bias;     /* [E] or NULL: added to the logits here */
  const float *correction_bias; /* [E] or NULL */
  const int32_t *given_ids;     /* [T,k] or NULL */
  const uint8_t *padding_mask;  /* [T] or NULL */
  int32_t *ids;                 /* [T,k] written */
  float *weights;               /* [T,k] written */
  int32_t *counts;              /* [E] written, or NULL */
} moe_route_args;
size_t moe_route_scratch(const moe_context *ctx, const moe_route_args *args);
moe_status moe_route(moe_context *ctx, const moe_route_args *args, moe_stream stream);

/* The two router losses and what their gradients need. */
typedef struct moe_router_loss_args {
  MOE_OP_HEAD
  int64_t tokens;
  int64_t experts;
  int64_t topk;
  const moe_router_desc *router;
  const void *logits; /* [T,E] */
  moe_dtype logits_dtype;
  const float *router_bias;    /* [E] or NULL */
  const int32_t *ids;          /* [T,k] as chosen, before capacity drops */
  const uint8_t *padding_mask; /* [T] or NULL */
  int64_t *global_counts;      /* [E+1] read and written; MOE_BALANCE_GLOBAL */
  float *losses;               /* [2] or NULL: balancing loss, z-loss */
  /* [S,E+1] written, or NULL. S = ceil(T/sequence_tokens) for MOE_BALANCE_SEQUENCE (at least 1), else 1.
   * slopes[s][e] = d loss / d P[t,e] for a token t of sequence s, P the normalised score;
   * slopes[s][E] = 2 * z_coeff / valid tokens. 0 where there is no valid token. */
  float *slopes;
} moe_router_loss_args;
size_t moe_router_loss_scratch(const moe_context *ctx, const moe_router_loss_args *args);
moe_status moe_router_loss(moe_context *ctx, const moe_router_loss_args *args, moe_stream stream);

/* dlogits from the gradient of the weights, and of the losses through `slopes`. Slots with slot_row -1 (if given),
 * or an id outside [0,E), count as dweights 0. Masked tokens get dlogits 0. */
typedef struct moe_route_backward_args {
  MOE_OP_HEAD
  int64_t tokens;
  int64_t experts;
  int64_t topk;
  const moe_router_desc *router;
  const void *logits; /* [T,E] */
  moe_dtype logits_dtype;
  const float *router_bias;    /* [E] or NULL */
  const int32_t *ids;          /* [T,k] as written by moe_route */
  const int32_t *slot_row;     /* [T,k] or NULL */
  const uint8_t *padding_mask; /* [T] or NULL */
  const float *dweights;       /* [T,k], or NULL for 0 */
  const float *slopes;         /* as written by moe_router_loss, or NULL for no losses */
  float loss_scale;            /* 0: 1 */
  void *dlogits;               /* [T,E] written */
  moe_dtype dlogits_dtype;
  const float *dlosses; /* [2] or NULL for 1: gradients of the two losses, on top of loss_scale */
} moe_route_backward_args;
size_t moe_route_backward_scratch(const moe_context *ctx, const moe_route_backward_args *args);
moe_status moe_route_backward(moe_context *ctx, const moe_route_backward_args *args, moe_stream stream);

/* mask[t] = 1 where t >= *token_count or padding_mask[t] is not 0, else 0. */
typedef struct moe_token_mask_args {
  MOE_OP_HEAD
  int64_t tokens;
  const int32_t *token_count;  /* one number of any value; NULL: tokens */
  const uint8_t *padding_mask; /* [T] or NULL. May be `mask` */
  uint8_t *mask;               /* [T] written */
} moe_token_mask_args;
size_t moe_token_mask_scratch(const moe_context *ctx, const moe_token_mask_args *args);
moe_status moe_token_mask(moe_context *ctx, const moe_token_mask_args *args, moe_stream stream);

/* Rows from ids: a stable counting sort by expert, after dropping what is over capacity. */
typedef struct moe_sort_args {
  MOE_OP_HEAD
  int64_t tokens;
  int64_t experts;
  int64_t topk;
  const int32_t *ids;          /* [T,k]; outside [0,E): skipped. NULL: all 0 (E = 1, every token) */
  const uint8_t *padding_mask; /* [T] or NULL: slots of masked tokens are skipped whatever their ids */
  const float *weights;        /* [T,k]; MOE_DROP_WEIGHT with capacity > 0 (NaN ranks last) */
  int64_t capacity;            /* slots that an expert keeps; 0: all */
  moe_drop drop;
  int32_t *row_offset; /* [E+1] written */
  int32_t *row_slot;   /* [T*k] written up to row_offset[E]; the rest is -1 */
  int32_t *slot_row;   /* [T*k] written */
  int32_t *counts;     /* [E] written, or NULL: slots of each expert before drops */
} moe_sort_args;
size_t moe_sort_scratch(const moe_context *ctx, const moe_sort_args *args);
moe_status moe_sort(moe_context *ctx, const moe_sort_args *args, moe_stream stream);

/* Aux-loss-free balancing (arXiv:2408.15664): bias[e] += rate * sign(mean(counts) - counts[e]), in fp32. */
typedef struct moe_bias_update_args {
  MOE_OP_HEAD
  int64_t experts;
  const int32_t *counts; /* [E] */
  float rate;
  float *bias; /* [E] read and written */
} moe_bias_update_args;
size_t moe_bias_update_scratch(const moe_context *ctx, const moe_bias_update_args *args);
moe_status moe_bias_update(moe_context *ctx, const moe_bias_update_args *args, moe_stream stream);

/* How evenly the experts are loaded. All fields 0 when no slot is counted. */
typedef struct moe_load_summary {
  float total;         /* slots */
  float max;           /* slots of the busiest expert */
  float mean;          /* total / E */
  float cv;            /* standard deviation over mean */
  float max_over_mean; /* 1: perfectly even */
  float entropy;       /* of the shares, in nats; log E: perfectly even */
} moe_load_summary;
typedef struct moe_load_stats_args {
  MOE_OP_HEAD
  int64_t experts;
  const int32_t *counts;  /* [E] */
  moe_load_summary *load; /* written */
} moe_load_stats_args;
size_t moe_load_stats_scratch(const moe_context *ctx, const moe_load_stats_args *args);
moe_status moe_load_stats(moe_context *ctx, const moe_load_stats_args *args, moe_stream stream);

/* ---- matrix products ------------------------------------------------------------------------------------------ */

typedef enum moe_epilogue {
  MOE_EPILOGUE_STORE = 0, /* d[r,n] = weight(r) acc + bias[e,n]          (+ what is in d, if accumulate) */
  MOE_EPILOGUE_ACT = 1,   /* h[r,n] = weight(r) acc + bias[e,n], rounded to d_dtype; d = act(h) */
  MOE_EPILOGUE_DACT = 2 /* da = acc, rounded to d_dtype; reads h; dh = act'(h) weight da; d = weight * act(h);
                             dweights[slot] = <da, act(h)> + <A row, dot_bias[e]> */
} moe_epilogue;

/* Rows grouped by expert:  acc[r,n] = sum over k of A[src(r),k] B[e(r)][n,k], accumulated in fp32 over ascending k; a
 * bf16 operand times an fp32 one may be summed part by part (docs/numerics.md).
 * Experts with no rows are skipped. One expert and row_offset NULL: an ordinary matrix product. */
typedef struct moe_gemm_args {
  MOE_OP_HEAD
  int64_t rows; /* upper bound of the rows, known to the host; the real one is row_offset[E] */
  int64_t n;
  int64_t k;
  int64_t experts;
  const int32_t *row_offset; /* [E+1]; NULL: one expert with all rows */
  const int32_t *row_slot;   /* [rows]; NULL: slot(r) = r */
  int64_t gather_topk;       /* > 0: src(r) = slot(r) / gather_topk (A has one row a token); 0: src(r) = r */
  const void *a;             /* [*,k] */
  moe_dtype a_dtype;
  const void *b; /* [E,n,k], or [E,k,n] if b_kn */
  moe_dtype b_dtype;
  int b_kn;
  moe_epilogue epilogue;
  const float *weights; /* by slot, or NULL for 1 */
  const void *bias;     /* [E,n] or NULL; STORE, ACT */
  moe_dtype bias_dtype;
  void *d;                 /* STORE: [rows,n]; ACT: [rows,F]; DACT: [rows,F] (NULL: not wanted) */
  moe_dtype d_dtype;       /* also of h and dh */
  int accumulate;          /* STORE with fp32 d */
  const moe_act_desc *act; /* ACT: n = 2F if gated, else F. DACT: n = F */
  void *h;                 /* ACT: [rows,n] written, or NULL; DACT: [rows,F or 2F] read */
  void *dh;                /* DACT: shape of h, written. May be h itself */
  float *dweights;         /* DACT: by slot, written for the slots that have a row; NULL: not wanted */
  const void *dot_bias;    /* DACT: [E,k] in bias_dtype, or NULL */
} moe_gemm_args;
size_t moe_gemm_scratch(const moe_context *ctx, const moe_gemm_args *args);
moe_status moe_gemm(moe_context *ctx, const moe_gemm_args *args, moe_stream stream);

/* Contraction grouped by expert:  d[e][m,n] = sum over rows r of e of weight(r) A[srca(r),m] B[srcb(r),n],
 * fp32 over ascending r (or part by part, as above). Experts with no rows give 0, or leave d as it is when accumulating. */
typedef struct moe_wgrad_args {
  MOE_OP_HEAD
  int64_t rows;
  int64_t m;
  int64_t n;
  int64_t experts;
  const int32_t *row_offset; /* [E+1]; NULL: one expert with all rows */
  const int32_t *row_slot;   /* [rows]; NULL: slot(r) = r */
  const void *a;             /* [*,m] */
  moe_dtype a_dtype;
  int64_t a_gather_topk; /* > 0: row slot(r) / a_gather_topk of a; 0: row r */
  const void *b;         /* [*,n] */
  moe_dtype b_dtype;
  int64_t b_gather_topk;
  const float *weights; /* by slot, or NULL for 1 */
  void *d;              /* [E,m,n] */
  moe_dtype d_dtype;
  int accumulate;
} moe_wgrad_args;
size_t moe_wgrad_scratch(const moe_context *ctx, const moe_wgrad_args *args);
moe_status moe_wgrad(moe_context *ctx, const moe_wgrad_args *args, moe_stream stream);

/* Bias gradients:  d[e][n] = sum over rows r of e of weight(r) v[src(r),n], fp32 over ascending r. */
typedef struct moe_bias_grad_args {
  MOE_OP_HEAD
  int64_t rows;
  int64_t n;
  int64_t experts;
  const int32_t *row_offset; /* [E+1]; NULL: one expert with all rows */
  const int32_t *row_slot;   /* [rows]; NULL: slot(r) = r */
  int64_t gather_topk;       /* as moe_gemm_args */
  const void *v;             /* [*,n] */
  moe_dtype v_dtype;
  const float *weights; /* by slot, or NULL for 1 */
  void *d;              /* [E,n] */
  moe_dtype d_dtype;
  int accumulate;
} moe_bias_grad_args;
size_t moe_bias_grad_scratch(const moe_context *ctx, const moe_bias_grad_args *args);
moe_status moe_bias_grad(moe_context *ctx, const moe_bias_grad_args *args, moe_stream stream);

/* ---- rows and tokens ------------------------------------------------------------------------------------------ */

/* rows[r,:] = weight(r) x[slot(r)/topk,:], rounded to dtype. */
typedef struct moe_permute_args {
  MOE_OP_HEAD
  int64_t rows;
  int64_t hidden;
  int64_t topk;
  int64_t experts;           /* of row_offset */
  const int32_t *row_offset; /* [E+1] */
  const int32_t *row_slot;   /* [rows] */
  const float *weights;      /* [T,k] or NULL for 1 */
  const void *x;             /* [T,H] */
  void *y;                   /* [rows,H] written up to row_offset[E] */
  moe_dtype dtype;           /* of both */
} moe_permute_args;
size_t moe_permute_scratch(const moe_context *ctx, const moe_permute_args *args);
moe_status moe_permute(moe_context *ctx, const moe_permute_args *args, moe_stream stream);

/* out[t,:] = addend[t,:] + sum over ascending j of weights[t,j] y[slot_row[t,j],:], summed in fp32, rounded once. Slots
 * with slot_row outside 0 .. rows-1 are skipped. topk = 0: out is addend converted. */
typedef struct moe_combine_args {
  MOE_OP_HEAD
  int64_t tokens;
  int64_t hidden;
  int64_t topk;
  int64_t rows;            /* of y */
  const int32_t *slot_row; /* [T,k]; NULL: slot s has row s */
  const int32_t *row_end;  /* one number or NULL: rows from *row_end on are skipped (row_offset + E) */
  const float *weights;    /* [T,k] or NULL for 1 */
  const float *addend;     /* [T,H] fp32, or NULL for 0. May be `out` when that is fp32 */
  const void *y;           /* [rows,H] */
  moe_dtype y_dtype;
  void *out; /* [T,H] written */
  moe_dtype out_dtype;
} moe_combine_args;
size_t moe_combine_scratch(const moe_context *ctx, const moe_combine_args *args);
moe_status moe_combine(moe_context *ctx, const moe_combine_args *args, moe_stream stream);

/* The gradient of moe_combine:  dy[r,:] = weight(slot(r)) dout[token,:]; dweights[t,j] = <dout[t,:], y[slot_row,:]>. */
typedef struct moe_combine_backward_args {
  MOE_OP_HEAD
  int64_t tokens;
  int64_t hidden;
  int64_t topk;
  int64_t rows;
  const int32_t *slot_row; /* [T,k]; NULL: slot s has row s */
  const int32_t *row_end;  /* as moe_combine_args */
  const float *weights;    /* [T,k] or NULL for 1 */
  const void *y;           /* [rows,H]; needed for dweights */
  moe_dtype y_dtype;       /* of y and dy */
  const void *dout;        /* [T,H] */
  moe_dtype dout_dtype;
  void *dy;        /* [rows,H] written for rows that have a slot; NULL: not wanted */
  float *dweights; /* [T,k] written, 0 for skipped slots; NULL: not wanted */
} moe_combine_backward_args;
size_t moe_combine_backward_scratch(const moe_context *ctx, const moe_combine_backward_args *args);
moe_status moe_combine_backward(moe_context *ctx, const moe_combine_backward_args *args, moe_stream stream);

/* ---- activation and conversion, unfused ----------------------------------------------------------------------- */

/* a[r,:] = act(h[r,:]). */
typedef struct moe_act_args {
  MOE_OP_HEAD
  int64_t rows;
  int64_t inter; /* F */
  const moe_act_desc *act;
  const void *h; /* [rows,F], or [rows,2F] when gated */
  void *a;       /* [rows,F] written */
  moe_dtype dtype;
} moe_act_args;
size_t moe_act_scratch(const moe_context *ctx, const moe_act_args *args);
moe_status moe_act(moe_context *ctx, const moe_act_args *args, moe_stream stream);

/* dh from da. */
typedef struct moe_act_backward_args {
  MOE_OP_HEAD
  int64_t rows;
  int64_t inter;
  const moe_act_desc *act;
  const void *h;
  const void *da; /* [rows,F] */
  void *dh;       /* shape of h, written. May be h itself */
  moe_dtype dtype;
} moe_act_backward_args;
size_t moe_act_backward_scratch(const moe_context *ctx, const moe_act_backward_args *args);
moe_status moe_act_backward(moe_context *ctx, const moe_act_backward_args *args, moe_stream stream);

/* y[i] = x[i] in another format, rounded to nearest even; values beyond the range become infinities, NaN stays NaN. */
typedef struct moe_convert_args {
  MOE_OP_HEAD
  int64_t count;
  const void *x;
  moe_dtype x_dtype;
  void *y;
  moe_dtype y_dtype;
} moe_convert_args;
size_t moe_convert_scratch(const moe_context *ctx, const moe_convert_args *args);
moe_status moe_convert(moe_context *ctx, const moe_convert_args *args, moe_stream stream);

/* Copies bytes within the memory of the back end; the two may not overlap. */
typedef struct moe_copy_args {
  MOE_OP_HEAD
  void *dst;
  const void *src;
  size_t bytes;
} moe_copy_args;
size_t moe_copy_scratch(const moe_context *ctx, const moe_copy_args *args);
moe_status moe_copy(moe_context *ctx, const moe_copy_args *args, moe_stream stream);

/* Fills with zero bytes. */
typedef struct moe_zero_args {
  MOE_OP_HEAD
  void *data;
  size_t bytes;
} moe_zero_args;
size_t moe_zero_scratch(const moe_context *ctx, const moe_zero_args *args);
moe_status moe_zero(moe_context *ctx, const moe_zero_args *args, moe_stream stream);

/* ---- memory, streams and time --------------------------------------------------------------------------------- */

/* For tools and programs that use no CUDA header. Of these only moe_timer_record may be part of a graph. */

/* Memory of the back end, aligned to 256 bytes, its contents unspecified. 0 bytes give a pointer of their own. MEMORY if
 * there is not enough. Free it with the same context; NULL is fine. */
moe_status moe_memory_alloc(moe_context *ctx, size_t bytes, void **out);
void moe_memory_free(moe_context *ctx, void *memory);
/* Copies between any two of host memory and memory of the back end; the two may not overlap. On CUDA ordered after
 * the work of the default stream; done when it returns. */
moe_status moe_memory_copy(moe_context *ctx, void *dst, const void *src, size_t bytes);
/* Sets every byte to the low 8 bits of `byte`; ordered and finished as a copy. */
moe_status moe_memory_fill(moe_context *ctx, void *dst, int byte, size_t bytes);
/* Waits for all work of the stream, and reports an error that it met. */
moe_status moe_synchronize(moe_context *ctx, moe_stream stream);

/* A stream of its own, not ordered with the default one. NULL on the CPU, where every call is finished when it returns.
 * Destroy it before the context; work in it is finished first. */
moe_status moe_stream_create(moe_context *ctx, moe_stream *out);
void moe_stream_destroy(moe_context *ctx, moe_stream stream);

/* Calls recorded once and launched often. From begin to end what is called on the stream, by this thread, is noted down
 * and not run; call moe_warmup before, and let pointers stay valid as long as the graph is launched. End also after a
 * failed call in between: it ends the recording and, the graph being broken, fails too. UNSUPPORTED on the CPU. */
typedef struct moe_graph moe_graph;
moe_status moe_graph_begin(moe_context *ctx, moe_stream stream); /* not the default stream */
moe_status moe_graph_end(moe_context *ctx, moe_stream stream, moe_graph **out);
moe_status moe_graph_launch(moe_graph *graph, moe_stream stream);
/* How many kernels, copies and fills one launch runs; 0 for NULL. */
int64_t moe_graph_launches(const moe_graph *graph);
void moe_graph_destroy(moe_graph *graph); /* before the context; NULL is fine */

/* A point in the work of a stream. Create, record, and ask for the time between two points, which waits for the later
 * one. Destroy before the context; NULL is fine. */
typedef struct moe_timer moe_timer;
moe_status moe_timer_create(moe_context *ctx, moe_timer **out);
moe_status moe_timer_record(moe_timer *timer, moe_stream stream);
moe_status moe_timer_elapsed_us(moe_timer *from, moe_timer *to, double *out);
void moe_timer_destroy(moe_timer *timer);

#ifdef __cplusplus
}
#endif
#endif
