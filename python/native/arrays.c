/* SPDX-License-Identifier: Apache-2.0
 *
 * From XLA's buffers to the pointers of a run call, by tables: one row an array, with its place in struct call, its
 * element type and its number of elements.
 * Invariant: no address reaches the library unless its buffer is of the type and size that the plan reads or writes. */

#include <inttypes.h>
#include <string.h>

#include "arrays.h"

enum type {
  OF_DTYPE,
  OF_ROUTER,
  OF_LOGITS,
  OF_GRAD,
  OF_FLOAT,
  OF_INT,
  OF_BYTE,
  OF_SPACE
};
enum factor {
  ONE,
  TWO,
  TOKENS,
  HIDDEN,
  WIDTH,
  UP,
  INTER,
  EXPERTS,
  TOPK,
  SHARED_UP,
  SHARED,
  LATENT,
  EXPERTS_AND_ONE,
  FACTORS
};

struct array {
  const char *name;
  size_t offset;
  enum type type; /* OF_SPACE: bytes of any number, which goes into the field behind the pointer */
  enum factor shape[3];
};

#define AT(field) offsetof(struct call, field)

/* Operands of both directions. */
static const struct array parameters[] = {
    {"router_weight", AT(params.router_weight), OF_ROUTER, {EXPERTS, HIDDEN}},
    {"router_bias", AT(params.router_bias), OF_FLOAT, {EXPERTS}},
    {"correction_bias", AT(params.correction_bias), OF_FLOAT, {EXPERTS}},
    {"w1", AT(params.w1), OF_DTYPE, {EXPERTS, UP, WIDTH}},
    {"b1", AT(params.b1), OF_DTYPE, {EXPERTS, UP}},
    {"w2", AT(params.w2), OF_DTYPE, {EXPERTS, WIDTH, INTER}},
    {"b2", AT(params.b2), OF_DTYPE, {EXPERTS, WIDTH}},
    {"shared_w1", AT(params.shared_w1), OF_DTYPE, {SHARED_UP, HIDDEN}},
    {"shared_w2", AT(params.shared_w2), OF_DTYPE, {HIDDEN, SHARED}},
    {"shared_gate", AT(params.shared_gate), OF_DTYPE, {HIDDEN}},
    {"latent_down", AT(params.latent_down), OF_DTYPE, {LATENT, HIDDEN}},
    {"latent_up", AT(params.latent_up), OF_DTYPE, {HIDDEN, LATENT}},
    {0}};

static const struct array forward_operands[] = {
    {"x", AT(forward.x), OF_DTYPE, {TOKENS, HIDDEN}},
    {"logits", AT(forward.logits), OF_LOGITS, {TOKENS, EXPERTS}},
    {"given_ids", AT(forward.given_ids), OF_INT, {TOKENS, TOPK}},
    {"given_weights", AT(forward.given_weights), OF_FLOAT, {TOKENS, TOPK}},
    {"row_offset", AT(forward.row_offset), OF_INT, {EXPERTS_AND_ONE}},
    {"padding_mask", AT(forward.padding_mask), OF_BYTE, {TOKENS}},
    {"token_count", AT(forward.token_count), OF_INT, {ONE}},
    {"global_counts", AT(forward.global_counts), OF_INT, {EXPERTS_AND_ONE, TWO}}, /* int64_t as words */
    {0}};

static const struct array forward_results[] = {
    {"out", AT(forward.out), OF_DTYPE, {TOKENS, HIDDEN}},
    {"topk_ids", AT(forward.topk_ids), OF_INT, {TOKENS, TOPK}},
    {"topk_weights", AT(forward.topk_weights), OF_FLOAT, {TOKENS, TOPK}},
    {"counts", AT(forward.counts), OF_INT, {EXPERTS}},
    {"losses", AT(forward.losses), OF_FLOAT, {TWO}},
    {"global_counts", AT(new_global_counts), OF_INT, {EXPERTS_AND_ONE, TWO}},
    {"saved", AT(forward.saved), OF_SPACE, {0}},
    {"workspace", AT(forward.workspace), OF_SPACE, {0}},
    {0}};

static const struct array backward_operands[] = {
    {"x", AT(backward.x), OF_DTYPE, {TOKENS, HIDDEN}},
    {"logits", AT(backward.logits), OF_LOGITS, {TOKENS, EXPERTS}},
    {"given_weights", AT(backward.given_weights), OF_FLOAT, {TOKENS, TOPK}},
    {"row_offset", AT(backward.row_offset), OF_INT, {EXPERTS_AND_ONE}},
    {"padding_mask", AT(backward.padding_mask), OF_BYTE, {TOKENS}},
    {"token_count", AT(backward.token_count), OF_INT, {ONE}},
    {"dout", AT(backward.dout), OF_DTYPE, {TOKENS, HIDDEN}},
    {"dlosses", AT(backward.dlosses), OF_FLOAT, {TWO}},
    {"saved", AT(backward.saved), OF_SPACE, {0}},
    {0}};

