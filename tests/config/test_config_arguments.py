"""The command line: flags come before the file, and which experts are wanted."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.base.errors import ConfigError
from spes_swarm.config.experts_wanted import parse_experts
from spes_swarm.config.peer import PeerConfig, override

PEER = "/ip4/192.0.2.1/tcp/5/p2p/QmcGbWygcjpFFa1Tmx6LRxgVbKtWvyn5nMKmaQJ8hKAzY7"


def test_override_applies_the_flags_that_were_given() -> None:
    peer = PeerConfig(experts="3", seed=5)
    changed = override(peer, experts=None, seed=6, initial_peers=[PEER], client_mode=True)
    assert changed == dataclasses.replace(peer, seed=6, initial_peers=(PEER,), client_mode=True)
    with pytest.raises(ConfigError, match=r"^command line: peer\.wait_for_peers: found 0, expected a whole number"):
        override(peer, wait_for_peers=0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", "auto"),
        (" auto ", "auto"),
        ("1", 1),
        ("8", 8),
        ("0,3", (0, 3)),
        ("7, 2 ,5", (2, 5, 7)),
        ("3,", (3,)),
        ("0,1,2,3,4,5,6,7", tuple(range(8))),
    ],
)
def test_experts_are_parsed(text: str, expected: object) -> None:
    parsed = parse_experts(text, 8)
    assert parsed == expected
    assert type(parsed) is type(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected auto, a number of experts, or experts such as 0,3,5"),
        (",", "expected auto"),
        ("0,,1", "expected auto"),
        (",1", "expected auto"),
        ("-1", "expected auto"),
        ("1.5", "expected auto"),
        ("two", "expected auto"),
        ("AUTO", "expected auto"),
        ("auto,1", "expected auto"),
        ("٣", "expected auto"),
        ("²", "expected auto"),
        ("0", "expected 1 to 8 experts"),
        ("9", "expected 1 to 8 experts"),
        ("9" * 5000, "expected auto"),
        ("0,8", "expected experts from 0 to 7"),
        ("1,1", "expected each expert once (1 is repeated)"),
        ("1,01", "expected each expert once (1 is repeated)"),
    ],
)
def test_experts_that_cannot_be_meant(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_experts(text, 8)
    assert str(caught.value).startswith("experts: found ")
    assert message in str(caught.value)


def test_a_model_with_a_single_expert_is_spoken_of_in_the_singular() -> None:
    for text, expected in (("2", "expected 1 expert (for expert 2: '2,')"), ("1,", "expected expert 0 (the model")):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            parse_experts(text, 1)


@given(st.text(max_size=12), st.integers(1, 64))
def test_any_text_is_parsed_or_refused(text: str, num_experts: int) -> None:
    try:
        wanted = parse_experts(text, num_experts)
    except ConfigError:
        return
    if isinstance(wanted, tuple):
        assert wanted
        assert all(0 <= expert < num_experts for expert in wanted)
    else:
        assert wanted == "auto" or 1 <= wanted <= num_experts


@pytest.mark.slow
@given(st.sets(st.integers(0, 63), min_size=1))
def test_chosen_experts_round_trip(experts: set[int]) -> None:
    assert parse_experts(",".join(map(str, experts)) + ",", 64) == tuple(sorted(experts))
