/* SPDX-License-Identifier: Apache-2.0
 *
 * moeblas: fused Mixture-of-Experts layers, forward and backward, behind a plain C interface.
 *
 *     moe_context *ctx;  moe_context_create(&ctx, MOE_BACKEND_AUTO, 0);
 *     moe_config config = MOE_CONFIG_INIT;             then config.hidden = ..., see moe_config
 *     moe_plan *plan;    moe_plan_create(&plan, ctx, &config);
 *     size_t bytes = moe_plan_workspace(plan, tokens); the caller allocates: moeblas never does in a run call
 *     moe_forward(plan, &forward_args, stream);
 *     moe_backward(plan, &backward_args, stream);
 *
 * The layer, with T tokens, H hidden, F expert inner width, E experts, k experts per token, R <= T*k routed rows:
 *
 *     router    z[t,:] = x[t,:] Wr^T + router_bias     ids[t,:], p[t,:] = the k chosen experts and their weights
 *     rows      one row a chosen (token, expert) pair, sorted by expert, in token order inside an expert
 *     up        h[r,:] = x[token(r),:] W1[e]^T + b1[e]               [R,2F] when gated, [R,F] when not
 *     act       a[r,:] = f(gate) v(up)  or  f(h)                     [R,F]
 *     down      y[r,:] = a[r,:] W2[e]^T + b2[e]                      [R,H]
 *     combine   out[t,:] = sum over j of p[t,j] y[row(t,j),:]        fixed order of j, summed in fp32
 *
 * Promises. Run calls (moe_forward, moe_backward) never allocate, never synchronise, never print. A plan is
 * immutable and may be used by many threads at once, each with its own workspace. Results are bitwise repeatable;
 * on the CPU they are also the same for any number of threads, and a token's output does not depend on the other
 * tokens of the batch. T = 0 is success. An expert id outside [0,E) is a skipped slot: it contributes exactly 0,
 * is never used as an index and gets gradient 0. Duplicate ids in a token are independent slots.
 *
 * Structs start with `size`, which the *_INIT macros set; 0 (NULL) in any other field is its default; fields are only ever
 * appended. All arrays are contiguous, row-major, aligned to 16 bytes, in the memory of the context's back end
 * (host memory for the CPU). Every function that returns moe_status leaves a sentence for a failure in
 * moe_last_error(). Any size in elements is an int64_t; T*k must stay below 2^31. */
#ifndef MOEBLAS_H
#define MOEBLAS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOE_VERSION_MAJOR 0
#define MOE_VERSION_MINOR 1
#define MOE_VERSION_PATCH 0
#define MOE_MAX_EXPERTS   4096 /* largest E */
#define MOE_MAX_TOPK      64   /* largest k */

#ifdef __cplusplus
#define MOE_INIT(type)       \
  ([] {                      \
    type init = {};          \
    init.size = sizeof init; \
    return init;             \
  }())
#else
#define MOE_INIT(type) \
  { .size = sizeof(type) }
#endif

/* ---- status --------------------------------------------------------------------------------------------------- */

typedef enum moe_status {
  MOE_OK = 0,
  MOE_ERROR_ARGUMENT = 10,    /* a NULL, a size or a flag that makes no sense */
  MOE_ERROR_UNSUPPORTED = 20, /* makes sense, but this back end or build does not do it */
  MOE_ERROR_WORKSPACE = 30,   /* workspace, scratch or saved buffer missing or too small */
  MOE_ERROR_MEMORY = 40,      /* host memory could not be had (create calls only) */
  MOE_ERROR_DEVICE = 50,      /* the device or its driver reported an error */
  MOE_ERROR_INTERNAL = 60     /* a bug of moeblas */
} moe_status;

/* The sentence of the last failed call on this thread: operation, argument, what was found, what was wanted. Empty
 * before the first failure. Valid until the next failing call on this thread; never NULL. */
const char *moe_last_error(void);

/* "ok", "argument", ... for a status; "unknown status" for any other value. */
const char *moe_status_name(moe_status status);

/* "0.1.0", the version of the library that is loaded (the macros above are those of the header). */
const char *moe_version(void);

/* ---- enumerations: 0 is always the default -------------------------------------------------------------------- */

typedef enum moe_backend { /* where a layer runs */
  MOE_BACKEND_AUTO = 0,    /* the fastest one present: CUDA if there is a device, else the CPU */
  MOE_BACKEND_CPU = 1,
  MOE_BACKEND_CUDA = 2
} moe_backend;

