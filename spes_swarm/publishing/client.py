"""huggingface_hub as this package uses it: deadlines, a count of the bytes sent, and actionable errors.

The library handles tokens (HF_TOKEN, or `hf auth login`); nothing here reads or logs one. The library's log contains
upload URLs, which are signed and work like passwords. So it is silenced, and no message of this package quotes a URL.

Weights are sent by the Hub's Xet protocol to huggingface.co, and by Git LFS to other servers: with Xet installed the
library always uses it, but other servers that speak the Hub's protocol support only LFS. HF_HUB_DISABLE_XET overrides.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, TypeVar

from huggingface_hub import HfApi, constants, get_session, get_token, is_offline_mode, set_client_factory
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported lazily
    disable_progress_bars,
    httpx,
    is_package_available,
)

from spes_swarm.base.errors import HubError
from spes_swarm.base.log import divert
from spes_swarm.base.rate_limit import RateLimit

TIMEOUT = httpx.Timeout(60.0, connect=15.0)  # per read and write, not per transfer
ATTEMPTS: Final = 5
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
LONGEST_RETRY_AFTER_S: Final = 900.0  # if the Hub asks for a longer wait, the call fails
# A check at the start of a session does not wait long: the Hub is not needed yet.
QUICK: Final = httpx.Timeout(10.0)
_TRANSIENT: Final = frozenset({408, 429, 500, 502, 503, 504})
_OFFICIAL: Final = frozenset({"https://huggingface.co", "https://hf.co"})

AGAIN: Final = "run the command again to continue"  # advice where nothing else tries again

T = TypeVar("T")
# What the library raises for failed requests; it wraps errors of its threads in RuntimeError.
FAILURES = (httpx.TransportError, HfHubHTTPError, json.JSONDecodeError, RuntimeError)


class Traffic:
    """Counts and limits the request bodies that this process sends to Hubs, except for those that Xet sends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes_sent = 0  # total so far
        self.limit = RateLimit()  # shared by all threads

    def limited(self, body: Iterable[bytes]) -> Iterator[bytes]:
        """Yields a request's body, no faster than allowed; thread-safe."""
        for data in body:
            with self._lock:
                wait_s = self.limit.wait_s(self.limit.book(len(data)))
            time.sleep(wait_s)
            yield data
            with self._lock:
                self.bytes_sent += len(data)


class _Counted(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        return TRAFFIC.limited(self._stream)

    def close(self) -> None:
        self._stream.close()


TRAFFIC: Final = Traffic()


def _count(request: httpx.Request) -> None:
    if isinstance(request.stream, httpx.SyncByteStream):
        request.stream = _Counted(request.stream)


def _make_client(timeout: httpx.Timeout, hooks: Sequence[Callable[[httpx.Request], object]]) -> httpx.Client:
    return httpx.Client(event_hooks={"request": [*hooks, _count]}, follow_redirects=True, timeout=timeout)


def limit_upload(mbps: float) -> None:
    """Limits uploads to `mbps` Mbit/s. Disables Xet, whose uploads cannot be limited."""
    TRAFFIC.limit.set_rate(mbps * 1e6 / 8)
    os.environ["HF_HUB_DISABLE_XET"] = "1"
    constants.HF_HUB_DISABLE_XET = True


def uses_xet() -> bool:
    """Returns True if weights are sent by Xet, and thus not counted."""
    return not constants.HF_HUB_DISABLE_XET and bool(is_package_available("hf_xet"))


def hub_api(timeout: httpx.Timeout | None = None) -> HfApi:
    """Configures the library for this process and returns its API object; contacts no server."""
    # The library's own hooks keep requests from being sent with HF_HUB_OFFLINE, and count downloads for the Hub.
    hooks = [hook for hook in get_session().event_hooks["request"] if hook is not _count]
    set_client_factory(partial(_make_client, timeout or TIMEOUT, hooks))
    disable_progress_bars()
    divert("huggingface_hub")
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT
    if "HF_HUB_DISABLE_XET" not in os.environ:
        constants.HF_HUB_DISABLE_XET = endpoint not in _OFFICIAL
    return HfApi(endpoint=endpoint, library_name="spes_swarm")


def with_retries(call: Callable[[], T], attempts: int = ATTEMPTS) -> T:
    """Retries an idempotent call while the Hub is busy or the connection fails.

    Raises:
        The exception of the last attempt.
    """
    for attempt in range(attempts):
        try:
            return call()
        except FAILURES as exc:
            wait_or_raise(exc, attempt + ATTEMPTS - attempts)
    raise AssertionError("the loop returns or raises")


def wait_or_raise(exc: Exception, attempt: int) -> None:
    """Waits before another attempt (numbers start at 0), for as long as the Hub asks.

    Raises:
        `exc`, if another attempt will not help.
    """
    if not is_passing(exc) or attempt == ATTEMPTS - 1:
        raise exc
    wait_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt)
    root = root_of(exc)
    if isinstance(root, HfHubHTTPError):
        with suppress(ValueError):  # the header is missing, or a date
            wait_s = max(float(root.response.headers.get("Retry-After", "")), 0.0)
    if not wait_s <= LONGEST_RETRY_AFTER_S:
        raise exc
    time.sleep(wait_s)


