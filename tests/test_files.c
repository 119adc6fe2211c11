/* SPDX-License-Identifier: Apache-2.0
 *
 * The text that is trained on, its n-gram baseline, the log, the page and the progress line. */
#include "files.h"

#include <math.h>

#include "../tools/train/corpus.h"
#include "../tools/train/ngram.h"
#include "../tools/train/progress.h"
#include "../tools/train/report.h"
#include "../tools/train/text.h"

/* -- corpus ---------------------------------------------------------------------------------------------------- */

/* Loads one file of these bytes. */
static int load_bytes(struct corpus *c, const void *data, size_t count, char error[512]) {
  char dir[128], path[256];
  files_make(dir);
  files_write(files_path(path, dir, "text"), data, count);
  char *const files[] = {path};
  const int failed = corpus_load(c, files, 1, error, 512);
  files_remove(dir);
  return failed;
}

/* Text in which every 8 bytes are distinct. */
static char *numbered(size_t bytes) {
  char *text = malloc(bytes + 9);
  for (size_t at = 0; at < bytes; at += 8) sprintf(text + at, "%07zu\n", at / 8);
  return text;
}

TEST(a_split_is_disjoint_and_exhaustive) {
  const size_t sizes[] = {4096, 81920, 163840, 90000, 250000};
  for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
    const size_t bytes = sizes[s], block = bytes / 10 < 8192 ? bytes / 10 : 8192;
    char *text = numbered(bytes), error[512];
    struct corpus c;
    REQUIRE(load_bytes(&c, text, bytes, error) == 0, "%s", error);
    EXPECT(c.train_bytes + c.val_bytes == bytes, "%zu + %zu bytes of %zu", c.train_bytes, c.val_bytes, bytes);
    EXPECT(c.val_bytes * 20 >= bytes && c.val_bytes * 8 <= bytes, "%zu of %zu held out", c.val_bytes, bytes);
    size_t train = 0, val = 0;
    for (size_t i = 0; i < bytes; i++) {
      const int held_out = i / block % 10 == 9;
      const uint8_t got = held_out ? c.val[val++] : c.train[train++];
      REQUIRE(got == (uint8_t)text[i], "byte %zu of %zu", i, bytes);
    }
    EXPECT(train == c.train_bytes && val == c.val_bytes, "a part is longer than its blocks");
    corpus_free(&c);
    free(text);
  }
}

static void expect_refused(const void *data, size_t count, const char *sentence) {
  struct corpus c;
  char error[512] = "";
  const int failed = load_bytes(&c, data, count, error);
  EXPECT(failed == 2 && strstr(error, sentence), "got %d \"%s\", want \"%s\"", failed, error, sentence);
  EXPECT(c.train == NULL && c.val == NULL, "a refused text is still held");
}

TEST(what_is_no_text_is_refused) {
  char *text = numbered(8192);
  expect_refused(text, 0, "is empty");
  expect_refused(text, 4095, "the text has 4095 bytes, wanted at least 4096");
  text[5000] = '\0';
  expect_refused(text, 8192, "is binary: it has NUL bytes");
  text[5000] = 'x';
  memset(text, 0xff, 820);
  expect_refused(text, 8192, "is binary: more than a tenth of it is neither printable nor UTF-8");
  memset(text, 0x01, 820);
  expect_refused(text, 8192, "is binary: more than a tenth of it is neither printable nor UTF-8");
  char error[512];
  struct corpus c;
  text[0] = 'x';
  EXPECT(load_bytes(&c, text, 8192, error) == 0, "a tenth of odd bytes is taken: %s", error);
  corpus_free(&c);
  for (size_t i = 0; i < 8190; i += 3) memcpy(text + i, "\xe2\x82\xac", 3);
  EXPECT(load_bytes(&c, text, 8190, error) == 0, "UTF-8 is text: %s", error);
  corpus_free(&c);
  free(text);
}

