#!/usr/bin/env bash
# Runs the GPU tests and benchmarks here.  usage: scripts/gpu/run.sh [keep | tests | kernels | engine ...]
set -uo pipefail
cd "$(dirname "$0")/../.."
kept=/tmp/headrace-gpu
mkdir -p $kept
if [ -d .gpu ]; then cp -r .gpu/. $kept/ && rm -rf .gpu/*; fi
[ "${1:-}" = keep ] && { ls -la $kept; exit 0; }

nvidia-smi -L 2>/dev/null | grep -q GPU || { echo "headrace: this machine has no NVIDIA GPU" >&2; exit 1; }
out=${OUT:-benchmarks/results/new}
mkdir -p "$out"
python=${PYTHON:-python3}
if [ -d $kept/wheels ] && [ -n "$(ls $kept/wheels)" ]; then
  [ -d $kept/site ] || $python -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target $kept/site $kept/wheels/*.whl || exit 1
  export PYTHONPATH=$kept/site:$PWD
elif ! $python -c 'import headrace, torch, pytest' 2>/dev/null; then
  scripts/install.sh test && python=.venv/bin/python || exit 1
fi
if ls $kept/demo.gguf.part-* >/dev/null 2>&1; then
  cache=${HEADRACE_CACHE:-$kept/cache}
  export HEADRACE_CACHE=$cache
  demo=$($python -c 'from headrace.utils.cache import cache_dir; from headrace.utils.demo import FILE; print(cache_dir() / "demo" / FILE)')
  if [ ! -f "$demo" ]; then
    mkdir -p "$(dirname "$demo")" && cat $kept/demo.gguf.part-* >"$demo"
    [ "$(sha256sum "$demo" | cut -d' ' -f1)" = "$(cat $kept/demo.sha256)" ] || { echo "headrace: the demo model's parts are incomplete" >&2; rm "$demo"; }
  fi
fi
[ -f $kept/commit ] && export COMMIT=$(cat $kept/commit)
export OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
[ $# -gt 0 ] || set -- tests kernels engine
status=0
for what in "$@"; do
  case $what in
    # Kernel, attention and worker tests use the GPU wherever there is one; these others have tests marked for it.
    tests)
      $python -m pytest -q --timeout 300 -p no:cacheprovider tests/kernels tests/attention tests/worker -m 'not slow' 2>&1 | tee "$out/gpu_kernel_tests.log" || status=1
      $python -m pytest -q --timeout 300 -p no:cacheprovider -m gpu tests/gpu tests/models tests/e2e 2>&1 | tee "$out/gpu_tests.log" || status=1 ;;
    kernels)
      $python -m benchmarks.kernels.bench_kernels --report_json "$out/kernels.json" || status=1
      $python -m benchmarks.kernels.kv_transfer --report_json "$out/kv_transfer.json" || status=1 ;;
    engine) $python -m benchmarks.engine.qwen3_8b --report_json "$out/engine.json" || status=1 ;;
    *) echo "headrace: $what is none of tests, kernels, engine, keep" >&2; exit 2 ;;
  esac
done
exit $status
