"""One stay of a peer in a run: find the run, obtain the reference, claim experts, train, leave."""

from __future__ import annotations

import dataclasses
import os
import shlex
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from spes_swarm.address import best_first
from spes_swarm.capacity import choose_device, experts_that_fit
from spes_swarm.checkpoint import Checkpoint, load_newest
from spes_swarm.config import ExpertsWanted, RunConfig, parse_experts
from spes_swarm.corpus import open_source
from spes_swarm.errors import (
    BootstrapError,
    CheckpointError,
    ConfigError,
    LeftEarlyError,
    ManifestError,
    NetworkProcessError,
    RoundError,
    UserError,
)
from spes_swarm.identity import Identity
from spes_swarm.join_request import JoinRequest
from spes_swarm.layout import Layout
from spes_swarm.manifest import Manifest, found_run
from spes_swarm.metrics import Metrics
from spes_swarm.model import SparseModel, build_model, flat_from_model, layout_of
from spes_swarm.network_client import NetworkClient
from spes_swarm.panel import PeerConsole, experts_text, interpreter
from spes_swarm.reference import ReferenceTable
from spes_swarm.run_directory import RunDirectory, lock_file
from spes_swarm.sampler import Sampler, TokenStream
from spes_swarm.services import Presence, RunSettings, SwarmView
from spes_swarm.shared_vector import SharedVector
from spes_swarm.tokenizer import Tokenizer, load_tokenizer
from spes_swarm.trainer import Trainer, TrainerSetup, TrainingStatus
from spes_swarm.transfer import TransferReport

_DEFAULT_BANDWIDTH_MBPS = 100.0
_EVALUATION_BATCH = 8
_COMMAND_TIMEOUT_S = 120.0
_BARRIER_S = 20.0
_STOP_POLL_S = 0.1
_KNOWN_PEERS_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class _Opened:
    """The data of a run on this machine."""

    sampler: Sampler
    evaluation: list[np.ndarray[Any, np.dtype[np.int64]]]


