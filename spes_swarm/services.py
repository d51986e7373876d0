"""The services of one run inside the network process, and the state that they share.

Shapes: N elements of the flat vector.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hivemind.dht import DHTNode

from spes_swarm import ownership
from spes_swarm.codec import FloatArray, get_codec
from spes_swarm.daemon import Daemon, bootstrap
from spes_swarm.errors import BootstrapError, ProtocolError, RoundError
from spes_swarm.exchange import Exchange
from spes_swarm.identity import Identity
from spes_swarm.layout import Layout
from spes_swarm.manifest import Manifest
from spes_swarm.plan import make_plan
from spes_swarm.records import Lease, Progress, Records, RunRecordValidator, State
from spes_swarm.reference import Reference
from spes_swarm.rendezvous import Neighbour, Rendezvous
from spes_swarm.roster import PeerView, Roster
from spes_swarm.round_state import CommitReport, ExchangeLimits, RoundState
from spes_swarm.rpc import Rpc
from spes_swarm.shared_vector import SharedVector
from spes_swarm.statement import Statement
from spes_swarm.transfer import Transfer, TransferReport

_REFRESH_S = 1.0  # how often the records of the others are read
_PING_TIMEOUT_S = 5.0
_COUNT_TIMEOUT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Presence:
    """What the trainer wants others to know about this peer."""

    name: str
    state: State
    step: int
    tokens: int
    tokens_per_step: int
    tokens_per_second: float
    loss: float | None
    experts: tuple[int, ...]


@dataclass(frozen=True)
class SwarmView:
    """What the trainer needs to know about the others; sent to it once a second."""

    num_peers: int  # the others with a live record
    num_training: int  # of those, how many take part in rounds
    tokens_per_step: int  # sum over the others that train
    tokens: float  # estimate of what they have processed since the last commit, at `at`
    tokens_per_second: float  # their speed together
    at: float  # monotonic time (the same clock in both processes)
    swarm_round: int
    experts_covered: int


@dataclass(frozen=True)
class RoundReport:
    """A committed round as the trainer sees it."""

    commit: CommitReport
    group_seconds: float
    exchange_seconds: float
    digest: str


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What the network process needs to know of a run and of this peer."""

    manifest: Manifest
    layout: Layout
    reference_fd: int
    contribution_fd: int
    trainer_pid: int
    client_mode: bool
    bandwidth_mbps: float
    initial_peers: tuple[str, ...]


class Listener(Protocol):
    """Who is told what happens: the trainer, through the network process's pipe."""

    def on_fault(self, peer_id: str, error: ProtocolError) -> None:
        """A peer did something wrong, or something went wrong with it."""

    def on_called(self, round_number: int) -> None:
        """A leader calls for a round."""

    def on_view(self, view: SwarmView) -> None:
        """There is news about the others."""

    def on_group(self, round_number: int, members: int) -> None:
        """A group has formed; its exchange begins now."""

    def on_round_over(self) -> None:
        """A round has ended, with or without a commit."""


