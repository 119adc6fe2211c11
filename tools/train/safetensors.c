/* SPDX-License-Identifier: Apache-2.0
 *
 * safetensors, strictly. The header passes a lexical gate before the JSON library sees it: the format needs objects,
 * arrays, strings and whole numbers, three deep, so the gate takes nothing else. That is what makes the library's
 * weak points harmless: recursion, numbers held as doubles (15 digits are exact), NUL inside strings, lax whitespace.
 * What is left to check is the schema, and that the tensors tile the data. Bounds are checked by subtraction. */
#include "safetensors.h"

#include <cjson/cJSON.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "text.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the file is little-endian and is read as it lies");

enum {
  MAX_HEADER = 100000000,
  MAX_VALUES = 1 << 19, /* bounds the memory of the parsed header, 64 bytes a value */
  MAX_METADATA = 256,
  MAX_NAME = 255,
  MAX_DEPTH = 3,
  MAX_DIGITS = 15,
  SHOWN = 80 /* bytes of a name in a sentence */
};

struct sink { /* where a sentence goes, and the file it is about */
  const char *path;
  char *error;
  size_t bytes;
};

static int fail(const struct sink *to, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static int fail(const struct sink *to, int code, const char *format, ...) {
  char sentence[512];
  va_list args;
  va_start(args, format);
  vsnprintf(sentence, sizeof sentence, format, args);
  va_end(args);
  return text_fail(code, to->error, to->bytes, "%s: %s", to->path, sentence);
}

/* -- the gate ------------------------------------------------------------------------------------------------- */

/* Length of the string at p with both quotes; 0 after a refusal. */
static size_t gate_string(const uint8_t *p, size_t bytes, const struct sink *to) {
  size_t i = 1;
  while (i < bytes && p[i] != '"') {
    const size_t length = text_utf8(p + i, bytes - i);
    if (length == 0 || p[i] < 0x20) {
      fail(to, EXIT_INPUT,
           "the header has a string with byte 0x%02x, wanted UTF-8 without control characters", p[i]);
      return 0;
    }
    if (p[i] == '\\' && bytes - i >= 6 && memcmp(p + i, "\\u0000", 6) == 0) {
      fail(to, EXIT_INPUT, "the header has a string with a NUL character");
      return 0;
    }
    i += p[i] == '\\' && bytes - i > 1 && p[i + 1] < 0x80 ? 2 : length;
  }
  if (i < bytes) return i + 1;
  fail(to, EXIT_INPUT, "the header ends inside a string");
  return 0;
}

static size_t gate_number(const uint8_t *p, size_t bytes, const struct sink *to) {
  size_t digits = 1;
  while (digits < bytes && isdigit(p[digits])) digits++;
  if (digits <= MAX_DIGITS && (digits == 1 || p[0] != '0')) return digits;
  fail(to, EXIT_INPUT,
       "the header has a number of %zu digits or with a leading zero, wanted at most %d digits", digits,
       MAX_DIGITS);
  return 0;
}

static int gate_tail(const uint8_t *p, size_t bytes, const struct sink *to) {
  for (size_t i = 0; i < bytes; i++)
    if (p[i] != ' ') return fail(to, EXIT_INPUT, "the header goes on after its object, wanted spaces only");
  return 0;
}

static int gate(const uint8_t *p, size_t bytes, const struct sink *to) {
  if (bytes == 0 || p[0] != '{') return fail(to, EXIT_INPUT, "the header does not begin with {");
  int depth = 0, values = 0;
  size_t length;
  for (size_t i = 0; i < bytes; i += length) {
    length = 1;
    if (p[i] == '"') {
      if ((length = gate_string(p + i, bytes - i, to)) == 0) return EXIT_INPUT;
    } else if (isdigit(p[i])) {
      if ((length = gate_number(p + i, bytes - i, to)) == 0) return EXIT_INPUT;
    } else if (p[i] == '{' || p[i] == '[') {
      if (++depth > MAX_DEPTH) return fail(to, EXIT_INPUT, "the header is nested deeper than %d", MAX_DEPTH);
    } else if (p[i] == '}' || p[i] == ']') {
      if (--depth == 0) return gate_tail(p + i + 1, bytes - i - 1, to);
    } else if (p[i] == ',') {
      if (++values > MAX_VALUES)
        return fail(to, EXIT_INPUT, "the header has more than %d values", MAX_VALUES);
    } else if (p[i] == 0 || strchr(": \t\r\n", p[i]) == NULL) {
      return fail(to, EXIT_INPUT,
                  "the header has byte 0x%02x outside a string, wanted whole numbers and strings", p[i]);
    }
  }
  return fail(to, EXIT_INPUT, "the header ends before its object does");
}

/* -- the schema ----------------------------------------------------------------------------------------------- */

static int tensor_bytes(const int64_t *shape, int rank, uint64_t *bytes) {
  *bytes = sizeof(float);
  for (int i = 0; i < rank; i++)
    if (shape[i] < 0 || __builtin_mul_overflow(*bytes, (uint64_t)shape[i], bytes)) return -1;
  return 0;
}

/* The whole numbers of an array; their count, or -1 when it is no such array or longer than `most`. */
static int numbers(const cJSON *array, int64_t *out, int most) {
  if (!cJSON_IsArray(array)) return -1;
  int count = 0;
  for (const cJSON *item = array->child; item; item = item->next) {
    if (!cJSON_IsNumber(item) || count == most) return -1;
    out[count++] = (int64_t)item->valuedouble;
  }
  return count;
}

static int check_entry(struct safetensors_entry *e, const cJSON *json, uint64_t data_bytes,
                       const struct sink *to) {
  char name[SHOWN];
  text_escape(name, sizeof name, e->name);
  const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(json, "dtype");
  const cJSON *shape = cJSON_GetObjectItemCaseSensitive(json, "shape");
  const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(json, "data_offsets");
  if (!cJSON_IsObject(json) || cJSON_GetArraySize(json) != 3 || !dtype || !shape || !offsets)
    return fail(to, EXIT_INPUT, "tensor %s: wanted dtype, shape and data_offsets, each once", name);
  if (!cJSON_IsString(dtype) || strcmp(dtype->valuestring, "F32") != 0) {
    char found[SHOWN];
    text_escape(found, sizeof found, cJSON_IsString(dtype) ? dtype->valuestring : "no string");
    return fail(to, EXIT_INPUT, "tensor %s: dtype is %s, wanted F32", name, found);
  }
  e->rank = numbers(shape, e->shape, SAFETENSORS_MAX_RANK);
  if (e->rank < 0)
    return fail(to, EXIT_INPUT, "tensor %s: shape is not at most %d whole numbers", name,
                SAFETENSORS_MAX_RANK);
  int64_t range[2];
  if (numbers(offsets, range, 2) != 2)
    return fail(to, EXIT_INPUT, "tensor %s: data_offsets is not two whole numbers", name);
  e->begin = (uint64_t)range[0];
  e->end = (uint64_t)range[1];
  uint64_t wanted;
  if (tensor_bytes(e->shape, e->rank, &wanted) != 0)
    return fail(to, EXIT_INPUT, "tensor %s: the product of its shape overflows", name);
  if (e->begin > e->end) return fail(to, EXIT_INPUT, "tensor %s: data_offsets run backwards", name);
  if (e->end > data_bytes)
    return fail(to, EXIT_INPUT, "tensor %s: its data ends after the end of the file", name);
  if (e->end - e->begin != wanted)
    return fail(to, EXIT_INPUT, "tensor %s: data_offsets span %llu bytes, its shape wants %llu", name,
                (unsigned long long)(e->end - e->begin), (unsigned long long)wanted);
  return 0;
}

static int check_metadata(const cJSON *metadata, const struct sink *to) {
  if (!cJSON_IsObject(metadata)) return fail(to, EXIT_INPUT, "__metadata__ is not an object");
  if (cJSON_GetArraySize(metadata) > MAX_METADATA)
    return fail(to, EXIT_INPUT, "__metadata__ has more than %d entries", MAX_METADATA);
  for (const cJSON *item = metadata->child; item; item = item->next) {
    char key[SHOWN];
    text_escape(key, sizeof key, item->string);
    if (!cJSON_IsString(item)) return fail(to, EXIT_INPUT, "__metadata__ %s: is not a string", key);
    for (const cJSON *other = metadata->child; other != item; other = other->next)
      if (strcmp(other->string, item->string) == 0)
        return fail(to, EXIT_INPUT, "__metadata__ %s: is there twice", key);
  }
  return 0;
}

static int by_name(const void *a, const void *b) {
  const struct safetensors_entry *x = a, *y = b;
  return strcmp(x->name, y->name);
}

static int by_data(const void *a, const void *b) {
  const struct safetensors_entry *x = a, *y = b;
  if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
  return (x->end > y->end) - (x->end < y->end);
}

static int check_names(struct safetensors *s, const struct sink *to) {
  char name[SHOWN];
  if (s->count > 0) qsort(s->entries, (size_t)s->count, sizeof *s->entries, by_name);
  for (int i = 0; i < s->count; i++) {
    const size_t length = strlen(s->entries[i].name);
    text_escape(name, sizeof name, s->entries[i].name);
    if (length == 0 || length > MAX_NAME)
      return fail(to, EXIT_INPUT, "a tensor has a name of %zu bytes, wanted 1 to %d", length, MAX_NAME);
    if (i > 0 && strcmp(s->entries[i - 1].name, s->entries[i].name) == 0)
      return fail(to, EXIT_INPUT, "tensor %s: is there twice", name);
  }
  return 0;
}

/* Leaves the entries in the order of the data. Empty tensors have a place in it too. */
static int check_tiling(struct safetensors *s, uint64_t data_bytes, const struct sink *to) {
  char name[SHOWN];
  uint64_t at = 0;
  if (s->count > 0) qsort(s->entries, (size_t)s->count, sizeof *s->entries, by_data);
  for (int i = 0; i < s->count; i++) {
    const struct safetensors_entry *e = &s->entries[i];
    if (e->begin != at)
      return fail(to, EXIT_INPUT,
                  "tensor %s: begins at byte %llu, wanted %llu: tensors must not overlap or leave gaps",
                  text_escape(name, sizeof name, e->name), (unsigned long long)e->begin,
                  (unsigned long long)at);
    at = e->end;
  }
  if (at == data_bytes) return 0;
  return fail(to, EXIT_INPUT, "%llu bytes follow the last tensor, wanted none",
              (unsigned long long)(data_bytes - at));
}

static int collect(struct safetensors *s, uint64_t data_bytes, const struct sink *to) {
  const int count = cJSON_GetArraySize(s->json);
  s->entries = calloc((size_t)count + 1, sizeof *s->entries);
  if (s->entries == NULL) return fail(to, EXIT_SYSTEM, "no memory for %d entries", count);
  for (const cJSON *item = s->json->child; item; item = item->next) {
    if (strcmp(item->string, "__metadata__") == 0) {
      if (s->metadata) return fail(to, EXIT_INPUT, "__metadata__ is there twice");
      s->metadata = item;
      const int failed = check_metadata(item, to);
      if (failed) return failed;
      continue;
    }
    s->entries[s->count].name = item->string;
    const int failed = check_entry(&s->entries[s->count++], item, data_bytes, to);
    if (failed) return failed;
  }
  return 0;
}

static int index_header(struct safetensors *s, const char *text, size_t bytes, uint64_t data_bytes,
                        const struct sink *to) {
  int failed = gate((const uint8_t *)text, bytes, to);
  if (failed) return failed;
  if ((s->json = cJSON_ParseWithLengthOpts(text, bytes, NULL, 0)) == NULL)
    return fail(to, EXIT_INPUT, "the header is not valid JSON");
  if ((failed = collect(s, data_bytes, to)) != 0) return failed;
  if ((failed = check_names(s, to)) != 0) return failed;
  return check_tiling(s, data_bytes, to);
}

/* -- reading --------------------------------------------------------------------------------------------------- */

static int read_at(int fd, void *into, uint64_t bytes, uint64_t offset, const struct sink *to) {
  for (uint8_t *p = into; bytes > 0;) {
    const ssize_t got = pread(fd, p, bytes < 1 << 30 ? bytes : 1 << 30, (off_t)offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail(to, EXIT_SYSTEM, "cannot be read: %s", strerror(errno));
    if (got == 0) return fail(to, EXIT_SYSTEM, "became shorter while it was read");
    p += got;
    offset += (uint64_t)got;
    bytes -= (uint64_t)got;
  }
  return 0;
}

static int read_header(struct safetensors *s, const struct sink *to) {
  struct stat status;
  if (fstat(s->fd, &status) != 0) return fail(to, EXIT_SYSTEM, "cannot be read: %s", strerror(errno));
  if (!S_ISREG(status.st_mode)) return fail(to, EXIT_INPUT, "is not a regular file");
  const uint64_t file_bytes = (uint64_t)status.st_size;
  uint64_t bytes;
  if (file_bytes < sizeof bytes)
    return fail(to, EXIT_INPUT, "is shorter than the 8 bytes of a header length");
  int failed = read_at(s->fd, &bytes, sizeof bytes, 0, to);
  if (failed) return failed;
  if (bytes > MAX_HEADER)
    return fail(to, EXIT_INPUT, "header length is %llu, wanted at most %d", (unsigned long long)bytes,
                MAX_HEADER);
  if (bytes > file_bytes - sizeof bytes)
    return fail(to, EXIT_INPUT, "header length is %llu, but only %llu bytes follow",
                (unsigned long long)bytes, (unsigned long long)(file_bytes - sizeof bytes));
  s->data_start = sizeof bytes + bytes;
  char *text = malloc(bytes + 1);
  if (text == NULL)
    return fail(to, EXIT_SYSTEM, "no memory for a header of %llu bytes", (unsigned long long)bytes);
  failed = read_at(s->fd, text, bytes, sizeof bytes, to);
  if (!failed) failed = index_header(s, text, bytes, file_bytes - s->data_start, to);
  free(text);
  return failed;
}

int safetensors_open(struct safetensors *s, const char *path, char *error, size_t error_bytes) {
  const struct sink to = {path, error, error_bytes};
  *s = (struct safetensors){.fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (s->fd < 0) return fail(&to, EXIT_INPUT, "cannot be opened: %s", strerror(errno));
  const int failed = read_header(s, &to);
  if (failed) safetensors_close(s);
  return failed;
}

void safetensors_close(struct safetensors *s) {
  if (s->fd >= 0) close(s->fd);
  cJSON_Delete(s->json);
  free(s->entries);
  *s = (struct safetensors){.fd = -1};
}

const char *safetensors_metadata(const struct safetensors *s, const char *key) {
  return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(s->metadata, key));
}

const struct safetensors_entry *safetensors_find(const struct safetensors *s, const char *name) {
  for (int i = 0; i < s->count; i++)
    if (strcmp(s->entries[i].name, name) == 0) return &s->entries[i];
  return NULL;
}

int safetensors_read(const struct safetensors *s, const struct safetensors_entry *e, float *into, char *error,
                     size_t error_bytes) {
  char name[SHOWN];
  const struct sink to = {text_escape(name, sizeof name, e->name), error, error_bytes};
  return read_at(s->fd, into, e->end - e->begin, s->data_start + e->begin, &to);
}

/* -- writing --------------------------------------------------------------------------------------------------- */

static int add_metadata(cJSON *root, const struct checkpoint_meta *meta, int count) {
  cJSON *object = cJSON_AddObjectToObject(root, "__metadata__");
  for (int i = 0; i < count; i++)
    if (!memchr(meta[i].key, 0, sizeof meta[i].key) || !memchr(meta[i].value, 0, sizeof meta[i].value) ||
        !cJSON_AddStringToObject(object, meta[i].key, meta[i].value))
      return -1;
  return 0;
}

static int add_numbers(cJSON *object, const char *key, const int64_t *values, int count) {
  cJSON *array = cJSON_AddArrayToObject(object, key);
  if (array == NULL) return -1; /* it would not take the number, and neither free it */
  for (int i = 0; i < count; i++)
    if (!cJSON_AddItemToArray(array, cJSON_CreateNumber((double)values[i]))) return -1;
  return 0;
}

/* The header of tensors that lie one after the other, padded with spaces to a multiple of 8; NULL when memory is short
 * or a metadata string has no end. */
static char *print_header(const struct tensor *tensors, int count, const struct checkpoint_meta *meta,
                          int meta_count) {
  cJSON *root = cJSON_CreateObject();
  int64_t range[2] = {0, 0};
  int failed = meta_count > 0 ? add_metadata(root, meta, meta_count) : 0;
  for (int i = 0; i < count && !failed; i++) {
    uint64_t bytes = 0;
    tensor_bytes(tensors[i].shape, tensors[i].rank, &bytes);
    range[1] = range[0] + (int64_t)bytes;
    cJSON *entry = cJSON_AddObjectToObject(root, tensors[i].name);
    failed = !cJSON_AddStringToObject(entry, "dtype", "F32") ||
             add_numbers(entry, "shape", tensors[i].shape, tensors[i].rank) ||
             add_numbers(entry, "data_offsets", range, 2);
    range[0] = range[1];
  }
  char *text = failed ? NULL : cJSON_PrintUnformatted(root);
  cJSON_Delete(root);
  const size_t length = text ? strlen(text) : 0, padded = (length + 7) / 8 * 8;
  char *grown = text ? realloc(text, padded + 1) : NULL;
  if (grown == NULL) {
    free(text);
    return NULL;
  }
  memset(grown + length, ' ', padded - length);
  grown[padded] = '\0';
  return grown;
}

static int total_bytes(const struct tensor *tensors, int count, uint64_t *total, const struct sink *to) {
  *total = 0;
  for (int i = 0; i < count; i++) {
    const struct tensor *t = &tensors[i];
    char name[SHOWN];
    uint64_t bytes = 0;
    if (t->rank < 0 || t->rank > SAFETENSORS_MAX_RANK || tensor_bytes(t->shape, t->rank, &bytes) != 0 ||
        __builtin_add_overflow(*total, bytes, total) || *total > INT64_MAX)
      return fail(to, EXIT_INPUT, "tensor %s: its shape has no size",
                  text_escape(name, sizeof name, t->name));
  }
  return 0;
}

int safetensors_write(FILE *file, const struct tensor *tensors, int count, const struct checkpoint_meta *meta,
                      int meta_count, char *error, size_t error_bytes) {
  const struct sink to = {"the file to write", error, error_bytes};
  uint64_t total;
  int failed = total_bytes(tensors, count, &total, &to);
  if (failed) return failed;
  char *header = print_header(tensors, count, meta, meta_count);
  if (header == NULL) return fail(&to, EXIT_SYSTEM, "no memory for its header, or metadata without an end");
  const uint64_t bytes = strlen(header);
  struct safetensors check = {.fd = -1};
  failed = index_header(&check, header, bytes, total, &to);
  safetensors_close(&check);
  if (!failed) {
    fwrite(&bytes, sizeof bytes, 1, file);
    fwrite(header, 1, bytes, file);
    for (int i = 0; i < count; i++) {
      tensor_bytes(tensors[i].shape, tensors[i].rank, &total);
      if (total > 0) fwrite(tensors[i].data, 1, total, file);
    }
  }
  free(header);
  return failed;
}
