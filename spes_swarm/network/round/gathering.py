"""A round that is being gathered: who leads it, who has come, and for how long the others are awaited."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from blake3 import blake3

from spes_swarm.base.changes import Changes
from spes_swarm.network.link.clock import steady_clock
from spes_swarm.protocol.members.standing import Neighbour

# A follower polls its leader at least this often. One that is silent for a second more than three times that is gone.
POLL_S = 1.0
CALL_TIMEOUT_S = 2.5
POLL_TIMEOUT_S = POLL_S + CALL_TIMEOUT_S
# A leader closes the group when the window is over; one that takes this much longer is passed over. On a machine with
# many more runnable processes than cores, honest leaders have been seen two seconds late.
LEADER_GRACE_S = 4 * POLL_S
# A leader whose event loop has not run for _SLEPT_S (its process was stopped, its machine slept) has been passed over,
# or is about to be. It waits for the others for another _RETURN_S, which LEADER_GRACE_S includes; but a machine that is
# always so slow does not wait for ever.
_SLEPT_S, _RETURN_S, _MAX_SLEEPS = 2.5, 2 * POLL_S, 2


def rank(run_id: str, round_number: int, peer_id: str) -> bytes:
    """Rank of a candidate for leading a round; the smallest leads."""
    return blake3(f"{run_id}|{round_number}|{peer_id}".encode()).digest()


def now() -> float:
    """Returns the time of the event loop, in seconds."""
    return asyncio.get_running_loop().time()


async def hold_poll(asked: float) -> None:
    """Pauses if a poll sent at time `asked` was answered at once: an honest leader holds it for a while."""
    if now() - asked < POLL_S / 4:
        await asyncio.sleep(POLL_S / 4)


@dataclass(slots=True)
class Gathering:
    """A leader's state while it gathers a round."""

    window_s: float
    sealed: dict[str, bytes] = field(default_factory=dict)  # the signed statements
    last_poll: dict[str, float] = field(default_factory=dict)
    opened: float = field(default_factory=now)
    lost: set[str] = field(default_factory=set)  # peers that cannot be reached, or do not come
    past: set[str] = field(default_factory=set)  # peers that report that this round is over
    elsewhere: set[str] = field(default_factory=set)  # peers that followed another leader when they were called
    relieving: set[str] = field(default_factory=set)  # peers that say that this leader has no duty
    redirect: str | None = None
    changed: Changes = field(default_factory=Changes)
    over: bool = False  # most of the others say that the round is over
    _seen: tuple[float, float] = field(default_factory=lambda: (now(), steady_clock()))  # when `note_sleep` was called
    _sleeps: int = 0
    _awaits_all_until: float = 0.0

    def describe(self) -> str:
        """What the leader knows, for the log."""
        return (
            f"open for {now() - self.opened:.1f} s, here {sorted(self.present())}, lost {sorted(self.lost)}, "
            f"elsewhere {sorted(self.elsewhere)}, past it {sorted(self.past)}, redirects to {self.redirect}"
        )

    def note_sleep(self) -> None:
        """Waits longer for the others if the event loop has not run; to be called several times a second."""
        before, self._seen = self._seen, (now(), steady_clock())
        slept_s = max(after - earlier for after, earlier in zip(self._seen, before, strict=True))
        if slept_s > _SLEPT_S and self._sleeps < _MAX_SLEEPS:
            self._sleeps += 1
            self._awaits_all_until = now() + _RETURN_S

    def add(self, peer_id: str, sealed: bytes) -> None:
        """Notes a poll of a peer, with its statement."""
        if self.sealed.get(peer_id) != sealed:
            self.sealed[peer_id] = sealed
            self.changed.notify()
        self.lost.discard(peer_id)
        self.last_poll[peer_id] = now()

    def awaits(self, peer: Neighbour, passed_over: float) -> bool:
        """Returns True while this gathering waits for a peer.

        `passed_over`: when all who followed the leader that failed here have passed it over, too. They then come within
        a window. Otherwise a hostile leader could fail one peer only, and that peer would commit the round alone.
        """
        limit_s = min(peer.patience_s, self.window_s)
        until = max(self._awaits_all_until, self.opened + limit_s)
        if peer.peer_id in self.elsewhere and limit_s >= self.window_s:
            until = max(until, passed_over + self.window_s)
        return now() < until

    def redirect_to(self, leader: str) -> None:
        """Sends those who are here to a better leader."""
        self.redirect = leader
        self.changed.notify()

    def present(self) -> dict[str, bytes]:
        """Returns the statements of the peers that still poll."""
        oldest = now() - 3 * POLL_S - 1.0
        return {peer: sealed for peer, sealed in self.sealed.items() if self.last_poll[peer] >= oldest}
