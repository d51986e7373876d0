"""Members of an exchange that was held in one process, after its commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.wire import Channel, open_channel
from spes_swarm.network.round.audits import Audits
from spes_swarm.network.round.proofs import Proofs
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.plan import Plan, make_plan
from spes_swarm.protocol.rounds.round_state import RoundState
from spes_swarm.protocol.rounds.taking_back import Previous
from spes_swarm.protocol.rounds.track_record import TrackRecords
from tests.helpers.hosts import MEMBERS, Endpoint, connected
from tests.helpers.lying_reducer import lying_state
from tests.helpers.rounds import BOUNDED, KEY, RUN_ID, UNBOUNDED, complete_all, form, peer, small_layout

LAYOUT = small_layout()
STALL_S = 8.0  # a member that shows nothing is asked again after a quarter of it
LIAR, SILENT = 0, 3


@dataclass
class Auditor:
    """A member after the exchange."""

    state: RoundState
    audits: Audits
    faults: list[tuple[str, ProtocolError]]

    @property
    def proven(self) -> list[str]:
        return self.state.tracks.conduct.exclusions.culprits

    async def done(self) -> None:
        assert self.audits._task is not None
        await asyncio.wait_for(self.audits._task, 120)
        await self.audits.proofs.added()


def exchanged(
    num_members: int = 4,
    *,
    lying: str | None = "flipped",
    keeping: bool = True,
    clients: Collection[int] = (),
    opposing: int | None = None,
    length: float = -1.0,
) -> list[RoundState]:
    """A committed exchange; the fourth member may keep nothing of it.

    `lying`: how the first member lies about results (`KINDS` of lying_reducer.py), if it does.
    `clients`: members that others cannot reach. `opposing`: whoever contributes so many times (`length`) what
    all others do, who contribute the same.
    """
    rng = np.random.default_rng(0)
    initial_N = np.zeros(LAYOUT.num_elements, np.float32)
    members = [
        peer(LAYOUT, initial_N, range(4), previous=kept(keeping or i != SILENT), reachable=i not in clients)
        for i in range(num_members)
    ]
    work_N = rng.normal(0, 1, LAYOUT.num_elements)
    for i, who in enumerate(members):
        own_N = rng.normal(0, 1, LAYOUT.num_elements)
        made_N = own_N if opposing is None else length * work_N if i == opposing else work_N
        who.live_N += made_N.astype(np.float32)
    group = form(members, 3)
    plan = make_plan(group, LAYOUT, 64, clip=0.0 if opposing is None else 1.5)
    bounds = UNBOUNDED if opposing is None else BOUNDED
    states = [
        (lying_state(lying) if lying is not None and i == LIAR else RoundState)(
            group, plan, i, m.reference, m.live_N, get_codec("fp16"), bounds, KEY, TrackRecords(), None, m.previous
        )
        for i, m in enumerate(members)
    ]
    for state in states:
        complete_all(state.reduction)
    for sender in states:
        for target in states:
            for part in plan.pushes(sender.me, target.me):
                target.reduction.accept(sender.me, sender.contributions.push_frame(part))
    for state in states:
        for index, part in state.results.wanted.items():
            if part.reducer != state.me:
                frame = states[part.reducer].results.frame(index, state.me)
                assert frame is not None
                state.results.store(frame)
    for state in states:
        state.commit()
    return states


def kept(whether: bool) -> Previous:
    vectors = [np.zeros(LAYOUT.num_elements, np.float32) for _ in range(2)] if whether else []
    return Previous(*vectors)


@asynccontextmanager
async def auditors(
    states: list[RoundState], folder: Path | None = None, *, real: bool = False
) -> AsyncIterator[list[Auditor]]:
    """The members, connected with each other, in memory or through daemons."""
    async with connected(len(states), real=real) as found:
        by_id = {host.peer_id: host for host in found}
        started = [await auditor(by_id[state.averaging.peer_ids[state.me]], state, folder) for state in states]
        try:
            yield started
        finally:
            for each in started:
                each.audits.end(keep=False)
                each.audits._current = lambda: None
            for each in started:
                each.audits._begun.notify()  # nobody waits for a commit any more
            await asyncio.sleep(0.1)


async def auditor(host: Endpoint, state: RoundState, folder: Path | None) -> Auditor:
    settings = SimpleNamespace(proofs=None if folder is None else folder / host.peer_id)
    round_config = SimpleNamespace(round=SimpleNamespace(stall_timeout_s=STALL_S))
    roster = SimpleNamespace(swarm_round=lambda own_round: own_round)
    services = SimpleNamespace(run=round_config, settings=settings, tracks=state.tracks, reference=state.reference)
    me = SimpleNamespace(peer_id=host.peer_id)
    run_state: Any = SimpleNamespace(run_id=RUN_ID, roster=roster, identity=me, group=frozenset(), **vars(services))
    faults: list[tuple[str, ProtocolError]] = []
    common = host.transport, run_state, lambda *fault: faults.append(fault), MEMBERS
    audits = Audits(*common, lambda: state, Proofs(*common))
    await audits.start()
    return Auditor(state, audits, faults)


def audit_all(each: Auditor, later: int = 0) -> None:
    """Begins an audit of all parts, as if the commit had been some rounds later."""
    each.audits.end(keep=False)
    plan = replace(each.state.plan, round=each.state.plan.round + later)
    each.audits.begin(replace_plan(each.state, plan))


def replace_plan(state: RoundState, plan: Plan) -> RoundState:
    other = copy(state)
    other.plan = plan
    return other


def begin(members: list[Auditor]) -> None:
    """All have committed."""
    for each in members:
        each.audits.begin(each.state)


async def asked(members: list[Auditor], hello: dict[str, Any], by: int = 0, whom: int = 1) -> list[Frame]:
    """What one member answers to another one."""
    other = members[1].state.averaging.peer_ids[whom]
    async with open_channel(members[by].audits._transport, other, f"{RUN_ID}/audit", 60.0) as channel:
        await channel.send_hello(**hello)
        return [frame async for frame in frames_of(channel)]


async def frames_of(channel: Channel) -> AsyncIterator[Frame]:
    while True:
        frame = await channel.receive(1 << 20)
        yield frame
        if frame.kind is not FrameKind.DATA:
            return
