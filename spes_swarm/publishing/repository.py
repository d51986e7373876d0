"""Publications in a repository of the Hugging Face Hub, or of a server that speaks its protocol.

Weight files are sent first, each under its hash. One commit then makes them, the card and the publication manifest
visible at once. So a publisher that dies leaves nothing visible, and the next one does not resend files that have
arrived complete. The commit names its parent: of two concurrent publishers one succeeds, and the other checks again.

Readers read from one commit, even if another is published meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported lazily
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
    httpx,
)

from spes_swarm.base.errors import HubError, PublicationError
from spes_swarm.publishing.client import (
    ATTEMPTS,
    FAILURES,
    QUICK,
    TIMEOUT,
    TRAFFIC,
    hub_api,
    root_of,
    translate_hub_errors,
    uses_xet,
    wait_or_raise,
    with_retries,
)
from spes_swarm.publishing.publication import (
    MAX_PUBLICATION_BYTES,
    PUBLICATION_FILE,
    Publication,
    PublishedFile,
    describe_file,
    parse_publication,
    read_part,
)
from spes_swarm.publishing.target import MAIN, Published, check_tag, is_there, round_of, round_tag

_CONFLICTS = (409, 412)  # another publisher has committed since
_PARTIAL_CONTENT = 206
_UPLOAD_THREADS = 2


class RepositoryTarget:
    """A model repository; see `Target`. The library provides the token: HF_TOKEN, or `hf auth login`."""

    def __init__(self, repo_id: str, *, private: bool = False, retries: bool = True) -> None:
        """With `retries` False, the Hub is asked once, and has ten seconds to answer."""
        self.label = repo_id
        self._private = private
        self._api = hub_api(None if retries else QUICK)
        self._attempts = ATTEMPTS if retries else 1

    def check_rights(self) -> None:
        """See `Target`."""
        with translate_hub_errors(self.label):
            user = with_retries(lambda: self._api.whoami(cache=True), self._attempts)
            if with_retries(self._head, self._attempts) is not None:
                with_retries(lambda: self._api.auth_check(self.label, write=True), self._attempts)
                return
        if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise HubError(f"{self.label} does not exist, and this token can only read; use one with write access")
        owner = self.label.split("/")[0]
        if owner not in {user.get("name"), *(org.get("name") for org in user.get("orgs", ()))}:
            raise HubError(f"{self.label} does not exist, and this token cannot create it; use your own user name")

    def newest(self) -> Publication | None:
        """See `Target`."""
        with translate_hub_errors(self.label):
            head = with_retries(self._head, self._attempts)
            return None if head is None else _publication_at(self._api, self.label, head)

    def publish(self, export: Path, publication: Publication, tag: str | None = None) -> Published:
        """See `Target`."""
        check_tag(tag)
        sent_before = TRAFFIC.bytes_sent
        with translate_hub_errors(self.label):
            self._create()
            tags = self._tags()
            commit, there = self._commit(export, publication, tag, tags)
            for name in (round_tag(publication.round), tag):
                if name is not None:
                    self._tag(name, commit, tags)
        bytes_sent = None if uses_xet() and not there else TRAFFIC.bytes_sent - sent_before
        return Published.of(publication, commit, was_there=there, bytes_sent=bytes_sent)

    def prune(self, keep: int) -> list[int]:
        """See `Target`. Only the tags are removed: the commits stay in the history of `main`."""
        with translate_hub_errors(self.label):
            tags = self._tags()
            named = {commit for name, commit in tags.items() if round_of(name) is None}
            rounds = sorted((number for name in tags if (number := round_of(name)) is not None), reverse=True)
            gone = [number for number in rounds[max(1, keep) :] if tags[round_tag(number)] not in named]
            for number in gone:
                self._untag(round_tag(number))
        return sorted(gone)

    # Reading.

    def _head(self) -> str | None:
        """Returns the newest commit, None if there is no repository."""
        try:
            sha = self._api.repo_info(self.label, revision=MAIN).sha
        except RepositoryNotFoundError as exc:
            if exc.response.status_code == 401:  # the Hub's answer to a missing repository and to an invalid token
                self._api.whoami(cache=True)
            return None
        return str(sha)

    def _tags(self) -> dict[str, str]:
        """Returns all tags with their commits; none if there is no repository."""
        try:
            refs = with_retries(lambda: self._api.list_repo_refs(self.label))
        except RepositoryNotFoundError:
            return {}
        return {tag.name: tag.target_commit for tag in refs.tags}

    # Writing.

    def _create(self) -> None:
        if with_retries(self._head) is None:
            with_retries(lambda: self._api.create_repo(self.label, private=self._private or None, exist_ok=True))

    def _commit(
        self, export: Path, publication: Publication, tag: str | None, tags: dict[str, str]
    ) -> tuple[str, bool]:
        """Makes the publication the head of `main`; returns the commit, and True if it was there before."""
        tokens = f", {publication.tokens:,} tokens" if publication.tokens is not None else ""
        for attempt in range(ATTEMPTS):
            head = with_retries(self._head)
            if head is None:
                raise HubError(f"{self.label} has been removed")
            current = _publication_at(self._api, self.label, head)
            there = is_there(current, publication.run_id, publication.round, publication.digest, self.label)
            if tag is not None and tag in tags and not (there and tags[tag] == head):
                raise HubError(f"{self.label} has a tag {tag} already; choose another name")
            if there:
                return head, attempt == 0
            if current is not None:  # its publisher may have died before tagging it
                self._tag(round_tag(current.round), head, tags)
            try:
                info = self._api.create_commit(
                    self.label,
                    list(_operations(export, publication, current)),
                    commit_message=f"Round {publication.round}{tokens}",
                    parent_commit=head,
                    num_threads=_UPLOAD_THREADS,
                )
                return str(info.oid), False
            except FAILURES as exc:
                # The next attempt reads the head: the commit may have succeeded and its response been lost.
                if not _is_conflict(exc):
                    wait_or_raise(exc, attempt)
        raise HubError(f"{self.label}: other publishers keep committing at the same time; try again later")

    def _tag(self, name: str, commit: str, tags: dict[str, str]) -> None:
        """Tags a commit, and updates `tags`. A round's tag is moved if it exists; `_commit` has checked other tags."""
        if tags.get(name) == commit:
            return
        if name in tags:
            self._untag(name)
        with_retries(lambda: self._api.create_tag(self.label, tag=name, revision=commit, exist_ok=True))
        tags[name] = commit

    def _untag(self, name: str) -> None:
        def remove() -> None:
            with suppress(RevisionNotFoundError):  # an earlier attempt succeeded, and its response was lost
                self._api.delete_tag(self.label, tag=name)

        with_retries(remove)


