"""Where a peer's reference comes from when it joins.

The first of: its own checkpoint; the publication that the user names; for the founder of a run, initial weights from
the run's seed or an existing model. A newer reference is fetched from other peers. A publication is one more donor of
the blocks that have not changed since.

Shapes: N elements of the flat vector.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import (
    BootstrapError,
    CheckpointError,
    ConfigError,
    HubError,
    LeftEarlyError,
    PublicationError,
    TransferError,
    UserError,
)
from spes_swarm.base.wording import plural
from spes_swarm.config.manifest import Manifest
from spes_swarm.config.peer import PeerConfig
from spes_swarm.metrics import events
from spes_swarm.model.initial_weights import load_initial_reference
from spes_swarm.model.sparse_model import build_model, flat_from_model
from spes_swarm.network.transfer.partial_reference import PartialReference
from spes_swarm.peer.initial_model import InitialModel
from spes_swarm.peer.panel import PeerConsole
from spes_swarm.port.commands import COMMAND_TIMEOUT_S, Ask, Commands
from spes_swarm.protocol.consensus.layout import Block, Layout
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.consensus.reference import ReferenceTable, chunk_digest, chunks_of
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.publishing.source import PublicationSource, another_revision
from spes_swarm.storage.checkpoint import Checkpoint, load_newest
from spes_swarm.storage.metrics_file import Metrics
from spes_swarm.storage.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class _Filled:
    """Content of the reference before other peers are asked."""

    round: int
    versions: tuple[int, ...]
    lineage: Lineage
    swarm_tokens: int
    digest: str | None  # expected; None: any
    origin: str  # for the message if the digest differs


@dataclass(eq=False)
class StartingPoint:
    """Finds a reference to start from; writes `sync`, `from_hub`, `hub_blocks` and `fault` events."""

    peer: PeerConfig
    directory: RunDirectory
    identity: Identity
    manifest: Manifest
    ask: Ask  # sends a command to the network process
    stop: threading.Event  # set when the user wants to leave
    console: PeerConsole
    metrics: Metrics
    _filled: _Filled | None = field(default=None, init=False)
    # Used once it is known whether other peers are present.
    _source: PublicationSource | None = field(default=None, init=False)
    _lost_checkpoints: bool = field(default=False, init=False)

    def fill(self, reference_N: FloatArray, layout: Layout, source: PublicationSource | None) -> Checkpoint | None:
        """Fills the reference from this peer's checkpoint or initial weights; returns the checkpoint, if any.

        A publication is used later, by `obtain`.

        Raises:
            UserError: the checkpoint or the initial weights cannot be used.
        """
        checkpoint = self._load_checkpoint(layout)
        if checkpoint is not None:
            checkpoint.reference(layout, reference_N)
            meta = checkpoint.meta
            self._filled = _Filled(
                round=meta.round,
                versions=tuple(meta.versions),
                lineage=Lineage.from_lists(meta.commits, bytes.fromhex(meta.marks)),
                swarm_tokens=meta.swarm_tokens,
                digest=meta.reference_digest,
                origin=str(checkpoint.path),
            )
        self._source = source
        if (
            checkpoint is None
            and source is None
            and self.manifest.founder == self.identity.peer_id
            and not self._lost_checkpoints
        ):
            self._fill_with_initial_weights(reference_N, layout)
        return checkpoint

    def _load_checkpoint(self, layout: Layout) -> Checkpoint | None:
        checkpoint, complaints = load_newest(
            self.directory.checkpoints, self.manifest.run_id, self.identity.peer_id, layout, set_aside=True
        )
        self._lost_checkpoints = bool(complaints) and checkpoint is None
        for complaint in complaints:
            self.console.say(f"skipping a checkpoint: {complaint}")
            self.metrics.write(events.Fault(kind="checkpoint", peer=self.identity.peer_id, detail=complaint))
        if checkpoint is not None:
            self.console.say(f"checkpoint of round {checkpoint.meta.round} found")
        return checkpoint

    def _load_publication(self, source: PublicationSource, reference_N: FloatArray) -> _Filled:
        """Starts from the publication, as no peer has a newer reference."""
        started = time.monotonic()
        try:
            source.load(reference_N)
        except PublicationError as exc:
            raise PublicationError(f"{exc}; {another_revision(self.peer.from_hub)}") from exc
        seconds = time.monotonic() - started
        loaded = source.publication
        self.metrics.write(events.FromHub(round=loaded.round, digest=loaded.digest, seconds=seconds))
        self.console.say(f"round {loaded.round}: {reference_N.nbytes / 1e6:.1f} MB in {seconds:.1f} s, verified")
        return _Filled(
            round=loaded.round,
            versions=tuple(loaded.versions),
            lineage=Lineage({}),
            swarm_tokens=loaded.tokens or 0,
            digest=loaded.digest,
            origin="the publication",
        )

    def _take_blocks(
        self, source: PublicationSource, initial_peers: list[str], announce_syncing: Callable[[], None]
    ) -> bool:
        """Uses the publication as one more donor; returns False if no other peer has a reference as new."""
        if not initial_peers or not self._num_others():
            return False
        announce_syncing()
        table = self.ask(Commands.swarm_table, None)
        if table is None or table.round < source.publication.round:
            return False
        pairs = zip(source.publication.blocks, table.digests, strict=False)
        same = [index for index, (block, digest) in enumerate(pairs) if bytes.fromhex(block.digest) == digest]
        if not same:
            self.console.say("every published block has changed since; fetching everything from peers")
            return True
        with closing(PartialReference(self.directory.partial_reference)) as kept:
            self._fetch_blocks(source, same, table, kept)
        return True

    def _fetch_blocks(
        self, source: PublicationSource, same: list[int], table: ReferenceTable, kept: PartialReference
    ) -> None:
        """Stores the published blocks `same`, whose digests most donors announce, where the download finds them."""
        started = time.monotonic()
        fetched: list[int] = []
        payload_bytes = 0
        problem: str | None = None
        try:
            layout = source.layout
            for index, values_N in source.blocks(i for i in same if not _has(kept, layout.blocks[i], table)):
                block = layout.blocks[index]
                for chunk in chunks_of(block):
                    kept.write(chunk, values_N[chunk.start - block.start :][: chunk.size])
                problem = kept.error
                if problem is not None:
                    break
                fetched.append(index)
                payload_bytes += values_N.nbytes
                if self.stop.is_set():
                    raise LeftEarlyError("stopped while joining")
        except (HubError, PublicationError) as exc:  # peers have these blocks, too
            problem = str(exc)
        seconds = time.monotonic() - started
        if problem is not None:
            self.console.say(f"fetching no more from the publication: {problem}")
            self.metrics.write(events.Fault(kind="from_hub", peer=self.identity.peer_id, detail=problem))
        self.metrics.write(events.HubBlocks(blocks=fetched, payload_bytes=payload_bytes, seconds=seconds))
        self.console.say(f"{payload_bytes / 1e6:.1f} MB of unchanged blocks from the publication in {seconds:.1f} s")

    def _fill_with_initial_weights(self, reference_N: FloatArray, layout: Layout) -> None:
        model, name = self.manifest.run.model, self.peer.initial_weights
        wanted = model.initial_weights
        if wanted is None:
            seed = self.manifest.run.training.seed
            drawn = build_model(model.type, model.settings, seed, "cpu", init_cutoff=model.init_cutoff)
            flat_from_model(drawn, layout, out_N=reference_N)
        elif name is None:
            raise ConfigError("the run started from an existing model: give it with --initial-weights")
        else:
            empty = build_model(model.type, model.settings, seed=0, device="cpu", on_meta=True)
            directory = InitialModel.find(name).weights(self.console.say)
            if load_initial_reference(directory, layout, reference_N, empty) != wanted:
                raise ConfigError(f"{name} does not have the weights that the run started from")
        num_blocks = model.num_experts + 1
        self._filled = _Filled(
            round=0, versions=(0,) * num_blocks, lineage=Lineage({}), swarm_tokens=0, digest=None, origin=""
        )

    def obtain(
        self, reference_N: FloatArray, initial_peers: list[str], announce_syncing: Callable[[], None]
    ) -> ReferenceTable:
        """Adopts what `fill` has put into the reference, then fetches the swarm's reference if that is newer.

        `initial_peers` are those through which the swarm was found, `announce_syncing` announces a download.

        Raises:
            UserError: there is no reference to start from.
        """
        source = self._source
        if (
            source is not None
            and self._filled is None
            and not self._take_blocks(source, initial_peers, announce_syncing)
        ):
            self._filled = self._load_publication(source, reference_N)
        if self._filled is not None:
            self._adopt(self._filled)
        elif self._lost_checkpoints and not initial_peers:
            raise CheckpointError(
                f"none of the checkpoints in {self.directory.checkpoints} can be used, and no peer of the run was "
                "found; give --initial-peers, or a new --output-dir to found another run"
            )
        elif not initial_peers:
            raise UserError(
                f"output directory {self.directory.path} has no checkpoint to resume from, and no peer of the run was "
                "found; give --initial-peers, or --from-hub if it was published"
            )
        if initial_peers and (self._filled is None or self._num_others()):
            announce_syncing()
            self.console.say("fetching the swarm's reference")
            try:
                if not self.download(if_newer=self._filled is not None):
                    self.console.say("no peer has a newer reference than this one")
            except BootstrapError as exc:
                if source is None or self._filled is not None:
                    raise
                self.console.say(f"{exc}; starting from the publication")
                self._adopt(self._load_publication(source, reference_N))
        own = self.ask(Commands.table, COMMAND_TIMEOUT_S)
        if source is not None and own.round < source.publication.round:
            raise UserError(
                f"this peer's reference is of round {own.round}, but round {source.publication.round} is published: "
                "give --initial-peers to catch up with the swarm, or a new --output-dir to start from the publication"
            )
        with suppress(OSError):
            self.directory.partial_reference.unlink(missing_ok=True)
        return own

    def _num_others(self) -> int:
        view = self.ask(Commands.view, COMMAND_TIMEOUT_S)
        return view.num_peers

    def _adopt(self, filled: _Filled) -> None:
        digest = self.ask(
            Commands.adopt,
            COMMAND_TIMEOUT_S,
            table_round=filled.round,
            versions=filled.versions,
            lineage=filled.lineage,
            swarm_tokens=filled.swarm_tokens,
        )
        if filled.digest not in (None, digest):
            raise UserError(f"{filled.origin} does not match the digest that it was written with")

    def download(self, *, if_newer: bool) -> bool:
        """Fetches the reference from other peers, with `if_newer` only a newer one; returns False if there is none."""
        started = time.monotonic()
        # A peer with a reference fetches only chunks that differ; only a newcomer would have to start from scratch.
        partial = None if if_newer else self.directory.partial_reference
        try:
            report = self.ask(Commands.download, None, if_newer=if_newer, partial=partial)
        except TransferError as exc:
            raise BootstrapError(f"{exc}; try again when the swarm is reachable") from exc
        if report is None:
            return False
        seconds = time.monotonic() - started
        self.metrics.write(
            events.Sync(
                round=report.round,
                seconds=seconds,
                digest=report.digest,
                payload_bytes=report.payload_bytes,
                refetched_bytes=report.refetched_bytes,
                superseded_bytes=report.superseded_bytes,
                resumed_bytes=report.resumed_bytes,
                outdated_blocks=report.outdated_blocks,
                donors=report.chunks_by_donor,
                moved_on=report.moved_on,
            )
        )
        self.console.say(
            f"round {report.round}: {report.payload_bytes / 1e6:.1f} MB from "
            f"{plural(len(report.chunks_by_donor), 'donor')} in {seconds:.1f} s, verified"
            + (f"; {report.resumed_bytes / 1e6:.1f} MB were already on disk" if report.resumed_bytes else "")
        )
        return True


def _has(kept: PartialReference, block: Block, table: ReferenceTable) -> bool:
    """Returns True if an earlier attempt has stored a whole block with the digests of `table`."""
    for chunk, digest in zip(chunks_of(block), table.chunk_digests[block.index], strict=True):
        values_N = kept.read(chunk)
        if values_N is None or chunk_digest(values_N) != digest:
            return False
    return True
