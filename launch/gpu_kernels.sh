#!/usr/bin/env bash
# Tests and times the GPU kernels on this machine's GPU; needs PyTorch, Triton and pytest only.
#
#   ./launch/gpu_kernels.sh OUT_DIR [WORDS]      WORDS: only benchmark cases whose name contains one of them
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?usage: gpu_kernels.sh OUT_DIR [WORDS]}
shift
mkdir -p "$out"
export PYTHONPATH=.:kernels${PYTHONPATH:+:$PYTHONPATH}
workers=()  # most of a test is compiling, which takes a core each
python3 -c "import xdist" 2>/dev/null && workers=(-n 8)

python3 -m dsv4_kernels | tee "$out/table.txt"
python3 -m pytest -o addopts="" --confcutdir=tests/kernels --import-mode=importlib -p no:cacheprovider -q \
  ${workers[@]+"${workers[@]}"} -m gpu tests/kernels >"$out/tests.txt" 2>&1
tests=$?
tail -n 40 "$out/tests.txt"
python3 -m dsv4_kernels.benchmark --out "$out/kernels.json" --variants-until 240 "$@" 2>&1 | tee "$out/benchmark.txt"
exit $((tests + PIPESTATUS[0]))
