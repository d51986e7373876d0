"""Contributors that do not show their work to an auditor: it asks other members for it, which ask the contributor.

A helper passes on what it gets as it is: the auditor verifies it, as if it came from the contributor. So a broken
connection between two members leaves no audit unanswered. If a contributor shows its work to nobody, all that asked it
note that, not one auditor alone. A member that gets what it wants through another one notes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from random import SystemRandom
from statistics import fmean
from typing import NamedTuple, Protocol

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.wire import Channel
from spes_swarm.network.round.claims import Claim, can_audit, lacking
from spes_swarm.network.run_state import RunState
from spes_swarm.protocol.averaging.lottery import num_audits
from spes_swarm.protocol.rounds.frames import Frame
from spes_swarm.protocol.rounds.round_state import RoundState

NO_COMMIT = b"no such commit"  # says a member that has not committed that exchange yet, or has begun another one
FIRST_HELPERS = 3  # asked before all the others are
# Contributions to one part that a member fetches for others after a commit: for one of them, and for all together.
MAX_FOR_ONE, MAX_FOR_ALL = 4, 32
_RANDOM = SystemRandom()
_LOGGER = logging.getLogger(__name__)


class Answer(NamedTuple):
    """What came when a member was asked for contributions."""

    frames: list[Frame]
    end: bytes | None  # what the last frame says: empty, or NO_COMMIT; None: the stream broke off, or was refused


class Fetch(Protocol):
    """Fetches one member's contributions to the parts of claims, which take them in."""

    async def __call__(
        self, state: RoundState, member: int, claims: Sequence[Claim], through: int | None = None
    ) -> Answer:
        """Asks the member itself, or for its contributions `through` another one."""


_NOTHING = Answer([], b"")