TEST(what_is_no_file_is_refused) {
  char dir[128], path[256], error[512];
  struct corpus c;
  files_make(dir);
  char *const missing[] = {"/nonexistent/x"}, *const folder[] = {dir}, *const pipe[] = {path};
  EXPECT(corpus_load(&c, missing, 1, error, 512) == 2 &&
             strcmp(error, "/nonexistent/x: cannot be opened: No such file or directory") == 0,
         "%s", error);
  EXPECT(corpus_load(&c, folder, 1, error, 512) == 2 && strstr(error, ": is a folder, wanted text files"),
         "%s", error);
  mkfifo(files_path(path, dir, "pipe"), 0600);
  EXPECT(corpus_load(&c, pipe, 1, error, 512) == 2 && strstr(error, ": is not a regular file"), "%s", error);
  files_remove(dir);
}

TEST(the_default_text_is_the_source_tree) {
  struct corpus a, b;
  char error[512];
  char *const back = getcwd(NULL, 0);
  REQUIRE(corpus_load(&a, NULL, 0, error, 512) == 0, "%s", error);
  EXPECT(a.train_bytes + a.val_bytes > 100000, "%zu bytes", a.train_bytes + a.val_bytes);
  EXPECT(memmem(a.train, a.train_bytes, "moe_context_create", 18), "is some other tree");
  EXPECT(chdir("tests/problems") == 0 && corpus_load(&b, NULL, 0, error, 512) == 0, "%s", error);
  EXPECT(corpus_hash(&a) == corpus_hash(&b), "depends on the current folder");
  b.val[b.val_bytes - 1] ^= 1;
  EXPECT(corpus_hash(&a) != corpus_hash(&b), "the hash misses the last byte");
  corpus_free(&a);
  corpus_free(&b);
  EXPECT(back && chdir(back) == 0, "cannot go back");
  free(back);
}

/* -- n-gram ---------------------------------------------------------------------------------------------------- */

static double bits(const char *train, const char *val, int order) {
  const struct corpus c = {(uint8_t *)(uintptr_t)train, strlen(train), (uint8_t *)(uintptr_t)val,
                           strlen(val)};
  return ngram_bits_per_byte(&c, order);
}

TEST(ngram_agrees_with_a_text_counted_by_hand) {
  /* "aab": a twice, b once, so n = 3, t = 2; after a: a once, b once, so n = 2, t = 2; nothing follows b. */
  const double a = (2 + 2 / 256.0) / 5, b = (1 + 2 / 256.0) / 5, c = (2 / 256.0) / 5;
  const double b_after_a = (1 + 2 * b) / 4, c_after_a = 2 * c / 4;
  const struct {
    const char *val;
    int order;
    double p; /* of the whole val */
  } cases[] = {{"a", 0, a},
               {"b", 0, b},
               {"c", 0, c},
               {"abc", 0, a * b * c},
               {"ab", 1, a * b_after_a},
               {"ac", 1, a * c_after_a},
               {"aba", 1, a * b_after_a * a},
               {"ca", 1, c * a}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const double got = bits("aab", cases[i].val, cases[i].order);
    const double want = -log2(cases[i].p) / (double)strlen(cases[i].val);
    EXPECT(fabs(got - want) < 1e-12, "%s, order %d: got %.9f, want %.9f", cases[i].val, cases[i].order, got,
           want);
  }
  EXPECT(isnan(bits("a", "", 2)) && isnan(bits("a", "a", -1)) && isnan(bits("a", "a", 7)), "not NAN");
}

TEST(ngram_probabilities_add_to_one) {
  double sum = 0;
  for (int byte = 0; byte < 256; byte++) { /* the byte after "he" */
    uint8_t val[3] = {'h', 'e', (uint8_t)byte};
    char train[] = "the hen then heard the other hen";
    struct corpus c = {(uint8_t *)train, strlen(train), val, 2};
    const double before = 2 * ngram_bits_per_byte(&c, 2);
    c.val_bytes = 3;
    sum += exp2(before - 3 * ngram_bits_per_byte(&c, 2));
  }
  EXPECT(fabs(sum - 1) < 1e-9, "%.12f", sum);
}

