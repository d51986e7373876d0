#!/usr/bin/env bash
# Sets up, then lint, types and all tests. Arguments go to pytest: bash scripts/test.sh -m 'not swarm'
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
exec .venv/bin/python -m pytest "$@"
