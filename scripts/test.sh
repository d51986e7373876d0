#!/usr/bin/env bash
# Installs, lints, type-checks and runs the tests.
#
#   bash scripts/test.sh            everything; further arguments go to pytest
#   bash scripts/test.sh --quick    for the inner loop: without the tests marked as swarm or slow
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # set in many containers: every process of the tests would compile the package again
if [ "${1:-}" = --quick ]; then
    shift
    set -- -n 2 --dist load -m "not swarm and not slow" "$@"
fi
bash scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/lint-imports
# Tests of several peers mostly wait: three files at a time, those first (tests/conftest.py); -n 0 runs one at a time.
exec .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