static const struct array backward_results[] = {
    {"dx", AT(backward.dx), OF_DTYPE, {TOKENS, HIDDEN}},
    {"dlogits", AT(backward.dlogits), OF_LOGITS, {TOKENS, EXPERTS}},
    {"dgiven_weights", AT(backward.dtopk_weights), OF_FLOAT, {TOKENS, TOPK}},
    {"drouter_weight", AT(grads.router_weight), OF_GRAD, {EXPERTS, HIDDEN}},
    {"drouter_bias", AT(grads.router_bias), OF_FLOAT, {EXPERTS}},
    {"dw1", AT(grads.w1), OF_GRAD, {EXPERTS, UP, WIDTH}},
    {"db1", AT(grads.b1), OF_GRAD, {EXPERTS, UP}},
    {"dw2", AT(grads.w2), OF_GRAD, {EXPERTS, WIDTH, INTER}},
    {"db2", AT(grads.b2), OF_GRAD, {EXPERTS, WIDTH}},
    {"dshared_w1", AT(grads.shared_w1), OF_GRAD, {SHARED_UP, HIDDEN}},
    {"dshared_w2", AT(grads.shared_w2), OF_GRAD, {HIDDEN, SHARED}},
    {"dshared_gate", AT(grads.shared_gate), OF_GRAD, {HIDDEN}},
    {"dlatent_down", AT(grads.latent_down), OF_GRAD, {LATENT, HIDDEN}},
    {"dlatent_up", AT(grads.latent_up), OF_GRAD, {HIDDEN, LATENT}},
    {"workspace", AT(backward.workspace), OF_SPACE, {0}},
    {0}};

_Static_assert(AT(forward.saved_bytes) == AT(forward.saved) + sizeof(void *) &&
                   AT(forward.workspace_bytes) == AT(forward.workspace) + sizeof(void *) &&
                   AT(backward.saved_bytes) == AT(backward.saved) + sizeof(void *) &&
                   AT(backward.workspace_bytes) == AT(backward.workspace) + sizeof(void *),
               "the size of a buffer is the field behind its pointer");

struct layer { /* what the rows' factors and types stand for */
  const moe_config *config;
  int64_t factors[FACTORS];
};

static struct layer layer_of(const moe_config *c, int64_t tokens) {
  const int64_t halves = c->act.gated ? 2 : 1;
  return (struct layer){.config = c,
                        .factors = {[ONE] = 1,
                                    [TWO] = 2,
                                    [TOKENS] = tokens,
                                    [HIDDEN] = c->hidden,
                                    [WIDTH] = c->latent > 0 ? c->latent : c->hidden,
                                    [UP] = halves * c->inter,
                                    [INTER] = c->inter,
                                    [EXPERTS] = c->experts,
                                    [TOPK] = c->topk,
                                    [SHARED_UP] = halves * c->shared_inter,
                                    [SHARED] = c->shared_inter,
                                    [LATENT] = c->latent,
                                    [EXPERTS_AND_ONE] = c->experts + 1}};
}

static int xla_type(moe_dtype dtype) {
  switch (dtype) {
  case MOE_FP32: return XLA_F32;
  case MOE_BF16: return XLA_BF16;
  case MOE_FP16: return XLA_F16;
  default: return 0; /* no type of XLA: a configuration that leaves it open matches nothing */
  }
}

static int wanted_type(enum type type, const moe_config *c) {
  switch (type) {
  case OF_DTYPE: return xla_type(c->dtype);
  case OF_ROUTER: return xla_type(c->router_dtype);
  case OF_LOGITS: return xla_type(c->logits_dtype);
  case OF_GRAD: return xla_type(c->grad_dtype);
  case OF_FLOAT: return XLA_F32;
  case OF_INT: return XLA_S32;
  default: return XLA_U8;
  }
}

static int64_t elements(const struct xla_buffer *buffer) {
  int64_t count = 1;
  for (int64_t i = 0; i < buffer->rank; i++) count *= buffer->dims[i];
  return count;
}

static moe_status take_array(const struct array *row, const struct xla_buffer *buffer,
                             const struct layer *layer, struct call *call, struct fault *fault) {
  const int type = wanted_type(row->type, layer->config);
  const int64_t found = elements(buffer);
  int64_t wanted = 1;
  for (int i = 0; i < 3; i++) wanted *= layer->factors[row->shape[i]];
  CHECK((int)buffer->dtype == type, fault, MOE_ERROR_ARGUMENT,
        "moeblas: %s has XLA's element type %d, wanted %d", row->name, (int)buffer->dtype, type);
  CHECK(row->type == OF_SPACE || found == wanted, fault, MOE_ERROR_ARGUMENT,
        "moeblas: %s has %" PRId64 " elements, wanted %" PRId64, row->name, found, wanted);
  unsigned char *place = (unsigned char *)call + row->offset;
  const size_t bytes = (size_t)found;
  memcpy(place, &buffer->data, sizeof buffer->data);
  if (row->type == OF_SPACE) memcpy(place + sizeof buffer->data, &bytes, sizeof bytes);
  return MOE_OK;
}

