#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Gate: no kernel has a stack frame, a spill, or a wgmma that the assembler had to serialise (its warnings C7500 .. C7599).
# Reads what `ptxas -v` said of each file: those given, else all of the build (a build without CUDA has none).
# `--self-test` shows that each of the three is found.
set -euo pipefail
bad='(^|[^0-9])[1-9][0-9]* bytes (stack frame|spill stores|spill loads|cumulative stack)|C75[0-9][0-9]|ptxas (warning|error)'

complain() { # file...: one line a violation, under the kernel that it belongs to
  awk -v bad="$bad" 'FNR == 1 { kernel = "" } /Function properties for|Compiling entry function/ { kernel = $0 }
    $0 ~ bad { print FILENAME ": " kernel ": " $0 }' "$@"
}

if [[ ${1:-} == --self-test ]]; then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  echo '    0 bytes stack frame, 0 bytes spill stores, 100 bytes smem, Used 160 registers' >"$scratch/good"
  echo '    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads' >"$scratch/stack"
  echo '    0 bytes stack frame, 0 bytes spill stores, 8 bytes spill loads' >"$scratch/spill"
  echo 'ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized' >"$scratch/wgmma"
  [[ -z $(complain "$scratch/good") ]] || { echo "0 passed, 1 failed"; exit 1; }
  for what in stack spill wgmma; do
    [[ -n $(complain "$scratch/$what") ]] || { echo "$what went through"; echo "0 passed, 1 failed"; exit 1; }
  done
  echo "1 passed, 0 failed"
  exit 0
fi

if (($# == 0)); then
  cd "$(dirname "$0")/../.."
  mapfile -t files < <(find "${BUILD:-build}/obj" -name '*.ptxas' 2>/dev/null)
else
  files=("$@")
fi
found=
((${#files[@]} == 0)) || found=$(complain "${files[@]}")
[[ -z $found ]] || { echo "$found"; echo "0 passed, 1 failed"; exit 1; }
(($# > 0)) || { echo "${#files[@]} files of kernels"; echo "1 passed, 0 failed"; }
