/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors of a problem and the call of the library on them. See case.h; the random data are in case_data.c. */
#include "case.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
  BAND = 4096,
  BAND_BYTE = 0xa5
};

static const char *const tensor_names[T_COUNT] = {"x",
                                                  "logits",
                                                  "given_ids",
                                                  "given_weights",
                                                  "row_offset",
                                                  "padding_mask",
                                                  "global_counts",
                                                  "dout",
                                                  "router_weight",
                                                  "router_bias",
                                                  "correction_bias",
                                                  "w1",
                                                  "b1",
                                                  "w2",
                                                  "b2",
                                                  "shared_w1",
                                                  "shared_w2",
                                                  "shared_gate",
                                                  "latent_down",
                                                  "latent_up",
                                                  "out",
                                                  "topk_ids",
                                                  "topk_weights",
                                                  "counts",
                                                  "slot_row",
                                                  "losses",
                                                  "dx",
                                                  "dlogits",
                                                  "dtopk_weights",
                                                  "drouter_weight",
                                                  "drouter_bias",
                                                  "dw1",
                                                  "db1",
                                                  "dw2",
                                                  "db2",
                                                  "dshared_w1",
                                                  "dshared_w2",
                                                  "dshared_gate",
                                                  "dlatent_down",
                                                  "dlatent_up",
                                                  "saved",
                                                  "workspace"};

const char *tensor_name(enum tensor id) { return id < T_COUNT ? tensor_names[id] : "nothing"; }

/* ---- elements -------------------------------------------------------------------------------------------------- */

size_t element_bytes(int element) {
  static const size_t bytes[] = {0, 4, 2, 2, 4, 8, 1};
  return bytes[element];
}

static float of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* The exponents of fp16 and fp32 differ by 112; multiplying by 2^112 moves one to the other, subnormals included. */
static float decode_fp16(uint16_t code) {
  const uint32_t magnitude = (uint32_t)(code & 0x7fff) << 13;
  const bool special = (code & 0x7c00) == 0x7c00;
  const float value = special ? of_bits(magnitude | 0x7f800000) : of_bits(magnitude) * 0x1p112f;
  return code & 0x8000 ? -value : value;
}

static uint16_t encode_fp16(float value) {
  const float magnitude = value < 0 ? -value : value;
  const uint32_t bits = bits_of((magnitude > 65504.0f ? 65504.0f : magnitude) * 0x1p-112f);
  return (uint16_t)((value < 0 ? 0x8000 : 0) | ((bits + 0xfff + ((bits >> 13) & 1)) >> 13));
}

