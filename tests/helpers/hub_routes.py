"""What the process behind `hub_server.HubServer` answers: the Hub's protocol, as huggingface_hub 2.4 speaks it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import shutil
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.hub_server import TOKEN, USER
from tests.helpers.hub_service import Connection, Entry, RefusalError, Repo, State

_LFS_SUFFIXES = (".safetensors", ".png", ".bin")


class Handler(Connection):
    """One connection."""

    def whoami(self) -> None:
        user = self._user()
        if user is None:
            raise RefusalError(401, "", "Unauthorized")
        self._json({"type": "user", "name": user, "orgs": [{"name": "team"}]})

    def create(self) -> None:
        content = json.loads(self._body())
        user = self._user()
        if user is None:
            raise RefusalError(401, "", "Unauthorized")
        name = f"{content.get('organization') or user}/{content['name']}"
        if TOKEN not in self.headers["Authorization"] or not name.startswith((f"{USER}/", "team/")):
            raise RefusalError(403, "", "You don't have the rights to create a model under this namespace")
        with self.state.lock:
            if name in self.state.repos:
                url = f"{self._origin()}/{name}"
                self._json({"error": "You already created this model repo", "url": url}, 409)
                return
            repo = self.state.repos[name] = Repo(content.get("visibility") == "private")
            attributes = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
            repo.add("initial commit", {".gitattributes": self._entry(attributes)})
        self._json({"url": f"{self._origin()}/{name}", "name": name})

    def _entry(self, data: bytes) -> Entry:
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return Entry(len(data), self.state.put(data), blob, lfs=False)

    def _origin(self, *, foreign: bool = False) -> str:
        """Where requests are to go; `foreign`: under another name, as a store of large objects has one."""
        host = str(self.server.server_address[0])
        return f"http://{'localhost' if foreign and host == '127.0.0.1' else host}:{self.server.server_port}"

    def auth_check(self, repo: str, write: str | None) -> None:
        self._repo(repo, write=write is not None)
        self._json({})

    def validate_yaml(self) -> None:
        content = json.loads(self._body())["content"]
        match = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        try:
            fields = yaml.safe_load(match[1]) if match else None
        except yaml.YAMLError as exc:
            self._json({"errors": [{"message": str(exc)}], "warnings": []}, 400)
            return
        warnings = [] if isinstance(fields, dict) else [{"message": "empty or missing yaml metadata"}]
        self._json({"errors": [], "warnings": warnings})

    def info(self, repo: str, revision: str | None = None) -> None:
        found = self._repo(repo)
        sha = found.resolve(revision or "main")
        siblings = [{"rfilename": path} for path in found.commits[sha].tree]
        self._json({"id": repo, "sha": sha, "private": found.private, "siblings": siblings})

    def list_refs(self, repo: str) -> None:
        found = self._repo(repo)
        tags = [self._ref("tags", name, sha) for name, sha in found.refs.items() if name != "main"]
        self._json({"branches": [self._ref("heads", "main", found.refs["main"])], "converts": [], "tags": tags})

    @staticmethod
    def _ref(kind: str, name: str, sha: str) -> dict[str, str]:
        return {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": sha}

    def list_tree(self, repo: str, revision: str, folder: str | None = None) -> None:
        found, below = self._repo(repo), f"{folder.strip('/')}/" if folder else ""
        tree = found.commits[found.resolve(revision)].tree
        inside = {path: entry for path, entry in tree.items() if path.startswith(below)}
        if below and not inside:
            raise RefusalError(404, "EntryNotFound", "no such folder")
        self._json([self._path_info(path, entry) for path, entry in inside.items()])

    @staticmethod
    def _path_info(path: str, entry: Entry) -> dict[str, Any]:
        lfs = {"oid": entry.sha256, "size": entry.size, "pointerSize": 134} if entry.lfs else None
        info = {"type": "file", "path": path, "size": entry.size, "oid": entry.blob}
        return info | ({"lfs": lfs} if lfs else {})

    def add_tag(self, repo: str, revision: str) -> None:
        found, name = self._repo(repo, write=True), json.loads(self._body())["tag"]
        sha = found.resolve(revision)
        if name in found.refs:
            raise RefusalError(409, "", "Tag reference exists already")
        found.refs[name] = sha
        self._json({})

    def remove_tag(self, repo: str, name: str) -> None:
        found = self._repo(repo, write=True)
        if name not in found.refs:
            raise RefusalError(404, "RevisionNotFound", "no such tag")
        del found.refs[name]
        self._json({})

    def preupload(self, repo: str, revision: str) -> None:
        found = self._repo(repo, write=True)
        tree = found.commits[found.resolve(revision)].tree
        answers = []
        for file in json.loads(self._body())["files"]:
            lfs = file["path"].endswith(_LFS_SUFFIXES) or file["size"] > 10 << 20
            entry = tree.get(file["path"])
            answer = {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
            answers.append(answer | ({"oid": entry.etag} if entry else {}))
        self._json({"files": answers})

    def lfs_batch(self, repo: str) -> None:
        self._repo(repo, write=True)
        content = json.loads(self._body())
        assert content["operation"] == "upload"
        objects = [self._upload_actions(o["oid"], o["size"], repo) for o in content["objects"]]
        self._json({"transfer": "basic", "objects": objects})

    def _upload_actions(self, oid: str, size: int, repo: str) -> dict[str, Any]:
        answer: dict[str, Any] = {"oid": oid, "size": size}
        if (self.state.objects / oid).exists():
            return answer
        secret = secrets.token_hex(16)
        self.state.uploads[secret] = oid
        # Uploads go to another host, as they do on the Hub; their addresses are secrets.
        origin, query = self._origin(foreign=True), f"signature={secret}"
        upload: dict[str, Any] = {"href": f"{origin}/_lfs/{oid}?{query}"}
        if size > self.state.part_bytes:
            count = -(-size // self.state.part_bytes)
            parts = {str(n): f"{origin}/_lfs/{oid}/{n}?{query}" for n in range(1, count + 1)}
            upload = {
                "href": f"{origin}/_lfs/{oid}/complete?{query}",
                "header": {"chunk_size": str(self.state.part_bytes), **parts},
            }
        verify = {"href": f"{self._origin()}/{repo}.git/info/lfs/objects/verify"}
        return answer | {"actions": {"upload": upload, "verify": verify}}

    def _secret(self, oid: str) -> str:
        (secret,) = self.query.get("signature", [""])
        if self.state.uploads.get(secret) != oid:
            raise RefusalError(403, "", "signature")
        return str(secret)

    def upload(self, oid: str, part: str | None = None) -> None:
        secret = self._secret(oid)
        self.state.counters["lfs_puts"] += 1
        path = self.state.objects / f"upload-{secret}-{part or 'whole'}"
        sha256 = hashlib.sha256()
        pieces = self._pieces()
        try:
            with path.open("wb") as file:
                for piece in pieces:
                    sha256.update(piece)
                    file.write(piece)
            if part is None:
                self._keep(path, oid, sha256.hexdigest())
        except BaseException:
            path.unlink(missing_ok=True)
            for _ in pieces:  # whoever is still sending does not listen
                pass
            raise
        self._send(200, {"ETag": f'"{sha256.hexdigest()[:32]}"'})

    def complete(self, oid: str) -> None:
        secret, parts = self._secret(oid), json.loads(self._body())["parts"]
        whole, sha256 = self.state.objects / f"upload-{secret}-whole", hashlib.sha256()
        with whole.open("wb") as file:
            for part in sorted(parts, key=lambda p: int(p["partNumber"])):
                path = self.state.objects / f"upload-{secret}-{part['partNumber']}"
                data = path.read_bytes()
                if part["etag"] != f'"{hashlib.sha256(data).hexdigest()[:32]}"':
                    raise RefusalError(400, "", "etag")
                sha256.update(data)
                file.write(data)
                path.unlink()
        self._keep(whole, oid, sha256.hexdigest())
        self._json({})

    def _keep(self, path: Path, oid: str, sha256: str) -> None:
        if oid != sha256:
            path.unlink()
            raise RefusalError(400, "", "the content does not have the announced hash")
        path.rename(self.state.objects / oid)

    def verify(self, repo: str) -> None:
        self._repo(repo, write=True)
        content = json.loads(self._body())
        path = self.state.objects / content["oid"]
        if not path.exists() or path.stat().st_size != content["size"]:
            raise RefusalError(404, "", "not uploaded")
        self._json({})

    def commit(self, repo: str, revision: str) -> None:
        found, body = self._repo(repo, write=True), self._body()
        self.state.counters["commit_bytes"] += len(body)
        lines = [json.loads(line) for line in body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        with self.state.lock:
            head = found.resolve(revision)
            if header.get("parentCommit", head) != head:
                raise RefusalError(412, "", "A commit has happened since. Please refresh and try again.")
            tree = dict(found.commits[head].tree)
            for line in lines:
                self._apply(tree, line["key"], line["value"])
            oid = found.add(header["summary"], tree)
        self.state.counters["commits"] += 1
        self._json({"success": True, "commitOid": oid, "commitUrl": f"{self._origin()}/{repo}/commit/{oid}"})

    def _apply(self, tree: dict[str, Entry], key: str, value: dict[str, Any]) -> None:
        if key == "file":
            tree[value["path"]] = self._entry(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            path = self.state.objects / value["oid"]
            if not path.exists():
                raise RefusalError(400, "", f"LFS object {value['oid']} was not uploaded")
            blob = hashlib.sha1(value["oid"].encode()).hexdigest()
            tree[value["path"]] = Entry(path.stat().st_size, value["oid"], blob, lfs=True)
        elif key == "deletedFile":
            if value["path"] not in tree:
                raise RefusalError(404, "EntryNotFound", "A file with this name doesn't exist")
            del tree[value["path"]]

    def resolve(self, repo: str, revision: str, path: str) -> None:
        found = self._repo(repo)
        sha = found.resolve(revision)
        entry = found.commits[sha].tree.get(path)
        if entry is None:
            self.fault = {"kind": ""} if not self.fault else self.fault
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
            return
        headers = {"X-Repo-Commit": sha, "ETag": f'"{entry.etag}"'}
        if not entry.lfs:
            self._content(entry.sha256, headers)
            return
        linked = {"X-Linked-Etag": f'"{entry.sha256}"', "X-Linked-Size": str(entry.size)}
        self._send(302, {**headers, **linked, "Location": f"{self._origin(foreign=True)}/_cdn/{entry.sha256}"})

    def cdn(self, oid: str) -> None:
        if self.headers.get("Authorization"):
            raise RefusalError(400, "", "the token does not belong here")
        self._content(oid, {"ETag": f'"{oid}"'})


# Routes of data sets have a prefix that those of models lack; here both share one namespace.
_REPO = r"(?:datasets/)?(?P<repo>[^/]+/[^/]+)"
_API = r"/api/(?:models|datasets)/(?P<repo>[^/]+/[^/]+)"
Handler.routes = [
    ("GET /api/whoami-v2", Handler.whoami),
    ("POST /api/repos/create", Handler.create),
    ("POST /api/validate-yaml", Handler.validate_yaml),
    (f"GET {_API}/auth-check(?P<write>/write)?", Handler.auth_check),
    (f"POST {_API}/preupload/(?P<revision>[^/]+)", Handler.preupload),
    (f"POST {_API}/commit/(?P<revision>[^/]+)", Handler.commit),
    (f"GET {_API}/refs", Handler.list_refs),
    (f"GET {_API}/tree/(?P<revision>[^/]+)(?P<folder>/.+)?", Handler.list_tree),
    (f"GET {_API}/revision/(?P<revision>[^/]+)", Handler.info),
    (f"GET {_API}", Handler.info),
    (f"POST {_API}/tag/(?P<revision>[^/]+)", Handler.add_tag),
    (f"DELETE {_API}/tag/(?P<name>[^/]+)", Handler.remove_tag),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    (rf"POST /{_REPO}\.git/info/lfs/objects/verify", Handler.verify),
    ("PUT /_lfs/(?P<oid>[0-9a-f]{64})", Handler.upload),
    (r"PUT /_lfs/(?P<oid>[0-9a-f]{64})/(?P<part>\d+)", Handler.upload),
    ("POST /_lfs/(?P<oid>[0-9a-f]{64})/complete", Handler.complete),
    ("(GET|HEAD) /_cdn/(?P<oid>[0-9a-f]{64})", Handler.cdn),
    (f"(GET|HEAD) /{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
]


def main() -> None:
    """Serves until the process that started it ends."""
    directory = Path(sys.argv[1])
    shutil.rmtree(directory / "objects", ignore_errors=True)
    Handler.state = State(directory, int(sys.argv[2]))
    host = sys.argv[3] if len(sys.argv) > 3 else "127.0.0.1"
    server = ThreadingHTTPServer((host, 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://{host}:{server.server_port}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
