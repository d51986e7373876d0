"""Compact text for curves, peers and refused records."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from spes_swarm.base.wording import plural, seconds
from spes_swarm.monitor.state import Accused, Excluded, SwarmState

_STEPS: Final = " ▁▂▃▄▅▆▇█"


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """Draws a curve in block characters, `height` lines of `width` columns; the lowest value is still visible.

    More values than columns are averaged; fewer leave the columns at the right empty.
    """
    if not values:
        return []
    columns = _resampled(values, width)
    low, high = min(columns), max(columns)
    span = high - low
    levels = height * (len(_STEPS) - 1)
    filled = [1 + round((levels - 1) * ((value - low) / span)) if span > 0 else levels // 2 for value in columns]
    full = len(_STEPS) - 1
    return [
        "".join(_STEPS[min(max(level - full * row, 0), full)] for level in filled).rstrip()
        for row in reversed(range(height))
    ]


def _resampled(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [index * len(values) // width for index in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def peer_words(state: SwarmState) -> str:
    """The number of peers and whether they agree, or how long ago the last one was seen."""
    if state.status == "no_peers":
        if state.silent_s is None:
            return "no peers"
        return f"no peers: the last one was seen {seconds(state.silent_s)} ago"
    return plural(state.num_peers, "peer") + agreement(state)


def agreement(state: SwarmState) -> str:
    """Whether the peers' references agree, as the end of a sentence; empty if there is nothing to compare."""
    differ = len(state.consensus.differ)
    if differ:
        return f", {differ} differ{'s' if differ == 1 else ''}"
    return ", all agree" if state.consensus.agree > 1 else ""


def name_of(state: SwarmState, peer_id: str) -> str:
    """A peer's name, or the end of its id."""
    for peer in state.peers:
        if peer.peer_id == peer_id and peer.name:
            return peer.name
    return peer_id[-8:]


def by_words(accused: Accused) -> str:
    """How many peers say so: 5 of 7."""
    return f"{accused.by} of {accused.of}"


def lie_words(accused: Excluded) -> str:
    """What the proof against a peer shows."""
    if not accused.verified:
        return "no proof verified"
    return f"lied in round {accused.round}, part {accused.part}: {accused.why}"


def accusations(state: SwarmState) -> dict[str, str]:
    """A line for each peer that others call excluded or without duty. What only few say is worded as their claim."""
    lines = {}
    for one in state.excluded:
        name = one.name or one.peer_id[-8:]
        words = f"excluded: {name}, named by {by_words(one)}, {lie_words(one)}"
        is_claim = not one.verified and 2 * one.by <= one.of
        lines[f"excluded {one.peer_id}"] = f"claimed by {by_words(one)}: {name} is excluded" if is_claim else words
    for other in state.without_duty:
        kinds = f" ({', '.join(other.kinds)})" if other.kinds else ""
        name = other.name or other.peer_id[-8:]
        lines[f"duty {other.peer_id}"] = f"without duty: {name} since round {other.since}, say {by_words(other)}{kinds}"
    return lines


def dead_experts(state: SwarmState) -> list[str]:
    """The dead experts, each with its layer, in order."""
    pairs = sorted((layer, expert.expert) for expert in state.experts for layer in expert.dead_layers)
    return [f"expert {expert} of layer {layer}" for layer, expert in pairs]


def routing_words(state: SwarmState) -> str:
    """The health of the routers in one line; empty if no peer has reported it."""
    words = [
        f"{word} {value:.0%}"
        for word, value in (
            ("balance", state.load_entropy),
            ("entropy", state.router_entropy),
            ("to held experts", state.held_share),
        )
        if value is not None
    ]
    if state.expert_similarity is not None:
        most = "" if state.expert_similarity_max is None else f"-{state.expert_similarity_max:.2f}"
        words.append(f"similarity {state.expert_similarity:.2f}{most}")
    return ", ".join(words)


def refusals(state: SwarmState) -> str:
    """Refused records by kind, such as "3 forged, 1 oversized"; empty if there are none."""
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(state.refused.items()))
