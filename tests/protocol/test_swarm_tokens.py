"""Who knows how many tokens the whole swarm has trained on."""

from __future__ import annotations

from spes_swarm.protocol.members.swarm_tokens import SwarmTokens


def test_a_founder_knows_it() -> None:
    tokens = SwarmTokens()
    tokens.add(10)
    tokens.add(20)
    assert (tokens.count, tokens.published_count) == (30, 30)


def test_a_newcomer_says_nothing_until_it_has_learnt_it() -> None:
    tokens = SwarmTokens()
    tokens.missed_commits()
    tokens.learn(0, alone=False)  # the others are a round further on already
    tokens.add(10)
    assert tokens.published_count == 0
    tokens.learn(1000, alone=False)
    assert (tokens.count, tokens.published_count) == (1000, 1000)
    tokens.learn(5, alone=False)  # it knows better
    tokens.add(10)
    assert tokens.published_count == 1010


def test_who_is_left_alone_keeps_what_it_has() -> None:
    tokens = SwarmTokens()
    tokens.add(500)
    tokens.missed_commits()
    assert tokens.published_count == 0
    tokens.learn(0, alone=True)
    assert tokens.published_count == 500
