#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# `tools/venv.sh BUILD [ci|all]`: makes BUILD/venv for the Python tests, on top of Debian's packages, and installs what
# tests/python/requirements-ci.txt or requirements-all.txt pin. What cannot be had is said, and the tests that need it say
# that they are skipped; with `all` it is an error.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1/venv what=${2:-ci}
pins=tests/python/requirements-$what.txt
stamp=$venv/$what-$(cat tests/python/requirements-*.txt | sha256sum | cut -c 1-16)
[[ ! -e $stamp ]] || exit 0

[[ -x $venv/bin/python ]] || "${PYTHON:-python3}" -m venv --system-site-packages "$venv"
log=$venv/pip.log
if "$venv/bin/pip" install --quiet --disable-pip-version-check --no-input --retries 1 --timeout 30 -r "$pins" >"$log" 2>&1; then
  rm -f "$venv/$what"-*
  touch "$stamp"
else
  echo "tools/venv.sh: pip could not install $pins: $(grep -m 1 ERROR "$log" || tail -n 1 "$log")" >&2
  [[ $what == ci ]]
fi
