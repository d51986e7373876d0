"""Where a peer's reference comes from when it joins.

The first of: its own checkpoint; the publication that the user names; for the founder of a run, initial weights from
the run's seed or an existing model. A newer reference is fetched from other peers. A publication is one more donor of
the blocks that have not changed since.

Shapes: N elements of the flat vector.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace

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
from spes_swarm.metrics import events
from spes_swarm.model.initial_weights import load_initial_reference
from spes_swarm.model.sparse_model import build_model, flat_from_model
from spes_swarm.network.transfer.partial_reference import PartialReference
from spes_swarm.peer.initial_model import InitialModel
from spes_swarm.peer.joining.context import SessionContext
from spes_swarm.peer.joining.run_finder import FoundRun
from spes_swarm.port.commands import COMMAND_TIMEOUT_S, Commands
from spes_swarm.protocol.consensus.layout import Block, Layout
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.consensus.reference import ReferenceTable, chunk_digest, chunks_of
from spes_swarm.publishing.source import PublicationSource, another_revision
from spes_swarm.storage.checkpoint import Checkpoint, load_newest


@dataclass(frozen=True, kw_only=True)
class _Content:
    """What the reference contains before other peers are asked."""

    round: int
    versions: tuple[int, ...]
    lineage: Lineage
    swarm_tokens: int
    digest: str | None  # expected; None: any
    origin: str  # for the message if the digest differs


@dataclass(frozen=True)
class Stored:
    """What this peer has found on its own machine."""

    checkpoint: Checkpoint | None
    content: _Content | None  # of the reference; None: nothing yet
    lost_checkpoints: bool  # there are some, and none can be used


@dataclass(frozen=True)
class StartingReference:
    """The swarm's reference, in the memory of this peer."""

    table: ReferenceTable
    checkpoint: Checkpoint | None  # this peer's own, which may be older


