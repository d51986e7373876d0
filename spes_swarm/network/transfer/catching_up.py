"""Fetches the swarm's reference: at the start, and when no round could bring this peer's up to date.

Shapes: N elements of the flat vector.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from spes_swarm.base.errors import TransferError
from spes_swarm.config.schedule import ScheduleEnd
from spes_swarm.metrics import events
from spes_swarm.network.run_state import RunState
from spes_swarm.network.transfer.transfer import Transfer
from spes_swarm.port.messages import CaughtUp, TransferReport
from spes_swarm.protocol.consensus.reference import ReferenceTable
from spes_swarm.protocol.members.roster import PeerView

# A peer that has missed more rounds than this would be sent nearly the whole model in the middle of a round.
_MAX_ROUNDS_BEHIND = 8
# Records are written and read about once a second.
_RECORDS_LAG_S = 4.0


class CatchingUp:
    """Replaces this peer's reference by the swarm's; `refresh` reads the other peers' records again."""

    def __init__(self, run_state: RunState, transfer: Transfer, refresh: Callable[[], Awaitable[None]]) -> None:
        self._reference = run_state.reference
        self._contribution_N = run_state.contribution_N
        self._leases = run_state.leases
        self._roster = run_state.roster
        self._transfer = transfer
        self._refresh = refresh
        self._last_round = ScheduleEnd(run_state.run).last_round

    async def download(
        self, if_newer: bool, partial: Path | None, on_progress: Callable[[events.SyncProgress], None]
    ) -> TransferReport | None:
        """See port.commands.RunCommands."""
        await self._refresh()
        if if_newer and self._newest_round() <= self._reference.round:
            return None
        donors = self._donors if self._roster.electorate() else self._newest_donors
        report = await self._transfer.download(donors, partial, on_progress)
        self._transfer.open()
        self._roster.committed()
        return report

    async def swarm_table(self) -> ReferenceTable | None:
        """The table that most donors have, None if no donor answers."""
        await self._refresh()
        return await self._transfer.vote(self._donors if self._roster.electorate() else self._newest_donors)

    async def resync_if_diverged(self) -> CaughtUp | None:
        """Fetches the swarm's reference if no round could bring this peer's up to date, or only at a cost to all peers.

        A peer that is too far behind keeps the work since its last commit as its difference to the new reference. One
        that is ahead of most others has continued without them (in a part of the swarm that was cut off, or as the only
        one whose commit succeeded). It keeps its live weights, so all that it has learnt meanwhile is in its
        difference.

        Raises:
            TransferError: the run has ended without this peer, and its last reference could not be fetched.
        """
        before = self._reference.round
        last = self._missed_end()
        swarm = await self._round_of_most(before) if last is None else last
        why = f"this peer had committed round {before}, "
        if last is not None:
            why += f"and the run has ended with round {last}"
        elif before > swarm:
            why += f"most others only {swarm}"
        elif swarm - before > _MAX_ROUNDS_BEHIND:
            why += f"most others already {swarm}"
        else:
            return None
        started = time.monotonic()
        payload_bytes, complete = 0, False
        try:
            payload_bytes = await self._replace_reference(keep_difference=before < swarm)
            complete = True
        except TransferError as exc:
            if last is not None:
                raise
            # Some of it may have arrived. Values and digests are consistent in any case; the next round heals the rest.
            why += f"; {exc}"
        return CaughtUp(
            round=self._reference.round,
            why=why,
            seconds=time.monotonic() - started,
            payload_bytes=payload_bytes,
            complete=complete,
        )

    def _missed_end(self) -> int | None:
        """Returns the run's last round if at least half of the peers have committed it, and this one has not.

        This one counts among the peers. Those that have committed the last round are waiting, so the roster's median
        does not count them: it counts only peers that train.
        """
        own, last = self._reference.round, self._last_round
        if last is None or own >= last:
            return None
        there = [view for view in self._roster.present() if view.progress.state in ("training", "waiting")]
        electorate = self._roster.reputation.electorate(view.peer_id for view in there)
        others = [view for view in there if view.peer_id in electorate]
        return last if 2 * sum(view.progress.round >= last for view in others) > len(others) else None

    async def _round_of_most(self, own_round: int) -> int:
        swarm = self._roster.median_round(own_round)
        deadline, pause_s = time.monotonic() + _RECORDS_LAG_S, 0.0
        while own_round > swarm and time.monotonic() < deadline:
            # Peers that committed with this one a moment ago may not have announced it yet.
            await asyncio.sleep(pause_s)
            await self._refresh()
            swarm, pause_s = self._roster.median_round(own_round), _RECORDS_LAG_S / 10
        return swarm

    async def _replace_reference(self, keep_difference: bool) -> int:
        """Downloads the reference; returns the payload bytes.

        The contribution's trained blocks keep their difference to the reference, or otherwise their values.
        """
        before, reference = self._reference.round, self._reference
        blocks = reference.layout.trained_blocks(self._leases.held)
        trained = [block.where for block in blocks if keep_difference]
        for part in trained:
            self._contribution_N[part] -= reference.values_N[part]
        try:
            return (await self._transfer.download(self._donors)).payload_bytes
        except asyncio.CancelledError:
            reference.finish(before, list(enumerate(reference.versions)))  # makes digests match the values
            raise
        finally:
            for part in trained:
                self._contribution_N[part] += reference.values_N[part]

    def _newest_round(self) -> int:
        """The round that this peer should continue from.

        In a swarm that trains, it is the round of most peers. If no peer trains, because all have just come back, it is
        that of the newest reference that any peer has.
        """
        if self._roster.electorate():
            return self._roster.median_round(self._reference.round)
        return max([self._reference.round, *(view.progress.round for view in self._reachable())])

    def _newest_donors(self) -> list[str]:
        newest = self._newest_round()
        return [v.peer_id for v in self._reachable() if v.progress.round >= newest]

    def _donors(self) -> list[str]:
        """The peers whose tables decide: once this peer has taken part in a round, those that have, too."""
        reachable = self._reachable()
        members = [v.peer_id for v in reachable if self._roster.reputation.is_member(v.peer_id)]
        return members or [v.peer_id for v in reachable]

    def _reachable(self) -> list[PeerView]:
        """The reachable peers that have answered a call, or all reachable ones if none has."""
        present = [v for v in self._roster.present() if v.progress.reachable]
        return [v for v in present if self._roster.reputation.has_answered(v.peer_id)] or present
