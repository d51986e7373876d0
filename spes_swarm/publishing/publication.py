"""`spes_swarm.json`, the publication manifest: lets a reader verify every byte and continue the run.

It contains the run's description, which the run id certifies, and the version and digest of each block of the
reference. It is the last file of a publication to appear: once it exists, all others do.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from spes_swarm.base.decoding import StrictModel, check_json, first_complaint
from spes_swarm.base.errors import ManifestError, ProtocolError, PublicationError
from spes_swarm.config.manifest import Manifest, open_manifest
from spes_swarm.protocol.admission.acts import MAX_ACT_BYTES
from spes_swarm.protocol.admission.membership import MAX_ACTS
from spes_swarm.protocol.consensus.reference import whole_digest
from spes_swarm.publishing.tensor_file import open_regular

PUBLICATION_FILE = "spes_swarm.json"
CARD_FILE, PICTURE_FILE = "README.md", "loss.png"
MAX_PUBLICATION_BYTES = 8 << 20
MAX_BLOCKS = 4097
MAX_FILES = 10_000
MAX_HISTORY = 10_000
# The largest manifest within the limits above has 160,000; 8 MiB of empty lists took 20 CPU-seconds and 4 GB.
_MAX_ELEMENTS = 200_000
_MAX_ACTS_CHARS = MAX_PUBLICATION_BYTES // 2
_READ_BYTES = 1 << 20

Count = Annotated[int, Field(ge=0, lt=1 << 62)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# One path component, safe on every system and never hidden.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
_Base64 = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]*={0,2}$", max_length=512 * 1024)]


_Act = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]*={0,2}$", max_length=4 * MAX_ACT_BYTES // 3 + 4)]


class PublishedFile(StrictModel):
    """A file that a reader needs, with its expected size and hash."""

    name: FileName
    size: Count  # bytes
    sha256: _Hex64


class PublishedBlock(StrictModel):
    """One block of the reference."""

    version: Count  # round of its last change
    digest: _Hex64  # BLAKE3, see protocol/consensus/reference.py


class LossPoint(StrictModel):
    """The loss on held-out text after a round."""

    round: Count
    tokens: Count | None  # trained on by all peers so far; None: unknown
    loss: NotNegative
    stderr: NotNegative | None = None  # standard error of the loss; None: unknown


class RunDescription(StrictModel):
    """The run's signed manifest, as sent between peers."""

    manifest: _Base64
    signature: _Base64


class Publication(StrictModel):
    """The content of `spes_swarm.json`.

    The card and its picture are not among `files`: people edit cards, and no reader relies on one.
    """

    format: Literal[1]
    run_id: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,80}$")]
    run: RunDescription
    round: Count
    digest: _Hex64  # of the whole reference
    layout: _Hex64  # of the parameters' layout
    blocks: Annotated[list[PublishedBlock], Field(min_length=2, max_length=MAX_BLOCKS)]
    tokens: Count | None  # trained on by all peers together; None: unknown
    steps: Count  # inner steps of the swarm: rounds times the run's inner steps
    peers: Count | None  # that took part in the round
    files: Annotated[list[PublishedFile], Field(min_length=1, max_length=MAX_FILES)]
    history: Annotated[list[LossPoint], Field(max_length=MAX_HISTORY)] = Field(default_factory=list)
    acts: Annotated[list[_Act], Field(max_length=MAX_ACTS)] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [file.name.lower() for file in self.files]
        if len(set(names)) != len(names) or PUBLICATION_FILE in names:
            raise ValueError("files: a duplicate name, or this file itself")
        if any(a.round >= b.round for a, b in zip(self.history, self.history[1:], strict=False)):
            raise ValueError("history: rounds are not in ascending order")
        digests = [bytes.fromhex(block.digest) for block in self.blocks]
        if whole_digest(self.versions, digests).hex() != self.digest:
            raise ValueError("digest: it does not match the blocks")
        return self

    @property
    def versions(self) -> list[int]:
        """For each block, the round of its last change."""
        return [block.version for block in self.blocks]

    @property
    def weights(self) -> list[PublishedFile]:
        """The files with the weights."""
        return [file for file in self.files if file.name.endswith(".safetensors")]

    @cached_property
    def manifest(self) -> Manifest:
        """The run's manifest, verified.

        Raises:
            PublicationError: it fails verification, or its run or layout differs from this file's.
        """
        try:
            wire = {key: base64.b64decode(value, validate=True) for key, value in self.run.model_dump().items()}
            manifest = open_manifest(wire, source=f"{PUBLICATION_FILE}", expected_run_id=self.run_id)
        except (ValueError, ManifestError) as exc:
            raise PublicationError(f"the publication's run cannot be used: {exc}") from exc
        if manifest.layout_digest != self.layout:
            raise PublicationError("the publication's model is not that of its run")
        return manifest

    def to_bytes(self) -> bytes:
        """The file's content; without acts it is readable by versions that do not know them."""
        return (self.model_dump_json(indent=1, exclude=None if self.acts else {"acts"}) + "\n").encode()

    @property
    def decoded_acts(self) -> list[bytes]:
        """The acts, not verified; those that are damaged are left out."""
        decoded = []
        for act in self.acts:
            with suppress(binascii.Error):
                decoded.append(base64.b64decode(act, validate=True))
        return decoded


