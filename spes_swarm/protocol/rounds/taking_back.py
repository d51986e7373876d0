"""Taking back a commit that did harm: when a group does so, and what a peer keeps for it.

After each commit a peer compares its training loss with that before (training/health/loss_watch.py), and says in its
next statement whether it rose. If most trusted members say so, their round is a return: instead of averaging, each of
them goes back to the reference before the last commit. The return is a round like any other, with a number and a place
in the lineage, so a peer that misses it is late, and heals in the next round that it takes part in.

A peer's own work of the round that is taken back stays in its live weights, from where it is contributed again. What
it has learnt since then rests on the harmful commit, and is dropped.

Shape: N elements of the flat vector.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from spes_swarm.base.arrays import FloatArray
from spes_swarm.protocol.consensus.reference import Reference, whole_digest
from spes_swarm.protocol.rounds.statement import Member, Statement

_MIN_VOTES = 2  # of two members neither can tell the group that the other one did harm


@dataclass(frozen=True, slots=True)
class Return:
    """The commit that a round takes back."""

    round: int  # of that commit
    before: bytes  # digest of the whole reference before it
    blocks: frozenset[int]  # that it changed
    keepers: frozenset[int]  # members that still have the reference before it, or have it as they missed the commit


def choose_return(members: Sequence[Member], trusted: Collection[int]) -> Return | None:
    """The commit that the round of these members takes back; None if more than half of the trusted do not want it.

    Only votes from the same reference add up. So a reducer cannot win the vote of a member by sending harmful results
    to it alone.
    """
    votes: Counter[tuple[int, bytes, bytes, tuple[int, ...], bytes]] = Counter()
    for i in trusted:
        statement = members[i].statement
        if statement.loss_rose and statement.before:
            votes[*statement.lineage.head, statement.before, tuple(statement.versions), _digest(statement)] += 1
    if not votes:
        return None
    chosen = max(votes, key=lambda vote: (votes[vote], vote))
    if votes[chosen] < _MIN_VOTES or 2 * votes[chosen] <= len(trusted):
        return None
    commit, _, before, versions, _ = chosen
    blocks = {block for block, version in enumerate(versions) if version == commit}
    keepers = {i for i, member in enumerate(members) if before in (member.statement.before, _digest(member.statement))}
    return Return(commit, before, frozenset(blocks), frozenset(keepers))


def _digest(statement: Statement) -> bytes:
    """Digest of a member's whole reference."""
    return whole_digest(statement.versions, statement.digests)


class Previous:
    """The reference before this peer's last commit, and the live weights that it took part with.

    Only the blocks that the commit changed, or that this peer contributed to, are kept.
    """

    def __init__(self, values_N: FloatArray | None = None, live_N: FloatArray | None = None) -> None:
        """Keeps them in these vectors; None: this peer keeps nothing."""
        self._values_N = values_N
        self._live_N = live_N
        self._before = self._after = b""  # digests of the whole reference
        self._blocks: frozenset[int] = frozenset()
        self._trained: frozenset[int] = frozenset()

    def keep(self, reference: Reference, live_N: FloatArray, blocks: Iterable[int], trained: Collection[int]) -> None:
        """Copies what a commit is about to change: these blocks, and those that this peer trains of its live weights.

        Nothing is kept until `committed`.
        """
        self._before = self._after = b""
        if self._values_N is None or self._live_N is None:
            return
        self._before, self._blocks = reference.digest, frozenset(blocks)
        self._trained = self._blocks & frozenset(trained)
        for index in self._blocks:
            where = reference.layout.blocks[index].where
            self._values_N[where] = reference.values_N[where]
            if index in self._trained:
                self._live_N[where] = live_N[where]

    def committed(self, reference: Reference) -> None:
        """Notes that the commit is complete."""
        self._after = reference.digest

    def digest(self, reference: Reference) -> bytes:
        """Digest of the reference that is kept; empty if none is, or if the reference has changed since the commit."""
        return self._before if self._after == reference.digest else b""

    def values(self, where: slice, block: int, reference: Reference) -> FloatArray:
        """Values of a block before the commit."""
        assert self._values_N is not None
        return (self._values_N if block in self._blocks else reference.values_N)[where]

    def contributed(self, where: slice, block: int) -> tuple[FloatArray, FloatArray]:
        """Live weights and reference of a trained block before the commit.

        Raises:
            LookupError: they are not kept.
        """
        if self._values_N is None or self._live_N is None or block not in self._trained:
            raise LookupError(block)
        return self._live_N[where], self._values_N[where]

    def restore(
        self, blocks: Collection[int], reference: Reference, live_N: FloatArray, trained: Collection[int]
    ) -> None:
        """Sets blocks of the reference to their values before the commit, and of the live weights those `trained`.

        What this peer did not train then begins at the reference.
        """
        for index in blocks:
            where = reference.layout.blocks[index].where
            reference.values_N[where] = self.values(where, index, reference)
            if index in trained:
                kept_N = self._live_N if index in self._trained and self._live_N is not None else reference.values_N
                live_N[where] = kept_N[where]
