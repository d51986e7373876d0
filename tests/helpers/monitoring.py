"""Runs that never were, for the monitor's tests: records, states and histories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from spes_swarm.monitor.ledger import Ledger
from spes_swarm.monitor.state import (
    Consensus,
    ExpertState,
    Fault,
    HistoryPoint,
    PeerState,
    RunInfo,
    SwarmState,
    short_id,
)
from spes_swarm.protocol.members.records import Lease, Progress, Rounds
from spes_swarm.protocol.members.round_metrics import RoundFigures
from tests.helpers.records import progress_of

TTL_S = 30.0
START = 1_700_000_000.0  # swarm time when a test begins
_FIGURES = {field.name for field in fields(RoundFigures)}
DIGEST = b"\x01" * 32
RUN = RunInfo(
    run_id="test-0123456789abcdef01234567",
    name="test",
    model="olmoe",
    inner_steps=10,
    num_experts=8,
    experts_per_peer=2,
    total_steps=2000,
)


def peer_id(number: int) -> str:
    """A peer id as libp2p writes them, all of one length."""
    alphabet = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    end = ""
    for _ in range(4):
        number, digit = divmod(number, 58)
        end = alphabet[digit] + end
    return "Qm" + "Y" * 36 + "peer" + end


def progress(written: float = START, **changes: Any) -> Progress:
    """A record written at swarm time `written`."""
    fields: dict[str, Any] = {
        "name": "laptop",
        "state": "training",
        "round": 3,
        "digest": DIGEST,
        "step": 40,
        "tokens": 1280,
        "tokens_per_step": 128,
        "tokens_per_second": 100.0,
        "loss": 5.25,
        "experts": [0, 3],
        "round_seconds": 1.5,
        "bytes_sent": 1000,
        "bytes_received": 2000,
        "total_tokens": 5120,
        "train_loss": 5.5,
        "eval_loss": 5.75,
        "eval_loss_stderr": 0.25,
    }
    return progress_of(**{"expires": written + TTL_S, **fields, **changes})


def lease(expires: float, experts: Sequence[int]) -> Lease:
    """A lease on experts."""
    return Lease(expires=expires, experts=list(experts), since_round=1)


def _is_measured(record: Progress) -> bool:
    return "train_loss" in record.telemetry


def reported_by(record: Progress) -> Rounds:
    """The record of rounds of the peer that writes this record of its progress, with the metrics of its last round."""
    known = {name: record.telemetry[name] for name in _FIGURES & record.telemetry.keys()}
    reported: Any = {**known, "tokens_per_second": record.tokens_per_second}
    return Rounds.of(record.expires + TTL_S, [RoundFigures(round=record.round, **reported)])


class Watched:
    """A ledger with clocks that a test moves."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger(RUN, TTL_S)
        self.passed_s = 0.0

    @property
    def now(self) -> float:
        return START + self.passed_s

    def wait(self, seconds: float) -> None:
        self.passed_s += seconds

    def look(
        self,
        records: Mapping[str, Progress] = {},
        leases: Mapping[str, Lease] = {},
        rounds: Mapping[str, Rounds] = {},
    ) -> SwarmState:
        """One look that brings these records, by peer id.

        A peer without a record of rounds has reported the round of its progress, if that has a training loss.
        """
        rounds = {peer: reported_by(record) for peer, record in records.items() if _is_measured(record)} | dict(rounds)
        self.ledger.update(self.now, 500.0 + self.passed_s, records, leases, rounds)
        return self.state()

    def state(self) -> SwarmState:
        return self.ledger.state(self.now, 500.0 + self.passed_s, {}, None)


def peer_state(number: int, **changes: Any) -> PeerState:
    """One peer of a state."""
    fields: dict[str, Any] = {
        "peer_id": peer_id(number),
        "short_id": short_id(peer_id(number)),
        "name": f"peer-{number}",
        "state": "training",
        "reachable": True,
        "experts": (2 * number % 8, 2 * number % 8 + 1),
        "round": 12,
        "step": 480 + number,
        "tokens_per_second": 1234.5 + number,
        "loss": 3.25 + number / 100,
        "train_loss": 3.3,
        "eval_loss": 3.4,
        "eval_loss_stderr": 0.03,
        "total_tokens": 61440,
        "bytes_sent": 1_500_000,
        "bytes_received": 2_500_000,
        "round_seconds": 2.5,
        "age_s": 1.0,
        "digest": DIGEST.hex(),
        "agrees": True,
    }
    return PeerState(**{**fields, **changes})


