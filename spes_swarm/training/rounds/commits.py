"""What follows a round at one peer: the outcome goes into the weights, the experts change, the loss is measured."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field

from spes_swarm.config.run import RunConfig
from spes_swarm.config.schedule import ScheduleEnd
from spes_swarm.data.batch_source import BatchSource
from spes_swarm.metrics import events
from spes_swarm.port.messages import CaughtUp, MeasuredRound, RoundReport
from spes_swarm.protocol.ownership.lease_table import ExpertChange
from spes_swarm.publishing.background import Publishing
from spes_swarm.training.health.held_out import HeldOutLoss, HeldOutText
from spes_swarm.training.health.routing_health import RoutingHealth
from spes_swarm.training.learner import Learner
from spes_swarm.training.local_work import TakenWork, finite_or_none
from spes_swarm.training.profiling import span
from spes_swarm.training.rounds.event import RoundEvents
from spes_swarm.training.saving import CheckpointSaver
from spes_swarm.training.setup import Reporter


@dataclass(eq=False, kw_only=True)
class Commits:
    """Follows the rounds that end with a new reference."""

    run: RunConfig
    max_rounds: int | None  # after which the peer leaves
    learner: Learner
    sampler: BatchSource
    held_out: HeldOutText
    routing: RoutingHealth
    round_events: RoundEvents
    saver: CheckpointSaver
    publishing: Publishing | None
    reporter: Reporter
    done: int = field(default=0, init=False)  # commits of this session, except those that took back another
    losses: MeasuredRound | None = field(default=None, init=False)  # of the last commit
    # The peer's experts went to others with a round that it said to be its last.
    handed_over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._schedule_end = ScheduleEnd(self.run)

    @property
    def run_is_over(self) -> bool:
        """True if the last commit ended the run; see `config.schedule.ScheduleEnd`."""
        return self._schedule_end.ends_run(self.learner.round)

    @property
    def finished(self) -> bool:
        """True if there is no other round for this peer."""
        return self.run_is_over or (self.max_rounds is not None and self.done >= self.max_rounds)

    @property
    def next_is_last(self) -> bool:
        """True if the next commit is the last one of this peer's `max_rounds`."""
        return self.max_rounds is not None and self.done + 1 >= self.max_rounds

    def report_schedule_end(self) -> None:
        """Reports the end of the schedule once it is reached."""
        self._schedule_end.report_if_reached(self.learner.round, self.reporter.metrics.write, self.reporter.say)

    def catch_up(self, report: CaughtUp) -> None:
        """Adopts a reference that was fetched in place of a round."""
        self.learner.catch_up(report.round)
        self.reporter.metrics.write(
            events.Sync(round=report.round, seconds=report.seconds, payload_bytes=report.payload_bytes, why=report.why)
        )
        self.report_schedule_end()

    @span("commit")
    def follow(self, report: RoundReport, work: TakenWork, loss_rose: bool | None, *, leaving: bool) -> None:
        """Applies the outcome of a committed round to the live weights, and writes down how it went.

        The peer has contributed `work`, and said whether the loss had risen and whether it is leaving.
        """
        started = time.monotonic()
        learner, commit, previous = self.learner, report.commit, self.learner.round
        returned = commit.taken_back is not None
        self.sampler.follow(commit.members)
        train_loss = learner.follow(commit, work)
        self._change_experts(commit.round, report.experts, leaving=leaving)
        alpha = None
        if returned:  # the live weights are those of before, with the merges of before
            learner.watch.returned()
            self.reporter.say(f"most peers' loss has risen: the swarm has taken back round {commit.taken_back}")
        else:
            alpha = learner.live.merge_if_due(commit.round, previous)
            learner.watch.committed(judged=not commit.unites)
            self.done += 1
        applied = time.monotonic()
        held_out = None if returned else self._evaluate()  # after a return, peers differ by their own work
        self.losses = losses = self._measured(report, train_loss, held_out)
        event = events.Round(
            group_seconds=report.group_seconds,
            exchange_seconds=report.exchange_seconds,
            apply_seconds=applied - started,
            evaluate_seconds=time.monotonic() - applied,
            parts_total=commit.parts_total,
            parts_missing=commit.parts_missing,
            digest=report.digest,
            experts_held=learner.model.held,
            merge_alpha=alpha,
            loss_rose=loss_rose,
            taken_back=commit.taken_back,
            **asdict(losses),
        )
        self.round_events.committed(event, held_out)
        self.report_schedule_end()
        self.saver.after_round()
        if self.publishing is not None:
            self.publishing.consider(commit.round, self.saver.start)

    def _measured(self, report: RoundReport, train_loss: float | None, held_out: HeldOutLoss | None) -> MeasuredRound:
        commit = report.commit
        return MeasuredRound(
            round=commit.round,
            peers=len(commit.members),
            experts_covered=commit.experts_covered,
            swarm_tokens=report.swarm_tokens,
            train_loss=finite_or_none(train_loss),
            eval_loss=finite_or_none(held_out.mean if held_out else None),
            eval_loss_stderr=finite_or_none(held_out.stderr if held_out else None),
            **self.routing.commit(commit.round, evaluated=held_out is not None),
        )

    def _change_experts(self, round_number: int, change: ExpertChange, *, leaving: bool) -> None:
        if not change.gained and not change.lost:
            return
        if leaving:
            self.handed_over = True
        else:
            self.learner.change_experts(change)
        self.reporter.metrics.write(events.Lease(round=round_number, gained=change.gained, lost=change.lost))

    def _evaluate(self) -> HeldOutLoss | None:
        if not self.held_out.due(self.learner.round, first=self.done == 1, last=self.finished):
            return None
        self.reporter.status.phase = "evaluating"
        measured = self.held_out.measure(self.learner.model.module)
        self.learner.watch.add_evaluation(measured.mean, measured.stderr)
        return measured
