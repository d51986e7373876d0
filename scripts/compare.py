"""Compares the eval loss of a swarm, of one lone peer, and of one process on the same total number of tokens.

    .venv/bin/python scripts/compare.py --rounds 30 --seeds 3

Three runs for each seed, all through `python -m spes_swarm.join`, with the same model, schedule and held-out text:

  swarm       4 peers with 2 of 8 experts each (--experts), H inner steps a round
  lone        one peer that trains everything, the same number of steps (a quarter of the tokens)
  big batch   one process that trains everything with a batch 4 times as large (the same total tokens)

Two configurations are compared by a run of each with `--only swarm`. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from spes_swarm.config.file import load_config
from spes_swarm.config.round_clock import RoundClock
from spes_swarm.config.run import RunConfig
from spes_swarm.testing.local_peer import LocalPeer

NUM_PEERS = 4
LOOPBACK = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--num-threads", "1"]


class Outcome(NamedTuple):
    """The result of a run."""

    eval_loss: float  # after the last round
    tokens: float  # processed by all peers together, as counted in their metrics
    steps: float  # local steps of a peer, on average
    bytes_per_step: float  # payload that a peer sent, on average


def finish(peers: list[LocalPeer], rounds: int) -> Outcome:
    """Waits until all peers have done their rounds; returns the result."""
    for peer in peers:
        if peer.wait(3600) != 0:
            raise SystemExit(peer.tail())
    steps = [event for peer in peers for event in peer.events("step") if event["round"] < rounds]
    sent = sum(event["payload_bytes_sent"] for peer in peers for event in peer.events("round"))
    return Outcome(
        eval_loss=float(peers[0].rounds()[rounds]["eval_loss"]),
        tokens=sum(event["tokens"] for event in steps),
        steps=len(steps) / len(peers),
        bytes_per_step=sent / len(steps),
    )


def run_alone(directory: Path, config: Path, rounds: int, seed: int, batch_size: int) -> Outcome:
    """One process that trains all experts."""
    arguments = ["--config", config, "--max-rounds", rounds, "--seed", seed, "--batch-size", batch_size]
    with LocalPeer(directory, [*LOOPBACK, "--experts", "8", *map(str, arguments)]) as peer:
        return finish([peer], rounds)


def run_swarm(directory: Path, config: Path, rounds: int, seed: int, experts: int) -> Outcome:
    """Four processes with `experts` experts each."""
    common = [*LOOPBACK, "--experts", experts, "--wait-for-peers", NUM_PEERS, "--max-rounds", rounds]
    with ExitStack() as stack:
        founder = stack.enter_context(
            LocalPeer(directory / "0", [str(a) for a in (*common, "--config", config, "--seed", NUM_PEERS * seed)])
        )
        address = founder.address()
        peers = [founder]
        for i in range(1, NUM_PEERS):
            arguments = [*common, "--initial-peers", address, "--seed", NUM_PEERS * seed + i]
            peers.append(stack.enter_context(LocalPeer(directory / str(i), [str(a) for a in arguments])))
        return finish(peers, rounds)


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--experts", type=int, default=2, help="held by each peer of the swarm")
    parser.add_argument("--inner-steps", type=int, help="override the configuration's")
    parser.add_argument("--learning-rate", type=float, help="override the configuration's")
    parser.add_argument("--merge-alpha", type=float, help="override the configuration's")
    parser.add_argument("--codec", help="override the configuration's")
    parser.add_argument("--clip", type=float, help="override the configuration's; 0 = no bounds on contributions")
    parser.add_argument("--only", choices=["swarm", "lone", "big batch"], help="run only this one")
    parser.add_argument("--json", type=Path, default=Path("runs/compare.json"))
    options = parser.parse_args()
    given = load_config(options.config).run
    if given is None:
        raise SystemExit(f"{options.config} has no section run:")
    run: dict[str, Any] = given.to_dict()
    if options.inner_steps:
        run["round"] |= {"inner_steps": options.inner_steps, "inner_steps_later": []}
    run["round"]["codec"] = options.codec or run["round"]["codec"]
    run["training"]["learning_rate"] = options.learning_rate or float(run["training"]["learning_rate"])
    if options.clip is not None:
        run["round"]["clip"] = options.clip
    if options.merge_alpha is not None:
        run["merge"]["alpha"] = options.merge_alpha
    steps = RoundClock.of(RunConfig.from_dict(run, str(options.config))).step_of(options.rounds)
    run["training"]["total_steps"] = steps
    batch_size = run["training"]["batch_size"]
    outcomes: dict[str, list[Outcome]] = {"swarm": [], "lone": [], "big batch": []}
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        for seed in range(options.seeds):
            run["training"]["seed"] = seed
            config = Path(name) / f"{seed}.yaml"
            config.write_text(yaml.safe_dump({"run": run}), encoding="utf-8")
            for kind in [options.only] if options.only else outcomes:
                directory = Path(name) / f"{kind}-{seed}"
                if kind == "swarm":
                    outcome = run_swarm(directory, config, options.rounds, seed, options.experts)
                else:
                    size = batch_size if kind == "lone" else NUM_PEERS * batch_size
                    outcome = run_alone(directory, config, options.rounds, NUM_PEERS * seed, size)
                outcomes[kind].append(outcome)
                print(f"seed {seed}, {kind}: {outcome.eval_loss:.4f} after {outcome.steps:.0f} steps", flush=True)
    print(
        f"\n{steps} steps of {batch_size} sequences a peer, H = {run['round']['inner_steps']}, "
        f"peak learning rate {run['training']['learning_rate']}"
    )
    print(f"{'':<10} {'steps':>7} {'tokens':>12} {'bytes/step':>12} {'eval loss':>10} {'min':>8} {'max':>8}")
    for kind, results in outcomes.items():
        if results:
            losses = [result.eval_loss for result in results]
            mean = Outcome(*map(statistics.fmean, zip(*results, strict=True)))
            print(
                f"{kind:<10} {mean.steps:>7.0f} {mean.tokens:>12,.0f} {mean.bytes_per_step:>12,.0f} "
                f"{mean.eval_loss:>10.4f} {min(losses):>8.4f} {max(losses):>8.4f}"
            )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "run": run,
        "rounds": options.rounds,
        "outcomes": {k: [o._asdict() for o in v] for k, v in outcomes.items()},
    }
    options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