typedef enum moe_dtype {
  MOE_DTYPE_DEFAULT = 0, /* what the field's comment says */
  MOE_FP32 = 1,
  MOE_BF16 = 2, /* bfloat16: the upper half of an fp32, rounded to nearest even */
  MOE_FP16 = 3  /* IEEE binary16 */
} moe_dtype;

/* The activations are the rows of moeblas_act.def: MOE_ACT_SILU, MOE_ACT_GELU, ... */
typedef enum moe_activation {
#define MOE_ACT(ENUM, value, fn, plain, gated, alpha, beta, f, df) MOE_ACT_##ENUM = value,
#include "moeblas_act.def"
#undef MOE_ACT
  MOE_ACT_COUNT
} moe_activation;

typedef enum moe_layout { /* order of the 2F rows of W1[e], of b1[e] and of the columns of h, when gated */
  MOE_LAYOUT_CONCAT_GATE_FIRST = 0, /* F gate rows, then F up rows */
  MOE_LAYOUT_CONCAT_UP_FIRST = 1,   /* F up rows, then F gate rows */
  MOE_LAYOUT_INTERLEAVED = 2        /* g gate rows, g up rows, g gate rows, ... with g = interleave */
} moe_layout;

typedef enum moe_score {
  MOE_SCORE_SOFTMAX = 0,      /* softmax over all E, then top-k */
  MOE_SCORE_TOPK_SOFTMAX = 1, /* top-k of the logits, then softmax over the chosen k */
  MOE_SCORE_SIGMOID = 2,      /* 1/(1+e^-z) */
  MOE_SCORE_SQRT_SOFTPLUS = 3 /* sqrt(log(1+e^z)) */
} moe_score;

typedef enum moe_group_score {
  MOE_GROUP_MAX = 0,      /* best expert of the group (DeepSeek-V2) */
  MOE_GROUP_TOP2_SUM = 1, /* sum of the best two (DeepSeek-V3) */
  MOE_GROUP_TOPK_SUM = 2  /* sum of the best topk/topk_groups (Megatron) */
} moe_group_score;

typedef enum moe_balance {
  MOE_BALANCE_NONE = 0,
  MOE_BALANCE_BATCH = 1,    /* Switch Transformer, arXiv:2101.03961 eq. 4, over the tokens of the call */
  MOE_BALANCE_SEQUENCE = 2, /* the same for each run of sequence_tokens tokens, then averaged (DeepSeek-V2) */
  MOE_BALANCE_GLOBAL = 3    /* expert fractions from counts accumulated over calls, arXiv:2501.11873 */
} moe_balance;

typedef enum moe_drop {
  MOE_DROP_WEIGHT = 0,  /* an expert over capacity keeps its slots of largest weight (ties: earlier token) */
  MOE_DROP_POSITION = 1 /* ... its first slots in token order */
} moe_drop;

typedef enum moe_entry { /* where the layer is entered */
  MOE_ENTRY_HIDDEN = 0,  /* x and router weights */
  MOE_ENTRY_LOGITS = 1,  /* x and logits */
  MOE_ENTRY_IDS = 2,     /* x, expert ids and their weights */
  MOE_ENTRY_ROWS = 3     /* rows already sorted by expert, and their offsets (expert parallelism) */
} moe_entry;

typedef enum moe_recompute {
  MOE_RECOMPUTE_NONE = 0, /* saved for backward: h and the row map (x is the caller's) */
  MOE_RECOMPUTE_H = 1     /* saved: the row map only; backward repeats the up projection, same bits */
} moe_recompute;

typedef enum moe_schedule { /* how the tiles of a matrix product are handed to the multiprocessors; same results */
  MOE_SCHEDULE_STATIC = 0, /* dealt out in advance: fastest on a device that nothing else uses */
  MOE_SCHEDULE_DYNAMIC =
      1, /* in shares that go to whichever is free: beside other work; with sm_limit as STATIC */
} moe_schedule;

/* ---- descriptors ---------------------------------------------------------------------------------------------- */

/* The activation. With g' = min(g, gate_max) and u' = clamp(u, up_min, up_max), on the saved fp32 value of h:
 *     gated      a = f(g'; alpha, beta) * (v(u') + up_offset)     v(u) = u, or up_beta tanh(u / up_beta) if up_beta > 0
 *     not gated  a = f(g'; alpha, beta) with g = h
 * Gradient masks are inclusive and look at the unclamped values: 1 where g <= gate_max, up_min <= u <= up_max.
 * GPT-OSS: SILU, gated, alpha 1.702, gate_max 7, up -7..7, up_offset 1. DeepSeek-V4: SILU, gate_max 10, up -10..10.
 * Kimi K3: SITU with beta 4, up_beta 25. */
