"""Numbers in the messages that people read."""

from __future__ import annotations

import pytest

from spes_swarm.wording import one_to, plural


@pytest.mark.parametrize(("count", "words"), [(0, "0 peers"), (1, "1 peer"), (2, "2 peers"), (12_000, "12,000 peers")])
def test_one_thing_is_no_plural(count: int, words: str) -> None:
    assert plural(count, "peer") == words


@pytest.mark.parametrize(("most", "words"), [(1, "1 expert"), (8, "1 to 8 experts")])
def test_a_range_of_one_is_no_range(most: int, words: str) -> None:
    assert one_to(most, "expert") == words
