/* SPDX-License-Identifier: Apache-2.0
 *
 * Pictures as inline SVG. All are 480 units wide: that is about the width of a phone, so text keeps its size there, and
 * two stand side by side on a desk. Long series are averaged to what the width can show. */
#include "svg.h"

#include <math.h>
#include <string.h>

#include "text.h"

enum {
  WIDTH = 480,
  LEFT = 54,
  RIGHT = 14,
  TOP = 44,
  BOTTOM = 40,
  PLOT = WIDTH - LEFT - RIGHT,
  CLASSES = 9
};
enum {
  LINES_HEIGHT = 200,
  LEGEND_ROW = 18,
  MAX_POINTS = 300,
  MAX_COLUMNS = 120
};

/* Blue and orange differ for every common kind of colour blindness; the scheme's middle is its background. */
const char svg_style[] =
    ":root{--ink:#1d2329;--soft:#5c6670;--page:#fff;--card:#f6f7f8;--line:#d5dade;"
    "--s0:#0072b2;--s1:#c8500a;--s2:#00795a;--s3:#9b4d83;--q0:#053061;--q1:#2166ac;--q2:#67a9cf;"
    "--q3:#c3ddec;--q4:#e9ebec;--q5:#fbd9b5;--q6:#f0a050;--q7:#c8600d;--q8:#7f3b08}\n"
    "@media(prefers-color-scheme:dark){"
    ":root{--ink:#e6e9ec;--soft:#a0a9b2;--page:#14171a;--card:#1d2125;--line:#3a4148;"
    "--s0:#56b4e9;--s1:#f09a3e;--s2:#3fc79a;--s3:#d79cc4;--q0:#b5dcff;--q1:#5aa6e8;--q2:#3574ad;"
    "--q3:#2a4560;--q4:#33383d;--q5:#5c4327;--q6:#a3651f;--q7:#e8912c;--q8:#ffd9a0}}\n"
    "svg{display:block;width:100%;height:auto}svg text{fill:var(--soft);font-size:12px}\n"
    "svg .title{fill:var(--ink);font-size:14px;font-weight:600}svg .value{fill:var(--ink)}\n"
    ".grid{stroke:var(--line)}.level{stroke:var(--ink)}.cells{shape-rendering:crispEdges}\n"
    ".dash0{stroke-dasharray:7 4}.dash1{stroke-dasharray:2 3}\n"
    ".curve{fill:none;stroke-width:2;stroke-linejoin:round}\n"
    ".t0{stroke:var(--s0)}.t1{stroke:var(--s1)}.t2{stroke:var(--s2)}.t3{stroke:var(--s3)}\n"
    ".f0{fill:var(--s0)}.f1{fill:var(--s1)}.f2{fill:var(--s2)}.f3{fill:var(--s3)}\n"
    ".q0{fill:var(--q0)}.q1{fill:var(--q1)}.q2{fill:var(--q2)}.q3{fill:var(--q3)}.q4{fill:var(--q4)}\n"
    ".q5{fill:var(--q5)}.q6{fill:var(--q6)}.q7{fill:var(--q7)}.q8{fill:var(--q8)}\n";

/* -- axes ------------------------------------------------------------------------------------------------------ */

struct range {
  double low, high; /* low > high: nothing seen yet */
};
struct axis {
  double low, high, step;
  double from, length; /* where it lies, in units of the picture; length < 0: upwards */
};

static void widen(struct range *r, double v) {
  if (!isfinite(v)) return;
  if (v < r->low) r->low = v;
  if (v > r->high) r->high = v;
}

/* The smallest 1, 2 or 5 times a power of ten that makes at most `most` steps of the length. */
static double round_step(double length, int most) {
  const double power = pow(10, floor(log10(length / most)));
  const double steps[] = {1, 2, 5, 10};
  int i = 0;
  while (i < 3 && power * steps[i] * most < length * (1 - 1e-9)) i++;
  return power * steps[i];
}

/* outwards: the ends are moved to ticks. */
static struct axis axis_of(struct range r, int most, int outwards, double from, double length) {
  if (!(r.high > r.low)) { /* one value: make room around it */
    const double room = r.low != 0 ? fabs(r.low) / 2 : 1;
    r = (struct range){r.low - room, r.high + room};
  }
  struct axis a = {r.low, r.high, round_step(r.high - r.low, most), from, length};
  if (outwards) {
    a.low = floor(a.low / a.step + 1e-9) * a.step;
    a.high = ceil(a.high / a.step - 1e-9) * a.step;
  }
  return a;
}

/* x counts steps: no ticks between whole numbers. */
static struct axis steps_axis(struct range r, double from, double length) {
  struct axis a = axis_of(r, 6, 0, from, length);
  a.step = fmax(a.step, 1);
  return a;
}