static const struct array *find_row(const struct array *table, const char *name, size_t length) {
  while (table->name != NULL && (strlen(table->name) != length || memcmp(table->name, name, length) != 0))
    table++;
  return table->name != NULL ? table : NULL;
}

/* Walks the names and the buffers side by side; a name is of one of the two tables. */
static moe_status take_arrays(const struct array *table, const struct array *more, struct xla_span names,
                              const struct xla_buffers *buffers, const struct layer *layer, struct call *call,
                              struct fault *fault) {
  const char *name = names.data, *end = names.data + names.length;
  for (int64_t i = 0; i < buffers->count; i++) {
    const char *space = name < end ? memchr(name, ' ', (size_t)(end - name)) : NULL;
    const size_t length = (size_t)((space ? space : end) - name);
    const struct array *row = find_row(table, name, length);
    if (row == NULL) row = find_row(more, name, length);
    CHECK(row != NULL, fault, MOE_ERROR_ARGUMENT,
          "moeblas: buffer %" PRId64 " is \"%.*s\", wanted a known name", i, (int)length, name);
    CHECK(buffers->kinds[i] == XLA_BUFFER, fault, MOE_ERROR_ARGUMENT, "moeblas: %s is no buffer", row->name);
    TRY(take_array(row, buffers->items[i], layer, call, fault));
    name += length + (space != NULL);
  }
  CHECK(name == end, fault, MOE_ERROR_ARGUMENT, "moeblas: %" PRId64 " buffers, wanted one more: \"%.*s\"",
        buffers->count, (int)(end - name), name);
  return MOE_OK;
}

moe_status moe_xla_attribute(const struct xla_frame *frame, const char *name, enum xla_kind kind, void **out,
                             struct fault *fault) {
  const struct xla_attributes *attributes = &frame->attributes;
  for (int64_t i = 0; i < attributes->count; i++) {
    const struct xla_span *found = attributes->names[i];
    if (found->length != strlen(name) || memcmp(found->data, name, found->length) != 0) continue;
    CHECK(attributes->kinds[i] == kind, fault, MOE_ERROR_ARGUMENT,
          "moeblas: attribute %s is of kind %d, wanted %d", name, (int)attributes->kinds[i], (int)kind);
    *out = attributes->items[i];
    return MOE_OK;
  }
  return moe_xla_fail(fault, MOE_ERROR_ARGUMENT, "moeblas: attribute %s is missing", name);
}

static moe_status take(const struct xla_frame *frame, const struct array *operands,
                       const struct array *results, const moe_config *config, struct call *call,
                       struct fault *fault) {
  void *operand_names, *result_names;
  TRY(moe_xla_attribute(frame, "operands", XLA_STRING, &operand_names, fault));
  TRY(moe_xla_attribute(frame, "results", XLA_STRING, &result_names, fault));
  *call = (struct call){.params = MOE_PARAMS_INIT,
                        .grads = MOE_PARAM_GRADS_INIT,
                        .forward = MOE_FORWARD_ARGS_INIT,
                        .backward = MOE_BACKWARD_ARGS_INIT};
  CHECK(frame->operands.count > 0 && frame->operands.kinds[0] == XLA_BUFFER &&
            frame->operands.items[0]->rank == 2,
        fault, MOE_ERROR_ARGUMENT,
        "moeblas: the first buffer has no two dimensions, wanted x [tokens,hidden]");
  const int64_t tokens = frame->operands.items[0]->dims[0];
  const struct layer layer = layer_of(config, tokens);
  call->forward.tokens = call->backward.tokens = tokens;
  call->forward.params = call->backward.params = &call->params;
  call->backward.grads = &call->grads;
  TRY(take_arrays(operands, parameters, *(struct xla_span *)operand_names, &frame->operands, &layer, call,
                  fault));
  TRY(take_arrays(results, results, *(struct xla_span *)result_names, &frame->results, &layer, call, fault));
  CHECK(call->new_global_counts == call->forward.global_counts, fault, MOE_ERROR_ARGUMENT,
        "moeblas: global_counts as an operand and as a result are two buffers, wanted one");
  return MOE_OK;
}

moe_status moe_xla_take_forward(const struct xla_frame *frame, const moe_config *config, struct call *call,
                                struct fault *fault) {
  return take(frame, forward_operands, forward_results, config, call, fault);
}

moe_status moe_xla_take_backward(const struct xla_frame *frame, const moe_config *config, struct call *call,
                                 struct fault *fault) {
  return take(frame, backward_operands, backward_results, config, call, fault);
}
