"""Reads a published run back: its description, and the reference block by block.

    source = open_source("USER/REPO@round-000120")      # or "file:DIRECTORY", or without a revision
    source.manifest                                      # the run, certified by its id
    source.load(reference_N)                             # fills the flat vector, all of it verified
    for index, values_N in source.blocks([0, 3]): ...    # some blocks, fetching little else

Suffix: N elements of the flat vector.

Nothing is trusted that cannot be verified. The run id certifies the run's description; the caller compares it with the
id that it expects. Whole files are checked against their hashes in the publication manifest, blocks against their
digests, and the blocks' digests against the digest of the whole. The manifest does not prove that this is a reference
of the *swarm*: anyone with write access to the repository can publish another. A peer that joins a live run compares
the digests with those of its donors; a peer that continues a run without other peers trusts the repository's owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.decoding import MAX_TOKENIZER_BYTES
from spes_swarm.base.errors import PublicationError
from spes_swarm.base.wording import plural
from spes_swarm.config.manifest import Manifest
from spes_swarm.data.tokenizer import TOKENIZER_FILES, pack
from spes_swarm.model.saved_tensors import ITEM_BYTES, Piece, SavedTensor, pieces_by_block, saved_tensors
from spes_swarm.model.sparse_model import layout_of
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.consensus.reference import CHUNK_ELEMENTS, digest_of_values
from spes_swarm.publishing.directory import DirectoryFiles
from spes_swarm.publishing.export import empty_model, split_blocks
from spes_swarm.publishing.publication import PublishedFile
from spes_swarm.publishing.repository import RepositoryFiles
from spes_swarm.publishing.target import parse_location
from spes_swarm.publishing.tensor_file import StoredTensor, map_tensors, read_header

# Largest gap between two wanted ranges that is fetched along with them instead of split into two requests.
_GAP_BYTES = 256 * 1024
_REQUEST_BYTES = 64 << 20  # a single tensor may be larger
# Allowance in the weight files for headers and buffers.
_OVERHEAD = 1.1
_OVERHEAD_BYTES = 64 << 20


def open_source(location: str, expected_run_id: str | None = None) -> PublicationSource:
    """Finds a publication and verifies its manifest; no weights are fetched yet.

    The location is USER/REPO or file:DIRECTORY, optionally with @REVISION (a tag or a commit; default: the newest). Any
    run but `expected_run_id` is rejected.

    Raises:
        ConfigError: `location` is malformed.
        HubError: the location cannot be reached, or refuses access.
        PublicationError: there is no publication, or it is invalid, or of another run.
    """
    place = parse_location(location, with_revision=True)
    files: DirectoryFiles | RepositoryFiles
    if place.path is not None:
        files = DirectoryFiles(place.path, place.revision)
    else:
        files = RepositoryFiles(str(place.repo_id), place.revision)
    try:
        source = PublicationSource(files)
    except PublicationError as exc:
        raise PublicationError(f"{exc}; {another_revision(location)}") from exc
    if expected_run_id is not None and source.manifest.run_id != expected_run_id:
        raise PublicationError(f"{files.label} is of run {source.manifest.run_id}, not {expected_run_id}")
    return source


def another_revision(location: str | None) -> str:
    """Returns advice on a damaged publication."""
    which = "an earlier" if location is None or "@" not in location else "another"
    return f"{which} round may be intact: name it, as in ...@round-000120"


class PublicationSource:
    """One published revision."""

    def __init__(self, files: DirectoryFiles | RepositoryFiles) -> None:
        self._files = files
        self.publication = files.publication()  # the publication manifest
        self.revision = files.revision  # name of exactly this revision

    @property
    def manifest(self) -> Manifest:
        """The run's manifest, verified."""
        return self.publication.manifest

    @cached_property
    def layout(self) -> Layout:
        """The layout of the run's model.

        Raises:
            ConfigError: this version of transformers cannot build the model.
            PublicationError: this version of transformers lays the model out differently.
        """
        return self._model[0]

    @cached_property
    def _model(self) -> tuple[Layout, dict[str, SavedTensor]]:
        model = empty_model(self.manifest.run)
        layout = layout_of(model)
        if layout.digest != self.publication.layout or len(layout.blocks) != len(self.publication.blocks):
            raise PublicationError(f"{self._files.label}: this version of transformers lays the model out differently")
        return layout, saved_tensors(model, layout)

    def tokenizer(self) -> bytes | None:
        """Returns the tokenizer's files, packed; None if there is none, or it is too large.

        Raises:
            HubError: a file cannot be fetched or stored.
            PublicationError: a file is not what was published.
        """
        files = [file for file in self.publication.files if file.name in TOKENIZER_FILES]
        if not files or sum(file.size for file in files) > MAX_TOKENIZER_BYTES:
            return None
        return pack({file.name: self._files.fetch(file).read_bytes() for file in files})

    def load(self, reference_N: FloatArray) -> None:
        """Fetches all weight files and fills the flat reference (N,), tensor by tensor; all blocks are verified.

        Cached files are not fetched. After an error `reference_N` is partly overwritten.

        Raises:
            HubError: a file cannot be fetched or stored.
            PublicationError: a file is not what was published.
            ValueError: `reference_N` is not fp32 of the model's size.
        """
        layout, expected = self._model
        if reference_N.dtype != np.float32 or reference_N.shape != (layout.num_elements,):
            raise ValueError(f"expected float32 of shape ({layout.num_elements},)")
        self._check_sizes()
        blocks = split_blocks(layout, reference_N)
        missing = {name: tensor for name, tensor in expected.items() if tensor.pieces}
        for file in self.publication.weights:
            for name, values in map_tensors(self._files.fetch(file), file.name).items():
                if name in missing:
                    self._fill(blocks, missing.pop(name), values)
        if missing:
            what = f"{plural(len(missing), 'tensor')} missing, the first of them {min(missing)}"
            raise PublicationError(f"{self._files.label}: {what}")
        for index, block_N in enumerate(blocks):
            self._verify(index, block_N)

    def blocks(self, wanted: Iterable[int]) -> Iterator[tuple[int, FloatArray]]:
        """Fetches single blocks; yields their indices and verified values.

        If the server supports ranges, only their parts of the files are fetched.

        A newcomer can use a block from here if peers have announced the same digest for it
        (`publication.blocks[index]`). An expert's ranges are short, and there is at least one per layer.

        Raises:
            HubError: a block cannot be fetched.
            PublicationError: a block is not what was published.
            ValueError: there is no such block.
        """
        layout, expected = self._model
        by_block = pieces_by_block(expected)
        for index in wanted:
            if not 0 <= index < len(layout.blocks):
                raise ValueError(f"block {index} of {len(layout.blocks)}")
            values_N = np.empty(layout.blocks[index].size, dtype=np.float32)
            wanted_pieces = [self._locate(tensor, number) for tensor, number in by_block[index]]
            for piece, data in self._read(wanted_pieces):
                piece.view(values_N)[...] = np.frombuffer(data, dtype="<f4").reshape(piece.shape)
            self._verify(index, values_N)
            yield index, values_N

    # Internals.

    def _check_sizes(self) -> None:
        """Rejects weight files much larger than the model, before they are fetched."""
        total = sum(file.size for file in self.publication.weights)
        if total > _OVERHEAD * ITEM_BYTES * self.layout.num_elements + _OVERHEAD_BYTES:
            raise PublicationError(f"{self._files.label}: the weight files are larger than the model")

    @cached_property
    def _stored(self) -> dict[str, tuple[PublishedFile, StoredTensor]]:
        """The location of each tensor, from the headers of the files."""
        self._check_sizes()
        found: dict[str, tuple[PublishedFile, StoredTensor]] = {}
        for file in self.publication.weights:
            header = read_header(partial(self._files.read, file), file.size, file.name)
            found.update({name: (file, stored) for name, stored in header.items()})
        return found

    def _locate(self, tensor: SavedTensor, number: int) -> _Wanted:
        """Returns the location of one of a tensor's pieces, which are stacked along its first dimension."""
        file, stored = self._stored.get(tensor.name, (None, None))
        if file is None or stored is None or stored.shape != tensor.shape:
            raise PublicationError(f"{self._files.label}: tensor {tensor.name} is missing or has another shape")
        piece = tensor.pieces[number]
        begin = stored.begin + number * ITEM_BYTES * piece.size
        return _Wanted(file, begin, begin + ITEM_BYTES * piece.size, piece)

    def _read(self, wanted: list[_Wanted]) -> Iterator[tuple[Piece, memoryview]]:
        """Yields the bytes of all these pieces; nearby ones are read in one request."""
        for group in _groups(wanted):
            first, end = group[0].begin, max(item.end for item in group)
            data = memoryview(self._files.read(group[0].file, first, end))
            for item in group:
                yield item.piece, data[item.begin - first : item.end - first]

    def _fill(self, blocks: list[FloatArray], tensor: SavedTensor, values: FloatArray) -> None:
        if values.shape != tensor.shape:
            raise PublicationError(f"{self._files.label}: {tensor.name} has shape {values.shape}, not {tensor.shape}")
        for index, piece in enumerate(tensor.pieces):
            piece.view(blocks[piece.block])[...] = values if len(tensor.pieces) == 1 else values[index]

    def _verify(self, index: int, values_N: FloatArray) -> None:
        starts = range(0, values_N.size, CHUNK_ELEMENTS)
        finite = all(np.isfinite(values_N[start : start + CHUNK_ELEMENTS]).all() for start in starts)
        if digest_of_values(values_N).hex() != self.publication.blocks[index].digest or not finite:
            name = self.layout.blocks[index].name
            raise PublicationError(f"{self._files.label}: block {name!r} does not have the published digest")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A piece with its byte range in a file."""

    file: PublishedFile
    begin: int
    end: int
    piece: Piece


def _groups(wanted: list[_Wanted]) -> Iterator[list[_Wanted]]:
    """Yields groups of nearby pieces of one file, in order, each small enough for one request."""
    group: list[_Wanted] = []
    for item in sorted(wanted, key=lambda item: (item.file.name, item.begin)):
        fits = (
            group
            and item.file == group[-1].file
            and item.begin - group[-1].end <= _GAP_BYTES
            and item.end - group[0].begin <= _REQUEST_BYTES
        )
        if group and not fits:
            yield group
            group = []
        group.append(item)
    if group:
        yield group
