#!/usr/bin/env bash
# The whole test suite; extra arguments go to pytest. One OpenMP thread a process: two test processes share the cores.
set -uo pipefail
cd "$(dirname "$0")/.."
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
# In CI the demo model must be there: its tests may not be skipped.
[ -n "${CI:-}" ] && export HEADRACE_REQUIRE_DEMO=1
exec .venv/bin/python -m pytest -n "${TEST_PROCESSES:-2}" --dist loadfile -q "$@"