typedef struct moe_act_desc {
  moe_activation kind;
  int gated;      /* 1: h holds gate and up halves */
  float alpha;    /* 0: the default of the activation's row; refused if the activation has none */
  float beta;     /* as alpha */
  float gate_max; /* 0: no clamp; else > 0 */
  float up_min;   /* up_min = up_max = 0: no clamp; else up_min < up_max */
  float up_max;
  float up_offset;    /* added to v(u') */
  float up_beta;      /* 0: v(u) = u; else > 0 */
  moe_layout layout;  /* gated only */
  int64_t interleave; /* MOE_LAYOUT_INTERLEAVED: g, a divisor of F; 0: 1 */
} moe_act_desc;

/* The router. All of it is computed in fp32. With s = score(z): the k experts of largest key are chosen, where
 * key = z for TOPK_SOFTMAX and for SOFTMAX without groups and correction bias, else s, plus the correction bias.
 * NaN ranks as -inf, ties go to the lower id, ids are distinct. +inf logits count as the largest finite number.
 *     weight p_j = s(id_j), without the correction bias; divided by (sum over j of p_j + renorm_epsilon) if renormalize;
 *     times scale. A token whose logits are all NaN or -inf has softmax weights 0. */
typedef struct moe_router_desc {
  moe_score score;
  int renormalize;
  float renorm_epsilon; /* 0: 1e-20 */
  float scale;          /* 0: 1 */
  int64_t
      groups; /* 0 or 1: none; else a divisor of E: only experts of the best topk_groups groups are chosen */
  int64_t topk_groups; /* 1 .. groups, with topk_groups * E/groups >= k */
  moe_group_score group_score;
  moe_balance
      balance; /* load-balancing loss  coeff * E * sum_e f_e P_e: f_e = share of slots that chose e (sum 1),   */
  float
      balance_coeff; /*   P_e = mean over tokens of the score of e, normalised to sum 1 over the experts            */
  float z_coeff; /* z-loss  coeff * mean_t (log sum_e exp z[t,e])^2, arXiv:2202.08906; 0: none */
  int64_t
      sequence_tokens; /* MOE_BALANCE_SEQUENCE: tokens of one sequence, > 0; the last one may be shorter */
} moe_router_desc;

typedef struct moe_config {
  size_t size;
  int64_t hidden;  /* H >= 1 */
  int64_t inter;   /* F >= 1 */
  int64_t experts; /* 1 <= E <= MOE_MAX_EXPERTS */
  int64_t topk;    /* 1 <= k <= min(E, MOE_MAX_TOPK); given ids: 1 <= k <= MOE_MAX_TOPK; MOE_ENTRY_ROWS: 1 */
  moe_dtype dtype; /* of x, weights, biases b1 b2, h, out, dout, dx; default MOE_BF16 */
  moe_dtype logits_dtype; /* of logits and dlogits of MOE_ENTRY_LOGITS; default MOE_FP32 */
  moe_dtype router_dtype; /* of router_weight; default dtype. MOE_FP32 or dtype */
  moe_dtype
      grad_dtype; /* of every parameter gradient but those documented as fp32; default dtype. MOE_FP32 or dtype */
  moe_entry entry;
  moe_router_desc router;
  moe_act_desc act;
  int weight_on_input; /* 1: h = p (x W1^T) + b1, out = sum of y (Llama-4); 0: out = sum of p y */
  int transposed; /* 1: W1 is [E,H,2F], W2 is [E,F,H] (and the shared and latent weights likewise); 0: [out,in] */
  float capacity_factor; /* 0: none; else each expert keeps at most ceil(T*k/E * factor) slots */
  moe_drop drop;
  int64_t shared_inter; /* inner width of the shared expert that every token passes; 0: none */
  int64_t latent;       /* L: experts work on xl = x latent_down^T [T,L], out = (...) latent_up^T; 0: none.
                             The shared expert and the router see x */
  moe_recompute recompute;
  int64_t
      sm_limit; /* multiprocessors (CPU: threads) that run calls may hold, so that others can work beside them;
                       0: all of the context; at most moe_context_units */
  moe_schedule schedule;
} moe_config;
#define MOE_CONFIG_INIT MOE_INIT(moe_config)

