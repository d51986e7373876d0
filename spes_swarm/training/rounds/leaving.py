"""How a peer leaves: a last round, help for latecomers, the last checkpoint and the last publication."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from spes_swarm.config.run import RoundConfig
from spes_swarm.port.commands import Port
from spes_swarm.protocol.members.records import State
from spes_swarm.protocol.rounds.outcome import CommitReport
from spes_swarm.publishing.background import Publishing
from spes_swarm.training.learner import Learner
from spes_swarm.training.rounds.commits import Commits
from spes_swarm.training.rounds.due import others_train, wait_until_none_trains
from spes_swarm.training.rounds.event import RoundEvents
from spes_swarm.training.rounds.life import Rounds
from spes_swarm.training.saving import CheckpointSaver
from spes_swarm.training.setup import Reporter

_POLL_S = 0.2
_FIRST_CONTACT_S = 5.0  # how long a peer that leaves before its first commit, and may not know the others, tries
_FINISH_PUBLISHING_S = 600.0  # when `max_rounds` are done or the run is over; otherwise publishing stops at once


@dataclass(eq=False, kw_only=True)
class Leaving:
    """Takes a peer that trains no longer out of the swarm."""

    config: RoundConfig
    network: Port
    learner: Learner
    rounds: Rounds
    commits: Commits
    round_events: RoundEvents
    saver: CheckpointSaver
    publishing: Publishing | None
    reporter: Reporter
    stop: threading.Event
    announce: Callable[[State], None]  # tells the other peers, and the panel

    def __post_init__(self) -> None:
        self._limit_s = self.config.window_s + 2 * self.config.stall_timeout_s  # of waiting for others

    def hand_over(self) -> None:
        """Leaves this peer's work and its experts to the others, and the last reference of a run to latecomers."""
        if not self.commits.finished:
            self._run_last_round()
        if self.commits.run_is_over:
            self._await_latecomers()

    def leave(self) -> None:
        """Says goodbye, and writes and publishes what is to remain."""
        self.announce("leaving")  # so that no peer waits for this one in the next round
        self.round_events.write(wait_s=self.config.stall_timeout_s)
        self.saver.save()
        if self.publishing is None:
            return
        if self.commits.run_is_over:
            self.publishing.publish_last(self.learner.round, self.stop, _FINISH_PUBLISHING_S)
        self.publishing.stop(_FINISH_PUBLISHING_S if self.commits.finished else 0.0, self.stop)

    def _await_latecomers(self) -> None:
        """Waits for peers whose last round failed: they fetch its reference from here, or would end with another."""
        self.saver.save()
        self.announce("waiting")
        wait_until_none_trains(self.network, self._limit_s, self.stop)

    def _run_last_round(self) -> None:
        """Runs a last round, so that the work since the last commit is not lost and others take over the experts."""
        before = self.commits.done
        has_work = self.learner.work.is_left(self.learner.model.held)
        # A peer that has just joined has no work to lose.
        if self.commits.handed_over or not (before or has_work):
            return
        self.announce("training")  # with the losses of the round before, which no step may have followed
        soon = time.monotonic() + (0.0 if before else _FIRST_CONTACT_S)
        if not others_train(self.network, soon):
            return
        while True:
            commit = self._try_last_round()
            if commit is None and time.monotonic() + _POLL_S > soon:
                break
            if commit is not None and commit.taken_back is None:  # otherwise, it has committed nothing of this peer
                break
            time.sleep(_POLL_S)
        if has_work and commit is None:
            self.reporter.warn(
                "goodbye", "this peer did not commit the last round: its newest work may exist only here"
            )
        elif has_work and self.reporter.status.peers == 1:
            self.reporter.warn("goodbye", "no other peer joined the last round: the newest work exists only here")

    def _try_last_round(self) -> CommitReport | None:
        if not self.rounds.begin(leaving=True):
            self.rounds.restart()  # the others must still learn that it leaves
            self.rounds.begin(leaving=True)
        return self.rounds.await_end(self._limit_s)
