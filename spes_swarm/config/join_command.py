"""The command with which others join a run: what a peer prints, the monitor shows and a model card says."""

from __future__ import annotations

import shlex

from spes_swarm.config.manifest import Manifest
from spes_swarm.config.run import DataConfig

_YOUR_DATA = "YOUR_DATA"


def join_command(manifest: Manifest, address: str, python: str = "python") -> str:
    """What a newcomer types.

    Args:
        manifest: of the run.
        address: multiaddress of a peer.
        python: the interpreter.
    """
    command = [python, "-m", "spes_swarm.join", "--initial-peers", address, "--run-id", manifest.run_id]
    return shlex.join([*command, *data_arguments(manifest.run.data)])


def data_arguments(run: DataConfig) -> list[str]:
    """What a command to join needs beyond address and run id.

    A corpus stands there by its name. Pasted as it is, that names no file, or one whose tokens are compared with the
    run's: nobody trains on other data unnoticed. The standard library needs no argument, as every machine has it.
    """
    if run.kind == "corpus":
        return ["--data", run.name or _YOUR_DATA]
    return ["--data", _YOUR_DATA] if run.kind == "own" else []


def describe_data(data: DataConfig) -> str:
    """What a run or a peer trains on, in words."""
    if data.kind == "stdlib":
        return "the Python standard library"
    if data.kind == "own":
        return "data of each peer's own"
    if data.kind == "corpus":
        name = repr(data.name) if data.name else "a corpus"
        return name + (f" (digest {data.digest[:12]})" if data.digest else "")
    return "data that its description does not name"


def join_note(data: DataConfig) -> str | None:
    """What whoever types the command has to know about its data; None: nothing."""
    if data.kind == "corpus":
        return f"{describe_data(data)} is what the run trains on: put the path of your copy after --data"
    return "put the path of your own data after --data" if data.kind == "own" else None
