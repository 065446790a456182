#!/usr/bin/env bash
# Everything a CUDA machine is needed for, within ten minutes: build in place, test, measure, check memory accesses.
# Every stage goes on when an earlier one failed; the table at the end says which. `make gpu` calls this.
#
#   PYTHON          the interpreter with torch and the build tools (python3)
#   OUT             where to copy result files and logs, after every stage (nowhere)
#   BUDGET_S        seconds for everything (570)
#   SECONDS_A_CASE  time budget of one benchmark case (0.5)
#   SANITIZE        pytest -k expression of the op tests that run under compute-sanitizer
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

PYTHON=${PYTHON:-python3}
BUDGET_S=${BUDGET_S:-570}
SECONDS_A_CASE=${SECONDS_A_CASE:-0.5}
SANITIZE=${SANITIZE:-pack or accumulate or unscale or deposit}
LOGS=build/gpu
SUMMARY=$LOGS/summary.txt
export PYENGINE_CUDA=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PATH="$PATH:/usr/local/cuda/bin"  # where CUDA puts nvcc and compute-sanitizer

SECONDS=0
FAILED=0
rm -rf "$LOGS"
mkdir -p "$LOGS"
touch "$LOGS/started"
printf '%-24s %-10s %8s\n' stage result seconds > "$SUMMARY"

# The new result files, the summary, and all logs in one file: few files, so that any folder takes them.
copy_out() {
  [ -n "${OUT:-}" ] || return 0
  mkdir -p "$OUT"
  cp "$SUMMARY" "$OUT/"
  for log in "$LOGS"/*.log; do
    printf '\n==> %s\n' "$log"
    tail -c 1000000 "$log"
  done > "$OUT/gpu.log"
  find benchmarks/results -name '*.json' -newer "$LOGS/started" -exec cp {} "$OUT/" \;
}

# stage NAME LIMIT_S COMMAND...: run, log, note the outcome; at most what is left of the budget.
stage() {
  local name=$1 limit=$2 begin=$SECONDS left=$((BUDGET_S - SECONDS)) result
  shift 2
  [ "$left" -lt "$limit" ] && limit=$left
  if [ "$limit" -lt 5 ]; then
    result="no time"
  else
    echo "== $name (at most $limit s)"
    timeout --kill-after=5 "$limit" "$@" > "$LOGS/$name.log" 2>&1
    case $? in
      0) result=passed ;;
      5) result="no tests" ;;
      124 | 137) result="timed out" ;;
      *) result=failed ;;
    esac
    if [ "$result" = passed ]; then tail -n 3 "$LOGS/$name.log"; else tail -n 25 "$LOGS/$name.log"; fi | cut -c -200
  fi
  [ "$result" = passed ] || FAILED=1
  printf '%-24s %-10s %8d\n' "$name" "$result" $((SECONDS - begin)) >> "$SUMMARY"
  copy_out
}

# Only the present device's architecture: the others would triple the build.
if [ -z "${PYENGINE_CUDA_ARCHS:-}" ]; then
  PYENGINE_CUDA_ARCHS=$("$PYTHON" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())' 2> /dev/null)
fi
[ -n "$PYENGINE_CUDA_ARCHS" ] && export PYENGINE_CUDA_ARCHS

stage build 150 "$PYTHON" setup.py build_ext --inplace
stage native 30 "$PYTHON" -c 'from pyengine import _native
assert _native.core().has_cuda, "the extension has no CUDA kernels"'
stage tests-ops 90 "$PYTHON" -m pytest -q -m gpu --maxfail=20 tests/ops
stage tests-engine 110 "$PYTHON" -m pytest -q -m gpu --maxfail=20 tests --ignore=tests/ops
for stem in pack accumulate unscale_norm exact chain; do
  stage "bench-$stem" 75 "$PYTHON" "benchmarks/bench_$stem.py" --device cuda --seconds "$SECONDS_A_CASE" --save
done

# Every tensor an allocation of its own: inside the caching allocator's blocks an overrun would go unseen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
for tool in memcheck racecheck; do
  stage "sanitizer-$tool" 90 compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 9 \
    "$PYTHON" -m pytest -q -m gpu -x -k "$SANITIZE" tests/ops/test_cuda.py tests/ops/test_exact_cuda.py
done

echo
cat "$SUMMARY"
echo "all: $SECONDS s of $BUDGET_S"
exit $FAILED
