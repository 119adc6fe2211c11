/* SPDX-License-Identifier: Apache-2.0
 *
 * Checkpoint files: every way in which one can be malformed has its sentence, damage is refused or harmless, and a save
 * that fails leaves the folder as it was. */
#include "files.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <sys/resource.h>

#include "../tools/train/checkpoint.h"

/* The order of the calls that make a save durable, and a switch that makes one of them fail. */
static char calls[16];
static char failing;
int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __real_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to);

static int recorded(char call) {
  const size_t length = strlen(calls);
  if (length + 1 < sizeof calls) calls[length] = call;
  errno = EIO;
  return failing == call;
}
int __wrap_fsync(int fd) {
  struct stat status;
  return recorded(fstat(fd, &status) == 0 && S_ISDIR(status.st_mode) ? 'd' : 'f') ? -1 : __real_fsync(fd);
}
int __wrap_rename(const char *from, const char *to) { return recorded('r') ? -1 : __real_rename(from, to); }

/* -- malformed files ------------------------------------------------------------------------------------------- */

static int open_bytes(const void *data, size_t count, char error[512]) {
  char dir[128], path[256];
  struct safetensors s;
  files_make(dir);
  files_write(files_path(path, dir, "x"), data, count);
  error[0] = '\0';
  const int failed = safetensors_open(&s, path, error, 512);
  if (!failed) safetensors_close(&s);
  files_remove(dir);
  return failed;
}

/* A file with this header and that many bytes of data. */
static int open_header(const char *header, size_t length, size_t data_bytes, char error[512]) {
  char *file = calloc(1, 8 + length + data_bytes);
  const uint64_t prefix = length;
  memcpy(file, &prefix, 8);
  memcpy(file + 8, header, length);
  const int failed = open_bytes(file, 8 + length + data_bytes, error);
  free(file);
  return failed;
}

#define A(fields) "{\"a\":{" fields "}}"
#define GOOD(name, from, to) \
  "\"" name "\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[" #from "," #to "]}"

