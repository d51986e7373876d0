"""The proofs against members that have lied (protocol/averaging/proof.py): kept, passed on, and acted upon.

A peer lists in its record whom it has proofs against. Whoever reads a name there that it has no proof for fetches the
proof and verifies it itself: a newcomer before its first round. One for each culprit is enough. Anybody can make proofs
against identities of his own, so of those that others have made, few are kept unless their culprit has taken part in
rounds of this peer, or most members name it. The culprit is excluded once most of its group know
(protocol/admission/exclusion.py): nobody who has the proof calls it, answers it, or includes it in a group, unless the
founder pardons it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from spes_swarm.base.address import host_of
from spes_swarm.base.errors import ProtocolError
from spes_swarm.base.rate_limit import Budgets
from spes_swarm.network.link.proof_query import FRAME_BYTES as _FRAME_BYTES
from spes_swarm.network.link.proof_query import fetch_proof, stream_name
from spes_swarm.network.link.wire import Channel, FaultSink, Guests, serve_channel
from spes_swarm.network.run_state import RunState
from spes_swarm.network.transport.interface import STREAM_ERRORS, Transport
from spes_swarm.protocol.admission.exclusion import Exclusions
from spes_swarm.protocol.averaging.proof import MAX_PROOF_BYTES, Proof, open_proof
from spes_swarm.protocol.members.records import Progress
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.storage.proofs import ProofFolder

_LOGGER = logging.getLogger(__name__)
_MAX_HELLO_BYTES = 1024
_PAUSE_S = 600.0  # before a peer is asked again that listed culprits and had no valid proof
_FETCH_S = 120.0  # that a proof may take
_MAX_FETCHES, _MAX_ASKED = 16, 4  # at a time: peers that are asked, in all and for the same proof
# With so many proofs, none are added about peers that have taken part in no round here; and how long those may be.
_MAX_WITH_STRANGERS, _MAX_BYTES_ABOUT_STRANGERS = 32, 16 << 20
_ROUNDS_AHEAD = 16  # of this peer, that a lie may be
# What a member gets of proofs in an hour, and what all peers at an address that are none.
_BYTES_PER_MEMBER, _BYTES_PER_HOST, _REFILL_S = 4 * MAX_PROOF_BYTES, 64 << 20, 3600.0


class Proofs:
    """One peer's proofs."""

    def __init__(
        self,
        transport: Transport,
        run: RunState,
        on_fault: FaultSink,
        guests: Guests,
        on_new: Callable[[], None] = lambda: None,
        inviter: Callable[[str], str] = lambda peer_id: "",
    ) -> None:
        """`on_new` is called when a proof has been added; `inviter` returns who has invited a peer, in words."""
        self._transport = transport
        self._run = run
        self._on_fault = on_fault
        self._guests = guests
        self._on_new = on_new
        self._inviter = inviter
        self._name = stream_name(run.run_id)
        self._stall_s = run.run.round.stall_timeout_s
        self._folder = None if run.settings.proofs is None else ProofFolder(run.settings.proofs)
        self._known: dict[str, Path | bytes] = {}  # by culprit
        self._of_members, self._of_hosts = (Budgets(most, _REFILL_S) for most in (_BYTES_PER_MEMBER, _BYTES_PER_HOST))
        self._not_before: dict[str, float] = {}  # monotonic time, by peer
        self._fetching: dict[str, asyncio.Task[None]] = {}  # by the peer that is asked
        self._num_asked: Counter[str] = Counter()  # of these, by culprit
        self._adding: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Registers the handler, and reads the proofs of earlier sessions."""
        if self._folder is not None:
            found = await asyncio.to_thread(self._folder.read, self._run.run_id)
            for proof, path in sorted(found, key=lambda each: each[0].round):  # the newest one of each culprit is kept
                self._keep(proof, path)
        # An excluded peer may get the proof against itself: it would have to take others' word for it.
        guests = Guests(lambda peer: self._guests.admits(peer) or peer in self._exclusions, self._guests.is_member)
        await serve_channel(self._transport, self._name, self._serve, self._stall_s, self._on_fault, guests)

    @property
    def _exclusions(self) -> Exclusions:
        return self._run.tracks.conduct.exclusions

    def add_soon(self, data: bytes) -> None:
        """Adds a proof that this peer has made, in the background: audits may end meanwhile."""
        task = asyncio.create_task(self._add_quietly(data))
        self._adding.add(task)
        task.add_done_callback(self._adding.discard)

    async def added(self) -> None:
        """Waits until all proofs that this peer has made so far have been added."""
        if self._adding:
            await asyncio.wait(self._adding)

    async def _add_quietly(self, data: bytes) -> None:
        try:
            await self.add(data)
        except Exception:  # this peer has made it
            _LOGGER.exception("a proof is invalid")

    async def add(self, data: bytes, *, about: str | None = None) -> None:
        """Verifies a proof, and keeps it unless there is one against the culprit, or the lie has been pardoned.

        The culprit is excluded once most members have a proof.

        `about`: whose lie it should show, if another peer has made it.

        Raises:
            ProtocolError: it proves nothing, or is about another run, another peer, or a round that is to come.
        """
        proof = await asyncio.to_thread(open_proof, data)
        culprit, exclusions = proof.culprit, self._exclusions
        if proof.run_id != self._run.run_id or about not in (None, culprit) or self._is_to_come(proof.round):
            raise ProtocolError("proof", f"a proof about {culprit}, round {proof.round} of the run {proof.run_id}")
        if exclusions.is_culprit(culprit) or exclusions.is_pardoned(culprit, proof.round):
            return
        self._keep(proof, data)
        kept: Path | None = None
        if self._folder is not None:
            try:
                kept = await asyncio.to_thread(self._folder.save, proof, data)
                self._known[culprit] = kept
            except OSError as exc:
                _LOGGER.warning("a proof cannot be written: %s", exc)
        words = [
            f"it lied in round {proof.round}, part {proof.part}: {proof.what}",
            "it is excluded once most members have a proof",
            *filter(None, [self._inviter(culprit)]),
            f"the proof is in {kept}" if kept is not None else "the proof could not be written",
        ]
        self._on_fault(culprit, ProtocolError("proven", "; ".join(words)))
        self._on_new()

    def _is_to_come(self, round_number: int) -> bool:
        return round_number > self._run.reference.round + _ROUNDS_AHEAD

    def _keep(self, proof: Proof, kept: Path | bytes) -> None:
        self._known[proof.culprit] = kept
        shared = proof.culprit in self._run.group and proof.culprit != self._run.identity.peer_id
        self._exclusions.note_lie(proof.culprit, proof.round, pending=shared)

    # Passing on.

    def compare(self, records: Mapping[str, Progress]) -> None:
        """Fetches proofs against culprits that members list in their records, in the background."""
        of_members = {peer: record for peer, record in records.items() if self._guests.is_member(peer)}
        named = Counter(culprit for record in of_members.values() for culprit in {*record.proven})
        by_most = {culprit for culprit, count in named.items() if 2 * count > len(of_members)}
        for peer_id, record in of_members.items():
            lies = zip(record.proven, record.proven_in, strict=False)
            self._fetch_soon(peer_id, [culprit for culprit, lied in lies if self._lacks(culprit, lied, by_most)])

    def _lacks(self, culprit: str, lied: int, by_most: Collection[str]) -> bool:
        """Returns True if a proof is missing here that matters."""
        exclusions = self._exclusions
        if exclusions.is_culprit(culprit) or exclusions.is_pardoned(culprit, lied) or self._is_to_come(lied):
            return False
        is_known = self._run.roster.reputation.is_member(culprit)
        return is_known or (culprit in by_most and len(self._known) < _MAX_WITH_STRANGERS)

    def ask_about_me(self, peer_id: str) -> None:
        """Fetches the proof against this peer from a member that refuses it; there may be none."""
        me = self._run.identity.peer_id
        if self._guests.is_member(peer_id) and not self._exclusions.is_culprit(me):
            self._fetch_soon(peer_id, [me])

    def _fetch_soon(self, peer_id: str, culprits: Sequence[str]) -> None:
        is_busy = peer_id in self._fetching or len(self._fetching) >= _MAX_FETCHES
        if culprits and not is_busy and time.monotonic() >= self._not_before.get(peer_id, 0.0):
            self._fetching[peer_id] = asyncio.create_task(self._fetch_all(peer_id, culprits))

    async def fetched(self) -> None:
        """Waits a while for the proofs that are being fetched."""
        if self._fetching:
            await asyncio.wait([*self._fetching.values()], timeout=self._stall_s)

    async def _fetch_all(self, peer_id: str, culprits: Sequence[str]) -> None:
        try:
            for culprit in culprits:
                if self._exclusions.is_culprit(culprit) or self._num_asked[culprit] >= _MAX_ASKED:
                    continue
                self._num_asked[culprit] += 1
                try:
                    is_valid = await self._fetch(peer_id, culprit)
                finally:
                    self._num_asked[culprit] -= 1
                if not is_valid:
                    self._not_before[peer_id] = time.monotonic() + _PAUSE_S
                    break
        finally:
            del self._fetching[peer_id]

    async def _fetch(self, peer_id: str, culprit: str) -> bool:
        """Returns True if what came is a proof against the culprit."""
        is_known = self._run.roster.reputation.is_member(culprit)
        most = MAX_PROOF_BYTES if is_known else _MAX_BYTES_ABOUT_STRANGERS
        with suppress(*STREAM_ERRORS, ProtocolError):
            async with asyncio.timeout(_FETCH_S):
                data = await fetch_proof(self._transport, peer_id, self._run.run_id, culprit, self._stall_s, most)
            await self.add(data, about=culprit)
            return True
        return False

    async def _serve(self, channel: Channel) -> None:
        culprit = (await channel.receive_hello(_MAX_HELLO_BYTES)).get("culprit")
        if not isinstance(culprit, str):
            raise ProtocolError("malformed", "a proof is asked for by its culprit")
        if channel.peer_id in self._exclusions and culprit != channel.peer_id:
            raise ProtocolError("excluded", "this peer gets the proof against itself only")
        kept = self._known.get(culprit)
        if kept is not None:
            with suppress(OSError):  # the file is gone
                self._spend(channel, len(kept) if isinstance(kept, bytes) else kept.stat().st_size)
                data = kept if isinstance(kept, bytes) else await asyncio.to_thread(kept.read_bytes)
                for begin in range(0, len(data), _FRAME_BYTES):
                    await channel.send(Frame(FrameKind.DATA, payload=data[begin : begin + _FRAME_BYTES]))
        await channel.send(Frame(FrameKind.END))

    def _spend(self, channel: Channel, num_bytes: int) -> None:
        """Books a proof that is about to be sent; raises ProtocolError (`budget`) if its receiver has had too many."""
        is_member = self._guests.is_member(channel.peer_id)
        budget = self._of_members if is_member else self._of_hosts
        taker = channel.peer_id if is_member else host_of(channel.address)
        if not budget.allows(taker, num_bytes):
            raise ProtocolError("budget", "this peer has sent its proofs there too often; ask another, or wait")
        budget.spend(taker, num_bytes)

    async def stop(self) -> None:
        """Ends what is under way, as this peer leaves; a proof that it has made is kept."""
        for task in self._fetching.values():
            task.cancel()
        await self.added()
