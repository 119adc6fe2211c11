# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034 # the sourcing script uses them
# What the tests that are scripts share: the root as folder, the tool, a folder to write in, and counting. Sourced.
# Environment: BUILD.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
moeblas=$(realpath "${BUILD:-build}/moeblas")
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
passed=0 failed=0

check() { # name, then a command that must succeed; its output is shown if it does not
  local name=$1
  shift
  if "$@" >"$dir/check" 2>&1; then
    passed=$((passed + 1)) && echo "ok   $name"
  else
    failed=$((failed + 1)) && echo "FAIL $name: $*" && tail -n 5 "$dir/check"
  fi
}
verdict() { # name, then a command that must succeed; only failures are named
  local name=$1
  shift
  if "$@"; then passed=$((passed + 1)); else echo "FAIL $name"; failed=$((failed + 1)); fi
}