/* ---- context and plan ----------------------------------------------------------------------------------------- */

typedef struct moe_context moe_context;
typedef struct moe_plan moe_plan;
typedef struct CUstream_st *moe_stream; /* a cudaStream_t; NULL for the CPU */

/* A back end on one device. `device`: CUDA ordinal; for the CPU the number of threads, 0: all that OpenMP offers.
 * UNSUPPORTED if the back end is not in this build or finds no device. Destroy after its plans. Not across fork: a device's context is
 * lost in the child, and OpenMP's threads do not follow, so that a call of several threads may wait for ever there. */
moe_status moe_context_create(moe_context **out, moe_backend backend, int device);
void moe_context_destroy(moe_context *ctx); /* NULL is fine */
moe_backend moe_context_backend(const moe_context *ctx);
/* Threads (CPU) or multiprocessors (CUDA); 0 for NULL. */
int moe_context_units(const moe_context *ctx);

/* MOE_OK if the back end could be used here; else why not, in moe_last_error(). */
moe_status moe_backend_available(moe_backend backend);

/* Checks the whole configuration; what cannot be done is refused here, with the reason. The config is copied. */
moe_status moe_plan_create(moe_plan **out, moe_context *ctx, const moe_config *config);
void moe_plan_destroy(moe_plan *plan); /* NULL is fine */

/* Scratch bytes that a run call of up to `tokens` tokens needs. Grows with tokens, so ask once for the largest
 * batch. May be shared by plans that run one after the other. SIZE_MAX if tokens is out of range. */
size_t moe_plan_workspace(const moe_plan *plan, int64_t tokens);
/* Bytes that moe_forward leaves for moe_backward: h and the row map. Same rules. */
size_t moe_plan_saved(const moe_plan *plan, int64_t tokens);
/* Loads whatever the back end would load lazily, so that a following capture or timing sees none of it. */
moe_status moe_warmup(const moe_plan *plan, moe_stream stream);
/* Writes the plan as text (choices, bytes for `tokens` tokens) like snprintf; returns the length it wants. */
size_t moe_plan_describe(const moe_plan *plan, int64_t tokens, char *text, size_t bytes);

/* ---- the layer ------------------------------------------------------------------------------------------------ */

/* Parameters. NULL where the plan or the model has none. Shapes for transposed = 0; D = L when latent, else H;
 * F2 = 2F when gated, else F (for the shared expert likewise with S = shared_inter). */
typedef struct moe_params {
  size_t size;
  const void *router_weight;    /* [E,H] router_dtype; MOE_ENTRY_HIDDEN */
  const float *router_bias;     /* [E] added to the logits, or NULL */
  const float *correction_bias; /* [E] added to the keys of selection only, or NULL */
  const void *w1;               /* [E,F2,D] */
  const void *b1;               /* [E,F2] or NULL */
  const void *w2;               /* [E,D,F] */
  const void *b2;               /* [E,D] or NULL */
  const void *shared_w1;        /* [S2,H]; shared_inter > 0 */
  const void *shared_w2;        /* [H,S] */
  const void
      *shared_gate; /* [H] dtype: the shared expert is weighted by sigmoid(x . shared_gate); NULL: by 1 */
  const void *latent_down; /* [L,H]; latent > 0 */
  const void *latent_up;   /* [H,L] */
} moe_params;
#define MOE_PARAMS_INIT MOE_INIT(moe_params)

/* Gradients of the parameters, same shapes, grad_dtype; NULL: not wanted. The correction bias has none. Until the backward pass has ended,
 * what is in an array that is not accumulated is anything: a GPU keeps rows in that of w1. */
typedef struct moe_param_grads {
  size_t size;
  void *router_weight;
  float *router_bias; /* fp32 */
  void *w1;
  void *b1;
  void *w2;
  void *b2;
  void *shared_w1;
  void *shared_w2;
  void *shared_gate;
  void *latent_down;
  void *latent_up;
} moe_param_grads;
#define MOE_PARAM_GRADS_INIT MOE_INIT(moe_param_grads)

