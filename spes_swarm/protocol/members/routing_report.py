"""What a peer reports about its routers' choices, in a form that is small enough for its signed record.

An expert is *dead* in a layer if the layer's router gives it less than `DEAD_LOAD` of its fair share of the tokens for
`DEAD_STEPS` local steps: loads swing so far that healthy experts get next to nothing for some eighty steps
(docs/experiments.md). A judgement takes the tokens of a round, or of several rounds if one is too short to tell. Every
peer routes its own tokens over all experts, held or not, so each peer can judge all of them, but on its own data and on
its own word. In the swarm an expert counts as dead only if more than half of the peers that report say so.

Suffixes: L layers with experts, E experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

DEAD_LOAD: Final = 0.01  # as a multiple of the fair share, like all loads
DEAD_STEPS: Final = 250  # of this peer, with a lower load
ALIVE_LOAD: Final = 0.02  # an expert recovers only above this, so that it does not alternate

MAX_LOADS: Final = 256  # models with more experts report no loads; the record of a peer must stay small
MAX_DEAD: Final = 32  # dead experts that are named
# Layers times experts; a manifest with more is refused (config/model_size.py).
MAX_PAIRS: Final = 65_536
_STEPS_OF_LOAD: Final = 32  # in one fair share


@dataclass(frozen=True)
class RoutingReport:
    """The part of a peer's routing figures that has an entry per expert."""

    loads: bytes = b""  # (E,), mean over layers; see `packed_loads`
    dead: tuple[int, ...] = ()  # dead experts as `layer * E + expert`, ascending; at most MAX_DEAD
    num_dead: int | None = None  # all of them; None: not judged yet


NOTHING_REPORTED: Final = RoutingReport()


def packed_loads(load_E: Sequence[float]) -> bytes:
    """Returns one byte per expert, in steps of 1/32 of the fair share, the last of which stands for all above.

    Empty for a model with more than `MAX_LOADS` experts.
    """
    if len(load_E) > MAX_LOADS:
        return b""
    return bytes(min(255, max(0, round(load * _STEPS_OF_LOAD))) for load in load_E)


def unpacked_load(step: int) -> float:
    """The load that a byte of `packed_loads` stands for."""
    return step / _STEPS_OF_LOAD


def count_claims(claims: Iterable[Collection[int]]) -> Counter[int]:
    """Returns how many peers name each dead expert; a peer counts once, however often it names one."""
    return Counter(pair for claim in claims for pair in set(claim))


def dead_by_majority(votes: Mapping[int, int], num_reports: int) -> tuple[int, ...]:
    """Returns the experts that more than half of the reporting peers call dead, ascending."""
    return tuple(sorted(pair for pair, count in votes.items() if 2 * count > num_reports))
