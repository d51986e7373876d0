"""Ranks that end before they have met: none of them waits for the others, and rank 0 alone reports why."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from spes_swarm.join import main
from spes_swarm.peer.stop_signals import StopSignals

TORCHRUN = {
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "none",
}


@pytest.fixture(autouse=True)
def no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StopSignals, "install", lambda self: None)


def be_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "RANK": str(rank), "LOCAL_RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("flag", "printed"), [("--help", "usage: "), ("--version", "spes_swarm ")])
def test_all_ranks_end_after_a_text_that_rank_0_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, flag: str, printed: str
) -> None:
    be_rank(rank, monkeypatch)
    with pytest.raises(SystemExit) as ended:
        main([flag])
    assert ended.value.code == 0
    output = capsys.readouterr()
    assert output.out.startswith(printed) if rank == 0 else output.out == ""
    assert output.err == ""


@pytest.mark.parametrize(("rank", "code", "error"), [(0, 2, "join: unknown flag --bad; see --help\n"), (1, 0, "")])
def test_all_ranks_end_at_a_mistake_that_rank_0_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, code: int, error: str
) -> None:
    """Rank 0 alone fails: torchrun ends the others once one has failed, and must not end rank 0 before its report."""
    be_rank(rank, monkeypatch)
    assert main(["--bad"]) == code
    assert capsys.readouterr() == ("", error)


@pytest.mark.parametrize(("num_ranks", "code"), [(1, 0), (2, 1)])
def test_a_signal_to_rank_0_alone_ends_the_others(monkeypatch: pytest.MonkeyPatch, num_ranks: int, code: int) -> None:
    """Torchrun ends them only if rank 0 fails."""
    be_rank(0, monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    monkeypatch.setattr(StopSignals, "install", lambda self: self.requested.set())
    assert main([]) == code


def test_a_rank_that_is_slow_to_import_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    be_rank(1, monkeypatch)
    said: list[str] = []

    @contextmanager
    def at_once(text: str, say: object) -> Iterator[None]:
        said.append(text)
        yield

    monkeypatch.setattr("spes_swarm.join.said_if_slow", at_once)
    follower = SimpleNamespace(follow=lambda placement: placement.rank)
    monkeypatch.setitem(sys.modules, "spes_swarm.training.ranks.follower", follower)
    assert main([]) == 1
    assert said == ["rank 1 of this peer is still importing torch; Ctrl-C stops"]
