"""One stay of a peer in a run: find the run, obtain the reference, claim experts, train, leave."""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from blake3 import blake3

from spes_swarm.base.address import best_first, tcp_endpoint, without_own
from spes_swarm.base.errors import BootstrapError, LeftEarlyError, ManifestError, UserError
from spes_swarm.base.rate_limit import ASSUMED_MBPS, DURING_ROUNDS_SHARE
from spes_swarm.base.shared_vector import SharedVector
from spes_swarm.base.wording import plural
from spes_swarm.config.experts_wanted import ExpertsWanted, parse_experts
from spes_swarm.config.join_command import join_command, join_note
from spes_swarm.config.manifest import Manifest
from spes_swarm.config.run import RunConfig
from spes_swarm.config.schedule import ScheduleEnd
from spes_swarm.data.sampler import Sampler, TokenStream
from spes_swarm.data.tokenizer import Tokenizer
from spes_swarm.model.kernels import load_kernel
from spes_swarm.model.sparse_model import SparseModel, build_model, layout_of
from spes_swarm.network.client import NetworkClient, no_answer
from spes_swarm.network.link.daemon import listen_again, with_port
from spes_swarm.peer.capacity import choose_device, plan_experts
from spes_swarm.peer.join_request import JoinRequest
from spes_swarm.peer.panel import PeerConsole, experts_text, interpreter, round_line
from spes_swarm.peer.run_data import LocalData, PeerData
from spes_swarm.peer.run_finder import RunFinder, tokenizer_of
from spes_swarm.peer.starting_point import StartingPoint
from spes_swarm.peer.stop_signals import StopSignals
from spes_swarm.port.commands import Commands, Event, FaultSeen
from spes_swarm.port.messages import Presence, Reach, RunSettings, SwarmView, SyncProgress
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.publishing.background import Publishing
from spes_swarm.storage.checkpoint import Checkpoint
from spes_swarm.storage.run_directory import RunDirectory, lock_identity
from spes_swarm.storage.trackers import open_metrics
from spes_swarm.training.out_of_memory import as_user_error
from spes_swarm.training.setup import TrainerSetup, TrainingStatus
from spes_swarm.training.trainer import Trainer

_DEFAULT_BANDWIDTH_MBPS = 100.0
_EVALUATION_BATCH = 8
_COMMAND_TIMEOUT_S = 120.0
_BARRIER_S = 120.0  # at most, while all are present: some may wait for more peers than this one does
_ABSENCE_S = 20.0  # after a peer has left or failed
_STOP_POLL_S = 0.1
_SAY_PROGRESS_S = 5.0

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _Opened:
    """The data of a run on this machine."""

    local: LocalData
    sampler: Sampler
    evaluation: list[np.ndarray[Any, np.dtype[np.int64]]]


