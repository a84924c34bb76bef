#!/usr/bin/env bash
# Makes .venv and installs Headrace in it.  usage: scripts/install.sh run|test|dev|bench
# Says what it does, does nothing when nothing changed, and fails with one sentence.
set -uo pipefail
cd "$(dirname "$0")/.."
want=${1:-run}
venv=.venv
log=$venv/install.log
fail() { printf 'headrace: %s\n' "$1" >&2; exit 1; }

stamp_text="$want $(cat pyproject.toml scripts/install.sh | cksum) $PWD"
for done_level in "$want" dev; do
  [ -f "$venv/.installed-$done_level" ] || continue
  [ "$(cat "$venv/.installed-$done_level")" = "$done_level ${stamp_text#* }" ] && exit 0
done

version_ok() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; }
python=""
for candidate in "${PYTHON:-}" python3 python3.12 python3.11 python3.13 python3.10; do
  if [ -n "$candidate" ] && command -v "$candidate" >/dev/null && version_ok "$candidate"; then python=$candidate; break; fi
done
[ -n "$python" ] || fail "Python 3.10 to 3.13 is needed and python3 here is $(python3 -V 2>&1 || echo absent); install one, or name it: make PYTHON=/path/to/python3.12"

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }
need_mb=3000; has_gpu && need_mb=12000
[ -x $venv/bin/headrace ] && need_mb=1500
free_mb=$(df -Pm . | awk 'NR==2 {print $4}')
[ "$free_mb" -ge "$need_mb" ] || fail "the disk under $PWD has $free_mb MB free and the install needs $need_mb MB; free some space and run it again"

if ! [ -x $venv/bin/pip ]; then
  echo "headrace: making $venv with $($python -V)"
  $python -m venv $venv >/dev/null 2>&1 || { rm -rf $venv; fail "$python cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)"; }
fi
version_ok $venv/bin/python || fail "$venv was made with $($venv/bin/python -V), which Headrace does not support; run make clean first"

pip_install() {
  $venv/bin/python -m pip install --disable-pip-version-check --retries 2 --timeout 20 --log "$log" "$@" && return
  if grep -q 'No space left on device' "$log"; then fail "the disk filled up while installing; free some space and run it again"; fi
  if grep -qE 'NewConnectionError|Temporary failure in name resolution|ConnectTimeout|Network is unreachable|ProxyError' "$log"; then
    fail "the package index cannot be reached; check the network (or pip's proxy and index settings) and run it again"
  fi
  fail "pip could not install $* (the reason is at the end of $log)"
}
: >"$log"
# Without a GPU this exact version is asked for, so that an index or a local wheel with a CPU build can serve it.
if ! $venv/bin/python -c 'import torch' 2>/dev/null; then
  if has_gpu; then echo "headrace: installing PyTorch with CUDA (several GB)"; pip_install 'torch>=2.11,<2.15'
  else echo "headrace: installing PyTorch for the CPU"; pip_install torch==2.13.0; fi
fi
case $want in
  run) target=. ;;
  *) target=".[$want]" ;;
esac
echo "headrace: installing Headrace ($want)"
pip_install -e "$target"
echo "$stamp_text" >"$venv/.installed-$want"