TEST(longer_contexts_are_better_on_source_text) {
  struct corpus c;
  char error[512];
  REQUIRE(corpus_load(&c, NULL, 0, error, 512) == 0, "%s", error);
  const double zero = ngram_bits_per_byte(&c, 0), two = ngram_bits_per_byte(&c, 2),
               four = ngram_bits_per_byte(&c, 4);
  EXPECT(four < two && two < zero && zero < 8 && four > 0.5, "%.3f %.3f %.3f", zero, two, four);
  corpus_free(&c);
}

/* -- report ---------------------------------------------------------------------------------------------------- */

enum {
  LAYERS = 2,
  EXPERTS = 3
};

static int add_row(struct report *r, int64_t step, double val) {
  float load[LAYERS * EXPERTS] = {0.5f, 0.25f, 0.25f, 0, 0.75f, 0.25f};
  char error[512] = "";
  const struct report_row row = {.step = step,
                                 .loss = 1.5,
                                 .train_bpb = 2.25 + 1.0 / (double)(step + 1),
                                 .val_bpb = val,
                                 .tokens_per_s = 12345,
                                 .grad_norm = 0.125,
                                 .learning_rate = 1e-3,
                                 .balance_loss = 1,
                                 .load = load};
  const int failed = report_add(r, &row, error, 512);
  EXPECT(!failed, "%s", error);
  return failed;
}

static struct report *open_report(const char *dir, int resume) {
  char error[512] = "";
  struct report *r = report_open(dir, LAYERS, EXPERTS, resume, error, 512);
  EXPECT(r != NULL, "%s", error);
  return r;
}

/* log.csv of a fresh run with these steps. */
static void write_steps(const char *dir, int first, int last) {
  struct report *r = open_report(dir, 0);
  for (int step = first; r && step <= last; step++) add_row(r, step, step == 2 ? 2.5 : NAN);
  report_close(r);
}

TEST(the_log_has_one_line_a_row) {
  char dir[128], path[256];
  files_make(dir);
  write_steps(files_path(path, dir, "deep/er"), 1, 2);
  struct bytes got = files_read(files_path(path, dir, "deep/er/log.csv"));
  const char *want =
      "step,loss,train_bpb,val_bpb,tokens_per_s,grad_norm,learning_rate,balance_loss,max_over_mean_load,"
      "layer0_expert0,layer0_expert1,layer0_expert2,layer1_expert0,layer1_expert1,layer1_expert2\n"
      "1,1.5,2.75,,12345,0.125,0.001,1,2.25,0.5,0.25,0.25,0,0.75,0.25\n"
      "2,1.5,2.58333333,2.5,12345,0.125,0.001,1,2.25,0.5,0.25,0.25,0,0.75,0.25\n";
  EXPECT(got.data && strcmp(got.data, want) == 0, "%s", got.data);
  free(got.data);
  files_remove(dir);
}

/* Two logs: one written in a go, one cut off in the middle of a line, resumed at step 5 and written to the end. */
TEST(a_resumed_log_is_that_of_a_run_that_was_never_stopped) {
  char dir[128], path[256];
  files_make(dir);
  write_steps(dir, 1, 9);
  struct bytes want = files_read(files_path(path, dir, "log.csv"));
  files_write(path, want.data, want.count - 30);
  struct report *r = open_report(dir, 5);
  for (int step = 6; r && step <= 9; step++) add_row(r, step, NAN);
  report_close(r);
  struct bytes got = files_read(path);
  EXPECT(got.data && want.data && strcmp(got.data, want.data) == 0, "got\n%s", got.data);
  EXPECT(files_count(dir) == 1, "something was left behind");
  free(got.data);
  free(want.data);
  files_remove(dir);
}

static void expect_no_report(const char *dir, int layers, int resume, const char *sentence) {
  char error[512] = "";
  struct report *r = report_open(dir, layers, EXPERTS, resume, error, 512);
  EXPECT(r == NULL && strstr(error, sentence), "got \"%s\", want \"%s\"", error, sentence);
  report_close(r);
}

