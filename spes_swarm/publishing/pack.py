"""Creates a publication from a snapshot: the export, the card and, last, the publication manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spes_swarm.base.arguments import MAX_SHARD_SIZE
from spes_swarm.base.user_paths import new_directory
from spes_swarm.config.round_clock import RoundClock
from spes_swarm.protocol.admission.acts import Use
from spes_swarm.publishing.card import CardFacts, Results, results_of_metrics, write_card
from spes_swarm.publishing.plain import write_export
from spes_swarm.publishing.publication import (
    CARD_FILE,
    PICTURE_FILE,
    PUBLICATION_FILE,
    LossPoint,
    Publication,
    PublishedBlock,
    describe_acts,
    describe_file,
    describe_run,
    merge_history,
)
from spes_swarm.publishing.snapshot import Snapshot
from spes_swarm.storage.invitations import read_acts
from spes_swarm.storage.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about a run that a snapshot does not contain."""

    tokens: int | None = None  # trained on by all peers together
    peers: int | None = None  # that took part in the round
    history: Sequence[LossPoint] = ()
    acts: Sequence[bytes] = ()  # see protocol/admission/acts.py
    card: CardFacts = field(default_factory=CardFacts)


def facts_of(
    snapshot: Snapshot,
    output_dir: Path,
    results: Results | None = None,
    *,
    published: Sequence[LossPoint] = (),
    card: CardFacts | None = None,
) -> RunFacts:
    """Returns the facts about a peer's snapshot: `results`, by default those in the peer's event log.

    The history continues the `published` one.
    """
    known = results or results_of_metrics(RunDirectory(output_dir).metrics, snapshot.round)
    acts = read_acts(RunDirectory(output_dir).acts, snapshot.manifest)
    return RunFacts(
        tokens=known.tokens if known.tokens is not None else snapshot.tokens,
        peers=known.peers,
        history=merge_history(published, known.history),
        acts=sorted(acts, key=lambda data: isinstance(acts[data], Use)),  # if not all fit, revocations do
        card=card or CardFacts(),
    )


def pack(snapshot: Snapshot, destination: Path, facts: RunFacts, max_shard_size: str = MAX_SHARD_SIZE) -> Publication:
    """Writes a complete publication to a new or empty directory, which is complete when it exists.

    Raises:
        UserError: the destination cannot be written, a fact is invalid, or the tokenizer cannot be used.
    """
    with new_directory(destination) as directory:
        files = snapshot.manifest, snapshot.model, snapshot.blocks
        write_export(*files, directory, max_shard_size, snapshot.tokenizer)
        names = sorted(path for path in directory.iterdir() if path.name not in (CARD_FILE, PICTURE_FILE))
        publication = Publication(
            format=1,
            run_id=snapshot.manifest.run_id,
            run=describe_run(snapshot.manifest),
            round=snapshot.round,
            digest=snapshot.digest,
            layout=snapshot.layout.digest,
            blocks=[
                PublishedBlock(version=version, digest=digest.hex())
                for version, digest in zip(snapshot.versions, snapshot.digests, strict=True)
            ],
            tokens=facts.tokens,
            steps=RoundClock.of(snapshot.manifest.run).step_of(snapshot.round),
            peers=facts.peers,
            files=[describe_file(path) for path in names],
            history=[point for point in merge_history(facts.history) if point.round <= snapshot.round],
            acts=describe_acts(facts.acts),
        )
        write_card(directory, publication, facts.card)
        (directory / PUBLICATION_FILE).write_bytes(publication.to_bytes())
    return publication