static const struct {
  const char *header;
  size_t data_bytes;
  const char *sentence; /* NULL: accepted */
} headers[] = {
    {"{}", 0, NULL},
    {"{}   ", 0, NULL},
    {"{" GOOD("a", 0, 4) "}", 4, NULL},
    {"{" GOOD("b", 4, 8) "," GOOD("../../etc/x", 0, 4) "}", 8, NULL}, /* a name is never a path */
    {A("\"data_offsets\":[0,4],\"shape\":[],\"dtype\":\"F32\""), 4, NULL},
    {A("\"dtype\":\"F32\",\"shape\":[3,0],\"data_offsets\":[0,0]"), 0, NULL},
    {"{\"__metadata__\":{\"a\":\"\\u00e9\\n\"}}", 0, NULL},
    /* not the JSON of the format */
    {"", 0, "does not begin with {"},
    {"[]", 0, "does not begin with {"},
    {" {}", 0, "does not begin with {"},
    {"{", 0, "ends before its object does"},
    {"{\"a", 0, "ends inside a string"},
    {"{\"a\\", 0, "ends inside a string"},
    {"{}x", 0, "goes on after its object, wanted spaces only"},
    {"{}\n", 0, "goes on after its object, wanted spaces only"},
    {"{}{}", 0, "goes on after its object, wanted spaces only"},
    {"{]", 0, "is not valid JSON"},
    {"{,}", 0, "is not valid JSON"},
    {"{\"a\":}", 0, "is not valid JSON"},
    {"{\"a\" 1}", 0, "is not valid JSON"},
    {"{" GOOD("a", 0, 4) ",}", 4, "is not valid JSON"},
    {"{\"\\ud800\":{}}", 0, "is not valid JSON"},
    {"{\"\\udc00x\":{}}", 0, "is not valid JSON"},
    {"{\"\\x\":{}}", 0, "is not valid JSON"},
    {"{\"a\\u0000b\":{}}", 0, "has a string with a NUL character"},
    {"{\"a\xff\":{}}", 0, "has a string with byte 0xff, wanted UTF-8"},
    {"{\"\xc0\x80\":{}}", 0, "has a string with byte 0xc0, wanted UTF-8"},
    {"{\"\xed\xa0\x80\":{}}", 0, "has a string with byte 0xed, wanted UTF-8"},
    {"{\"a\nb\":{}}", 0, "has a string with byte 0x0a, wanted UTF-8"},
    {"{\"a\":null}", 0, "byte 0x6e outside a string"},
    {"{\"a\":true}", 0, "byte 0x74 outside a string"},
    {"{\v}", 0, "byte 0x0b outside a string"},
    /* tensors that are none */
    {"{\"a\":\"x\"}", 0, "tensor a: wanted dtype, shape and data_offsets, each once"},
    {"{\"a\":[1,2,3]}", 0, "tensor a: wanted dtype, shape and data_offsets, each once"},
    {"{\"a\":{}}", 0, "tensor a: wanted dtype, shape and data_offsets, each once"},
    {A("\"dtype\":\"F32\",\"shape\":[1],\"shape\":[1]"), 4, "each once"},
    {A("\"dtype\":\"F32\",\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,4]"), 4, "each once"},
    {A("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1"), 4, "each once"},
    {A("\"Dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]"), 4, "each once"},
    {A("\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]"), 4, "tensor a: dtype is BF16, wanted F32"},
    {A("\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]"), 1, "tensor a: dtype is F4, wanted F32"},
    {A("\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]"), 4, "tensor a: dtype is no string, wanted F32"},
    {A("\"dtype\":\"\\u001b[2J\",\"shape\":[1],\"data_offsets\":[0,4]"), 4, "dtype is \\x1b[2J, wanted"},
    {"{\"\\u001b[2J\xc3\xa9\":{}}", 0, "tensor \\x1b[2J\\xc3\\xa9: wanted"},
    {A("\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]"), 4, "byte 0x2d outside a string"},
    {A("\"dtype\":\"F32\",\"shape\":[1e3],\"data_offsets\":[0,4]"), 4, "byte 0x65 outside a string"},
    {A("\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]"), 4, "byte 0x2e outside a string"},
    {A("\"dtype\":\"F32\",\"shape\":[01],\"data_offsets\":[0,4]"), 4, "or with a leading zero"},
    {A("\"dtype\":\"F32\",\"shape\":[9223372036854775808],\"data_offsets\":[0,4]"), 4, "number of 19 digits"},
    {A("\"dtype\":\"F32\",\"shape\":[18446744073709551616],\"data_offsets\":[0,4]"), 4,
     "number of 20 digits"},
    {A("\"dtype\":\"F32\",\"shape\":[1,1,1,1,1],\"data_offsets\":[0,4]"), 4,
     "shape is not at most 4 whole numbers"},
    {A("\"dtype\":\"F32\",\"shape\":[\"1\"],\"data_offsets\":[0,4]"), 4,
     "shape is not at most 4 whole numbers"},
    {A("\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]"), 4, "shape is not at most 4 whole numbers"},
    {A("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4]"), 4, "data_offsets is not two whole numbers"},
    {A("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,4]"), 4,
     "data_offsets is not two whole numbers"},
    {A("\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]"), 0, "shape overflows"},
    {A("\"dtype\":\"F32\",\"shape\":[0,4294967296,4294967296],\"data_offsets\":[0,0]"), 0, NULL},
    /* tensors that do not tile the data */
    {A("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]"), 4, "tensor a: data_offsets run backwards"},
    {"{" GOOD("a", 0, 4) "}", 3, "tensor a: its data ends after the end of the file"},
    {A("\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[100,100]"), 4, "ends after the end of the file"},
    {"{" GOOD("a", 0, 3) "}", 3, "tensor a: data_offsets span 3 bytes, its shape wants 4"},
    {"{" GOOD("a", 0, 4) "," GOOD("b", 8, 12) "}", 12, "tensor b: begins at byte 8, wanted 4"},
    {"{" GOOD("a", 0, 4) "," GOOD("b", 2, 6) "}", 6, "tensor b: begins at byte 2, wanted 4"},
    {"{" GOOD("a", 0, 4) "," GOOD("b", 0, 4) "}", 4, "begins at byte 0, wanted 4"},
    {"{" GOOD("a", 1, 5) "}", 5, "tensor a: begins at byte 1, wanted 0"},
    {"{" GOOD("a", 0, 4) "}", 9, "5 bytes follow the last tensor, wanted none"},
    {"{}", 1, "1 bytes follow the last tensor, wanted none"},
    /* names */
    {"{" GOOD("", 0, 4) "}", 4, "has a name of 0 bytes, wanted 1 to 255"},
    {"{" GOOD("a", 0, 4) "," GOOD("a", 4, 8) "}", 8, "tensor a: is there twice"},
    {"{" GOOD("a", 0, 4) "," GOOD("\\u0061", 4, 8) "}", 8, "tensor a: is there twice"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "__metadata__ is there twice"},
    {"{\"__metadata__\":[]}", 0, "__metadata__ is not an object"},
    {"{\"__metadata__\":{\"a\":1}}", 0, "__metadata__ a: is not a string"},
    {"{\"__metadata__\":{\"a\":{}}}", 0, "__metadata__ a: is not a string"},
    {"{\"__metadata__\":{\"a\":\"\",\"a\":\"\"}}", 0, "__metadata__ a: is there twice"},
};

