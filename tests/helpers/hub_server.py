"""A small server that speaks the Hugging Face Hub's protocol, for the real client library: repositories, commits, LFS.

    with HubServer(tmp_path / "hub") as hub:
        environment = hub.environment()            # HF_ENDPOINT, HF_TOKEN, a cache of its own
        hub.fail_next("drop", match="/_lfs/", fraction=0.5)
        ...
        hub.counters()["lfs_bytes"]                # bodies of uploads, whether or not they arrived whole
        hub.files("user/model", "main")            # path -> content

It runs in a process of its own and keeps everything below a directory. What it does not do: Xet, pull requests, git.
Faults (`fail_next`), each for the next `times` requests that match, or for all with `times=-1`:

    drop      closes the connection after a `fraction` of the request's body
    hold      the same, but waits instead of closing (`wait_held`, `release`)
    status    answers `status`, with `retry_after` if given
    lose      does what is asked, and closes the connection instead of answering
    cut       closes the connection after a `fraction` of the answer's body
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any, Self

import pytest

from scripts.testing.local_peer import PATIENCE_S
from tests.helpers.repository import ROOT

TOKEN, READ_TOKEN, STRANGER_TOKEN = "hf_test_owner", "hf_test_reader", "hf_test_stranger"
USER = "user"
_UPLOAD = """
import sys
from spes_swarm.publishing.client import hub_api, with_retries
api, repo, folder, kind = hub_api(), *sys.argv[1:]
with_retries(lambda: api.create_repo(repo, exist_ok=True, repo_type=kind))
with_retries(lambda: api.upload_folder(repo_id=repo, folder_path=folder, repo_type=kind))
"""


class HubServer:
    """The server's process."""

    def __init__(self, directory: Path, part_bytes: int = 1 << 20) -> None:
        """Starts it.

        Args:
            directory: where it keeps everything; the files of large objects have their hash as name.
            part_bytes: larger files are uploaded in parts of this size.
        """
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.hub_routes", str(directory), str(part_bytes)],
            cwd=ROOT,
            stdin=subprocess.PIPE,  # it ends when this process does
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.endpoint = self._process.stdout.readline().strip()

    def environment(self, token: str | None = TOKEN) -> dict[str, str]:
        """What makes a process use this server, and nothing of the user's."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        environment |= {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(self._directory / "home")}
        return environment | ({"HF_TOKEN": token} if token else {})

    def use(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Makes this process use the server, with a cache, and wait less than a user would."""
        for key, value in self.environment().items():
            if key.startswith("HF_"):
                monkeypatch.setenv(key, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        monkeypatch.setattr("spes_swarm.publishing.client.FIRST_PAUSE_S", 0.01)

    def upload(self, directory: Path, repo_id: str, kind: str = "model") -> str:
        """Uploads a directory to a "model" or "dataset" repository, created if need be; returns the commit."""
        command = [sys.executable, "-c", _UPLOAD, repo_id, str(directory), kind]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return self.commits(repo_id)[0]

    def fail_next(self, kind: str, match: str = "", times: int = 1, **details: Any) -> None:
        """Makes requests fail whose `METHOD /path` contains `match`; see the top of this file."""
        self._control("fail", {"kind": kind, "match": match, "times": times, **details})

    def mend(self) -> None:
        """No request fails any more."""
        self._control("mend", {})

    def wait_held(self) -> None:
        """Returns when a request is held."""
        self._control("wait_held", {})

    def release(self) -> None:
        """Lets held requests go on."""
        self._control("release", {})

    def counters(self) -> dict[str, int]:
        """`lfs_bytes`, `commit_bytes` and `download_bytes`, `lfs_puts`, `commits`, `requests`."""
        return dict(self._control("counters", {}))

    def tree(self, repo_id: str, revision: str = "main") -> dict[str, str]:
        """Paths with their content's SHA-256; empty where there is no such repository or revision."""
        return dict(self._control("tree", {"repo": repo_id, "revision": revision}))

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Paths with their content."""
        return {
            path: (self._directory / "objects" / sha256).read_bytes()
            for path, sha256 in self.tree(repo_id, revision).items()
        }

    def refs(self, repo_id: str) -> dict[str, str]:
        """Branches and tags with their commits."""
        return dict(self._control("refs", {"repo": repo_id}))

    def commits(self, repo_id: str) -> list[str]:
        """Commits of main, the newest first."""
        return list(self._control("log", {"repo": repo_id}))

    def _control(self, verb: str, arguments: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"{self.endpoint}/_control/{verb}", json.dumps(arguments).encode())
        with urllib.request.urlopen(request, timeout=PATIENCE_S + 20.0) as response:
            return json.load(response)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
