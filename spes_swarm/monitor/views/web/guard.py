"""Access rules of the web server: methods, hosts, origins, and security headers.

The page and its data are public to any client that reaches the port, but a *web site* that a user of this machine
visits must not be able to read them through that user's browser. Three rules prevent it. No CORS header is ever sent.
Requests that a browser marks as cross-site are refused. On loopback the Host header must name loopback, because a site
can point its own name at 127.0.0.1 (DNS rebinding), and would then be the same origin.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# No inline scripts or styles, nothing from other origins, and (trusted types) no way to turn a string into markup.
CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
SECURITY_HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Guard:
    """Middleware around the whole application, error responses included."""

    def __init__(self, app: ASGIApp, *, loopback_only: bool) -> None:
        self._app = app
        self._loopback_only = loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses or passes on a request; the response carries the security headers either way."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("only GET and HEAD are allowed\n", 405, {"Allow": "GET, HEAD"})
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            return PlainTextResponse("exactly one Host header is required\n", 400)
        if self._loopback_only and not names_loopback(hosts[0]):
            return PlainTextResponse("this monitor serves localhost only\n", 421)
        if not _same_origin(headers, hosts[0]):
            return PlainTextResponse("requests from other origins are refused\n", 403)
        return None


def names_loopback(authority: str) -> bool:
    """Returns True if a Host header names loopback, with any port, since tunnels (ssh -L) change it."""
    name, port = authority, ""
    if authority.startswith("["):
        name, _, rest = authority[1:].partition("]")
        if rest and not rest.startswith(":"):
            return False
        port = rest[1:]
    elif authority.count(":") == 1:
        name, _, port = authority.partition(":")
    if port and not (port.isascii() and port.isdigit()):
        return False
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _same_origin(headers: Headers, host: str) -> bool:
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return False
    site = headers.get("sec-fetch-site", "none")  # absent: an old browser, or no browser
    if site in ("same-origin", "none"):
        return True
    # A link on another site may open the page in a tab, but no site may embed or fetch it.
    return headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