static uint16_t encode_bf16(float value) {
  const uint32_t bits = bits_of(value);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

double element_load(const void *array, int element, int64_t i) {
  switch (element) {
  case ELEMENT_FP32: return (double)((const float *)array)[i];
  case ELEMENT_BF16: return (double)of_bits((uint32_t)((const uint16_t *)array)[i] << 16);
  case ELEMENT_FP16: return (double)decode_fp16(((const uint16_t *)array)[i]);
  case ELEMENT_INT32: return ((const int32_t *)array)[i];
  case ELEMENT_INT64: return (double)((const int64_t *)array)[i];
  default: return ((const uint8_t *)array)[i];
  }
}

void element_store(void *array, int element, int64_t i, double value) {
  switch (element) {
  case ELEMENT_FP32: ((float *)array)[i] = (float)value; break;
  case ELEMENT_BF16: ((uint16_t *)array)[i] = encode_bf16((float)value); break;
  case ELEMENT_FP16: ((uint16_t *)array)[i] = encode_fp16((float)value); break;
  case ELEMENT_INT32: ((int32_t *)array)[i] = (int32_t)value; break;
  case ELEMENT_INT64: ((int64_t *)array)[i] = (int64_t)value; break;
  default: ((uint8_t *)array)[i] = (uint8_t)value;
  }
}

/* ---- shapes ---------------------------------------------------------------------------------------------------- */

int64_t shape_count(const struct shape *shape) { return shape->rows * shape->columns; }
size_t shape_bytes(const struct shape *shape) {
  return (size_t)shape_count(shape) * element_bytes(shape->element);
}

/* A weight of `batch` matrices [out,in]; its rows are those of memory, whichever way it is stored. */
static struct shape weight(bool present, int element, const moe_config *c, int64_t batch, int64_t out,
                           int64_t in) {
  return (struct shape){present, element, batch * (c->transposed ? in : out), c->transposed ? out : in};
}

static struct shape input_shape(const struct problem *p, enum tensor id) {
  const moe_config *c = &p->config;
  const int dtype = (int)c->dtype, router = (int)(c->router_dtype ? c->router_dtype : c->dtype);
  const int64_t t = p->tokens, e = c->experts, k = c->topk, h = c->hidden, d = problem_width(p),
                s = c->shared_inter;
  const int64_t f2 = problem_halves(p) * c->inter;
  const bool rows = c->entry == MOE_ENTRY_ROWS, ids = c->entry == MOE_ENTRY_IDS;
  switch ((int)id) {
  case T_X: return (struct shape){true, dtype, t, h};
  case T_LOGITS: return (struct shape){c->entry == MOE_ENTRY_LOGITS, (int)c->logits_dtype, t, e};
  case T_GIVEN_IDS: return (struct shape){ids || p->replay, ELEMENT_INT32, t, k};
  case T_GIVEN_WEIGHTS: return (struct shape){ids || rows, ELEMENT_FP32, t, k};
  case T_ROW_OFFSET: return (struct shape){rows, ELEMENT_INT32, 1, e + 1};
  case T_MASK: return (struct shape){p->mask, ELEMENT_BYTE, t, 1};
  case T_GLOBAL_COUNTS:
    return (struct shape){c->router.balance == MOE_BALANCE_GLOBAL, ELEMENT_INT64, 1, e + 1};
  case T_DOUT: return (struct shape){p->backward, dtype, t, h};
  case T_ROUTER_WEIGHT: return (struct shape){c->entry == MOE_ENTRY_HIDDEN, router, e, h};
  case T_ROUTER_BIAS: return (struct shape){p->router_bias, ELEMENT_FP32, 1, e};
  case T_CORRECTION_BIAS: return (struct shape){p->correction_bias, ELEMENT_FP32, 1, e};
  case T_W1: return weight(true, dtype, c, e, f2, d);
  case T_B1: return (struct shape){p->bias, dtype, e, f2};
  case T_W2: return weight(true, dtype, c, e, d, c->inter);
  case T_B2: return (struct shape){p->bias, dtype, e, d};
  case T_SHARED_W1: return weight(s > 0, dtype, c, 1, problem_halves(p) * s, h);
  case T_SHARED_W2: return weight(s > 0, dtype, c, 1, h, s);
  case T_SHARED_GATE: return (struct shape){p->shared_gate, dtype, 1, h};
  case T_LATENT_DOWN: return weight(c->latent > 0, dtype, c, 1, c->latent, h);
  default: return weight(c->latent > 0, dtype, c, 1, h, c->latent);
  }
}

struct shape tensor_shape(const struct problem *p, enum tensor id) {
  const moe_config *c = &p->config;
  const int64_t t = p->tokens;
  const bool rows = c->entry == MOE_ENTRY_ROWS;
  if (id < T_INPUTS) return input_shape(p, id);
  if (id >= T_DROUTER_WEIGHT && id < T_RESULTS) {  /* the shape of its parameter, in another type */
    const int skip = id <= T_DROUTER_BIAS ? 0 : 1; /* the correction bias has no gradient */
    struct shape shape = input_shape(p, (enum tensor)(T_ROUTER_WEIGHT + (id - T_DROUTER_WEIGHT) + skip));
    shape.element = id == T_DROUTER_BIAS ? ELEMENT_FP32 : (int)(c->grad_dtype ? c->grad_dtype : c->dtype);
    shape.present = shape.present && p->backward;
    return shape;
  }
  switch ((int)id) {
  case T_OUT: return (struct shape){true, (int)c->dtype, t, c->hidden};
  case T_TOPK_IDS: return (struct shape){problem_routed(p), ELEMENT_INT32, t, c->topk};
  case T_TOPK_WEIGHTS: return (struct shape){problem_routed(p), ELEMENT_FP32, t, c->topk};
  case T_COUNTS: return (struct shape){!rows, ELEMENT_INT32, 1, c->experts};
  case T_SLOT_ROW: return (struct shape){!rows, ELEMENT_INT32, t, c->topk};
  case T_LOSSES: return (struct shape){problem_routed(p), ELEMENT_FP32, 2, 1};
  case T_DX: return (struct shape){p->backward, (int)c->dtype, t, c->hidden};
  case T_DLOGITS:
    return (struct shape){p->backward && c->entry == MOE_ENTRY_LOGITS, (int)c->logits_dtype, t, c->experts};
  default: return (struct shape){p->backward && !problem_routed(p), ELEMENT_FP32, t, c->topk};
  }
}

/* ---- memory ---------------------------------------------------------------------------------------------------- */

struct memory memory_of(moe_context *ctx) {
  return (struct memory){ctx, moe_context_backend(ctx) != MOE_BACKEND_CPU};
}

/* Untouched pages cost nothing, so that a large image that nobody reads may exceed the host's memory. */
static bool map_pages(struct span *span, size_t bytes, int protection) {
  span->map_bytes = bytes;
  span->map = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (span->map == MAP_FAILED) span->map = NULL;
  return span->map != NULL;
}

/* The data sit flush against the unreadable page in front (START) or, up to 16-byte alignment, behind (END); the other
 * side and what alignment leaves is the band. Apart no page is unreadable, so that `lip` is a band in its stead. */
static bool span_guarded(struct span *span, size_t bytes, enum placement placement, size_t lip) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  const size_t room = (bytes + 15) / 16 * 16;
  span->inner_bytes = (room + BAND + lip + page - 1) / page * page;
  if (!map_pages(span, span->inner_bytes + 2 * page, PROT_NONE)) return false;
  span->inner = (unsigned char *)span->map + page;
  if (mprotect(span->inner, span->inner_bytes, PROT_READ | PROT_WRITE)) return false;
  memset(span->inner, BAND_BYTE, span->inner_bytes);
  span->data = span->inner + (placement == PLACE_END ? span->inner_bytes - room - lip : lip);
  span->bytes = bytes;
  return true;
}

