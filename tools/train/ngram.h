/* SPDX-License-Identifier: Apache-2.0
 *
 * The baseline a trained model has to beat: a byte n-gram with interpolated Witten-Bell back-off
 * (Witten and Bell, The zero-frequency problem, 1991), counted on the training part, measured on the held-out part. */
#pragma once

#include "corpus.h"

/* Mean bits per held-out byte given the `order` (0 to 6) bytes before it. NAN when memory is short, when nothing is
 * held out, or for another order. */
double ngram_bits_per_byte(const struct corpus *c, int order);
