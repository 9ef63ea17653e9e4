#!/usr/bin/env bash
# Checks and times the worker's GPU path in at most 6 minutes; needs torch, triton, transformers.
#   bash benchmarks/gpu/run.sh             on a CUDA device
#   bash benchmarks/gpu/run.sh --dry-run   the same code in Triton's interpreter, tiny shapes
# OUT is the folder for gpu.json (default run/gpu), PYTHON the interpreter, WHEELS a folder with
# wheels of what this machine lacks (default run/gpu-wheels; see docs/gpu.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${OUT:-run/gpu}
mkdir -p "$out"
# Everything is within this limit, putting the wheels in place too; stages.py ends sooner by itself.
exec timeout --kill-after=5 355 "${PYTHON:-python3}" -m benchmarks.gpu.stages \
    --out "$out/gpu.json" --wheels "${WHEELS:-run/gpu-wheels}" "$@"
