#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# `moeblas train` on a GPU learns what it learns on the CPU: 50 steps on both, whose loss curves may differ by as much as
# rounding takes two runs on the CPU apart (curves.py); checkpoints go from one back end to the other; equal bits where
# the back end stays the same. Needs a finished build and python3. Environment: BUILD. Exit status 2: no GPU to use.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
export OMP_WAIT_POLICY=passive # between its parallel parts the CPU waits for the GPU
moeblas=${BUILD:-build}/moeblas
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
passed=0 failed=0

reason=$("$moeblas" check --backend cuda 't8 h64 f64' 2>&1 >/dev/null) || {
  [[ $? == 2 ]] && echo "train_check: ${reason:-the first problem is refused}" >&2 && exit 2
}

check() { # name, then a command that must succeed; what it prints last is shown
  local name=$1
  shift
  if "$@" >"$dir/check" 2>&1; then
    passed=$((passed + 1)) && echo "ok   $name: $(tail -n 1 "$dir/check")"
  else
    failed=$((failed + 1)) && echo "FAIL $name: $*" && tail -n 5 "$dir/check"
  fi
}

train() { # folder, back end that must be the one, then arguments
  local out=$dir/$1 want=$2 text
  shift 2
  text=$("$moeblas" train --data "$dir/text" --out "$out" --json "$@" 2>"$dir/err" | tail -n 1)
  [[ $text == *"\"backend\": \"$want\""* ]] || { cat "$dir/err" && echo "$text, wanted $want" && return 1; }
  sed -E 's/.*("val_bpb": [^,]*).*("tokens_per_s": [^,]*).*/\1, \2/' <<<"$text"
}
from() { # folder, checkpoint to go on from, then as train
  rm -rf "${dir:?}/$1" && cp -r "$dir/$2" "$dir/$1" && train "$1" "$3" --resume --backend "$3" "${@:4}"
}
noisy() { # folder, checkpoint, seed, arguments: goes on on the CPU from a checkpoint with other last bits
  cp -r "$dir/$2" "$dir/$1.start" && tests/cuda/curves.py perturb "$dir/$1.start" "$3" &&
    from "$1" "$1.start" cpu "${@:4}"
}
within() { tests/cuda/curves.py within "$dir/$1" "$dir/$2" "${@:3}"; }
outside() { # as within, for a control
  within "$@"
  [[ $? == 4 ]]
}
same() { cmp "$dir/$1/checkpoint.safetensors" "$dir/$2/checkpoint.safetensors" && echo "the same bits"; }

cat docs/*.md include/*.h | head -c 60000 >"$dir/text"
both() { # dtype, reference, noise...: runs on both back ends, and such as change over, on one curve
  local dtype=$1 reference=$2 run=(--dtype "$1" --steps 50)
  shift 2
  check "$dtype: the GPU" train "gpu_$dtype" cuda --backend cuda "${run[@]}"
  check "$dtype: the same curve" within "$reference" "gpu_$dtype" "$@"
  check "$dtype: the GPU goes on from the CPU" from "to_gpu_$dtype" "start_$dtype" cuda --dtype "$dtype"
  check "$dtype: on the same curve" within "$reference" "to_gpu_$dtype" "$@"
  check "$dtype: stops on the GPU" train "half_$dtype" cuda --backend cuda "${run[@]}" --stop 24
  check "$dtype: the CPU goes on" from "to_cpu_$dtype" "half_$dtype" cpu --dtype "$dtype"
  check "$dtype: on the same curve" within "$reference" "to_cpu_$dtype" "$@"
  check "$dtype: the GPU goes on from itself" from "parts_$dtype" "half_$dtype" cuda --dtype "$dtype"
  check "$dtype: to the bits of one run" same "gpu_$dtype" "parts_$dtype"
}
for dtype in fp32 bf16; do
  check "$dtype: the CPU" train "cpu_$dtype" cpu --backend cpu --dtype "$dtype" --steps 50
  check "$dtype: two steps on the CPU" train "start_$dtype" cpu --backend cpu --dtype "$dtype" --steps 50 --stop 2
done
noise=("$dir"/noise_{1..6})
for seed in {1..6}; do check "noise $seed" noisy "noise_$seed" start_fp32 "$seed"; done
both fp32 cpu_fp32 "${noise[@]}"
both bf16 cpu_fp32 "$dir/cpu_bf16" # the noise is what bf16 does on the CPU
check "bf16 is not taken for fp32" outside cpu_fp32 gpu_bf16 "${noise[@]}"
check "another seed" train seed cuda --backend cuda --steps 50 --seed 2
check "is not taken for bf16" outside cpu_fp32 seed "$dir/cpu_bf16"

bias=(--balance bias --steps 50)
check "balance by bias: the CPU" train bias_cpu cpu --backend cpu "${bias[@]}" --stop 10
check "balance by bias: two steps" train bias_start cpu --backend cpu "${bias[@]}" --stop 2
check "balance by bias: noise" noisy bias_noise bias_start 1 --stop 10
check "balance by bias: the GPU" train bias_gpu cuda --backend cuda "${bias[@]}" --stop 10
check "balance by bias: the same curve" within bias_cpu bias_gpu "$dir/bias_noise"

check "auto takes the GPU" train auto cuda --steps 50 --stop 2
sample() { "$moeblas" train --backend cuda --out "$dir/cpu_fp32" --sample "The library" --tokens 40; }
check "continues a text" grep '^The library' <(sample)
check "the same twice" cmp <(sample) <(sample)

echo "$passed passed, $failed failed"
((failed == 0))
