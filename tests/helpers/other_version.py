"""Versions of spes_swarm that speak another protocol.

`python -m tests.helpers.other_version 7.1 join ...` measures one more metric, too, and its records and statements have
a field that this version does not know. `with_protocol` has only another number.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.testing.local_peer import PeerProcess

SLOW_S = 0.5  # before each step: the interpreters of other versions start meanwhile, which takes longer than rounds


def command(version: str, name: str, *arguments: object) -> list[str]:
    """The command line of a command of that version."""
    return [sys.executable, "-m", "tests.helpers.other_version", version, name, *map(str, arguments)]


def launch_version(version: str) -> Callable[[Sequence[str], Path], PeerProcess]:
    """Starts `join` of that version; a `launch` argument of LocalPeer."""

    def launch(arguments: Sequence[str], log: Path) -> PeerProcess:
        with log.open("ab") as output:
            return subprocess.Popen(
                command(version, "join", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    return launch


def with_protocol(number: str, main: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Runs a command in this process, which has imported everything, as that version; for the fork server."""
    from spes_swarm.protocol import version

    protocol = version.Version(*map(int, number.split(".")))
    for module in [module for name, module in sys.modules.items() if name.startswith("spes_swarm.")]:
        if hasattr(module, "PROTOCOL"):
            setattr(module, "PROTOCOL", protocol)  # noqa: B010 - it is final
    return main(arguments)


def _become(number: str) -> None:
    """Changes this process into one of that version, before anything is imported that depends on it."""
    from tests.helpers import one_more_metric

    one_more_metric.declare()
    from spes_swarm.protocol import version

    setattr(version, "PROTOCOL", version.Version(*map(int, number.split("."))))  # noqa: B010 - it is final
    from spes_swarm.protocol.members import records
    from spes_swarm.protocol.rounds import statement

    for module, name in ((records, "Progress"), (records, "Lease"), (records, "Rounds"), (statement, "Statement")):
        known = getattr(module, name)
        newer = type(name, (known,), {"__annotations__": {"mood": str}, "mood": "good", "__module__": __name__})
        setattr(module, name, newer)
        for kind, schema in records.SCHEMAS.items():
            if schema is known:
                records.SCHEMAS[kind] = newer


def main(arguments: list[str]) -> int:
    """Runs the command."""
    number, name, *rest = arguments
    _become(number)
    if name == "join":
        from spes_swarm.training.rounds import commits

        measure: Any = commits.MeasuredRound  # type: ignore[attr-defined]
        setattr(commits, "MeasuredRound", partial(measure, grad_norm=0.5))  # noqa: B010 - mypy: it is a class
        from tests.helpers.slow_join import sleeping_main

        return sleeping_main(SLOW_S, rest)
    code: int = import_module(f"spes_swarm.{name}").main(rest)
    return code


if __name__ == "__main__":
    from spes_swarm.base.arguments import end_program

    end_program(main(sys.argv[1:]))