class Silence:
    """Asks through others, and helps others in the same way; notes who shows nothing."""

    def __init__(self, run: RunState, fetch: Fetch) -> None:
        self._run = run
        self._fetch = fetch
        self._stall_s = run.run.round.stall_timeout_s
        self._left = MAX_FOR_ONE  # contributions that this member may still ask others for
        self._helped: Counter[str] = Counter()  # contributions that others have asked this member for
        self._num_granted = 0  # of them, those that it has fetched
        self._answered: set[int] = set()  # members that have shown this one what it asked them for
        self._silent: set[int] = set()  # those that have not, and can be reached
        self._excused: set[int] = set()  # those of them that say that they have no such commit
        self._apart: set[int] = set()  # those of them whose work has come through others
        self._noted: set[int] = set()
        # For others: fetches that are under way, by member and parts; and second attempts, by member.
        self._fetching: dict[tuple[int, tuple[int, ...]], asyncio.Task[Answer]] = {}
        self._again: dict[int, asyncio.Task[None]] = {}
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)  # a member is asked for one at a time

    def end(self, *, keep: bool) -> None:
        """Ends what is under way, as an exchange begins; `keep`: it takes back the commit, which is audited again."""
        for task in (*self._fetching.values(), *self._again.values()):
            task.cancel()
        for known in (self._fetching, self._again, self._turns):
            known.clear()
        for members in (self._answered, self._silent, self._excused, self._apart, self._noted):
            members.clear()
        self._left = MAX_FOR_ONE
        if not keep:
            self._helped.clear()
            self._num_granted = 0

    # Asking through others.

    async def resolve(self, state: RoundState, asked: Collection[int], claims: Collection[Claim]) -> None:
        """Asks others for what the `asked` members have not shown of the claims; notes those that show it to nobody."""
        silent = {member: wanted for member, wanted in lacking(claims).items() if member in asked}
        self._heard(state, set(asked).difference(silent), silent)
        wanted = self._chosen(silent)
        i_can_be_reached = state.group.members[state.me].statement.reachable
        helpers = [
            member
            for member, who in enumerate(state.group.members)
            if member != state.me and member not in silent and (i_can_be_reached or who.statement.reachable)
        ]
        _RANDOM.shuffle(helpers)
        in_vain: dict[int, list[bool]] = {member: [] for member in wanted}
        for some in (helpers[:FIRST_HELPERS], helpers[FIRST_HELPERS:]):
            await self._ask_through(state, some, wanted, in_vain)
        silent_to_all = {member: claims for member, claims in wanted.items() if _lack(claims, member)}
        self._apart.update(wanted.keys() - silent_to_all.keys())
        # If all helpers refuse or are gone, another one could have got it; without any, it may be this peer's line.
        confirmed = {member for member, found in in_vain.items() if any(found) or (not found and self._answered)}
        self._note(state, {member: claims for member, claims in silent_to_all.items() if member in confirmed})

    def _chosen(self, silent: Mapping[int, Sequence[Claim]]) -> dict[int, list[Claim]]:
        """What others are asked for: as many contributions of each member, until what they grant is used up."""
        queue = sorted(
            ((turn, _RANDOM.random(), member) for member, claims in silent.items() for turn in range(len(claims))),
        )[: self._left]
        self._left -= len(queue)
        taken = Counter(member for _, _, member in queue)
        return {member: list(silent[member][:count]) for member, count in taken.items()}

    async def _ask_through(
        self,
        state: RoundState,
        helpers: Iterable[int],
        wanted: Mapping[int, Sequence[Claim]],
        in_vain: Mapping[int, list[bool]],
    ) -> None:
        """Asks these members at the same time, until nothing is lacking or all have answered.

        The reducer of a part is not asked for contributions to it. Adds to `in_vain`, for each member and helper that
        has ended, whether the helper has answered and brought nothing of use.
        """

        async def ask(helper: int, member: int, claims: Sequence[Claim]) -> None:
            answer = await self._fetch(state, member, claims, through=helper)
            in_vain[member].append(answer.end is not None and _lack(claims, member))

        tasks = {
            asyncio.create_task(ask(helper, member, suitable))
            for helper in helpers
            for member, claims in wanted.items()
            if (suitable := [c for c in claims if c.part.reducer != helper and member in c.lacking])
        }
        try:
            while tasks and any(_lack(claims, member) for member, claims in wanted.items()):
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()

    # Helping others.

    async def help(self, state: RoundState, channel: Channel, of: object, indices: Sequence[int]) -> bytes:
        """Fetches a member's contributions to some parts, and passes them on to an auditor; returns how that ends.

        Raises:
            ProtocolError: (`sender`, `malformed`) not for this auditor, or not about this member; (`busy`) it has
                asked for too many.
        """
        members, auditor = state.group, channel.peer_id
        if members.index_of(auditor) is None:
            raise ProtocolError("sender", "the auditor is not a member of the group")
        member = members.index_of(of) if isinstance(of, str) else None
        if member is None or member == state.me or of == auditor:
            raise ProtocolError("malformed", "others are asked for the contributions of a third member of the group")
        self._helped[auditor] += len(indices)
        if self._helped[auditor] > MAX_FOR_ONE:
            raise ProtocolError("busy", "too many audits through this member")
        if self._was_in_vain(member):
            return b""
        self._num_granted += len(indices)
        if self._num_granted > MAX_FOR_ALL:
            await channel.send_error("busy: too many audits through this member by all together")  # no fault of its own
            return b""
        answer = await self._answer(state, member, tuple(indices))
        for frame in answer.frames:
            await channel.send(frame)
        return answer.end or b""

    async def _answer(self, state: RoundState, member: int, indices: tuple[int, ...]) -> Answer:
        """What a member shows of some parts. Those who ask for the same at the same time share a fetch."""
        task = self._fetching.get((member, indices))
        if task is None or task.done():
            task = asyncio.create_task(self._ask(state, member, indices))
            self._fetching[member, indices] = task
        await asyncio.wait({task})  # a task that is awaited would be cancelled along with the first who asked
        if self._fetching.get((member, indices)) is task:
            del self._fetching[member, indices]
        return _NOTHING if task.cancelled() else task.result()

    async def _ask(self, state: RoundState, member: int, indices: Sequence[int]) -> Answer:
        claims = [
            claim
            for claim in (Claim.of(state, i) for i in indices if i < len(state.plan.parts) and can_audit(state, i))
            if member in claim.members
        ]
        if not claims or not can_reach(state, member):
            return _NOTHING
        async with self._turns[member]:  # it serves few streams of a peer at a time
            if self._was_in_vain(member):
                return _NOTHING
            answer = await self._fetch(state, member, claims)
            if not _lack(claims, member):
                self._heard(state, [member], ())
            elif member not in self._again:
                again = next(claim for claim in claims if member in claim.lacking)
                self._again[member] = asyncio.create_task(self._ask_again(state, member, again))
        return answer

    def _was_in_vain(self, member: int) -> bool:
        """Returns True if this member has already asked another one for others, and got nothing."""
        return member in self._again and member not in self._answered

    async def _ask_again(self, state: RoundState, member: int, claim: Claim) -> None:
        """Asks a member that has shown nothing to this one for a contribution once more, and notes its silence.

        A peer that has begun the next exchange shows nothing of the last one. Then this one does so, too, soon.
        """
        try:
            await asyncio.sleep(self._stall_s / 4)
            answer = await self._fetch(state, member, [claim])
            is_silent = member in claim.lacking
            self._heard(state, () if is_silent else [member], [member] if is_silent else ())
            self.heed(member, answer)
            self._note(state, {member: [claim]} if is_silent else {})
        except Exception:  # a task's error would be reported when nobody looks for it
            _LOGGER.exception("asking for others in round %d has failed", state.plan.round)

    # Noting silence.

    def heed(self, member: int, answer: Answer) -> None:
        """Notes what a member says for itself."""
        if answer.end == NO_COMMIT:
            self._excused.add(member)

    def _heard(self, state: RoundState, answered: Iterable[int], silent: Iterable[int]) -> None:
        self._answered.update(answered)
        self._silent.update(member for member in silent if state.group.members[member].statement.reachable)

    def _note(self, state: RoundState, silent: Mapping[int, Sequence[Claim]]) -> None:
        """Notes the silence of members, unless it may be due to this peer's line, or to its being left behind."""
        if 2 * len(self._silent) >= max(len(self._silent | self._answered), 3) or self._is_behind(state):
            return
        for member in self._silent.intersection(silent) - self._apart - self._noted:
            self._noted.add(member)
            who = state.group.members[member]
            if not (who.statement.leaving or self._is_slow(state, who.peer_id)):
                _LOGGER.info("%s does not show its contributions to round %d", who.peer_id, state.plan.round)
                key = b"" if member in self._excused else who.signer.key
                reducers = {claim.reducer for claim in silent[member] if member in claim.lacking}
                self._run.tracks.conduct.note_silence(who.peer_id, state.plan.round, key, reducers)

    def _is_slow(self, state: RoundState, peer_id: str) -> bool:
        """Returns True if a member's line is too slow for what all others may ask it for, within a stall timeout.

        Whoever only plays slow reduces little, and nobody waits for its contributions.
        """
        rate_mbps = self._run.tracks.conduct.rates().get(peer_id)
        sizes = [state.codec.num_bytes(part.size) for part in state.plan.parts]
        num_members = state.plan.num_members
        asked_bytes = num_audits(num_members) * (num_members - 1) * fmean(sizes)
        return rate_mbps is not None and 8e-6 * asked_bytes > self._stall_s * rate_mbps

    def _is_behind(self, state: RoundState) -> bool:
        """Returns True if the swarm has committed rounds that this peer has missed: nobody shows older ones."""
        newest = max(state.plan.round, self._run.reference.round)
        return self._run.roster.swarm_round(newest) > newest


def can_reach(state: RoundState, member: int) -> bool:
    """Returns True if this member may ask another one: two that cannot be reached have no connection to each other."""
    members = state.group.members
    return members[state.me].statement.reachable or members[member].statement.reachable


def _lack(claims: Iterable[Claim], member: int) -> bool:
    return member in chain.from_iterable(claim.lacking for claim in claims)