typedef struct moe_forward_args {
  size_t size;
  int64_t tokens; /* T; for MOE_ENTRY_ROWS the rows of x and out */
  const void *x;  /* [T,H] */
  const moe_params *params;
  const void *logits; /* [T,E] logits_dtype; MOE_ENTRY_LOGITS */
  const int32_t
      *given_ids; /* [T,k]; required by MOE_ENTRY_IDS; else NULL, or ids to use instead of the router's
                                   choice (hash routing, replay): their weights still come from the scores */
  const float *given_weights; /* [T,k]; MOE_ENTRY_IDS: required. MOE_ENTRY_ROWS: [T] or NULL for 1 */
  const int32_t
      *row_offset; /* [E+1]; MOE_ENTRY_ROWS: rows of expert e are row_offset[e] .. row_offset[e+1]-1; rows
                                   from row_offset[E] on get out = 0 */
  const uint8_t
      *padding_mask;      /* [T] or NULL: a token whose byte is not 0 takes no part: no slots, out = 0, no
                                   gradient, not in any loss or count */
  int64_t *global_counts; /* [E+1] read and written, MOE_BALANCE_GLOBAL: slots of each expert, then tokens */
  void *out;              /* [T,H] */
  int32_t *topk_ids;      /* [T,k] or NULL: chosen experts, -1 where masked */
  float *topk_weights;    /* [T,k] or NULL */
  int32_t *counts;        /* [E] or NULL: slots that chose e, before capacity drops */
  int32_t *slot_row;      /* [T,k] or NULL: row of each slot in h, -1: skipped or dropped */
  float *losses;          /* [2] or NULL: balancing loss and z-loss, coefficients included */
  void *saved;            /* moe_plan_saved bytes; NULL: inference, nothing is kept */
  size_t saved_bytes;
  void *workspace; /* moe_plan_workspace bytes */
  size_t workspace_bytes;
  const int32_t
      *token_count; /* one number in the back end's memory, or NULL: tokens from it on are masked, so that one
                                 graph serves every batch of up to `tokens`. Not for MOE_ENTRY_ROWS */
} moe_forward_args;
#define MOE_FORWARD_ARGS_INIT MOE_INIT(moe_forward_args)

/* The inputs must be those of the forward call, `saved` what it wrote. Gradients not wanted are NULL. */
typedef struct moe_backward_args {
  size_t size;
  int64_t tokens;
  const void *x;
  const moe_params *params;
  const void *logits;
  const float *given_weights;
  const int32_t *row_offset;
  const uint8_t *padding_mask;
  const void *dout; /* [T,H] gradient of the loss with respect to out */
  float loss_scale; /* multiplies the gradients of the two router losses; 0: 1 */
  int skip_losses;  /* 1: the router losses are not part of the loss */
  const void *saved;
  size_t saved_bytes;
  void *workspace;
  size_t workspace_bytes;
  void *dx;                     /* [T,H] dtype, written */
  void *dlogits;                /* [T,E] logits_dtype, written; MOE_ENTRY_LOGITS */
  float *dtopk_weights;         /* [T,k] written; MOE_ENTRY_IDS. MOE_ENTRY_ROWS: [T] */
  const moe_param_grads *grads; /* NULL: none wanted */
  int accumulate;             /* 1: parameter gradients are added to what is there; 0: they are overwritten */
  const int32_t *token_count; /* that of the forward call */
  const float
      *dlosses; /* [2] or NULL for 1: gradients of the balancing loss and the z-loss, on top of loss_scale */
} moe_backward_args;
#define MOE_BACKWARD_ARGS_INIT MOE_INIT(moe_backward_args)

/* ARGUMENT for a missing pointer, WORKSPACE for a buffer that is missing or too small; nothing is written then. */
moe_status moe_forward(const moe_plan *plan, const moe_forward_args *io, moe_stream stream);
moe_status moe_backward(const moe_plan *plan, const moe_backward_args *io, moe_stream stream);

/* ---- names, for tools and bindings ---------------------------------------------------------------------------- */

/* Name of an activation ("silu", or "swiglu" when gated); NULL outside 0 .. MOE_ACT_COUNT-1. */
const char *moe_activation_name(moe_activation kind, int gated);
/* Finds one by either name; sets *gated accordingly. ARGUMENT if there is none. */
moe_status moe_activation_find(const char *name, moe_activation *kind, int *gated);
/* "fp32", "bf16", "fp16"; NULL for anything else. */
const char *moe_dtype_name(moe_dtype dtype);
/* Bytes of one element; 0 for MOE_DTYPE_DEFAULT and anything unknown. */
size_t moe_dtype_bytes(moe_dtype dtype);

#ifdef __cplusplus
}
#endif
#endif
