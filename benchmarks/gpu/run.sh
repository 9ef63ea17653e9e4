#!/usr/bin/env bash
# Checks and times the worker's GPU path in at most 6 minutes; needs torch, triton, transformers.
#   bash benchmarks/gpu/run.sh             on a CUDA device
#   bash benchmarks/gpu/run.sh --dry-run   the same code in Triton's interpreter, tiny shapes
# OUT is the folder for gpu.json (default run/gpu), PYTHON the interpreter, WHEELS a folder with
# wheels of what this machine lacks (default run/gpu-wheels; see docs/gpu.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
out=${OUT:-run/gpu}
wheels=${WHEELS:-run/gpu-wheels}
mkdir -p "$out"
if compgen -G "$wheels/*.whl" >/dev/null; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
    # Last on the path: what the machine has goes before what was carried.
    export QUIRE_GPU_SITE=$site
fi
timeout --kill-after=5 355 "$python" -m benchmarks.gpu.stages --out "$out/gpu.json" "$@"
