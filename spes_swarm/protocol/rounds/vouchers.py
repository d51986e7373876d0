"""Vouchers: members confirm that a peer really trains on more tokens than most.

One absurd token count must not decide an average, so no member initially weighs more than twice the median. A faster
peer earns a larger ratio by commits in which it claimed that ratio and its contributions were in order. Every member
counts these commits for itself (see track_record.py) and vouches for such peers in its statement. A ratio is granted if
more than half of the other members vouch for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blake3 import blake3

from spes_swarm.protocol.rounds.clipping import MAX_WEIGHT_RATIO

_MARK_BYTES = 8
VOUCHER_BYTES = _MARK_BYTES + 1  # the first bytes of a digest of the peer id, then the ratio
MAX_VOUCHED = 32  # peers that one statement can vouch for: 288 bytes
MAX_EARNED_RATIO = 16.0


def vouchers(earned: Mapping[str, float]) -> bytes:
    """Encodes earned ratios for a statement; if there are too many, only the largest."""
    ratios = {peer_id: int(ratio) for peer_id, ratio in earned.items() if int(ratio) > MAX_WEIGHT_RATIO}
    chosen = sorted(ratios, key=lambda peer_id: (-ratios[peer_id], peer_id))[:MAX_VOUCHED]
    return b"".join(_mark(peer_id) + bytes([ratios[peer_id]]) for peer_id in chosen)


def granted_ratios(peer_ids: Sequence[str], vouched: Sequence[bytes]) -> list[float]:
    """The multiple of the median up to which each member's tokens count, from the statements' `vouched` fields."""
    index_of = {_mark(peer_id): i for i, peer_id in enumerate(peer_ids)}
    votes: list[list[float]] = [[] for _ in peer_ids]
    for voter, data in enumerate(vouched):
        ratios: dict[int, int] = {}
        for start in range(0, len(data), VOUCHER_BYTES):
            named = index_of.get(data[start : start + _MARK_BYTES])
            if named is not None and named != voter:
                ratios[named] = data[start + _MARK_BYTES]  # if a peer is named twice, the last entry counts
        for named, ratio in ratios.items():
            votes[named].append(float(ratio))
    needed = (len(peer_ids) - 1) // 2 + 1  # more than half of the other members
    return [_granted(sorted(ratios, reverse=True), needed) for ratios in votes]


def _granted(ratios: list[float], needed: int) -> float:
    """The largest ratio that at least `needed` members vouch for; `ratios` are in descending order."""
    if len(ratios) < needed:
        return MAX_WEIGHT_RATIO
    return min(max(ratios[needed - 1], MAX_WEIGHT_RATIO), MAX_EARNED_RATIO)


def _mark(peer_id: str) -> bytes:
    return blake3(peer_id.encode()).digest()[:_MARK_BYTES]
