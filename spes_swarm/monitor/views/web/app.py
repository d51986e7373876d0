"""The HTTP routes of the monitor."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from spes_swarm.monitor.schema import STATE_SCHEMA
from spes_swarm.monitor.state import StateSource
from spes_swarm.monitor.views.prometheus import metrics_text
from spes_swarm.monitor.views.web.assets import load_assets
from spes_swarm.monitor.views.web.feed import EventStream, Feed
from spes_swarm.monitor.views.web.guard import Guard

_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"


def build_app(source: StateSource, feed: Feed, *, loopback_only: bool) -> Guard:
    """Builds the ASGI application: the page, its event stream, and the routes for scripts and Prometheus."""
    assets = load_assets()

    async def page(request: Request) -> Response:
        return assets["index.html"].response(request)

    async def asset(request: Request) -> Response:
        found = assets.get(request.path_params["path"])
        if found is None:
            raise HTTPException(404)
        return found.response(request)

    # Responses that can be large are serialised in a thread: the event loop also serves the swarm's network.

    async def state(request: Request) -> Response:
        now = source.state()
        return await asyncio.to_thread(lambda: _json(now.to_json()))

    async def history(request: Request) -> Response:
        since = _round(request, "since")
        points = [point for point in source.history() if point.round >= since]
        return await asyncio.to_thread(lambda: _json([point.to_json() for point in points]))

    async def published_schema(request: Request) -> Response:
        return _json(STATE_SCHEMA, "application/schema+json")

    async def metrics(request: Request) -> Response:
        text = await asyncio.to_thread(metrics_text, source.state())
        return Response(text, headers={"Content-Type": _PROMETHEUS})

    async def healthz(request: Request) -> Response:
        # This is the health of the monitor, not of the swarm: an empty swarm is no reason to restart the monitor.
        now = source.state()
        return _json({"status": "ok", "round": now.round, "peers": now.num_peers})

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/static/{path:path}", asset),
            Route("/api/state", state),
            Route("/api/history", history),
            Route("/api/schema", published_schema),
            Route("/api/events", EventStream(feed)),
            Route("/metrics", metrics),
            Route("/healthz", healthz),
        ],
        middleware=[Middleware(GZipMiddleware, minimum_size=2_000, compresslevel=5)],
        exception_handlers={HTTPException: _plain},
    )
    return Guard(app, loopback_only=loopback_only)


def _json(value: Any, content_type: str = "application/json") -> Response:
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return Response(body, headers={"Content-Type": content_type})


def _round(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise HTTPException(400, f"{name} must be a round number")
    return int(text)


async def _plain(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return PlainTextResponse(f"{error.detail}\n", error.status_code)
