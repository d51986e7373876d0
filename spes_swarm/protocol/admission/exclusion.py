"""Who is out of a run: peers against which there is a proof of a lie that the founder has not pardoned."""

from __future__ import annotations

from collections.abc import Collection, Iterator


class Exclusions(Collection[str]):
    """The excluded peers, as far as this peer knows, in the order in which their proofs came.

    A pardon names a peer and a round: lies up to this round count no more, whoever has proofs of them, and a later one
    excludes the peer again. So peers that know the same proofs and pardons agree, in whatever order these came.
    """

    def __init__(self) -> None:
        self._lies: dict[str, int] = {}  # peer -> the newest round in which it has lied
        self._pardons: dict[str, int] = {}  # peer -> the last round whose lies are pardoned

    def note_lie(self, peer_id: str, round_number: int) -> None:
        """Notes that there is a proof against a peer."""
        newest = max(round_number, self._lies.pop(peer_id, 0))
        self._lies[peer_id] = newest

    def pardon(self, peer_id: str, round_number: int) -> None:
        """Notes that the founder has pardoned a peer's lies up to a round."""
        self._pardons[peer_id] = max(round_number, self._pardons.get(peer_id, -1))

    def excludes(self, peer_id: str, round_number: int) -> bool:
        """Returns True if a lie in this round excludes a peer."""
        return round_number > self._pardons.get(peer_id, -1)

    def round_of(self, peer_id: str) -> int | None:
        """The newest round in which an excluded peer has lied; None for others."""
        lied = self._lies.get(peer_id)
        return lied if lied is not None and self.excludes(peer_id, lied) else None

    def __contains__(self, peer_id: object) -> bool:
        return isinstance(peer_id, str) and self.round_of(peer_id) is not None

    def __iter__(self) -> Iterator[str]:
        return (peer_id for peer_id in self._lies if peer_id in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
