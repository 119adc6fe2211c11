#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Installs the Debian packages that a target of the Makefile needs and that are missing: `tools/deps.sh train` what the
# library and the tool need, `tools/deps.sh test` everything. Says nothing when all are there.
set -eu

packages="gcc libc6-dev libcjson-dev"
commands="gcc ar"
if [ "${1:-test}" = test ]; then
  packages="$packages g++ binutils libopenblas-serial-dev clang-format cmake pkg-config python3"
  commands="$commands g++ nm readelf clang-format cmake pkg-config python3"
fi

missing=
if command -v dpkg-query >/dev/null; then
  for package in $packages; do
    state=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || missing="$missing $package"
  done
fi
# A command that comes from elsewhere than Debian does as well.
absent=
for command in $commands; do
  command -v "$command" >/dev/null || absent="$absent $command"
done
echo '#include <cjson/cJSON.h>' | gcc -E - >/dev/null 2>&1 || absent="$absent cjson/cJSON.h"
[ -n "$absent" ] || exit 0

give_up() {
  echo "moeblas: missing:$absent. Please install the Debian packages (or their like):$missing" >&2
  exit 1
}
command -v apt-get >/dev/null && [ -n "$missing" ] || { missing=" $packages"; give_up; }
sudo=
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null && sudo -n true 2>/dev/null || give_up
  sudo="sudo -n"
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # the lists are words
{ $sudo apt-get update -qq && $sudo apt-get install -qq -y --no-install-recommends $missing; } >"$log" 2>&1 </dev/null ||
  { tail -n 5 "$log" >&2; give_up; }
