"""The `round` event of a peer's metrics: written once per commit, with the round's traffic when that is known."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace

from spes_swarm.base.errors import NetworkProcessError
from spes_swarm.metrics import events
from spes_swarm.port.commands import Commands, Port
from spes_swarm.training.health.held_out import HeldOutLoss
from spes_swarm.training.setup import Reporter


class RoundEvents:
    """Writes `round` events; at most one is pending, until its traffic is known.

    Other peers may still fetch results from this peer after a commit, so the byte counts of a round are known later.
    `standstill_seconds` is known later, too: all time outside inner steps from the previous event to the first step
    after the commit; None if no step followed.
    """

    def __init__(self, network: Port, reporter: Reporter) -> None:
        self._network = network
        self._reporter = reporter
        self._pending: tuple[events.Round, Future[tuple[int, int]]] | None = None
        self._standstill_s = 0.0
        self._stepped_at: float | None = None  # monotonic time of the end of the last step

    @contextmanager
    def step(self) -> Iterator[None]:
        """Encloses an inner step: all other time is standstill."""
        if self._stepped_at is not None:
            self._standstill_s += time.monotonic() - self._stepped_at
        if self._pending is not None and (event := self._pending[0]).standstill_seconds is None:
            self._pending = replace(event, standstill_seconds=self._standstill_s), self._pending[1]
            self._standstill_s = 0.0
        try:
            yield
        finally:
            self._stepped_at = time.monotonic()

    def committed(self, event: events.Round, held_out: HeldOutLoss | None) -> None:
        """Stores an event at its round's commit; a pending event is written first."""
        self.write(wait_s=0.0)  # first: its callback reads the status of that round
        status = self._reporter.status
        status.round, status.peers = event.round, event.peers
        status.round_seconds = event.group_seconds + event.exchange_seconds
        if held_out is not None:
            status.eval_loss, status.eval_loss_stderr, status.eval_round = held_out.mean, held_out.stderr, event.round
        self._pending = event, self._network.submit(Commands.traffic)

    def write_if_known(self) -> None:
        """Writes the pending event if its traffic is known."""
        if self._pending is not None and self._pending[1].done():
            self.write(wait_s=0.0)

    def write(self, wait_s: float) -> None:
        """Writes the pending event, with its traffic if that is known within `wait_s`, otherwise without."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        event, traffic = pending
        sent: int | None = None
        received: int | None = None
        # The round is committed even if the network process has failed.
        with suppress(TimeoutError, NetworkProcessError):
            sent, received = traffic.result(wait_s)
        self._reporter.metrics.write(replace(event, payload_bytes_sent=sent, payload_bytes_received=received))
        self._reporter.status.round_megabytes = ((sent or 0) + (received or 0)) / 1e6
        self._reporter.on_round()
