"""Who is out of a run: peers against which there is a proof of a lie that the founder has not pardoned.

Members get a proof at different moments. If each of them acted upon it at once, those with and those without it would
form different groups. So a culprit with which this peer was in a group stays in until most of a group's other trusted
members state that they have a proof, too: all members of that group learn so from the same statements.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from blake3 import blake3

MARK_BYTES = 8
MAX_MARKS = 16  # in a statement
# A group with an excluded member is valid for so many rounds: its leader may not have got the proof yet.
GRACE_ROUNDS = 8


class Exclusions:
    """The culprits that this peer knows of, and which of them are excluded.

    A pardon names a peer and a round: lies up to this round count no more, whoever has proofs of them, and a later one
    excludes the peer again.
    """

    def __init__(self) -> None:
        self._lies: dict[str, int] = {}  # culprit -> the newest round in which it has lied
        self._pardons: dict[str, int] = {}  # peer -> the last round whose lies are pardoned
        self._pending: set[str] = set()  # culprits that are not excluded yet
        self._since: dict[str, int] = {}  # culprit -> the first commit here since which it is excluded

    def note_lie(self, peer_id: str, lied: int, *, pending: bool = False) -> None:
        """Notes a proof of a lie in round `lied`.

        `pending`: this peer is in a group with the culprit, and most of its members may not know.
        """
        self._lies[peer_id] = max(lied, self._lies.pop(peer_id, 0))
        self._since.pop(peer_id, None)
        if pending:
            self._pending.add(peer_id)

    def agreed(self, round_number: int, said: Mapping[str, bytes], trusted: Collection[str]) -> None:
        """Notes the commit of a group, and excludes culprits that are not in it or that most of the others know of.

        `said`: the marks in the statement of each member; see `marks`. Only `trusted` members have a say, and no
        culprits. If none is left, since culprits have withheld trust from the others, all of these have.
        """
        honest = [peer for peer in said if not self.is_culprit(peer)]
        voters = [peer for peer in honest if peer in trusted] or honest
        for peer_id in list(self._pending):
            known = sum(_mark(peer_id) in _split(said[voter]) for voter in voters)
            if peer_id not in said or 2 * known > len(voters):
                self._pending.discard(peer_id)
        for peer_id in self.excluded:
            self._since.setdefault(peer_id, round_number)

    def pardon(self, peer_id: str, round_number: int) -> None:
        """Notes that the founder has pardoned a peer's lies up to a round."""
        self._pardons[peer_id] = max(round_number, self._pardons.get(peer_id, -1))
        if not self.is_culprit(peer_id):
            self._pending.discard(peer_id)

    def is_pardoned(self, peer_id: str, round_number: int) -> bool:
        """Returns True if a lie in this round counts no more."""
        return round_number <= self._pardons.get(peer_id, -1)

    def is_culprit(self, peer_id: str) -> bool:
        """Returns True if there is a proof against a peer, which may not be excluded yet."""
        return peer_id in self._lies and not self.is_pardoned(peer_id, self._lies[peer_id])

    @property
    def culprits(self) -> list[str]:
        """All culprits, in the order in which their proofs came."""
        return list(filter(self.is_culprit, self._lies))

    @property
    def excluded(self) -> tuple[str, ...]:
        """Those of them that are excluded."""
        return tuple(peer_id for peer_id in self._lies if peer_id in self)

    def marks(self) -> bytes:
        """What a statement says: digests of the ids of culprits, above all of those that are not excluded yet."""
        return b"".join(map(_mark, sorted(self.culprits, key=self._pending.__contains__)[-MAX_MARKS:]))

    def lie_of(self, peer_id: str) -> int:
        """The newest round in which a culprit has lied."""
        return self._lies[peer_id]

    def for_long(self, peer_id: str, round_number: int) -> bool:
        """Returns True if a peer has been excluded for more than GRACE_ROUNDS before a round."""
        since = self._since.get(peer_id, round_number)
        return peer_id in self and round_number - since > GRACE_ROUNDS

    def __contains__(self, peer_id: object) -> bool:
        return isinstance(peer_id, str) and peer_id not in self._pending and self.is_culprit(peer_id)


def _mark(peer_id: str) -> bytes:
    return blake3(peer_id.encode()).digest()[:MARK_BYTES]


def _split(marks: bytes) -> set[bytes]:
    return {marks[start : start + MARK_BYTES] for start in range(0, len(marks), MARK_BYTES)}
