/* SPDX-License-Identifier: Apache-2.0
 * See ops_check.h. Arrays are wanted only where they have elements: an empty tensor may well be NULL. */

#include <inttypes.h>

#include "ops_check.h"

#define MAX_ROWS    INT32_MAX
#define MAX_COLUMNS (2 * (int64_t)MOE_MAX_WIDTH)

#define RANGE(op, a, field, low, high) TRY(moe_check_range(#op, #field, (int64_t)(a)->field, low, high))
#define FLAG(op, a, field)             RANGE(op, a, field, 0, 1)
#define DTYPE(op, a, field)            TRY(moe_check_dtype(#op, #field, (a)->field))
/* An array that must be there if `wanted`. */
#define ARRAY(op, a, field, wanted) TRY(check_array(#op, #field, (a)->field, (wanted)))

static moe_status check_array(const char *op, const char *field, const void *array, bool wanted) {
  CHECK(array != NULL || !wanted, MOE_ERROR_ARGUMENT, "%s: %s = NULL, wanted an array", op, field);
  CHECK((uintptr_t)array % 2 == 0, MOE_ERROR_ARGUMENT, "%s: %s = %p, wanted an aligned address", op, field,
        array);
  return MOE_OK;
}

/* An operand of a matrix product, which is read and written in pieces of 16 bytes. */
#define OPERAND(op, a, field, wanted) TRY(check_operand(#op, #field, (a)->field, (wanted)))

static moe_status check_operand(const char *op, const char *field, const void *array, bool wanted) {
  TRY(check_array(op, field, array, wanted));
  CHECK((uintptr_t)array % 16 == 0, MOE_ERROR_ARGUMENT, "%s: %s = %p, wanted an address aligned to 16 bytes",
        op, field, array);
  return MOE_OK;
}

static moe_status check_slots(const char *op, int64_t tokens, int64_t topk, int64_t lowest_topk) {
  TRY(moe_check_range(op, "topk", topk, lowest_topk, MOE_MAX_TOPK));
  CHECK(tokens >= 0 && tokens <= MAX_ROWS / (topk > 0 ? topk : 1), MOE_ERROR_ARGUMENT,
        "%s: tokens = %" PRId64 ", wanted 0 .. %" PRId64 " (tokens * topk below 2^31)", op, tokens,
        MAX_ROWS / (topk > 0 ? topk : 1));
  return MOE_OK;
}

static moe_status take_router(const char *op, const moe_router_desc **router, moe_router_desc *resolved,
                              int64_t experts, int64_t topk) {
  CHECK(*router != NULL, MOE_ERROR_ARGUMENT, "%s: router = NULL, wanted a moe_router_desc", op);
  *resolved = **router;
  *router = resolved;
  return moe_resolve_router(op, resolved, experts, topk);
}

static moe_status take_act(const char *op, const moe_act_desc **act, moe_act_desc *resolved, int64_t inter) {
  CHECK(*act != NULL, MOE_ERROR_ARGUMENT, "%s: act = NULL, wanted a moe_act_desc", op);
  *resolved = **act;
  *act = resolved;
  return moe_resolve_act(op, resolved, inter);
}

/* ---- routing */

moe_status moe_sizes_route(moe_route_args *a, struct resolved *resolved) {
  RANGE(route, a, experts, 1, MOE_MAX_EXPERTS);
  TRY(check_slots("route", a->tokens, a->topk, 1));
  DTYPE(route, a, logits_dtype);
  return take_router("route", &a->router, &resolved->router, a->experts, a->topk);
}
moe_status moe_arrays_route(const moe_route_args *a) {
  const bool some = a->tokens > 0;
  CHECK(a->topk <= a->experts || a->given_ids != NULL, MOE_ERROR_ARGUMENT,
        "route: topk = %" PRId64 ", wanted at most experts = %" PRId64 " without given_ids", a->topk,
        a->experts);
  ARRAY(route, a, logits, some);
  ARRAY(route, a, ids, some);
  ARRAY(route, a, weights, some);
  return MOE_OK;
}

moe_status moe_sizes_router_loss(moe_router_loss_args *a, struct resolved *resolved) {
  RANGE(router_loss, a, experts, 1, MOE_MAX_EXPERTS);
  TRY(check_slots("router_loss", a->tokens, a->topk, 1));
  DTYPE(router_loss, a, logits_dtype);
  return take_router("router_loss", &a->router, &resolved->router, a->experts, a->topk);
}
moe_status moe_arrays_router_loss(const moe_router_loss_args *a) {
  ARRAY(router_loss, a, logits, a->tokens > 0);
  ARRAY(router_loss, a, ids, a->tokens > 0);
  ARRAY(router_loss, a, global_counts, a->router->balance == MOE_BALANCE_GLOBAL);
  return MOE_OK;
}

