"""One session of a peer in a run: find the run, fetch its reference, claim experts, train, leave."""

from __future__ import annotations

import os
import shlex
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from spes_swarm.base.address import without_own
from spes_swarm.base.errors import UserError
from spes_swarm.base.wording import plural
from spes_swarm.network.client import NetworkClient
from spes_swarm.peer.join_request import JoinRequest
from spes_swarm.peer.joining import Joining, Stay
from spes_swarm.peer.panel import PeerConsole, interpreter
from spes_swarm.peer.run_data import PeerData
from spes_swarm.peer.stop_signals import StopSignals
from spes_swarm.port.commands import Event, FaultSeen
from spes_swarm.port.messages import SyncProgress
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.storage.run_directory import RunDirectory, lock_identity
from spes_swarm.storage.trackers import open_metrics
from spes_swarm.training.out_of_memory import as_user_error
from spes_swarm.training.setup import TrainingStatus
from spes_swarm.training.trainer import Trainer

_SAY_PROGRESS_S = 5.0


class Session:
    """One session of a peer in a run, from start to leaving."""

    def __init__(self, request: JoinRequest, console: PeerConsole, signals: StopSignals) -> None:
        started = time.monotonic()
        self._console = console
        self._signals = signals
        peer = request.peer
        directory = RunDirectory(Path(peer.output_dir))
        self._lock = directory.prepare()
        identity_path = Path(peer.identity) if peer.identity else directory.identity
        identity = Identity.load_or_create(identity_path.absolute())
        self._identity_lock = lock_identity(identity_path)
        peer = replace(peer, initial_peers=tuple(without_own(peer.initial_peers, identity.peer_id)))
        self._metrics = open_metrics(directory.metrics, identity.peer_id, peer.log, peer.name or "")
        self._status = TrainingStatus()
        self._said_progress_at = time.monotonic()
        self._network = NetworkClient(identity.path, self._on_network_event)
        self._stay = Stay(
            request=replace(request, peer=peer),
            directory=directory,
            identity=identity,
            console=console,
            metrics=self._metrics,
            network=self._network,
            data=PeerData(peer, directory, console.say, signals.told),
            stop=signals.told,
            status=self._status,
            started=started,
        )
        self._joining = Joining(self._stay)

    def _on_network_event(self, event: Event) -> None:
        # Runs in the reader's thread. On a full disk the trainer's own next event fails as well, and ends the session.
        with suppress(UserError):
            self._metrics.write(event.metric, **asdict(event))
        if isinstance(event, FaultSeen):
            self._status.faults += 1
        elif isinstance(event, SyncProgress) and time.monotonic() - self._said_progress_at > _SAY_PROGRESS_S:
            self._said_progress_at = time.monotonic()
            self._console.say(
                f"fetched {event.done_bytes / event.total_bytes:.0%}: {event.done_bytes / 1e6:.1f} of "
                f"{event.total_bytes / 1e6:.1f} MB, from {plural(len(event.chunks_by_donor), 'donor')}"
            )

    def run(self) -> None:
        """Joins, trains until stopped, leaves.

        Raises:
            UserError: an error that the user can fix.
            NetworkProcessError: the network process failed.
            LeftEarlyError: the user stopped the peer while joining, or the run is over.
        """
        try:
            with as_user_error("while joining, in a round or in an evaluation"):
                with self._signals.interruptible():
                    trainer = self._joining.run()
                self._train(trainer, self._joining.manifest.run_id)
        finally:
            self._network.stop()
            with suppress(UserError):  # on a full disk; the error that ended the session matters more
                if self._joining.joined:
                    self._metrics.write("leave", round=self._status.round)
            self._metrics.close()
            os.close(self._identity_lock)
            os.close(self._lock)

    def _train(self, trainer: Trainer, run_id: str) -> None:
        with self._console.live(self._status, run_id):
            trainer.run()
        if trainer.run_is_over:
            self._console.say(f"run {run_id} is over: it ended with round {trainer.round}")
        else:
            self._console.say(f"left the swarm after round {self._status.round}; the same command resumes from there")
        self._console.say("export the model with:")
        self._console.command(
            shlex.join([interpreter(), "-m", "spes_swarm.export", str(self._stay.directory.path), "MODEL_DIR"])
        )
