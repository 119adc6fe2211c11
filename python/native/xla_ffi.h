/* SPDX-License-Identifier: Apache-2.0
 *
 * The part of XLA's FFI ABI that the handlers use, version 0.3. XLA refuses handlers of a version that it does not know.
 * Idea: only layouts and numbers, so that no header of jaxlib is needed to build. Invariant: equal to
 * jaxlib/include/xla/ffi/api/c_api.h in every offset and value named here; tests/python/test_jax_abi.py compares them. */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum {
  XLA_MAJOR = 0,
  XLA_MINOR = 3
};

enum xla_extension_type {
  XLA_METADATA = 1
};
enum xla_stage {
  XLA_INSTANTIATE = 0,
  XLA_PREPARE = 1,
  XLA_INITIALIZE = 2,
  XLA_EXECUTE = 3
};
enum xla_traits {
  XLA_COMMAND_BUFFER = 1
};
enum xla_kind {
  XLA_BUFFER = 1,
  XLA_ARRAY = 1,
  XLA_STRING = 4
}; /* of operands and results; of attributes */
enum xla_code {
  XLA_INVALID_ARGUMENT = 3,
  XLA_RESOURCE_EXHAUSTED = 8,
  XLA_UNIMPLEMENTED = 12,
  XLA_INTERNAL = 13
};
enum xla_dtype {
  XLA_PRED = 1,
  XLA_S32 = 4,
  XLA_U8 = 6,
  XLA_F16 = 10,
  XLA_F32 = 11,
  XLA_BF16 = 16
};

/* Every struct but the spans starts with its size as the writer knows it. */
struct xla_extension {
  size_t size;
  enum xla_extension_type type;
  struct xla_extension *next;
};

#define XLA_HEAD \
  size_t size;   \
  struct xla_extension *extensions;

struct xla_version {
  XLA_HEAD
  int major, minor;
};

struct xla_metadata {
  size_t size;
  struct xla_version version;
  uint32_t traits;
};

struct xla_metadata_extension {
  struct xla_extension head;
  struct xla_metadata *metadata;
};

struct xla_span {
  const char *data;
  size_t length;
};

struct xla_array { /* an attribute */
  enum xla_dtype dtype;
  size_t length;
  void *data;
};

struct xla_buffer { /* an operand or a result */
  XLA_HEAD
  enum xla_dtype dtype;
  void *data;
  int64_t rank;
  int64_t *dims;
};

struct xla_buffers {
  XLA_HEAD
  int64_t count;
  enum xla_kind *kinds;
  struct xla_buffer **items;
};

struct xla_attributes {
  XLA_HEAD
  int64_t count;
  enum xla_kind *kinds;
  struct xla_span **names;
  void **items;
};

typedef struct xla_error xla_error;

struct xla_error_args {
  XLA_HEAD
  const char *message;
  enum xla_code code;
};

struct xla_context_args { /* of both queries below; `value` is what they write */
  XLA_HEAD
  void *context;
  union {
    void *stream;
    int32_t device;
  } value;
};

struct xla_api {
  XLA_HEAD
  struct xla_version version;
  const void *internal;
  xla_error *(*create_error)(struct xla_error_args *args);
  void *unused[3];
  xla_error *(*get_stream)(struct xla_context_args *args);
  void *more_unused[12];
  xla_error *(*get_device)(struct xla_context_args *args);
};

struct xla_frame { /* what a handler is called with */
  XLA_HEAD
  const struct xla_api *api;
  void *context;
  enum xla_stage stage;
  struct xla_buffers operands;
  struct xla_buffers results;
  struct xla_attributes attributes;
};
