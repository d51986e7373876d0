"""The door of a run: whom this peer answers, and how it learns and passes on who may take part.

An open run admits all but the excluded peers, against which there are proofs (see round/proofs.py).

libp2p authenticates peer ids, so the id of a caller is all that has to be checked. In a private run, a peer shows its
admission in its calls to another one until that has answered, in its records, and in its statements. Every call and
answer carries a digest of the acts that its sender knows. Where the two differ, each side asks the other for those that
it lacks, so a revocation or a pardon reaches all members at once, and one that was away with its first call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from spes_swarm.base.errors import ProtocolError
from spes_swarm.config.admission import ADVICE, membership_of
from spes_swarm.config.manifest import Manifest
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.protocol.admission.grants import Terms
from spes_swarm.protocol.members.records import Lease, Progress, Record, Volunteer
from spes_swarm.protocol.rounds.statement import Statement
from spes_swarm.storage.acts_file import ActsFile

_LOGGER = logging.getLogger(__name__)
# What a monitor needs; open to everybody if the run is visible to all.
VISIBLE: Final = frozenset({"manifest", "ping", "clock"})
_TIMEOUT_S = 10.0
_WAIT_S = 1.0  # for the acts of a caller whose call depends on them
_PAUSE_S, _LONG_PAUSE_S = 0.5, 10.0  # between two requests to one peer for its acts, if they had any effect or not
_EXPIRY_GRACE_S = 60.0
_PREFIX_BYTES = 8
_MAX_ANSWER_BYTES = 1 << 20
_MAX_INVALID = 64  # acts of one answer: signatures take time to verify
_MAX_REMEMBERED = 1024


@dataclass
class _Asked:
    """When a peer was asked for its acts last, and whether it may be asked again soon."""

    at: float  # monotonic time
    pause_s: float = _PAUSE_S
    task: asyncio.Task[None] | None = None


def _check_experts(peer_id: str, num_experts: int, terms: Terms) -> None:
    if terms.experts is not None and num_experts > terms.experts:
        raise ProtocolError("terms", f"{peer_id} has {num_experts} experts and may have {terms.experts}")


class Door:
    """Checks callers, and keeps this peer's knowledge of the members up to date."""

    def __init__(self, rpc: Rpc, manifest: Manifest, now: Callable[[], float], file: ActsFile | None = None) -> None:
        """`now` returns the swarm's time in Unix seconds; `file` is where acts are kept."""
        self.members = membership_of(manifest)
        self.is_private = manifest.run.admission != "open"
        self.is_visible = not self.is_private or manifest.run.visible == "all"
        self._rpc = rpc
        self._now = now
        self._file = file
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._refused_by: dict[str, str] = {}  # members -> the reason they gave
        self.present: Callable[[], Collection[str]] = tuple  # the other peers, which are told of new acts
        self.on_refusal: Callable[[str], None] = lambda peer_id: None  # called for peers that refuse this one
        self.electorate: Callable[[], Collection[str]] = tuple  # those whose work is in a commit of this peer
        self._has_news = False
        self._announcing: asyncio.Task[None] | None = None

    async def open(self, me: str, others: Collection[str]) -> None:
        """Reads the file of acts, takes in those of others, and checks all calls from now on.

        Until then this peer cannot know whom to admit: allowances are acts. `me` is its id; `others` are connected.
        """
        rpc = self._rpc
        self.read_file()
        self._learn(me, rpc.admission)
        await rpc.serve("acts", self._serve_acts)
        rpc.open(self)
        if self.is_private:
            await asyncio.gather(*(self._fetch_acts(peer_id, _Asked(0.0)) for peer_id in others))
            self.members.confirm()

    @property
    def digest(self) -> bytes:
        """See rpc.Doorkeeper."""
        return self.members.digest

    # Decisions.

    def admits(self, peer_id: str) -> bool:
        """Returns True if a peer may take part."""
        return self.members.admits(peer_id, self._now())

    def sees(self, peer_id: str) -> bool:
        """Returns True if a peer may read the records of the run."""
        return self.is_visible or self.admits(peer_id)

    def terms(self, peer_id: str, *, shown: bytes | None = None, grace_s: float = 0.0) -> Terms:
        """What an admitted peer may do; for `shown` see `Membership.terms`. It may have expired for `grace_s` seconds.

        Raises:
            ProtocolError: (`stranger`) it may not take part.
        """
        terms = self.members.terms(peer_id, self._now() - grace_s, shown=shown)
        if terms is None:
            raise ProtocolError("stranger", f"{peer_id} may not take part in this run")
        return terms

    def vet_record(self, peer_id: str, record: Record) -> None:
        """Checks that the writer of a record may take part, and that the record keeps to its terms.

        Raises:
            ProtocolError: (`excluded`, `stranger`, `terms`) the record does not count.
        """
        if peer_id in self.members.exclusions:
            raise ProtocolError("excluded", f"{peer_id} has lied")
        if not self.is_private:
            return
        if isinstance(record, Progress):
            self._learn(peer_id, record.admission)
        terms = self.terms(peer_id)
        if isinstance(record, Lease):
            _check_experts(peer_id, len(record.experts), terms)
        if isinstance(record, Volunteer) and not terms.may_publish:
            raise ProtocolError("terms", f"{peer_id} may not publish")

    def vet_statement(self, peer_id: str, statement: Statement) -> float:
        """Checks that a member may take part on its terms; returns the largest share of an average that it may have.

        One that has been excluded lately passes: the leader may not have the proof yet, and the others must not leave
        its group.

        Raises:
            ProtocolError: (`excluded`, `stranger`, `terms`) no group includes it.
        """
        if self.members.exclusions.for_long(peer_id, statement.round):
            raise ProtocolError("excluded", f"{peer_id} has lied")
        if not self.is_private:
            return 1.0
        self._learn(peer_id, statement.admission)
        # Clocks differ a little: a group that its leader has just closed must not be refused by some of its members.
        # Only what the statement itself shows counts, or members would come to different plans.
        terms = self.terms(peer_id, shown=statement.admission, grace_s=_EXPIRY_GRACE_S)
        _check_experts(peer_id, max(len(statement.held), statement.room), terms)
        return terms.weight or 1.0

    def _learn(self, peer_id: str, admission: object) -> None:
        if self.is_private and isinstance(admission, bytes) and admission:
            with suppress(ProtocolError):  # then it does not admit the peer
                new = self.members.learn(peer_id, admission, self._now())
                self._keep([new] if new is not None else [])

    # Calls.

    async def receive(self, peer_id: str, message: dict[str, Any]) -> str | None:
        """Takes in what a call shows; returns why it is refused, None if it is served."""
        self._learn(peer_id, message.get("admission"))
        if self.admits(peer_id):
            task = self._compare(peer_id, message.get("acts"))
            if task is not None and message.get("method") == "gather":  # the group must not include a revoked peer
                await asyncio.wait({task}, timeout=_WAIT_S)
        if self.admits(peer_id):
            return None
        if peer_id in self.members.exclusions:
            return self.members.why_not(peer_id, self._now())
        joins = isinstance(message.get("arguments"), dict) and message["arguments"].get("joins")
        if self.is_visible and message.get("method") in VISIBLE and not joins:
            return None
        if self.members.policy == "allow-list":
            return f"this run is private: ask its founder to allow {peer_id}"
        return f"{self.members.why_not(peer_id, self._now())}: {ADVICE}"

    def receive_answer(self, peer_id: str, answer: dict[str, Any]) -> None:
        """Takes in what an answer shows."""
        admission, digest = answer.pop("admission", None), answer.pop("acts_digest", None)
        self._learn(peer_id, admission)
        if self.admits(peer_id):
            self._compare(peer_id, digest)
        self._refused_by.pop(peer_id, None)

    def note_refusal(self, peer_id: str, reason: str) -> None:
        """See rpc.Doorkeeper."""
        if self.admits(peer_id):
            self._refused_by[peer_id] = reason
            self.on_refusal(peer_id)

    def why_out(self, me: str) -> str | None:
        """Why this peer may no longer take part, as far as it knows, or as most members of a private run say."""
        if not self.admits(me):
            return f"this peer may no longer take part: {self.members.why_not(me, self._now())}"
        electorate = self.electorate()
        reasons = [self._refused_by[peer] for peer in electorate if peer in self._refused_by]
        # In an open run only a proof excludes; a peer that is refused fetches the one against itself.
        if 2 * len(reasons) > len(electorate) and self.is_private and me != self.members.founder:
            return f"most members refuse this peer: {reasons[0]}"
        return None

    # Acts.

    def read_file(self) -> None:
        """Takes in what was appended to the file of acts, which the `invite` command does as well."""
        if self._file is None:
            return
        try:
            acts = self._file.read_new()
        except OSError as exc:
            _LOGGER.warning("the file of acts cannot be read: %s", exc)
            return
        if self._take(acts):
            self._announce_to_others()

    def _take(self, acts: Collection[object]) -> list[bytes]:
        """Takes in acts; returns those that are new and valid."""
        new, num_invalid = [], 0
        for act in acts:
            try:
                if isinstance(act, bytes) and self.members.add(act):
                    new.append(act)
            except ProtocolError:  # whoever sent it may have it from others, or be of a later version
                num_invalid += 1
                if num_invalid >= _MAX_INVALID:
                    break
        return new

    def _keep(self, acts: Sequence[bytes]) -> None:
        """Writes new acts to the file, and passes them on."""
        if not acts:
            return
        try:
            if self._file is not None:
                self._file.append(*acts)
        except OSError as exc:
            _LOGGER.warning("acts of the run cannot be kept: %s", exc)
        self._announce_to_others()

    def _announce_to_others(self) -> None:
        """Calls the others, which then see that this peer knows more than they do; at most once in a while."""
        self._has_news = True
        if self._announcing is None or self._announcing.done():
            self._announcing = asyncio.create_task(self._announce())

    async def _announce(self) -> None:
        async def call(peer_id: str) -> None:
            with suppress(OSError, ProtocolError):
                await self._rpc.call(peer_id, "ping", {}, _TIMEOUT_S)

        while self._has_news:
            self._has_news = False
            calls = [asyncio.create_task(call(peer_id)) for peer_id in self.present()]
            await asyncio.sleep(_PAUSE_S)
            if calls:
                await asyncio.wait(calls)

    def _compare(self, peer_id: str, digest: object) -> asyncio.Task[None] | None:
        """Asks an admitted peer for its acts if they differ from this peer's; returns the request under way, if any."""
        if not isinstance(digest, bytes) or digest == self.members.digest or not digest:
            return None
        if not (self.is_private or self._rpc.is_member(peer_id)):  # an open run admits strangers, who may send garbage
            return None
        asked = self._asked.get(peer_id)
        if asked is not None and time.monotonic() - asked.at < asked.pause_s:
            return asked.task
        asked = self._asked[peer_id] = _Asked(time.monotonic())
        self._asked.move_to_end(peer_id)
        while len(self._asked) > _MAX_REMEMBERED:
            self._asked.popitem(last=False)
        asked.task = asyncio.create_task(self._fetch_acts(peer_id, asked))
        return asked.task

    async def _fetch_acts(self, peer_id: str, asked: _Asked) -> None:
        known = b"".join(identifier[:_PREFIX_BYTES] for identifier in self.members.acts)
        with suppress(OSError, ProtocolError):
            answer = await self._rpc.call(peer_id, "acts", {"known": known}, _TIMEOUT_S)
            acts = answer.get("acts")
            new = self._take(acts if isinstance(acts, list) else [])
            asked.pause_s = _PAUSE_S if new else _LONG_PAUSE_S
            self._keep(new)

    async def _serve_acts(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id
        known = request.get("known")
        if not isinstance(known, bytes):
            raise ProtocolError("malformed", "`acts` without the known ones")
        prefixes = {known[i : i + _PREFIX_BYTES] for i in range(0, len(known), _PREFIX_BYTES)}
        answer, size = [], 0
        for identifier, act in self.members.acts.items():
            if identifier[:_PREFIX_BYTES] not in prefixes and size + len(act) <= _MAX_ANSWER_BYTES:
                answer.append(act)
                size += len(act)
        return {"acts": answer, "admission": self._rpc.admission}
