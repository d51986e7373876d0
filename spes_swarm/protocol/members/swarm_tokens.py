"""How many tokens the whole swarm has trained on, for records, checkpoints and publications."""

from __future__ import annotations


class SwarmTokens:
    """Counts the tokens of all peers in the commits up to this peer's reference.

    A peer that missed some of these commits learns the number from records of the same round. If all records are of a
    later round already, it learns it after its next commit.
    """

    def __init__(self) -> None:
        self.count = 0  # tokens known to this peer
        self.complete = True  # True if `count` includes all of these commits

    @property
    def published_count(self) -> int:
        """The count to publish: 0 if it is incomplete."""
        return self.count if self.complete else 0

    def add(self, tokens: int) -> None:
        """Adds the tokens of a commit."""
        self.count += tokens

    def missed_commits(self) -> None:
        """Notes that this peer has missed commits that led to its reference."""
        self.complete = False

    def learn(self, from_others: int, *, alone: bool) -> None:
        """Completes the count from others' reports for the reference's round (0: none), or as it is if alone."""
        if not self.complete and (from_others or alone):
            self.count, self.complete = max(self.count, from_others), True
