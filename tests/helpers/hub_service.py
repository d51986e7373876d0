"""What the process behind `hub_server.HubServer` keeps, and how it answers; what it answers is in hub_routes.py."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from scripts.testing.local_peer import PATIENCE_S
from tests.helpers.hub_server import READ_TOKEN, STRANGER_TOKEN, TOKEN, USER

_PIECE = 64 * 1024


@dataclass(frozen=True)
class Entry:
    """A file in a commit."""

    size: int
    sha256: str
    blob: str  # git's hash
    lfs: bool

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.blob


@dataclass(frozen=True)
class Commit:
    """A state of a repository."""

    parent: str | None
    title: str
    tree: dict[str, Entry]


@dataclass
class Repo:
    """A repository."""

    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # branches and tags

    def resolve(self, revision: str) -> str:
        commit = self.refs.get(revision, revision)
        if commit not in self.commits:
            raise RefusalError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def add(self, title: str, tree: dict[str, Entry]) -> str:
        parent = self.refs.get("main")
        seed = json.dumps([parent, title, {path: entry.sha256 for path, entry in tree.items()}, len(self.commits)])
        oid = hashlib.sha1(seed.encode()).hexdigest()
        self.commits[oid] = Commit(parent, title, tree)
        self.refs["main"] = oid
        return oid


class RefusalError(Exception):
    """An answer that is an error, as the Hub gives it."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


class DroppedError(Exception):
    """The connection is closed without an answer."""


class State:
    """Everything that the server knows."""

    def __init__(self, directory: Path, part_bytes: int) -> None:
        self.objects = directory / "objects"
        self.objects.mkdir(exist_ok=True)
        self.part_bytes = part_bytes
        self.repos: dict[str, Repo] = {}
        self.uploads: dict[str, str] = {}  # secret of an upload's address -> SHA-256
        self.counters: Counter[str] = Counter()
        self.faults: list[dict[str, Any]] = []
        self.lock = threading.RLock()
        self.held, self.released = threading.Event(), threading.Event()

    def put(self, data: bytes) -> str:
        sha256 = hashlib.sha256(data).hexdigest()
        (self.objects / sha256).write_bytes(data)
        return sha256

    def fault(self, request: str) -> dict[str, Any] | None:
        with self.lock:
            for fault in self.faults:
                if fault["match"] in request and fault["times"] != 0:
                    fault["times"] -= 1
                    return fault
        return None


