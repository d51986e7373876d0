"""Reads from a repository of the Hub, always from one commit, even if another is published meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported lazily
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
    httpx,
)

from spes_swarm.base.errors import PublicationError
from spes_swarm.publishing.client import TIMEOUT, endpoint, hub_api, patiently, translate_hub_errors
from spes_swarm.publishing.publication import (
    MAX_PUBLICATION_BYTES,
    PUBLICATION_FILE,
    Publication,
    PublishedFile,
    describe_file,
    parse_publication,
    read_part,
)
from spes_swarm.publishing.target import MAIN

_PARTIAL_CONTENT = 206


class RemoteFiles:
    """The files of one revision of a repository; see `source.Files`.

    Raises (all calls):
        HubError: the Hub refuses or cannot be reached, or this machine's disk is full.
    """

    def __init__(self, repo_id: str, revision: str | None) -> None:
        self.label = repo_id
        api: HfApi = hub_api()
        with translate_hub_errors(repo_id):
            self.revision = str(patiently(lambda: api.repo_info(repo_id, revision=revision or MAIN)).sha)

    def publication(self) -> Publication:
        """Returns the verified publication manifest."""
        with translate_hub_errors(self.label):
            publication = patiently(lambda: read_publication(self.label, self.revision))
        if publication is None:
            raise PublicationError(
                f"{self.label} has no {PUBLICATION_FILE} at this revision: spes_swarm did not write it"
            )
        return publication

    def fetch(self, file: PublishedFile) -> Path:
        """Fetches and verifies a file; returns its path in the library's cache.

        Interrupted downloads are resumed, within this process. Nothing is fetched if the file on the server has another
        size.
        """
        with translate_hub_errors(self.label):
            if self._cached(file) is None:
                found_bytes = patiently(lambda: _size_of(self.label, self.revision, file.name))
                if found_bytes is not None and found_bytes != file.size:
                    raise PublicationError(
                        f"{self.label}: {file.name} has {found_bytes:,} bytes, but {file.size:,} were published"
                    )
            for again in (False, True):
                # The cache contains links, created by the library.
                path = Path(patiently(lambda again=again: self._download(file.name, again))).resolve()  # type: ignore[misc]
                found = describe_file(path)
                if (found.size, found.sha256) == (file.size, file.sha256):
                    return path
        raise PublicationError(f"{self.label}: {file.name} does not have the published hash")

    def read(self, file: PublishedFile, begin: int, end: int) -> bytes:
        """Returns bytes of a file, from the cache if possible; the caller has to verify them."""
        cached = self._cached(file)
        with translate_hub_errors(self.label):
            if cached is not None:
                return read_part(cached, file, begin, end)
            data = patiently(lambda: _read_range(self.label, self.revision, file.name, begin, end))
            return data if data is not None else read_part(self.fetch(file), file, begin, end)

    def _cached(self, file: PublishedFile) -> Path | None:
        """Returns the path of a file in the library's cache, None if it is not cached."""
        cached = try_to_load_from_cache(self.label, file.name, revision=self.revision)
        return Path(cached).resolve() if isinstance(cached, str) else None

    def _download(self, name: str, again: bool) -> str:
        return str(hf_hub_download(self.label, name, revision=self.revision, endpoint=endpoint(), force_download=again))


def read_publication(repo_id: str, commit: str) -> Publication | None:
    """Fetches the publication manifest of a commit, None if there is none.

    Raises:
        PublicationError: it is invalid.
        HfHubHTTPError, httpx.HTTPError: it cannot be read.
    """
    try:
        with _get(repo_id, commit, PUBLICATION_FILE) as response:
            data = _body(response, MAX_PUBLICATION_BYTES)  # the parser rejects what is longer
    except EntryNotFoundError:
        return None
    return parse_publication(data, repo_id)


def _size_of(repo_id: str, commit: str, name: str) -> int | None:
    """Returns the size of a file in bytes, None if the server does not report it."""
    url = hf_hub_url(repo_id, name, revision=commit, endpoint=endpoint())
    return get_hf_file_metadata(url, endpoint=endpoint()).size


def _read_range(repo_id: str, commit: str, name: str, begin: int, end: int) -> bytes | None:
    """Fetches bytes of a file, None if the server sends only whole files."""
    with _get(repo_id, commit, name, {"Range": f"bytes={begin}-{end - 1}"}) as response:
        if response.status_code != _PARTIAL_CONTENT:
            return None
        data = _body(response, end - begin)
    if len(data) != end - begin:
        raise httpx.RemoteProtocolError(f"received {len(data)} bytes instead of {end - begin}")
    return data


@contextmanager
def _get(repo_id: str, commit: str, name: str, headers: dict[str, str] | None = None) -> Iterator[httpx.Response]:
    """Requests a file; raises the library's error if the server refuses it."""
    url = hf_hub_url(repo_id, name, revision=commit, endpoint=endpoint())
    every = {**build_hf_headers(library_name="spes_swarm"), "Accept-Encoding": "identity", **(headers or {})}
    with http_stream_backoff("GET", url, headers=every, timeout=TIMEOUT) as response:
        hf_raise_for_status(response)
        yield response


def _body(response: httpx.Response, most_bytes: int) -> bytes:
    """Returns the content of an answer; stops reading once it is longer than `most_bytes`."""
    data = bytearray()
    for piece in response.iter_bytes():
        data += piece
        if len(data) > most_bytes:
            break
    return bytes(data)
