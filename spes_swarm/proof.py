"""Verifies proofs that a reducer has lied, offline.

    python -m spes_swarm.proof FILE [FILE ...]
    python -m spes_swarm.proof FILE --pardon --output-dir runs/founder

Prints for each file who lied, in which run, round and part, and how. The exit code is 1 if a file proves nothing. With
--pardon, the founder of the run forgives these lies, and all up to its last round: their authors may take part again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from spes_swarm.base.arguments import end_program, exit_code
from spes_swarm.base.errors import ConfigError, InvitationError, ProtocolError, UserError, os_errors_as
from spes_swarm.config.command_line import command_parser

if TYPE_CHECKING:
    from spes_swarm.protocol.averaging.proof import Proof


def main(arguments: list[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    return exit_code("proof", lambda: _run(_parse(arguments)))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_parser("proof", __doc__)
    add = parser.add_argument
    add("files", type=Path, nargs="+", metavar="FILE", help="a proof")
    add("--pardon", action="store_true", help="forgive what is proven; only the founder of the run can")
    add("--output-dir", type=Path, metavar="DIR", help="with --pardon: of the founder's peer, which may be running")
    add("--identity", metavar="FILE", help="with --pardon: identity file of that peer, if it is stored elsewhere")
    options = parser.parse_args(arguments)
    if options.pardon != (options.output_dir is not None) or (options.identity and not options.pardon):
        raise ConfigError("a pardon takes --pardon and the founder's --output-dir")
    return options


def _run(options: argparse.Namespace) -> int:
    proofs = [_verify(path) for path in options.files]
    found = [proof for proof in proofs if proof is not None]
    if options.pardon and len(found) == len(proofs):
        _pardon(found, options.output_dir, options.identity)
    return 0 if len(found) == len(proofs) else 1


def _pardon(proofs: Sequence[Proof], output_dir: Path, identity: str | None) -> None:
    from spes_swarm.protocol.admission.acts import Pardon, pardon
    from spes_swarm.protocol.members.identity import Identity
    from spes_swarm.storage.invitations import publish_act
    from spes_swarm.storage.run_directory import RunDirectory

    directory = RunDirectory(output_dir)
    manifest, path = directory.require_run(), directory.identity_file(identity)
    founder = Identity.load(path) if path.exists() else None
    if founder is None or founder.peer_id != manifest.founder:
        raise InvitationError(f"only the founder of the run can pardon, peer {manifest.founder}")
    if strange := [proof.run_id for proof in proofs if proof.run_id != manifest.run_id]:
        raise UserError(f"the founder of {manifest.run_id} cannot pardon lies in run {strange[0]}")
    rounds: dict[str, int] = {}
    reached = _last_round(directory.metrics)  # others may have proofs of other lies
    for proof in proofs:
        rounds[proof.culprit] = max(proof.round, rounds.get(proof.culprit, reached))
    for peer_id, last in rounds.items():
        when = publish_act(
            directory, pardon(founder, manifest.run_id, Pardon(peer=peer_id, round=last, at=time.time()))
        )
        print(f"pardoned {peer_id} for its lies up to round {last}; {when}", flush=True)


def _last_round(metrics: Path) -> int:
    """The last round in a peer's events; 0 if there is none."""
    number = 0
    with suppress(OSError), metrics.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):
                event = json.loads(line) if '"round"' in line else {}
                number = max(number, int(event["round"]) if event["event"] == "round" else 0)
    return number


def _verify(path: Path) -> Proof | None:
    """Prints what a file proves, and returns it; None if that is nothing."""
    from spes_swarm.protocol.averaging.proof import MAX_PROOF_BYTES, open_proof  # imports numpy

    try:
        proof = open_proof(_read(path, MAX_PROOF_BYTES))
    except UserError as exc:  # there may be proofs in the other files
        print(_one_line(str(exc)), flush=True)
        return None
    except ProtocolError as exc:
        print(_one_line(f"{path} proves nothing: {exc}"), flush=True)
        return None
    where = f"round {proof.round} of {proof.run_id}, part {proof.part}"
    print(_one_line(f"{path}: peer {proof.culprit} lied in {where}: {proof.what}"), flush=True)
    return proof


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
