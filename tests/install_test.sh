#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs the build into an empty prefix and uses it as a stranger would: examples/layer.c built with plain flags, with
# pkg-config and with CMake, against the shared and the static library, as C11 and as C++17; the installed tool; DESTDIR.
set -uo pipefail
cd "$(dirname "$0")/.."
unset MAKEFLAGS MAKELEVEL MFLAGS MOEBLAS_PRESETS # of a make that may run this test
build=${BUILD:-build}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
prefix=$scratch/prefix
passed=0 failed=0

expect() { # what, command...
  local what=$1
  shift
  if "$@" >"$scratch/log" 2>&1; then
    passed=$((passed + 1))
    echo "ok   $what"
  else
    failed=$((failed + 1))
    echo "FAIL $what"
    sed 's/^/  /' "$scratch/log"
  fi
}
with_library() { LD_LIBRARY_PATH=$prefix/lib "$@"; }
finish() {
  echo "$passed passed, $failed failed"
  exit $((failed != 0))
}

expect "make install" make BUILD="$build" PREFIX="$prefix" install
((failed == 0)) || finish
for file in lib/libmoeblas.so lib/libmoeblas.so.0 lib/libmoeblas.so.0.1.0 lib/libmoeblas.a lib/pkgconfig/moeblas.pc \
  lib/cmake/moeblas/moeblasConfig.cmake lib/cmake/moeblas/moeblasConfigVersion.cmake include/moeblas.h \
  include/moeblas_ops.h include/moeblas_act.def bin/moeblas share/moeblas/presets.csv; do
  expect "$file is there" test -s "$prefix/$file"
done

so=$prefix/lib/libmoeblas.so
expect "the soname is libmoeblas.so.0" grep -q 'soname: \[libmoeblas.so.0\]' <(readelf -d "$so")
expect "every library it needs is found" bash -c "! ldd $so | grep 'not found'"
expect "it needs no C++ runtime" bash -c "! ldd $so | grep stdc++"
expect "only moe_* is exported" bash -c "! nm -D --defined-only $so | grep -v ' A ' | grep -v ' T moe_'"

strict=(-Wall -Wextra -Wpedantic -Werror -I"$prefix/include")
shared=(-L"$prefix/lib" -lmoeblas -lm)
expect "plain flags, C11" gcc -std=c11 "${strict[@]}" examples/layer.c "${shared[@]}" -o "$scratch/c"
expect "it runs" with_library "$scratch/c"
expect "plain flags, C++17" g++ -std=c++17 "${strict[@]}" -x c++ examples/layer.c "${shared[@]}" -o "$scratch/cxx"
expect "it runs" with_library "$scratch/cxx"
expect "static" gcc -std=c11 "${strict[@]}" examples/layer.c "$prefix/lib/libmoeblas.a" -fopenmp -lm -o "$scratch/static"
expect "it runs" "$scratch/static"

export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
# shellcheck disable=SC2046 # words are wanted
expect "pkg-config" gcc examples/layer.c $(pkg-config --cflags --libs moeblas) -lm -o "$scratch/pc"
expect "it runs" with_library "$scratch/pc"
expect "pkg-config knows the version" test "$(pkg-config --modversion moeblas)" = 0.1.0

mkdir "$scratch/cmake"
cp examples/layer.c "$scratch/cmake/"
cat >"$scratch/cmake/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.13)
project(stranger C)
find_package(moeblas 0.1 REQUIRED)
find_package(moeblas 0.2 QUIET)
if(moeblas_FOUND)
  message(FATAL_ERROR "0.1.0 passed for 0.2")
endif()
add_executable(shared layer.c)
target_link_libraries(shared moeblas::moeblas m)
add_executable(static layer.c)
target_link_libraries(static moeblas::static)
END
expect "cmake configures" cmake -S "$scratch/cmake" -B "$scratch/cmake/build" -DCMAKE_PREFIX_PATH="$prefix"
expect "cmake builds" cmake --build "$scratch/cmake/build"
expect "shared runs" "$scratch/cmake/build/shared"
expect "static runs" "$scratch/cmake/build/static"

same() { [[ $("$scratch/static") == "$(with_library "$scratch/pc")" ]]; }
expect "all of them compute the same" same
expect "the installed tool runs" bash -c "cd / && $prefix/bin/moeblas info"
expect "it finds the presets" bash -c "cd / && $prefix/bin/moeblas check 'preset=mixtral-8x7b t9 h32 f16'"
expect "DESTDIR" make BUILD="$build" PREFIX=/usr DESTDIR="$scratch/stage" install
expect "moeblas.pc names the final prefix" grep -qx 'prefix=/usr' "$scratch/stage/usr/lib/pkgconfig/moeblas.pc"
finish
