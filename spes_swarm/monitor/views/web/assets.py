"""The page's files, read once from the package and served from memory: no request path is ever looked up on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "LICENSE": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file."""

    body: bytes
    content_type: str
    etag: str  # quoted hash of the content: browsers notice a new version at once

    def response(self, request: Request) -> Response:
        """The file, or 304 if the browser has it."""
        headers = {"ETag": self.etag, "Cache-Control": "no-cache"}
        known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if self.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers={**headers, "Content-Type": self.content_type})


def load_assets() -> Mapping[str, Asset]:
    """All files below `static`, by their path there."""
    return dict(_walk(files("spes_swarm.monitor.views.web") / "static", ""))


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Asset]]:
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            yield from _walk(entry, name + "/")
        elif (kind := _TYPES.get(entry.name.rpartition(".")[2])) is not None:
            body = entry.read_bytes()
            yield name, Asset(body, kind, f'"{hashlib.sha256(body).hexdigest()[:16]}"')