static double place(const struct axis *a, double v) {
  return a->from + a->length * (v - a->low) / (a->high - a->low);
}

/* 0.25, 3, 1500, 20k, 3M: one unit for the whole axis, as many decimals as the step needs. */
static const char *tick_text(char *out, size_t bytes, double v, const struct axis *a) {
  const double unit = a->high >= 1e6 ? 1e6 : a->high >= 1e4 ? 1e3 : 1;
  const int decimals = (int)fmin(9, fmax(0, ceil(-log10(a->step / unit) - 1e-9)));
  const char *letter = v == 0 || unit == 1 ? "" : unit == 1e3 ? "k" : "M";
  snprintf(out, bytes, "%.*f%s", v == 0 ? 0 : decimals, v / unit, letter);
  return out;
}

static void text_at(FILE *f, double x, double y, const char *anchor, const char *class, const char *text) {
  fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" class=\"%s\">", x, y, anchor, class);
  text_html(f, text);
  fputs("</text>\n", f);
}

/* The loop counts, so that rounding cannot lose the last tick. */
static int tick_count(const struct axis *a, double *first) {
  *first = ceil(a->low / a->step - 1e-9) * a->step;
  return (int)floor((a->high - *first) / a->step + 1e-9) + 1;
}

static void x_axis(FILE *f, const struct axis *a, double bottom, const char *label) {
  char text[32];
  double first;
  const int count = tick_count(a, &first);
  for (int i = 0; i < count; i++) {
    const double v = first + i * a->step, x = place(a, v);
    fprintf(f, "<path class=\"grid\" d=\"M%.1f %.1fv4\"/>", x, bottom);
    text_at(f, x, bottom + 16, "middle", "tick", tick_text(text, sizeof text, v, a));
  }
  text_at(f, a->from + a->length / 2, bottom + 33, "middle", "label", label);
}

static void y_axis(FILE *f, const struct axis *a, const char *label, int lines) {
  char text[32];
  double first;
  const int count = tick_count(a, &first);
  for (int i = 0; i < count; i++) {
    const double v = first + i * a->step, y = place(a, v);
    if (lines) fprintf(f, "<path class=\"grid\" d=\"M%d %.1fh%d\"/>", LEFT, y, PLOT);
    text_at(f, LEFT - 6, y + 4, "end", "tick", tick_text(text, sizeof text, v, a));
  }
  const double middle = a->from + a->length / 2;
  fprintf(f, "<text transform=\"translate(12 %.1f) rotate(-90)\" text-anchor=\"middle\">", middle);
  text_html(f, label);
  fputs("</text>\n", f);
}

static void begin(FILE *f, double height, const char *title) {
  fprintf(f, "<svg viewBox=\"0 0 %d %.0f\" role=\"img\" aria-label=\"", WIDTH, height);
  text_html(f, title);
  fputs("\">\n", f);
  text_at(f, 4, 18, "start", "title", title);
}

static void nothing(FILE *f) {
  text_at(f, WIDTH / 2.0, TOP + 16, "middle", "label", "nothing measured");
  fputs("</svg>\n", f);
}

/* -- lines ----------------------------------------------------------------------------------------------------- */

/* Where picture column `bin` of `bins` begins in `count` values. */
static int bin_start(int bin, int bins, int count) { return (int)((int64_t)bin * count / bins); }

/* The finite points, averaged in groups to at most MAX_POINTS; their count. */
static int thin(const struct svg_series *s, double *x, double *y) {
  int finite = 0, seen = 0, used = 0;
  for (int i = 0; i < s->count; i++) finite += isfinite(s->x[i]) && isfinite(s->y[i]);
  const int bins = finite < MAX_POINTS ? finite : MAX_POINTS;
  double sum_x = 0, sum_y = 0, n = 0;
  for (int i = 0; i < s->count; i++) {
    if (!isfinite(s->x[i]) || !isfinite(s->y[i])) continue;
    sum_x += s->x[i];
    sum_y += s->y[i];
    n++;
    if (++seen < bin_start(used + 1, bins, finite)) continue;
    x[used] = sum_x / n;
    y[used++] = sum_y / n;
    sum_x = sum_y = n = 0;
  }
  return used;
}

static void curve(FILE *f, const struct svg_series *s, int which, const struct axis *ax,
                  const struct axis *ay) {
  double x[MAX_POINTS], y[MAX_POINTS];
  const int count = thin(s, x, y);
  if (count == 0) return;
  fprintf(f, "<path class=\"curve t%d\" d=\"", which);
  for (int i = 0; i < count; i++) fprintf(f, "%c%.1f %.1f", i ? 'L' : 'M', place(ax, x[i]), place(ay, y[i]));
  fputs("\"/>\n", f);
  if (count > 40) return;
  for (int i = 0; i < count; i++)
    fprintf(f, "<circle class=\"f%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"2.5\"><title>%g: %.4g</title></circle>\n",
            which, place(ax, x[i]), place(ay, y[i]), x[i], y[i]);
}

