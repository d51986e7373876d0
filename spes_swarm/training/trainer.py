"""The training loop of one peer: local steps, and between them the rounds of the swarm.

The trainer owns the model, the optimiser and the data; the network process owns the reference. For a round, the trainer
copies the trained blocks into the contribution, the network process runs the round, and the trainer applies the outcome
to the live weights. A failed round changes nothing: the work since the last commit stays in the next pseudo-gradient.

Shapes: B sequences, S tokens, L layers with experts, E experts, N elements of the flat vector.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from concurrent.futures import Future
from functools import partial
from typing import Literal

import torch
from torch.profiler import record_function

from spes_swarm.base.errors import RoundError, TransferError
from spes_swarm.config.round_clock import RoundClock
from spes_swarm.config.schedule import ScheduleEnd, learning_rate
from spes_swarm.metrics import events
from spes_swarm.model.flops import ModelFlops
from spes_swarm.port.commands import Commands
from spes_swarm.port.messages import CaughtUp, Presence, RoundLosses, RoundReport
from spes_swarm.protocol.consensus.reference import ReferenceTable
from spes_swarm.protocol.rounds.outcome import CommitReport
from spes_swarm.storage.checkpoint import Checkpoint
from spes_swarm.training.gradients import Gradients, GradientSource, autocast, loss_weights
from spes_swarm.training.health.divergence import DivergenceGuard
from spes_swarm.training.health.held_out import HeldOutLoss, HeldOutText
from spes_swarm.training.health.loss_watch import LossWatch
from spes_swarm.training.health.routing_health import RoutingHealth
from spes_swarm.training.live_weights import LiveWeights
from spes_swarm.training.local_work import LocalWork, finite_or_none
from spes_swarm.training.optimiser.registry import make_optimiser
from spes_swarm.training.optimiser.warm_up import WarmUp
from spes_swarm.training.out_of_memory import StepMemory
from spes_swarm.training.profiling import span, start_profiler
from spes_swarm.training.ranks.shared_gradients import SharedGradients
from spes_swarm.training.round_due import Pace, others_train, wait_until_none_trains
from spes_swarm.training.round_event import RoundEvents
from spes_swarm.training.saving import CheckpointSaver, restore_weights
from spes_swarm.training.setup import TrainerSetup
from spes_swarm.training.throughput import Throughput, peak_flops

_LOGGER = logging.getLogger(__name__)
_RETRY_S = 2.0  # after a failed round
_POLL_S = 0.2
_FIRST_CONTACT_S = 5.0  # how long a peer that leaves before its first commit, and may not know the others, tries
_FINISH_PUBLISHING_S = 600.0  # when `max_rounds` are done or the run is over; otherwise publishing stops at once


class Trainer:
    """Runs local steps and rounds until it is told to stop."""

    def __init__(self, setup: TrainerSetup) -> None:
        training = setup.run.training
        self._setup = setup
        self._model = setup.model
        self._network = setup.network
        self._round_config = setup.run.round
        self._clock = RoundClock.of(setup.run)
        self._optimiser = make_optimiser(setup.model, training, form=setup.optimizer_states)
        precision = partial(autocast, setup.device, setup.precision)
        own = Gradients(
            setup.model,
            loss_weights(training),
            setup.micro_batch_size or setup.batch_size,
            device=setup.device,
            autocast=precision,
            warn=self._warn,
        )
        self._gradients: GradientSource = (
            own if setup.ranks is None else SharedGradients(setup.ranks, setup.model, own, setup.device)
        )
        self._routing = RoutingHealth(setup, self._gradients, self._warn)
        self._live = LiveWeights(setup.model, setup.reference_N, setup.contribution_N, setup.run)
        self._warm_up = WarmUp(setup.run.ownership.warmup_steps)
        self._leaving = False  # the current round is this peer's last
        self._loss_rose: bool | None = None  # what this peer said about the last commit
        self._has_returned = False  # the last commit took back another one
        self._tokens_per_step = setup.batch_size * training.sequence_length
        self.round = 0
        self.step = 0
        self._work = LocalWork(setup.model.layout.num_experts)
        self._saver = CheckpointSaver(setup, self._live, self._optimiser, self._work)
        self._divergence = DivergenceGuard()
        self._watch = LossWatch()
        self._total_tokens = 0
        self._losses: RoundLosses | None = None
        self._flops = ModelFlops.of(setup.model, training.sequence_length)
        num_ranks = 1 if setup.ranks is None else setup.ranks.placement.world_size
        self._throughput = Throughput(peak_flops(setup.device, setup.precision), num_ranks)
        self._loss: float | None = None
        self._retry_at = 0.0
        self._pace = Pace(setup.network, self._round_config, self._tokens_per_step)
        self._pending: Future[RoundReport | CaughtUp] | None = None
        self._round_events = RoundEvents(setup.network, setup.metrics, setup.status, setup.on_round)
        self._held_out = HeldOutText(setup.evaluation, setup.run.evaluation.every_rounds, setup.device, precision)
        self._schedule_end = ScheduleEnd(setup.run)
        self._rounds_done = 0
        self._profiler = start_profiler(setup)
        self._exchange = record_function("spes/exchange")  # with the steps meanwhile, if rounds overlap
        self._step_memory = StepMemory(f"on {setup.device} in a step", self._warn, setup.stop.set)

    # Where the weights come from.

    def load_reference(self, table: ReferenceTable) -> None:
        """Starts from the reference, as a newcomer, and applies the merge that the others applied to it."""
        self.round = table.round
        self._live.reset_to_reference()
        self._live.merge_if_due(self.round)

    def restore(self, checkpoint: Checkpoint, table: ReferenceTable) -> None:
        """Starts from a checkpoint, and adopts what the swarm has committed since."""
        live_N = self._setup.contribution_N
        restore_weights(checkpoint, table, self._model, self._optimiser, self._live, live_N, self._work)
        meta = checkpoint.meta
        self.round, self.step = table.round, meta.step
        self._total_tokens = meta.step * self._tokens_per_step  # exact unless the batch size has changed
        if not self._setup.sampler.restore(meta.cursor):
            self._setup.say("the data, or the way in which peers divide it, has changed: its order restarts")

    # The loop.

    def run(self) -> None:
        """Trains until `stop` is set, `max_rounds` are done or the run is over; saves a checkpoint at the end.

        Raises:
            CapacityError: a step did not fit into memory; the peer has left the swarm in order.
            DataError: the data could not be read; the peer has left the swarm in order.
            CheckpointError: a checkpoint could not be written.
            DivergenceError: the loss is still NaN or infinite after several restarts.
            NetworkProcessError: the network process ended.
            RankError: another rank of this peer has ended; the peer has left the swarm in order.
        """
        setup = self._setup
        self._schedule_end.tell_if_reached(self.round, setup.metrics.write, setup.say)
        self._announce("training")
        while not setup.stop.is_set() and not self._finished():
            if self._pending is not None:
                if self._pending.done():
                    self._end_round()
                    continue
            elif self._due():
                if not self._begin_round():
                    self._divergence.restart()
                    self._restart_from_reference()
                    continue
                if not self._round_config.overlap:
                    self._await_round()
                    continue
            with self._step_memory.guard(self._optimiser), self._round_events.step():
                self._train_step()
            self._saver.before_step()
            self._saver.look()
            if setup.publishing is not None:
                setup.publishing.look()
            self._round_events.write_if_known()
        if self._pending is not None:
            self._await_round()
        if not self._finished():
            self._run_last_round()
        if self.run_is_over:
            self._await_latecomers()
        if self._profiler is not None:
            self._profiler.stop()
        self._announce("leaving")  # so that no peer waits for this one in the next round
        self._round_events.write(wait_s=self._round_config.stall_timeout_s)
        self._saver.save(self.round, self.step)
        if setup.publishing is not None:
            if self.run_is_over:
                setup.publishing.publish_last(self.round, setup.stop, _FINISH_PUBLISHING_S)
            setup.publishing.stop(_FINISH_PUBLISHING_S if self._finished() else 0.0, setup.stop)
        self._step_memory.raise_if_failed()

    def _finished(self) -> bool:
        done = self._setup.max_rounds is not None and self._rounds_done >= self._setup.max_rounds
        return done or self.run_is_over

    @property
    def run_is_over(self) -> bool:
        """True if the last commit ended the run; see `config.schedule.ScheduleEnd`."""
        return self._schedule_end.ends_run(self.round)

    def _await_latecomers(self) -> None:
        """Waits for peers whose last round failed: they fetch its reference from here, or would end with another."""
        self._saver.save(self.round, self.step)
        self._announce("waiting")
        limit_s = self._round_config.window_s + 2 * self._round_config.stall_timeout_s
        wait_until_none_trains(self._network, limit_s, self._setup.stop)

    def _is_last_round(self) -> bool:
        return self._setup.max_rounds is not None and self._rounds_done + 1 >= self._setup.max_rounds

    def _run_last_round(self) -> None:
        """Runs a last round, so that the work since the last commit is not lost and others take over the experts."""
        has_work, before = self._work.is_left(self._model.held), self._rounds_done
        if self._leaving or not (before or has_work):  # it may have just joined, and have no work to lose
            return
        self._announce("training")  # with the losses of the round before, which no step may have followed
        soon = time.monotonic() + (0.0 if before else _FIRST_CONTACT_S)
        self._leaving = others_train(self._network, soon)
        if not self._leaving:
            return
        while True:
            if not self._begin_round():
                self._restart_from_reference()  # the others must still learn that it leaves
                self._begin_round()
            self._await_round(self._round_config.window_s + 2 * self._round_config.stall_timeout_s)
            if self._rounds_done > before or (time.monotonic() + _POLL_S > soon and not self._has_returned):
                break
            time.sleep(_POLL_S)
        if has_work and self._rounds_done == before:
            self._warn("goodbye", "this peer did not commit the last round: its newest work may exist only here")
        elif has_work and self._setup.status.peers == 1:
            self._warn("goodbye", "no other peer joined the last round: the newest work exists only here")

    def _train_step(self) -> None:
        if self._profiler is not None:
            self._profiler.step()
        started = time.monotonic()
        training = self._setup.run.training
        in_round = min(self._work.steps, self._clock.inner_steps_after(self.round))
        global_step = self._clock.step_of(self.round) + in_round
        rate = learning_rate(global_step, training)
        self._optimiser.set_learning_rate(rate)
        with span("data"):
            batch_BS = self._setup.sampler.next_batch(self._setup.batch_size)
        self._loss = self._gradients.compute(batch_BS, progress=min(1.0, global_step / training.total_steps))
        parameters = [parameter for _, parameter in self._model.trainable_parameters()]
        norm = torch.nn.utils.clip_grad_norm_(parameters, training.max_grad_norm)
        self._saver.before_step()
        routed_LE = self._gradients.pop_routed_tokens()
        routed_E = routed_LE.sum(axis=0)
        finite = math.isfinite(self._loss) and math.isfinite(float(norm))
        if not finite:
            self._note_fault("nonfinite", "skipped a step with a NaN or infinite loss or gradient")
            self._watch.add_bad_step()
            if self._divergence.record_bad_step():
                self._restart_from_reference()
            self._announce("training")
            return
        self._divergence.stepped()
        self._watch.add_step(self._loss)
        self._warm_up.step(self._model, self._optimiser.step)
        self._work.add_step(self._tokens_per_step, routed_E, self._loss)
        self._routing.add_step(routed_LE, self._model.held)
        self.step += 1
        self._total_tokens += self._tokens_per_step
        flops = self._flops.step(self._tokens_per_step, int(routed_E[list(self._model.held)].sum()))
        self._throughput.add(self._tokens_per_step, flops.model, time.monotonic() - started)
        self._setup.metrics.write(
            events.Step(
                round=self.round,
                step=self.step,
                loss=self._loss,
                tokens=self._tokens_per_step,
                tokens_per_second=self._throughput.tokens_per_second,
                teraflops=self._throughput.teraflops,
                mfu=self._throughput.mfu,
                lr=rate,
                data=self._setup.sampler.positions() or None,
            )
        )
        self._announce("training")

    def _restart_from_reference(self) -> None:
        """Restarts from the reference with fresh moments, because the live weights are unusable."""
        if self._pending is not None:
            self._reset_to_reference()  # now, because the commit may save a checkpoint
            self._await_round()
        self._warn("diverged", f"the loss is NaN or infinite: restarting from round {self.round}'s reference")
        self._reset_to_reference()
        self._warm_up.start(self._model.held)
        self._work.discard()

    def _reset_to_reference(self) -> None:
        self._watch.restart()
        self._live.reset_to_reference()
        self._live.merge_if_due(self.round)
        self._optimiser.state.clear()

    def _warn(self, kind: str, detail: str) -> None:
        self._note_fault(kind, detail)
        self._setup.say(detail)

    def _note_fault(self, kind: str, detail: str) -> None:
        self._setup.metrics.write(events.Fault(kind=kind, peer=self._setup.peer_id, detail=detail))
        self._setup.status.note_fault(kind, detail)

    def _due(self) -> bool:
        """Returns True if the swarm has done its inner steps since the last commit, or a peer has called a round."""
        if time.monotonic() < self._retry_at or (self._work.steps == 0 and not self._watch.ruined):
            return False
        if self._network.called_round > self.round or self._watch.ruined:
            return True
        self._pace.inner_steps = self._clock.inner_steps_after(self.round)
        due = self._pace.due(self._work.tokens, self._throughput.tokens_per_second)
        self._setup.status.progress = self._pace.progress
        return due

    # Rounds.

    def _begin_round(self) -> bool:
        """Contributes the live weights to the next round. Returns False if they are not finite."""
        self._pace.begin()
        self._saver.before_round()
        self._setup.status.phase = "synchronising"
        if not self._live.contribute():
            return False
        self._work.contribute()
        self._loss_rose, self._has_returned = self._watch.verdict, False
        if self._loss_rose:
            _LOGGER.info("this peer votes to take back round %d: %s", self.round, self._watch.reason)
        self._exchange.__enter__()  # type: ignore[no-untyped-call]
        self._pending = self._network.submit(
            Commands.run_round,
            tokens=self._work.tokens,
            routed=tuple(int(self._work.routed_E[expert]) for expert in self._model.held),
            leaving=self._leaving or self._is_last_round(),
            loss_rose=self._loss_rose,
        )
        return True

    def _await_round(self, limit_s: float | None = None) -> None:
        """Waits for the current round; once `stop` is set, for at most `limit_s` (default: two stall timeouts)."""
        assert self._pending is not None
        limit_s = limit_s if limit_s is not None else 2 * self._round_config.stall_timeout_s
        stop_deadline: float | None = None
        while True:
            with contextlib.suppress(TimeoutError):
                self._pending.exception(timeout=_POLL_S)
                break
            if self._setup.stop.is_set():
                # Leaving: the current round may still finish, so that this peer's work is not lost.
                stop_deadline = stop_deadline or time.monotonic() + limit_s
                if time.monotonic() > stop_deadline:
                    self._network.ask(Commands.cancel_round, 30.0)
                    if not self._pending.done():
                        self._pending = None
                        return
        self._end_round()

    def _end_round(self) -> None:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        self._exchange.__exit__(None, None, None)
        try:
            report = pending.result()
        except (RoundError, TransferError) as exc:
            self._retry_at = time.monotonic() + _RETRY_S
            self._note_fault("round", str(exc))
            return
        if isinstance(report, CaughtUp):
            self._follow_swarm(report)
        else:
            self._follow_commit(report)

    def _follow_swarm(self, report: CaughtUp) -> None:
        """Adopts a reference that was fetched in place of a round; the work since the last commit is kept."""
        previous, self.round = self.round, report.round
        self._live.follow_all()
        self._live.merge_if_due(self.round, previous)
        self._watch.restart()
        self._watch.committed(judged=False)
        self._setup.metrics.write(
            events.Sync(round=report.round, seconds=report.seconds, payload_bytes=report.payload_bytes, why=report.why)
        )
        self._schedule_end.tell_if_reached(self.round, self._setup.metrics.write, self._setup.say)

    @span("commit")
    def _follow_commit(self, report: RoundReport) -> None:
        """Applies the outcome of a committed round to the live weights."""
        setup = self._setup
        started = time.monotonic()
        commit, previous = report.commit, self.round
        self.round = commit.round
        setup.sampler.follow(commit.members)
        self._has_returned = commit.taken_back is not None
        self._live.follow(commit.changed_blocks, entirely=self._has_returned and not commit.keeps_work)
        train_loss = self._settle_work(commit)
        self._divergence.committed()
        self._change_experts(report)
        alpha = None
        if self._has_returned:  # the live weights are those of before, with the merges of before
            self._watch.returned()
            setup.say(f"most peers' loss has risen: the swarm has taken back round {commit.taken_back}")
        else:
            alpha = self._live.merge_if_due(self.round, previous)
            self._watch.committed(judged=not commit.unites)
            self._rounds_done += 1
        applied = time.monotonic()
        if (held_out := self._evaluate()) is not None:
            self._watch.add_evaluation(held_out.mean, held_out.stderr)
        self._losses = RoundLosses(
            round=self.round,
            peers=len(commit.members),
            experts_covered=commit.experts_covered,
            swarm_tokens=report.swarm_tokens,
            train_loss=finite_or_none(train_loss),
            eval_loss=finite_or_none(held_out.mean if held_out else None),
            eval_loss_stderr=finite_or_none(held_out.stderr if held_out else None),
            **self._routing.commit(self.round, evaluated=held_out is not None),
        )
        event = events.Round(
            group_seconds=report.group_seconds,
            exchange_seconds=report.exchange_seconds,
            apply_seconds=applied - started,
            evaluate_seconds=time.monotonic() - applied,
            parts_total=commit.parts_total,
            parts_missing=commit.parts_missing,
            digest=report.digest,
            experts_held=self._model.held,
            merge_alpha=alpha,
            loss_rose=self._loss_rose,
            taken_back=commit.taken_back,
            **dataclasses.asdict(self._losses),
        )
        self._round_events.committed(event, held_out)
        self._schedule_end.tell_if_reached(self.round, setup.metrics.write, setup.say)
        self._saver.after_round(self.round, self.step)
        if setup.publishing is not None:
            setup.publishing.consider(self.round, lambda: self._saver.start(self.round, self.step))

    def _settle_work(self, commit: CommitReport) -> float | None:
        """Subtracts the work that a round has taken; returns the mean loss of its steps, None if unknown."""
        if commit.taken_back is None:
            return self._work.commit(commit.deferred_experts)
        if commit.keeps_work:
            self._work.put_back()
        else:
            experts = (self._model.layout.blocks[index].expert for index in commit.changed_blocks)
            self._work.take_back(expert for expert in experts if expert is not None)
        return None

    def _change_experts(self, report: RoundReport) -> None:
        """Gives up and adopts experts, as the commit has decided."""
        change, layout, round_number = report.experts, self._model.layout, report.commit.round
        if not change.gained and not change.lost:
            return
        self._leaving = self._leaving or self._is_last_round()
        if not self._leaving:
            self._model.hold(change.held, self._optimiser)
            changed = [*change.gained, *change.lost]
            self._live.reset_to_reference(layout.expert_block(expert).index for expert in changed)
            self._work.forget_experts(changed)
            self._warm_up.stop(change.lost)
            self._warm_up.start(change.gained)
        self._setup.metrics.write(events.Lease(round=round_number, gained=change.gained, lost=change.lost))

    def _evaluate(self) -> HeldOutLoss | None:
        due = self._held_out.due(self.round, first=self._rounds_done == 1, last=self._finished())
        if not due or self._has_returned:  # after a return, peers differ by their own work
            return None
        self._setup.status.phase = "evaluating"
        return self._held_out.measure(self._model.module)

    def _announce(self, state: Literal["training", "waiting", "leaving"]) -> None:
        status, phase = self._setup.status, state
        status.phase, status.round, status.step, status.loss = phase, self.round, self.step, self._loss
        speed, status.held = self._throughput, self._model.held
        status.tokens_per_second, status.teraflops, status.mfu = speed.tokens_per_second, speed.teraflops, speed.mfu
        self._network.submit(
            Commands.set_presence,
            presence=Presence(
                name=self._setup.nickname,
                state=state,
                step=self.step,
                tokens=self._work.tokens,
                tokens_per_step=self._tokens_per_step,
                tokens_per_second=self._throughput.tokens_per_second,
                loss=finite_or_none(self._loss),
                experts=self._model.held,
                total_tokens=self._total_tokens,
                losses=self._losses,
                routing=self._routing.report,
                data=self._setup.sampler.positions(),
            ),
        )
