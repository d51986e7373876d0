"""Several peers meet for round 1 in one event loop. Calls are handed over directly; tests answer for hostile peers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from spes_swarm.base.errors import ProtocolError, RoundError
from spes_swarm.network.link.rpc import RemoteError
from spes_swarm.network.round.rendezvous import Rendezvous
from spes_swarm.protocol.meeting.view import rank
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.members.reputation import Neighbour
from spes_swarm.protocol.rounds.statement import Group, Statement
from tests.helpers.rounds import RUN_ID, certified, identities, sign_statement
from tests.helpers.virtual_time import at, run_at_once

WINDOW_S = 10.0
EXCHANGE_S = 60.0
T = TypeVar("T")
Enter = Callable[[Rendezvous], Awaitable[Group]]


def statement_fields() -> dict[str, object]:
    return {
        "round": 5,
        "held": [1],
        "tokens": 10,
        "routed": [10],
        "rms": [0.01, 0.01],
        "usual_rms": [0.0, 0.0],
        "vouched": b"",
        "bandwidth_mbps": 1.0,
        "reachable": True,
        "versions": [0, 1, 2],
        "digests": [b"\0" * 32] * 3,
        "commits": [0],
        "marks": b"\0" * 8,
        "room": 1,
        "fixed": False,
        "leaving": False,
        "leased": b"\0",
        "certificate": b"",
    }


class Wire:
    """All peers of a test, each with what it answers."""

    def __init__(self) -> None:
        self.handlers: dict[tuple[str, str], Callable[[str, dict[str, Any]], Any]] = {}
        self.faults: list[tuple[str, str]] = []
        self.lost: list[tuple[str, str]] = []  # (caller, callee): the next call does not arrive


class FakeRpc:
    """The part of Rpc that a rendezvous uses."""

    def __init__(self, wire: Wire, peer_id: str) -> None:
        self._wire = wire
        self._peer_id = peer_id

    def on_fault(self, peer_id: str, error: ProtocolError) -> None:
        self._wire.faults.append((peer_id, error.kind))

    async def serve(self, method: str, handler: Callable[[str, dict[str, Any]], Any]) -> None:
        self._wire.handlers[self._peer_id, method] = handler

    async def call(self, peer_id: str, method: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        handler = self._wire.handlers.get((peer_id, method))
        if handler is None:
            raise ConnectionError(peer_id)
        if (call := (self._peer_id, peer_id)) in self._wire.lost:
            self._wire.lost.remove(call)
            raise ConnectionError(peer_id)
        loop = asyncio.get_running_loop()
        answering: asyncio.Task[dict[str, Any]]
        answering = loop.create_task(handler(self._peer_id, arguments), context=at(peer_id))
        try:
            done, _ = await asyncio.wait({answering}, timeout=timeout_s)
            if not done:  # it may be frozen, so that its task would not even be cancelled
                raise TimeoutError
            return answering.result()
        except ProtocolError as exc:
            raise RemoteError(str(exc)) from exc
        finally:
            answering.cancel()


class FakeRoster:
    """The part of Roster that a rendezvous uses: everybody may take part."""

    def __init__(self, others: list[Neighbour], defers: Callable[[], bool]) -> None:
        self._others = others
        self._defers = defers
        self.reputation = SimpleNamespace(without_duty=frozenset(), leaves_out=lambda peer_id: False)

    def neighbours(self, window_s: float) -> list[Neighbour]:
        del window_s
        return self._others

    @property
    def defers(self) -> bool:
        return self._defers()

    def admits(self, peer_id: str) -> bool:
        del peer_id
        return True


class CertifiedRendezvous(Rendezvous):
    """Adds a peer's certificate to its statements, so that all peers of a test can join with the same one."""

    async def join(self, statement: Statement) -> Group:
        return await super().join(certified(self.identity, RUN_ID, statement))


