"""The proofs against members that have lied (protocol/averaging/proof.py): kept, passed on, and acted upon.

A peer lists in its record whom it has proofs against. Whoever reads a name there that it has no proof for fetches the
proof and verifies it itself: a newcomer before its first round. One for each culprit is enough. Anybody can make proofs
against identities of his own, so of those that others have made, few are kept unless their culprit has taken part in
rounds of this peer, or most members name it. The culprit is excluded: nobody who has the proof calls it, answers it,
or includes it in a group, unless the founder pardons it (protocol/admission/exclusion.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from hivemind.p2p import P2P

from spes_swarm.base.address import host_of
from spes_swarm.base.errors import ProtocolError
from spes_swarm.base.rate_limit import Budgets
from spes_swarm.network.link.proof_query import FRAME_BYTES as _FRAME_BYTES
from spes_swarm.network.link.proof_query import fetch_proof, stream_name
from spes_swarm.network.link.wire import STREAM_ERRORS, Channel, FaultSink, Guests, serve_channel
from spes_swarm.network.run_state import RunState
from spes_swarm.protocol.averaging.proof import MAX_PROOF_BYTES, Proof, open_proof
from spes_swarm.protocol.members.records import Progress
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.storage.proofs import ProofFolder

_LOGGER = logging.getLogger(__name__)
_MAX_HELLO_BYTES = 1024
_PAUSE_S = 600.0  # before a peer is asked again that listed culprits and had no proof
# Of others, against peers that have taken part in no round and that few members name.
_MAX_ABOUT_STRANGERS, _MAX_BYTES_ABOUT_STRANGERS = 16, 16 << 20
# What a member gets of proofs in an hour, and what all peers at an address that are none.
_BYTES_PER_MEMBER, _BYTES_PER_HOST, _REFILL_S = 4 * MAX_PROOF_BYTES, 64 << 20, 3600.0


class Proofs:
    """One peer's proofs."""

    def __init__(self, p2p: P2P, run: RunState, on_fault: FaultSink, guests: Guests) -> None:
        self._p2p = p2p
        self._run = run
        self._on_fault = on_fault
        self._guests = guests
        self.on_new: Callable[[], None] = lambda: None
        self.inviter: Callable[[str], str] = lambda peer_id: ""  # who has invited a peer, in words
        self._name = stream_name(run.run_id)
        self._stall_s = run.run.round.stall_timeout_s
        self._folder = None if run.settings.proofs is None else ProofFolder(run.settings.proofs)
        self._known: dict[str, Path | bytes] = {}  # by culprit
        self._num_about_strangers = 0
        self._of_members, self._of_hosts = (Budgets(most, _REFILL_S) for most in (_BYTES_PER_MEMBER, _BYTES_PER_HOST))
        self._not_before: dict[str, float] = {}  # monotonic time, by peer
        self._fetching: asyncio.Task[None] | None = None
        self._adding: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Registers the handler, and reads the proofs of earlier sessions."""
        if self._folder is not None:
            found = await asyncio.to_thread(self._folder.read, self._run.run_id)
            for proof, path in sorted(found, key=lambda each: each[0].round):  # the newest one of each culprit is kept
                self._keep(proof, path)
        await serve_channel(self._p2p, self._name, self._serve, self._stall_s, self._on_fault, self._guests)

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

    async def add(self, data: bytes, *, is_trusted: bool = True) -> bool:
        """Verifies and keeps a proof, and excludes its culprit from now on.

        `is_trusted`: this peer has made it, or most members name its culprit.

        Returns:
            False if the culprit is excluded already, or has been pardoned, or does not matter here.

        Raises:
            ProtocolError: it proves nothing, or is about another run.
        """
        proof = await asyncio.to_thread(open_proof, data)
        if proof.run_id != self._run.run_id:
            raise ProtocolError("proof", f"a proof about the run {proof.run_id}")
        exclusions, culprit = self._run.tracks.conduct.proven, proof.culprit
        if culprit in exclusions or not exclusions.excludes(culprit, proof.round):
            return False
        if not is_trusted and not self._guests.is_member(culprit):
            is_full = self._num_about_strangers >= _MAX_ABOUT_STRANGERS or len(data) > _MAX_BYTES_ABOUT_STRANGERS
            if is_full or not self._run.roster.standing.has_answered(culprit):
                return False
            self._num_about_strangers += 1
        kept: Path | bytes = data
        self._keep(proof, kept)
        if self._folder is not None:
            try:
                kept = await asyncio.to_thread(self._folder.save, proof, data)
            except OSError as exc:
                _LOGGER.warning("a proof cannot be written: %s", exc)
        self._keep(proof, kept)
        words = [
            f"it lied in round {proof.round}, part {proof.part}: {proof.what}",
            "it is excluded",
            *filter(None, [self.inviter(culprit)]),
            f"the proof is in {kept}" if isinstance(kept, Path) else "the proof could not be written",
        ]
        self._on_fault(culprit, ProtocolError("proven", "; ".join(words)))
        self.on_new()
        return True

    def _keep(self, proof: Proof, kept: Path | bytes) -> None:
        self._known[proof.culprit] = kept
        self._run.tracks.conduct.proven.note_lie(proof.culprit, proof.round)

    # Passing on.

    def compare(self, records: Mapping[str, Progress]) -> None:
        """Fetches proofs against culprits that others list in their records, in the background."""
        if self._fetching is None or self._fetching.done():
            of_members = {peer: record for peer, record in records.items() if self._guests.is_member(peer)}
            named = Counter(culprit for record in of_members.values() for culprit in {*record.proven})
            by_most = {culprit for culprit, count in named.items() if 2 * count > len(of_members)}
            wanted = [
                (peer, one) for peer, record in of_members.items() for one in self._unknown(peer, record, by_most)
            ]
            self._fetching = asyncio.create_task(self._fetch_all(wanted, by_most)) if wanted else None

    async def fetched(self) -> None:
        """Waits a while for the proofs that are being fetched."""
        if self._fetching is not None:
            await asyncio.wait({self._fetching}, timeout=self._stall_s)

    def _unknown(self, peer_id: str, record: Progress, by_most: Collection[str]) -> list[str]:
        """The culprits that a peer lists and that matter here, unless it had no proof lately."""
        if time.monotonic() < self._not_before.get(peer_id, 0.0):
            return []
        exclusions, has_met = self._run.tracks.conduct.proven, self._run.roster.standing.has_answered
        return [one for one in record.proven if one not in exclusions and (one in by_most or has_met(one))]

    async def _fetch_all(self, wanted: Collection[tuple[str, str]], by_most: Collection[str]) -> None:
        for peer_id, culprit in wanted:
            if culprit not in self._run.tracks.conduct.proven:
                await self._fetch(peer_id, culprit, is_trusted=culprit in by_most)

    async def _fetch(self, peer_id: str, culprit: str, *, is_trusted: bool) -> None:
        with suppress(*STREAM_ERRORS, ProtocolError):
            data = await fetch_proof(self._p2p, peer_id, self._run.run_id, culprit, self._stall_s)
            if await self.add(data, is_trusted=is_trusted):
                return
        self._not_before[peer_id] = time.monotonic() + _PAUSE_S

    async def _serve(self, channel: Channel) -> None:
        culprit = (await channel.receive_hello(_MAX_HELLO_BYTES)).get("culprit")
        if not isinstance(culprit, str):
            raise ProtocolError("malformed", "a proof is asked for by its culprit")
        kept = self._known.get(culprit)
        if kept is not None:
            with suppress(OSError):  # the file is gone
                data = kept if isinstance(kept, bytes) else await asyncio.to_thread(kept.read_bytes)
                self._spend(channel, len(data))
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

    def stop(self) -> None:
        """Ends what is under way, as this peer leaves."""
        if self._fetching is not None:
            self._fetching.cancel()
