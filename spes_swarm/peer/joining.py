"""How a peer joins a run: the steps from nothing to a trainer that is ready, in order."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from spes_swarm.base import log
from spes_swarm.base.address import tcp_endpoint
from spes_swarm.base.errors import BootstrapError, InvitationError, LeftEarlyError, ManifestError
from spes_swarm.base.wording import said_if_slow
from spes_swarm.config.experts_wanted import parse_experts
from spes_swarm.config.manifest import Manifest
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.config.schedule import ScheduleEnd
from spes_swarm.data.run_tokenizer import run_tokenizer
from spes_swarm.metrics import events
from spes_swarm.model.sparse_model import SparseModel, build_model, layout_of
from spes_swarm.network.client import no_answer
from spes_swarm.network.transport.daemon import listen_again, with_port
from spes_swarm.peer.barrier import await_training
from spes_swarm.peer.local_data import held_out_batches
from spes_swarm.peer.memory.capacity import choose_device
from spes_swarm.peer.memory.host_memory import room_for_previous, shared_vectors
from spes_swarm.peer.memory.peer_plan import plan_peer
from spes_swarm.peer.panel import PeerConsole, experts_text, round_line
from spes_swarm.peer.run_data import PeerData
from spes_swarm.peer.run_finder import RunFinder
from spes_swarm.peer.starting_point import StartingPoint
from spes_swarm.peer.step_settings import StepSettings, check_tools, replica_of
from spes_swarm.port.commands import COMMAND_TIMEOUT_S, Commands, Port
from spes_swarm.port.messages import Presence, RunSettings
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.members.records import State
from spes_swarm.publishing.background import Publishing
from spes_swarm.publishing.publisher import check_target
from spes_swarm.storage.metrics_file import Metrics
from spes_swarm.storage.run_directory import RunDirectory
from spes_swarm.training.ranks.group import RankGroup
from spes_swarm.training.setup import TrainerSetup, TrainingStatus
from spes_swarm.training.trainer import Trainer

_DEFAULT_BANDWIDTH_MBPS = 100.0
_STOP_POLL_S = 0.1

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class SessionContext:
    """What a peer keeps from the start to the end of its session in a run."""

    peer: PeerConfig
    run: RunConfig | None  # to found, or expected of the run that is joined or continued; None: any
    directory: RunDirectory
    identity: Identity
    console: PeerConsole
    metrics: Metrics
    network: Port
    data: PeerData
    stop: threading.Event
    status: TrainingStatus
    ranks: RankGroup | None  # None: this process is the only rank
    started: float  # monotonic time


class Joining:
    """Joins a run. Each step reads the attributes that earlier steps have set."""

    manifest: Manifest  # of the run; set once the run is found
    trainer: Trainer  # set once the experts are claimed

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._peer = context.peer
        self._ranks = context.ranks
        self._num_ranks = 1 if context.ranks is None else context.ranks.placement.world_size
        self._console = context.console
        self._tokens_per_step = 0
        self._maddrs: list[str] = []
        self.joined = False  # True once all steps are done

    def run(self) -> Trainer:
        """Joins the run; returns a trainer that is ready.

        Raises:
            UserError: an error that the user can fix.
            NetworkProcessError: the network process failed.
            LeftEarlyError: the user stopped the peer, or the run is over.
        """
        for step, doing in (
            (self._prepare_machine, "preparing the device"),
            (self._listen, "starting the P2P daemon"),
            (self._find_run, "looking for the run"),
            (self._settle_reach, "finding out whether others can connect to this peer"),
            (self._open_data, "opening the data"),
            (self._make_room, "computing the model's layout"),
            (self._fill_reference, "reading weights"),
            (self._enter_swarm, "entering the swarm"),
            (self._obtain_reference, "fetching the swarm's weights"),
            (self._claim_experts, "claiming experts"),
            (self._make_trainer, "building the model"),
            (self._wait_for_peers, "waiting for peers"),
            (self._load_weights, "loading the weights"),
            (self._await_training, "waiting until the other peers train"),
        ):
            with said_if_slow(f"still {doing}; Ctrl-C stops", self._console.say):
                step()
        self._tell_joined()
        return self.trainer

    def close(self) -> None:
        """Stops reading data in the background."""
        if hasattr(self, "_sampler"):
            self._sampler.close()

    # The steps, in order.

    def _prepare_machine(self) -> None:
        # Only after the network process was forked: looking for a CUDA device may initialise the driver.
        self._device = choose_device(self._peer.device)
        if self._ranks is not None:
            self._device = self._ranks.own_device(self._device)
            self._ranks.connect(self._console.say, self._context.stop)
        self._step = StepSettings.of(self._peer, self._device)
        check_tools(self._peer, self._device)  # fails early; the model is built much later
        if self._peer.num_threads is not None:
            torch.set_num_threads(self._peer.num_threads)
        if (run := self._context.run) is not None:
            self._fits = plan_peer(run, self._peer, self._device, self._num_ranks)

    def _listen(self) -> None:
        self._maddrs = self._start_daemon(listen_again(self._peer.host_maddrs, self._context.directory.known_port()))
        self._console.say(f"peer {self._context.identity.peer_id}")

    def _find_run(self) -> None:
        context = self._context
        finder = RunFinder(
            peer=self._peer,
            run=context.run,
            directory=context.directory,
            identity=context.identity,
            ask=self._ask,
            console=self._console,
            data=context.data,
        )
        self.manifest = finder.find()
        self._admission = finder.admission
        log.context.run = self.manifest.run_id
        self._run = self.manifest.run
        self._source, self._initial_peers = finder.source, finder.initial_peers
        context.data.choose(self._run.data)  # obviously different data fails before more is asked of other peers
        self._tokenizer_places = finder.tokenizer_places(self._run)
        if (target := self._peer.publish_to) is not None:
            if not target.startswith("file:"):
                self._console.say(f"asking the Hub whether this peer may publish to {target}")
            if (unknown := check_target(target, self.manifest.run_id)) is not None:
                self._console.say(f"{unknown}; training starts, and publishing is tried when a round is due")

    def _settle_reach(self) -> None:
        self._reach = self._check_reach()
        if self._reach.reachable is False:
            self._go_private()
            self._maddrs = []
        elif self._reach.address is not None:
            maddr = f"{self._reach.address}/p2p/{self._context.identity.peer_id}"
            if maddr not in self._maddrs:
                self._maddrs.insert(0, maddr)
        self._console.say(f"run {self.manifest.run_id}")

    def _open_data(self) -> None:
        run, context = self._run, self._context
        self._batch_size = run.training.batch_size_of(self._peer.batch_size)
        if context.run is None:
            self._fits = plan_peer(run, self._peer, self._device, self._num_ranks)
        self._local = context.data.open(run.data, run_tokenizer(run, self._tokenizer_places))
        context.metrics.write(self._local.to_event())
        self._sampler = self._local.batches(
            run, peer_id=context.identity.peer_id, seed=context.data.seed, stop=context.stop
        )
        self._evaluation = held_out_batches(self._sampler, run.evaluation)

    def _make_room(self) -> None:
        """Lays the model out, and makes the memory that this process shares with the network process."""
        if self._fits.note:
            self._console.say(self._fits.note)
        model = self._run.model
        self._layout = layout_of(build_model(model.type, model.settings, seed=0, device="meta", on_meta=True))
        if self._layout.digest != self.manifest.layout_digest:
            raise ManifestError(
                "this version of transformers lays the model out differently from the founder's; "
                "install the version that the run uses"
            )
        self._wanted = parse_experts(self._peer.experts, self._layout.num_experts)
        size, directory = self._layout.num_elements, self._context.directory.path
        self._reference, self._contribution = shared_vectors(size, self._peer.reference_storage, directory)
        self._previous = room_for_previous(size, self._fits.previous, directory)

    def _fill_reference(self) -> None:
        """Fills the reference from local sources: a checkpoint or initial weights."""
        context = self._context
        self._start = StartingPoint(
            self._peer,
            context.directory,
            context.identity,
            self.manifest,
            self._ask,
            context.stop,
            self._console,
            context.metrics,
        )
        self._checkpoint = self._start.fill(self._reference.values_N, self._layout, self._source)
        self._leave_if_over(self._checkpoint.meta.round if self._checkpoint is not None else 0)
        self._leave_if_over(self._source.publication.round if self._source is not None else 0)
        if self._peer.client_mode and not self._initial_peers:
            raise BootstrapError(
                "no peer of the last session answers, and with --client-mode no peer could join this one: "
                "start again when one of them is running, give --initial-peers, or leave out --client-mode"
            )

    def _enter_swarm(self) -> None:
        context, peer = self._context, self._peer
        settings = RunSettings(
            manifest=self.manifest,
            layout=self._layout,
            reference_fd=self._reference.fd,
            contribution_fd=self._contribution.fd,
            previous_fd=None if self._previous is None else self._previous.fd,
            trainer_pid=os.getpid(),
            client_mode=self._reach.reachable is False,
            bandwidth_mbps=peer.upload_mbps or _DEFAULT_BANDWIDTH_MBPS,
            initial_peers=tuple(self._initial_peers),
            upload_mbps=peer.upload_mbps,
            tokenizer=context.directory.tokenizer if self._run.tokenizer.local is not None else None,
            admission=self._admission.shown,
            acts=context.directory.acts,
            proofs=context.directory.proofs,
            track_records=context.directory.track_records,
        )
        review_reach = not (peer.client_mode or peer.assume_reachable)
        self._ask(Commands.open_run, COMMAND_TIMEOUT_S, settings=settings, review_reach=review_reach)
        # The network process has mapped them by now; the mappings outlive the descriptors.
        for vector in filter(None, (self._reference, self._contribution, self._previous)):
            vector.close()
        self._previous = None
        self._tokens_per_step = self._batch_size * self._run.training.sequence_length
        self._announce("joining")
        # From here on the peer answers others, so a script that starts a swarm need not wait for its first step.
        context.metrics.write(events.Listening(run_id=self.manifest.run_id, maddrs=self._maddrs))
        context.directory.remember(self.manifest)
        self._admission.remember()
        context.data.remember(self._local)
        if self._run.training.at_end == "stop" and self._initial_peers:
            newest = self._ask(Commands.swarm_table, None)
            self._leave_if_over(newest.round if newest is not None else 0)

    def _obtain_reference(self) -> None:
        """Fetches the swarm's reference, unless this peer's own is as new."""
        self._table = self._start.obtain(
            self._reference.values_N, self._initial_peers, announce_syncing=lambda: self._announce("syncing")
        )

    def _claim_experts(self) -> None:
        """Claims leases on the wanted experts; "auto" means the run's `experts_per_peer`, as far as memory allows."""
        run, wanted, room, checkpoint = self._run, self._wanted, self._fits.experts, self._checkpoint
        fixed = isinstance(wanted, tuple)
        if wanted == "auto" and room < run.experts_per_peer:
            self._console.say(f"training {room} instead of {run.experts_per_peer} experts: more do not fit in memory")
        choice = wanted if isinstance(wanted, tuple) else room
        if checkpoint is not None and checkpoint.meta.held and wanted in ("auto", len(checkpoint.meta.held)):
            choice = tuple(checkpoint.meta.held)
            room = max(room, len(choice))
        if room > run.most_experts:
            self._console.say(
                f"{room} experts requested: a peer keeps at most {run.most_experts} while others can hold the rest"
            )
        self._held = self._ask(Commands.claim, COMMAND_TIMEOUT_S, experts=choice, room=room, fixed=fixed)

    def _make_trainer(self) -> None:
        context, peer = self._context, self._peer
        self.trainer = Trainer(
            TrainerSetup(
                run_id=self.manifest.run_id,
                peer_id=context.identity.peer_id,
                nickname=peer.name or "",
                run=self._run,
                model=self._sparse_model(),
                network=context.network,
                reference_N=self._reference.values_N,
                contribution_N=self._contribution.values_N,
                sampler=self._sampler,
                evaluation=self._evaluation,
                device=self._device,
                batch_size=self._batch_size,
                micro_batch_size=self._fits.micro_batch_size,
                precision=StepSettings.of(peer, self._device).precision,
                ranks=self._ranks,
                optimizer_states=peer.optimizer_states,
                metrics=context.metrics,
                checkpoints=context.directory.checkpoints,
                checkpoint_minutes=peer.checkpoint_minutes,
                keep_checkpoints=peer.keep_checkpoints,
                max_rounds=peer.max_rounds,
                profile_steps=peer.profile_steps,
                stop=context.stop,
                status=context.status,
                say=self._console.say,
                on_round=self._say_round,
                on_saved=self._remember_peers,
                publishing=self._publishing(),
            )
        )
        if self._maddrs:  # more threads than this peer's might not suit others
            self._admission.tell_how_to_join(self._console, self._maddrs, one_thread=peer.num_threads == 1)

    def _sparse_model(self) -> SparseModel:
        """Returns the model that is trained, without its weights; all ranks build it."""
        at_a_time = self._fits.micro_batch_size
        self._console.say(f"building {self._run.model.type} on {self._device}{self._step.notes}")
        order = replica_of(self._run, self._peer, self._device, self._held, at_a_time, self._step)
        if self._ranks is not None:
            self._ranks.send_order(order)
        return order.build(self._device)

    def _wait_for_peers(self) -> None:
        """Waits until as many peers are ready as the user wants."""
        if (wanted := self._peer.wait_for_peers) <= 1:
            return
        self._announce("waiting")
        here = 0
        while not self._context.stop.is_set():
            view, before = self._ask(Commands.view, COMMAND_TIMEOUT_S), here
            if view.out is not None:
                raise InvitationError(view.out)
            if (here := view.num_ready + 1) >= wanted:
                break
            if here != before:
                self._console.say(f"waiting for peers: {here} of {wanted}")
            self._context.stop.wait(0.5)
        # The peers may have resumed from different checkpoints: all continue from the newest.
        self._start.download(if_newer=True)
        self._table = self._ask(Commands.table, COMMAND_TIMEOUT_S)
        self._leave_if_over(self._table.round)

    def _load_weights(self) -> None:
        if self._checkpoint is None:
            self.trainer.load_reference(self._table)
        else:
            self.trainer.restore(self._checkpoint, self._table)
        if self._checkpoint is None or self._checkpoint.meta.round < self._table.round:
            # Do not repeat what the others have trained on.
            view = self._ask(Commands.view, COMMAND_TIMEOUT_S)
            self._sampler.follow(view.ready)
            self._sampler.advance(view.data)

    def _await_training(self) -> None:
        if (others := self._peer.wait_for_peers - 1) > 0:
            self._announce("training")
            await_training(lambda: self._ask(Commands.view, COMMAND_TIMEOUT_S), others, self._context.stop)

    def _tell_joined(self) -> None:
        held, metrics = self._held, self._context.metrics
        self.joined = True
        metrics.write(events.Lease(gained=held, lost=()))
        metrics.write(
            events.Join(
                run_id=self.manifest.run_id,
                maddrs=self._maddrs,
                experts=held,
                round=self._table.round,
                seconds=time.monotonic() - self._context.started,
                ranks=self._num_ranks,
                kernel=self._peer.kernel,
            )
        )
        self._console.say(f"training experts {experts_text(held)} from round {self._table.round}; Ctrl-C to leave")

    # What the steps share.

    def _ask(
        self,
        command: Callable[Concatenate[Commands, _Args], Coroutine[Any, Any, _Result]],
        wait_s: float | None,
        /,
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> _Result:
        """Like Port.ask, but does not keep waiting once the user stops the peer.

        Raises:
            LeftEarlyError: the user stopped the peer.
        """
        future = self._context.network.submit(command, *args, **kwargs)
        deadline = time.monotonic() + wait_s if wait_s is not None else None
        while True:
            with suppress(TimeoutError):
                future.exception(_STOP_POLL_S)  # only waits
                return future.result()
            if self._context.stop.is_set():
                raise LeftEarlyError("stopped while joining")
            if deadline is not None and time.monotonic() > deadline:
                raise no_answer(command.__name__)

    def _leave_if_over(self, round_number: int) -> None:
        """Prints a line and leaves if the run has ended by its schedule.

        Raises:
            LeftEarlyError: the run has ended.
        """
        end = ScheduleEnd(self._run)
        if end.ends_run(round_number):
            self._console.say(end.why_over(self.manifest.run_id))
            raise LeftEarlyError("the run is over")

    def _start_daemon(self, host_maddrs: list[str], *, private: bool = False) -> list[str]:
        """Starts p2pd, or restarts it for a peer that cannot be reached; returns this peer's addresses."""
        maddrs = self._ask(
            Commands.start_daemon,
            COMMAND_TIMEOUT_S,
            host_maddrs=host_maddrs,
            announce_maddrs=list(self._peer.announce_maddrs),
            client_mode=self._peer.client_mode,
            relay=self._peer.relay == "auto",
            private=private,
        )
        endpoints = [endpoint for endpoint in map(tcp_endpoint, maddrs) if endpoint is not None]
        if endpoints and not self._peer.announce_maddrs:
            self._context.directory.remember_port(endpoints[0][1])
        return maddrs

    def _go_private(self) -> None:
        """Restarts p2pd as a private node, to which others cannot open connections."""
        peer = self._peer
        if peer.client_mode:
            return  # it never listens
        self._start_daemon(with_port(peer.host_maddrs, self._context.directory.known_port()), private=True)
        if self._initial_peers:
            self._ask(
                Commands.bootstrap,
                peer.bootstrap_timeout_s + 30.0,
                maddrs=self._initial_peers,
                timeout_s=peer.bootstrap_timeout_s,
            )

    def _check_reach(self) -> events.Reach:
        """Finds out whether others can open connections to this peer, unless the user has declared it."""
        if self._peer.client_mode or self._peer.assume_reachable:
            reach = events.Reach(reachable=not self._peer.client_mode)
        else:
            reach = self._ask(Commands.check_reach, COMMAND_TIMEOUT_S)
        self._context.metrics.write(reach)
        for line in reach.describe():
            self._console.say(line)
        return reach

    def _announce(self, state: State) -> None:
        self._context.status.phase = state
        self._ask(
            Commands.set_presence,
            COMMAND_TIMEOUT_S,
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

    def _publishing(self) -> Publishing | None:
        context = self._context
        if self._peer.publish_to is None:
            return None
        return Publishing(
            context.network,
            context.metrics,
            peer=self._peer,
            run_id=self.manifest.run_id,
            peer_id=context.identity.peer_id,
            say=self._console.say,
        )

    def _remember_peers(self) -> None:
        self._context.directory.remember_peers(self._context.network.ask(Commands.peer_maddrs, COMMAND_TIMEOUT_S))

    def _say_round(self) -> None:
        if not self._console.is_terminal:  # on a terminal the panel shows it
            self._console.say(round_line(self._context.status))
