"""Compares the eval loss of a swarm, of one lone peer, and of one process on the same total number of tokens.

    .venv/bin/python scripts/compare.py --rounds 30 --seeds 3

Three runs for each seed, all through `python -m spes_swarm.join`, with the same model, schedule and held-out text:

  swarm       4 peers with --experts experts each, H inner steps a round
  lone        one peer that trains everything, the same number of steps (a quarter of the tokens)
  big batch   one process that trains everything with a batch 4 times as large (the same total tokens)

With longer lone runs (--lone-rounds 30 60 90), the efficiency of the swarm is the number of steps in which a lone peer
reaches its loss, over the swarm's. With --target-loss, the seconds until an evaluation reaches that loss are measured
as well. Two configurations are compared by a run of each with `--only swarm`. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml

from scripts.testing.local_peer import LocalPeer, LocalPeerError
from scripts.testing.study.table import Estimate, efficiency
from spes_swarm.base.arguments import show_any_text
from spes_swarm.base.errors import ConfigError, UserError
from spes_swarm.config.file import load_config
from spes_swarm.config.round_clock import RoundClock
from spes_swarm.config.run import RunConfig

NUM_PEERS = 4
LOOPBACK = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--num-threads", "1"]


class Outcome(NamedTuple):
    """The result of a run."""

    eval_loss: float  # after the last round
    tokens: float  # processed by all peers together, as counted in their metrics
    steps: float  # local steps of a peer, on average
    bytes_per_step: float  # payload that a peer sent, on average
    seconds: float  # from the end of the first step to the end of the last round
    seconds_to_target: float | None  # to the first evaluation that reached the target loss; None: none did


class Length(NamedTuple):
    """How long a run is."""

    rounds: int
    config: Path  # with a schedule that ends with them


def finish(peers: list[LocalPeer], rounds: int, target_loss: float) -> Outcome:
    """Waits until all peers have done their rounds; returns the result."""
    for peer in peers:
        if peer.wait(3600) != 0:
            raise LocalPeerError(peer.tail())
    steps = [event for peer in peers for event in peer.events("step") if event["round"] < rounds]
    sent = sum(event["payload_bytes_sent"] for peer in peers for event in peer.events("round"))
    committed = peers[0].rounds()
    began = min(event["time"] for event in steps)
    reached = [event["time"] for event in committed.values() if (event["eval_loss"] or math.inf) <= target_loss]
    return Outcome(
        eval_loss=float(committed[rounds]["eval_loss"]),
        tokens=sum(event["tokens"] for event in steps),
        steps=len(steps) / len(peers),
        bytes_per_step=sent / len(steps),
        seconds=committed[rounds]["time"] - began,
        seconds_to_target=min(reached) - began if reached else None,
    )


def run_alone(directory: Path, length: Length, seed: int, batch_size: int, target_loss: float) -> Outcome:
    """One process that trains all experts."""
    arguments = ["--config", length.config, "--max-rounds", length.rounds, "--seed", seed, "--batch-size", batch_size]
    with LocalPeer(directory, [*LOOPBACK, "--experts", "8", *map(str, arguments)]) as peer:
        return finish([peer], length.rounds, target_loss)


def run_swarm(directory: Path, length: Length, seed: int, experts: int, target_loss: float) -> Outcome:
    """Four processes with `experts` experts each."""
    config, rounds = length.config, length.rounds
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
        return finish(peers, rounds, target_loss)


def parse_arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--lone-rounds", type=int, nargs="+", metavar="N", help="of lone runs; default: as --rounds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--experts", type=int, help="held by each peer of the swarm; default: the configuration's")
    parser.add_argument("--target-loss", type=float, default=-math.inf, help="measure the time until it is reached")
    parser.add_argument("--inner-steps", type=int, help="override the configuration's")
    parser.add_argument("--batch-size", type=int, help="override the configuration's")
    parser.add_argument("--learning-rate", type=float, help="override the configuration's")
    parser.add_argument("--merge-alpha", type=float, help="override the configuration's")
    parser.add_argument("--codec", help="override the configuration's")
    parser.add_argument("--clip", type=float, help="override the configuration's; 0 = no bounds on contributions")
    parser.add_argument("--only", choices=["swarm", "lone", "big batch"], nargs="+", help="run only these")
    parser.add_argument("--json", type=Path, default=Path("runs/compare.json"))
    options = parser.parse_args()
    if min(options.rounds, options.seeds, *(options.lone_rounds or [])) < 1:
        parser.error("--rounds, --lone-rounds and --seeds must be at least 1")
    if options.lone_rounds and options.only and "lone" not in options.only:
        parser.error("--lone-rounds needs `--only lone`, or no --only")
    return options


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of the runs, but for their seeds and lengths.

    Raises:
        ConfigError: there are none, or one is invalid.
    """
    given = load_config(options.config).run
    if given is None:
        raise ConfigError(f"{options.config} has no section run:")
    run: dict[str, Any] = given.to_dict()
    if options.inner_steps:
        run["round"] |= {"inner_steps": options.inner_steps, "inner_steps_later": []}
    run["round"]["codec"] = options.codec or run["round"]["codec"]
    run["training"]["learning_rate"] = options.learning_rate or float(run["training"]["learning_rate"])
    run["training"]["batch_size"] = options.batch_size or run["training"]["batch_size"]
    if options.clip is not None:
        run["round"]["clip"] = options.clip
    if options.merge_alpha is not None:
        run["merge"]["alpha"] = options.merge_alpha
    run["experts_per_peer"] = options.experts or run["experts_per_peer"]
    return run


