"""Plans what a peer needs for a run, before anything is downloaded or allocated.

    python -m spes_swarm.plan --config configs/spes-2b.yaml --memory 16GB --host-memory 24GB --experts 1

Prints the memory of a peer by class, the settings with which it fits, and the cost of a round. Fetches only config.json
of a model on the Hub.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spes_swarm.base.arguments import end_program, exit_code
from spes_swarm.base.errors import ConfigError
from spes_swarm.base.wording import plural, two_columns
from spes_swarm.config.command_line import command_parser

if TYPE_CHECKING:
    from spes_swarm.config.experts_wanted import ExpertsWanted
    from spes_swarm.config.run import RunConfig
    from spes_swarm.peer.memory.plan import Plan

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_DEFAULT_MEMORY = "16GB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    return exit_code("plan", lambda: _run(_parse(arguments)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("plan", __doc__)
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="YAML file with a `run` section; without it, the quickstart")
    add("--initial-weights", metavar="MODEL", help="plan for this model: a directory, or USER/REPO[@REVISION]")
    add("--experts", default="auto", metavar="auto|N|i,j", help="experts; auto: the run's number, or what fits")
    add("--batch-size", type=int, metavar="SEQUENCES", help="sequences in a local step; without it, the run's")
    add("--device", choices=("gpu", "cpu"), default="gpu", help="device that trains")
    add("--memory", metavar="SIZE", help=f"memory of each GPU; without it, {_DEFAULT_MEMORY}")
    add("--host-memory", default="32GB", metavar="SIZE", help="memory of the machine")
    add("--ranks", type=int, default=1, metavar="N", help="GPUs, or CPU processes, of this peer")
    add("--upload", type=float, default=20.0, metavar="MBIT", help="upload bandwidth in Mbit/s")
    add("--download", type=float, default=100.0, metavar="MBIT", help="download bandwidth in Mbit/s")
    add("--peers", type=int, default=16, metavar="N", help="peers in the swarm")
    add("--json", action="store_true", help="print JSON")
    return parser.parse_args(arguments)


def parse_size(flag: str, text: str) -> int:
    """Returns the bytes of a size such as 16GB, 16GiB, 16g or 17179869184.

    Raises:
        ConfigError: the text is not a size.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]i?)?b?", text.strip().lower(), re.ASCII)
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2] or ""])
    if size == 0:
        raise ConfigError(f"{flag}: found {text!r}, expected a size such as 16GB or 16GiB")
    return size


def _run(options: argparse.Namespace) -> None:
    if options.device == "cpu" and options.memory is not None:
        raise ConfigError("--memory is that of a GPU; with --device cpu, give --host-memory")
    memory = parse_size("--memory", options.memory or _DEFAULT_MEMORY)
    host_memory = parse_size("--host-memory", options.host_memory)
    for name in ("upload", "download", "peers", "ranks", "batch_size"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')}: found {value}, expected more than 0")
    # Everything below imports torch and transformers, which takes seconds.
    import torch

    from spes_swarm.peer.memory.plan import Machine, plan

    device = torch.device("cuda" if options.device == "gpu" else "cpu")
    run, wanted = _read_run(options)
    wanted.check(run.model.num_experts)
    machine = Machine(
        device=device,
        memory=memory,
        host_memory=host_memory,
        upload=options.upload,
        download=options.download,
        ranks=options.ranks,
    )
    made = plan(run, wanted.number, machine, options.peers, options.batch_size)
    print(json.dumps(made.to_json(), indent=1) if options.json else _table(made))


def _read_run(options: argparse.Namespace) -> tuple[RunConfig, ExpertsWanted]:
    """Returns the run that `join` would found with the same --config and --initial-weights, and the wanted experts."""
    from spes_swarm.config.peer import override
    from spes_swarm.peer.join_request import draft_request

    weights: str | None = options.initial_weights
    flags = {"initial_weights": weights, "experts": options.experts}
    draft = draft_request(options.config, weights, lambda peer: override(peer, **flags))
    run = draft.founded_run(with_tokenizer=False)
    if run is None:
        raise ConfigError(f"{options.config}: a plan needs a `run` section")
    return run, draft.peer.experts


def _table(made: Plan) -> str:
    from spes_swarm.peer.memory.capacity import gigabytes

    def sizes(title: str, classes: dict[str, int], peak: int) -> str:
        rows = [(name.replace("_", " "), gigabytes(size)) for name, size in classes.items()]
        return f"{title}\n{two_columns([*rows, ('together', gigabytes(peak))])}"

    on_cpu = made.trains_on == "cpu"
    device = "host memory for training" if on_cpu else f"memory of {'each' if made.ranks > 1 else 'the'} GPU"
    host = {"training": made.device_peak, **made.host} if on_cpu else made.host
    settings = [(f"--{name.replace('_', '-')}", str(value)) for name, value in made.settings().items()]
    parts = [
        sizes(device, made.device, made.device_peak),
        sizes("host memory", host, made.host_peak),
        f"settings\n{two_columns(settings)}",
    ]
    covered = f"{made.covered_experts} of {made.num_experts}"
    if made.covered_experts < made.num_experts:
        covered += f"; experts take turns of {plural(made.turn_rounds, 'round')}, and stay as they are between them"
    costs = [
        ("bytes each way in a round", gigabytes(made.round_bytes)),
        ("seconds for them", f"{made.round_seconds:,.0f}"),
        ("bytes each way for a local step", gigabytes(made.step_bytes)),
        (f"experts that {plural(made.peers, 'such peer')} {'covers' if made.peers == 1 else 'cover'}", covered),
        ("such peers that cover all experts", str(made.covering_peers)),
    ]
    parts.append(f"swarm of {made.peers}\n{two_columns(costs)}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    end_program(main())