def without_advice(message: str) -> str:
    """Removes from the message of a HubError the advice to try again, for where that happens anyway."""
    return message.removesuffix(f"; {AGAIN}").removesuffix("; try again later")


def is_passing(exc: BaseException | None) -> bool:
    """Returns True for a failure of the connection or the Hub, which says nothing about what the Hub allows."""
    root = None if exc is None else root_of(exc)
    if isinstance(root, HfHubHTTPError):
        return root.response.status_code in _TRANSIENT
    return isinstance(root, httpx.TransportError | json.JSONDecodeError)


def root_of(exc: BaseException) -> BaseException:
    """Returns the cause inside the RuntimeError in which the library wraps failed uploads."""
    while type(exc) is RuntimeError and exc.__cause__ is not None:
        exc = exc.__cause__
    return exc


def check_access(label: str) -> None:
    """Checks what can be known without contacting the Hub.

    Raises:
        HubError: there is no token, or the Hub must not be contacted.
    """
    with translate_hub_errors(label):
        if is_offline_mode():
            raise OfflineModeIsEnabled
        if get_token() is None:
            raise LocalTokenNotFoundError


@contextmanager
def translate_hub_errors(label: str) -> Iterator[None]:
    """Maps exceptions of the library to a HubError that explains them to the user, and names the repository.

    Raises:
        HubError: in place of the library's exceptions.
    """
    try:
        yield
    except (OSError, RuntimeError, ValueError, httpx.HTTPError) as exc:
        raise HubError(_meaning(root_of(exc), label)) from exc


def _meaning(exc: BaseException, label: str) -> str:
    """Returns one line without URLs, paths and tokens."""
    if isinstance(exc, LocalTokenNotFoundError):
        return f"publishing to {label} needs a Hub token: set HF_TOKEN, or run `hf auth login`"
    if isinstance(exc, OfflineModeIsEnabled):
        return f"{label}: HF_HUB_OFFLINE is set; unset it to reach the Hub"
    if isinstance(exc, HfHubHTTPError):
        return _meaning_of_status(exc, label)
    if isinstance(exc, httpx.TimeoutException):
        return f"{label}: the Hub does not answer in time; {AGAIN}"
    if isinstance(exc, httpx.HTTPError):
        return f"{label}: the connection to the Hub failed ({type(exc).__name__}); {AGAIN}"
    if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{label}: this machine's disk is full"
    if isinstance(exc, OSError) and exc.strerror:
        return f"{label}: {exc.strerror}"
    return f"{label}: the Hub sent an invalid response ({type(exc).__name__})"


def _meaning_of_status(exc: HfHubHTTPError, label: str) -> str:
    status = exc.response.status_code
    if status == 401 and not isinstance(exc, RepositoryNotFoundError):
        return f"{label}: the Hub does not accept the token; check HF_TOKEN, or run `hf auth login`"
    if isinstance(exc, GatedRepoError):
        return f"{label}: the repository is gated; request access on its page"
    if status == 403:
        return f"{label}: the token does not allow this; it needs write access to {label}"
    if isinstance(exc, RevisionNotFoundError):
        return f"{label} has no such revision"
    if status in (401, 404):
        return f"{label}: there is no such repository, or the token gives no access to it"
    if status == 429:
        return f"{label}: the Hub limits the request rate (429); try again later"
    if status in (413, 507):
        return f"{label}: the Hub has no room left for these files ({status}); free some space, or request more"
    return f"{label}: the Hub answered with an error ({status}); earlier publications are intact"