def _is_conflict(exc: Exception) -> bool:
    root = root_of(exc)
    return isinstance(root, HfHubHTTPError) and root.response.status_code in _CONFLICTS


def _operations(
    export: Path, publication: Publication, current: Publication | None
) -> Iterator[CommitOperationAdd | CommitOperationDelete]:
    """Yields the operations of a commit; the library skips files that the repository already has."""
    names = {file.name for file in publication.files}
    for file in publication.files:
        operation = CommitOperationAdd(file.name, export / file.name)
        operation.upload_info.sha256 = bytes.fromhex(file.sha256)  # saves the library from reading the file again
        yield operation
    for path in sorted(export.iterdir()):
        if path.name not in names:
            yield CommitOperationAdd(path.name, path)
    for file in current.files if current else ():
        if file.name not in names:
            yield CommitOperationDelete(file.name)


class RepositoryFiles:
    """The files of one revision of a repository.

    Raises (all calls):
        HubError: the Hub refuses or cannot be reached, or this machine's disk is full.
    """

    def __init__(self, repo_id: str, revision: str | None) -> None:
        self.label = repo_id
        self._api = hub_api()
        with translate_hub_errors(repo_id):
            self.revision = str(with_retries(lambda: self._api.repo_info(repo_id, revision=revision or MAIN)).sha)

    def publication(self) -> Publication:
        """Returns the verified publication manifest."""
        with translate_hub_errors(self.label):
            publication = with_retries(lambda: _publication_at(self._api, self.label, self.revision))
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
                found_bytes = with_retries(lambda: self._size_of(file.name))
                if found_bytes is not None and found_bytes != file.size:
                    raise PublicationError(
                        f"{self.label}: {file.name} has {found_bytes:,} bytes, but {file.size:,} were published"
                    )
            for again in (False, True):
                # The cache contains links, created by the library.
                path = Path(with_retries(lambda again=again: self._download(file.name, again))).resolve()  # type: ignore[misc]
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
            data = with_retries(lambda: self._range(file.name, begin, end))
            return data if data is not None else read_part(self.fetch(file), file, begin, end)

    def _cached(self, file: PublishedFile) -> Path | None:
        """Returns the path of a file in the library's cache, None if it is not cached."""
        cached = try_to_load_from_cache(self.label, file.name, revision=self.revision)
        return Path(cached).resolve() if isinstance(cached, str) else None

    def _size_of(self, name: str) -> int | None:
        """Returns the size of a file in bytes, None if the server does not report it."""
        url = hf_hub_url(self.label, name, revision=self.revision, endpoint=self._api.endpoint)
        return self._api.get_hf_file_metadata(url=url).size

    def _download(self, name: str, again: bool) -> str:
        return str(self._api.hf_hub_download(self.label, name, revision=self.revision, force_download=again))

    def _range(self, name: str, begin: int, end: int) -> bytes | None:
        """Fetches bytes of a file, None if the server sends only whole files."""
        wanted = {"Range": f"bytes={begin}-{end - 1}"}
        with _get(self._api, self.label, self.revision, name, wanted) as response:
            if response.status_code != _PARTIAL_CONTENT:
                return None
            data = _body(response, end - begin)
        if len(data) != end - begin:
            raise httpx.RemoteProtocolError(f"received {len(data)} bytes instead of {end - begin}")
        return data


def _publication_at(api: HfApi, repo_id: str, commit: str) -> Publication | None:
    """Fetches the publication manifest of a commit, None if there is none.

    Raises:
        PublicationError: it is invalid.
        HfHubHTTPError, httpx.HTTPError: it cannot be read.
    """
    try:
        with _get(api, repo_id, commit, PUBLICATION_FILE, {}) as response:
            data = _body(response, MAX_PUBLICATION_BYTES)  # the parser rejects what is longer
    except EntryNotFoundError:
        return None
    return parse_publication(data, repo_id)


@contextmanager
def _get(api: HfApi, repo_id: str, commit: str, name: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
    """Requests a file; raises the library's error if the server refuses it."""
    url = hf_hub_url(repo_id, name, revision=commit, endpoint=api.endpoint)
    every = {**build_hf_headers(library_name="spes_swarm"), "Accept-Encoding": "identity", **headers}
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