moe_status moe_sizes_route_backward(moe_route_backward_args *a, struct resolved *resolved) {
  RANGE(route_backward, a, experts, 1, MOE_MAX_EXPERTS);
  TRY(check_slots("route_backward", a->tokens, a->topk, 1));
  DTYPE(route_backward, a, logits_dtype);
  DTYPE(route_backward, a, dlogits_dtype);
  return take_router("route_backward", &a->router, &resolved->router, a->experts, a->topk);
}
moe_status moe_arrays_route_backward(const moe_route_backward_args *a) {
  ARRAY(route_backward, a, logits, a->tokens > 0);
  ARRAY(route_backward, a, ids, a->tokens > 0);
  ARRAY(route_backward, a, dlogits, a->tokens > 0);
  ARRAY(route_backward, a, dlosses, false);
  return MOE_OK;
}

moe_status moe_sizes_token_mask(moe_token_mask_args *a, struct resolved *resolved) {
  (void)resolved;
  RANGE(token_mask, a, tokens, 0, MAX_ROWS);
  return MOE_OK;
}
moe_status moe_arrays_token_mask(const moe_token_mask_args *a) {
  CHECK((uintptr_t)a->token_count % sizeof(int32_t) == 0, MOE_ERROR_ARGUMENT,
        "token_mask: token_count = %p, wanted an address aligned to 4 bytes", (const void *)a->token_count);
  CHECK(a->mask != NULL || a->tokens == 0, MOE_ERROR_ARGUMENT, "token_mask: mask = NULL, wanted an array");
  return MOE_OK;
}

moe_status moe_sizes_sort(moe_sort_args *a, struct resolved *resolved) {
  (void)resolved;
  RANGE(sort, a, experts, 1, MOE_MAX_EXPERTS);
  TRY(check_slots("sort", a->tokens, a->topk, 1));
  RANGE(sort, a, capacity, 0, INT64_MAX);
  RANGE(sort, a, drop, MOE_DROP_WEIGHT, MOE_DROP_POSITION);
  return MOE_OK;
}
moe_status moe_arrays_sort(const moe_sort_args *a) {
  ARRAY(sort, a, ids, a->tokens > 0 && a->experts > 1);
  ARRAY(sort, a, weights, a->tokens > 0 && a->capacity > 0 && a->drop == MOE_DROP_WEIGHT);
  ARRAY(sort, a, row_offset, true);
  ARRAY(sort, a, row_slot, a->tokens > 0);
  ARRAY(sort, a, slot_row, a->tokens > 0);
  return MOE_OK;
}

moe_status moe_sizes_bias_update(moe_bias_update_args *a, struct resolved *resolved) {
  (void)resolved;
  RANGE(bias_update, a, experts, 1, MOE_MAX_EXPERTS);
  CHECK(a->rate - a->rate == 0, MOE_ERROR_ARGUMENT, "bias_update: rate = %g, wanted a finite number",
        (double)a->rate);
  return MOE_OK;
}
moe_status moe_arrays_bias_update(const moe_bias_update_args *a) {
  ARRAY(bias_update, a, counts, true);
  ARRAY(bias_update, a, bias, true);
  return MOE_OK;
}

moe_status moe_sizes_load_stats(moe_load_stats_args *a, struct resolved *resolved) {
  (void)resolved;
  RANGE(load_stats, a, experts, 1, MOE_MAX_EXPERTS);
  return MOE_OK;
}
moe_status moe_arrays_load_stats(const moe_load_stats_args *a) {
  ARRAY(load_stats, a, counts, true);
  ARRAY(load_stats, a, load, true);
  return MOE_OK;
}

/* ---- matrix products */

