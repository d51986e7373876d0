"""The command that joins a run, as a peer prints it, the monitor shows it, and a model card quotes it."""

from __future__ import annotations

import itertools
import shlex
import sys
from pathlib import Path

from spes_swarm.config.data import DataConfig

_YOUR_DATA = "YOUR_DATA"
_CHARS_LEFT_OUT = 16  # of the digest in a run id: 8 are enough for the name of a directory


def join_command(
    run_id: str, data: DataConfig, address: str, python: str = "python", *, one_thread: bool = False
) -> str:
    """Returns the command with which a newcomer joins through the peers at `address` (multiaddresses).

    Its output directory is named after the run, and is a new one on this machine. With `one_thread` a peer uses one
    CPU thread, which other peers on its machine do not slow down.
    """
    command = [python, "-m", "spes_swarm.join", "--initial-peers", *address.split(), "--run-id", run_id]
    name = f"runs/{run_id[:-_CHARS_LEFT_OUT]}"
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    directory = next(path for path in itertools.chain([name], numbered) if not Path(path).exists())
    threads = ["--num-threads", "1"] if one_thread else []
    return shlex.join([*command, "--output-dir", directory, *threads, *data_arguments(data)])


def interpreter() -> str:
    """Returns the running interpreter as a user would type it."""
    python = Path(sys.executable)
    return str(python.relative_to(Path.cwd())) if python.is_relative_to(Path.cwd()) else str(python)


def data_arguments(run: DataConfig) -> list[str]:
    """Returns the data arguments of a command to join.

    A corpus, or a directory that streams, is given by its name. Pasted unchanged, the name matches no file, or one
    whose content is compared with the run's, so no peer trains on other data unnoticed. Data that every machine can
    find (the standard library, data sets on the Hub) need no argument.
    """
    if run.kind == "own":
        return ["--data", _YOUR_DATA]
    return [] if run.kind is None or source_of(run) is not None else ["--data", _joined(run)]


def source_of(run: DataConfig) -> str | None:
    """Returns the `--data` of a run whose data every machine can find; None if a peer has to name its copy."""
    if run.kind in (None, "own") or not all(_is_everywhere(part) for _, part in run.parts):
        return None
    return _joined(run)


def _is_everywhere(part: DataConfig) -> bool:
    return part.kind == "stdlib" or _is_on_hub(part)


def _is_on_hub(part: DataConfig) -> bool:
    """Returns True for a data set on the Hub: one in a directory has a digest but no commit."""
    return part.kind == "hf" and part.name is not None and (part.revision is not None or part.digest is None)


def _joined(run: DataConfig) -> str:
    terms = [(weight, _argument(part)) for weight, part in run.parts]
    return terms[0][1] if len(terms) == 1 else " + ".join(f"{weight!r}*{text}" for weight, text in terms)


def _argument(part: DataConfig) -> str:
    if part.kind == "stdlib":
        return "stdlib"
    name = part.name or _YOUR_DATA
    if part.kind == "corpus":
        return name
    config = f":{part.config}" if part.config else ""
    place = "" if _is_on_hub(part) else "./"
    return f"hf:{place}{name}{config}" + (f"@{part.revision}" if part.revision else "")


def describe_data(data: DataConfig) -> str:
    """Describes what a run or a peer trains on."""
    if data.kind == "stdlib":
        return "the Python standard library"
    if data.kind == "own":
        return "each peer's own data"
    if data.kind == "mixture":
        return " and ".join(f"{weight:.3g} of {describe_data(part)}" for weight, part in data.parts)
    if data.kind in ("corpus", "hf"):
        what = "a corpus" if data.kind == "corpus" else "a data set"
        name = repr(data.name) if data.name else what
        details = [f"configuration {data.config}"] if data.config else []
        details += [f"split {data.split}"] if data.split not in (None, "train") else []
        if data.revision:
            details.append(f"commit {data.revision[:12]}")
        elif data.digest:
            details.append(f"digest {data.digest[:12]}")
        return name + (f" ({', '.join(details)})" if details else "")
    return "unspecified data"


def join_note(data: DataConfig) -> str | None:
    """Returns what the user has to know about the data in the command; None if nothing."""
    if data.kind == "own":
        return "put the path of your own data after --data"
    if data.kind is None or source_of(data) is not None:
        return None
    if data.kind == "mixture":
        return f"the run trains on {describe_data(data)}: put the paths of your copies into --data"
    return f"{describe_data(data)} is what the run trains on: put the path of your copy after --data"