def num_steps(run: dict[str, Any], rounds: int) -> int:
    """The steps of a peer in that many rounds, which the settings must allow.

    Raises:
        ConfigError: they do not.
    """
    steps = RoundClock.of(RunConfig.from_dict(run, "settings")).step_of(rounds)
    training = run["training"] | {"total_steps": steps}
    RunConfig.from_dict(run | {"training": training}, f"with {rounds} rounds")
    return steps


def compare(options: argparse.Namespace) -> None:
    """Runs the comparison.

    Raises:
        UserError: a setting is unusable.
        LocalPeerError: a peer failed.
    """
    run = settings(options)
    batch_size, target = run["training"]["batch_size"], options.target_loss
    kinds = [("swarm", options.rounds), *(("lone", n) for n in sorted(set(options.lone_rounds or [options.rounds])))]
    kinds = [each for each in (*kinds, ("big batch", options.rounds)) if not options.only or each[0] in options.only]
    outcomes: dict[tuple[str, int], list[Outcome]] = {each: [] for each in kinds}
    steps = {rounds: num_steps(run, rounds) for _, rounds in kinds}
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        for seed in range(options.seeds):
            for kind, rounds in kinds:
                run["training"] |= {"seed": seed, "total_steps": steps[rounds]}
                length = Length(rounds, Path(name) / f"{seed}-{rounds}.yaml")
                length.config.write_text(yaml.safe_dump({"run": run}), encoding="utf-8")
                directory = Path(name) / f"{kind}-{seed}-{rounds}"
                if kind == "swarm":
                    outcome = run_swarm(directory, length, seed, run["experts_per_peer"], target)
                else:
                    size = batch_size if kind == "lone" else NUM_PEERS * batch_size
                    outcome = run_alone(directory, length, NUM_PEERS * seed, size, target)
                outcomes[kind, rounds].append(outcome)
                print(
                    f"seed {seed}, {kind}: {outcome.eval_loss:.4f} after {outcome.steps:.0f} steps and "
                    f"{outcome.seconds:.0f} s",
                    flush=True,
                )
    print(
        f"\n{batch_size} sequences a step and peer, H = {run['round']['inner_steps']}, "
        f"peak learning rate {run['training']['learning_rate']}"
    )
    print_table(outcomes, options.seeds)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "run": run,
        "rounds": options.rounds,
        "outcomes": [
            {"kind": kind, "rounds": rounds, **outcome._asdict()}
            for (kind, rounds), results in outcomes.items()
            for outcome in results
        ],
    }
    options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")


def print_table(outcomes: dict[tuple[str, int], list[Outcome]], seeds: int) -> None:
    """Prints the means over the seeds, and the efficiency of the swarm if there are lone runs to compare with."""
    print(f"{'':<10} {'steps':>7} {'tokens':>12} {'bytes/step':>12} {'loss':>16} {'s':>6} {'to target':>10}")
    for (kind, _), results in outcomes.items():
        loss = Estimate.of([result.eval_loss for result in results])
        to_target = [result.seconds_to_target for result in results if result.seconds_to_target is not None]
        print(
            f"{kind:<10} {fmean(r.steps for r in results):>7.0f} {fmean(r.tokens for r in results):>12,.0f} "
            f"{fmean(r.bytes_per_step for r in results):>12,.0f} {loss.text(4):>16} "
            f"{fmean(r.seconds for r in results):>6.0f} "
            f"{f'{fmean(to_target):.0f}' if len(to_target) == seeds else '-':>10}"
        )
    swarm = next((results for (kind, _), results in outcomes.items() if kind == "swarm"), [])
    lone = [results for (kind, _), results in outcomes.items() if kind == "lone"]
    if swarm and lone:
        ratio = efficiency(
            fmean(result.steps for result in swarm),
            [result.eval_loss for result in swarm],
            [round(fmean(result.steps for result in results)) for results in lone],
            [[result.eval_loss for result in of_seed] for of_seed in zip(*lone, strict=True)],
        )
        print(f"efficiency of the swarm: {ratio.text}")


def main() -> int:
    show_any_text()
    options = parse_arguments()
    try:
        compare(options)
    except (UserError, LocalPeerError) as exc:
        print(f"compare: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compare: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
