"""The states of a round at one peer, `Idle` and `UnderWay`: begun when due, awaited, ended in one of several ways."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch.profiler import record_function

from spes_swarm.base.errors import RoundError, TransferError
from spes_swarm.config.round_clock import RoundClock
from spes_swarm.config.run import RunConfig
from spes_swarm.port.commands import Commands, Port
from spes_swarm.port.messages import CaughtUp, RoundReport
from spes_swarm.protocol.rounds.outcome import CommitReport
from spes_swarm.training.learner import Learner
from spes_swarm.training.local_step import LocalSteps
from spes_swarm.training.local_work import TakenWork
from spes_swarm.training.rounds.commits import Commits
from spes_swarm.training.rounds.due import Pace
from spes_swarm.training.saving import CheckpointSaver
from spes_swarm.training.setup import Reporter

_LOGGER = logging.getLogger(__name__)
_RETRY_S = 2.0  # after a failed round
_POLL_S = 0.2
_CANCEL_S = 30.0


@dataclass(frozen=True)
class Idle:
    """No round is under way."""

    not_before: float = 0.0  # monotonic time from which on one may fall due: later after a failed round


@dataclass(frozen=True)
class UnderWay:
    """The network process runs a round."""

    work: TakenWork  # that this peer has contributed
    loss_rose: bool | None  # since the last commit: its vote on taking that back; None: it cannot tell
    leaving: bool  # it is this peer's last round, and others take over its experts
    exchange: record_function  # encloses the steps meanwhile, if rounds overlap
    future: Future[RoundReport | CaughtUp]


@dataclass(eq=False, kw_only=True)
class Rounds:
    """Runs the rounds of a peer, one at a time."""

    run: RunConfig
    network: Port
    learner: Learner
    steps: LocalSteps
    saver: CheckpointSaver
    commits: Commits
    reporter: Reporter
    stop: threading.Event  # the peer is to leave
    state: Idle | UnderWay = field(default_factory=Idle, init=False)

    def __post_init__(self) -> None:
        self._clock = RoundClock.of(self.run)
        self._pace = Pace(self.network, self.run.round, self.steps.tokens)

    def advance(self) -> bool:
        """Begins a round that is due, or ends one that is over. Returns False if neither is: time for a step.

        Raises:
            DivergenceError: see `DivergenceGuard`.
            NetworkProcessError: the network process has ended.
        """
        if isinstance(self.state, UnderWay):
            if not self.state.future.done():
                return False
            self.end()
        elif not self._due():
            return False
        elif not self.begin(leaving=self.commits.next_is_last):
            self.learner.divergence.restart()
            self.restart()
        elif self.run.round.overlap:
            return False
        else:
            self.await_end()
        return True

    def _due(self) -> bool:
        """Returns True if the swarm has done its inner steps since the last commit, or a peer has called a round."""
        learner, work, ruined = self.learner, self.learner.work, self.learner.watch.ruined
        assert isinstance(self.state, Idle)
        if time.monotonic() < self.state.not_before or (work.steps == 0 and not ruined):
            return False
        if self.network.called_round > learner.round or ruined:
            return True
        self._pace.inner_steps = self._clock.inner_steps_after(learner.round)
        due = self._pace.due(work.tokens, self.steps.throughput.tokens_per_second)
        self.reporter.status.progress = self._pace.progress
        return due

    def begin(self, *, leaving: bool) -> bool:
        """Contributes the live weights to the next round. Returns False if they are not finite."""
        learner, work, watch = self.learner, self.learner.work, self.learner.watch
        self._pace.begin()
        self.saver.before_round()
        self.reporter.status.phase = "synchronising"
        if not learner.live.contribute():
            return False
        taken, loss_rose = work.contribute(), watch.verdict
        if loss_rose:
            _LOGGER.info("this peer votes to take back round %d: %s", learner.round, watch.reason)
        exchange = record_function("spes/exchange")
        exchange.__enter__()  # type: ignore[no-untyped-call]
        future = self.network.submit(
            Commands.run_round,
            tokens=work.tokens,
            routed=tuple(int(work.routed_E[expert]) for expert in learner.model.held),
            leaving=leaving,
            loss_rose=loss_rose,
        )
        self.state = UnderWay(taken, loss_rose, leaving, exchange, future)
        return True

    def await_end(self, limit_s: float | None = None) -> CommitReport | None:
        """Waits for the current round; once `stop` is set, for at most `limit_s` (default: two stall timeouts).

        Returns the commit that it has ended with, None if there is none.
        """
        assert isinstance(self.state, UnderWay)
        limit_s = limit_s if limit_s is not None else 2 * self.run.round.stall_timeout_s
        stop_deadline: float | None = None
        while True:
            with contextlib.suppress(TimeoutError):
                self.state.future.exception(timeout=_POLL_S)
                break
            if self.stop.is_set():
                # Leaving: the current round may still finish, so that this peer's work is not lost.
                stop_deadline = stop_deadline or time.monotonic() + limit_s
                if time.monotonic() > stop_deadline:
                    self.network.ask(Commands.cancel_round, _CANCEL_S)
                    if not self.state.future.done():
                        self.state = Idle()
                        return None
        return self.end()

    def end(self) -> CommitReport | None:
        """Follows the current round, which is over; returns as `await_end`."""
        assert isinstance(self.state, UnderWay)
        ended, self.state = self.state, Idle()
        ended.exchange.__exit__(None, None, None)
        try:
            report = ended.future.result()
        except (RoundError, TransferError) as exc:
            self.state = Idle(not_before=time.monotonic() + _RETRY_S)
            self.reporter.note_fault("round", str(exc))
            return None
        if isinstance(report, CaughtUp):
            self.commits.catch_up(report)
            return None
        self.commits.follow(report, ended.work, ended.loss_rose, leaving=ended.leaving)
        return report.commit

    def restart(self) -> None:
        """Restarts from the reference with fresh moments, because the live weights are unusable."""
        learner = self.learner
        if isinstance(self.state, UnderWay):
            learner.reset()  # now, because the commit may save a checkpoint
            self.await_end()
        detail = f"the loss is NaN or infinite: restarting from round {learner.round}'s reference"
        self.reporter.warn("diverged", detail)
        learner.restart()
