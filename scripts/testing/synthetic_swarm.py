"""A synthetic swarm for development, tests and screenshots of the page without a real one.

It is deterministic and has no clock: `advance` moves its time. None of its figures are measurements.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass, replace
from typing import Final

from spes_swarm.monitor.state import (
    Consensus,
    ExpertState,
    Fault,
    HistoryPoint,
    PeerActivity,
    PeerState,
    RefusalKind,
    RunInfo,
    SwarmState,
    newest_metrics,
    short_id,
)
from spes_swarm.protocol.members.routing_report import MAX_LOADS

NAMES: Final = ("ada", "grace", "emmy", "sofia", "hypatia", "lise", "marie", "rosalind", "chien-shiung", "vera")
_BASE58: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_ROUND_S: Final = 20.0
_LATE_S: Final = 15.0
_GONE_S: Final = 40.0
_INNER_STEPS: Final = 20
_TOKENS_PER_STEP: Final = 1024


@dataclass(slots=True)
class _Volunteer:
    peer_id: str
    name: str
    experts: tuple[int, ...]
    speed: float  # tokens per second
    tokens: float = 0.0
    seen: float = 0.0
    dead: bool = False
    digest: str | None = None  # if it differs from the swarm's
    joined_round: int = 0


class SyntheticSwarm:
    """Some volunteers with their rounds and losses."""

    def __init__(self, *, num_peers: int = 4, num_experts: int = 8) -> None:
        self._random = random.Random(0)
        self._num_experts = num_experts
        self._experts_each = max(1, min(num_experts, 2 * num_experts // max(1, num_peers) + 1))
        self.time = 1_795_000_000.0
        self._round = 0
        self._in_round = 0.0
        self._volunteers: list[_Volunteer] = []
        self._history: list[HistoryPoint] = []
        self._ages: dict[int, int] = {}  # expert -> round of its last commit
        self._faults: list[Fault] = []
        self.refused: dict[RefusalKind, int] = {}
        self._dead: set[int] = set()  # experts that get no tokens, in layer 3
        for index in range(num_peers):
            self.join(NAMES[index] if index < len(NAMES) else f"volunteer-{index:04d}")

    def join(self, name: str) -> str:
        """Adds a newcomer; returns its peer id."""
        peer_id = "Qm" + "".join(self._random.choices(_BASE58, k=44))
        start = len(self._volunteers) * self._experts_each
        experts = tuple(sorted({(start + i) % self._num_experts for i in range(self._experts_each)}))
        speed = 2_000 * self._random.lognormvariate(0, 0.35)
        joined = _Volunteer(peer_id, name, experts, speed, seen=self.time, joined_round=self._round)
        self._volunteers.append(joined)
        return peer_id

    def kill(self, peer_id: str) -> None:
        """Silences a peer: it is soon late, then gone."""
        self._find(peer_id).dead = True
        self._faults.append(Fault(time=self.time, peer_id=self._alive()[0].peer_id, kind="stalled"))

    def starve(self, expert: int) -> None:
        """Lets an expert die in one layer."""
        self._dead.add(expert)

    def corrupt(self, peer_id: str) -> None:
        """Makes a peer's reference differ from now on."""
        self._find(peer_id).digest = _digest(f"corrupt {peer_id}")

    def advance(self, seconds: float) -> None:
        """Advances the time and commits the rounds that are due."""
        self.time += seconds
        for one in self._alive():
            one.seen = self.time - self._random.random() * min(2.0, seconds)
            one.tokens += one.speed * seconds
        self._volunteers = [one for one in self._volunteers if self.time - one.seen < _GONE_S]
        if self._alive():
            self._in_round += seconds
        while self._in_round >= _ROUND_S:
            self._in_round -= _ROUND_S
            self._commit()

    def state(self) -> SwarmState:
        """The state that a monitor would show."""
        alive, digest = self._alive(), _digest(f"round {self._round}") if self._round else None
        peers = tuple(sorted((self._peer(one) for one in self._volunteers), key=lambda peer: peer.peer_id))
        experts = tuple(self._expert(expert) for expert in range(self._num_experts))
        differ = tuple(sorted(one.peer_id for one in self._volunteers if one.digest))
        return SwarmState(
            time=self.time,
            status="live" if self._volunteers else "no_peers",
            silent_s=None if self._volunteers else _GONE_S,
            run=RunInfo(
                run_id="quickstart-8f2c41d09ab37e65",
                name="quickstart",
                model="olmoe",
                inner_steps=_INNER_STEPS,
                num_experts=self._num_experts,
                experts_per_peer=self._experts_each,
                total_steps=20_000,
                data="the Python standard library",
            ),
            round=self._round,
            next_round_s=_ROUND_S - self._in_round if alive else None,
            round_progress=self._in_round / _ROUND_S,
            tokens_total=int(sum(one.tokens for one in self._volunteers)),
            tokens_per_second=sum(one.speed for one in alive),
            experts_covered=sum(1 for entry in experts if entry.holders),
            peers=peers,
            experts=experts,
            consensus=Consensus(digest=digest, agree=len(peers) - len(differ) if digest else 0, differ=differ),
            faults=tuple(self._faults),
            refused=dict(sorted(self.refused.items())),
            join_command=None
            if not alive
            else "python -m spes_swarm.join --initial-peers /ip4/192.0.2.7/tcp/40123/p2p/"
            f"{alive[0].peer_id} --run-id quickstart-8f2c41d09ab37e65",
            steps=self._round * _INNER_STEPS,
            inner_steps=_INNER_STEPS,
            **newest_metrics(self._history),
        )

    def history(self) -> list[HistoryPoint]:
        """All committed rounds."""
        return list(self._history)

    def _alive(self) -> list[_Volunteer]:
        return [one for one in self._volunteers if not one.dead]

    def _find(self, peer_id: str) -> _Volunteer:
        return next(one for one in self._volunteers if one.peer_id == peer_id)

    def _activity(self, one: _Volunteer) -> PeerActivity:
        if self.time - one.seen > _LATE_S:
            return "late"
        if self._round == one.joined_round and self._round > 0:
            return "joining"
        return "syncing" if self._in_round < 2.0 and self._round else "training"

    def _peer(self, one: _Volunteer) -> PeerState:
        held = self._round > one.joined_round
        size = len(one.experts) * 6_400_000 // self._num_experts + 900_000
        loss = self._loss(self._round) + 0.08 * math.sin(one.tokens / 9_000)
        return PeerState(
            peer_id=one.peer_id,
            short_id=short_id(one.peer_id),
            name=one.name,
            state=self._activity(one),
            reachable=True,
            experts=one.experts,
            round=self._round,
            step=int(one.tokens / _TOKENS_PER_STEP),
            tokens_per_second=one.speed * (1 + 0.05 * math.sin(self.time + one.speed)),
            loss=round(loss, 4),
            train_loss=round(loss, 4) if held else None,
            total_tokens=int(one.tokens),
            bytes_sent=size if held else 0,
            bytes_received=int(size * 1.3) if held else 0,
            round_seconds=1.6 + 2_000 / one.speed if held else 0.0,
            age_s=self.time - one.seen,
            digest=one.digest or _digest(f"round {self._round}"),
            agrees=one.digest is None,
        )

    def _expert(self, expert: int) -> ExpertState:
        holders = tuple(sorted(one.peer_id for one in self._volunteers if not one.dead and expert in one.experts))
        gone = tuple(sorted(one.peer_id for one in self._volunteers if one.dead and expert in one.experts))
        last = self._ages.get(expert)
        return ExpertState(
            expert=expert,
            holders=holders,
            reserved=gone,
            age_rounds=None if last is None else self._round - last,
            load=self._load(expert) if self._round and self._num_experts <= MAX_LOADS else None,
            dead_layers=(3,) if expert in self._dead and self._round else (),
        )

    def _load(self, expert: int) -> float:
        return round(1 + 0.5 * math.sin(1.7 * expert) * math.cos(0.1 * self._round), 3)

    def _commit(self) -> None:
        self._round += 1
        alive = self._alive()
        for one in alive:
            for expert in one.experts:
                self._ages[expert] = self._round
        noise = self._random.gauss(0, 0.015)
        point = HistoryPoint(
            round=self._round,
            time=self.time - self._in_round,
            tokens=int(sum(one.tokens for one in self._volunteers)),
            train_loss=round(self._loss(self._round) + noise, 4),
            eval_loss=round(self._loss(self._round) + 0.06, 4) if self._round % 4 == 1 else None,
            eval_loss_stderr=0.04 if self._round % 4 == 1 else None,
            tokens_per_second=sum(one.speed for one in alive) * self._random.uniform(0.94, 1.03),
            peers=len(alive),
            experts_covered=len({expert for one in alive for expert in one.experts}),
            round_seconds=2.4 + self._random.gammavariate(2.0, 0.35),
            bytes=sum(self._peer(replace(one, joined_round=-1)).bytes_sent for one in alive),
            load_entropy=0.96,
            least_load=0.0 if self._dead else 0.38,
            router_entropy=round(0.55 + 0.4 / self._round, 3),
            held_share=round(self._experts_each / self._num_experts, 3),
            dead_experts=len(self._dead),
            expert_similarity=0.12,
            expert_similarity_max=0.41,
        )
        self._history.append(point)

    @staticmethod
    def _loss(number: int) -> float:
        return 1.9 + 3.6 * math.pow(1 + number / 14, -0.9)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
