"""Counts alarms of dead experts in runs of the quickstart, with one line per seed.

    .venv/bin/python scripts/dead_experts.py --seeds 20 --rounds 400

The peers of a run train one after the other in this process, without connections, so that equal arguments give equal
loads. Each peer judges its tokens after every round, as in a real swarm.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import torch

from scripts.testing.sequential_swarm import SequentialSwarm, own_orders
from scripts.testing.study.arm import Arm, ArmConfig
from scripts.testing.study.peers import initial_holdings, room_of, rules_of
from scripts.testing.study.running import open_stream
from spes_swarm.config.data_source import STDLIB
from spes_swarm.config.file import load_config
from spes_swarm.training.health.routing_health import DeadExperts


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20, help="runs, with the seeds 0, 1, ...")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--peers", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    base = load_config().run
    assert base is not None
    alarms = 0
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        run = dataclasses.replace(base, training=dataclasses.replace(base.training, seed=seed))
        stream = open_stream(Arm(name="quickstart", config=ArmConfig(), run=run), STDLIB)
        room = room_of(run, options.peers)
        rules = rules_of(run, room)
        holdings = initial_holdings(run.model.num_experts, options.peers, room, rules)
        swarm = SequentialSwarm(run, own_orders(run, stream, range(options.peers)), holdings, room=room, rules=rules)
        judges = [DeadExperts(*peer.routed_LE.shape) for peer in swarm.peers]
        called_dead: set[int] = set()
        longest = 0
        for _ in range(options.rounds):
            steps = swarm.inner_steps
            swarm.train([steps] * options.peers)
            for peer, judge in zip(swarm.peers, judges, strict=True):
                judge.judge(peer.routed_LE, steps)
                called_dead |= judge.dead
                longest = max(longest, int(judge.low_steps_P.max()))
            swarm.hold_round()
        alarms += bool(called_dead)
        print(f"seed {seed}: {len(called_dead)} called dead; low for {longest} steps at most", flush=True)
    print(f"{alarms} of {options.seeds} runs with an alarm")
    return 0


if __name__ == "__main__":
    sys.exit(main())
