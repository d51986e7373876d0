#!/usr/bin/env bash
# Installs, then starts three volunteers on real text, shows them learn, survive a kill, and exports the model.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec .venv/bin/python scripts/demo.py "$@"