moe_status moe_sizes_gemm(moe_gemm_args *a, struct resolved *resolved) {
  RANGE(gemm, a, rows, 0, MAX_ROWS);
  RANGE(gemm, a, n, 1, MAX_COLUMNS);
  RANGE(gemm, a, k, 1, MAX_COLUMNS);
  RANGE(gemm, a, experts, 1, MOE_MAX_EXPERTS);
  RANGE(gemm, a, gather_topk, 0, MOE_MAX_TOPK);
  RANGE(gemm, a, epilogue, MOE_EPILOGUE_STORE, MOE_EPILOGUE_DACT);
  FLAG(gemm, a, b_kn);
  FLAG(gemm, a, accumulate);
  DTYPE(gemm, a, a_dtype);
  DTYPE(gemm, a, b_dtype);
  DTYPE(gemm, a, d_dtype);
  if (a->bias != NULL || a->dot_bias != NULL) DTYPE(gemm, a, bias_dtype);
  CHECK(!a->accumulate || (a->epilogue == MOE_EPILOGUE_STORE && a->d_dtype == MOE_FP32), MOE_ERROR_ARGUMENT,
        "gemm: accumulate = 1, wanted MOE_EPILOGUE_STORE with fp32 d");
  if (a->epilogue == MOE_EPILOGUE_STORE) return MOE_OK;
  const bool halves = a->act != NULL && a->act->gated && a->epilogue == MOE_EPILOGUE_ACT;
  CHECK(!halves || a->n % 2 == 0, MOE_ERROR_ARGUMENT, "gemm: n = %" PRId64 ", wanted an even number (2F)",
        a->n);
  return take_act("gemm", &a->act, &resolved->act, halves ? a->n / 2 : a->n);
}
moe_status moe_arrays_gemm(const moe_gemm_args *a) {
  const bool some = a->rows > 0, dact = a->epilogue == MOE_EPILOGUE_DACT;
  CHECK(a->row_offset != NULL || a->experts == 1, MOE_ERROR_ARGUMENT,
        "gemm: row_offset = NULL, wanted an array for experts = %" PRId64, a->experts);
  OPERAND(gemm, a, a, some);
  OPERAND(gemm, a, b, some);
  OPERAND(gemm, a, d, some && !dact);
  OPERAND(gemm, a, h, some && dact);
  OPERAND(gemm, a, dh, some && dact);
  OPERAND(gemm, a, bias, false);
  OPERAND(gemm, a, dot_bias, false);
  return MOE_OK;
}

moe_status moe_sizes_wgrad(moe_wgrad_args *a, struct resolved *resolved) {
  (void)resolved;
  RANGE(wgrad, a, rows, 0, MAX_ROWS);
  RANGE(wgrad, a, m, 1, MAX_COLUMNS);
  RANGE(wgrad, a, n, 1, MAX_COLUMNS);
  RANGE(wgrad, a, experts, 1, MOE_MAX_EXPERTS);
  RANGE(wgrad, a, a_gather_topk, 0, MOE_MAX_TOPK);
  RANGE(wgrad, a, b_gather_topk, 0, MOE_MAX_TOPK);
  FLAG(wgrad, a, accumulate);
  DTYPE(wgrad, a, a_dtype);
  DTYPE(wgrad, a, b_dtype);
  DTYPE(wgrad, a, d_dtype);
  return MOE_OK;
}
moe_status moe_arrays_wgrad(const moe_wgrad_args *a) {
  CHECK(a->row_offset != NULL || a->experts == 1, MOE_ERROR_ARGUMENT,
        "wgrad: row_offset = NULL, wanted an array for experts = %" PRId64, a->experts);
  OPERAND(wgrad, a, a, a->rows > 0);
  OPERAND(wgrad, a, b, a->rows > 0);
  OPERAND(wgrad, a, d, true);
  return MOE_OK;
}

moe_status moe_sizes_bias_grad(moe_bias_grad_args *a, struct resolved *resolved) {
  (void)resolved;
  RANGE(bias_grad, a, rows, 0, MAX_ROWS);
  RANGE(bias_grad, a, n, 1, MAX_COLUMNS);
  RANGE(bias_grad, a, experts, 1, MOE_MAX_EXPERTS);
  RANGE(bias_grad, a, gather_topk, 0, MOE_MAX_TOPK);
  FLAG(bias_grad, a, accumulate);
  DTYPE(bias_grad, a, v_dtype);
  DTYPE(bias_grad, a, d_dtype);
  return MOE_OK;
}
moe_status moe_arrays_bias_grad(const moe_bias_grad_args *a) {
  CHECK(a->row_offset != NULL || a->experts == 1, MOE_ERROR_ARGUMENT,
        "bias_grad: row_offset = NULL, wanted an array for experts = %" PRId64, a->experts);
  ARRAY(bias_grad, a, v, a->rows > 0);
  ARRAY(bias_grad, a, d, true);
  return MOE_OK;
}

/* ---- rows and tokens */

moe_status moe_sizes_permute(moe_permute_args *a, struct resolved *resolved) {
  (void)resolved;
  RANGE(permute, a, rows, 0, MAX_ROWS);
  RANGE(permute, a, hidden, 1, MAX_COLUMNS);
  RANGE(permute, a, topk, 1, MOE_MAX_TOPK);
  RANGE(permute, a, experts, 1, MOE_MAX_EXPERTS);
  DTYPE(permute, a, dtype);
  return MOE_OK;
}
moe_status moe_arrays_permute(const moe_permute_args *a) {
  ARRAY(permute, a, row_offset, true);
  ARRAY(permute, a, row_slot, a->rows > 0);
  ARRAY(permute, a, x, a->rows > 0);
  ARRAY(permute, a, y, a->rows > 0);
  return MOE_OK;
}