TEST(a_malformed_header_has_its_sentence) {
  char error[512];
  for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
    const int failed =
        open_header(headers[i].header, strlen(headers[i].header), headers[i].data_bytes, error);
    if (headers[i].sentence == NULL)
      EXPECT(failed == 0, "%s: %s", headers[i].header, error);
    else
      EXPECT(failed == 2 && strstr(error, headers[i].sentence), "%s: got %d \"%s\", want \"%s\"",
             headers[i].header, failed, error, headers[i].sentence);
  }
}

TEST(a_wrong_header_length_is_refused) {
  const struct {
    uint64_t length;
    size_t file_bytes;
    const char *sentence;
  } cases[] = {{0, 8, "does not begin with {"},
               {3, 10, "header length is 3, but only 2 bytes follow"},
               {100000000, 10, "but only 2 bytes follow"},
               {100000001, 10, "header length is 100000001, wanted at most 100000000"},
               {1ull << 63, 10, "wanted at most 100000000"},
               {UINT64_MAX, 10, "wanted at most 100000000"}};
  char error[512], file[10] = "........{}";
  for (size_t bytes = 0; bytes < 8; bytes++)
    EXPECT(open_bytes(file, bytes, error) == 2 && strstr(error, "shorter than the 8 bytes"), "%zu: %s", bytes,
           error);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    memcpy(file, &cases[i].length, 8);
    EXPECT(open_bytes(file, cases[i].file_bytes, error) == 2 && strstr(error, cases[i].sentence),
           "got %s, want %s", error, cases[i].sentence);
  }
}

/* before, then `unit` count times, then after. */
static void expect_long(const char *before, const char *unit, int count, const char *after,
                        const char *sentence) {
  const size_t step = strlen(unit), room = strlen(before) + step * (size_t)count + strlen(after);
  char *header = malloc(room + 1), *p = stpcpy(header, before), error[512];
  for (int i = 0; i < count; i++) p = stpcpy(p, unit);
  strcpy(p, after);
  EXPECT(open_header(header, room, 4, error) == 2 && strstr(error, sentence), "got %s, want %s", error,
         sentence);
  free(header);
}