static bool span_plain(struct span *span, size_t bytes) {
  const size_t huge = (size_t)2 << 20; /* large pages, so that a timing is not one of the page table */
  if (!map_pages(span, (bytes + huge) / huge * huge, PROT_READ | PROT_WRITE)) return false;
  madvise(span->map, span->map_bytes, MADV_HUGEPAGE);
  span->data = span->inner = span->map;
  span->bytes = span->inner_bytes = bytes;
  return true;
}

/* The image with its content. Plain inputs are read where they are. */
static bool open_image(struct run *run, enum tensor id, size_t bytes, enum placement placement, int poison) {
  struct span *span = &run->span[id];
  void *source = id < T_SAVED ? run->sample->data[id] : NULL;
  const bool plain = placement == PLACE_PLAIN;
  if (source && plain && id < T_INPUTS && id != T_GLOBAL_COUNTS) {
    *span = (struct span){.inner = source, .inner_bytes = bytes, .data = source, .bytes = bytes};
    return true;
  }
  if (!(plain ? span_plain(span, bytes) : span_guarded(span, bytes, placement, run->memory.apart ? BAND : 0)))
    return false;
  if (source)
    memcpy(span->data, source, bytes);
  else if (!(plain && run->memory.apart)) /* else the block alone is filled */
    memset(span->data, poison, bytes);
  return true;
}

static const char *open_block(struct run *run, enum tensor id, enum placement placement, int poison) {
  struct span *span = &run->span[id];
  moe_context *ctx = run->memory.ctx;
  const bool filled = placement != PLACE_PLAIN || (id < T_SAVED && run->sample->data[id]);
  if (!run->memory.apart) {
    span->block = span->inner;
    return NULL;
  }
  moe_status status = moe_memory_alloc(ctx, span->inner_bytes, &span->block);
  if (status == MOE_OK)
    status = filled ? moe_memory_copy(ctx, span->block, span->inner, span->inner_bytes)
                    : moe_memory_fill(ctx, span->block, poison, span->inner_bytes);
  return status == MOE_OK ? NULL : moe_last_error();
}

