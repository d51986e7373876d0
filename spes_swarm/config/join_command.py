"""The command that joins a run, as a peer prints it, the monitor shows it, and a model card quotes it."""

from __future__ import annotations

import shlex

from spes_swarm.config.manifest import Manifest
from spes_swarm.config.run import DataConfig

_YOUR_DATA = "YOUR_DATA"


def join_command(manifest: Manifest, address: str, python: str = "python") -> str:
    """Returns the command with which a newcomer joins through the peer at `address` (a multiaddress)."""
    command = [python, "-m", "spes_swarm.join", "--initial-peers", address, "--run-id", manifest.run_id]
    return shlex.join([*command, *data_arguments(manifest.run.data)])


def data_arguments(run: DataConfig) -> list[str]:
    """Returns the data arguments of a command to join.

    A corpus is given by its name. Pasted unchanged, that names no file, or one whose tokens are compared with the
    run's, so no peer trains on other data unnoticed. The standard library needs no argument, as every machine has it.
    """
    if run.kind == "corpus":
        return ["--data", run.name or _YOUR_DATA]
    return ["--data", _YOUR_DATA] if run.kind == "own" else []


def describe_data(data: DataConfig) -> str:
    """Describes what a run or a peer trains on."""
    if data.kind == "stdlib":
        return "the Python standard library"
    if data.kind == "own":
        return "each peer's own data"
    if data.kind == "corpus":
        name = repr(data.name) if data.name else "a corpus"
        return name + (f" (digest {data.digest[:12]})" if data.digest else "")
    return "unspecified data"


def join_note(data: DataConfig) -> str | None:
    """Returns what the user has to know about the data in the command; None if nothing."""
    if data.kind == "corpus":
        return f"{describe_data(data)} is what the run trains on: put the path of your copy after --data"
    return "put the path of your own data after --data" if data.kind == "own" else None