TEST(an_oversized_header_is_refused_before_it_costs_memory) {
  expect_long("{\"a\":", "[", 100000, "", "is nested deeper than 3");
  expect_long("{\"a\":", "{\"a\":", 100000, "", "is nested deeper than 3");
  expect_long("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4],\"shape\":[1", ",1", 999, "]}}",
              "shape is not at most 4 whole numbers");
  expect_long("{", GOOD("a", 0, 4) ",", 1000000, "\"b\":{}}", "has more than 524288 values");
  expect_long("{\"", "name", 10 << 18, "\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
              "has a name of 10485760 bytes, wanted 1 to 255");
  expect_long("{\"__metadata__\":{\"a\":\"\"", ",\"a\":\"\"", 256, "}}", "has more than 256 entries");
}

TEST(what_is_no_file_is_refused) {
  char error[512];
  struct safetensors s;
  EXPECT(safetensors_open(&s, "/nonexistent/x", error, 512) == 2 &&
             strstr(error, "/nonexistent/x: cannot be opened"),
         "%s", error);
  EXPECT(safetensors_open(&s, "/tmp", error, 512) == 2 && strstr(error, "is not a regular file"), "%s",
         error);
}

/* -- round trip ------------------------------------------------------------------------------------------------ */

static float one[6] = {1, -0.0f, 0x1p-149f, INFINITY, 3.25f, -7}, two[4] = {0.5f, 2, 4, 8}, three[1] = {9};
static const struct tensor tensors[] = {{"layer.0.w1", one, {2, 3}, 2},
                                        {"odd \"name\" \\ \xc3\xa9", two, {1, 2, 1, 2}, 4},
                                        {"empty", NULL, {0, 5}, 2},
                                        {"scalar", three, {0}, 0}};
static const struct checkpoint_meta meta[] = {{"step", "120"}, {"note", "a \"quoted\" line\n"}};
enum {
  TENSORS = sizeof tensors / sizeof *tensors
};

static void set_nan(void) {
  const uint32_t bits = 0x7fa12345u; /* a signalling NaN with a payload */
  memcpy(&one[5], &bits, sizeof bits);
}

/* The tensors that can be read are the ones that were written. */
static void expect_same(const struct checkpoint *c, int all) {
  for (int i = 0; i < TENSORS; i++) {
    float got[6] = {0};
    char error[512];
    struct tensor into = tensors[i];
    size_t bytes = sizeof *got;
    for (int j = 0; j < into.rank; j++) bytes *= (size_t)into.shape[j];
    into.data = got;
    const int failed = checkpoint_read(c, &into, error, 512);
    EXPECT(!failed || !all, "%s: %s", into.name, error);
    EXPECT(failed || bytes == 0 || memcmp(got, tensors[i].data, bytes) == 0, "%s: other bits", into.name);
  }
}

TEST(a_checkpoint_comes_back_bit_by_bit) {
  char dir[128], error[512];
  struct checkpoint c;
  set_nan();
  files_make(dir);
  REQUIRE(checkpoint_save(dir, tensors, TENSORS, meta, 2, error, 512) == 0, "%s", error);
  REQUIRE(checkpoint_open(&c, dir, error, 512) == 0, "%s", error);
  EXPECT(checkpoint_count(&c) == TENSORS, "%d", checkpoint_count(&c));
  EXPECT(strcmp(checkpoint_meta(&c, "step"), "120") == 0 && checkpoint_meta(&c, "Step") == NULL, "metadata");
  EXPECT(strcmp(checkpoint_meta(&c, "note"), meta[1].value) == 0, "metadata");
  expect_same(&c, 1);
  float room[6];
  const struct tensor other = {"layer.0.w1", room, {3, 2}, 2}, absent = {"w\x1b", room, {1}, 1};
  EXPECT(checkpoint_read(&c, &other, error, 512) == 2 && strstr(error, "has shape [2,3], wanted [3,2]"), "%s",
         error);
  EXPECT(checkpoint_read(&c, &absent, error, 512) == 2 && strstr(error, "has no tensor w\\x1b"), "%s", error);
  const struct tensor longer = {"layer.0.w1", room, {2, 3, 1}, 3};
  EXPECT(checkpoint_read(&c, &longer, error, 512) == 2 && strstr(error, "wanted [2,3,1]"), "%s", error);
  EXPECT(truncate(c.path, 200) == 0, "truncate");
  struct tensor last = tensors[3];
  last.data = room;
  EXPECT(checkpoint_read(&c, &last, error, 512) == 3 && strstr(error, "became shorter"), "%s", error);
  checkpoint_close(&c);
  files_remove(dir);
}

