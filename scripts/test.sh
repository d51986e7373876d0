#!/usr/bin/env bash
# Installs, lints, type-checks and runs all tests. Arguments go to pytest: bash scripts/test.sh -m 'not swarm'
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/lint-imports
# Tests of several peers mostly wait: three files at a time, those first (tests/conftest.py); -n 0 runs one at a time.
exec .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
