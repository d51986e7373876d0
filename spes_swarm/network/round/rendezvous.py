"""Carries the messages of the machine that forms the group of each round (protocol/meeting), and tells it the time."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from spes_swarm.base.changes import Changes
from spes_swarm.base.errors import ProtocolError, RoundError
from spes_swarm.network.link.clock import steady_clock
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.run_state import RunState
from spes_swarm.protocol.meeting.gathering import CALL_TIMEOUT_S, POLL_TIMEOUT_S
from spes_swarm.protocol.meeting.meeting import TICK_S, Meeting
from spes_swarm.protocol.meeting.outputs import Ahead, Answer, Call, Called, Fault, Output, Poll, Reply, Stall
from spes_swarm.protocol.meeting.view import View
from spes_swarm.protocol.rounds.statement import Group, Statement, Vet, form_group, open_statement, seal_statement

_IDLE_TICKS = round(0.5 / TICK_S)
_LOGGER = logging.getLogger(__name__)


def now() -> float:
    """Returns the time of the event loop, in seconds, with what the machine has slept."""
    return asyncio.get_running_loop().time() + round(steady_clock() - time.monotonic(), 1)


@dataclass(eq=False)
class Rendezvous:
    """Forms the groups of one run."""

    rpc: Rpc
    run_state: RunState
    vet: Vet  # checks that a peer may take part
    is_blind: Callable[[], bool]  # True while this peer may have slept and lost sight of the others
    on_called: Callable[[int], None]  # a leader calls for a round: the trainer should join as soon as its step is done
    machine: Meeting = field(init=False)
    _changed: Changes = field(default_factory=Changes, init=False)
    _polls: dict[int, asyncio.Future[Answer]] = field(default_factory=dict, init=False)
    _keys: Iterator[int] = field(default_factory=count, init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _ticks: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.identity, self._run_id = self.run_state.identity, self.run_state.run_id
        self._num_blocks = len(self.run_state.settings.layout.blocks)
        self._window_s = self.run_state.run.round.window_s
        self.machine = Meeting(self._window_s, self.run_state.run.round.timeout_s, self._form, self._leaves_out)

    def describe(self) -> Iterator[str]:
        """Lines for the log: whom this peer follows, and which rounds it gathers."""
        return self.machine.describe()

    @property
    def gathering(self) -> bool:
        """Returns True while this peer waits for the group of a round."""
        return self.machine.joining

    async def start(self) -> None:
        """Registers the handlers."""
        await self.rpc.serve("gather", self._serve_gather)
        await self.rpc.serve("call", self._serve_call)

    async def join(self, statement: Statement) -> Group:
        """Submits this peer's statement to the round and returns the closed group.

        Raises:
            RoundError: the round was closed without this peer, or no group formed in time (NoLeaderError: none leads).
        """
        sealed = seal_statement(self.identity, self._run_id, statement)
        try:
            with self._input() as machine:
                machine.join(sealed, statement)
            while (outcome := machine.outcome) is None:
                await self._changed.wait()
        finally:
            with self._input() as machine:
                machine.leave()
        if isinstance(outcome, RoundError):
            raise outcome
        _LOGGER.info("round %d: a group of %d, led by %s", outcome.round, len(outcome.members), machine.leader)
        return outcome

    def spend(self, group: Group) -> None:
        """Marks a group whose exchange failed here: another attempt at the round needs another group."""
        with self._input() as machine:
            machine.spend(group)

    def reset(self) -> None:
        """Forgets groups and claims, since this peer has adopted the reference of others, at whatever round."""
        with self._input() as machine:
            machine.reset()

    @contextmanager
    def _input(self) -> Iterator[Meeting]:
        roster = self.run_state.roster
        view = View(
            self._run_id,
            self.identity.peer_id,
            self.run_state.target_round(),
            tuple(roster.neighbours(self._window_s)),
            self.run_state.reachable,
            roster.defers,
            frozenset(roster.reputation.without_duty),
            self.is_blind(),
        )
        try:
            yield self.machine.at(now(), view)
        finally:
            self._carry_out()

    def _carry_out(self) -> None:
        outputs, decisions = self.machine.advance()
        for decision in decisions:
            _LOGGER.debug(decision)
        for output in outputs:
            try:
                self._do(output)
            except Exception:  # the other outputs do not come again
                _LOGGER.exception("%s failed", output)
        if not self._ticks:
            self._ticks = True
            self._begin(self._tick())
        self._changed.notify()

    def _do(self, output: Output) -> None:
        match output:
            case Poll():
                self._begin(self._poll(output))
            case Call():
                self._begin(self._call(output))
            case Reply(key, answer):
                if key in self._polls and not self._polls[key].done():
                    self._polls[key].set_result(answer)
            case Called(round_number):
                self.on_called(round_number)
            case Ahead(round_number):
                self.run_state.note_ahead(round_number)
            case Stall(leader, round_number):
                self.run_state.tracks.conduct.note_stall(leader, round_number)
            case Fault(peer, error):
                self.rpc.on_fault(peer, error)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tick(self) -> None:
        for tick in itertools.count():
            await asyncio.sleep(TICK_S)
            # Twice a second also while nobody waits: the machine notices if this process did not run.
            if not self.machine.busy and tick % _IDLE_TICKS:
                continue
            try:
                with self._input():
                    pass
            except Exception:
                _LOGGER.exception("the rendezvous has failed")  # the next tick goes on with it

    async def _poll(self, poll: Poll) -> None:
        arguments = {"run": self._run_id, "round": poll.round, "statement": poll.sealed}
        answer = await self._ask(poll.leader, "gather", arguments, POLL_TIMEOUT_S)
        with self._input() as machine:
            machine.poll_answered(poll, answer)

    async def _call(self, call: Call) -> None:
        answer = await self._ask(call.peer, "call", {"run": self._run_id, "round": call.round}, CALL_TIMEOUT_S)
        with self._input() as machine:
            machine.call_answered(call, answer)

    async def _ask(
        self, peer: str, method: str, arguments: dict[str, Any], timeout_s: float
    ) -> Answer | ProtocolError | None:
        try:
            return await self.rpc.call(peer, method, arguments, timeout_s)
        except ProtocolError as exc:
            return exc
        except OSError:
            return None
        except Exception:  # without an answer, the machine would wait for it
            _LOGGER.exception("`%s` of %s failed", method, peer)
            return None

    def _leaves_out(self, peer_id: str) -> bool:
        """A group that is closed here does not include a peer that only owes, or is out."""
        roster = self.run_state.roster
        return roster.reputation.leaves_out(peer_id) or not roster.admits(peer_id)

    def _form(self, round_number: int, sealed: Iterable[bytes]) -> Group:
        return form_group(self._run_id, round_number, sealed, self._num_blocks, self.vet)

    def _requested_round(self, request: dict[str, Any]) -> int:
        round_number = request.get("round")
        if request.get("run") != self._run_id or type(round_number) is not int:  # a bool is an int, too
            raise ProtocolError("run", "the call is for another run, or has no round")
        return round_number

    async def _serve_gather(self, peer_id: str, request: dict[str, Any]) -> Answer:
        """Handles a follower that submits its statement, or polls again."""
        round_number = self._requested_round(request)
        sealed = request.get("statement")
        if not isinstance(sealed, bytes):
            raise ProtocolError("malformed", "`gather` without a statement")
        if 0 <= round_number - self.run_state.target_round() <= 1:
            member = open_statement(sealed, self._run_id, round_number, self._num_blocks, self.vet)
            if member.peer_id != peer_id:
                raise ProtocolError("sender", "the statement is another peer's")
        key = next(self._keys)
        self._polls[key] = asyncio.get_running_loop().create_future()
        try:
            with self._input() as machine:
                machine.polled(key, peer_id, round_number, sealed)
            return await self._polls[key]
        finally:
            del self._polls[key]

    async def _serve_call(self, peer_id: str, request: dict[str, Any]) -> Answer:
        """Handles a leader that calls this peer to a round."""
        round_number = self._requested_round(request)
        with self._input() as machine:
            return machine.called(peer_id, round_number)