class RunServices:
    """The services of one run and the state they share."""

    def __init__(self, listener: Listener, daemon: Daemon, rpc: Rpc, identity: Identity, settings: RunSettings) -> None:
        run = settings.manifest.run
        self._listener = listener
        self._daemon = daemon
        self._rpc = rpc
        self._identity = identity
        self._settings = settings
        self._config = run.round
        self._run_id = settings.manifest.run_id
        num_elements = settings.layout.num_elements
        self.reference = Reference(settings.layout, _attach(settings.reference_fd, settings, num_elements))
        self._contribution_N = _attach(settings.contribution_fd, settings, num_elements)
        self._codec = get_codec(run.round.codec)
        self._limits = ExchangeLimits(run.round.stall_timeout_s, run.round.timeout_s, run.round.max_update_rms)
        self._roster = Roster(identity.peer_id)
        self._ahead = 0  # the round that others gather for, when it is beyond our next one
        self._presence: Presence | None = None
        self._last_round: RoundReport | None = None
        self._traffic = (0, 0)
        self._held: tuple[int, ...] = ()
        self._lease_expires = 0.0
        self._leases: dict[str, Lease] = {}
        self._expires: dict[str, float] = {}
        self._publish_now = asyncio.Event()
        self._last_beat = time.monotonic()
        self._publishing = asyncio.Lock()  # two records of a kind must arrive in the order of their expiration
        self._tasks: list[asyncio.Task[None]] = []
        self._exchange = Exchange(daemon.p2p, rpc, self._run_id, self._limits, listener.on_fault)
        self._transfer = Transfer(
            daemon.p2p, rpc, self._run_id, self.reference, run.round.stall_timeout_s, listener.on_fault
        )
        self._rendezvous = Rendezvous(
            rpc,
            identity,
            self._run_id,
            len(settings.layout.blocks),
            reachable=not settings.client_mode,
            window_s=run.round.window_s,
            live_peers=lambda: [Neighbour(view.peer_id, view.progress.reachable) for view in self._roster.training()],
            target_round=self._target_round,
            on_called=listener.on_called,
            on_ahead=self._on_ahead,
        )
        self._records: Records | None = None
        self._node: DHTNode | None = None

    async def start(self) -> None:
        """Joins the DHT and registers the services."""
        self._node = await DHTNode.create(
            p2p=self._daemon.p2p,
            initial_peers=list(self._settings.initial_peers) or None,
            client_mode=self._settings.client_mode,
            record_validator=RunRecordValidator(self._run_id),
            strict=False,
            ensure_bootstrap_success=False,  # bootstrap has succeeded already, with better messages
        )
        self._records = Records(self._node, self._identity, self._run_id)
        await self._rpc.serve("manifest", self._serve_manifest)
        await self._rpc.serve("ping", self._serve_ping)
        await self._rpc.serve("tokens", self._serve_tokens)
        await self._exchange.start()
        await self._transfer.start()
        await self._rendezvous.start()
        await self.refresh()
        self._spawn(self._repeat(self._publish, 0.3))  # a burst of events needs only the last record
        self._spawn(self._repeat(self._look_around, _REFRESH_S))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(coroutine))

    async def _repeat(self, action: Callable[[], Coroutine[Any, Any, None]], pause_s: float) -> None:
        """Does something for as long as the run is open; an unexpected error is reported and does not end it."""
        while True:
            try:
                await action()
            except Exception as exc:  # whatever it is: a peer that stops publishing or reading would split the swarm
                self._listener.on_fault(self._identity.peer_id, ProtocolError("internal", repr(exc)))
            await asyncio.sleep(pause_s)

    async def _serve_manifest(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id, request
        return dict(self._settings.manifest.to_wire())

    async def _serve_ping(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id, request
        return {}

    async def _serve_tokens(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id, request
        return {"round": self.reference.round, "tokens": self._presence.tokens if self._presence else 0}

    async def count_tokens(self) -> int:
        """See network.NetworkProcess.count_tokens."""
        limit = 4 * self._config.inner_steps * self._roster.largest_step(self._own_step())

        def bounded(tokens: object, number: object) -> int:
            # Counts since another commit say nothing, and nobody's word may bring a round about on its own.
            return max(0, min(tokens, limit)) if isinstance(tokens, int) and number == self.reference.round else 0

        async def ask(view: PeerView) -> int:
            stale = bounded(view.progress.tokens, view.progress.round)
            if not view.progress.reachable:
                return stale
            try:
                answer = await self._rpc.call(view.peer_id, "tokens", {}, _COUNT_TIMEOUT_S)
            except (OSError, ProtocolError):
                return stale
            return bounded(answer.get("tokens"), answer.get("round"))

        return sum(await asyncio.gather(*(ask(view) for view in self._roster.training())))

    def _own_step(self) -> int:
        return self._presence.tokens_per_step if self._presence is not None else 0

    # The reference.

    def adopt(self, table_round: int, versions: tuple[int, ...]) -> str:
        """See network.NetworkProcess.adopt."""
        self.reference.finish(table_round, list(enumerate(versions)))
        self._transfer.open()
        return self.reference.digest.hex()

    async def download(self) -> TransferReport:
        """See network.NetworkProcess.download."""
        await self.refresh()

        def donors() -> list[str]:
            return [v.peer_id for v in self._roster.present() if v.progress.reachable]

        report = await self._transfer.download(donors)
        self._transfer.open()
        self._roster.committed()
        return report

    # Records.

    def beat(self) -> None:
        """See network.NetworkProcess.beat."""
        self._last_beat = time.monotonic()

    async def _publish(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._publish_now.wait(), self._config.progress_ttl_s / 5)
        self._publish_now.clear()
        if time.monotonic() - self._last_beat > self._config.stall_timeout_s:
            return  # the trainer is stopped (Ctrl-Z): the others must not wait for this peer in every round
        await self._publish_progress()
        if self._held and time.time() > self._lease_expires - 2 * self._config.lease_s / 3:
            await self._publish_lease()

    async def _publish_progress(self) -> None:
        async with self._publishing:
            await self._store_progress()

    async def _store_progress(self) -> None:
        presence = self._presence
        if presence is None:
            return
        last = self._last_round
        record = Progress(
            expires=self._next_expiration("progress", self._config.progress_ttl_s),
            name=presence.name,
            state=presence.state,
            reachable=not self._settings.client_mode,
            round=self.reference.round,
            digest=self.reference.digest,
            step=presence.step,
            tokens=presence.tokens,
            tokens_per_step=presence.tokens_per_step,
            tokens_per_second=presence.tokens_per_second,
            loss=presence.loss,
            experts=list(presence.experts),
            round_seconds=last.group_seconds + last.exchange_seconds if last else 0.0,
            bytes_sent=self._traffic[0],
            bytes_received=self._traffic[1],
        )
        await self._store("progress", record)

    async def _publish_lease(self) -> None:
        async with self._publishing:
            self._lease_expires = self._next_expiration("leases", self._config.lease_s)
            await self._store(
                "leases",
                Lease(expires=self._lease_expires, experts=list(self._held), since_round=self.reference.round),
            )

    def _next_expiration(self, kind: str, lifetime_s: float) -> float:
        # The DHT keeps the record that expires last, so a newer one must always expire later.
        self._expires[kind] = max(time.time() + lifetime_s, self._expires.get(kind, 0.0) + 0.001)
        return self._expires[kind]

    async def _store(self, kind: str, record: Progress | Lease) -> None:
        assert self._records is not None
        try:
            stored = await self._records.publish(kind, record)
        except OSError as exc:
            stored, reason = False, str(exc)
        else:
            reason = "no node of the DHT took the record"
        if not stored:
            self._listener.on_fault(self._identity.peer_id, ProtocolError("dht", reason))

    async def _look_around(self) -> None:
        await self.refresh()
        self._listener.on_view(self.view())
        if not self._roster.peers and self._settings.initial_peers:
            # Cut off: the addresses that worked at the start are the way back.
            with suppress(BootstrapError):
                await bootstrap(self._daemon, self._settings.initial_peers, 1.0)

    async def refresh(self) -> None:
        """Reads the others' records and greets new peers, so that connections stand before the first round."""
        assert self._records is not None
        new = self._roster.update(await self._records.read("progress", Progress))
        self._leases = await self._records.read("leases", Lease)
        if new:
            await asyncio.gather(*(self._greet(peer) for peer in new))

    async def _greet(self, peer_id: str) -> None:
        with suppress(OSError, ProtocolError):  # a round will find out whether it can be reached
            await self._rpc.call(peer_id, "ping", {}, _PING_TIMEOUT_S)

    def view(self) -> SwarmView:
        """See SwarmView."""
        training = self._roster.training()
        held = {e for view in training for e in view.progress.experts} | set(self._held)
        return SwarmView(
            num_peers=len(self._roster.present()),
            num_training=len(training),
            tokens_per_step=self._roster.tokens_per_step(self._own_step()),
            tokens=self._roster.tokens_since_commit(self.reference.round, self._config.progress_ttl_s),
            tokens_per_second=sum(view.progress.tokens_per_second for view in training),
            at=time.monotonic(),
            swarm_round=self._roster.swarm_round(self.reference.round),
            experts_covered=len(held),
        )

    async def peer_maddrs(self) -> list[str]:
        """See network.NetworkProcess.peer_maddrs."""
        members = {view.peer_id for view in self._roster.present()}
        connections = await self._daemon.connections()
        return [maddr for peer, maddrs in connections.items() if peer in members for maddr in maddrs]

    async def set_presence(self, presence: Presence) -> None:
        """See network.NetworkProcess.set_presence."""
        urgent = self._presence is None or self._presence.state != presence.state
        self._presence = presence
        if urgent:
            self._publish_now.set()

    # Leases.

    async def claim(self, experts: tuple[int, ...] | int) -> tuple[int, ...]:
        """See network.NetworkProcess.claim."""
        me = self._identity.peer_id
        num_experts = self._settings.layout.num_experts
        assert self._records is not None
        await self.refresh()
        if isinstance(experts, tuple):
            self._held = experts
            await self._publish_lease()
            return experts
        self._held = ownership.choose_experts(self._lease_table(), me, num_experts, experts)
        await self._publish_lease()
        # Peers that start together choose alike; look again until the choices have settled.
        quiet = 0
        while quiet < 2:
            await asyncio.sleep(_REFRESH_S)
            self._leases = await self._records.read("leases", Lease)
            settled = ownership.settle({**self._lease_table(), me: self._held}, me, num_experts)
            quiet = quiet + 1 if settled == self._held else 0
            if settled != self._held:
                self._held = settled
                await self._publish_lease()
        return self._held

    def _lease_table(self) -> dict[str, list[int]]:
        return {peer: lease.experts for peer, lease in self._leases.items()}

    # Rounds.

    def _target_round(self) -> int:
        return max(self._roster.swarm_round(self.reference.round) + 1, self._ahead)

    def _on_ahead(self, round_number: int) -> None:
        # At most one round beyond our own next one: calls are not proof, and must not run the swarm's clock.
        if round_number <= self.reference.round + 2:
            self._ahead = round_number

    async def run_round(self, tokens: int, routed: tuple[int, ...]) -> RoundReport:
        """See network.NetworkProcess.run_round."""
        started = time.monotonic()
        await self.refresh()
        statement = Statement(
            round=self._target_round(),
            held=list(self._held),
            tokens=tokens,
            routed=list(routed),
            bandwidth_mbps=self._settings.bandwidth_mbps,
            reachable=not self._settings.client_mode,
            versions=list(self.reference.versions),
            digests=list(self.reference.digests),
        )
        group = await self._rendezvous.join(statement)
        grouped = time.monotonic()
        me = group.index_of(self._identity.peer_id)
        assert me is not None
        plan = make_plan(group, self._settings.layout, self._config.part_elements)
        self._listener.on_group(group.round, len(group.members))
        state = RoundState(group, plan, me, self.reference, self._contribution_N, self._codec, self._limits)
        try:
            commit = await self._exchange.run(state)
        except RoundError:
            self._rendezvous.spend(group)
            raise
        finally:
            members = {member.peer_id for member in group.members}
            for view in self._roster.training():
                if view.peer_id not in members:
                    self._roster.lose(view.peer_id)
            self._listener.on_round_over()
        self._roster.committed()
        if self._presence is not None:
            # Others may ask or read before the trainer's next step: what was contributed no longer counts.
            self._presence = replace(self._presence, tokens=max(0, self._presence.tokens - tokens))
        report = RoundReport(commit, grouped - started, time.monotonic() - grouped, self.reference.digest.hex())
        self._last_round = report
        self._publish_now.set()
        return report

    async def traffic(self) -> tuple[int, int]:
        """See network.NetworkProcess.traffic."""
        self._traffic = await self._exchange.traffic()
        return self._traffic

    async def leave(self) -> None:
        """Gives the leases back and says goodbye."""
        for task in self._tasks:
            task.cancel()
        held, self._held = self._held, ()
        if self._records is not None and held:
            await self._publish_lease()
        if self._presence is not None:
            self._presence = replace(self._presence, state="leaving", experts=())
            await self._publish_progress()
        if self._node is not None:
            await self._node.shutdown()


def _attach(fd: int, settings: RunSettings, num_elements: int) -> FloatArray:
    # The trainer made the memory after this process was forked; its descriptor is reachable through /proc.
    own_fd = os.open(f"/proc/{settings.trainer_pid}/fd/{fd}", os.O_RDWR)
    return SharedVector.attach(own_fd, num_elements).values_N
