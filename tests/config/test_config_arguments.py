"""The command line: flags come before the file, and which experts are wanted."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.base.errors import ConfigError
from spes_swarm.config.experts_wanted import ExpertsWanted
from spes_swarm.config.peer import PeerConfig, override

PEER = "/ip4/192.0.2.1/tcp/5/p2p/QmcGbWygcjpFFa1Tmx6LRxgVbKtWvyn5nMKmaQJ8hKAzY7"


def test_override_applies_the_flags_that_were_given() -> None:
    peer = PeerConfig(experts=ExpertsWanted.parse("3"), seed=5)
    changed = override(peer, experts=None, seed=6, initial_peers=[PEER], client_mode=True)
    assert changed == dataclasses.replace(peer, seed=6, initial_peers=(PEER,), client_mode=True)
    with pytest.raises(ConfigError, match=r"^command line: peer\.wait_for_peers: found 0, expected a whole number"):
        override(peer, wait_for_peers=0)


def wanted_of(text: str, num_experts: int) -> ExpertsWanted:
    """What a peer trains of a model with that many experts."""
    wanted = PeerConfig.from_dict({"experts": text}, "here").experts
    wanted.check(num_experts)
    return wanted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", (None, None)),
        (" auto ", (None, None)),
        ("1", (1, None)),
        ("8", (8, None)),
        ("0,3", (2, (0, 3))),
        ("7, 2 ,5", (3, (2, 5, 7))),
        ("3,", (1, (3,))),
        ("0,1,2,3,4,5,6,7", (8, tuple(range(8)))),
    ],
)
def test_experts_are_parsed(text: str, expected: tuple[int | None, tuple[int, ...] | None]) -> None:
    parsed = wanted_of(text, 8)
    assert (parsed.number, parsed.named) == expected
    assert str(parsed) == text
    peer = PeerConfig.from_dict({"experts": text}, "here")
    assert peer.experts == parsed
    assert peer.to_dict()["experts"] == text


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
        ("0", "expected at least 1 expert (for expert 0: '0,')"),
        ("4097", "expected 1 to 4,096 experts"),  # known before the run is
        ("4096,", "expected experts from 0 to 4095"),
        ("9", "expected 1 to 8 experts"),
        ("9" * 5000, "expected auto"),
        ("0,8", "expected experts from 0 to 7"),
        ("1,1", "expected each expert once (1 is repeated)"),
        ("1,01", "expected each expert once (1 is repeated)"),
    ],
)
def test_experts_that_cannot_be_meant(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wanted_of(text, 8)
    assert str(caught.value).startswith(("experts: found ", "here: peer.experts: found "))
    assert message in str(caught.value)


def test_a_model_with_a_single_expert_is_spoken_of_in_the_singular() -> None:
    for text, expected in (("2", "expected 1 expert"), ("1,", "expected expert 0 (the model")):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            wanted_of(text, 1)


@given(st.text(max_size=12), st.integers(1, 64))
def test_any_text_is_parsed_or_refused(text: str, num_experts: int) -> None:
    try:
        wanted = wanted_of(text, num_experts)
    except ConfigError:
        return
    if wanted.named is not None:
        assert wanted.number == len(wanted.named) > 0
        assert all(0 <= expert < num_experts for expert in wanted.named)
    else:
        assert text.strip() == "auto" if wanted.number is None else 1 <= wanted.number <= num_experts


@pytest.mark.slow
@given(st.sets(st.integers(0, 63), min_size=1))
def test_chosen_experts_round_trip(experts: set[int]) -> None:
    assert wanted_of(",".join(map(str, experts)) + ",", 64).named == tuple(sorted(experts))