class Session:
    """One stay of a peer in a run, from start to leaving."""

    def __init__(self, request: JoinRequest, console: PeerConsole, stop: threading.Event) -> None:
        self._started = time.monotonic()
        self._console = console
        self._stop = stop
        self._founding_config = request.run
        self._config_is_explicit = request.run_is_explicit
        self._peer = request.peer
        self._directory = RunDirectory(Path(self._peer.output_dir))
        self._lock = self._directory.prepare()
        identity_path = Path(self._peer.identity) if self._peer.identity else self._directory.identity
        self._identity = Identity.load_or_create(identity_path.absolute())
        self._identity_lock = lock_file(
            self._identity.path, f"identity file {identity_path}", "every peer needs one of its own"
        )
        self._metrics = Metrics(self._directory.metrics, self._identity.peer_id)
        self._status = TrainingStatus()
        self._network = NetworkClient(self._identity.path, self._on_network_event)
        self._joined = False
        self._initial_peers = list(self._peer.initial_peers)
        self._tokens_per_step = 0

    def _on_network_event(self, name: str, fields: dict[str, Any]) -> None:
        # This is the reader's thread. On a full disk the trainer's own next event fails as well, and ends the stay.
        with suppress(UserError):
            self._metrics.write(name, **fields)
        if name == "fault":
            self._status.faults += 1

    def run(self) -> None:
        """Joins, trains until told to stop, leaves.

        Raises:
            UserError: something that the user can mend.
            NetworkProcessError: the network process failed.
        """
        try:
            self._run()
        finally:
            self._network.stop()
            with suppress(UserError):  # on a full disk; what ended the stay is the news
                if self._joined:
                    self._metrics.write("leave", round=self._status.round)
            self._metrics.close()
            os.close(self._identity_lock)
            os.close(self._lock)

    def _ask(self, command: str, wait_s: float | None = None, /, **arguments: Any) -> Any:
        """Like NetworkClient.ask, but a person who wants to leave does not have to wait for the answer.

        Raises:
            LeftEarlyError: told to stop meanwhile.
        """
        future = self._network.submit(command, **arguments)
        deadline = time.monotonic() + wait_s if wait_s is not None else None
        while True:
            with suppress(FutureTimeoutError):
                future.exception(_STOP_POLL_S)  # only waits
                return future.result()
            if self._stop.is_set():
                raise LeftEarlyError("told to stop while joining")
            if deadline is not None and time.monotonic() > deadline:
                raise NetworkProcessError(f"the network process did not answer `{command}`")

    def _run(self) -> None:
        # Not before the fork: looking for a CUDA device may initialise the driver.
        self._device = choose_device(self._peer.device)
        if self._peer.num_threads is not None:
            torch.set_num_threads(self._peer.num_threads)
        maddrs, _ = self._ask(
            "start_daemon",
            _COMMAND_TIMEOUT_S,
            host_maddrs=list(self._peer.host_maddrs),
            announce_maddrs=list(self._peer.announce_maddrs),
            client_mode=self._peer.client_mode,
        )
        self._console.say(f"peer {self._identity.peer_id}")
        manifest = self._find_manifest()
        run = manifest.run
        self._console.say(f"run {manifest.run_id}")
        tokenizer = _tokenizer_of(run)
        data = self._open_data(run, tokenizer)
        self._console.say(f"building {run.model.type} on {self._device}")
        model = build_model(run.model.type, run.model.settings, run.training.seed, "cpu")
        layout = layout_of(model)
        if layout.digest != manifest.layout_digest:
            raise ManifestError(
                "this version of transformers lays the model out differently from the founder's; "
                "install the version that the run uses"
            )
        wanted = parse_experts(self._peer.experts, layout.num_experts)
        reference = SharedVector.create(layout.num_elements)
        contribution = SharedVector.create(layout.num_elements)
        checkpoint = self._load_checkpoint(manifest, layout, reference)
        if checkpoint is None and manifest.founder == self._identity.peer_id:
            reference.values_N[:] = flat_from_model(model, layout)
        self._ask(
            "open_run",
            _COMMAND_TIMEOUT_S,
            settings=RunSettings(
                manifest=manifest,
                layout=layout,
                reference_fd=reference.fd,
                contribution_fd=contribution.fd,
                trainer_pid=os.getpid(),
                client_mode=self._peer.client_mode,
                bandwidth_mbps=self._peer.upload_mbps or _DEFAULT_BANDWIDTH_MBPS,
                initial_peers=tuple(self._initial_peers),
            ),
        )
        batch_size = self._peer.batch_size or run.training.batch_size
        self._tokens_per_step = batch_size * run.training.sequence_length
        self._announce("joining")
        self._directory.remember(manifest)
        table = self._obtain_reference(manifest, checkpoint)
        held = self._claim(run, layout, wanted, checkpoint)
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
                on_round=self._say_round,
                on_saved=self._remember_peers,
            )
        )
        if checkpoint is not None:
            trainer.restore(checkpoint, table)
        else:
            trainer.load_reference(table)
        self._tell_how_to_join(manifest, maddrs)
        self._wait_for_peers()
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
        with self._console.live(self._status, manifest.run_id):
            trainer.run()
        self._console.say(f"left the swarm after round {self._status.round}; the same command goes on from there")
        self._console.say("take the model out with:")
        self._console.command(
            shlex.join([interpreter(), "-m", "spes_swarm.export", str(self._directory.path), "MODEL_DIR"])
        )

    # The steps of joining.

    def _find_manifest(self) -> Manifest:
        stored = self._directory.manifest()
        peer = self._peer
        if stored is not None and peer.run_id not in (None, stored.run_id):
            raise UserError(
                f"output directory {self._directory.path} belongs to run {stored.run_id}, not {peer.run_id}; "
                "choose another --output-dir"
            )
        if not peer.initial_peers and stored is None:
            if peer.run_id is not None:
                raise ConfigError("--run-id names a run to join, which needs --initial-peers")
            return self._found()
        if not peer.initial_peers and stored is not None:
            if self._config_is_explicit and not _same_run(self._founding_config, stored.run):
                raise UserError(
                    f"output directory {self._directory.path} belongs to run {stored.run_id}, whose configuration "
                    "differs from the given one; choose another --output-dir, or leave --config out to go on"
                )
            self._console.say("going on with the run of this output directory")
            self._initial_peers = self._reach_known_peers()
            return stored
        self._console.say(f"connecting to {len(peer.initial_peers)} initial peer(s)")
        connected = self._ask(
            "bootstrap",
            peer.bootstrap_timeout_s + 30.0,
            maddrs=list(peer.initial_peers),
            timeout_s=peer.bootstrap_timeout_s,
        )
        expected = peer.run_id or (stored.run_id if stored is not None else None)
        try:
            manifest: Manifest = self._ask(
                "fetch_manifest",
                peer.bootstrap_timeout_s + 60.0,
                peers=connected,
                run_id=expected,
                timeout_s=peer.bootstrap_timeout_s,
            )
        except ManifestError as exc:
            if stored is not None and peer.run_id is None:
                raise UserError(
                    f"output directory {self._directory.path} belongs to run {stored.run_id}: {exc}; "
                    "choose another --output-dir"
                ) from exc
            raise
        if self._config_is_explicit and not _same_run(self._founding_config, manifest.run):
            raise ConfigError(
                f"the `run` section of the configuration differs from that of {manifest.run_id}; a joiner takes "
                "the run's settings from the swarm: leave the section out"
            )
        return manifest

    def _reach_known_peers(self) -> list[str]:
        """Addresses of peers of an earlier stay that answer now: the run may have gone on without this peer.

        Without them a founder that comes back would go on alone, beside the swarm that it founded.
        """
        known = self._directory.known_peers()
        if not known:
            return []
        try:
            self._ask("bootstrap", _COMMAND_TIMEOUT_S, maddrs=known, timeout_s=_KNOWN_PEERS_TIMEOUT_S)
        except BootstrapError:
            self._console.say("none of the peers of last time answers: this peer begins alone, others can join it")
            return []
        return known

    def _remember_peers(self) -> None:
        self._directory.remember_peers(self._network.ask("peer_maddrs", _COMMAND_TIMEOUT_S))

    def _found(self) -> Manifest:
        if self._founding_config is None:
            raise ConfigError("founding a run needs a configuration with a `run` section")
        run = self._founding_config
        parse_experts(self._peer.experts, run.model.num_experts)  # before anything takes long
        tokenizer = load_tokenizer(run.tokenizer.name)
        if run.tokenizer.digest is None:
            run = dataclasses.replace(run, tokenizer=dataclasses.replace(run.tokenizer, digest=tokenizer.digest))
        _check_vocabulary(run, tokenizer)
        model = build_model(run.model.type, run.model.settings, run.training.seed, "meta", on_meta=True)
        self._console.say("founding a new run")
        return found_run(run, layout_of(model).digest, self._identity)

    def _open_data(self, run: RunConfig, tokenizer: Tokenizer) -> _Opened:
        self._console.say(f"opening data: {self._peer.data}")
        files = open_source(self._peer.data, tokenizer)
        # By default every identity has an order of its own, and keeps it.
        own_seed = int.from_bytes(blake3(self._identity.peer_id.encode()).digest()[:6], "little")
        sampler = Sampler(
            TokenStream.open(files, tokenizer),
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
        return _Opened(sampler, evaluation)

    def _load_checkpoint(self, manifest: Manifest, layout: Layout, reference: SharedVector) -> Checkpoint | None:
        checkpoint, complaints = load_newest(
            self._directory.checkpoints, manifest.run_id, self._identity.peer_id, layout, set_aside=True
        )
        self._lost_checkpoints = bool(complaints) and checkpoint is None
        for complaint in complaints:
            self._console.say(f"passing over a checkpoint: {complaint}")
            self._metrics.write("fault", kind="checkpoint", peer=self._identity.peer_id, detail=complaint)
        if checkpoint is not None:
            checkpoint.reference(layout, reference.values_N)
            self._console.say(f"checkpoint of round {checkpoint.meta.round} found")
        return checkpoint

    def _obtain_reference(self, manifest: Manifest, checkpoint: Checkpoint | None) -> ReferenceTable:
        if checkpoint is not None:
            meta = checkpoint.meta
            digest = self._ask("adopt", _COMMAND_TIMEOUT_S, table_round=meta.round, versions=tuple(meta.versions))
            if digest != meta.reference_digest:
                raise UserError(f"{checkpoint.path} does not have the digest that it was written with")
        elif self._lost_checkpoints and not self._initial_peers:
            raise CheckpointError(
                f"none of the checkpoints in {self._directory.checkpoints} can be used, and no peer of the run was "
                "found; give --initial-peers, or a new --output-dir to found another run"
            )
        elif manifest.founder == self._identity.peer_id:
            num_blocks = manifest.run.model.num_experts + 1
            self._ask("adopt", _COMMAND_TIMEOUT_S, table_round=0, versions=(0,) * num_blocks)
        view: SwarmView = self._ask("view", _COMMAND_TIMEOUT_S)
        if not self._initial_peers and checkpoint is None and manifest.founder != self._identity.peer_id:
            raise UserError(
                f"output directory {self._directory.path} has no checkpoint to go on from, and no peer of the run was "
                "found; give --initial-peers"
            )
        if self._initial_peers and (view.num_peers or checkpoint is None):
            self._announce("syncing")
            self._console.say("fetching the swarm's reference")
            started = time.monotonic()
            try:
                report: TransferReport = self._ask("download")
            except RoundError as exc:
                raise BootstrapError(f"{exc}; try again when the swarm is reachable") from exc
            seconds = time.monotonic() - started
            self._metrics.write(
                "sync",
                round=report.round,
                seconds=seconds,
                payload_bytes=report.payload_bytes,
                donors=dict(report.chunks_by_donor),
            )
            self._console.say(
                f"round {report.round}: {report.payload_bytes / 1e6:.1f} MB from "
                f"{len(report.chunks_by_donor)} donor(s) in {seconds:.1f} s, verified"
            )
        table: ReferenceTable = self._ask("table", _COMMAND_TIMEOUT_S)
        return table

    def _claim(
        self, run: RunConfig, layout: Layout, wanted: ExpertsWanted, checkpoint: Checkpoint | None
    ) -> tuple[int, ...]:
        """Takes leases; "auto" means as many as the run says, if they fit."""
        choice: int | tuple[int, ...]
        if checkpoint is not None and wanted in ("auto", len(checkpoint.meta.held)):
            choice = tuple(checkpoint.meta.held)
        elif wanted == "auto":
            choice = experts_that_fit(layout, run.experts_per_peer, self._device)
            if choice < run.experts_per_peer:
                self._console.say(f"{choice} instead of {run.experts_per_peer} experts: more do not fit in memory")
        else:
            choice = wanted
        held: tuple[int, ...] = self._ask("claim", _COMMAND_TIMEOUT_S, experts=choice)
        return held

    def _announce(self, state: Any) -> None:
        self._status.phase = state
        self._ask(
            "set_presence",
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

    def _wait_for_peers(self) -> None:
        wanted = self._peer.wait_for_peers
        if wanted <= 1:
            return
        self._announce("waiting")
        shown = 0
        while not self._stop.is_set():
            view: SwarmView = self._ask("view", _COMMAND_TIMEOUT_S)
            here = view.num_peers + 1
            if here >= wanted:
                self._announce("training")
                self._await_training(wanted - 1)
                return
            if here != shown:
                shown = here
                self._console.say(f"waiting for peers: {here} of {wanted}")
            self._stop.wait(0.5)

    def _await_training(self, others: int) -> None:
        """Gives the others the moment they need to see that all are there, so that nobody begins alone."""
        deadline = time.monotonic() + _BARRIER_S
        while not self._stop.is_set() and time.monotonic() < deadline:
            view: SwarmView = self._ask("view", _COMMAND_TIMEOUT_S)
            if view.num_training >= others:
                return
            self._stop.wait(0.2)

    # Telling the user.

    def _tell_how_to_join(self, manifest: Manifest, maddrs: list[str]) -> None:
        if not maddrs:
            return
        self._console.say("others join with (on this machine with an --output-dir of their own):")
        best = best_first(maddrs)[0]
        self._console.command(
            shlex.join([interpreter(), "-m", "spes_swarm.join", "--initial-peers", best, "--run-id", manifest.run_id])
        )

    def _say_round(self) -> None:
        if self._console.is_terminal:
            return
        status = self._status
        loss = "-" if status.loss is None else f"{status.loss:.4f}"
        evaluated = "-" if status.eval_loss is None else f"{status.eval_loss:.4f}"
        self._console.say(
            f"round {status.round}: {status.peers} peers, loss {loss}, eval loss {evaluated}, "
            f"{status.tokens_per_second:,.0f} tokens/s, {status.round_seconds:.1f} s, {status.round_megabytes:.2f} MB"
        )


def _same_run(given: RunConfig | None, run: RunConfig) -> bool:
    """Whether a configuration file describes this run; the founder has filled in the tokenizer's digest."""
    if given is None:
        return True
    digest = given.tokenizer.digest or run.tokenizer.digest
    return dataclasses.replace(given, tokenizer=dataclasses.replace(given.tokenizer, digest=digest)) == run


def _tokenizer_of(run: RunConfig) -> Tokenizer:
    tokenizer = load_tokenizer(run.tokenizer.name)
    if run.tokenizer.digest is not None and tokenizer.digest != run.tokenizer.digest:
        raise ManifestError(
            f"tokenizer {run.tokenizer.name!r} on this machine is not the one that the run uses "
            f"(digest {tokenizer.digest[:12]}, expected {run.tokenizer.digest[:12]})"
        )
    _check_vocabulary(run, tokenizer)
    return tokenizer


def _check_vocabulary(run: RunConfig, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"tokenizer {run.tokenizer.name!r} has {tokenizer.vocab_size} tokens, but the model's vocabulary only "
            f"{run.model.vocab_size}: raise run.model.settings.vocab_size or choose another tokenizer"
        )
