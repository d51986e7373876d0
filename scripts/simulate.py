"""Simulates ownership and rounds in a swarm of any size under churn, in virtual time.

    .venv/bin/python scripts/simulate.py --peers 256 --experts 64 --median-session 1800 --hours 24 --seed 0

Runs scripts/testing/simulation.py, and makes the byte plan of some of the rounds for a whole model. The size of
control messages, and the cost of verifying them, are measured on real signed messages. Prints a table; --json also
writes it to a file.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.testing.simulation import Report, Scenario, Simulation, Weibull, traffic
from spes_swarm.config.run import RoundConfig
from spes_swarm.network.link.rpc import MAX_RPC_BYTES
from spes_swarm.protocol.averaging.commitments import SigningKey
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.members.records import Lease, Progress
from spes_swarm.protocol.members.round_metrics import PeerMetrics, telemetry_of
from spes_swarm.protocol.members.signed import seal, unseal
from spes_swarm.protocol.ownership.reassignment import Rules
from spes_swarm.protocol.rounds.plan import make_plan
from spes_swarm.protocol.rounds.statement import Group, open_statement, seal_statement

BYTES_PER_VALUE = 2.0  # fp16
RECORDS_RENEWED_S = RoundConfig(inner_steps=1).progress_ttl_s / 5  # see network.announcer
STATEMENT_BROUGHT_EVERY_S = 1.0  # gathering.POLL_S


class PlanSampler:
    """Makes the byte plan of every k-th round for the whole model."""

    def __init__(self, layout: Layout, part_elements: int, every: int) -> None:
        self._layout = layout
        self._part_elements = part_elements
        self._every = every
        self.rows: list[dict[str, float]] = []
        self.last: Group | None = None

    def __call__(self, group: Group) -> None:
        self.last = group
        if group.round % self._every:
            return
        started = time.process_time()
        plan = make_plan(group, self._layout, self._part_elements)
        planned = time.process_time()
        for reducer in range(plan.num_members):  # the queries of one member in its exchange
            plan.pushes(0, reducer)
        plan.wanted(0)
        asked = time.process_time()
        sent_M, received_M = traffic(plan, BYTES_PER_VALUE)
        upload_M = np.array([member.statement.bandwidth_mbps for member in group.members]) * 1e6 / 8
        self.rows.append(
            {
                "members": plan.num_members,
                "parts": len(plan.parts),
                "mean_sent_bytes": float(sent_M.mean()),
                "max_sent_bytes": float(sent_M.max()),
                "max_received_bytes": float(received_M.max()),
                "slowest_upload_s": float((sent_M / upload_M).max()),
                "results_sent_by_busiest": float(max(np.bincount([p.reducer for p in plan.parts]))) * plan.num_members,
                "plan_cpu_s": planned - started,
                "pushes_cpu_s": asked - planned,
            }
        )


def cpu_seconds(action: Callable[[], object], repeat: int = 20) -> float:
    started = time.process_time()
    for _ in range(repeat):
        action()
    return (time.process_time() - started) / repeat


def control_plane(group: Group, num_experts: int) -> dict[str, float]:
    """Sizes and verification times of real messages of the last group, and totals for a group of that size."""
    with tempfile.TemporaryDirectory() as directory:
        identity = Identity.load_or_create(Path(directory) / "key")
    # The longest statement.
    statement = max((member.statement for member in group.members), key=lambda s: len(s.held))
    certificate = SigningKey.generate().certificate(identity, "simulation")
    sealed = seal_statement(identity, "simulation", statement.model_copy(update={"certificate": certificate}))
    progress = Progress(
        expires=2e9,
        name="a-peer-of-the-swarm",
        state="training",
        reachable=True,
        round=group.round,
        digest=bytes(32),
        tokens=10**6,
        tokens_per_step=8192,
        tokens_per_second=8192.0,
        experts=statement.held,
        telemetry=telemetry_of(
            PeerMetrics(step=10**6, loss=3.0, round_seconds=10.0, bytes_sent=10**9, bytes_received=10**9)
        ),
    )
    lease = Lease(expires=2e9, experts=statement.held, since_round=group.round)
    records = [seal(identity, "progress", "simulation", progress), seal(identity, "leases", "simulation", lease)]
    verify_s = cpu_seconds(lambda: open_statement(sealed, "simulation", group.round, num_experts + 1))
    verify_record_s = cpu_seconds(lambda: unseal(records[0], "progress", "simulation", Progress))
    members, size = len(group.members), len(sealed)
    return {
        "statement_bytes": size,
        "progress_record_bytes": len(records[0]),
        "lease_record_bytes": len(records[1]),
        "group_bytes": members * size,
        "most_members_in_one_answer": MAX_RPC_BYTES // (size + 5),
        "leader_sends_bytes": members * (members - 1) * size,
        "leader_receives_bytes_per_s": (members - 1) * size / STATEMENT_BROUGHT_EVERY_S,
        "checking_a_group_cpu_s": members * verify_s,
        "new_records_bytes_per_s": (members - 1) * len(records[0]) / RECORDS_RENEWED_S,
        "new_records_checked_cpu_share": (members - 1) * verify_record_s / RECORDS_RENEWED_S,
    }


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def summary(report: Report, num_experts: int) -> dict[str, Any]:
    ages = list(report.ages.elements())
    prompt = [t for t in report.takeovers if t.had_room]
    placed = sum(report.peers) * statistics.fmean(report.room) / statistics.fmean(report.peers)
    gained = report.gained
    return {
        "rounds": report.rounds,
        "rounds_without_anybody": report.empty_rounds,
        "mean_members": statistics.fmean(report.peers),
        "least_members": min(report.peers),
        "mean_room": statistics.fmean(report.room),
        "least_room": min(report.room),
        "joins": report.joins,
        "departures": dict(report.departures),
        "coverage": report.coverage,
        "coverage_of_what_there_was_room_for": report.trained / max(1, report.possible),
        "untrained_expert_rounds": dict(report.untrained),
        "age_rounds": {"median": quantile(ages, 0.5), "p99": quantile(ages, 0.99), "max": max(ages)},
        "takeovers": len(report.takeovers),
        "takeover_seconds": {
            "median": quantile([t.seconds for t in report.takeovers], 0.5),
            "p99": quantile([t.seconds for t in report.takeovers], 0.99),
            "max": quantile([t.seconds for t in report.takeovers], 1),
        },
        "takeover_rounds": {
            "median": quantile([t.rounds for t in report.takeovers], 0.5),
            "p99": quantile([t.rounds for t in report.takeovers], 0.99),
            "max": quantile([t.rounds for t in report.takeovers], 1),
        },
        "takeovers_with_room": len(prompt),
        "rounds_from_lease_end_to_adoption_with_room_max": max((t.waited for t in prompt), default=0),
        "moves_per_round": {reason: count / report.rounds for reason, count in sorted(gained.items())},
        "evening_out_share_of_holdings_per_round": gained["evening out"] / placed,
        "reassign_cpu_s": {"mean": statistics.fmean(report.reassign_s), "max": max(report.reassign_s)},
        "num_experts": num_experts,
    }


def flatten(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            rows += flatten(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", f"{value:,.6g}" if isinstance(value, float) else f"{value:,}"))
    return rows


def parse_rooms(text: str) -> tuple[tuple[int, float], ...]:
    pairs = (pair.split(":") for pair in text.split(","))
    return tuple((int(room), float(share)) for room, share in pairs)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=256, help="average number of peers")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--median-session", type=float, default=1800.0, help="seconds; 0: no peer ever leaves")
    parser.add_argument("--session-shape", type=float, default=0.5, help="Weibull shape; 1: exponential")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lease", type=float, default=120.0, help="seconds")
    parser.add_argument("--round-seconds", type=float, default=60.0)
    parser.add_argument("--follow-speed", action="store_true", help="shorter rounds while fast peers are present")
    parser.add_argument("--replicas", type=int, default=None, help="target; default: as many as there is room for")
    parser.add_argument("--rotate-every", type=int, default=10, help="rounds")
    parser.add_argument("--max-share", type=float, default=0.5, help="largest share of the experts for one peer")
    parser.add_argument("--sudden", type=float, default=0.5, help="share of departures without notice")
    parser.add_argument("--outage", type=float, default=0.0, help="share of peers that die together at half time")
    parser.add_argument("--fixed", type=float, default=0.0, help="share of peers whose experts never change")
    parser.add_argument("--stale", type=float, default=0.05, help="share of members with an old view of the leases")
    parser.add_argument(
        "--rooms", type=parse_rooms, default=parse_rooms("1:0.5,4:0.35,8:0.15"), help="pairs EXPERTS:SHARE,..."
    )
    parser.add_argument("--shared-elements", type=float, default=10e6, help="size of the shared block")
    parser.add_argument("--expert-elements", type=float, default=1e6, help="size of one expert")
    parser.add_argument("--plan-samples", type=int, default=3, help="number of rounds with a byte plan")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    shared, expert = int(arguments.shared_elements), int(arguments.expert_elements)
    layout = Layout.build({"shared": (shared,)}, {"experts": (arguments.experts, expert)})
    num_rounds = int(arguments.hours * 3600 / arguments.round_seconds)
    session = Weibull(arguments.median_session, arguments.session_shape) if arguments.median_session else None
    sampler = PlanSampler(
        layout, RoundConfig(inner_steps=1).part_elements, max(1, num_rounds // arguments.plan_samples)
    )
    scenario = Scenario(
        num_peers=arguments.peers,
        num_experts=arguments.experts,
        duration_s=arguments.hours * 3600,
        seed=arguments.seed,
        rules=Rules(arguments.replicas, arguments.rotate_every, max(1, int(arguments.max_share * arguments.experts))),
        session=session,
        sudden=arguments.sudden,
        outage=arguments.outage,
        fixed=arguments.fixed,
        stale=arguments.stale,
        rooms=arguments.rooms,
        lease_s=arguments.lease,
        round_s=arguments.round_seconds,
        follows_speed=arguments.follow_speed,
        reference_bytes=4.0 * layout.num_elements,
    )
    report = Simulation(scenario, sampler).run()
    result = summary(report, arguments.experts)
    if sampler.rows:
        result["byte_plan"] = {key: statistics.fmean(row[key] for row in sampler.rows) for key in sampler.rows[0]}
    if sampler.last is not None:
        result["control_plane"] = control_plane(sampler.last, arguments.experts)
    rows = flatten(result)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"arguments": vars(arguments), **result}, default=str, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