class Meeting:
    """Peers that know each other."""

    def __init__(self, ranks: str = "HABC") -> None:
        """`ranks`: their names in the order of their ranks for round 1; A to E are honest."""
        self.wire = Wire()
        everybody = sorted(identities(len(ranks)), key=lambda i: rank(RUN_ID, 1, i.peer_id))
        self.identity = dict(zip(ranks, everybody, strict=True))
        self.name = {who.peer_id: name for name, who in self.identity.items()}
        self.hostile, self.honest = self.identity["H"], [self.identity[name] for name in ranks if name in "ABCDE"]
        self.sealed = [sign_statement(who, RUN_ID, self.statement()) for who in self.honest]
        self.called: list[int] = []
        self.known: dict[str, list[Neighbour]] = {}  # by peer: the live peers that it knows
        self.ahead: list[int] = []
        self.stalls: list[tuple[str, int]] = []
        self.blind: set[str] = set()  # peers that may have lost sight of the others
        self.peers = [self.rendezvous(who) for who in self.honest]

    def rendezvous(
        self,
        who: Identity,
        target_round: Callable[[], int] = lambda: 1,
        defers: Callable[[], bool] = lambda: False,
        on_called: Callable[[int], None] | None = None,
        electorate: str | None = None,
        alone: bool = False,
    ) -> Rendezvous:
        """`electorate`: the names of those whose claims count; None: all. `alone`: it knows no other peer."""
        others = self.known[who.peer_id] = [
            Neighbour(other.peer_id, True, in_electorate=electorate is None or name in electorate)
            for name, other in self.identity.items()
            if other is not who and not alone
        ]
        state: Any = SimpleNamespace(
            identity=who,
            run_id=RUN_ID,
            run=SimpleNamespace(round=SimpleNamespace(window_s=WINDOW_S, timeout_s=EXCHANGE_S)),
            settings=SimpleNamespace(layout=SimpleNamespace(blocks=range(3))),
            reachable=True,
            target_round=target_round,
            note_ahead=self.ahead.append,
            roster=FakeRoster(others, defers),
            tracks=SimpleNamespace(conduct=SimpleNamespace(note_stall=self._note_stall)),
        )
        rpc: Any = FakeRpc(self.wire, who.peer_id)
        return CertifiedRendezvous(
            rpc,
            state,
            vet=lambda peer_id, statement: 1.0,
            is_blind=lambda: who.peer_id in self.blind,
            on_called=on_called or self.called.append,
        )

    def _note_stall(self, leader: str, round_number: int) -> None:
        self.stalls.append((self.name[leader], round_number))

    def statement(self, tokens: int = 10) -> Statement:
        return Statement.model_validate({**statement_fields(), "round": 1, "versions": [0, 0, 0], "tokens": tokens})

    def answers(self, name: str, method: str, answer: Callable[[str, bytes | None], Awaitable[dict[str, Any]]]) -> None:
        """Has a peer answer a call with what `answer` returns for the caller's name and statement."""

        async def handle(caller: str, arguments: dict[str, Any]) -> dict[str, Any]:
            return await answer(self.name[caller], arguments.get("statement"))

        self.wire.handlers[self.identity[name].peer_id, method] = handle

    def begin(self, who: Rendezvous, attempt: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begins what a peer does, so that the peer can be frozen."""
        return asyncio.get_running_loop().create_task(attempt, context=at(who.identity.peer_id))

    async def keep_trying(self, who: Rendezvous, enter: Enter | None = None, delay_s: float = 0.0) -> Group:
        """Has a peer join the round, by `enter` if that is given, and again whenever this fails."""
        await asyncio.sleep(delay_s)
        while True:
            try:
                return await (enter or self.join)(who)
            except RoundError:
                await asyncio.sleep(1.0)

    def meet(self, limit_s: float, enter: Enter | None = None, late_s: Sequence[float] = ()) -> None:
        """Checks that the honest peers, and nobody else, get into one group within `limit_s`.

        `late_s`: how many seconds late each starts, by rank; the others start at once.
        """

        async def hold() -> list[Group]:
            for who in self.peers:
                await who.start()
            delays_s = [*late_s, *[0.0] * (len(self.peers) - len(late_s))]
            return await asyncio.gather(
                *(self.keep_trying(who, enter, delay_s) for who, delay_s in zip(self.peers, delays_s, strict=True))
            )

        groups = run_at_once(hold(), limit_s)
        for group in groups:
            assert {member.peer_id for member in group.members} == {who.peer_id for who in self.honest}
        assert len({group.id for group in groups}) == 1

    async def join(self, who: Rendezvous) -> Group:
        return await who.join(self.statement())

    async def fail_with_hostile(self, who: Rendezvous) -> Group:
        """Has a peer join the round, and its exchange fail if the hostile peer is in the group."""
        group = await self.join(who)
        if group.index_of(self.hostile.peer_id) is not None:
            await asyncio.sleep(15.0)
            who.spend(group)
            raise RoundError("the exchange has failed")
        return group
