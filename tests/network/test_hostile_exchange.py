"""An exchange in which a member lies on all of its streams: the others commit in time, and all commit the same."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.round.deadlines import ExchangeLimits
from spes_swarm.network.round.exchange import Exchange
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.rounds.outcome import CommitReport
from spes_swarm.protocol.rounds.plan import make_plan
from spes_swarm.protocol.rounds.round_state import RoundState
from tests.helpers.hostile_peer import MODES, HostileExchange
from tests.helpers.hosts import MEMBERS, connected
from tests.helpers.rounds import BOUNDED, KEY, RUN_ID, form, peer, small_layout
from tests.helpers.virtual_time import run_at_once

LAYOUT = small_layout(shared=3000)  # each member reduces more parts than there are ways to spoil one
LIMITS = ExchangeLimits(stall_timeout_s=3.0, timeout_s=10.0)
PATIENT = ExchangeLimits(stall_timeout_s=120.0, timeout_s=600.0)  # of a busy machine
HELD = ((0, 1), (0, 1), (0, 1), (2, 3))  # the last one, which is hostile, trains its experts alone
HOSTILE = 3
# What honest members say of it, by what it does.
FAULTS = {
    "frames": {"nonfinite", "norm", "weight", "form", "part", "shape", "truncated", "lost"},
    "bytes": {"malformed", "lost"},
    "silent": {"late", "pull"},
    "slow": {"late", "pull"},
    "two_faced": {"malformed"},
}


@pytest.mark.parametrize(
    ("mode", "codec", "real"),
    [*((mode, codec, False) for mode in MODES for codec in ("fp16", "int4")), ("frames", "int4", True)],
)
def test_members_commit_without_a_hostile_one(mode: str, codec: str, real: bool) -> None:
    """All commit the same, unless it gives each of them other results."""
    rng = np.random.default_rng(0)
    members = [peer(LAYOUT, np.zeros(LAYOUT.num_elements, np.float32), held) for held in HELD]
    for who in members:
        who.live_N += rng.normal(0, 0.01, LAYOUT.num_elements).astype(np.float32)
    group = form(members, 3)
    plan = make_plan(group, LAYOUT, 64)
    states = [
        RoundState(group, plan, i, who.reference, who.live_N, get_codec(codec), BOUNDED, KEY)
        for i, who in enumerate(members)
    ]
    ids = [member.peer_id for member in group.members]
    faults: dict[str, set[str]] = {}
    limits = PATIENT if real else LIMITS

    async def exchange() -> list[CommitReport]:
        async with connected(len(members), real=real) as found:
            by_id = {host.peer_id: host for host in found}
            common: list[Any] = [
                (by_id[peer_id].transport, by_id[peer_id].rpc, RUN_ID, limits, on_fault, MEMBERS) for peer_id in ids
            ]
            hostile = HostileExchange(*common[HOSTILE])
            hostile.mode, hostile.on_fault = mode, lambda peer_id, error: None
            honest = [Exchange(*arguments) for arguments in common[:HOSTILE]]
            for each in (hostile, *honest):
                await each.start()
            lying = asyncio.create_task(hostile.run(states[HOSTILE]))
            reports = await asyncio.gather(*(each.run(states[i]) for i, each in enumerate(honest)))
            lying.cancel()
            return reports

    def on_fault(peer_id: str, error: ProtocolError) -> None:
        faults.setdefault(peer_id, set()).add(error.kind)

    reports = asyncio.run(exchange()) if real else run_at_once(exchange(), LIMITS.timeout_s)
    assert faults.keys() == {ids[HOSTILE]}
    assert faults[ids[HOSTILE]] >= FAULTS[mode]
    assert {who.reference.round for who in members[:HOSTILE]} == {3}
    digests = {who.reference.digest for who in members[:HOSTILE]}
    if mode == "two_faced":
        assert len(digests) == HOSTILE
    else:
        assert len(digests) == 1
        assert all(report.parts_missing for report in reports)
