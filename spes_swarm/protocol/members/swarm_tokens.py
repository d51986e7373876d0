"""How many tokens the whole swarm has trained on: what records, checkpoints and publications say."""

from __future__ import annotations


class SwarmTokens:
    """Tokens of all peers that have gone into commits until this peer's reference.

    Who was not at all of these commits learns the number from records of the very same round; where these are of a
    later one already, after the next commit.

    Attributes:
        count: as far as this peer knows.
        complete: whether that is all of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.complete = True

    @property
    def published_count(self) -> int:
        """What others may believe: 0 where it is not all."""
        return self.count if self.complete else 0

    def add(self, tokens: int) -> None:
        """Counts a commit."""
        self.count += tokens

    def missed_commits(self) -> None:
        """This peer was not at all commits until its reference."""
        self.complete = False

    def learn(self, from_others: int, *, alone: bool) -> None:
        """Takes over what others say of the reference's round (0: nothing); who is alone keeps what it has."""
        if not self.complete and (from_others or alone):
            self.count, self.complete = max(self.count, from_others), True
