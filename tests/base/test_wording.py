"""Numbers in the messages that people read."""

from __future__ import annotations

import pytest

from spes_swarm.base.wording import loss_with_error, one_to, plural


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
