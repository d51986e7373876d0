#!/usr/bin/env bash
# Makes .venv at the repository root and installs spes_swarm with its development tools, at the tested versions.
# Needs only Python 3.11, 3.12 or 3.13. Does nothing when nothing has changed since the last time.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/.installed
wanted=$(cat pyproject.toml scripts/constraints.txt scripts/setup.sh | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi

python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.11 python3.12 python3.13 python3; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
            python=$candidate
            break
        fi
    done
fi
if [ -z "$python" ]; then
    echo "setup: Python 3.11, 3.12 or 3.13 is needed (on Debian: apt-get install python3 python3-venv)" >&2
    exit 2
fi

[ -x .venv/bin/python ] || "$python" -m venv .venv || {
    echo "setup: $python cannot make a virtual environment (on Debian: apt-get install python3-venv)" >&2
    exit 2
}
install() {
    # Of pip's output, what shows that it gets on: each package, each download with its size, the unpacking.
    .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off "$@" -c scripts/constraints.txt |
        sed -nu -e '/\.metadata/d' -e 's/^Collecting \([^ ]*\).*/setup:   \1/p' \
            -e 's/^ *Downloading \([^ ]*\) (\(.*\))$/setup:   downloading \1, \2/p' \
            -e 's/^Installing collected packages: .*/setup:   unpacking/p' || {
        echo "setup: pip has failed, see above; mend the reason and run this again, which goes on from there" >&2
        exit 1
    }
}
# torch first and on its own: asked for as a dependency, pip may take a CUDA build of several GB.
echo "setup: torch into .venv (1 of 2; a few minutes the first time)"
install "$(grep '^torch==' scripts/constraints.txt)"
echo "setup: spes_swarm and what else it needs (2 of 2)"
install -e '.[dev]'
echo "$wanted" >"$stamp"
echo "setup: done; found a run with"
echo "  .venv/bin/python -m spes_swarm.join --num-threads 1"