@dataclass(frozen=True)
class StartingPoint:
    """Finds a reference to start from; writes `sync`, `from_hub`, `hub_blocks` and `fault` events."""

    context: SessionContext
    found: FoundRun
    layout: Layout
    reference_N: FloatArray

    def fill(self) -> Stored:
        """Fills the reference from this peer's checkpoint or initial weights.

        A publication is used later, by `obtain`.

        Raises:
            UserError: the checkpoint or the initial weights cannot be used, or nobody could join this peer.
            LeftEarlyError: the run is over.
        """
        found, context = self.found, self.context
        checkpoint, complaints = load_newest(
            context.directory.checkpoints, found.manifest.run_id, context.identity.peer_id, self.layout, set_aside=True
        )
        for complaint in complaints:
            self._fault("checkpoint", complaint, f"skipping a checkpoint: {complaint}")
        content = None
        if checkpoint is not None:
            context.console.say(f"checkpoint of round {checkpoint.meta.round} found")
            content = self._load_checkpoint(checkpoint)
        elif found.source is None and found.manifest.founder == context.identity.peer_id and not complaints:
            content = self._load_initial_weights()
        context.leave_if_over(found.manifest, checkpoint.meta.round if checkpoint is not None else 0)
        context.leave_if_over(found.manifest, found.source.publication.round if found.source is not None else 0)
        if context.peer.client_mode and not found.initial_peers:
            raise BootstrapError(
                "no peer of the last session answers, and with --client-mode no peer could join this one: "
                "start again when one of them is running, give --initial-peers, or leave out --client-mode"
            )
        return Stored(checkpoint, content, lost_checkpoints=bool(complaints) and checkpoint is None)

    def _load_checkpoint(self, checkpoint: Checkpoint) -> _Content:
        checkpoint.reference(self.layout, self.reference_N)
        meta = checkpoint.meta
        return _Content(
            round=meta.round,
            versions=tuple(meta.versions),
            lineage=Lineage.from_lists(meta.commits, bytes.fromhex(meta.marks)),
            swarm_tokens=meta.swarm_tokens,
            digest=meta.reference_digest,
            origin=str(checkpoint.path),
        )

    def _load_publication(self, source: PublicationSource) -> _Content:
        """Starts from the publication, as no peer has a newer reference."""
        started = time.monotonic()
        try:
            source.load(self.reference_N)
        except PublicationError as exc:
            raise PublicationError(f"{exc}; {another_revision(self.context.peer.from_hub)}") from exc
        seconds = time.monotonic() - started
        loaded = source.publication
        self.context.metrics.write(events.FromHub(round=loaded.round, digest=loaded.digest, seconds=seconds))
        self.context.console.say(
            f"round {loaded.round}: {self.reference_N.nbytes / 1e6:.1f} MB in {seconds:.1f} s, verified"
        )
        return _Content(
            round=loaded.round,
            versions=tuple(loaded.versions),
            lineage=Lineage({}),
            swarm_tokens=loaded.tokens or 0,
            digest=loaded.digest,
            origin="the publication",
        )

    def _take_blocks(self, source: PublicationSource, announce_syncing: Callable[[], None]) -> bool:
        """Uses the publication as one more donor; returns False if no other peer has a reference as new."""
        if not self.found.initial_peers or not self._num_others():
            return False
        announce_syncing()
        table = self.context.ask(Commands.swarm_table, None)
        if table is None or table.round < source.publication.round:
            return False
        pairs = zip(source.publication.blocks, table.digests, strict=False)
        same = [index for index, (block, digest) in enumerate(pairs) if bytes.fromhex(block.digest) == digest]
        if not same:
            self.context.console.say("every published block has changed since; fetching everything from peers")
            return True
        with closing(PartialReference(self.context.directory.partial_reference)) as kept:
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
                if self.context.stop.is_set():
                    raise LeftEarlyError("stopped while joining")
        except (HubError, PublicationError) as exc:  # peers have these blocks, too
            problem = str(exc)
        seconds = time.monotonic() - started
        if problem is not None:
            self._fault("from_hub", problem, f"fetching no more from the publication: {problem}")
        self.context.metrics.write(events.HubBlocks(blocks=fetched, payload_bytes=payload_bytes, seconds=seconds))
        self.context.console.say(
            f"{payload_bytes / 1e6:.1f} MB of unchanged blocks from the publication in {seconds:.1f} s"
        )

    def _load_initial_weights(self) -> _Content:
        run, name = self.found.manifest.run, self.context.peer.initial_weights
        model = run.model
        if model.initial_weights is None:
            drawn = build_model(model.type, model.settings, run.training.seed, "cpu", init_cutoff=model.init_cutoff)
            flat_from_model(drawn, self.layout, out_N=self.reference_N)
        elif name is None:
            raise ConfigError("the run started from an existing model: give it with --initial-weights")
        else:
            empty = build_model(model.type, model.settings, seed=0, device="cpu", on_meta=True)
            directory = InitialModel.find(name).weights(self.context.console.say)
            if load_initial_reference(directory, self.layout, self.reference_N, empty) != model.initial_weights:
                raise ConfigError(f"{name} does not have the weights that the run started from")
        versions = (0,) * (model.num_experts + 1)
        return _Content(round=0, versions=versions, lineage=Lineage({}), swarm_tokens=0, digest=None, origin="")

    def obtain(self, stored: Stored, announce_syncing: Callable[[], None]) -> StartingReference:
        """Adopts what `fill` has put into the reference, then fetches the swarm's reference if that is newer.

        `announce_syncing` announces a download.

        Raises:
            UserError: there is no reference to start from.
        """
        content, source, initial_peers = stored.content, self.found.source, self.found.initial_peers
        directory, console = self.context.directory, self.context.console
        if source is not None and content is None and not self._take_blocks(source, announce_syncing):
            content = self._load_publication(source)
        if content is not None:
            self._adopt(content)
        elif stored.lost_checkpoints and not initial_peers:
            raise CheckpointError(
                f"none of the checkpoints in {directory.checkpoints} can be used, and no peer of the run was "
                "found; give --initial-peers, or a new --output-dir to found another run"
            )
        elif not initial_peers:
            raise UserError(
                f"output directory {directory.path} has no checkpoint to resume from, and no peer of the run was "
                "found; give --initial-peers, or --from-hub if it was published"
            )
        if initial_peers and (content is None or self._num_others()):
            announce_syncing()
            console.say("fetching the swarm's reference")
            try:
                if not self._download(if_newer=content is not None):
                    console.say("no peer has a newer reference than this one")
            except BootstrapError as exc:
                if source is None or content is not None:
                    raise
                console.say(f"{exc}; starting from the publication")
                self._adopt(self._load_publication(source))
        own = self.context.ask(Commands.table, COMMAND_TIMEOUT_S)
        if source is not None and own.round < source.publication.round:
            raise UserError(
                f"this peer's reference is of round {own.round}, but round {source.publication.round} is published: "
                "give --initial-peers to catch up with the swarm, or a new --output-dir to start from the publication"
            )
        with suppress(OSError):
            directory.partial_reference.unlink(missing_ok=True)
        return StartingReference(own, stored.checkpoint)

    def newest(self, reference: StartingReference) -> StartingReference:
        """Fetches the swarm's reference again if it is newer than this one.

        Raises:
            UserError: other peers have one, but do not deliver it.
            LeftEarlyError: the run is over.
        """
        self._download(if_newer=True)
        table = self.context.ask(Commands.table, COMMAND_TIMEOUT_S)
        self.context.leave_if_over(self.found.manifest, table.round)
        return replace(reference, table=table)

    def _num_others(self) -> int:
        view = self.context.ask(Commands.view, COMMAND_TIMEOUT_S)
        return view.num_peers

    def _adopt(self, content: _Content) -> None:
        digest = self.context.ask(
            Commands.adopt,
            COMMAND_TIMEOUT_S,
            table_round=content.round,
            versions=content.versions,
            lineage=content.lineage,
            swarm_tokens=content.swarm_tokens,
        )
        if content.digest not in (None, digest):
            raise UserError(f"{content.origin} does not match the digest that it was written with")

    def _download(self, *, if_newer: bool) -> bool:
        """Fetches the reference from other peers, with `if_newer` only a newer one; returns False if there is none."""
        started = time.monotonic()
        # A peer with a reference fetches only chunks that differ; only a newcomer would have to start from scratch.
        partial = None if if_newer else self.context.directory.partial_reference
        try:
            report = self.context.ask(Commands.download, None, if_newer=if_newer, partial=partial)
        except TransferError as exc:
            raise BootstrapError(f"{exc}; try again when the swarm is reachable") from exc
        if report is None:
            return False
        seconds = time.monotonic() - started
        self.context.metrics.write(
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
        self.context.console.say(
            f"round {report.round}: {report.payload_bytes / 1e6:.1f} MB from "
            f"{plural(len(report.chunks_by_donor), 'donor')} in {seconds:.1f} s, verified"
            + (f"; {report.resumed_bytes / 1e6:.1f} MB were already on disk" if report.resumed_bytes else "")
        )
        return True

    def _fault(self, kind: str, detail: str, line: str) -> None:
        self.context.console.say(line)
        self.context.metrics.write(events.Fault(kind=kind, peer=self.context.identity.peer_id, detail=detail))


def _has(kept: PartialReference, block: Block, table: ReferenceTable) -> bool:
    """Returns True if an earlier attempt has stored a whole block with the digests of `table`."""
    for chunk, digest in zip(chunks_of(block), table.chunk_digests[block.index], strict=True):
        values_N = kept.read(chunk)
        if values_N is None or chunk_digest(values_N) != digest:
            return False
    return True
