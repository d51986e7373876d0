"""What present peers say about each other in their records: who is excluded, and who has no duty. No I/O.

What one peer says proves nothing. So a peer without duty is shown only if more than half of the others say so. Of those
that are called excluded, all are shown, each with the number of peers that say so, and as proven only if this monitor
has verified a proof itself: a liar can neither denounce somebody as proven nor hide that it tries.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Final

from spes_swarm.monitor.aggregates import count
from spes_swarm.monitor.state import MAX_WHY_CHARS, PEER_ID, Excluded, WithoutDuty
from spes_swarm.protocol.averaging.proof import Proof
from spes_swarm.protocol.members.records import DutyNote, Progress

_MAX_EXCLUDED: Final = 64  # shown; a crowd could name any number
_MAX_KINDS: Final = 8


@dataclass(frozen=True)
class Evidence:
    """What a verified proof shows, and the file that holds it."""

    round: int
    part: int
    why: str
    file: str | None = None

    @classmethod
    def of(cls, proof: Proof, file: str | None) -> Evidence:
        """Of a proof as `open_proof` returns it."""
        why = "".join(char if char.isprintable() else " " for char in proof.what)
        return cls(count(proof.round), count(proof.part), why[:MAX_WHY_CHARS], file)


class Accusations:
    """The accusations in the newest records; without a present peer, those of the last one."""

    def __init__(self, excluded: Sequence[Excluded] = (), without_duty: Sequence[WithoutDuty] = ()) -> None:
        self.without_duty = tuple(without_duty)
        self.accusers: dict[str, list[str]] = {}  # by culprit; those that most peers name first
        self._excluded = {one.peer_id: one for one in excluded}

    def update(
        self, now: float, electorate: Mapping[str, Progress], names: Mapping[str, str], proven: Mapping[str, Evidence]
    ) -> None:
        """Replaces the accusations by those of the present peers that take part, the proven liars aside."""
        electorate = {peer_id: record for peer_id, record in electorate.items() if peer_id not in proven}
        if not electorate:
            return
        accusers, notes = _said_in(electorate)
        order = sorted(accusers, key=lambda peer_id: (-len(accusers[peer_id]), peer_id))[:_MAX_EXCLUDED]
        self.accusers = {peer_id: accusers[peer_id] for peer_id in order}
        self._excluded = {
            peer_id: Excluded(
                peer_id=peer_id,
                name=names.get(peer_id, ""),
                by=len(by),
                of=_num_others(electorate, peer_id),
                since=self._excluded[peer_id].since if peer_id in self._excluded else now,
                verified=False,
            )
            for peer_id, by in self.accusers.items()
        }
        self.without_duty = tuple(
            WithoutDuty(
                peer_id=peer_id,
                name=names.get(peer_id, ""),
                by=len(said),
                of=_num_others(electorate, peer_id),
                since=count(median_low(note.since for note in said)),
                kinds=_kinds(said),
            )
            for peer_id, said in sorted(notes.items())
            if 2 * len(said) > _num_others(electorate, peer_id)
        )

    def excluded(self, proven: Mapping[str, Evidence]) -> tuple[Excluded, ...]:
        """The accused, sorted, with what is proven by now."""
        return tuple(_with(self._excluded[peer_id], proven.get(peer_id)) for peer_id in sorted(self._excluded))


def _said_in(electorate: Mapping[str, Progress]) -> tuple[dict[str, list[str]], dict[str, list[DutyNote]]]:
    """The accusers and the duty notes of each peer. Nobody has a say about itself, nor twice about another."""
    accusers: defaultdict[str, list[str]] = defaultdict(list)
    notes: defaultdict[str, list[DutyNote]] = defaultdict(list)
    for accuser, record in sorted(electorate.items()):
        for peer_id in set(record.proven):
            if peer_id != accuser and re.fullmatch(PEER_ID, peer_id):
                accusers[peer_id].append(accuser)
        for peer_id, note in {note.peer: note for note in record.without_duty}.items():
            if peer_id != accuser and re.fullmatch(PEER_ID, peer_id):
                notes[peer_id].append(note)
    return accusers, notes


def _num_others(electorate: Mapping[str, Progress], peer_id: str) -> int:
    return len(electorate) - (peer_id in electorate)


def _kinds(notes: Sequence[DutyNote]) -> tuple[str, ...]:
    seen = Counter(kind for note in notes for kind in set(note.kinds))
    return tuple(sorted(sorted(seen, key=lambda kind: (-seen[kind], kind))[:_MAX_KINDS]))


def _with(accused: Excluded, evidence: Evidence | None) -> Excluded:
    if evidence is None:
        return accused
    return replace(
        accused, verified=True, round=evidence.round, part=evidence.part, why=evidence.why, proof=evidence.file
    )
