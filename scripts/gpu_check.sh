#!/usr/bin/env bash
# Runs scripts/gpu_check.py with the first Python that has what it needs; installs nothing.
#
#   bash scripts/gpu_check.sh             everything that needs a GPU, in less than nine minutes
#   bash scripts/gpu_check.sh --quick     small sizes, on a CPU too
set -euo pipefail
cd "$(dirname "$0")/.."
needed="numpy, torch, transformers, yaml, blake3"
has_all="import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, '$needed'.split(', '))))"
for python in ${PYTHON:-.venv/bin/python python3}; do
    if command -v "$python" >/dev/null && "$python" -c "$has_all" 2>/dev/null; then
        PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$python" scripts/gpu_check.py "$@"
    fi
done
echo "gpu_check: no Python has all of $needed: bash scripts/setup.sh, or name one with PYTHON=..." >&2
exit 2
