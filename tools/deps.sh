#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Installs the Debian packages that a target of the Makefile needs and that are missing: `tools/deps.sh train` what the
# library and the tool need, `tools/deps.sh wheel` what the Python package needs, `tools/deps.sh test` everything. Says
# nothing when all are there.
set -eu

what=${1:-test}
packages="gcc libc6-dev libcjson-dev"
commands="gcc ar"
modules=
if [ "$what" = test ]; then
  packages="$packages g++ libopenblas-serial-dev clang-format cmake pkg-config"
  packages="$packages python3-venv python3-numpy python3-pytest python3-pyflakes"
  commands="$commands g++ clang-format cmake pkg-config"
  modules="venv ensurepip numpy pytest pyflakes"
fi
if [ "$what" = test ] || [ "$what" = wheel ]; then
  packages="$packages binutils python3 python3-pip python3-setuptools python3-wheel"
  commands="$commands nm readelf python3"
  modules="$modules pip setuptools wheel"
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
for module in $modules; do
  "${PYTHON:-python3}" -c "import $module" 2>/dev/null || absent="$absent $module (Python)"
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