const char *run_open(struct run *run, const struct sample *sample, struct memory memory, moe_plan *plan,
                     enum placement placement, int poison) {
  const int64_t tokens = sample->problem.tokens;
  *run = (struct run){.sample = sample, .memory = memory, .plan = plan, .keep = sample->problem.backward};
  run->saved_bytes = run->keep ? moe_plan_saved(plan, tokens) : 0;
  run->workspace_bytes = moe_plan_workspace(plan, tokens);
  for (int i = 0; i < T_COUNT; i++) {
    const enum tensor id = (enum tensor)i;
    const struct shape *shape = &sample->shape[id];
    if (id == T_SAVED ? !run->keep : id < T_SAVED && !shape->present) continue;
    const size_t bytes = id == T_SAVED       ? run->saved_bytes
                         : id == T_WORKSPACE ? run->workspace_bytes
                                             : shape_bytes(shape);
    if (!open_image(run, id, bytes, placement, poison)) return "memory was short";
    const char *failure = open_block(run, id, placement, poison);
    if (failure) return failure;
  }
  return NULL;
}

void run_close(struct run *run) {
  for (int id = 0; id < T_COUNT; id++) {
    struct span *span = &run->span[id];
    if (run->memory.apart) moe_memory_free(run->memory.ctx, span->block);
    if (span->map) munmap(span->map, span->map_bytes);
  }
}

void *run_data(const struct run *run, enum tensor id) { return run->span[id].data; }

void *run_block(const struct run *run, enum tensor id) {
  const struct span *span = &run->span[id];
  return span->block ? (unsigned char *)span->block + (span->data - span->inner) : NULL;
}

moe_status run_poison_workspace(struct run *run, int poison) {
  return moe_memory_fill(run->memory.ctx, run_block(run, T_WORKSPACE), poison, run->span[T_WORKSPACE].bytes);
}

moe_status run_fetch_tensor(struct run *run, enum tensor id) {
  const struct span *span = &run->span[id];
  if (span->map == NULL || span->block == span->inner) return MOE_OK; /* borrowed, absent, or its own image */
  return moe_memory_copy(run->memory.ctx, span->inner, span->block, span->inner_bytes);
}

/* Waits first: an error of a kernel is then its own and not one of the copy. */
moe_status run_fetch(struct run *run) {
  moe_status status = moe_synchronize(run->memory.ctx, NULL);
  for (int id = 0; id < T_COUNT && status == MOE_OK; id++) status = run_fetch_tensor(run, (enum tensor)id);
  return status;
}

static bool span_damaged(const struct span *span) {
  const unsigned char *end = span->inner + span->inner_bytes, *data_end = span->data + span->bytes;
  for (const unsigned char *at = span->inner; at < span->data; at++)
    if (*at != BAND_BYTE) return true;
  for (const unsigned char *at = data_end; at < end; at++)
    if (*at != BAND_BYTE) return true;
  return false;
}

enum tensor run_damaged(const struct run *run) {
  for (int id = 0; id < T_COUNT; id++) {
    const struct span *span = &run->span[id];
    const void *source = id < T_INPUTS && id != T_GLOBAL_COUNTS ? run->sample->data[id] : NULL;
    if (span->inner && span_damaged(span)) return (enum tensor)id;
    if (source && span->bytes && memcmp(span->data, source, span->bytes)) return (enum tensor)id;
  }
  return T_COUNT;
}

/* ---- the calls ------------------------------------------------------------------------------------------------- */