static double legend_entry(FILE *f, double x, double y, const char *class, int which, const char *name) {
  fprintf(f, "<path class=\"%s%d\" d=\"M%.1f %.1fh18\"/>", class, which, x, y - 4);
  text_at(f, x + 23, y, "start", "label", name);
  return x + 38 + 6.5 * (double)strlen(name);
}

/* The curves in one row, the levels with their values in the next. */
static void legend(FILE *f, const struct svg_lines *c) {
  double x = LEFT;
  for (int i = 0; c->series_count > 1 && i < c->series_count; i++)
    x = legend_entry(f, x, 36, "curve t", i, c->series[i].name);
  x = LEFT;
  for (int i = 0; i < c->level_count; i++) {
    char text[96];
    snprintf(text, sizeof text, "%s: %.3f", c->levels[i].name, c->levels[i].y);
    if (isfinite(c->levels[i].y)) x = legend_entry(f, x, 36 + LEGEND_ROW, "level dash", i, text);
  }
}

static void curves(FILE *f, const struct svg_lines *c, struct range x, struct range y, double top) {
  const double bottom = top + LINES_HEIGHT;
  const struct axis ax = steps_axis(x, LEFT, PLOT), ay = axis_of(y, 9, 1, bottom, -LINES_HEIGHT);
  y_axis(f, &ay, c->y_label, 1);
  x_axis(f, &ax, bottom, c->x_label);
  for (int i = 0; i < c->series_count; i++) curve(f, &c->series[i], i, &ax, &ay);
  for (int i = 0; i < c->level_count; i++)
    if (isfinite(c->levels[i].y))
      fprintf(f, "<path class=\"level dash%d\" d=\"M%d %.1fh%d\"/>\n", i, LEFT, place(&ay, c->levels[i].y),
              PLOT);
  legend(f, c);
}

void svg_lines(FILE *f, const struct svg_lines *c) {
  struct range x = {INFINITY, -INFINITY}, y = x;
  for (int s = 0; s < c->series_count; s++)
    for (int i = 0; i < c->series[s].count; i++) {
      if (!isfinite(c->series[s].y[i])) continue;
      widen(&x, c->series[s].x[i]);
      widen(&y, c->series[s].y[i]);
    }
  const double top = TOP + (c->level_count > 0 ? LEGEND_ROW : 0);
  begin(f, x.low > x.high ? TOP + BOTTOM : top + LINES_HEIGHT + BOTTOM, c->title);
  if (x.low > x.high) {
    nothing(f);
    return;
  }
  for (int i = 0; i < c->level_count; i++) widen(&y, c->levels[i].y);
  if (c->from_zero) widen(&y, 0);
  curves(f, c, x, y, top);
  fputs("</svg>\n", f);
}

/* -- bars ------------------------------------------------------------------------------------------------------ */

/* Index of the largest value below the last one taken; equal values go by index. */
static int next_largest(const double *v, int count, int last) {
  int best = -1;
  for (int i = 0; i < count; i++) {
    if (!(v[i] > 0) || !isfinite(v[i])) continue;
    const int later = last < 0 || v[i] < v[last] || (v[i] == v[last] && i > last);
    if (later && (best < 0 || v[i] > v[best])) best = i;
  }
  return best;
}

static void bar_text(char *out, size_t bytes, double seconds, double longest, double sum) {
  const double ms = seconds * 1e3;
  const int decimals = ms >= 100 ? 0 : ms >= 10 ? 1 : 2;
  if (longest >= 10)
    snprintf(out, bytes, "%.1f s, %.1f %%", seconds, 100 * seconds / sum);
  else
    snprintf(out, bytes, "%.*f ms, %.1f %%", decimals, ms, 100 * seconds / sum);
}

