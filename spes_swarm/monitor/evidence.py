"""Fetches the proofs that peers say they have, one at a time, and verifies them.

Peers serve proofs to everybody whom they admit, to strangers within a small budget. A monitor needs one for each
culprit. It keeps what a proof shows, and the proof itself only in a folder, if it is given one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from spes_swarm.monitor.accusations import Evidence
from spes_swarm.protocol.averaging.proof import Proof, open_proof
from spes_swarm.storage.proofs import ProofFolder

_LOGGER = logging.getLogger(__name__)
MAX_BYTES: Final = 16 << 20  # of a proof
_MAX_CULPRITS: Final = 16  # those that most peers name; anybody can make proofs against identities of his own
_FETCH_S: Final = 120.0  # for one proof: a peer could send it byte by byte
_PAUSE_S: Final = 600.0  # before a peer is asked again that had no proof

Fetch = Callable[[str, str], Awaitable[bytes]]
"""Fetches a proof from a peer, given both ids: the peer's and the culprit's."""


class EvidenceSeeker:
    """Looks for the proofs behind what peers say."""

    def __init__(
        self,
        run_id: str,
        fetch: Fetch,
        excludes: Callable[[str, int], bool],
        folder: Path | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`excludes`: whether a peer's lie in a round counts, since the founder has not pardoned it."""
        self._folder = None if folder is None else ProofFolder(folder)
        self.proven: dict[str, Evidence] = {}  # by culprit
        self._run_id, self._fetch, self._excludes, self._now = run_id, fetch, excludes, now
        self._not_before: dict[str, float] = {}  # by peer, as `now`
        self._wanted: dict[str, Sequence[str]] = {}
        self._task: asyncio.Task[None] | None = None

    def seek(self, accusers: Mapping[str, Sequence[str]]) -> None:
        """Looks for proofs in the background. `accusers`: who has them, by culprit, the most important ones first."""
        self._wanted = dict(islice(accusers.items(), _MAX_CULPRITS))
        self.proven = {
            culprit: evidence
            for culprit, evidence in self.proven.items()
            if culprit in self._wanted and self._excludes(culprit, evidence.round)
        }
        present = {peer_id for peers in self._wanted.values() for peer_id in peers}
        self._not_before = {peer_id: at for peer_id, at in self._not_before.items() if peer_id in present}
        if self._next() is not None and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._seek())

    async def settled(self, timeout_s: float) -> None:
        """Waits until all proofs that can be had now are here, for at most so long."""
        if self._task is not None and not self._task.done():
            await asyncio.wait({self._task}, timeout=timeout_s)

    def stop(self) -> None:
        """Ends what is under way."""
        if self._task is not None:
            self._task.cancel()

    def _next(self) -> tuple[str, str] | None:
        """A culprit without a proof, and a peer that may have it."""
        now = self._now()
        for culprit, peers in self._wanted.items():
            if culprit not in self.proven:
                for peer_id in peers:
                    if now >= self._not_before.get(peer_id, 0.0):
                        return culprit, peer_id
        return None

    async def _seek(self) -> None:
        while (found := self._next()) is not None:
            culprit, peer_id = found
            evidence: Evidence | None = None
            try:
                evidence = await self._obtain(culprit, peer_id)
            except Exception as exc:  # no input from other nodes may end the monitor
                _LOGGER.info("no proof against %s from %s: %r", culprit, peer_id, exc)
            if evidence is None:
                self._not_before[peer_id] = self._now() + _PAUSE_S
            else:
                self.proven[culprit] = evidence

    async def _obtain(self, culprit: str, peer_id: str) -> Evidence | None:
        async with asyncio.timeout(_FETCH_S):
            data = await self._fetch(peer_id, culprit)
        proof = await asyncio.to_thread(open_proof, data)
        if (proof.run_id, proof.culprit) != (self._run_id, culprit) or not self._excludes(culprit, proof.round):
            return None
        return Evidence.of(proof, await self._saved(proof, data))

    async def _saved(self, proof: Proof, data: bytes) -> str | None:
        if self._folder is None:
            return None
        try:
            return str(await asyncio.to_thread(self._folder.save, proof, data))
        except OSError as exc:
            _LOGGER.warning("a proof cannot be written: %s", exc)
            return None
