#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the wheel into $BUILD/dist from a finished build: `make wheel`. Inside are the package, libmoeblas.so linked to look
# beside itself, XLA's handlers, and the libgomp that they need; the tag names the newest glibc symbol that any of them wants.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${BUILD:?}" "${CC:?}" "${PYTHON:?}"
stage=$BUILD/wheel/stage
rm -rf "$stage" "$BUILD/dist"
mkdir -p "$stage"

(cd python && tar -c --exclude=__pycache__ pyproject.toml setup.py README.md moeblas) | tar -x -C "$stage"
cp LICENSE "$stage/"
cp "$BUILD/wheel/libmoeblas.so" "$BUILD/libmoeblas_xla.so" "$stage/moeblas/"
cp -L "$("$CC" -print-file-name=libgomp.so.1)" "$stage/moeblas/libgomp.so.1"
strip --strip-unneeded "$stage"/moeblas/*.so*

newest=$(readelf -V "$stage"/moeblas/*.so* | grep -oE 'GLIBC_2\.[0-9]+' | sed 's/.*\.//' | sort -n | tail -n 1)
export MOEBLAS_PLATFORM=manylinux_2_${newest}_$(uname -m)
log=$BUILD/wheel/log
"$PYTHON" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index \
  --wheel-dir "$BUILD/dist" "$stage" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
ls "$BUILD"/dist/*.whl
