#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the library twice, from copies of the sources in folders of different names, and compares the bytes of
# libmoeblas.so and libmoeblas.a. Arguments go to make (`tools/reproducible.sh CUDA=0`). Last line: "N passed, N failed".
set -euo pipefail
cd "$(dirname "$0")/.."
unset MAKEFLAGS MAKELEVEL MFLAGS
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
passed=0 failed=0
for folder in "$scratch/one" "$scratch/another/place"; do
  mkdir -p "$folder"
  git ls-files -co --exclude-standard | while read -r file; do [[ ! -f $file ]] || echo "$file"; done | tar -cf - -T - | tar -xf - -C "$folder"
  make -C "$folder" BUILD=build lib "$@" >"$scratch/log" 2>&1 || { tail -n 20 "$scratch/log"; exit 1; }
done
for file in libmoeblas.so libmoeblas.a; do
  one=$(sha256sum <"$scratch/one/build/$file") two=$(sha256sum <"$scratch/another/place/build/$file")
  echo "$file ${one%% *} ${two%% *}"
  if [[ $one == "$two" ]]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
done
echo "$passed passed, $failed failed"
((failed == 0))
