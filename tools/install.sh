#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# What `make install` does: copies a finished build below $DESTDIR$PREFIX and writes the pkg-config and CMake files. The
# CMake files find their prefix from where they lie, so an installed tree may be moved; moeblas.pc names $PREFIX.
set -eu
: "${BUILD:?}" "${PREFIX:?}" "${VERSION:?}"

root=${DESTDIR:-}$PREFIX
major=${VERSION%%.*}
mkdir -p "$root/lib/pkgconfig" "$root/lib/cmake/moeblas" "$root/include" "$root/bin" "$root/share/moeblas"

install -m 755 "$BUILD/libmoeblas.so.$major" "$root/lib/libmoeblas.so.$VERSION"
ln -sf "libmoeblas.so.$VERSION" "$root/lib/libmoeblas.so.$major"
ln -sf "libmoeblas.so.$major" "$root/lib/libmoeblas.so"
install -m 644 "$BUILD/libmoeblas.a" "$root/lib/"
install -m 644 include/moeblas.h include/moeblas_ops.h include/moeblas_act.def "$root/include/"
install -m 755 "$BUILD/moeblas" "$root/bin/"
install -m 644 data/presets.csv "$root/share/moeblas/"

fill() { sed "s|@PREFIX@|$PREFIX|g; s|@VERSION@|$VERSION|g; s|@MAJOR@|$major|g" "$1" >"$2"; chmod 644 "$2"; }
fill moeblas.pc.in "$root/lib/pkgconfig/moeblas.pc"
fill cmake/moeblasConfig.cmake.in "$root/lib/cmake/moeblas/moeblasConfig.cmake"
fill cmake/moeblasConfigVersion.cmake.in "$root/lib/cmake/moeblas/moeblasConfigVersion.cmake"
