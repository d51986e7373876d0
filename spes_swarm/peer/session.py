"""One session of a peer in a run: find the run, fetch its reference, claim experts, train, leave."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from spes_swarm.base import log
from spes_swarm.base.address import without_own
from spes_swarm.base.wording import plural
from spes_swarm.config.join_command import interpreter
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.metrics import events
from spes_swarm.network.client import NetworkClient
from spes_swarm.peer.join_request import draft_request
from spes_swarm.peer.joining.context import AskUntilStopped, SessionContext
from spes_swarm.peer.joining.join import join_run
from spes_swarm.peer.panel import PeerConsole, said_fault
from spes_swarm.peer.preflight import check_request
from spes_swarm.peer.run_data import PeerData
from spes_swarm.peer.stop_signals import StopSignals
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.storage.metrics_file import Metrics
from spes_swarm.storage.run_directory import RunDirectory, locked_identity
from spes_swarm.storage.trackers import open_metrics
from spes_swarm.training.out_of_memory import as_user_error
from spes_swarm.training.ranks.group import RankGroup
from spes_swarm.training.ranks.placement import Placement
from spes_swarm.training.setup import TrainingStatus
from spes_swarm.training.trainer import Trainer

_LOGGER = logging.getLogger(__name__)
_SAY_PROGRESS_S = 5.0


@dataclass(frozen=True, kw_only=True)
class SessionResult:
    """What a peer has reached when it leaves gracefully."""

    run_id: str
    output_dir: Path  # has the last checkpoint; `export_model` takes it
    round: int  # the newest round that this peer has committed
    run_is_over: bool  # the run ended by its schedule
    loss: float | None  # of the last local step, in nats; None if there was none
    eval_loss: float | None  # the latest measurement, on held-out text; None if there was none


class Session:
    """One session of a peer in a run, from start to leaving.

    Args:
        peer: how this peer takes part.
        run: settings of the run to found. If the peer joins or continues a run instead, its settings must be these;
            None accepts any.
        quiet: print nothing.
        signals: the handlers, if the program has installed them already; None: see `run`.
        placement: of this process, which is rank 0 of several; None: it is the only rank.

    Raises:
        UserError: a setting is impossible, does not fit the output directory, or cannot work on this machine. Nothing
            has appeared on disk.
    """

    def __init__(
        self,
        peer: PeerConfig,
        run: RunConfig | None = None,
        *,
        quiet: bool = False,
        signals: StopSignals | None = None,
        placement: Placement | None = None,
    ) -> None:
        check_request(peer, run, placement)
        self._placement = placement
        self._peer = peer
        self._run = run
        self._console = PeerConsole(quiet=quiet)
        self._signals = signals if signals is not None else StopSignals()

    @classmethod
    def from_file(cls, path: str | Path | None = None, *, quiet: bool = False, **changes: Any) -> Self:
        """Creates a session from a configuration file.

        Args:
            path: YAML with the optional sections `run:` and `peer:`; None: the quickstart, or with `initial_weights`
                the packaged configuration for training an existing model.
            quiet: print nothing.
            changes: fields of `PeerConfig` that replace those of the file.

        Raises:
            UserError: as the constructor; also if the file cannot be read or has an invalid setting.
        """
        draft = draft_request(path, changes.get("initial_weights"), lambda peer: replace(peer, **changes))
        # Unlike `join`, this expects the given configuration of any run.
        run = draft.build_run() if draft.file.lacks_model else draft.file.build_run()
        return cls(draft.peer, run, quiet=quiet)

    def stop(self) -> None:
        """Makes `run` leave the swarm gracefully, after a last round; may be called from any thread."""
        self._signals.requested.set()

    def run(self, *, handle_signals: bool = False) -> SessionResult:
        """Joins, trains until stopped, leaves.

        Forks the network process, which dies with the calling thread. Call it before CUDA is initialised.

        Args:
            handle_signals: the first SIGINT, SIGTERM or SIGHUP (unless it is ignored) calls `stop`, a second SIGINT
                raises KeyboardInterrupt; needs the main thread. By default the caller's handlers remain, and Ctrl-C
                keeps only the last checkpoint.

        Raises:
            UserError: an error that the user can fix.
            NetworkProcessError: the network process failed. The last checkpoint is intact.
            RankError: another rank of this peer has ended. A checkpoint has been saved if training had begun.
            LeftEarlyError: the peer was stopped while joining, or the run is over.
            OSError: a limit of the machine, such as file descriptors.
            ValueError: `handle_signals` in another thread than the main one.
        """
        with ExitStack() as stack:
            if handle_signals:
                stack.enter_context(self._signals.handled())
            context = self._enter(stack)
            with as_user_error("while joining, in a round or in an evaluation"):
                with self._signals.interruptible():
                    joined = join_run(context)
                run_id, trainer = joined.manifest.run_id, joined.trainer
                self._train(trainer, context, run_id)
        return SessionResult(
            run_id=run_id,
            output_dir=context.directory.path,
            round=trainer.round,
            run_is_over=trainer.run_is_over,
            loss=context.status.loss,
            eval_loss=context.status.eval_loss,
        )

    def _enter(self, stack: ExitStack) -> SessionContext:
        """Locks the output directory and starts the network process; `stack` undoes both."""
        started = time.monotonic()
        peer = self._peer
        directory = RunDirectory(Path(peer.output_dir))
        identity_path = directory.identity_file(peer.identity)
        stack.enter_context(directory.held(identity_path))
        identity = Identity.load_or_create(identity_path.absolute())
        stack.enter_context(locked_identity(identity_path, identity.peer_id))
        stack.enter_context(log.writing(directory.log, peer.log_level, "trainer"))
        log.context.peer = identity.peer_id[-8:]
        peer = replace(peer, initial_peers=tuple(without_own(peer.initial_peers, identity.peer_id)))
        metrics = open_metrics(directory.metrics, identity.peer_id, peer.log, peer.name or "")
        stack.callback(metrics.close)
        status = TrainingStatus()

        def report(line: str, dropping: bool) -> None:
            self._console.say(line)
            if dropping:
                status.note_fault("metrics", line)

        metrics.report = report
        ranks = None
        if self._placement is not None:
            ranks = stack.enter_context(RankGroup(self._placement))
        network = NetworkClient(identity.path, self._listener(metrics, status))
        log.context.round = lambda: status.round
        log.context.report = lambda: _report(status, network)
        at_end = stack.enter_context(ExitStack())
        stack.callback(network.stop)
        return SessionContext(
            peer=peer,
            run=self._run,
            directory=directory,
            identity=identity,
            console=self._console,
            metrics=metrics,
            network=network,
            ask=AskUntilStopped(network, self._signals.requested),
            data=PeerData(peer, directory, self._console.say, self._signals.requested),
            stop=self._signals.requested,
            status=status,
            ranks=ranks,
            started=started,
            at_end=at_end,
        )

    def _listener(self, metrics: Metrics, status: TrainingStatus) -> Callable[[events.Event], None]:
        """Returns the callback for events of the network process; it runs in the reader's thread."""
        said_at = time.monotonic()

        def listen(event: events.Event) -> None:
            nonlocal said_at
            metrics.write(event)
            if isinstance(event, events.Fault):
                status.note_fault(event.kind, event.detail)
                if (words := said_fault(event)) is not None:
                    self._console.say(words)
            elif isinstance(event, events.SyncProgress) and time.monotonic() - said_at > _SAY_PROGRESS_S:
                said_at = time.monotonic()
                self._console.say(
                    f"fetched {event.done_bytes / event.total_bytes:.0%}: {event.done_bytes / 1e6:.1f} of "
                    f"{event.total_bytes / 1e6:.1f} MB, from {plural(len(event.chunks_by_donor), 'donor')}"
                )

        return listen

    def _train(self, trainer: Trainer, context: SessionContext, run_id: str) -> None:
        with self._console.live(context.status, run_id, context.directory.metrics, lambda: context.network.view):
            trainer.run()
        if trainer.run_is_over:
            self._console.say(f"run {run_id} is over: it ended with round {trainer.round}")
        else:
            self._console.say(f"left the swarm after round {context.status.round}; the same command resumes from there")
        self._console.say("export the model with:")
        self._console.command(
            shlex.join([interpreter(), "-m", "spes_swarm.export", str(context.directory.path), "MODEL_DIR"])
        )


def _report(status: TrainingStatus, network: NetworkClient) -> None:
    """Writes to the log what the trainer is doing, and has the network process do the same."""
    _LOGGER.warning("asked by a signal: the trainer is %s; network process %d", status, network.pid)
    with suppress(OSError):  # it has ended
        os.kill(network.pid, signal.SIGUSR1)