class Connection(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # small answers are not to wait for each other
    state: State
    routes: ClassVar[list[tuple[str, Callable[..., None]]]]
    server: ThreadingHTTPServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _serve(self) -> None:
        url = urlsplit(self.path)
        path, self.query = unquote(url.path), parse_qs(url.query)
        self.body_read = False
        try:
            if path.startswith("/_control/"):
                self._json(self._control(path.removeprefix("/_control/"), json.loads(self._body())))
                return
            self.state.counters["requests"] += 1
            self.fault = self.state.fault(f"{self.command} {path}") or {}
            if self.fault.get("kind") == "hold" and not self._has_body():
                self._wait_for_release()
            if self.fault.get("kind") == "status":
                self._body()
                raise RefusalError(self.fault["status"])
            for pattern, method in self.routes:
                match = re.fullmatch(pattern, f"{self.command} {path}")
                if match:
                    method(self, **match.groupdict())
                    return
            raise RefusalError(404, "", "no such route")
        except RefusalError as refusal:
            self._refuse(refusal)
        except OSError as exc:
            if exc.errno != errno.ENOSPC:
                self.close_connection = True
                return
            self._refuse(RefusalError(507, "", "Insufficient Storage"))
        except DroppedError:
            self.close_connection = True
            self.connection.close()

    def _refuse(self, refusal: RefusalError) -> None:
        headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
        if "retry_after" in getattr(self, "fault", {}):
            headers["Retry-After"] = str(self.fault["retry_after"])
        if not self.body_read:
            self.close_connection = True
        self._json({"error": refusal.message or "no"}, refusal.status, headers)

    def _wait_for_release(self) -> None:
        self.state.held.set()
        self.state.released.wait()

    # Bodies.

    def _has_body(self) -> bool:
        return "Content-Length" in self.headers or "Transfer-Encoding" in self.headers

    def _pieces(self) -> Iterator[bytes]:
        """The request's body; where a fault says so only a part of it."""
        self.body_read = True
        fault, counter = getattr(self, "fault", {}), "lfs_bytes" if "/_lfs/" in self.path else "other_bytes"
        length = int(self.headers.get("Content-Length") or 0)
        chunked = "chunked" in (self.headers.get("Transfer-Encoding") or "")
        stop = int(fault["fraction"] * length) if fault.get("kind") in ("drop", "hold") else None
        if stop is None:
            yield from self._counted(self._chunks() if chunked else self._plain(length), counter)
            return
        yield from self._counted(self._plain(stop), counter)
        if fault["kind"] == "drop":
            raise DroppedError
        self._wait_for_release()
        yield from self._counted(self._plain(length - stop), counter)

    def _counted(self, pieces: Iterator[bytes], counter: str) -> Iterator[bytes]:
        for piece in pieces:
            self.state.counters[counter] += len(piece)
            yield piece

    def _plain(self, left: int) -> Iterator[bytes]:
        while left > 0:
            piece = self.rfile.read(min(_PIECE, left))
            if not piece:
                raise DroppedError
            left -= len(piece)
            yield piece

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline() or b"0", 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _body(self) -> bytes:
        return b"".join(self._pieces())

    # Answers.

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(value).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        fault = getattr(self, "fault", {})
        if fault.get("kind") == "lose":
            raise DroppedError
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        if self.close_connection:  # unannounced, a client would send its next request into a closed connection
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault.get("kind") == "cut":
            self.wfile.write(body[: int(fault["fraction"] * len(body))])
            raise DroppedError
        self.wfile.write(body)

    def _content(self, sha256: str, headers: dict[str, str]) -> None:
        data = (self.state.objects / sha256).read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        status = 200
        if wanted:
            begin, end = int(wanted[1]), int(wanted[2] or len(data) - 1)
            headers = {**headers, "Content-Range": f"bytes {begin}-{end}/{len(data)}"}
            data, status = data[begin : end + 1], 206
        if self.command == "GET":
            self.state.counters["download_bytes"] += len(data)
        self._send(status, {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream", **headers}, data)

    # Who may do what.

    def _user(self) -> str | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in (TOKEN, READ_TOKEN, STRANGER_TOKEN):
            raise RefusalError(401, "", "Invalid credentials in Authorization header")
        return {TOKEN: USER, READ_TOKEN: USER, STRANGER_TOKEN: "stranger"}.get(token)

    def _repo(self, repo: str, write: bool = False) -> Repo:
        user = self._user()
        found = self.state.repos.get(repo)
        if found is None or (found.private and user != USER):
            self._body()
            raise RefusalError(404 if user else 401, "RepoNotFound", "Repository not found")
        if write and TOKEN not in (self.headers.get("Authorization") or ""):
            self._body()
            raise (
                RefusalError(403, "", "you do not have write access") if user else RefusalError(401, "", "Unauthorized")
            )
        return found

    # For the tests.

    def _control(self, verb: str, arguments: dict[str, Any]) -> Any:
        state = self.state
        if verb == "fail":
            state.faults.append({"fraction": 0.5, **arguments})
            state.held.clear()
            state.released.clear()
        elif verb == "mend":
            state.faults.clear()
        elif verb == "wait_held":
            assert state.held.wait(PATIENCE_S)
        elif verb == "release":
            state.released.set()
        elif verb == "counters":
            return state.counters
        else:
            return self._look(verb, arguments)
        return {}

    def _look(self, verb: str, arguments: dict[str, Any]) -> Any:
        repo = self.state.repos.get(arguments["repo"])
        if repo is None:
            return {}
        if verb == "refs":
            return repo.refs
        if verb == "log":
            commits, sha = [], repo.refs.get("main")
            while sha is not None:
                commits.append(sha)
                sha = repo.commits[sha].parent
            return commits
        commit = repo.refs.get(arguments["revision"], arguments["revision"])
        return (
            {path: entry.sha256 for path, entry in repo.commits[commit].tree.items()} if commit in repo.commits else {}
        )