def swarm_state(peers: Sequence[PeerState] = (), **changes: Any) -> SwarmState:
    """A state with these peers."""
    holders = {e: tuple(sorted(p.peer_id for p in peers if e in p.experts)) for e in range(RUN.num_experts)}
    fields: dict[str, Any] = {
        "time": START,
        "status": "live" if peers else "no_peers",
        "silent_s": None if peers else 75.0,
        "run": RUN,
        "round": 12,
        "next_round_s": 8.0 if peers else None,
        "round_progress": 0.5 if peers else 0.0,
        "tokens_total": 61440 * max(1, len(peers)),
        "tokens_per_second": sum(p.tokens_per_second for p in peers),
        "train_loss": 3.3,
        "eval_loss": 3.4,
        "eval_loss_stderr": 0.03,
        "experts_covered": sum(map(bool, holders.values())),
        "peers": tuple(sorted(peers, key=lambda p: p.peer_id)),
        "experts": tuple(
            ExpertState(expert=e, holders=h, reserved=(), age_rounds=0 if h else 3) for e, h in holders.items()
        ),
        "consensus": Consensus(digest=DIGEST.hex() if peers else None, agree=len(peers), differ=()),
        "faults": (),
        "refused": {},
        "join_command": None,
    }
    return SwarmState(**{**fields, **changes})


def troubled_state() -> SwarmState:
    """A state in which much is wrong, with names that want to harm."""
    from spes_swarm.base.names import clean_name

    peers = [
        peer_state(0, name=clean_name("\x1b[2J<b>[red]x")),
        peer_state(1, name="", state="late", age_s=20.0, loss=None),
        peer_state(2, name="機械学習" * 10, agrees=False, digest="02" * 32),
        peer_state(3, state="syncing", experts=(0, 1, 2, 3, 5, 7), tokens_per_second=1e12, bytes_sent=(1 << 53) - 1),
    ]
    return swarm_state(
        peers,
        consensus=Consensus(digest=DIGEST.hex(), agree=3, differ=(peer_id(2),)),
        faults=(Fault(time=START, peer_id=peer_id(0), kind="round"), Fault(time=START, peer_id=peer_id(1), kind="dht")),
        refused={"forged": 3, "far_future": 1},
        join_command="python -m spes_swarm.join --initial-peers /ip4/203.0.113.7/tcp/31337/p2p/" + peer_id(0),
    )


def routing_state(**changes: Any) -> SwarmState:
    """A state whose peers report the health of their routers: expert 0 is dead in two layers."""
    state = swarm_state([peer_state(0, dead_experts=2)])
    experts = (
        replace(state.experts[0], load=0.5, dead_layers=(1, 3)),
        *(replace(e, load=1.0) for e in state.experts[1:]),
    )
    figures: dict[str, Any] = {
        "load_entropy": 0.875,
        "least_load": 0.0,
        "router_entropy": 0.625,
        "held_share": 0.25,
        "dead_experts": 2,
        "expert_similarity": 0.125,
        "expert_similarity_max": 0.5,
    }
    return replace(state, experts=experts, **figures, **changes)


def points(count: int, first: int = 1) -> list[HistoryPoint]:
    """A history that learns."""
    return [
        HistoryPoint(
            round=n,
            time=START + 10.0 * n,
            tokens=5120 * n,
            train_loss=3.0 + 2.5 / n,
            eval_loss=3.1 + 2.5 / n if n % 2 == 0 else None,
            eval_loss_stderr=0.03 if n % 2 == 0 else None,
            tokens_per_second=1000.0 + n,
            peers=3,
            experts_covered=6,
            round_seconds=2.5,
            bytes=3_000_000,
        )
        for n in range(first, first + count)
    ]


def figures(number: int, **changes: Any) -> RoundFigures:
    """What a peer reports of a round."""
    fields: dict[str, Any] = {
        "time": START + number,
        "peers": 2,
        "experts_covered": 4,
        "swarm_tokens": 2560 * number,
        "tokens_per_second": 100.0,
        "round_seconds": 1.5,
        "bytes_sent": 1000,
        "train_loss": 5.5,
    }
    return RoundFigures(**{**fields, **changes}, round=number)


def report(written: float, *rounds: RoundFigures) -> Rounds:
    """A record of rounds written at swarm time `written`."""
    return Rounds.of(written + 2 * TTL_S, rounds)
