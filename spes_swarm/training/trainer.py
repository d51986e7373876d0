"""The training loop of one peer: local steps, and between them the rounds of the swarm.

The trainer owns the model, the optimiser and the data; the network process owns the reference. For a round, the trainer
copies the trained blocks into the contribution, the network process runs the round, and the trainer applies the outcome
to the live weights. A failed round changes nothing: the work since the last commit stays in the next pseudo-gradient.

A step is in `local_step`, a round in `rounds.life`, what follows a commit in `rounds.commits`, and the end in
`rounds.leaving`. All of them share the `Learner`, which has the weights.

Shapes: B sequences, S tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from spes_swarm.config.run import RunConfig
from spes_swarm.data.batch_source import BatchSource
from spes_swarm.port.commands import Commands, Port
from spes_swarm.port.messages import Presence
from spes_swarm.protocol.consensus.reference import ReferenceTable
from spes_swarm.protocol.members.records import State
from spes_swarm.publishing.background import Publishing
from spes_swarm.storage.checkpoint import Checkpoint
from spes_swarm.training.health.held_out import HeldOutText
from spes_swarm.training.learner import Learner
from spes_swarm.training.local_step import LocalSteps
from spes_swarm.training.local_work import finite_or_none
from spes_swarm.training.out_of_memory import StepFailures
from spes_swarm.training.profiling import start_profiler
from spes_swarm.training.rounds.commits import Commits
from spes_swarm.training.rounds.event import RoundEvents
from spes_swarm.training.rounds.leaving import Leaving
from spes_swarm.training.rounds.life import Rounds, UnderWay
from spes_swarm.training.saving import CheckpointSaver
from spes_swarm.training.setup import Compute, Reporter, Saving


class Trainer:
    """Runs local steps and rounds until it is told to stop."""

    def __init__(
        self,
        run: RunConfig,
        network: Port,
        *,
        nickname: str,
        compute: Compute,
        sampler: BatchSource,
        evaluation: Sequence[npt.NDArray[np.int64]],
        saving: Saving,
        publishing: Publishing | None = None,
        reporter: Reporter,
        stop: threading.Event,
        max_rounds: int | None = None,
        profile_steps: int | None = None,
    ) -> None:
        """Prepares training for a peer that others see under its nickname, which may be empty.

        It leaves when `stop` is set or it has taken part in `max_rounds` commits. `evaluation` are held-out batches (B,
        S). `profile_steps` steps are recorded for trace.json.gz, next to the checkpoints.
        """
        device = compute.device
        learner = Learner(run, compute)
        saver = CheckpointSaver(saving, learner, sampler, network, reporter)
        round_events = RoundEvents(network, reporter)
        steps = LocalSteps(run, compute, learner, sampler, network, saver, reporter)
        held_out = HeldOutText(evaluation, run.evaluation.every_rounds, device, compute.autocast)
        commits = Commits(
            run=run,
            max_rounds=max_rounds,
            learner=learner,
            sampler=sampler,
            held_out=held_out,
            routing=steps.routing,
            round_events=round_events,
            saver=saver,
            publishing=publishing,
            reporter=reporter,
        )
        rounds = Rounds(
            run=run,
            network=network,
            learner=learner,
            steps=steps,
            saver=saver,
            commits=commits,
            reporter=reporter,
            stop=stop,
        )
        self._leaving = Leaving(
            config=run.round,
            network=network,
            learner=learner,
            rounds=rounds,
            commits=commits,
            round_events=round_events,
            saver=saver,
            publishing=publishing,
            reporter=reporter,
            stop=stop,
            announce=self._announce,
        )
        self._learner, self._steps, self._rounds, self._commits = learner, steps, rounds, commits
        self._saver, self._round_events, self._publishing = saver, round_events, publishing
        self._network, self._sampler, self._reporter, self._stop = network, sampler, reporter, stop
        self._nickname = nickname
        trace = saving.checkpoints.with_name("trace.json.gz")
        self._profiler = start_profiler(profile_steps, device, trace, reporter.say)
        self._step_memory = StepFailures(f"on {device} in a step", reporter.warn, stop.set)

    def load_reference(self, table: ReferenceTable) -> None:
        """Starts from the reference, as a newcomer."""
        self._learner.load_reference(table)

    def restore(self, checkpoint: Checkpoint, table: ReferenceTable) -> None:
        """Starts from a checkpoint, and adopts what the swarm has committed since."""
        self._learner.restore(checkpoint, table)
        if not self._sampler.restore(checkpoint.meta.cursor):
            self._reporter.say("the data, or the way in which peers divide it, has changed: its order restarts")

    @property
    def round(self) -> int:
        """The commit that the weights follow."""
        return self._learner.round

    @property
    def run_is_over(self) -> bool:
        """True if the last commit ended the run."""
        return self._commits.run_is_over

    def run(self) -> None:
        """Trains until `stop` is set, `max_rounds` are done or the run is over; saves a checkpoint at the end.

        Raises:
            CapacityError: a step did not fit into memory; the peer has left the swarm gracefully.
            DataError: the data could not be read; the peer has left the swarm gracefully.
            CheckpointError: a checkpoint could not be written.
            DivergenceError: the loss is still NaN or infinite after several restarts.
            NetworkProcessError: the network process ended.
            RankError: another rank of this peer has ended; the peer has left the swarm gracefully.
        """
        self._commits.report_schedule_end()
        self._announce("training")
        while not self._stop.is_set() and not self._commits.finished:
            if not self._rounds.advance():
                with self._step_memory.guard(self._learner.optimiser), self._round_events.step():
                    self._train_step()
                self._poll_background()
        if isinstance(self._rounds.state, UnderWay):
            self._rounds.await_end()
        self._leaving.hand_over()
        if self._profiler is not None:
            self._profiler.stop()
        self._leaving.leave()
        self._step_memory.raise_if_failed()

    def _train_step(self) -> None:
        if self._profiler is not None:
            self._profiler.step()
        if not self._steps.take():
            self._rounds.restart()
        self._announce("training")

    def _poll_background(self) -> None:
        """Handles what has been written in the background."""
        self._saver.before_step()
        self._saver.poll()
        if self._publishing is not None:
            self._publishing.poll()
        self._round_events.write_if_known()

    def _announce(self, state: State) -> None:
        """Updates the panel's status, and the presence that other peers see."""
        learner, steps, speed, status = self._learner, self._steps, self._steps.throughput, self._reporter.status
        status.phase, status.round, status.step, status.loss = state, learner.round, learner.step, steps.loss
        status.held = learner.model.held
        status.tokens_per_second, status.teraflops, status.mfu = speed.tokens_per_second, speed.teraflops, speed.mfu
        self._network.submit(
            Commands.set_presence,
            presence=Presence(
                name=self._nickname,
                state=state,
                step=learner.step,
                tokens=learner.work.tokens,
                tokens_per_step=steps.tokens,
                tokens_per_second=speed.tokens_per_second,
                loss=finite_or_none(steps.loss),
                experts=learner.model.held,
                total_tokens=learner.step * steps.tokens,  # exact unless the batch size has changed
                losses=self._commits.losses,
                routing=steps.routing.report,
                data=self._sampler.positions(),
            ),
        )
