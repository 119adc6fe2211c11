/* SPDX-License-Identifier: Apache-2.0
 *
 * What: rows from expert ids, a stable counting sort, after which experts over capacity drop slots.
 * Idea: the output arrays are the only memory. row_offset serves as the counters and cursors of the sort.
 * Drops come second: each expert over capacity finds the rank of its last kept slot by radix selection,
 * and the kept slots move up in place. Both are linear in the slots.
 * Invariant: inside an expert, rows are in slot order, before and after drops. */
#include "cpu.h"

#include "../format.h"

size_t moe_cpu_sort_scratch(const moe_context *ctx, const moe_sort_args *args) {
  (void)ctx, (void)args;
  return 0;
}

/* The expert of slot s of token t, -1 when skipped. */
static int64_t expert_of(const moe_sort_args *args, int64_t t, int64_t s) {
  if (args->padding_mask != NULL && args->padding_mask[t]) return -1;
  const int64_t e = args->ids != NULL ? args->ids[s] : 0;
  return e >= 0 && e < args->experts ? e : -1;
}

/* Leaves the number of slots of expert e in row_offset[e]. */
static void count_slots(const moe_sort_args *args) {
  memset(args->row_offset, 0, (size_t)(args->experts + 1) * sizeof *args->row_offset);
  for (int64_t t = 0; t < args->tokens; t++)
    for (int64_t s = t * args->topk; s < (t + 1) * args->topk; s++) {
      const int64_t e = expert_of(args, t, s);
      if (e >= 0) args->row_offset[e]++;
    }
}

/* Counts become first rows, which placing turns into last rows: the same numbers one expert further on. */
static void place_slots(const moe_sort_args *args) {
  int32_t *const cursor = args->row_offset;
  int32_t first = 0;
  for (int64_t e = 0; e < args->experts; e++) {
    const int32_t count = cursor[e];
    cursor[e] = first;
    first += count;
  }
  for (int64_t t = 0; t < args->tokens; t++)
    for (int64_t s = t * args->topk; s < (t + 1) * args->topk; s++) {
      const int64_t e = expert_of(args, t, s);
      args->slot_row[s] = e < 0 ? -1 : cursor[e];
      if (e >= 0) args->row_slot[cursor[e]++] = (int32_t)s;
    }
  memmove(cursor + 1, cursor, (size_t)args->experts * sizeof *cursor);
  cursor[0] = 0;
}

/* A number that orders as the slot's claim to a place: by weight, -0 as +0, NaN below all; by position,
 * all alike. */
static uint32_t rank_of(const moe_sort_args *args, int32_t slot) {
  if (args->drop == MOE_DROP_POSITION) return 0;
  const float weight = args->weights[slot] + 0.0f;
  if (weight != weight) return 0;
  const uint32_t bits = moe_bits_of(weight);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The keep-th largest rank of the slots, byte by byte from the top. *ties: how many slots of that very
 * rank are kept. */
static uint32_t last_rank(const moe_sort_args *args, const int32_t *slots, int64_t n, int64_t keep,
                          int64_t *ties) {
  uint32_t rank = 0, known = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    int64_t histogram[256] = {0};
    for (int64_t i = 0; i < n; i++) {
      const uint32_t r = rank_of(args, slots[i]);
      if ((r & known) == rank) histogram[r >> shift & 255]++;
    }
    uint32_t byte = 255;
    while (histogram[byte] < keep) keep -= histogram[byte--];
    rank |= byte << shift;
    known |= 255u << shift;
    if (histogram[byte] == keep) break; /* all that begin like this are kept, whatever follows */
  }
  *ties = keep;
  return rank;
}

/* Moves the slots that expert e keeps to the rows from `end` on; returns the row after them. */
static int32_t keep_slots(const moe_sort_args *args, int64_t first, int64_t count, int32_t end) {
  const int32_t *slots = args->row_slot + first;
  uint32_t rank = 0;
  int64_t ties = count;
  if (count > args->capacity) rank = last_rank(args, slots, count, args->capacity, &ties);
  for (int64_t i = 0; i < count; i++) {
    const int32_t slot = slots[i];
    const uint32_t r = count > args->capacity ? rank_of(args, slot) : 0;
    const bool kept = r > rank || (r == rank && ties-- > 0);
    args->slot_row[slot] = kept ? end : -1;
    if (kept) args->row_slot[end++] = slot;
  }
  return end;
}

static void drop_slots(const moe_sort_args *args) {
  int32_t end = 0;
  int64_t first = 0;
  for (int64_t e = 0; e < args->experts; e++) {
    const int64_t next = args->row_offset[e + 1];
    end = keep_slots(args, first, next - first, end);
    args->row_offset[e + 1] = end;
    first = next;
  }
}

moe_status moe_cpu_sort(moe_context *ctx, const moe_sort_args *args, moe_stream stream) {
  (void)ctx, (void)stream;
  count_slots(args);
  if (args->counts != NULL)
    memcpy(args->counts, args->row_offset, (size_t)args->experts * sizeof *args->counts);
  place_slots(args);
  if (args->capacity > 0) drop_slots(args);
  for (int64_t r = args->row_offset[args->experts]; r < args->tokens * args->topk; r++)
    args->row_slot[r] = -1;
  return MOE_OK;
}
