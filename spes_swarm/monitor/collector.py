"""The monitor's main loop: reads the DHT, updates ledger and history, and passes the state to the views."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from pathlib import Path

from spes_swarm.base.errors import DataError, NetworkProcessError
from spes_swarm.config.join_command import describe_data
from spes_swarm.config.manifest import Manifest
from spes_swarm.monitor.aggregates import Known
from spes_swarm.monitor.evidence import EvidenceSeeker
from spes_swarm.monitor.history import History
from spes_swarm.monitor.ledger import Ledger
from spes_swarm.monitor.source import HeldState
from spes_swarm.monitor.state import RunInfo, SwarmState
from spes_swarm.monitor.watcher import Watcher
from spes_swarm.protocol.members.records import MAX_ROUNDS

_FEW_ROUNDS = MAX_ROUNDS // 4
_LOGGER = logging.getLogger(__name__)


def run_info(manifest: Manifest) -> RunInfo:
    """The part of a run's manifest that is shown."""
    run = manifest.run
    return RunInfo(
        run_id=manifest.run_id,
        name=run.name,
        model=run.model.type,
        inner_steps=run.round.inner_steps,
        num_experts=run.model.num_experts,
        experts_per_peer=run.experts_per_peer,
        total_steps=run.training.total_steps,
        data=describe_data(run.data) if run.data.kind else None,
        admission=run.admission,
        inner_steps_later=run.round.inner_steps_later,
    )


class Collector:
    """Keeps a `HeldState`, the `source` of all views, up to date."""

    def __init__(self, watcher: Watcher, history: History | None, refresh_s: float, proofs: Path | None = None) -> None:
        """Starts from the history, if there is one. `proofs`: the folder in which proofs of lies are saved.

        Raises:
            DataError: the history is damaged, or belongs to another run.
        """
        known = Known()
        if history is not None:
            history.begin(watcher.manifest)
            known = history.known()
        self._watcher = watcher
        self._history = history
        self._refresh_s = refresh_s
        self._ledger = Ledger(run_info(watcher.manifest), watcher.manifest.run.round.progress_ttl_s, known)
        self.evidence = EvidenceSeeker(watcher.manifest.run_id, watcher.fetch_proof, watcher.excludes, proofs)
        self._complaint: str | None = None
        self.source = HeldState(self._ledger.state(watcher.now(), time.monotonic(), {}, None), self._ledger.points())

    async def refresh(self) -> None:
        """Reads the DHT once and updates the source.

        Raises:
            NetworkProcessError: the P2P daemon has ended.
        """
        look = await self._watcher.read_records()
        ledger = self._ledger
        ledger.proven = self.evidence.proven
        ledger.update(look.now, look.at, look.progress, look.leases, look.rounds)
        self._watcher.live = ledger.live_peers()
        self.evidence.seek(ledger.accusations.accusers)
        ledger.proven = self.evidence.proven
        state = ledger.state(look.now, look.at, self._watcher.verifier.refused, self._watcher.join_command())
        self.source.update(state, ledger.points())
        if self._history is not None:
            self._write(self._history)

    async def run(self) -> None:
        """Refreshes until cancelled; a failed refresh does not end it.

        Raises:
            NetworkProcessError: the P2P daemon has ended.
        """
        while True:
            started, before = time.monotonic(), self.source.state()
            try:
                await self.refresh()
                await self._watcher.keep_in_touch()
            except NetworkProcessError:
                raise
            except Exception as exc:  # no input from other nodes may end the monitor
                self._complain(f"reading the swarm's records failed: {exc!r}")
            await asyncio.sleep(max(0.1, self._period_s(before) - (time.monotonic() - started)))

    def _period_s(self, before: SwarmState) -> float:
        """The time between two reads: shorter than asked for if peers' records would pass over rounds meanwhile."""
        state = self.source.state()
        rounds = state.round - before.round if before.round else 0
        return (
            min(self._refresh_s, _FEW_ROUNDS * (state.time - before.time) / rounds) if rounds > 0 else self._refresh_s
        )

    def _write(self, history: History) -> None:
        ledger = self._ledger
        points, removed = ledger.take_changes()
        try:
            state = replace(self.source.state(), join_command=None)  # it may contain an invitation
            history.write(state, ledger.summary(), points, removed, self._watcher.addresses())
        except DataError as exc:  # on a full disk the monitor still shows the swarm
            ledger.give_back(points, removed)
            self._complain(str(exc))

    def _complain(self, text: str) -> None:
        if text != self._complaint:  # once, not at every refresh
            self._complaint = text
            _LOGGER.warning("%s", text)
