"""Vouchers: members confirm what a peer has done in recent commits.

Anybody can sign a statement, so a statement alone earns nothing. Every member counts for itself what the others have
delivered in the commits that it shared with them (see track_record.py), and vouches for them in its statement:

- A peer may reduce if its contributions are in recent results and none of the parts that it reduced were missing. A
  peer that has delivered nothing would otherwise hold up, or falsify, every part that its declared bandwidth attracts.
- One absurd token count must not decide an average, so no member initially weighs more than twice the median. A faster
  peer earns a larger ratio by commits in which it claimed that ratio and its contributions were in order. A ratio is
  granted if more than half of the other members vouch for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from blake3 import blake3

from spes_swarm.protocol.rounds.clipping import MAX_WEIGHT_RATIO

_MARK_BYTES = 8
VOUCHER_BYTES = _MARK_BYTES + 1  # the first bytes of a digest of the peer id; then the ratio, and whether it may reduce
MAX_VOUCHED = 128  # peers that one statement can vouch for: 1,152 bytes
MAX_EARNED_RATIO = 16.0
_REDUCES = 0x80  # flag in the byte of the ratio


def vouchers(earned: Mapping[str, float], reducers: Collection[str] = (), round_number: int = 0) -> bytes:
    """Encodes earned ratios and the peers that may reduce, for a statement of a round.

    If there are too many, it names those with the largest ratios, and of the others a selection that changes from round
    to round and is the same at all members.
    """
    ratios = {peer_id: int(ratio) for peer_id, ratio in earned.items() if int(ratio) > MAX_WEIGHT_RATIO}
    peers = ratios.keys() | set(reducers)
    salt = round_number.to_bytes(8, "little")
    chosen = sorted(peers, key=lambda peer_id: (-ratios.get(peer_id, 0), blake3(salt + peer_id.encode()).digest()))
    return b"".join(
        _mark(peer_id) + bytes([ratios.get(peer_id, 0) | (_REDUCES if peer_id in reducers else 0)])
        for peer_id in chosen[:MAX_VOUCHED]
    )


def granted_ratios(peer_ids: Sequence[str], vouched: Sequence[bytes]) -> list[float]:
    """The multiple of the median up to which each member's tokens count, from the statements' `vouched` fields."""
    votes: list[list[float]] = [[] for _ in peer_ids]
    for named in _named(peer_ids, vouched):
        for member, value in named.items():
            votes[member].append(float(value & ~_REDUCES))
    needed = (len(peer_ids) - 1) // 2 + 1  # more than half of the other members
    return [_granted(sorted(ratios, reverse=True), needed) for ratios in votes]


def may_reduce(peer_ids: Sequence[str], vouched: Sequence[bytes]) -> list[bool]:
    """Which members may reduce: those that more than half as many members vouch for as for the most trusted one.

    The measure is not the size of the group, or strangers could leave nobody a majority. Identities that vouch for each
    other may reduce, too, once they are more than half as many as the honest members. While nobody vouches for anybody,
    as in the first round of a run, all may.
    """
    votes = [0] * len(peer_ids)
    for named in _named(peer_ids, vouched):
        for member, value in named.items():
            votes[member] += value >= _REDUCES
    most = max(votes, default=0)
    return [most == 0 or 2 * count > most for count in votes]


def _named(peer_ids: Sequence[str], vouched: Sequence[bytes]) -> list[dict[int, int]]:
    """What each member says of the others: member index -> byte. Nobody vouches for itself."""
    index_of = {_mark(peer_id): i for i, peer_id in enumerate(peer_ids)}
    said: list[dict[int, int]] = []
    for voter, data in enumerate(vouched):
        named: dict[int, int] = {}
        for start in range(0, len(data), VOUCHER_BYTES):
            member = index_of.get(data[start : start + _MARK_BYTES])
            if member is not None and member != voter:
                named[member] = data[start + _MARK_BYTES]  # if a peer is named twice, the last entry counts
        said.append(named)
    return said


def _granted(ratios: list[float], needed: int) -> float:
    """The largest ratio that at least `needed` members vouch for; `ratios` are in descending order."""
    if len(ratios) < needed:
        return MAX_WEIGHT_RATIO
    return min(max(ratios[needed - 1], MAX_WEIGHT_RATIO), MAX_EARNED_RATIO)


def _mark(peer_id: str) -> bytes:
    return blake3(peer_id.encode()).digest()[:_MARK_BYTES]
