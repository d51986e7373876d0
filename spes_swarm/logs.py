"""Packs the logs of a peer for a bug report.

    python -m spes_swarm.logs OUTPUT_DIR [--to FILE.tar.gz]

The archive has the log, the newest events, the manifest of the run, and the versions of this machine's software. It has
no identity, weights or data, and what looks like a token, an invitation or a key is replaced. The peer may be running.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import tarfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

from spes_swarm.base.arguments import end_program, exit_code
from spes_swarm.base.errors import CheckpointError, UserError, os_errors_as
from spes_swarm.base.log import redacted
from spes_swarm.config.command_line import command_parser
from spes_swarm.storage.run_directory import RunDirectory

_MAX_BYTES = 64 << 20  # of one file: its end


def main(arguments: list[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    return exit_code("logs", lambda: _run(_parse(arguments)))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_parser("logs", __doc__)
    parser.add_argument("directory", type=Path, metavar="OUTPUT_DIR", help="of a peer")
    parser.add_argument("--to", type=Path, metavar="FILE.tar.gz", help="default: OUTPUT_DIR's name, in this directory")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> None:
    directory = RunDirectory(options.directory)
    files = [path for path in [*sorted(directory.path.glob("log*.txt")), directory.metrics] if path.is_file()]
    if not files:
        raise UserError(f"{directory.path} has no logs: give the --output-dir of a peer")
    texts: dict[str, Callable[[], str]] = {path.name: partial(_end_of, path) for path in files}
    texts |= {"manifest.json": partial(_manifest_of, directory), "versions.json": _versions}
    target = options.to or Path(f"{directory.path.resolve().name}-logs.tar.gz")
    with os_errors_as(UserError, f"{target} cannot be written"), tarfile.open(target, "w:gz") as archive:
        for name, read in texts.items():
            data = redacted(read()).encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    print(f"{target}: {', '.join(texts)}; look through it before you publish it")


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_BYTES))
        return file.read(_MAX_BYTES).decode(errors="backslashreplace")


def _manifest_of(directory: RunDirectory) -> str:
    try:
        manifest = directory.raw_manifest()
    except CheckpointError as exc:
        return str(exc)
    return manifest.data.decode() if manifest is not None else "none"


def _versions() -> str:
    versions = {"python": platform.python_version(), "system": platform.platform()}
    versions |= {package.metadata["Name"]: package.version for package in distributions()}
    return json.dumps(versions, indent=1)


if __name__ == "__main__":
    end_program(main())
