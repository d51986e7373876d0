"""Lineages: the commits that led to a reference. They distinguish late peers from partitioned ones.

Every commit has a mark: the first bytes of its group's id, the same on all members of the group. The lineage of a peer
that missed rounds is a prefix of the others': its reference is one that the swarm once had. After a partition neither
side's lineage is a prefix of the other's: both sides have continued training, and the work of both counts.

The lineage of a run of several months must fit in a statement. It keeps the newest commits; of the older ones, those
whose round is a multiple of 32, then of 1,024, and so on. Two lineages of any length can thus be compared at the last
kept round that they have in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MARK_BYTES = 8
BRANCH = "branch"  # the kind of the fault of a peer whose rounds are not in the run
_KEPT_PER_LEVEL = 32
_LEVELS = 5
MAX_COMMITS = _KEPT_PER_LEVEL * _LEVELS


@dataclass(frozen=True, slots=True)
class Lineage:
    """The kept commits of one reference, by round; empty for the initial weights."""

    marks: Mapping[int, bytes]

    @classmethod
    def from_lists(cls, commits: Sequence[int], marks: bytes) -> Lineage:
        """Builds a lineage from the fields of a statement, whose lengths have been checked."""
        cut = (marks[i : i + MARK_BYTES] for i in range(0, len(marks), MARK_BYTES))
        return cls(dict(zip(commits, cut, strict=True)))

    def to_lists(self) -> tuple[list[int], bytes]:
        """The `commits` and `marks` fields of a statement."""
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

    def lost_in(self, other: Lineage) -> tuple[int, int] | None:
        """Returns the first and the last round of this lineage that `other` lacks, since it went another way; None: it
        did not, or nothing is known of it at that time.

        Kept commits become rarer with age, so the first may be a later one than was really the first.
        """
        if self.leads_to(other) or min(other.marks, default=self.head[0] + 1) > self.head[0]:
            return None
        common = max((number for number, mark in self.marks.items() if other.marks.get(number) == mark), default=-1)
        return min(number for number in self.marks if number > common), self.head[0]

    def leads_to(self, other: Lineage) -> bool:
        """Returns True if `other` continues or equals this lineage: a peer with this one is late, not partitioned.

        If `other` has thinned out the rounds around this lineage's newest commit, a split there passes as lateness.
        """
        newest, mark = self.head
        if newest in other.marks:
            return other.marks[newest] == mark
        if newest < 0:
            return True
        if len(other.marks) < _KEPT_PER_LEVEL or newest >= sorted(other.marks)[-_KEPT_PER_LEVEL]:
            return False  # nothing is thinned out there: `other` would contain that commit
        common = [number for number in self.marks if number in other.marks]
        return not common or self.marks[max(common)] == other.marks[max(common)]
