"""A peer's output directory: its paths, and the checks that keep two runs or two processes from sharing it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from spes_swarm.base import log
from spes_swarm.base.errors import (
    CheckpointError,
    InvitationError,
    LeftEarlyError,
    ManifestError,
    UserError,
    os_errors_as,
)
from spes_swarm.base.user_paths import disk_of, existing_parent, replace_file
from spes_swarm.config.manifest import Manifest, RawManifest, read_manifest

_PEERS, _PORT, _DATA, _MANIFEST = "peers.json", "port", "data.json", "manifest.json"
_WEIGHTS, _TOKENIZER = "initial_weights", "tokenizer.msgpack"
_ACTS, _INVITATION, _PROOFS = "acts.txt", "invitation", "proofs"
# What a session creates before the directory belongs to a run.
_MADE = {".lock", "checkpoints", "identity.key", "metrics.jsonl", log.NAME, _TOKENIZER, _PORT, _WEIGHTS, _ACTS}
_ANOTHER = "give this peer another --output-dir"
_LOCK_TIMEOUT_S, _POLL_S = 5.0, 0.05
_LEAST_FREE_BYTES = 32 << 10  # what a start writes before the run is known


def lock_file(path: Path, what: str, advice: str, timeout_s: float = 0.0) -> int:
    """Locks a file for as long as this process and those forked from it live; returns the file descriptor.

    Tries again for `timeout_s` seconds while another process has it.

    Raises:
        UserError: another process has locked it; the message says `what` is in use, with `advice`.
    """
    with os_errors_as(UserError, what):
        lock = os.open(path, os.O_RDONLY)
    try:
        _retry(lambda: fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB), what, advice, timeout_s)
    except UserError:
        os.close(lock)
        raise
    return lock


def _retry(take: Callable[[], object], what: str, advice: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            take()
            return
        except OSError as exc:
            if exc.errno not in (errno.EWOULDBLOCK, errno.EADDRINUSE):
                raise UserError(f"{what} cannot be locked: {exc.strerror}") from exc
            if time.monotonic() >= deadline:
                raise UserError(f"{what} is in use by another process; {advice}") from exc
        time.sleep(_POLL_S)


@contextmanager
def locked_identity(path: Path, peer_id: str, advice: str = "each peer needs its own") -> Iterator[None]:
    """Keeps other processes from using an identity file and, on this machine, copies of it.

    Like `lock_file`, this waits for the network process of a peer that was killed. The lock on the identity itself is
    the name of a socket: unlike a file, it needs no directory that all users share, and it ends with its processes.

    Raises:
        UserError: another process uses the identity.
    """
    lock = lock_file(path, f"identity file {path}", advice, _LOCK_TIMEOUT_S)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
        try:
            copied = f"{advice}, and a copy of the file is the same identity: choose another --output-dir"
            what = f"identity {peer_id} of {path}"
            _retry(lambda: name.bind(f"\0spes_swarm/{peer_id}"), what, copied, _LOCK_TIMEOUT_S)
            yield
        finally:
            os.close(lock)


@dataclass(frozen=True)
class KnownData:
    """The data of the last session."""

    source: str
    differs: bool  # from the run's, as declared by the user
    seed: int | None  # of this peer's own order


@dataclass(frozen=True)
class RunDirectory:
    """Paths inside OUTPUT_DIR."""

    path: Path

    @property
    def metrics(self) -> Path:
        """The event log."""
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """The log of all processes; see base/log.py."""
        return self.path / log.NAME

    @property
    def identity(self) -> Path:
        """The identity file, unless the user names another one."""
        return self.path / "identity.key"

    def identity_file(self, named: str | None) -> Path:
        """The identity file, given the one that the user names."""
        return self.identity if named is None else Path(named)

    @property
    def checkpoints(self) -> Path:
        """Directory of checkpoints."""
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """The packed files of a tokenizer that the founder made; see data/run_tokenizer.py."""
        return self.path / _TOKENIZER

    @property
    def partial_reference(self) -> Path:
        """What a newcomer has fetched so far; removed when the download is complete."""
        return self.path / "reference.partial"

    @property
    def proofs(self) -> Path:
        """The folder of proofs; see proofs.py."""
        return self.path / _PROOFS

    @property
    def track_records(self) -> Path:
        """What this peer remembers of the others; see track_record_file.py."""
        return self.path / "track_records.json"

    @property
    def acts(self) -> Path:
        """The acts of the run; see acts_file.py."""
        return self.path / _ACTS

    @property
    def invitations(self) -> Path:
        """The invitations that this peer has made; see invitations.py."""
        return self.path / "invitations.json"

    def known_invitation(self) -> str | None:
        """Returns the invitation with which this peer takes part; None if there is none."""
        try:
            return (self.path / _INVITATION).read_text(encoding="ascii").strip() or None
        except (OSError, ValueError):
            return None

    def remember_invitation(self, word: str) -> None:
        """Stores the invitation with which this peer takes part, for the next start.

        Raises:
            UserError: it cannot be written.
        """
        self.store(_INVITATION, word + "\n", mode=0o600)

    def known_peers(self) -> list[str]:
        """Returns the addresses of other peers at the last checkpoint; none if the file is missing or damaged."""
        try:
            peers = json.loads((self.path / _PEERS).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return []
        return [peer for peer in peers if isinstance(peer, str)] if isinstance(peers, list) else []

    def remember_peers(self, maddrs: list[str]) -> None:
        """Stores addresses for the next start; an empty list replaces nothing.

        Raises:
            UserError: they cannot be written.
        """
        if maddrs:
            self.store(_PEERS, json.dumps(maddrs))

    def known_port(self) -> int | None:
        """Returns the TCP port of the last session; None if the file is missing or damaged."""
        try:
            port = int((self.path / _PORT).read_text(encoding="ascii")[:8])
        except (OSError, ValueError):
            return None
        return port if 0 < port < 65536 else None

    def remember_port(self, port: int) -> None:
        """Stores the TCP port for the next start, so that the addresses that other peers have stored stay valid.

        Raises:
            UserError: it cannot be written.
        """
        self.store(_PORT, f"{port}\n")

    def known_data(self) -> KnownData | None:
        """Returns the data of the last session; None in a fresh directory, and if the file is damaged."""
        try:
            stored = json.loads((self.path / _DATA).read_text(encoding="utf-8"))
            known = KnownData(stored["source"], stored["differs"], stored.get("seed"))
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return None
        is_valid = isinstance(known.source, str) and isinstance(known.differs, bool)
        return known if is_valid and (known.seed is None or type(known.seed) is int) else None

    def remember_data(self, data: KnownData) -> None:
        """Stores the data that this peer trains on, for the next start.

        Raises:
            UserError: it cannot be written.
        """
        self.store(_DATA, json.dumps(asdict(data)))

    def knows_weights(self, model: str, files: Mapping[str, str]) -> bool:
        """Returns True if this peer founded the run from this model, and none of the files that are left has changed.

        False if the file that says so is missing or damaged.
        """
        try:
            known = json.loads((self.path / _WEIGHTS).read_text(encoding="utf-8"))
            return bool(known["model"] == model and files.items() <= known["files"].items())
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return False

    def remember_weights(self, model: str, files: Mapping[str, str]) -> None:
        """Stores the model whose weights the run starts from, so that they need not be compared at the next start.

        Raises:
            UserError: it cannot be written.
        """
        self.store(_WEIGHTS, json.dumps({"model": model, "files": dict(files)}))

    def check(self) -> None:
        """Refuses a directory that `prepare` would refuse, as far as can be checked without creating it.

        The network process of a trainer that was killed holds the lock until it too has died. A supervisor may have
        started the peer again by then, so this waits for it.

        Raises:
            UserError: it cannot be created, its disk is full, or another process uses it.
        """
        existing = existing_parent(self.path)
        if not existing.is_dir():
            raise UserError(f"output directory {self.path}: {os.strerror(errno.ENOTDIR)}; {_ANOTHER}")
        with os_errors_as(UserError, f"output directory {self.path}"):
            status = os.statvfs(existing)
        if not os.access(existing, os.W_OK | os.X_OK):
            problem = errno.EROFS if status.f_flag & os.ST_RDONLY else errno.EACCES
            raise UserError(f"output directory {self.path}: {os.strerror(problem)}; {_ANOTHER}")
        if status.f_blocks and status.f_bavail * status.f_frsize < _LEAST_FREE_BYTES:
            raise UserError(f"output directory {self.path}: {self._full_disk()}")
        if self._lock.exists():
            os.close(self._take_lock(_LOCK_TIMEOUT_S))

    def is_in_use(self) -> bool:
        """Returns True if a session uses this directory."""
        try:
            os.close(self._take_lock())
        except UserError:
            return self._lock.exists()
        return False

    @property
    def _lock(self) -> Path:
        return self.path / ".lock"

    def _take_lock(self, timeout_s: float = 0.0) -> int:
        return lock_file(self._lock, f"output directory {self.path}", _ANOTHER, timeout_s)

    def prepare(self) -> int:
        """Creates the directory and locks it for this process; returns the lock's file descriptor.

        Raises:
            UserError: it cannot be created, or another process uses it.
        """
        with os_errors_as(UserError, f"output directory {self.path}"):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock.touch()
        return self._take_lock()

    @contextmanager
    def held(self, identity: Path) -> Iterator[None]:
        """Creates the directory, and locks it as `prepare` does, for the duration of a session.

        A session that is refused or stopped before it has joined a run leaves nothing that it has created, an
        `identity` file in another directory included. But the identity stays once it has been shown to a private run:
        with an invitation for one peer, or since the peer may be admitted by its id.

        Raises:
            UserError: as `prepare`.
        """
        folders = (folder for path in (self.path, identity.parent) for folder in (path, *path.parents))
        created = [folder for folder in folders if not folder.exists()]
        made = [path for path in (*(self.path / name for name in _MADE), identity) if not path.exists()]
        lock = self.prepare()
        try:
            yield
        except (UserError, LeftEarlyError) as exc:
            if not (self.path / _MANIFEST).exists():
                shown = isinstance(exc, InvitationError) or self.known_invitation() is not None
                _remove([path for path in made if path != identity or not shown], created)
            raise
        finally:
            os.close(lock)

    def manifest(self) -> Manifest | None:
        """Reads the manifest of the run that this directory belongs to; None for a fresh directory.

        Raises:
            CheckpointError: there is one, but it is corrupt.
        """
        raw = self.raw_manifest()
        try:
            return None if raw is None else raw.build()
        except ManifestError as exc:
            raise self._corrupt(str(exc)) from exc

    def raw_manifest(self) -> RawManifest | None:
        """The same, without building its model.

        Raises:
            CheckpointError: as `manifest`, except for errors in the model.
        """
        path = self.path / _MANIFEST
        try:
            if not path.exists():
                return None
            stored = json.loads(path.read_text(encoding="utf-8"))
            wire = {key: bytes.fromhex(stored[key]) for key in ("manifest", "signature")}
            return read_manifest(wire, source=str(path), expected_run_id=stored["run_id"])
        except (OSError, ManifestError) as exc:
            raise self._corrupt(str(exc)) from exc
        except (ValueError, KeyError, TypeError, RecursionError) as exc:
            raise self._corrupt("it is not a manifest" if path.stat().st_size else "it is empty") from exc

    def _corrupt(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path / _MANIFEST} is corrupt ({reason}): copy the manifest.json of another peer of the run, or "
            "move it away and join the run again with --initial-peers; the checkpoints stay valid"
        )

    def require_run(self) -> RawManifest:
        """As `raw_manifest`, for a directory that must belong to a run.

        Raises:
            CheckpointError: it belongs to none, or its manifest is corrupt.
        """
        manifest = self.raw_manifest()
        if manifest is None:
            raise CheckpointError(f"{self.path} is not the output directory of a run: give the --output-dir of a peer")
        return manifest

    def remember(self, manifest: Manifest) -> None:
        """Stores a manifest, which ties the directory to its run.

        Raises:
            UserError: the manifest could not be written; an earlier one is intact.
        """
        wire = {key: value.hex() for key, value in manifest.to_wire().items()}
        self.store(_MANIFEST, json.dumps({"run_id": manifest.run_id, **wire}))

    def store(self, name: str, text: str, *, mode: int = 0o666) -> None:
        """Replaces a file atomically and durably; raises UserError if that fails, and an earlier one is intact."""
        try:
            replace_file(self.path / name, text, mode=mode)
        except OSError as exc:
            reason = self._full_disk() if exc.errno in (errno.ENOSPC, errno.EDQUOT) else exc.strerror
            raise UserError(f"{self.path / name} cannot be written: {reason}") from exc

    def _full_disk(self) -> str:
        disk = disk_of(self.path)
        return f"{os.strerror(errno.ENOSPC)}; free some on the disk {disk}, or choose an --output-dir on another one"


def _remove(entries: list[Path], folders: list[Path]) -> None:
    for entry in entries:
        with suppress(OSError):
            entry.unlink() if not entry.is_dir() else entry.rmdir()
    for folder in folders:  # the inner ones first
        with suppress(OSError):  # something else is in it
            folder.rmdir()
