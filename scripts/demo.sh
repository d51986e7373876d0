#!/usr/bin/env bash
# Installs, then runs three volunteers on real text: they learn, one is killed, and the model is exported.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec .venv/bin/python scripts/demo.py "$@"