moe_status moe_sizes_combine(moe_combine_args *a, struct resolved *resolved) {
  (void)resolved;
  TRY(check_slots("combine", a->tokens, a->topk, 0));
  RANGE(combine, a, hidden, 1, MAX_COLUMNS);
  RANGE(combine, a, rows, 0, MAX_ROWS);
  if (a->topk > 0) DTYPE(combine, a, y_dtype);
  DTYPE(combine, a, out_dtype);
  return MOE_OK;
}
moe_status moe_arrays_combine(const moe_combine_args *a) {
  ARRAY(combine, a, y, a->tokens > 0 && a->topk > 0 && a->rows > 0);
  ARRAY(combine, a, out, a->tokens > 0);
  return MOE_OK;
}

moe_status moe_sizes_combine_backward(moe_combine_backward_args *a, struct resolved *resolved) {
  (void)resolved;
  TRY(check_slots("combine_backward", a->tokens, a->topk, 1));
  RANGE(combine_backward, a, hidden, 1, MAX_COLUMNS);
  RANGE(combine_backward, a, rows, 0, MAX_ROWS);
  DTYPE(combine_backward, a, y_dtype);
  DTYPE(combine_backward, a, dout_dtype);
  return MOE_OK;
}
moe_status moe_arrays_combine_backward(const moe_combine_backward_args *a) {
  const bool some = a->tokens > 0 && a->rows > 0;
  ARRAY(combine_backward, a, dout, some);
  ARRAY(combine_backward, a, y, some && a->dweights != NULL);
  return MOE_OK;
}

/* ---- activation and memory */

moe_status moe_sizes_act(moe_act_args *a, struct resolved *resolved) {
  RANGE(act, a, rows, 0, MAX_ROWS);
  RANGE(act, a, inter, 1, MOE_MAX_WIDTH);
  DTYPE(act, a, dtype);
  return take_act("act", &a->act, &resolved->act, a->inter);
}
moe_status moe_arrays_act(const moe_act_args *a) {
  ARRAY(act, a, h, a->rows > 0);
  ARRAY(act, a, a, a->rows > 0);
  return MOE_OK;
}

moe_status moe_sizes_act_backward(moe_act_backward_args *a, struct resolved *resolved) {
  RANGE(act_backward, a, rows, 0, MAX_ROWS);
  RANGE(act_backward, a, inter, 1, MOE_MAX_WIDTH);
  DTYPE(act_backward, a, dtype);
  return take_act("act_backward", &a->act, &resolved->act, a->inter);
}
moe_status moe_arrays_act_backward(const moe_act_backward_args *a) {
  ARRAY(act_backward, a, h, a->rows > 0);
  ARRAY(act_backward, a, da, a->rows > 0);
  ARRAY(act_backward, a, dh, a->rows > 0);
  return MOE_OK;
}

moe_status moe_sizes_convert(moe_convert_args *a, struct resolved *resolved) {
  (void)resolved;
  RANGE(convert, a, count, 0, INT64_MAX / 8);
  DTYPE(convert, a, x_dtype);
  DTYPE(convert, a, y_dtype);
  return MOE_OK;
}
moe_status moe_arrays_convert(const moe_convert_args *a) {
  ARRAY(convert, a, x, a->count > 0);
  ARRAY(convert, a, y, a->count > 0);
  return MOE_OK;
}

moe_status moe_sizes_copy(moe_copy_args *a, struct resolved *resolved) {
  (void)resolved;
  CHECK(a->bytes <= PTRDIFF_MAX, MOE_ERROR_ARGUMENT, "copy: bytes = %zu, wanted at most %td", a->bytes,
        (ptrdiff_t)PTRDIFF_MAX);
  return MOE_OK;
}
moe_status moe_arrays_copy(const moe_copy_args *a) {
  CHECK(a->bytes == 0 || (a->dst != NULL && a->src != NULL), MOE_ERROR_ARGUMENT,
        "copy: dst or src = NULL, wanted both for %zu bytes", a->bytes);
  return MOE_OK;
}

moe_status moe_sizes_zero(moe_zero_args *a, struct resolved *resolved) {
  (void)resolved;
  CHECK(a->bytes <= PTRDIFF_MAX, MOE_ERROR_ARGUMENT, "zero: bytes = %zu, wanted at most %td", a->bytes,
        (ptrdiff_t)PTRDIFF_MAX);
  return MOE_OK;
}
moe_status moe_arrays_zero(const moe_zero_args *a) {
  CHECK(a->bytes == 0 || a->data != NULL, MOE_ERROR_ARGUMENT, "zero: data = NULL, wanted %zu bytes",
        a->bytes);
  return MOE_OK;
}
