"""Saves the state of a peer while it trains: its live weights and optimiser, and the reference that they belong to."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from spes_swarm.base.errors import CheckpointError
from spes_swarm.data.batch_source import BatchSource
from spes_swarm.metrics import events
from spes_swarm.port.commands import Commands, Port
from spes_swarm.storage.checkpoint import CheckpointMeta, checkpoints_in
from spes_swarm.storage.checkpoint_writing import PeerState, Written, save_checkpoint
from spes_swarm.training.learner import Learner
from spes_swarm.training.optimiser.saved_state import optimiser_arrays
from spes_swarm.training.setup import Reporter, Saving

_COMMAND_TIMEOUT_S = 60.0
# A checkpoint is due before `checkpoint_minutes` have passed if writing takes a smaller share of the time than this.
_CHEAP_SHARE = 1 / 60


@dataclass(frozen=True)
class _Write:
    """A checkpoint that is being written."""

    at: tuple[int, int]  # round and step
    started: float  # monotonic time
    # Set once the thread does not need the state, or the reference, as it was at that time; also after a failure.
    copied: threading.Event
    reference_read: threading.Event
    future: Future[Written]


class CheckpointSaver:
    """Writes checkpoints on a thread, one at a time.

    The thread first copies in host memory what the next optimiser step changes: the moments (8 bytes per weight that
    AdamW trains, 4 per weight that Muon does), and those live blocks that differ from the reference (4 bytes per
    weight; few do after a commit, except after a merge, with overlapping rounds, in
    rounds without experts, and with int8 or int4, where all do). It does
    so during that step's forward and backward pass; the optimiser waits for the rest. The copy is freed piece by piece
    as it is written. The reference is not copied: the next round, which changes it, begins once the thread has read it.

    A checkpoint that cannot be written, for instance because the disk is full, is reported as a fault, and training
    goes on with the one before. If there is none, it ends: this machine cannot keep what it trains.
    """

    def __init__(
        self, settings: Saving, learner: Learner, sampler: BatchSource, network: Port, reporter: Reporter
    ) -> None:
        self._settings = settings
        self._learner = learner
        self._sampler = sampler
        self._network = network
        self._reporter = reporter
        self._interval_s = 60.0 * settings.checkpoint_minutes
        self._write: _Write | None = None
        self._due_at = 0.0  # monotonic time
        self._pause_s = 0.0  # that training has waited for the current checkpoint

    def after_round(self) -> None:
        """Starts a checkpoint if one is due, and none is being written.

        Raises:
            CheckpointError: as `poll`.
            NetworkProcessError: the network process does not answer.
        """
        if time.monotonic() >= self._due_at:
            self.start()

    def start(self) -> Future[Written]:
        """Writes the peer's state in the background. If a checkpoint is still being written, that one is returned,
        unless every round is wanted: then training waits for it first.

        Raises:
            CheckpointError: as `poll`.
            NetworkProcessError: the network process does not answer.
        """
        self.poll()
        if self._write is not None and (self._interval_s > 0 or self._write.at == self._now()):
            return self._write.future
        self._finish()
        started = time.monotonic()
        meta, digests = self._describe()
        self._pause_s = time.monotonic() - started
        self._due_at = started + self._interval_s
        write = _Write(self._now(), started, threading.Event(), threading.Event(), Future())
        self._write = write
        threading.Thread(target=self._run, args=(write, meta, digests), name="checkpoint", daemon=True).start()
        return write.future

    def _run(self, write: _Write, meta: CheckpointMeta, digests: Sequence[bytes]) -> None:
        """The thread: copies the peer's state and writes it."""
        settings, learner = self._settings, self._learner
        try:
            state = PeerState(
                meta=meta,
                layout=learner.model.layout,
                reference_N=learner.live.reference_N,
                digests=digests,
                live=learner.live.beyond_reference(),
                optimiser=optimiser_arrays(learner.optimiser, dict(learner.model.trainable_parameters())),
            )
            write.copied.set()
            written = save_checkpoint(settings.checkpoints, state, settings.keep_checkpoints, write.reference_read.set)
            write.future.set_result(written)
        except BaseException as exc:  # `_finish` raises it in the trainer's thread
            write.future.set_exception(exc)
        finally:
            write.copied.set()
            write.reference_read.set()

    def before_step(self) -> None:
        """Waits until live weights and moments may change; call it between the backward pass and the optimiser."""
        if self._write is not None:
            self._wait(self._write.copied)

    def before_round(self) -> None:
        """Waits until the reference may change. Takes no time unless the disk needs longer than a round for it."""
        if self._write is not None:
            self._wait(self._write.reference_read)

    def _wait(self, event: threading.Event) -> None:
        started = time.monotonic()
        event.wait()
        self._pause_s += time.monotonic() - started

    def poll(self) -> None:
        """Handles a checkpoint that has been written; cheap to call while none has.

        Raises:
            CheckpointError: it could not be written, and there is no earlier one.
        """
        if self._write is not None and self._write.future.done():
            self._finish()

    def save(self) -> None:
        """Writes a checkpoint and waits for it.

        Raises:
            CheckpointError: it could not be written.
            NetworkProcessError: the network process does not answer.
        """
        self._reporter.status.phase = "saving"
        if self._write is not None and self._write.at != self._now():
            self._finish()
        self.start()
        self._finish(last=True)

    def _finish(self, *, last: bool = False) -> None:
        """Waits for the checkpoint that is being written, if any, and handles its outcome."""
        if self._write is None:
            return
        write = self._write
        try:
            written = write.future.result()
        except CheckpointError as exc:
            if last or not checkpoints_in(self._settings.checkpoints):
                raise
            self._reporter.note_fault("checkpoint", str(exc))
            self._reporter.say(f"training goes on, but {exc}")
            return
        finally:
            self._write = None
        seconds = time.monotonic() - write.started
        self._due_at = write.started + min(self._interval_s, seconds / _CHEAP_SHARE)
        self._reporter.metrics.write(
            events.Checkpoint(
                round=written.round,
                seconds=seconds,
                pause_s=self._pause_s,
                bytes_written=written.bytes_written,
                bytes_linked=written.bytes_linked,
            )
        )
        self._settings.on_saved()

    def _now(self) -> tuple[int, int]:
        return self._learner.round, self._learner.step

    def _describe(self) -> tuple[CheckpointMeta, Sequence[bytes]]:
        """Returns the metadata, and the digests of the reference's blocks."""
        network, learner, work = self._network, self._learner, self._learner.work
        table = network.ask(Commands.table, _COMMAND_TIMEOUT_S)
        commits, marks = network.ask(Commands.lineage, _COMMAND_TIMEOUT_S)
        swarm_tokens = network.ask(Commands.swarm_tokens, _COMMAND_TIMEOUT_S)
        meta = CheckpointMeta(
            run_id=self._settings.run_id,
            peer_id=self._settings.peer_id,
            layout_digest=learner.model.layout.digest,
            round=learner.round,
            versions=list(table.versions),
            reference_digest=table.digest.hex(),
            held=list(learner.model.held),
            step=learner.step,
            tokens=work.tokens,
            steps_in_round=work.steps,
            routed=[int(count) for count in work.routed_E],
            cursor=self._sampler.state(),
            commits=commits,
            marks=marks.hex(),
            swarm_tokens=swarm_tokens,
        )
        return meta, table.digests