class Session:
    """One stay of a peer in a run, from start to leaving."""

    def __init__(self, request: JoinRequest, console: PeerConsole, signals: StopSignals) -> None:
        self._started = time.monotonic()
        self._console = console
        self._signals = signals
        self._stop = signals.told
        self._peer = request.peer
        self._directory = RunDirectory(Path(self._peer.output_dir))
        self._lock = self._directory.prepare()
        identity_path = Path(self._peer.identity) if self._peer.identity else self._directory.identity
        self._identity = Identity.load_or_create(identity_path.absolute())
        self._identity_lock = lock_identity(identity_path)
        others = tuple(without_own(self._peer.initial_peers, self._identity.peer_id))
        self._peer = replace(self._peer, initial_peers=others)
        self._request = replace(request, peer=self._peer)
        self._metrics = open_metrics(
            self._directory.metrics, self._identity.peer_id, self._peer.log, self._peer.name or ""
        )
        self._data = PeerData(self._peer, self._directory, console.say, self._stop)
        self._status = TrainingStatus()
        self._said_progress_at = time.monotonic()
        self._network = NetworkClient(self._identity.path, self._on_network_event)
        self._joined = False
        self._initial_peers = list(self._peer.initial_peers)
        self._tokens_per_step = 0

    def _on_network_event(self, event: Event) -> None:
        # This is the reader's thread. On a full disk the trainer's own next event fails as well, and ends the stay.
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
        """Joins, trains until told to stop, leaves.

        Raises:
            UserError: something that the user can fix.
            NetworkProcessError: the network process failed.
            LeftEarlyError: told to stop while joining, or the run is over.
        """
        try:
            with as_user_error("while joining, in a round or in an evaluation"):
                with self._signals.interruptible():
                    trainer, run_id = self._join()
                self._train(trainer, run_id)
        finally:
            self._network.stop()
            with suppress(UserError):  # on a full disk; what ended the stay is the news
                if self._joined:
                    self._metrics.write("leave", round=self._status.round)
            self._metrics.close()
            os.close(self._identity_lock)
            os.close(self._lock)

    def _ask(
        self,
        command: Callable[Concatenate[Commands, _Args], Coroutine[Any, Any, _Result]],
        wait_s: float | None,
        /,
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> _Result:
        """Like Port.ask, but a person who wants to leave does not have to wait for the answer.

        Raises:
            LeftEarlyError: told to stop meanwhile.
        """
        future = self._network.submit(command, *args, **kwargs)
        deadline = time.monotonic() + wait_s if wait_s is not None else None
        while True:
            with suppress(FutureTimeoutError):
                future.exception(_STOP_POLL_S)  # only waits
                return future.result()
            if self._stop.is_set():
                raise LeftEarlyError("told to stop while joining")
            if deadline is not None and time.monotonic() > deadline:
                raise no_answer(command.__name__)

    def _join(self) -> tuple[Trainer, str]:
        """All until the first step; returns a trainer that is ready, and the run's id."""
        # Not before the fork: looking for a CUDA device may initialise the driver.
        self._device = choose_device(self._peer.device)
        load_kernel(self._peer.kernel)  # the model is built much later
        if self._peer.num_threads is not None:
            torch.set_num_threads(self._peer.num_threads)
        maddrs = self._start_daemon(listen_again(self._peer.host_maddrs, self._directory.known_port()))
        self._console.say(f"peer {self._identity.peer_id}")
        finder = RunFinder(self._request, self._directory, self._identity, self._ask, self._console, self._data)
        manifest = finder.find()
        self._data.choose(manifest.run.data)  # who has plainly other data need not bother the others
        self._initial_peers = finder.initial_peers
        reach = self._check_reach()
        if reach.reachable is False:
            self._go_private()
            maddrs = []
        elif reach.address is not None and f"{reach.address}/p2p/{self._identity.peer_id}" not in maddrs:
            maddrs = [f"{reach.address}/p2p/{self._identity.peer_id}", *maddrs]
        run = manifest.run
        self._console.say(f"run {manifest.run_id}")
        room = plan_experts(run, self._peer, self._device)
        tokenizer = tokenizer_of(run)
        data = self._open_data(run, tokenizer)
        self._console.say(f"building {run.model.type} on {self._device}")
        settings = run.model.settings
        model = build_model(run.model.type, settings, run.training.seed, "cpu")
        layout = layout_of(model)
        if layout.digest != manifest.layout_digest:
            raise ManifestError(
                "this version of transformers lays the model out differently from the founder's; "
                "install the version that the run uses"
            )
        wanted = parse_experts(self._peer.experts, layout.num_experts)
        reference = SharedVector.create(layout.num_elements)
        contribution = SharedVector.create(layout.num_elements)
        start = StartingPoint(
            self._peer, self._directory, self._identity, manifest, self._ask, self._stop, self._console, self._metrics
        )
        checkpoint = start.fill(reference.values_N, model, layout, finder.source)
        self._leave_if_over(manifest, checkpoint.meta.round if checkpoint is not None else 0)
        self._leave_if_over(manifest, finder.source.publication.round if finder.source is not None else 0)
        if self._peer.client_mode and not self._initial_peers:
            raise BootstrapError(
                "no peer of the last session answers, and with --client-mode nobody could join this one: "
                "start again when one of them runs, give --initial-peers, or leave out --client-mode"
            )
        self._ask(
            Commands.open_run,
            _COMMAND_TIMEOUT_S,
            settings=RunSettings(
                manifest=manifest,
                layout=layout,
                reference_fd=reference.fd,
                contribution_fd=contribution.fd,
                trainer_pid=os.getpid(),
                client_mode=reach.reachable is False,
                bandwidth_mbps=self._peer.upload_mbps or _DEFAULT_BANDWIDTH_MBPS,
                initial_peers=tuple(self._initial_peers),
                upload_mbps=self._peer.upload_mbps,
            ),
            review_reach=not (self._peer.client_mode or self._peer.assume_reachable),
        )
        batch_size = run.training.batch_size_of(self._peer.batch_size)
        self._tokens_per_step = batch_size * run.training.sequence_length
        self._announce("joining")
        # From here on others are answered: whoever starts a swarm by script need not wait for this peer's first step.
        self._metrics.write("listening", run_id=manifest.run_id, maddrs=maddrs)
        self._directory.remember(manifest)
        self._data.remember(data.local)
        if run.training.at_end == "stop" and self._initial_peers:
            newest = self._ask(Commands.swarm_table, None)
            self._leave_if_over(manifest, newest.round if newest is not None else 0)
        table = start.obtain(
            reference.values_N, self._initial_peers, announce_syncing=lambda: self._announce("syncing")
        )
        held = self._claim(run, wanted, room, checkpoint)
        sparse = SparseModel(model.to(self._device), held, self._peer.kernel)
        trainer = Trainer(
            TrainerSetup(
                run_id=manifest.run_id,
                peer_id=self._identity.peer_id,
                nickname=self._peer.name or "",
                run=run,
                model=sparse,
                network=self._network,
                reference_N=reference.values_N,
                contribution_N=contribution.values_N,
                sampler=data.sampler,
                evaluation=data.evaluation,
                device=self._device,
                batch_size=batch_size,
                metrics=self._metrics,
                checkpoints=self._directory.checkpoints,
                checkpoint_every_rounds=self._peer.checkpoint_every_rounds,
                keep_checkpoints=self._peer.keep_checkpoints,
                max_rounds=self._peer.max_rounds,
                stop=self._stop,
                status=self._status,
                say=self._console.say,
                on_round=self._say_round,
                on_saved=self._remember_peers,
                publishing=self._publishing(manifest.run_id),
            )
        )
        self._tell_how_to_join(manifest, maddrs)
        if self._wait_for_peers():
            # All may have come back from different checkpoints: they go on from the newest of them.
            start.download(if_newer=True)
            table = self._ask(Commands.table, _COMMAND_TIMEOUT_S)
            self._leave_if_over(manifest, table.round)
        if checkpoint is not None:
            trainer.restore(checkpoint, table)
        else:
            trainer.load_reference(table)
        if self._peer.wait_for_peers > 1:
            self._announce("training")
            others = self._peer.wait_for_peers - 1
            await_training(lambda: self._ask(Commands.view, _COMMAND_TIMEOUT_S), others, self._stop)
        self._joined = True
        self._metrics.write("lease", gained=list(held), lost=[])
        self._metrics.write(
            "join",
            run_id=manifest.run_id,
            maddrs=maddrs,
            experts=list(held),
            round=table.round,
            seconds=time.monotonic() - self._started,
        )
        self._console.say(f"training experts {experts_text(held)} from round {table.round}; Ctrl-C leaves the swarm")
        return trainer, manifest.run_id

    def _train(self, trainer: Trainer, run_id: str) -> None:
        with self._console.live(self._status, run_id):
            trainer.run()
        if trainer.run_is_over:
            self._console.say(f"run {run_id} is over: it ended with round {trainer.round}")
        else:
            self._console.say(f"left the swarm after round {self._status.round}; the same command goes on from there")
        self._console.say("take the model out with:")
        self._console.command(
            shlex.join([interpreter(), "-m", "spes_swarm.export", str(self._directory.path), "MODEL_DIR"])
        )

    # The steps of joining.

    def _leave_if_over(self, manifest: Manifest, round_number: int) -> None:
        """Says so, and leaves, when the run has ended by its schedule.

        Raises:
            LeftEarlyError: it has.
        """
        end = ScheduleEnd(manifest.run)
        if end.ends_run(round_number):
            self._console.say(end.why_over(manifest.run_id))
            raise LeftEarlyError("the run is over")

    def _start_daemon(self, host_maddrs: list[str], *, private: bool = False) -> list[str]:
        """Starts p2pd, or starts it again for a peer that cannot be reached; returns this peer's addresses."""
        maddrs = self._ask(
            Commands.start_daemon,
            _COMMAND_TIMEOUT_S,
            host_maddrs=host_maddrs,
            announce_maddrs=list(self._peer.announce_maddrs),
            client_mode=self._peer.client_mode,
            relay=self._peer.relay == "auto",
            private=private,
        )
        endpoints = [endpoint for endpoint in map(tcp_endpoint, maddrs) if endpoint is not None]
        if endpoints and not self._peer.announce_maddrs:
            self._directory.remember_port(endpoints[0][1])
        return maddrs

    def _go_private(self) -> None:
        """Tells libp2p that others cannot open connections to this peer."""
        peer = self._peer
        if peer.client_mode:
            return  # it does not listen in any case
        self._start_daemon(with_port(peer.host_maddrs, self._directory.known_port()), private=True)
        if self._initial_peers:
            self._ask(
                Commands.bootstrap,
                peer.bootstrap_timeout_s + 30.0,
                maddrs=self._initial_peers,
                timeout_s=peer.bootstrap_timeout_s,
            )

    def _check_reach(self) -> Reach:
        """Finds out whether others can open connections to this peer, unless the user has said it."""
        if self._peer.client_mode:
            reach = Reach(False, None, ())
        elif self._peer.assume_reachable:
            reach = Reach(True, None, ())
        else:
            reach = self._ask(Commands.check_reach, _COMMAND_TIMEOUT_S)
        self._metrics.write(reach.metric, **asdict(reach))
        for line in reach.describe():
            self._console.say(line)
        return reach

    def _remember_peers(self) -> None:
        self._directory.remember_peers(self._network.ask(Commands.peer_maddrs, _COMMAND_TIMEOUT_S))

    def _open_data(self, run: RunConfig, tokenizer: Tokenizer) -> _Opened:
        local = self._data.open(run.data, tokenizer)
        self._metrics.write("data", **local.to_event())
        # By default every identity has an order of its own, and keeps it.
        own_seed = int.from_bytes(blake3(self._identity.peer_id.encode()).digest()[:6], "little")
        sampler = Sampler(
            TokenStream(local.files),
            sequence_length=run.training.sequence_length,
            run_seed=run.training.seed,
            peer_seed=self._peer.seed if self._peer.seed is not None else own_seed,
            holdout_fraction=run.evaluation.holdout_fraction,
        )
        evaluation = (
            list(sampler.evaluation_batches(run.evaluation.sequences, _EVALUATION_BATCH))
            if run.evaluation.every_rounds
            else []
        )
        return _Opened(local, sampler, evaluation)

    def _publishing(self, run_id: str) -> Publishing | None:
        if self._peer.publish_to is None:
            return None
        return Publishing(
            self._network,
            self._metrics,
            output_dir=self._directory.path,
            run_id=run_id,
            peer_id=self._identity.peer_id,
            target=self._peer.publish_to,
            every=self._peer.publish_every,
            keep=self._peer.publish_keep,
            say=self._console.say,
            upload_mbps=self._peer.publish_mbps or DURING_ROUNDS_SHARE * (self._peer.upload_mbps or ASSUMED_MBPS),
        )

    def _claim(
        self, run: RunConfig, wanted: ExpertsWanted, room: int, checkpoint: Checkpoint | None
    ) -> tuple[int, ...]:
        """Takes leases of as many experts as there is room for; "auto" means as many as the run says, if they fit."""
        fixed = isinstance(wanted, tuple)
        if wanted == "auto" and room < run.experts_per_peer:
            self._console.say(f"{room} instead of {run.experts_per_peer} experts: more do not fit in memory")
        choice: int | tuple[int, ...] = wanted if isinstance(wanted, tuple) else room
        if checkpoint is not None and checkpoint.meta.held and wanted in ("auto", len(checkpoint.meta.held)):
            choice = tuple(checkpoint.meta.held)
            room = max(room, len(choice))
        if room > run.most_experts:
            self._console.say(
                f"{room} experts are asked for: "
                f"one peer keeps {run.most_experts} of them where others can hold the rest"
            )
        return self._ask(Commands.claim, _COMMAND_TIMEOUT_S, experts=choice, room=room, fixed=fixed)

    def _announce(self, state: Any) -> None:
        self._status.phase = state
        self._ask(
            Commands.set_presence,
            _COMMAND_TIMEOUT_S,
            presence=Presence(
                name=self._peer.name or "",
                state=state,
                step=0,
                tokens=0,
                tokens_per_step=self._tokens_per_step,
                tokens_per_second=0.0,
                loss=None,
                experts=(),
            ),
        )

    def _wait_for_peers(self) -> bool:
        """Waits for as many peers as wanted; whether there are any others."""
        wanted = self._peer.wait_for_peers
        if wanted <= 1:
            return False
        self._announce("waiting")
        shown = 0
        while not self._stop.is_set():
            view = self._ask(Commands.view, _COMMAND_TIMEOUT_S)
            here = view.num_ready + 1
            if here >= wanted:
                break
            if here != shown:
                shown = here
                self._console.say(f"waiting for peers: {here} of {wanted}")
            self._stop.wait(0.5)
        return True

    # Telling the user.

    def _tell_how_to_join(self, manifest: Manifest, maddrs: list[str]) -> None:
        if not maddrs:
            return
        self._console.say("others join with (on this machine with an --output-dir of their own):")
        self._console.command(join_command(manifest, best_first(maddrs)[0], interpreter()))
        if (note := join_note(manifest.run.data)) is not None:
            self._console.say(note)

    def _say_round(self) -> None:
        if not self._console.is_terminal:  # where the panel shows it
            self._console.say(round_line(self._status))


def await_training(
    view: Callable[[], SwarmView], others: int, stop: threading.Event, now: Callable[[], float] = time.monotonic
) -> None:
    """Waits until the others train, too, so that no peer starts before the rest have seen each other.

    That takes a second, or half a minute where they see each other through a relay on a busy machine.
    """
    begun = all_there = now()
    while not stop.is_set() and now() < min(begun + _BARRIER_S, all_there + _ABSENCE_S):
        seen = view()
        if seen.num_training >= others:
            return
        if seen.num_ready >= others:
            all_there = now()
        stop.wait(_STOP_POLL_S)
