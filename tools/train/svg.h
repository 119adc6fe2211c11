/* SPDX-License-Identifier: Apache-2.0
 *
 * Three pictures as inline SVG, without scripts or fonts: lines, bars and a heat map. Colours are the CSS classes of
 * svg_style, so that a page follows the reader's light or dark scheme. Values that are not finite are left out; a picture
 * with nothing to show says so. */
#pragma once

#include <stdio.h>

/* Rules for the classes below, in a <style> element of the page. */
extern const char svg_style[];

struct svg_series {
  const char *name;
  const double *x, *y; /* [count]; x counts steps */
  int count;
};
struct svg_level { /* a horizontal line to compare with */
  const char *name;
  double y;
};
struct svg_lines {
  const char *title, *x_label, *y_label;
  const struct svg_series *series; /* at most 4 */
  int series_count;
  const struct svg_level *levels; /* at most 2 */
  int level_count;
  int from_zero; /* the y axis starts at 0 */
};
void svg_lines(FILE *f, const struct svg_lines *chart);

/* Horizontal bars, each with its time and its share of the sum, longest first. */
void svg_bars(FILE *f, const char *title, const char *const *names, const double *seconds, int count);

/* One band of cells: x = column, y = row; ratio 1 is even, below and above in two hues. */
struct svg_heat {
  const char *title, *x_label, *y_label;
  const double *x;     /* [columns], for the ticks */
  const double *ratio; /* [columns,rows] */
  int columns, rows;
};
void svg_heat(FILE *f, const struct svg_heat *map);
void svg_heat_legend(FILE *f);