TEST(a_log_that_does_not_fit_is_refused_and_kept) {
  char dir[128], path[256];
  files_make(dir);
  write_steps(dir, 1, 3);
  struct bytes log = files_read(files_path(path, dir, "log.csv"));
  expect_no_report(dir, LAYERS + 1, 3, "its columns are not those of a run with 3 layers of 3 experts");
  const char *damage = "x,1,2,";
  memcpy(strchr(log.data, '\n') + 1, damage, strlen(damage));
  files_write(path, log.data, log.count);
  expect_no_report(dir, LAYERS, 3, "log.csv: line 2 is damaged");
  struct bytes kept = files_read(path);
  EXPECT(kept.data && strcmp(kept.data, log.data) == 0, "the log was changed");
  expect_no_report(path, LAYERS, 0, "log.csv: is not a folder");
  expect_no_report("", LAYERS, 0, "has a path of 0 bytes");
  expect_no_report("/proc/nowhere/run", LAYERS, 0, "/proc/nowhere: cannot be made");
  free(kept.data);
  free(log.data);
  files_remove(dir);
}

/* Where tags stop being balanced, or NULL. Of the empty elements only meta is used; the others close themselves. */
static const char *unbalanced(const char *html) {
  const char *open[32];
  int depth = 0;
  for (const char *p = strchr(html, '<'); p; p = strchr(p + 1, '<')) {
    const char *end = strchr(p, '>');
    if (end == NULL) return p;
    if (p[1] == '!' || strncmp(p, "<meta ", 6) == 0 || end[-1] == '/') continue;
    const int closing = p[1] == '/';
    const size_t length = strcspn(p + 1 + closing, " >\n");
    if (!closing && depth < 32) {
      open[depth++] = p + 1;
    } else if (depth == 0 || strncmp(open[--depth], p + 2, length) != 0 ||
               strcspn(open[depth], " >\n") != length) {
      return p;
    }
  }
  return depth > 0 ? open[depth - 1] : NULL;
}

TEST(the_balance_check_itself_finds_errors) {
  EXPECT(!unbalanced("<a><b x=\"1\"/><meta y></a>"), "balanced");
  EXPECT(unbalanced("<a><b></a></b>") && unbalanced("<a>") && unbalanced("</a>") && unbalanced("<a></ab>"),
         "found");
}

/* The page for this many rows, with text in it that is meant to break out. */
static struct bytes page(int rows, double val, int ops) {
  char dir[128], path[256], error[512] = "";
  const char *const names[] = {"<up> & \"down\"", "route", "idle"};
  const double seconds[] = {0.5, 20, NAN};
  const struct report_summary s = {.ngram2_bpb = 3,
                                   .ngram4_bpb = val,
                                   .train_bpb = 2,
                                   .val_bpb = val,
                                   .tokens_per_s = 1e4,
                                   .seconds = 60,
                                   .steps = rows,
                                   .params = 5000000,
                                   .active_params = 1000000,
                                   .sample = "</pre><script>x</script> \xff\xc3\xa9 \x01 &amp;",
                                   .op_name = names,
                                   .op_seconds = seconds,
                                   .ops = ops,
                                   .title = "a <title>"};
  files_make(dir);
  struct report *r = open_report(dir, 0);
  for (int i = 0; r && i < rows; i++) add_row(r, 10 * i, i % 3 ? NAN : val);
  EXPECT(r && report_finish(r, &s, error, 512) == 0 && report_finish(r, &s, error, 512) == 0, "%s", error);
  EXPECT(files_count(dir) == 2, "more than the log and the page");
  report_close(r);
  const struct bytes html = files_read(files_path(path, dir, "report.html"));
  files_remove(dir);
  return html;
}

