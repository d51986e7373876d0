"""Verifies proofs that a reducer has lied, offline.

    python -m spes_swarm.proof FILE [FILE ...]

Prints for each file who lied, in which run, round and part, and how. The exit code is 1 if a file proves nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from spes_swarm.base.arguments import end_program, exit_code
from spes_swarm.base.errors import ProtocolError, UserError, os_errors_as
from spes_swarm.config.command_line import command_parser


def main(arguments: list[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    return exit_code("proof", lambda: _run(_parse(arguments)))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_parser("proof", __doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="a proof")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    verdicts = [_verify(path) for path in options.files]
    return 0 if all(verdicts) else 1


def _verify(path: Path) -> bool:
    """Prints what a file proves; returns False if that is nothing."""
    from spes_swarm.protocol.averaging.proof import MAX_PROOF_BYTES, open_proof  # imports numpy

    try:
        proof = open_proof(_read(path, MAX_PROOF_BYTES))
    except UserError as exc:  # there may be proofs in the other files
        print(_one_line(str(exc)), flush=True)
        return False
    except ProtocolError as exc:
        print(_one_line(f"{path} proves nothing: {exc}"), flush=True)
        return False
    where = f"round {proof.round} of {proof.run_id}, part {proof.part}"
    print(_one_line(f"{path}: peer {proof.culprit} lied in {where}: {proof.what}"), flush=True)
    return True


def _read(path: Path, max_bytes: int) -> bytes:
    with os_errors_as(UserError, f"{path} cannot be read"), path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise UserError(f"{path} is not a proof: it has more than {max_bytes >> 20} MiB")
    return data


def _one_line(text: str) -> str:
    """The name of a file can contain any character."""
    return "".join(c if c.isprintable() else " " for c in text)


if __name__ == "__main__":
    end_program(main())
