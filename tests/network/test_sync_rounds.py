"""What a peer notes after each of its rounds."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from spes_swarm.base.errors import ProtocolError
from spes_swarm.config.manifest import found_run
from spes_swarm.network.link.dht_records import everybody
from spes_swarm.network.round.sync_round import SyncRounds
from spes_swarm.network.run_state import RunState
from spes_swarm.protocol.admission.exclusion import Exclusions
from spes_swarm.protocol.rounds.outcome import CommitReport
from spes_swarm.protocol.rounds.round_state import RoundState
from spes_swarm.protocol.rounds.statement import Group, Statement
from tests.helpers.lone_trainer import run_config
from tests.helpers.rounds import KEY, FakePeer, complete_all, form, identities, open_round
from tests.helpers.run_settings import settings_without_trainer
from tests.helpers.tiny_model import tiny_layout


def test_rounds_without_parts_of_the_shared_layers_are_reported() -> None:
    """The other member delivers nothing in rounds 1 to 3, all in round 4, and nothing in rounds 5 and 6."""
    layout = tiny_layout()
    me, newcomer = identities(2)
    settings, *vectors = settings_without_trainer(found_run(run_config(), layout.digest, me), layout)
    run = RunState.of(me, settings, everybody, Exclusions())
    run.key = KEY  # which `form` certifies
    for vector in vectors:
        vector.close()
    faults: list[tuple[int, str, str]] = []

    async def join(statement: Statement) -> Group:
        member = FakePeer(run.reference, run.contribution_N, held=(0, 1))
        return form([member, member], statement.round)

    async def exchange(state: RoundState, *_: Any) -> CommitReport:
        complete_all(state.reduction)
        assert run.is_member(newcomer.peer_id)  # its slots are reserved although it has delivered nothing so far
        if state.plan.round == 4:
            other = open_round(
                state.group, state.plan, 1, run.reference, run.contribution_N, state.codec, state.bounds, KEY
            )
            for one, two in ((state, other), (other, state)):
                for part in state.plan.pushes(one.me, two.me):
                    two.reduction.accept(one.me, one.contributions.push_frame(part))
            for index, part in state.results.wanted.items():
                if part.reducer == other.me:
                    result = other.results.frame(index, state.me)
                    assert result is not None
                    state.results.store(result)
        return state.commit()

    def on_fault(peer_id: str, error: ProtocolError) -> None:
        faults.append((run.reference.round, peer_id, error.kind))

    others: dict[str, Any] = {
        "rendezvous": SimpleNamespace(join=join),
        "exchange": SimpleNamespace(run=exchange, on_fault=on_fault),
        **{name: MagicMock() for name in ("audits", "transfer", "announcer", "listener")},
    }
    rounds = SyncRounds(run, **others)

    async def hold() -> None:
        for number in range(1, 7):
            await rounds.run(number, tokens=1, routed=(1,) * len(run.leases.held), leaving=False)

    assert not run.is_member(newcomer.peer_id)
    asyncio.run(hold())
    assert faults == [(3, me.peer_id, "standstill")]
