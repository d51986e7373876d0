"""Peers for which one phase of joining never gets done, as on a machine without a free processor.

`python -m tests.helpers.spinning_join ...` is held up while torch is imported, `launch_spinning` while the data is
opened.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

from scripts.testing.forked_peer import ForkServer
from spes_swarm.join import main

MARK = "spinning"  # a file in the output directory: the phase has begun


def launch_spinning() -> ForkServer:
    """Starts `join` with data whose opening never ends."""
    return ForkServer(main=_spinning_main)


def _spinning_main(arguments: list[str]) -> int:
    from spes_swarm.peer.joining import join as joining

    setattr(joining, "open_data", lambda *_: _spin(arguments))  # noqa: B010 - mypy lets no function be assigned to
    return main(arguments)


def _spin(arguments: list[str]) -> NoReturn:
    Path(arguments[arguments.index("--output-dir") + 1], MARK).touch()
    while True:
        sum(range(1000))


class _SlowImport:
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "torch":
            _spin(sys.argv)


if __name__ == "__main__":
    sys.meta_path.insert(0, _SlowImport())
    sys.exit(main(sys.argv[1:]))
