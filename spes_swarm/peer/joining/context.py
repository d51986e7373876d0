"""What a peer keeps for its whole session in a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from spes_swarm.base.errors import LeftEarlyError
from spes_swarm.config.manifest import Manifest
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.config.schedule import ScheduleEnd
from spes_swarm.network.client import no_answer
from spes_swarm.peer.panel import PeerConsole
from spes_swarm.peer.run_data import PeerData
from spes_swarm.port.commands import Ask, Commands, Port
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.storage.metrics_file import Metrics
from spes_swarm.storage.run_directory import RunDirectory
from spes_swarm.training.ranks.group import RankGroup
from spes_swarm.training.setup import TrainingStatus

_STOP_POLL_S = 0.1

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class SessionContext:
    """What a peer keeps from the start to the end of its session in a run."""

    peer: PeerConfig
    run: RunConfig | None  # to found, or expected of the run that is joined or continued; None: any
    directory: RunDirectory
    identity: Identity
    console: PeerConsole
    metrics: Metrics
    network: Port
    ask: Ask  # asks the network process until the user stops the peer
    data: PeerData
    stop: threading.Event  # set when the user wants to leave
    status: TrainingStatus
    ranks: RankGroup | None  # None: this process is the only rank
    started: float  # monotonic time
    at_end: ExitStack  # closed after the network process has ended

    @property
    def num_ranks(self) -> int:
        """How many processes compute the steps of this peer."""
        return 1 if self.ranks is None else self.ranks.placement.world_size

    def leave_if_over(self, manifest: Manifest, round_number: int) -> None:
        """Prints a line and leaves if the run has ended by its schedule.

        Raises:
            LeftEarlyError: the run has ended.
        """
        end = ScheduleEnd(manifest.run)
        if end.ends_run(round_number):
            self.console.say(end.why_over(manifest.run_id))
            raise LeftEarlyError("the run is over")


@dataclass(frozen=True)
class AskUntilStopped:
    """Like Port.ask, but does not keep waiting once the user stops the peer: that raises LeftEarlyError."""

    network: Port
    stop: threading.Event

    def __call__(
        self,
        command: Callable[Concatenate[Commands, _Args], Coroutine[Any, Any, _Result]],
        wait_s: float | None,
        /,
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> _Result:
        """See Ask."""
        future = self.network.submit(command, *args, **kwargs)
        deadline = time.monotonic() + wait_s if wait_s is not None else None
        while True:
            with suppress(TimeoutError):
                future.exception(_STOP_POLL_S)  # only waits
                return future.result()
            if self.stop.is_set():
                raise LeftEarlyError("stopped while joining")
            if deadline is not None and time.monotonic() > deadline:
                raise no_answer(command.__name__)