static moe_params params_of(const struct run *run) {
  moe_params params = MOE_PARAMS_INIT;
  params.router_weight = run_block(run, T_ROUTER_WEIGHT);
  params.router_bias = run_block(run, T_ROUTER_BIAS);
  params.correction_bias = run_block(run, T_CORRECTION_BIAS);
  params.w1 = run_block(run, T_W1);
  params.b1 = run_block(run, T_B1);
  params.w2 = run_block(run, T_W2);
  params.b2 = run_block(run, T_B2);
  params.shared_w1 = run_block(run, T_SHARED_W1);
  params.shared_w2 = run_block(run, T_SHARED_W2);
  params.shared_gate = run_block(run, T_SHARED_GATE);
  params.latent_down = run_block(run, T_LATENT_DOWN);
  params.latent_up = run_block(run, T_LATENT_UP);
  return params;
}

moe_status run_forward(struct run *run) {
  const moe_params params = params_of(run);
  const moe_router_desc *router = &run->sample->problem.config.router;
  moe_forward_args args = MOE_FORWARD_ARGS_INIT;
  args.tokens = run->sample->problem.tokens;
  args.x = run_block(run, T_X);
  args.params = &params;
  args.logits = run_block(run, T_LOGITS);
  args.given_ids = run_block(run, T_GIVEN_IDS);
  args.given_weights = run_block(run, T_GIVEN_WEIGHTS);
  args.row_offset = run_block(run, T_ROW_OFFSET);
  args.padding_mask = run_block(run, T_MASK);
  args.global_counts = run_block(run, T_GLOBAL_COUNTS);
  args.out = run_block(run, T_OUT);
  if (!run->bare) {
    args.topk_ids = run_block(run, T_TOPK_IDS);
    args.topk_weights = run_block(run, T_TOPK_WEIGHTS);
    args.counts = run_block(run, T_COUNTS);
    args.slot_row = run_block(run, T_SLOT_ROW);
  }
  if (!run->bare || router->balance || router->z_coeff > 0) args.losses = run_block(run, T_LOSSES);
  args.saved = run_block(run, T_SAVED);
  args.saved_bytes = run->saved_bytes;
  args.workspace = run_block(run, T_WORKSPACE);
  args.workspace_bytes = run->workspace_bytes;
  return moe_forward(run->plan, &args, run->stream);
}

static moe_param_grads grads_of(const struct run *run) {
  moe_param_grads grads = MOE_PARAM_GRADS_INIT;
  grads.router_weight = run_block(run, T_DROUTER_WEIGHT);
  grads.router_bias = run_block(run, T_DROUTER_BIAS);
  grads.w1 = run_block(run, T_DW1);
  grads.b1 = run_block(run, T_DB1);
  grads.w2 = run_block(run, T_DW2);
  grads.b2 = run_block(run, T_DB2);
  grads.shared_w1 = run_block(run, T_DSHARED_W1);
  grads.shared_w2 = run_block(run, T_DSHARED_W2);
  grads.shared_gate = run_block(run, T_DSHARED_GATE);
  grads.latent_down = run_block(run, T_DLATENT_DOWN);
  grads.latent_up = run_block(run, T_DLATENT_UP);
  return grads;
}

moe_status run_backward(struct run *run) {
  const moe_params params = params_of(run);
  const moe_param_grads grads = grads_of(run);
  moe_backward_args args = MOE_BACKWARD_ARGS_INIT;
  args.tokens = run->sample->problem.tokens;
  args.x = run_block(run, T_X);
  args.params = &params;
  args.logits = run_block(run, T_LOGITS);
  args.given_weights = run_block(run, T_GIVEN_WEIGHTS);
  args.row_offset = run_block(run, T_ROW_OFFSET);
  args.padding_mask = run_block(run, T_MASK);
  args.dout = run_block(run, T_DOUT);
  args.saved = run_block(run, T_SAVED);
  args.saved_bytes = run->saved_bytes;
  args.workspace = run_block(run, T_WORKSPACE);
  args.workspace_bytes = run->workspace_bytes;
  args.dx = run_block(run, T_DX);
  args.dlogits = run_block(run, T_DLOGITS);
  args.dtopk_weights = run_block(run, T_DTOPK_WEIGHTS);
  args.grads = &grads;
  args.accumulate = run->sample->problem.accumulate;
  return moe_backward(run->plan, &args, run->stream);
}
