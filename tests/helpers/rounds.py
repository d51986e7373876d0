"""Rounds held in one process: the real statements, plan and bookkeeping, with frames handed over directly."""

from __future__ import annotations

import atexit
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from spes_swarm.base.arrays import FloatArray
from spes_swarm.protocol.averaging.commitments import SigningKey
from spes_swarm.protocol.bitmap import num_bitmap_bytes
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.consensus.reference import Reference
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.rounds.frames import Frame
from spes_swarm.protocol.rounds.outcome import Bounds, CommitReport
from spes_swarm.protocol.rounds.own_statement import difference_rms
from spes_swarm.protocol.rounds.plan import Plan, common_lineage, make_plan
from spes_swarm.protocol.rounds.reducing import Reduction
from spes_swarm.protocol.rounds.round_state import RoundState
from spes_swarm.protocol.rounds.statement import Group, Statement, form_group, seal_statement
from spes_swarm.protocol.rounds.taking_back import Previous
from spes_swarm.protocol.rounds.track_record import TrackRecords

RUN_ID = "test-run"
KEY = SigningKey.generate()  # of all peers of a test
UNBOUNDED = Bounds(max_update_rms=1e3, bounded=False)
BOUNDED = dataclasses.replace(UNBOUNDED, bounded=True)


@lru_cache(maxsize=64)
def identity(number: int) -> Identity:
    """The same identities for all tests of a session: making RSA keys is slow."""
    return Identity.load_or_create(_key_directory() / f"{number}.key")


@lru_cache(maxsize=1)
def _key_directory() -> Path:
    """Where the keys lie, since daemons read them there, until this process ends."""
    directory = mkdtemp(prefix="spes-test-keys-")
    # Not a TemporaryDirectory: forked processes of Python 3.13 forget what atexit has, and that would remove it.
    atexit.register(rmtree, directory, ignore_errors=True)
    return Path(directory)


@lru_cache(maxsize=64)
def certificate(who: Identity, run_id: str = RUN_ID) -> bytes:
    """Shows that KEY is a peer's."""
    return KEY.certificate(who, run_id)


def certified(who: Identity, run_id: str, statement: Statement) -> Statement:
    """A statement with the certificate of its peer."""
    return statement.model_copy(update={"certificate": certificate(who, run_id)})


def sign_statement(who: Identity, run_id: str, statement: Statement) -> bytes:
    """A peer's signed statement, with its certificate."""
    return seal_statement(who, run_id, certified(who, run_id, statement))


def identities(count: int) -> list[Identity]:
    """Identities in the order of their peer ids, so that member i of a group is peer i of the test."""
    return sorted((identity(i) for i in range(count)), key=lambda i: i.peer_id)


@dataclass
class FakePeer:
    """One peer without processes."""

    reference: Reference
    live_N: FloatArray  # shared and held blocks are meaningful
    held: tuple[int, ...]
    tokens: int = 1
    routed: tuple[int, ...] | None = None
    reachable: bool = True
    bandwidth_mbps: float = 100.0
    pace: float = 0.0
    vouched: bytes = b""
    usual_rms: tuple[float, float] = (0.0, 0.0)  # shared, expert
    room: int | None = None  # as many as it holds
    leaving: bool = False
    lineage: Lineage = field(default_factory=lambda: Lineage({}))
    previous: Previous = field(default_factory=Previous)
    loss_rose: bool | None = None
    most_weight: float = 1.0
    reports: list[CommitReport] = field(default_factory=list)


def peer(layout: Layout, values_N: FloatArray, held: Sequence[int], **fields: object) -> FakePeer:
    """A peer whose reference and live weights are `values_N`."""
    return FakePeer(Reference(layout, values_N.copy()), values_N.copy(), tuple(held), **fields)  # type: ignore[arg-type]