TEST(the_written_bytes_are_those_of_the_kept_file) {
  char dir[128], path[256], error[512];
  set_nan();
  files_make(dir);
  EXPECT(checkpoint_save(dir, tensors, TENSORS, meta, 2, error, 512) == 0, "%s", error);
  struct bytes got = files_read(files_path(path, dir, "checkpoint.safetensors"));
  struct bytes want = files_read("tests/files/kept.safetensors");
  EXPECT(got.data && want.data && got.count == want.count && memcmp(got.data, want.data, got.count) == 0,
         "%zu and %zu bytes", got.count, want.count);
  free(got.data);
  free(want.data);
  files_remove(dir);
}

TEST(the_writer_refuses_what_the_reader_would) {
  const struct {
    struct tensor pair[2];
    const char *sentence;
  } cases[] = {{{{"a", one, {1}, 1}, {"a", one, {1}, 1}}, "tensor a: is there twice"},
               {{{"", one, {1}, 1}, {"b", one, {1}, 1}}, "has a name of 0 bytes"},
               {{{"a\xff", one, {1}, 1}, {"b", one, {1}, 1}}, "byte 0xff"},
               {{{"a", one, {-1}, 1}, {"b", one, {1}, 1}}, "tensor a: its shape has no size"},
               {{{"a", one, {1}, 5}, {"b", one, {1}, 1}}, "tensor a: its shape has no size"},
               {{{"a", one, {INT64_MAX, 2}, 2}, {"b", one, {1}, 1}}, "tensor a: its shape has no size"}};
  char dir[128], error[512];
  files_make(dir);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    EXPECT(checkpoint_save(dir, cases[i].pair, 2, NULL, 0, error, 512) == 2 &&
               strstr(error, cases[i].sentence),
           "got %s, want %s", error, cases[i].sentence);
  EXPECT(files_count(dir) == 0, "something was left behind");
  files_remove(dir);
}

/* -- damage ---------------------------------------------------------------------------------------------------- */

static void expect_harmless(const char *dir, const char *what, size_t at) {
  char error[512] = "";
  struct checkpoint c;
  const int failed = checkpoint_open(&c, dir, error, 512);
  EXPECT(!failed || error[0], "%s at %zu: refused without a sentence", what, at);
  if (failed) return;
  expect_same(&c, 0);
  checkpoint_close(&c);
}

TEST(a_damaged_file_is_refused_or_harmless) {
  char dir[128], path[256], error[512];
  struct checkpoint c;
  set_nan();
  files_make(dir);
  files_path(path, dir, "checkpoint.safetensors");
  struct bytes good = files_read("tests/files/kept.safetensors");
  REQUIRE(good.data != NULL, "tests/files/kept.safetensors is missing");
  const size_t header_end =
      8 + (size_t)(unsigned char)good.data[0] + ((size_t)(unsigned char)good.data[1] << 8);
  for (size_t bytes = 0; bytes < good.count; bytes++) {
    files_write(path, good.data, bytes);
    EXPECT(checkpoint_open(&c, dir, error, 512) == 2, "cut at %zu", bytes);
  }
  files_write(path, good.data, good.count + 1);
  EXPECT(checkpoint_open(&c, dir, error, 512) == 2, "a byte more");
  for (size_t at = 0; at < header_end; at++)
    for (int bit = 0; bit < 8; bit++) {
      good.data[at] = (char)(good.data[at] ^ (1 << bit));
      files_write(path, good.data, good.count);
      expect_harmless(dir, "flip", at);
      good.data[at] = (char)(good.data[at] ^ (1 << bit));
    }
  uint64_t seed = 7;
  for (size_t round = 0; round < 4000; round++) {
    struct bytes bad = {malloc(good.count), good.count};
    memcpy(bad.data, good.data, good.count);
    for (uint64_t n = 1 + test_random(&seed) % 3; n > 0; n--) {
      static const char likely[] = "{}[]\",:0129\\\xff\x00 eu";
      bad.data[8 + test_random(&seed) % (header_end - 8)] = likely[test_random(&seed) % (sizeof likely - 1)];
    }
    files_write(path, bad.data, bad.count);
    expect_harmless(dir, "round", round);
    free(bad.data);
  }
  free(good.data);
  files_remove(dir);
}