TEST(the_page_is_well_formed_and_stands_alone) {
  const struct {
    int rows;
    double val;
    int ops;
  } cases[] = {{0, NAN, 0}, {1, NAN, 3}, {1, 2.5, 3}, {2, INFINITY, 1}, {40, 2.5, 3}, {1500, 2.5, 3}};
  static const char *const unwanted[] = {"http", "<script", "url(", "src=", "@import", "nan", "inf", NULL};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct bytes html = page(cases[i].rows, cases[i].val, cases[i].ops);
    REQUIRE(html.data != NULL, "case %zu: no page", i);
    const char *bad = unbalanced(html.data);
    EXPECT(bad == NULL, "case %zu: unbalanced at %.40s", i, bad);
    for (const char *const *u = unwanted; *u; u++)
      EXPECT(strstr(html.data, *u) == NULL, "case %zu: has %s in %.60s", i, *u, strstr(html.data, *u));
    EXPECT(strstr(html.data,
                  "&lt;/pre&gt;&lt;script&gt;x&lt;/script&gt; \xef\xbf\xbd\xc3\xa9 \xef\xbf\xbd &amp;amp;"),
           "case %zu: the sample is not escaped", i);
    EXPECT(html.count < 200000, "case %zu: %zu bytes", i, html.count);
    for (size_t at = 0, length; at < html.count; at += length) {
      length = text_utf8((const uint8_t *)html.data + at, html.count - at);
      REQUIRE(length > 0, "case %zu: byte %zu is not UTF-8", i, at);
    }
    free(html.data);
  }
}

/* The hottest cell of the load above is expert 1 of layer 1 with 2.25 times its share, the coldest is idle. */
TEST(the_page_shows_the_numbers) {
  struct bytes html = page(40, 2.5, 3);
  const char *const wanted[] = {"order-4 n-gram: 2.500",
                                "0.5 s, 2.4 %",
                                "20.0 s",
                                "Layer 1</text>",
                                ">1.000 M<",
                                "<svg ",
                                "&lt;up&gt; &amp; &quot;down&quot;"};
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
    EXPECT(strstr(html.data, wanted[i]), "%s is missing", wanted[i]);
  int points = 0; /* 40 rows in each of three charts, and every third one held out */
  for (const char *at = html.data; (at = strstr(at, "<circle")) != NULL; at++) points++;
  EXPECT(points == 3 * 40 + 14, "%d points", points);
  const char *layer1 = strstr(html.data, "Layer 1</text>");
  const char *idle = layer1 ? strstr(layer1, "cells q0\" d=\"") : NULL,
             *hot = layer1 ? strstr(layer1, "cells q7\" d=\"") : NULL;
  EXPECT(idle && strncmp(idle, "cells q0\" d=\"M54.0 28.0h412.0v14.0h-412.0z\"", 40) == 0, "%.60s", idle);
  EXPECT(hot && strncmp(hot, "cells q7\" d=\"M54.0 42.0h412.0v14.0h-412.0z\"", 40) == 0, "%.60s", hot);
  free(html.data);
}

/* -- progress -------------------------------------------------------------------------------------------------- */

TEST(progress_rewrites_its_line_only_where_that_works) {
  for (int live = 0; live < 2; live++) {
    char path[] = "/tmp/moeblas-progress-XXXXXX";
    FILE *f = fdopen(mkstemp(path), "w+b");
    EXPECT(f && !progress_is_live(f), "a file is no terminal");
    char wide[200];
    memset(wide, 'x', sizeof wide);
    wide[199] = '\0';
    progress_line(f, live, "one");
    progress_line(f, live, wide);
    progress_end(f, live);
    fclose(f);
    struct bytes got = files_read(path);
    EXPECT(strncmp(got.data, live ? "\rone\033[K\r" : "one\n", live ? 8 : 4) == 0, "%s", got.data);
    EXPECT(got.count == (live ? 1 + 3 + 3 + 1 + 79 + 3 + 1 : 4 + 200), "%zu bytes", got.count);
    free(got.data);
    unlink(path);
  }
}

TEST(names_are_made_safe_to_print) {
  char out[32];
  EXPECT(strcmp(text_escape(out, sizeof out, "a b\x1b[\xc3\xa9\\"), "a b\\x1b[\\xc3\\xa9\\x5c") == 0, "%s",
         out);
  EXPECT(strcmp(text_escape(out, 16, "0123456789abcdef"), "012345678...") == 0, "%s", out);
}

TEST_MAIN()