void svg_bars(FILE *f, const char *title, const char *const *names, const double *seconds, int count) {
  enum {
    NAMES = 126,
    VALUES = 112,
    ROW = 22,
    BARS_TOP = 32
  };
  double sum = 0;
  int shown = 0;
  for (int i = 0; i < count; i++) {
    if (!(seconds[i] > 0) || !isfinite(seconds[i])) continue;
    sum += seconds[i];
    shown++;
  }
  begin(f, shown ? BARS_TOP + ROW * shown : TOP + BOTTOM, title);
  if (shown == 0) {
    nothing(f);
    return;
  }
  const int longest = next_largest(seconds, count, -1);
  int i = longest;
  for (double y = BARS_TOP; i >= 0; y += ROW, i = next_largest(seconds, count, i)) {
    const double length = (WIDTH - NAMES - VALUES) * seconds[i] / seconds[longest];
    char text[64];
    bar_text(text, sizeof text, seconds[i], seconds[longest], sum);
    text_at(f, NAMES - 6, y + 14, "end", "label", names[i]);
    fprintf(f, "<rect class=\"f0\" x=\"%d\" y=\"%.1f\" width=\"%.1f\" height=\"%d\" rx=\"2\"/>", NAMES, y + 2,
            fmax(length, 1), ROW - 6);
    text_at(f, NAMES + length + 6, y + 14, "start", "value", text);
  }
  fputs("</svg>\n", f);
}

/* -- heat map -------------------------------------------------------------------------------------------------- */

static const double class_above[CLASSES - 1] = {0.25, 0.5, 0.75, 0.9, 1.1, 1.5, 2, 4};

static int class_of(double ratio) {
  int class = 0;
  while (class < CLASSES - 1 && ratio >= class_above[class]) class ++;
  return class;
}

/* Mean of a row over the columns of one bin; NAN when none is finite. */
static double cell(const struct svg_heat *m, int row, int bin, int bins) {
  double sum = 0, n = 0;
  for (int c = bin_start(bin, bins, m->columns); c < bin_start(bin + 1, bins, m->columns); c++) {
    const double v = m->ratio[(int64_t)c * m->rows + row];
    if (!isfinite(v)) continue;
    sum += v;
    n++;
  }
  return n > 0 ? sum / n : NAN;
}

/* One path for each class: far smaller than an element for each cell. Neighbours in a row are joined. */
static void cells(FILE *f, const struct svg_heat *m, int class, double height) {
  const int bins = m->columns < MAX_COLUMNS ? m->columns : MAX_COLUMNS;
  const double width = (double)PLOT / bins;
  fprintf(f, "<path class=\"cells q%d\" d=\"", class);
  for (int row = 0; row < m->rows; row++)
    for (int bin = 0, run = 0; bin <= bins; bin++) {
      const double v = bin < bins ? cell(m, row, bin, bins) : NAN;
      if (!isnan(v) && class_of(v) == class) {
        run++;
      } else if (run > 0) {
        fprintf(f, "M%.1f %.1fh%.1fv%.1fh%.1fz", LEFT + (bin - run) * width, 28 + row * height, run * width,
                height, -run * width);
        run = 0;
      }
    }
  fputs("\"/>\n", f);
}

void svg_heat(FILE *f, const struct svg_heat *m) {
  const double height = m->rows > 80 ? 2 : fmin(14, 160.0 / (m->rows > 0 ? m->rows : 1));
  const double plot = height * m->rows;
  begin(f, m->columns && m->rows ? 28 + plot + BOTTOM : TOP + BOTTOM, m->title);
  if (m->columns == 0 || m->rows == 0) {
    nothing(f);
    return;
  }
  for (int class = 0; class < CLASSES; class ++) cells(f, m, class, height);
  struct range x = {INFINITY, -INFINITY};
  for (int i = 0; i < m->columns; i++) widen(&x, m->x[i]);
  const double half = m->columns > 1 ? PLOT / 2.0 / m->columns : 0; /* a column's x stands at its middle */
  const struct axis ax = steps_axis(x, LEFT + half, PLOT - 2 * half);
  /* A row's number stands at its middle. */
  struct axis ay = axis_of((struct range){-0.5, m->rows - 0.5}, plot < 60 ? 3 : 8, 0, 28, plot);
  ay.step = fmax(ay.step, 1);
  y_axis(f, &ay, m->y_label, 0);
  x_axis(f, &ax, 28 + plot, m->x_label);
  fputs("</svg>\n", f);
}

void svg_heat_legend(FILE *f) {
  enum {
    SWATCH = 48
  };
  fprintf(f, "<svg viewBox=\"0 0 %d 42\" role=\"img\" aria-label=\"legend of the heat maps\">\n", WIDTH);
  for (int class = 0; class < CLASSES; class ++) {
    fprintf(f, "<rect class=\"cells q%d\" x=\"%d\" y=\"6\" width=\"%d\" height=\"14\"/>", class,
            24 + class * SWATCH, SWATCH);
    char text[32];
    snprintf(text, sizeof text, "%g\u00d7", class < CLASSES - 1 ? class_above[class] : 0);
    if (class < CLASSES - 1) text_at(f, 24 + (class + 1) * SWATCH, 35, "middle", "tick", text);
  }
  fputs("</svg>\n", f);
}