/* -- saving ---------------------------------------------------------------------------------------------------- */

TEST(a_save_syncs_the_file_then_renames_then_syncs_the_folder) {
  char dir[128], error[512];
  files_make(dir);
  memset(calls, 0, sizeof calls);
  EXPECT(checkpoint_save(dir, tensors, TENSORS, meta, 2, error, 512) == 0, "%s", error);
  EXPECT(strcmp(calls, "frd") == 0, "%s", calls);
  EXPECT(files_count(dir) == 1, "more than the checkpoint is left");
  files_remove(dir);
}

/* The checkpoint of three tensors is there, whole and alone. */
static void expect_old(const char *dir, const char *what, int failed, const char *error,
                       const char *sentence) {
  struct checkpoint c;
  char ignored[512];
  EXPECT(failed == 3 && strstr(error, sentence), "%s: got %d \"%s\", want \"%s\"", what, failed, error,
         sentence);
  EXPECT(files_count(dir) == 1, "%s: something was left behind", what);
  REQUIRE(checkpoint_open(&c, dir, ignored, 512) == 0, "%s: the old file is gone: %s", what, ignored);
  EXPECT(checkpoint_count(&c) == 3, "%s: %d tensors", what, checkpoint_count(&c));
  checkpoint_close(&c);
}

TEST(a_failed_save_leaves_the_old_checkpoint) {
  char dir[128], error[512];
  files_make(dir);
  REQUIRE(checkpoint_save(dir, tensors, 3, meta, 2, error, 512) == 0, "%s", error);
  for (const char *which = "fr"; *which; which++) {
    failing = *which;
    const int failed = checkpoint_save(dir, tensors, TENSORS, meta, 2, error, 512);
    failing = 0;
    expect_old(dir, *which == 'f' ? "fsync" : "rename", failed, error,
               "cannot be written: Input/output error");
  }
  /* A full disk, played by a limit on the size of files; large enough that the first write already meets it. */
  const struct tensor big = {"big", calloc(1 << 16, sizeof(float)), {1 << 16}, 1};
  struct rlimit before, small;
  getrlimit(RLIMIT_FSIZE, &before);
  small = (struct rlimit){4096, before.rlim_max};
  signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  const int failed = checkpoint_save(dir, &big, 1, NULL, 0, error, 512);
  setrlimit(RLIMIT_FSIZE, &before);
  expect_old(dir, "full disk", failed, error, "cannot be written: File too large");
  free(big.data);
  files_remove(dir);
}

TEST(a_folder_that_is_none_is_refused) {
  char dir[128], path[256], error[512];
  files_make(dir);
  EXPECT(checkpoint_save(files_path(path, dir, "no"), tensors, 1, NULL, 0, error, 512) == 3, "%s", error);
  files_write(files_path(path, dir, "file"), "x", 1);
  EXPECT(checkpoint_save(path, tensors, 1, NULL, 0, error, 512) == 3 && strstr(error, "Not a directory"),
         "%s", error);
  mkdir(files_path(path, dir, "checkpoint.safetensors"), 0777);
  EXPECT(checkpoint_save(dir, tensors, 1, NULL, 0, error, 512) == 3 && strstr(error, "Is a directory"), "%s",
         error);
  EXPECT(files_count(dir) == 2, "something was left behind");
  struct checkpoint c;
  EXPECT(checkpoint_open(&c, dir, error, 512) == 2 && strstr(error, "is not a regular file"), "%s", error);
  files_remove(dir);
}

TEST_MAIN()
