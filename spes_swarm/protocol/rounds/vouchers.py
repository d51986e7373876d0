"""Vouchers: members confirm what a peer has done in recent commits, and say whom they doubt.

Anybody can sign a statement, so a statement alone earns nothing. Every member counts for itself what the others have
delivered in the commits that it shared with them (see track_record.py), and says so in its statement:

- A peer may reduce if its contributions are in recent results and none of the parts that it reduced were missing. A
  peer that has delivered nothing would otherwise hold up, or falsify, every part that its declared bandwidth attracts.
- One absurd token count must not decide an average, so no member initially weighs more than twice the median. A faster
  peer earns a larger ratio by commits in which it claimed that ratio and its contributions were in order. A ratio is
  granted if more than half of the other members vouch for it.
- A peer that failed in several recent rounds is doubted (see conduct.py). One that more than half of the trusted
  members doubt has no duty: it reduces nothing, leads no round, and is not waited for. In the same way, one whose
  results were late again and again rests from reducing.
- The work of a member without duty does not count if more than half of all other members say so: it is hidden from
  auditors, against the others', or next to nothing. What does not count earns no trust, so a few that trust only each
  other must not decide it.
- A peer is established at those that have its work in ESTABLISHED_COMMITS commits. New identities may have only a
  limited share of an average together, since they cost nothing in an open run. A member is one if more than half of all
  other members name others, and not it, as established.
- The upload rate that was measured decides how much a peer reduces; what it declares itself only lowers that.

Trusted are those that may reduce by the first rule.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from statistics import median_low
from typing import NamedTuple

from blake3 import blake3

from spes_swarm.protocol.averaging.clipping import MAX_WEIGHT_RATIO

_MARK_BYTES = 8
# The first bytes of a digest of the peer id, and a byte each for flags, the ratio and the code of the rate.
VOUCHER_BYTES = _MARK_BYTES + 3
MAX_VOUCHED = 128  # peers that one statement can name: 1,408 bytes
MAX_EARNED_RATIO = 16.0
ESTABLISHED_COMMITS = 16
_REDUCES, _DOUBTED, _RESTS, _IGNORED, _ESTABLISHED = 0x80, 0x40, 0x20, 0x10, 0x08
# Code c of a rate means 2^((c - _CODE_OF_ONE) / 4) Mbit/s; 0 is none. From 1 kbit/s on.
# Square roots are rounded alike on all machines, as the plan depends on rates; powers may not be.
_CODE_OF_ONE, _ROOT = 41, math.sqrt(2)
_ROOTS = (1.0, math.sqrt(_ROOT), _ROOT, _ROOT * math.sqrt(_ROOT))
_SAME_RATE = 4  # rates whose codes differ from the median by no more count as equal: busy machines differ twofold


def vouchers(
    earned: Mapping[str, float],
    reducers: Collection[str] = (),
    round_number: int = 0,
    *,
    doubted: Collection[str] = (),
    resting: Collection[str] = (),
    ignored: Collection[str] = (),
    established: Collection[str] = (),
    rates: Mapping[str, float] | None = None,
) -> bytes:
    """Encodes earned ratios, measured rates (Mbit/s), and who may reduce, is doubted, rests, is ignored or established.

    If there are too many, it names those that it doubts and those with the largest ratios, and of the others a
    selection that changes from round to round and is the same at all members.
    """
    codes = {peer_id: _rate_code(rate) for peer_id, rate in (rates or {}).items()}
    ratios = {peer_id: int(ratio) for peer_id, ratio in earned.items() if int(ratio) > MAX_WEIGHT_RATIO}
    flags = {_REDUCES: reducers, _DOUBTED: doubted, _RESTS: resting, _IGNORED: ignored, _ESTABLISHED: established}
    said = {
        peer_id: sum(flag for flag, peers in flags.items() if peer_id in peers)
        for peer_id in {*ratios, *codes}.union(*flags.values())
    }
    salt = round_number.to_bytes(8, "little")

    def order(peer_id: str) -> tuple[bool, int, bytes]:
        return peer_id not in doubted, -ratios.get(peer_id, 0), blake3(salt + peer_id.encode()).digest()

    chosen = sorted(said, key=order)[:MAX_VOUCHED]
    return b"".join(
        _mark(peer_id) + bytes([said[peer_id], ratios.get(peer_id, 0), codes.get(peer_id, 0)]) for peer_id in chosen
    )


def granted_ratios(peer_ids: Sequence[str], vouched: Sequence[bytes]) -> list[float]:
    """The multiple of the median up to which each member's tokens count, from the statements' `vouched` fields."""
    votes: list[list[float]] = [[] for _ in peer_ids]
    for named in _named(peer_ids, vouched):
        for member, entry in named.items():
            votes[member].append(float(entry.ratio))
    needed = (len(peer_ids) - 1) // 2 + 1  # more than half of the other members
    return [_granted(sorted(ratios, reverse=True), needed) for ratios in votes]


def may_reduce(peer_ids: Sequence[str], vouched: Sequence[bytes]) -> list[bool]:
    """Which members may reduce: those that more than half of the group vouch for, each for itself included, and those
    that more than half as many vouch for as for the most trusted one.

    The size of the group alone is no measure, or strangers could leave nobody a majority; nor is the most trusted one,
    for which strangers could vouch. Identities that vouch for each other may reduce, too, once they are more than half
    as many as the honest members. While nobody vouches for anybody, as in the first round of a run, all may.
    """
    votes = [0] * len(peer_ids)
    for named in _named(peer_ids, vouched):
        for member, entry in named.items():
            votes[member] += entry.flags & _REDUCES > 0
    most = max(votes, default=0)
    return [most == 0 or 2 * count > most or 2 * (count + 1) > len(peer_ids) for count in votes]


def without_duty(peer_ids: Sequence[str], vouched: Sequence[bytes], also: Sequence[str] = ()) -> set[str]:
    """The members, and the peers `also`, that have no duty: more than half of the other trusted members doubt them.

    These must be at least two: of two members neither can tell the group which one of them has failed.
    """
    return _said_by_most(_DOUBTED, peer_ids, vouched, also)


def resting(peer_ids: Sequence[str], vouched: Sequence[bytes]) -> set[str]:
    """The members that should reduce nothing for a while, in the opinion of as many."""
    return _said_by_most(_RESTS, peer_ids, vouched)


def ignored(peer_ids: Sequence[str], vouched: Sequence[bytes]) -> set[str]:
    """Of the members without duty, those whose work should not count, say more than half of all others."""
    votes = Counter(i for said in _named(peer_ids, vouched) for i, entry in said.items() if entry.flags & _IGNORED)
    said_by_most = {peer_id for i, peer_id in enumerate(peer_ids) if 2 * votes[i] > len(peer_ids) - 1}
    return said_by_most & without_duty(peer_ids, vouched)


def newcomers(peer_ids: Sequence[str], vouched: Sequence[bytes]) -> set[str]:
    """The members that are new identities: more than half of all others name others as established, and not them.

    Those that remember nobody say nothing about anybody, and a list that is full says nothing about those that it does
    not name.
    """
    named = [{i for i, entry in said.items() if entry.flags & _ESTABLISHED} for said in _named(peer_ids, vouched)]
    judges = [voter for voter, data in enumerate(vouched) if named[voter] and len(data) < MAX_VOUCHED * VOUCHER_BYTES]
    votes = Counter(i for voter in judges for i in range(len(peer_ids)) if i != voter and i not in named[voter])
    return {peer_id for i, peer_id in enumerate(peer_ids) if 2 * votes[i] > len(peer_ids) - 1}


def _said_by_most(flag: int, peer_ids: Sequence[str], vouched: Sequence[bytes], also: Sequence[str] = ()) -> set[str]:
    everybody = [*peer_ids, *also]
    trusted = [*may_reduce(peer_ids, vouched), *(False for _ in also)]
    votes = [0] * len(everybody)
    for voter, named in enumerate(_named(everybody, vouched)):
        for index, entry in named.items():
            votes[index] += trusted[voter] and entry.flags & flag > 0
    others = [sum(trusted) - is_trusted for is_trusted in trusted]
    return {peer for peer, count, most in zip(everybody, votes, others, strict=True) if count >= 2 and 2 * count > most}


def measured_rates(peer_ids: Sequence[str], vouched: Sequence[bytes]) -> list[float | None]:
    """Each member's upload rate, in Mbit/s: the lower median of what the other trusted members have measured.

    None for one whom no more than half of them have measured. Rates that hardly differ from the median are the same.
    """
    trusted = may_reduce(peer_ids, vouched)
    codes: list[list[int]] = [[] for _ in peer_ids]
    for voter, named in enumerate(_named(peer_ids, vouched)):
        for member, entry in named.items():
            if entry.rate and trusted[voter]:
                codes[member].append(entry.rate)
    found = [
        median_low(said) if 2 * len(said) > sum(trusted) - is_trusted and said else None
        for said, is_trusted in zip(codes, trusted, strict=True)
    ]
    middle = median_low([code for code in found if code is not None] or [0])
    return [None if code is None else _rate(middle if abs(code - middle) <= _SAME_RATE else code) for code in found]


def _rate_code(rate_mbps: float) -> int:
    return min(max(round(_CODE_OF_ONE + 4 * math.log2(max(rate_mbps, 1e-9))), 1), 0xFF)


def _rate(code: int) -> float:
    doublings, quarters = divmod(code - _CODE_OF_ONE, 4)
    return math.ldexp(_ROOTS[quarters], doublings)


class _Entry(NamedTuple):
    flags: int
    ratio: int
    rate: int  # its code


def _named(peer_ids: Sequence[str], vouched: Sequence[bytes]) -> list[dict[int, _Entry]]:
    """What each member says of the others, by member index; nothing of itself."""
    return _parsed(tuple(peer_ids), tuple(vouched))


@lru_cache(maxsize=1)  # a plan asks several questions about one group
def _parsed(peer_ids: tuple[str, ...], vouched: tuple[bytes, ...]) -> list[dict[int, _Entry]]:
    index_of = {_mark(peer_id): i for i, peer_id in enumerate(peer_ids)}
    said: list[dict[int, _Entry]] = []
    for voter, data in enumerate(vouched):
        named: dict[int, _Entry] = {}
        for start in range(0, len(data), VOUCHER_BYTES):
            member = index_of.get(data[start : start + _MARK_BYTES])
            if member is not None and member != voter:
                # If a peer is named twice, the last entry counts.
                named[member] = _Entry(*data[start + _MARK_BYTES : start + VOUCHER_BYTES])
        said.append(named)
    return said


def _granted(ratios: list[float], needed: int) -> float:
    """The largest ratio that at least `needed` members vouch for; `ratios` are in descending order."""
    if len(ratios) < needed:
        return MAX_WEIGHT_RATIO
    return min(max(ratios[needed - 1], MAX_WEIGHT_RATIO), MAX_EARNED_RATIO)


def _mark(peer_id: str) -> bytes:
    return blake3(peer_id.encode()).digest()[:_MARK_BYTES]
