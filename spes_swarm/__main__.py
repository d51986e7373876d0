"""`python -m spes_swarm`: lists the commands."""

from __future__ import annotations

from spes_swarm.base.arguments import end_program, exit_code
from spes_swarm.base.errors import UserError
from spes_swarm.base.wording import two_columns
from spes_swarm.config.command_line import OneLineParser

_COMMANDS = {
    "join": "join a run, or found one",
    "plan": "plan the memory that a run needs",
    "monitor": "watch a run",
    "export": "save the newest checkpoint as a plain transformers model",
    "publish": "publish a round on the Hugging Face Hub, or in a directory",
    "tokenize": "turn text into token files",
    "upcycle": "turn a dense model into a mixture of experts",
    "evaluate": "evaluate an export with lm-evaluation-harness",
    "invite": "invite peers to a private run, and take invitations back",
    "logs": "pack the logs of a peer for a bug report",
    "proof": "verify proofs that a reducer has lied, offline",
}


def main(arguments: list[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    return exit_code("spes_swarm", lambda: _run(arguments))


def _run(arguments: list[str] | None) -> None:
    parser = OneLineParser(prog="python -m spes_swarm", add_help=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("command", nargs="*")
    options, unknown = parser.parse_known_args(arguments)
    given = options.command
    if unknown and not given:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if given:
        dotted = f"spes_swarm.{given[0]}" if given[0] in _COMMANDS else "spes_swarm.COMMAND"
        raise UserError(f"commands are modules: use python -m {dotted}; python -m spes_swarm lists them")
    print(two_columns([(f"python -m spes_swarm.{name}", purpose) for name, purpose in _COMMANDS.items()]))
    print("Each has --help.")


if __name__ == "__main__":
    end_program(main())
