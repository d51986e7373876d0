"""The form without leaders, to be compared with the machine of protocol/meeting on the same walks.

Every peer of a round tells its signed statement, and all that it knows of others', to every live peer, again and again.
Once all whom it awaits have come, or its window is over, it adds an echo: the digest of the set that it holds, which
from then on only grows, by the union with another set that is echoed. A set that a majority of the voices that can be
reached echo is the group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from blake3 import blake3

from spes_swarm.base.errors import ProtocolError, RoundError
from spes_swarm.protocol.meeting.gathering import POLL_S, SLEPT_S
from spes_swarm.protocol.meeting.outputs import Answer, Call, Called, Look, Output
from spes_swarm.protocol.meeting.view import View
from spes_swarm.protocol.rounds.statement import Group, Statement

_PAUSE_S = POLL_S / 2


@dataclass(frozen=True)
class Tell(Call):
    """Output: tell a peer all statements known here and, if there is one, this peer's echo."""

    statements: tuple[bytes, ...]
    echo: bytes


@dataclass(slots=True)
class _Other:
    due: float = 0.0
    busy: bool = False
    failures: int = 0


class Leaderless:
    """See above; the interface is that of Meeting."""

    def __init__(
        self,
        window_s: float,
        exchange_s: float,
        form: Callable[[int, Iterable[bytes]], Group],
        leaves_out: Callable[[str], bool],
    ) -> None:
        del exchange_s, leaves_out
        self._window_s, self._form = window_s, form
        self.outputs: list[Output] = []
        self.decisions: list[str] = []
        self.closed: Group | None = None
        self.outcome: Group | RoundError | None = None
        self.messages = 0
        self._view = View("", "", 0)
        self._now = 0.0
        self._joined: tuple[int, bytes, float] | None = None  # round, statement, since when
        self._known: defaultdict[int, dict[str, bytes]] = defaultdict(dict)
        self._echoes: defaultdict[int, dict[str, bytes]] = defaultdict(dict)
        self._others: dict[str, _Other] = {}
        self._lost: set[str] = set()
        self._past: set[str] = set()
        self._spent: set[bytes] = set()
        self._looks: bool | None = None

    @property
    def busy(self) -> bool:
        """See Meeting."""
        return self._joined is not None

    @property
    def attempts(self) -> bool:
        """See Meeting."""
        return self._joined is not None

    def at(self, now: float, view: View) -> Leaderless:
        """See Meeting."""
        if self.busy and now - self._now > SLEPT_S and self._joined is not None:
            self._joined = (*self._joined[:2], now - self._window_s / 2)
            self._lost.clear()
        self._now, self._view = now, view
        return self

    def join(self, sealed: bytes, statement: Statement) -> None:
        """See Meeting."""
        number, me = statement.round, self._view.me
        self._joined, self.outcome, self._looks = (number, sealed, self._now), None, None
        self._others, self._lost, self._past = {}, set(), set()
        self._known[number][me] = sealed
        self._echoes[number].pop(me, None)
        self.tick()

    def leave(self) -> None:
        """See Meeting."""
        self._joined = None

    def spend(self, group: Group) -> None:
        """See Meeting."""
        self._spent.add(group.id)
        self._known[group.round].clear()
        self._echoes[group.round].clear()
        if self.closed is not None and self.closed.id == group.id:
            self.closed = None

    def reset(self) -> None:
        """See Meeting."""
        self.closed = None
        self._known.clear()
        self._echoes.clear()

    def looked(self, round_number: int) -> None:
        """See Meeting."""
        del round_number
        self._looks = False
        self.tick()

    def tick(self) -> None:
        """See Meeting."""
        if self._joined is None or self.outcome is not None:
            return
        number, _, since = self._joined
        view, me = self._view, self._view.me
        known, echoes = self._known[number], self._echoes[number]
        if self._closes(number):
            return
        if view.are_most(self._past, self._lost - self._past):
            self.outcome = RoundError(f"round {number} is over")
            return
        if self._now > since + 2 * self._window_s + 20.0:
            self.outcome = RoundError(f"no group formed for round {number}")
            return
        awaited = {n.peer_id for n in view.neighbours} - known.keys() - self._lost
        if me not in echoes and (not awaited or self._now >= since + self._window_s):
            if not view.neighbours and self._looks is not False:
                if self._looks is None:
                    self._looks = True
                    self.outputs.append(Look(number))
                return
            echoes[me] = self._digest(number)
            if self._closes(number):
                return
        for neighbour in view.neighbours:
            other = self._others.setdefault(neighbour.peer_id, _Other())
            if not other.busy and self._now >= other.due:
                other.busy = True
                self.messages += 1
                told = tuple(sorted(known.values()))
                self.outputs.append(Tell(neighbour.peer_id, number, told, echoes.get(me, b"")))

    def told(self, peer: str, tell: Tell) -> Answer:
        """Another peer tells what it knows. Returns the answer."""
        number, target, me = tell.round, self._view.target, self._view.me
        if self.closed is not None and self.closed.round == number:
            return {"group": list(self.closed.sealed), "target": target}
        if number != target:
            return {"target": target}
        self._learn(number, peer, tell.statements, tell.echo)
        self.outputs.append(Called(number))
        self.tick()
        known = tuple(sorted(self._known[number].values())) if self._joined is not None else ()
        return {"statements": known, "echo": self._echoes[number].get(me, b"")}

    def called(self, peer: str, round_number: int) -> Answer:
        """Hostile peers of the walks call as they would call a Meeting."""
        del peer, round_number
        return {}

    def polled(self, key: int, peer: str, round_number: int, sealed: bytes) -> None:
        """The same for polls."""
        del key
        if round_number == self._view.target:
            self._learn(round_number, peer, (sealed,), b"")

    def poll_answered(self, poll: object, answer: object) -> None:
        """There are no polls."""

    def call_answered(self, call: Call, answer: Answer | ProtocolError | None) -> None:
        """A peer has answered what it was told."""
        other = self._others.get(call.peer)
        if self._joined is None or self._joined[0] != call.round or other is None:
            return
        other.busy, other.due = False, self._now + _PAUSE_S
        if answer is None or isinstance(answer, ProtocolError):
            other.failures += 1
            if other.failures >= 2:
                self._lost.add(call.peer)
        else:
            other.failures = 0
            self._lost.discard(call.peer)
            self._hear(call, answer)
        self.tick()

    def _hear(self, call: Call, answer: Answer) -> None:
        sealed, number = answer.get("group"), call.round
        if isinstance(sealed, list):
            group = self._form(number, sealed)
            if group.id not in self._spent and self._view.are_majority([m.peer_id for m in group.members], self._lost):
                self.closed = group
            return
        target = answer.get("target")
        if isinstance(target, int) and target > number:
            self._past.add(call.peer)
        if "statements" in answer:
            self._learn(number, call.peer, answer["statements"], answer["echo"])

    def _learn(self, number: int, peer: str, statements: Iterable[bytes], echo: bytes) -> None:
        """Takes the union; one's own echo follows it if the other set is echoed as well."""
        me, known, echoes = self._view.me, self._known[number], self._echoes[number]
        before = len(known)
        for member in self._form(number, statements).members:
            if member.peer_id != me:
                known.setdefault(member.peer_id, next(s for s in statements if s.startswith(member.peer_id.encode())))
        if echo:
            echoes[peer] = echo
        if me in echoes and len(known) > before:
            echoes[me] = self._digest(number)

    def _digest(self, number: int) -> bytes:
        return blake3(b"".join(sorted(self._known[number].values()))).digest()

    def _closes(self, number: int) -> bool:
        """Returns True if this peer has its group now."""
        if self.closed is None or self.closed.round != number:
            me, echoes = self._view.me, self._echoes[number]
            mine = echoes.get(me)
            agreed = [peer for peer, digest in echoes.items() if digest == mine]
            if mine is None or not self._view.are_majority(agreed, self._lost):
                return False
            group = self._form(number, self._known[number].values())
            if group.id in self._spent:
                return False
            self.closed = group
        inside = self.closed.index_of(self._view.me) is not None
        self.outcome = self.closed if inside else RoundError(f"round {number} began without this peer")
        return True
