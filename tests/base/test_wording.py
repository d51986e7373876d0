"""Numbers in the messages that people read."""

from __future__ import annotations

import threading

import pytest

from spes_swarm.base.wording import loss_with_error, one_to, plural, said_if_slow


@pytest.mark.parametrize(("count", "words"), [(0, "0 peers"), (1, "1 peer"), (2, "2 peers"), (12_000, "12,000 peers")])
def test_one_thing_is_no_plural(count: int, words: str) -> None:
    assert plural(count, "peer") == words


@pytest.mark.parametrize(("most", "words"), [(1, "1 expert"), (8, "1 to 8 experts")])
def test_a_range_of_one_is_no_range(most: int, words: str) -> None:
    assert one_to(most, "expert") == words


@pytest.mark.parametrize(
    ("loss", "stderr", "words"),
    [(2.2189, 0.04, "2.219 ± 0.040"), (2.2, 0.0412, "2.200 ± 0.041"), (2.2189, None, "2.219"), (None, None, "-")],
)
def test_a_loss_is_as_precise_as_its_error(loss: float | None, stderr: float | None, words: str) -> None:
    assert loss_with_error(loss, stderr) == words


def test_a_text_that_nobody_reads_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    said, faults = threading.Event(), list[object]()
    monkeypatch.setattr("spes_swarm.base.wording._SILENCE_S", 0.0)
    monkeypatch.setattr(threading, "excepthook", faults.append)

    def say(text: str) -> None:
        said.set()
        raise BrokenPipeError

    before = set(threading.enumerate())
    with said_if_slow("still reading", say):
        speaking = set(threading.enumerate()) - before
        said.wait()
    for thread in speaking:
        thread.join()
    assert faults == []
