#!/usr/bin/env bash
# Fills .gpu/ with what an offline CUDA machine lacks: wheels for its Python and the demo model in parts.
set -euo pipefail
cd "$(dirname "$0")/../.."
version=${GPU_PYTHON:-3.12}
mkdir -p .gpu/wheels
platforms=()
for n in 39 35 34 31 28 27 24 17; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any)
echo "headrace: fetching wheels for Python $version"
python3 -m pip download --disable-pip-version-check -q --no-deps --only-binary=:all: --python-version "$version" \
  --implementation cp "${platforms[@]}" -d .gpu/wheels -r scripts/gpu/requirements.txt
model=$(.venv/bin/python -c 'from headrace.utils.hub import resolve_model; print(resolve_model("demo").path)')
rm -f .gpu/demo.gguf.part-*
split -b 50M "$model" .gpu/demo.gguf.part-
sha256sum "$model" | cut -d' ' -f1 >.gpu/demo.sha256
git rev-parse HEAD >.gpu/commit
du -sh .gpu/wheels .gpu/demo.gguf.part-*
