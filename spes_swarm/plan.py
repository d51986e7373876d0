"""Plans what a peer needs for a run, before anything is downloaded or allocated.

    python -m spes_swarm.plan --config configs/spes-2b.yaml --memory 16GB --host-memory 24GB --experts 1

Prints the memory of a peer by class, the settings with which it fits, and what a round costs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spes_swarm.base.arguments import command_parser, exit_code
from spes_swarm.base.errors import ConfigError
from spes_swarm.base.wording import two_columns

if TYPE_CHECKING:
    from spes_swarm.peer.memory.plan import Plan

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    return exit_code("plan", lambda: _run(_parse(arguments)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("plan", __doc__)
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="YAML file with a `run` section (default: quickstart)")
    add("--experts", type=int, metavar="N", help="experts that the peer trains (default: the run's)")
    add("--device", choices=("gpu", "cpu"), default="gpu", help="where it trains (default: gpu)")
    add("--memory", default="16GB", metavar="SIZE", help="of the GPU (default: 16GB)")
    add("--host-memory", default="32GB", metavar="SIZE", help="of the machine (default: 32GB)")
    add("--upload", type=float, default=20.0, metavar="MBIT", help="Mbit/s (default: 20)")
    add("--download", type=float, default=100.0, metavar="MBIT", help="Mbit/s (default: 100)")
    add("--peers", type=int, default=16, metavar="N", help="in the swarm (default: 16)")
    add("--json", action="store_true", help="print JSON")
    return parser.parse_args(arguments)


def parse_size(flag: str, text: str) -> int:
    """Returns the bytes of a size such as 16GB, 16GiB, 16g or 17179869184.

    Raises:
        ConfigError: the text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"{flag}: found {text!r}, expected a size such as 16GB or 16GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _run(options: argparse.Namespace) -> None:
    memory = parse_size("--memory", options.memory)
    host_memory = parse_size("--host-memory", options.host_memory)
    for flag, value in (("--upload", options.upload), ("--download", options.download), ("--peers", options.peers)):
        if not value > 0:
            raise ConfigError(f"{flag}: found {value}, expected more than 0")
    # Everything below imports torch and transformers, which takes seconds.
    from spes_swarm.config.experts_wanted import parse_experts
    from spes_swarm.config.file import default_config_path, load_config
    from spes_swarm.peer.memory.plan import Machine, plan

    run = load_config(options.config or default_config_path()).run
    if run is None:
        raise ConfigError(f"{options.config}: a plan needs a `run` section")
    experts = run.experts_per_peer if options.experts is None else options.experts
    parse_experts(str(experts), run.model.num_experts)
    machine = Machine(
        device=options.device,
        memory=memory,
        host_memory=host_memory,
        upload=options.upload,
        download=options.download,
    )
    made = plan(run, experts, machine, options.peers)
    print(json.dumps(made.to_json(), indent=1) if options.json else _table(made))


def _table(made: Plan) -> str:
    from spes_swarm.peer.memory.capacity import gigabytes

    def sizes(title: str, classes: dict[str, int], peak: int) -> str:
        rows = [(name, gigabytes(size)) for name, size in classes.items()]
        return f"{title}\n{two_columns([*rows, ('together', gigabytes(peak))])}"

    settings = [
        ("--experts", str(made.experts)),
        ("--foreign-experts", made.foreign_experts),
        ("--activation-checkpointing", made.activation_checkpointing),
        ("--optimizer-states", made.optimizer_states),
        ("--micro-batch-size", str(made.micro_batch_size)),
        ("--reference-storage", made.reference_storage),
    ]
    costs = [
        ("bytes each way in a round", gigabytes(made.round_bytes)),
        ("seconds for them", f"{made.round_seconds:,.0f}"),
        ("such peers that cover all experts", str(made.covering_peers)),
    ]
    return "\n\n".join(
        [
            sizes("memory of the device", made.device, made.device_peak),
            sizes("memory of the host", made.host, made.host_peak),
            f"settings\n{two_columns(settings)}",
            f"swarm\n{two_columns(costs)}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
