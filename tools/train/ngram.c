/* SPDX-License-Identifier: Apache-2.0
 *
 * Interpolated Witten-Bell: with n = how often the context was followed by a byte and t = by how many different ones,
 *     P(c | context) = (count(context c) + t * P(c | shorter context)) / (n + t),      P(c | nothing known) = 1/256.
 * One node for each string of up to order+1 bytes that occurs; the nodes of the strings that end at one byte are the
 * contexts of the next byte, so each string is looked up once. */
#include "ngram.h"

#include <math.h>
#include <stdlib.h>

enum {
  MAX_ORDER = 6
}; /* a string and its length fit one 64-bit key */

struct node {
  uint64_t key;
  uint32_t count;    /* of the string */
  uint32_t followed; /* by any byte: n */
  uint32_t kinds;    /* by different bytes: t */
};
struct table {
  struct node *nodes; /* [0] is the empty string */
  uint32_t *slots;    /* [slot_count], a power of two; index + 1 of a node, 0 free */
  size_t count, capacity, slot_count;
};

static uint64_t key_of(const uint8_t *end, int length) {
  uint64_t key = (uint64_t)length << 56;
  for (int i = 0; i < length; i++) key |= (uint64_t)end[-1 - i] << (8 * i);
  return key;
}

/* The slot that holds the key, or the free one where it belongs. */
static uint32_t *slot_of(const struct table *t, uint64_t key) {
  size_t i = (key * 0x9e3779b97f4a7c15u) >> 20;
  for (;; i++) {
    uint32_t *slot = &t->slots[i & (t->slot_count - 1)];
    if (*slot == 0 || t->nodes[*slot - 1].key == key) return slot;
  }
}

static int grow(struct table *t) {
  const size_t capacity = t->capacity ? 2 * t->capacity : 1u << 14;
  if (capacity > UINT32_MAX / 2) return -1;
  struct node *nodes = realloc(t->nodes, capacity * sizeof *nodes);
  if (nodes == NULL) return -1;
  t->nodes = nodes;
  uint32_t *slots = calloc(2 * capacity, sizeof *slots);
  if (slots == NULL) return -1;
  free(t->slots);
  t->slots = slots;
  t->capacity = capacity;
  t->slot_count = 2 * capacity;
  for (size_t i = 0; i < t->count; i++) *slot_of(t, t->nodes[i].key) = (uint32_t)i + 1;
  return 0;
}

/* Index of the node, made when absent; -1 when memory is short. */
static int64_t insert(struct table *t, uint64_t key) {
  if (t->count == t->capacity && grow(t) != 0) return -1;
  uint32_t *slot = slot_of(t, key);
  if (*slot == 0) {
    t->nodes[t->count] = (struct node){.key = key};
    *slot = (uint32_t)++t->count;
  }
  return *slot - 1;
}

static int train(struct table *t, const uint8_t *text, size_t bytes, int order) {
  int64_t context[MAX_ORDER + 2] = {insert(t, 0)};
  if (context[0] < 0) return -1;
  for (size_t i = 0; i < bytes; i++) {
    const int longest = i < (size_t)order ? (int)i : order;
    for (int k = longest; k >= 0; k--) { /* downwards: context[k + 1] becomes the next byte's */
      const int64_t string = insert(t, key_of(text + i + 1, k + 1));
      if (string < 0) return -1;
      struct node *before = &t->nodes[context[k]];
      before->followed++;
      before->kinds += t->nodes[string].count++ == 0;
      context[k + 1] = string;
    }
  }
  return 0;
}

static double probability(const struct table *t, const uint8_t *at, int longest) {
  double p = 1.0 / 256;
  for (int k = 0; k <= longest; k++) {
    const uint32_t context = *slot_of(t, key_of(at, k));
    if (context == 0 || t->nodes[context - 1].followed == 0) break; /* then no longer one was seen either */
    const struct node *before = &t->nodes[context - 1];
    const uint32_t string = *slot_of(t, key_of(at + 1, k + 1));
    const double count = string ? t->nodes[string - 1].count : 0;
    p = (count + before->kinds * p) / ((double)before->followed + before->kinds);
  }
  return p;
}

double ngram_bits_per_byte(const struct corpus *c, int order) {
  if (order < 0 || order > MAX_ORDER || c->val_bytes == 0) return NAN;
  struct table t = {0};
  double bits = NAN;
  if (train(&t, c->train, c->train_bytes, order) == 0) {
    bits = 0;
    for (size_t i = 0; i < c->val_bytes; i++)
      bits -= log2(probability(&t, c->val + i, i < (size_t)order ? (int)i : order));
    bits /= (double)c->val_bytes;
  }
  free(t.nodes);
  free(t.slots);
  return bits;
}
