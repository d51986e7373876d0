"""What the trainer learns from the run's services; records and answers are the test's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from spes_swarm.base.errors import InvitationError
from spes_swarm.config.manifest import found_run
from spes_swarm.network.link import peer_greeter
from spes_swarm.network.run_services import RunServices
from spes_swarm.port.commands import Notification
from spes_swarm.port.messages import CaughtUp
from spes_swarm.protocol.members.records import Record
from spes_swarm.protocol.members.reputation import Reputation
from tests.helpers.lone_trainer import run_config
from tests.helpers.records import progress
from tests.helpers.rounds import identity
from tests.helpers.run_settings import settings_without_trainer
from tests.helpers.tiny_model import tiny_layout


class FirstRecords:
    """The founder's record has just appeared."""

    async def refresh(self) -> None:
        pass

    def of(self, kind: str, schema: type[Record]) -> dict[str, Any]:
        return {"founder": progress()} if kind == "progress" else {}


class UnreadableRecords:
    """Nobody answers."""

    async def refresh(self) -> None:
        raise OSError("no node answers")


def services_with(call: Any, notify: Callable[[Notification], None] = lambda notification: None) -> RunServices:
    layout = tiny_layout()
    settings, *_vectors = settings_without_trainer(found_run(run_config(), layout.digest, identity(0)), layout)
    rpc: Any = SimpleNamespace(call=call)
    daemon: Any = SimpleNamespace(transport=None, peer_id=identity(0).peer_id, connections=None)
    listener: Any = SimpleNamespace(notify=notify)
    services = RunServices(listener, daemon, rpc, identity(0), settings)
    records: Any = FirstRecords()
    services._discovery.open(records)
    return services


def test_a_founder_that_answers_its_first_call_is_seen_at_once() -> None:
    """A peer that leaves now would otherwise take itself for the only one, and leave its work undone."""

    async def look() -> tuple[int, tuple[str, ...]]:
        async def answer(peer_id: str, method: str, request: Any, timeout_s: float) -> dict[str, Any]:
            for _ in range(10):  # not at once, as from another machine
                await asyncio.sleep(0)
            services.state.roster.reputation.note_answer(peer_id)
            return {"maddrs": []}

        services = services_with(answer)
        view = await services.commands.view()
        return view.num_training, view.ready

    assert asyncio.run(look()) == (1, ("founder",))


def test_a_peer_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_greeter, "FIRST_ANSWER_S", 0.0)

    async def look() -> tuple[str, ...]:
        async def silence(peer_id: str, method: str, request: Any, timeout_s: float) -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

        return (await services_with(silence).commands.view()).ready

    assert asyncio.run(look()) == ()


@pytest.mark.parametrize("complete", [True, False])
def test_a_peer_that_has_missed_too_much_follows_the_others_to_its_first_round(complete: bool) -> None:
    """It has its reference from them. If it led, those that remember it would follow it, and the others would not."""

    async def answer(peer_id: str, method: str, request: Any, timeout_s: float) -> dict[str, Any]:
        return {"maddrs": []}

    async def fetch() -> CaughtUp:
        return CaughtUp(round=60, why="it has missed 56", seconds=0.1, payload_bytes=10, complete=complete)

    async def catch_up() -> bool:
        services = services_with(answer)
        services.state.roster.reputation = Reputation(["founder"])
        services.commands.catching_up.resync_if_diverged = fetch  # type: ignore[method-assign]
        assert not services.state.roster.defers
        assert isinstance(await services.commands.run_round(1, (), leaving=False), CaughtUp)
        return services.state.roster.defers

    assert asyncio.run(catch_up()) is complete


def test_a_peer_learns_that_it_is_out_of_the_run_even_if_it_can_read_no_records() -> None:
    async def answer(peer_id: str, method: str, request: Any, timeout_s: float) -> dict[str, Any]:
        return {"maddrs": []}

    async def look() -> None:
        told: list[Any] = []
        services = services_with(answer, told.append)
        await services._refresh_view()
        assert [view.out for view in told] == [None]
        services.state.tracks.conduct.exclusions.note_lie(identity(0).peer_id, 5)
        unreadable: Any = UnreadableRecords()
        services._discovery.open(unreadable)
        with pytest.raises(OSError, match="no node answers"):
            await services._refresh_view()
        assert "may no longer take part: " in told[-1].out
        assert told[-1].out.endswith("a proof shows a lie in round 5 (only the founder can pardon it)")
        with pytest.raises(InvitationError, match=re.escape(told[-1].out)):
            await services.commands.run_round(1, (), leaving=False)

    asyncio.run(look())