def describe_acts(acts: Sequence[bytes]) -> list[str]:
    """Returns acts as they are published: the first ones, as many as fit."""
    encoded = [base64.b64encode(act).decode() for act in acts[:MAX_ACTS]]
    sizes = accumulate(map(len, encoded))
    return [act for act, size in zip(encoded, sizes, strict=True) if size <= _MAX_ACTS_CHARS]


def parse_publication(data: bytes, source: str) -> Publication:
    """Parses an untrusted publication manifest, and verifies the run's manifest inside; messages name the `source`.

    Raises:
        PublicationError: the content is invalid.
    """
    if len(data) > MAX_PUBLICATION_BYTES:
        raise PublicationError(f"{source}: {PUBLICATION_FILE} is larger than {MAX_PUBLICATION_BYTES >> 20} MiB")
    try:
        check_json(data, max_elements=_MAX_ELEMENTS)
        publication = Publication.model_validate_json(data)
    except ProtocolError as exc:
        raise PublicationError(f"{source}: {PUBLICATION_FILE} has more entries than any publication") from exc
    except ValidationError as exc:
        # The message may quote untrusted text, including terminal escapes.
        reason = first_complaint(exc).encode("ascii", "replace").decode()
        raise PublicationError(f"{source}: {PUBLICATION_FILE} is not readable by this version: {reason!r}") from exc
    except RecursionError as exc:
        raise PublicationError(f"{source}: {PUBLICATION_FILE} is malformed") from exc
    _ = publication.manifest
    return publication


def describe_file(path: Path, size: int | None = None) -> PublishedFile:
    """Returns name, size and hash of a regular file. Bytes appended after it was opened are not read.

    Raises:
        PublicationError: the path is not a regular file, or the file does not have `size` bytes.
        OSError: the file cannot be read.
    """
    with open_regular(path, size=size) as file:
        sha256 = hashlib.sha256()
        left = expected = os.fstat(file.fileno()).st_size
        while left and (data := file.read(min(left, _READ_BYTES))):
            sha256.update(data)
            left -= len(data)
    return PublishedFile(name=path.name, size=expected - left, sha256=sha256.hexdigest())


def read_part(path: Path, file: PublishedFile, begin: int, end: int) -> bytes:
    """Returns bytes of the published file at `path`.

    Raises:
        PublicationError: the path is not a regular file of the published size.
        OSError: the file cannot be read.
    """
    with open_regular(path, size=file.size) as opened:
        opened.seek(begin)
        data = opened.read(end - begin)
    if len(data) != end - begin:
        raise PublicationError(f"{file.name} is shorter than published")
    return data


def check_files(directory: Path, files: Sequence[PublishedFile], source: str) -> None:
    """Compares files on disk with their published sizes and hashes.

    Raises:
        PublicationError: one is missing, is not a regular file, or differs.
    """
    for expected in files:
        try:
            found = describe_file(directory / expected.name, expected.size)
        except OSError as exc:
            raise PublicationError(f"{source}: {expected.name}: {exc.strerror}") from exc
        except PublicationError as exc:
            raise PublicationError(f"{source}: {expected.name} is damaged: {exc}") from exc
        if found != expected:
            raise PublicationError(f"{source}: {expected.name} is damaged: it does not have the published hash")


def load_publication(directory: Path, source: str) -> Publication:
    """Reads the publication manifest in a directory, without checking the files that it lists.

    Raises:
        PublicationError: it is missing or invalid.
    """
    path = directory / PUBLICATION_FILE
    try:
        with open_regular(path, max_size=MAX_PUBLICATION_BYTES) as file:
            data = file.read(MAX_PUBLICATION_BYTES + 1)
    except OSError as exc:
        raise PublicationError(f"{source} has no {PUBLICATION_FILE}: {exc.strerror}") from exc
    except PublicationError as exc:
        raise PublicationError(f"{source}: {exc}") from exc
    return parse_publication(data, source)


def read_export(directory: Path, source: str = "the exported directory") -> Publication:
    """Reads the publication manifest in a directory, and checks the files that it lists.

    Raises:
        PublicationError: there is no publication, or it is damaged.
    """
    publication = load_publication(directory, source)
    check_files(directory, publication.files, source)
    return publication


def merge_history(*histories: Sequence[LossPoint]) -> list[LossPoint]:
    """Merges histories; later arguments take precedence. A history that grows too long is thinned out evenly."""
    points = {point.round: point for history in histories for point in history}
    merged = [points[number] for number in sorted(points)]
    while len(merged) > MAX_HISTORY:
        merged = [*merged[:-1][::2], merged[-1]]
    return merged
