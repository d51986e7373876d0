"""A tokenizer that the founder made is fetched piece by piece, from whoever has the right one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from blake3 import blake3

from spes_swarm.base.decoding import MAX_TOKENIZER_BYTES
from spes_swarm.base.errors import ProtocolError
from spes_swarm.config.manifest import found_run
from spes_swarm.network.link.manifest_query import ask_for_tokenizer
from spes_swarm.network.link.rpc import RemoteError, Rpc
from spes_swarm.network.link.run_dht import RunDht
from spes_swarm.network.transport.daemon import Daemon
from tests.helpers.lone_trainer import run_config
from tests.helpers.rounds import identity

PACKED = bytes(range(256)) * 10_000  # two and a half pieces
DIGEST = blake3(PACKED).hexdigest()


class Peers:
    """Answers calls as other peers would: `serve` gives each its handler."""

    def __init__(self, **serve: Callable[[int], Any]) -> None:
        self._serve = serve
        self.calls: list[str] = []

    async def call(self, peer_id: str, method: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        """See Rpc."""
        assert (method, timeout_s > 0) == ("tokenizer", True)
        self.calls.append(peer_id)
        answer = self._serve[peer_id](arguments["offset"])
        return await answer if asyncio.iscoroutine(answer) else answer

    def ask(self) -> bytes | None:
        """Asks them all."""
        return asyncio.run(ask_for_tokenizer(cast(Rpc, self), list(self._serve), DIGEST))


def served_from(path: Path) -> Callable[[int], Any]:
    """What a peer with this file answers."""

    class _Rpc:
        on_fault = None

    class _Daemon:
        peer_id = "me"

    manifest = found_run(run_config(), "ab" * 32, identity(0))
    dht = RunDht(cast(Daemon, _Daemon()), cast(Rpc, _Rpc()), manifest, lambda *_: None, path)
    return lambda offset: dht._serve_tokenizer("friend", {"offset": offset})


def refuse(offset: int) -> Any:
    raise RemoteError("unknown method")


def test_it_comes_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(PACKED)
    peers = Peers(older=refuse, good=served_from(tmp_path / "packed"))
    assert peers.ask() == PACKED
    assert peers.calls == ["older", "good", "good", "good"]


def test_a_file_that_cannot_be_read_is_an_answer(tmp_path: Path) -> None:
    assert asyncio.run(served_from(tmp_path / "none")(0)) == {"error": "the tokenizer cannot be read"}


@pytest.mark.parametrize("offset", [-1, MAX_TOKENIZER_BYTES + 1, "0", None, 0.5])
def test_an_offset_that_makes_no_sense_is_a_fault(tmp_path: Path, offset: Any) -> None:
    (tmp_path / "packed").write_bytes(PACKED)
    with pytest.raises(ProtocolError, match="offset"):
        asyncio.run(served_from(tmp_path / "packed")(offset))


@pytest.mark.parametrize(
    ("answer", "num_calls"),
    [
        ({"piece": b"x", "size": MAX_TOKENIZER_BYTES + 1}, 1),
        ({"piece": b"x" * 8, "size": 4}, 1),
        ({"piece": b"", "size": 4}, 1),
        ({"piece": "text", "size": 4}, 1),
        ({"size": 4}, 1),
        ({"piece": b"xx", "size": 4}, 2),
    ],
)
def test_liars_are_passed_over(tmp_path: Path, answer: dict[str, Any], num_calls: int) -> None:
    (tmp_path / "packed").write_bytes(PACKED)
    peers = Peers(liar=lambda _: answer, good=served_from(tmp_path / "packed"))
    assert peers.ask() == PACKED
    assert peers.calls.count("liar") == num_calls
    assert Peers(liar=lambda _: answer).ask() is None
