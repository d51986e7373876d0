"""The monitor's web server, asked over real connections while a made-up swarm goes on."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from contextlib import suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from spes_swarm.base.errors import UserError
from spes_swarm.monitor.views.web import listen, server
from spes_swarm.monitor.views.web.guard import names_loopback
from tests.helpers.served_monitor import PATIENCE_S, Served, a_swarm


def test_the_state_follows_the_published_schema(served: Served) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = served.ask("/api/schema")
    assert schema.headers["content-type"] == "application/schema+json"
    state = served.ask("/api/state").json()
    jsonschema.Draft202012Validator(schema.json()).validate(state)
    assert [peer["name"] for peer in state["peers"]].count("ada") == 1
    assert state["round"] == 3


def test_the_history_can_be_asked_for_from_a_round_on(served: Served) -> None:
    assert [point["round"] for point in served.ask("/api/history").json()] == [1, 2, 3]
    assert [point["round"] for point in served.ask("/api/history?since=3").json()] == [3]
    assert served.ask("/api/history?since=-1").status == 400
    assert served.ask("/api/history?since=%F0%9D%9F%99").status == 400  # a digit, but not an ASCII one


def test_prometheus_reads_the_metrics(served: Served) -> None:
    answer = served.ask("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
    rounds = [sample.value for name, family in families.items() if name.endswith("_round") for sample in family.samples]
    assert 3.0 in rounds


def test_healthy_is_the_monitor_whatever_it_sees(served: Served) -> None:
    assert served.ask("/healthz").json() == {"status": "ok", "round": 3, "peers": 4}
    served.swarm.advance(0.1)
    served.tell(peers=(), status="no_peers", silent_s=4.0)
    deadline = time.monotonic() + PATIENCE_S
    while served.ask("/healthz").json()["peers"] and time.monotonic() < deadline:
        pass
    assert served.ask("/healthz").status == 200


@pytest.mark.parametrize(
    "path", ["/", "/static/style.css", "/api/state", "/metrics", "/healthz", "/nothing", "/api/events"]
)
def test_every_answer_carries_the_security_headers(served: Served, path: str) -> None:
    answer = served.ask(path, "HEAD")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert "server" not in answer.headers
    assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_the_page_brings_all_its_files(served: Served) -> None:
    page = served.ask("/").body.decode()
    assert "<style" not in page
    assert " style=" not in page
    assert " on" + "click" not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    for path in ("/static/main.js", "/static/vendor/uPlot.iife.min.js", "/static/vendor/uPlot.LICENSE"):
        assert served.ask(path).status == 200
    style = served.ask("/static/style.css")
    assert served.ask("/static/style.css", headers={"If-None-Match": style.headers["etag"]}).status == 304
    packed = served.ask("/static/style.css", headers={"Accept-Encoding": "gzip"})
    assert gzip.decompress(packed.body) == style.body


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/static/"]
)
def test_no_other_file_can_be_read(served: Served, path: str) -> None:
    assert served.ask(path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(served: Served, method: str) -> None:
    answer = served.ask("/api/state", method)
    assert answer.status == 405
    assert answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "localhost.evil.example", ""]
)
def test_a_name_that_was_rebound_to_loopback_is_refused(served: Served, host: str) -> None:
    for path in ("/", "/api/state", "/api/events"):
        assert served.ask(path, headers={"Host": host}).status == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9", "127.0.0.1", "127.1.2.3:4000", "[::1]:80", "::1"])
def test_names_of_loopback_are_served_at_any_port(host: str) -> None:
    assert names_loopback(host)


@pytest.mark.parametrize(
    "host", ["[::1]x", "localhost:80:80", "localhost:x", "[::2]", "0.0.0.0", "127.0.0.1:1@evil.example"]
)
def test_what_only_looks_like_loopback_is_not(host: str) -> None:
    assert not names_loopback(host)


def test_two_host_headers_are_one_too_many(served: Served) -> None:
    raw = b"GET /api/state HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S) as connection:
        connection.sendall(raw)
        assert b" 400 " in connection.recv(4096).split(b"\r\n")[0]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:9999"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    ],
)
def test_other_origins_read_nothing(served: Served, headers: dict[str, str]) -> None:
    for path in ("/api/state", "/api/history", "/api/events", "/metrics", "/static/main.js"):
        assert served.ask(path, headers=headers).status == 403


def test_a_link_from_elsewhere_opens_the_page(served: Served) -> None:
    arriving = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert served.ask("/", headers=arriving).status == 200
    own = {"Origin": f"http://127.0.0.1:{served.port}", "Sec-Fetch-Site": "same-origin"}
    assert served.ask("/api/state", headers=own).status == 200


@pytest.mark.slow
def test_who_asks_nothing_and_who_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TIMEOUT_S", 1.0)
    cut_off = threading.Event()

    class Told(server._TimedProtocol):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._stuck_since is not None:
                cut_off.set()

    monkeypatch.setattr(server, "_TimedProtocol", Told)
    with Served(a_swarm(num_peers=400)) as served:
        with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S) as silent:
            assert _ends(silent)
        with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S) as slow:
            slow.sendall(b"GET /api/sta")
            assert _ends(slow)
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.settimeout(PATIENCE_S)
            deaf.connect(("127.0.0.1", served.port))
            # The answers are more than the buffers of both sides hold.
            deaf.sendall(40 * b"GET /api/state HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert cut_off.wait(PATIENCE_S)  # it has read nothing
            assert _ends(deaf)
        assert served.ask("/healthz").status == 200


def _ends(connection: socket.socket) -> bool:
    """Whether the other side closes the connection; what it still sends is read and dropped."""
    with suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


def test_the_number_of_connections_is_bounded(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    holding = [socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S) for _ in range(3)]
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S) as one_more:
        assert _ends(one_more)
    for connection in holding:
        connection.close()


def test_rubbish_is_answered_and_forgotten(served: Served) -> None:
    for raw in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\nHost: x\r\n\r\n", b"A" * 100_000):
        with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S) as connection:
            with suppress(OSError):  # it may hang up before it has heard all
                connection.sendall(raw + b"\r\n\r\n")
                connection.shutdown(socket.SHUT_WR)
            assert _ends(connection)
    assert served.ask("/healthz").status == 200


@pytest.mark.parametrize(
    ("host", "port", "reason"),
    [
        ("no-such-host.invalid", 8080, "no such host"),
        ("192.0.2.1", 8080, "no such address"),
        ("127.0.0.1", 70_000, "0 to 65535"),
        ("a" * 300, 8080, "no such host"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_clear_line(host: str, port: int, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as raised:
        listen(host, port)
    assert "\n" not in str(raised.value)


def test_a_port_in_use_is_one_clear_line(served: Served) -> None:
    with pytest.raises(UserError, match="another program uses this port"):
        listen("127.0.0.1", served.port)


def test_another_host_than_loopback_is_served_when_told_so() -> None:
    with Served(a_swarm(), host="0.0.0.0") as served:
        assert served.ask("/api/state", headers={"Host": "monitor.example"}).status == 200
        assert (
            served.ask("/api/state", headers={"Host": "monitor.example", "Origin": "http://evil.example"}).status == 403
        )