def form(peers: Sequence[FakePeer], round_number: int) -> Group:
    """The group that these peers form."""
    statements = []
    most_weight: dict[str, float] = {}
    for who, p in zip(identities(len(peers)), peers, strict=True):
        most_weight[who.peer_id] = p.most_weight
        statement = Statement(
            round=round_number,
            held=list(p.held),
            tokens=p.tokens,
            routed=list(p.routed if p.routed is not None else [p.tokens] * len(p.held)),
            rms=difference_rms(p.reference, p.live_N, p.held),
            usual_rms=list(p.usual_rms),
            vouched=p.vouched,
            bandwidth_mbps=p.bandwidth_mbps,
            pace=p.pace,
            reachable=p.reachable,
            versions=list(p.reference.versions),
            digests=list(p.reference.digests),
            commits=(lists := p.lineage.to_lists())[0],
            marks=lists[1],
            room=p.room if p.room is not None else len(p.held),
            fixed=False,
            leaving=p.leaving,
            leased=bytes(num_bitmap_bytes(p.reference.layout.num_experts)),
            before=p.previous.digest(p.reference),
            loss_rose=p.loss_rose,
            certificate=b"",
        )
        statements.append(sign_statement(who, RUN_ID, statement))
    num_blocks = len(peers[0].reference.layout.blocks)
    return form_group(RUN_ID, round_number, statements, num_blocks, lambda peer_id, statement: most_weight[peer_id])


def open_round(*args: Any, **kwargs: Any) -> RoundState:
    """A member's round, in which it has taken in its own contributions."""
    state = RoundState(*args, **kwargs)
    complete_all(state.reduction)
    return state


def complete_all(reduction: Reduction) -> None:
    """Takes in a reducer's own contributions and averages what is ready, without a pause; see `Exchange`."""
    for part, contribution in reduction.own_parts():
        reduction.accept_own(part, contribution)
    for index in reduction.ready():
        reduction.complete(index)


def hold_round(
    peers: Sequence[FakePeer],
    round_number: int,
    *,
    codec: str = "fp32",
    result_codec: str | None = None,
    part_elements: int = 64,
    clip: float = 0.0,
    experts: bool = True,
    lose_push: Callable[[int, Frame], bool] = lambda sender, frame: False,
    lose_result: Callable[[int, Frame], bool] = lambda receiver, frame: False,
) -> tuple[Plan, list[RoundState]]:
    """Holds a round among `peers`; their references and live weights move. Frames may be lost on the way."""
    layout = peers[0].reference.layout
    group = form(peers, round_number)
    plan = make_plan(group, layout, part_elements, clip=clip, experts=experts)
    bounds = BOUNDED if clip else UNBOUNDED
    codecs = get_codec(codec), get_codec(result_codec or codec)
    states = [
        open_round(group, plan, i, p.reference, p.live_N, codecs[0], bounds, KEY, TrackRecords(), codecs[1], p.previous)
        for i, p in enumerate(peers)
    ]
    for sender, state in enumerate(states):
        for reducer, target in enumerate(states):
            for part in plan.pushes(sender, reducer):
                frame = state.contributions.push_frame(part)
                state.payload_bytes_sent += len(frame.payload)
                if not lose_push(sender, frame):
                    target.reduction.accept(sender, frame)
    for target in states:
        for member in target.reduction.outstanding():
            target.reduction.give_up(member)
        complete_all(target.reduction)
    for receiver, state in enumerate(states):
        for index, part in state.results.wanted.items():
            if part.reducer != receiver:
                result = states[part.reducer].results.frame(index, receiver)
                if result is not None and not lose_result(receiver, result):
                    states[part.reducer].payload_bytes_sent += len(result.payload)
                    state.results.store(result)
    for state in states:
        state.results.refuse_excessive()
    lineage = common_lineage(group.members).after(group.round, group.id)
    for p, state in zip(peers, states, strict=True):
        p.reports.append(state.commit())
        p.lineage = lineage
    # What the trainer does after a commit: trained blocks are what the contribution has become, the rest follows.
    for p in peers:
        trained = {block.index for block in layout.trained_blocks(p.held)}
        for block in layout.blocks:
            if block.index not in trained:
                p.live_N[block.start : block.stop] = p.reference.values_N[block.start : block.stop]
    return plan, states


def small_layout(num_experts: int = 4, shared: int = 200, expert: int = 90) -> Layout:
    """A layout with one layer."""
    return Layout.build(
        {"embed": (shared // 2,), "head": (shared - shared // 2,)},
        {"layer.up": (num_experts, expert // 3 * 2), "layer.down": (num_experts, expert - expert // 3 * 2)},
    )
