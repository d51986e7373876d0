"""Which commits led to a reference: tells a peer that is late from one that went another way.

Every commit has a mark, the beginning of its group's id; the members of one group have the same. A peer that missed
rounds has a lineage that the others' begins with: its reference is one that the swarm once had. After a partition
neither side's lineage begins with the other's: both have trained on, and both sides' work counts.

A lineage of a run of months must fit in a statement. It keeps the newest commits and of the older ones those whose
round is a multiple of 32, then of 1,024, and so on, so two lineages of any length can be compared as of the last kept
round that they have in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MARK_BYTES = 8
_KEPT_PER_LEVEL = 32
_LEVELS = 5
MAX_COMMITS = _KEPT_PER_LEVEL * _LEVELS


@dataclass(frozen=True, slots=True)
class Lineage:
    """The kept commits of one reference, by round; empty for the initial weights."""

    marks: Mapping[int, bytes]

    @classmethod
    def from_lists(cls, commits: Sequence[int], marks: bytes) -> Lineage:
        """From the fields of a statement, whose lengths have been checked."""
        cut = (marks[i : i + MARK_BYTES] for i in range(0, len(marks), MARK_BYTES))
        return cls(dict(zip(commits, cut, strict=True)))

    def to_lists(self) -> tuple[list[int], bytes]:
        """The fields of a statement."""
        commits = sorted(self.marks)
        return commits, b"".join(self.marks[number] for number in commits)

    @property
    def head(self) -> tuple[int, bytes]:
        """Round and mark of the newest commit; (-1, b"") for the initial weights."""
        newest = max(self.marks, default=-1)
        return newest, self.marks.get(newest, b"")

    def after(self, round_number: int, group_id: bytes) -> Lineage:
        """The lineage after one more commit."""
        marks = {number: mark for number, mark in self.marks.items() if number < round_number}
        marks[round_number] = group_id[:MARK_BYTES]
        kept: dict[int, bytes] = {}
        step = 1
        for _ in range(_LEVELS):
            level = [number for number in sorted(marks, reverse=True) if number % step == 0][:_KEPT_PER_LEVEL]
            kept.update((number, marks[number]) for number in level)
            step *= _KEPT_PER_LEVEL
        return Lineage(kept)

    def leads_to(self, other: Lineage) -> bool:
        """Returns True if `other` goes on from this one (or is the same): whoever has this one is late, not elsewhere.

        Where the other one has thinned out the rounds around this one's newest commit, a split there passes as late.
        """
        newest, mark = self.head
        if newest in other.marks:
            return other.marks[newest] == mark
        if newest < 0:
            return True
        if len(other.marks) < _KEPT_PER_LEVEL or newest >= sorted(other.marks)[-_KEPT_PER_LEVEL]:
            return False  # nothing is thinned out there: the other one would know that commit
        common = [number for number in self.marks if number in other.marks]
        return not common or self.marks[max(common)] == other.marks[max(common)]
