#!/usr/bin/env bash
# Sets up, then lint, types and all tests. Arguments go to pytest: bash scripts/test.sh -m 'not swarm'
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/lint-imports
# Tests of several peers mostly wait, so three files at a time, these first (tests/conftest.py); -n 0 runs one after another.
exec .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
