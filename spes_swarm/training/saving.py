"""Saves the state of a peer while it trains: its live weights and optimiser, and the reference that they belong to."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import CheckpointError
from spes_swarm.metrics import events
from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.port.commands import Commands
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK
from spes_swarm.protocol.consensus.reference import ReferenceTable
from spes_swarm.storage.checkpoint import Checkpoint, CheckpointMeta, checkpoints_in
from spes_swarm.storage.checkpoint_writing import PeerState, Written, save_checkpoint
from spes_swarm.training.live_weights import LiveWeights
from spes_swarm.training.local_work import LocalWork
from spes_swarm.training.optimiser.peer_optimiser import PeerOptimiser
from spes_swarm.training.optimiser.saved_state import load_optimiser_arrays, optimiser_arrays
from spes_swarm.training.setup import TrainerSetup

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

    def __init__(self, setup: TrainerSetup, live: LiveWeights, optimiser: PeerOptimiser, work: LocalWork) -> None:
        self._setup = setup
        self._live = live
        self._optimiser = optimiser
        self._work = work
        self._interval_s = 60.0 * setup.checkpoint_minutes
        self._write: _Write | None = None
        self._due_at = 0.0  # monotonic time
        self._pause_s = 0.0  # that training has waited for the current checkpoint

    def after_round(self, round_number: int, step: int) -> None:
        """Starts a checkpoint if one is due, and none is being written.

        Raises:
            CheckpointError: as `look`.
            NetworkProcessError: the network process does not answer.
        """
        if time.monotonic() >= self._due_at:
            self.start(round_number, step)

    def start(self, round_number: int, step: int) -> Future[Written]:
        """Writes the peer's state in the background. If a checkpoint is still being written, that one is returned,
        unless every round is wanted: then training waits for it first.

        Raises:
            CheckpointError: as `look`.
            NetworkProcessError: the network process does not answer.
        """
        self.look()
        if self._write is not None and (self._interval_s > 0 or self._write.at == (round_number, step)):
            return self._write.future
        self._finish()
        started = time.monotonic()
        meta, digests = self._describe(round_number, step)
        self._pause_s = time.monotonic() - started
        self._due_at = started + self._interval_s
        write = _Write((round_number, step), started, threading.Event(), threading.Event(), Future())
        self._write = write
        threading.Thread(target=self._run, args=(write, meta, digests), name="checkpoint", daemon=True).start()
        return write.future

    def _run(self, write: _Write, meta: CheckpointMeta, digests: Sequence[bytes]) -> None:
        """The thread: copies the peer's state and writes it."""
        setup = self._setup
        try:
            state = PeerState(
                meta=meta,
                layout=setup.model.layout,
                reference_N=setup.reference_N,
                digests=digests,
                live=self._live.beyond_reference(),
                optimiser=optimiser_arrays(self._optimiser, dict(setup.model.trainable_parameters())),
            )
            write.copied.set()
            written = save_checkpoint(setup.checkpoints, state, setup.keep_checkpoints, write.reference_read.set)
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

    def look(self) -> None:
        """Handles a checkpoint that has been written; cheap to call while none has.

        Raises:
            CheckpointError: it could not be written, and there is no earlier one.
        """
        if self._write is not None and self._write.future.done():
            self._finish()

    def save(self, round_number: int, step: int) -> None:
        """Writes a checkpoint and waits for it.

        Raises:
            CheckpointError: it could not be written.
            NetworkProcessError: the network process does not answer.
        """
        self._setup.status.phase = "saving"
        if self._write is not None and self._write.at != (round_number, step):
            self._finish()
        self.start(round_number, step)
        self._finish(last=True)

    def _finish(self, *, last: bool = False) -> None:
        """Waits for the checkpoint that is being written, if any, and handles its outcome."""
        if self._write is None:
            return
        write, setup = self._write, self._setup
        try:
            written = write.future.result()
        except CheckpointError as exc:
            if last or not checkpoints_in(setup.checkpoints):
                raise
            setup.metrics.write(events.Fault(kind="checkpoint", peer=setup.peer_id, detail=str(exc)))
            setup.status.note_fault("checkpoint", str(exc))
            setup.say(f"training goes on, but {exc}")
            return
        finally:
            self._write = None
        seconds = time.monotonic() - write.started
        self._due_at = write.started + min(self._interval_s, seconds / _CHEAP_SHARE)
        setup.metrics.write(
            events.Checkpoint(
                round=written.round,
                seconds=seconds,
                pause_s=self._pause_s,
                bytes_written=written.bytes_written,
                bytes_linked=written.bytes_linked,
            )
        )
        setup.on_saved()

    def _describe(self, round_number: int, step: int) -> tuple[CheckpointMeta, Sequence[bytes]]:
        """Returns the metadata, and the digests of the reference's blocks."""
        setup, network, work = self._setup, self._setup.network, self._work
        layout = setup.model.layout
        table = network.ask(Commands.table, _COMMAND_TIMEOUT_S)
        commits, marks = network.ask(Commands.lineage, _COMMAND_TIMEOUT_S)
        swarm_tokens = network.ask(Commands.swarm_tokens, _COMMAND_TIMEOUT_S)
        meta = CheckpointMeta(
            run_id=setup.run_id,
            peer_id=setup.peer_id,
            layout_digest=layout.digest,
            round=round_number,
            versions=list(table.versions),
            reference_digest=table.digest.hex(),
            held=list(setup.model.held),
            step=step,
            tokens=work.tokens,
            steps_in_round=work.steps,
            routed=[int(count) for count in work.routed_E],
            cursor=setup.sampler.state(),
            commits=commits,
            marks=marks.hex(),
            swarm_tokens=swarm_tokens,
        )
        return meta, table.digests


def restore_weights(
    checkpoint: Checkpoint,
    table: ReferenceTable,
    model: SparseModel,
    optimiser: PeerOptimiser,
    live: LiveWeights,
    live_N: FloatArray,
    work: LocalWork,
) -> None:
    """Restores weights, moments and work from a checkpoint, except what the swarm's reference, of `table`, outdates.

    `live_N` (N,), a vector of the whole model, is overwritten.
    """
    meta, layout, held = checkpoint.meta, model.layout, model.held
    late = table.round > meta.round
    # The saved optimiser state is that of the experts held then; those that are held again keep their moments.
    model.hold(meta.held, optimiser)
    load_optimiser_arrays(optimiser, dict(model.trainable_parameters()), checkpoint.optimiser())
    model.hold(held, optimiser)
    # Only now: an expert that was not held then may have been rounded.
    live.reset_to_reference()
    if not late:  # the saved blocks, written below, are merged already
        live.merge_if_due(table.round)
    checkpoint.live(layout, live_N)
    behind = table.digest.hex() != meta.reference_digest
    routed = [0] * layout.num_experts
    for block in layout.trained_blocks(expert for expert in held if expert in meta.held):
        # Shared weights move in every round, so the saved ones are useful only if no round was missed.
        # An expert that no other peer has trained meanwhile continues from its saved weights.
        unchanged = block.index != SHARED_BLOCK and table.versions[block.index] == meta.versions[block.index]
        if not behind or unchanged:
            model.write_block(block.index, live_N[block.start : block.stop])
            if block.expert is not None:
                routed[block.expert] = meta.routed[block.expert]
    if late:
        live.merge_if_due(table.round, meta.round)
    work.restore(*((0, 0) if behind else (meta.steps_in_round, meta.tokens)), routed)
