"""Numbers, times and curves as people read them, in little room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from spes_swarm.monitor.state import SwarmState
from spes_swarm.wording import loss_with_error, plural

_STEPS: Final = " ▁▂▃▄▅▆▇█"


def amount(value: float) -> str:
    """At most five characters: 0, 999, 1.2k, 45k, 1.2M ..."""
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if value < 999.5 or unit == "E":
            if unit and value < 9.95:
                return f"{value:.1f}{unit}"
            return f"{value:.0f}{unit}"
        value /= 1000
    raise AssertionError("the loop returns")


def seconds(value: float | None) -> str:
    """At most five characters: 0s, 59s, 12m, 5.0h, 3d; "-" for None."""
    if value is None:
        return "-"
    if value < 99.5:
        return f"{value:.0f}s"
    if value < 99.5 * 60:
        return f"{value / 60:.0f}m"
    if value < 48 * 3600:
        return f"{value / 3600:.0f}h"
    return f"{min(value / 86400, 9999):.0f}d"


def loss(value: float | None) -> str:
    """Six characters at most; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.4f}" if value < 10 else f"{value:.3f}" if value < 100 else amount(value)


def with_error(value: float | None, stderr: float | None) -> str:
    """A loss with its standard error, where that is known: 1.246 ± 0.031; "-" for None."""
    if value is None or value < 100:
        return loss_with_error(value, None if stderr is None else min(stderr, 99))
    return amount(value) + ("" if stderr is None else f" ± {amount(stderr)}")


def ranges(experts: Sequence[int]) -> str:
    """Ascending numbers as people write them: 0-3,7; "-" for none."""
    parts: list[str] = []
    index = 0
    while index < len(experts):
        last = index
        while last + 1 < len(experts) and experts[last + 1] == experts[last] + 1:
            last += 1
        parts.append(str(experts[index]) if last == index else f"{experts[index]}-{experts[last]}")
        index = last + 1
    return ",".join(parts) or "-"


def cut(text: str, width: int) -> str:
    """The text, with an ellipsis where it is too long."""
    return text if len(text) <= width else text[: width - 1] + "…"


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """A curve of block characters, `height` lines of `width` columns; the lowest value still leaves a trace.

    More values than columns are averaged, fewer leave columns free at the right.
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
    """How many peers are there and whether they agree, or honestly that nobody is."""
    count = len(state.peers)
    if state.status == "no_peers":
        if state.silent_s is None:
            return "no peers"
        return f"no peers: the last sign of anybody was {seconds(state.silent_s)} ago"
    words = plural(count, "peer")
    if state.consensus.differ:
        differ = len(state.consensus.differ)
        return f"{words}, {differ} differ{'s' if differ == 1 else ''}"
    return f"{words}, all agree" if state.consensus.agree > 1 else words


def name_of(state: SwarmState, peer_id: str) -> str:
    """A peer's name, or the end of its id."""
    for peer in state.peers:
        if peer.peer_id == peer_id and peer.name:
            return peer.name
    return peer_id[-8:]


def refusals(state: SwarmState) -> str:
    """What was refused: "3 forged, 1 oversized"; empty if nothing was."""
    return listed(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(state.refused.items()))


def listed(words: Iterable[str]) -> str:
    """Words with commas."""
    return ", ".join(words)
