"""The monitor's DHT node, which reads the records of a run and publishes none.

It is a client that no peer depends on, unless it is started as an entry point (`--bootstrap`). Then it listens, stores
records as any DHT node does, and answers the first requests of newcomers.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from spes_swarm.base.address import best_first, peer_id_of, usable_peer_addresses
from spes_swarm.base.errors import BootstrapError, ManifestError, NetworkProcessError, ProtocolError
from spes_swarm.config.join_command import join_command
from spes_swarm.config.manifest import Manifest
from spes_swarm.monitor.evidence import MAX_BYTES
from spes_swarm.monitor.verifier import Verifier
from spes_swarm.network.link.dht_records import accept, record_key
from spes_swarm.network.link.known_peers import KnownPeers, checked_maddrs
from spes_swarm.network.link.manifest_query import ask_for_manifest
from spes_swarm.network.link.proof_query import fetch_proof
from spes_swarm.network.link.reach import ReachService
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.link.run_dht import RunDht
from spes_swarm.network.transport.daemon import Daemon, bootstrap
from spes_swarm.protocol.members.records import Lease, Progress, Rounds

_CALL_TIMEOUT_S: Final = 5.0
_READ_TIMEOUT_S: Final = 20.0
# After a peer has corrected its clock, its records may expire this much later than usual.
_CLOCK_SLACK_S: Final = 3600.0
_GREETINGS_AT_A_TIME: Final = 4
_GREET_AGAIN_S: Final = 10.0  # a peer that has not answered
_DIALS_AT_A_TIME: Final = 8
_MAX_MET: Final = 128
_MAX_REMEMBERED: Final = 16
_REDIAL_S: Final = 5.0  # while no peer is present
_Record = TypeVar("_Record", Progress, Lease, Rounds)


@dataclass(frozen=True)
class Reading:
    """The records found by one read of the DHT."""

    now: float  # swarm time
    at: float  # monotonic clock
    progress: dict[str, Progress]
    leases: dict[str, Lease]
    rounds: dict[str, Rounds]


class Watcher:
    """Reads the records of one run."""

    def __init__(self, daemon: Daemon, rpc: Rpc, manifest: Manifest, maddrs: Sequence[str], *, is_entry: bool) -> None:
        self.manifest = manifest
        self.invitation: str | None = None  # for those who read the command to join; set by the owner
        self._daemon = daemon
        self._rpc = rpc
        self._initial_peers = tuple(maddrs)
        self._is_entry = is_entry
        self._dht = RunDht(daemon, rpc, manifest, _ignore)
        self.now = self._dht.now
        round_config = manifest.run.round
        self.verifier = Verifier(  # checks every incoming record
            manifest.run_id,
            self.now,
            {
                "progress": round_config.progress_ttl_s + _CLOCK_SLACK_S,
                "leases": round_config.lease_s + _CLOCK_SLACK_S,
                "rounds": round_config.lease_s + _CLOCK_SLACK_S,
            },
            # Without an admission it gets no acts, and does not know whom they admit; nodes of the run do.
            self._dht.door.vet_record if rpc.admission else accept,
        )
        self._dht.door.present = lambda: self.live
        self._known_peers = KnownPeers(maddrs)
        self._initial_ids = set(map(peer_id_of, maddrs))
        self._met: OrderedDict[str, None] = OrderedDict.fromkeys(map(peer_id_of, maddrs))
        self._tried_at: dict[str, float] = {}  # present peers that have not answered yet
        self._greeting: asyncio.Task[None] | None = None
        self._clock_task: asyncio.Task[None] | None = None
        self._dialled_at = -math.inf
        self.live: dict[str, bool] = {}  # peers with a record, and whether they are reachable; set by the owner

    async def start(self) -> None:
        """Sets the clock to the swarm's time and joins the DHT."""
        await self._dht.join(
            self._initial_peers,
            self.verifier,
            self._trusted,
            client_mode=not self._is_entry,
            # No records are cached or passed on: the monitor shows what the nodes return now.
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
        )
        if self._is_entry:
            await self._dht.serve()
            await self._rpc.serve("ping", self._serve_ping)
            await ReachService(self._daemon, self._rpc).start()
        self._clock_task = asyncio.create_task(self._keep_time())

    async def stop(self) -> None:
        """Leaves the DHT and stops the daemon."""
        for task in (self._clock_task, self._greeting):
            if task is not None:
                task.cancel()
        await self._dht.leave()
        await self._daemon.stop()

    async def _serve_ping(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id, request
        return {"maddrs": self._dht.own_maddrs}

    def _trusted(self, connected: set[str]) -> set[str]:
        """Peers whose clocks count: the initial peers while any is connected, else all connected peers."""
        return connected & self._initial_ids or connected

    async def _keep_time(self) -> None:
        while True:
            with suppress(OSError, ProtocolError):
                await self._dht.check_time(lambda connected: self._trusted(connected | self.live.keys()))

    # Reading.

    async def read_records(self) -> Reading:
        """Reads and verifies all records; those that cannot be read in time are missing from the result.

        Raises:
            NetworkProcessError: the P2P daemon has ended.
        """
        if not self._daemon.is_alive:
            raise NetworkProcessError("the P2P daemon (p2pd) has ended")
        progress, leases, rounds = await asyncio.gather(
            self._read("progress", Progress), self._read("leases", Lease), self._read("rounds", Rounds)
        )
        self.verifier.forget()
        return Reading(self.now(), time.monotonic(), progress, leases, rounds)

    async def _read(self, kind: str, schema: type[_Record]) -> dict[str, _Record]:
        key = record_key(self.manifest.run_id, kind)
        try:
            entries = await asyncio.wait_for(self._dht.node.search(key), _READ_TIMEOUT_S)
        except TimeoutError:
            return {}
        records: dict[str, _Record] = {}
        for owner, entry in entries.items():
            message = self.verifier.open(kind, owner, entry.value, entry.expiration_time)
            if isinstance(message, schema) and entry.expiration_time > self.now():
                records[str(owner)] = message
        return records

    # Staying in touch.

    async def keep_in_touch(self) -> None:
        """Learns the addresses of present peers; while there are none, dials those that it has met."""
        if self.live:
            if self._greeting is None or self._greeting.done():  # silent peers must not hold up the reading of records
                self._greeting = asyncio.create_task(self._greet())
        elif time.monotonic() - self._dialled_at >= _REDIAL_S:
            self._dialled_at = time.monotonic()
            await self._redial()

    async def _greet(self) -> None:
        """Calls present peers that it has not met, the one that has waited longest first.

        Without their addresses, it would lose them with the last peer through which it found them.
        """

        async def greet(peer_id: str) -> None:
            self._tried_at[peer_id] = time.monotonic()
            with suppress(OSError, ProtocolError):
                answer = await self._rpc.call(peer_id, "ping", {}, _CALL_TIMEOUT_S)
                self._known_peers.note(peer_id, checked_maddrs(answer.get("maddrs"), peer_id))
                self._met[peer_id] = None

        unmet = {peer for peer, reachable in self.live.items() if reachable and peer not in self._met}
        self._tried_at = {peer: at for peer, at in self._tried_at.items() if peer in unmet}
        tried_at = {peer: self._tried_at.get(peer, -math.inf) for peer in sorted(unmet)}
        due = [peer for peer, at in tried_at.items() if time.monotonic() - at >= _GREET_AGAIN_S]
        await asyncio.gather(*(greet(peer) for peer in sorted(due, key=tried_at.__getitem__)[:_GREETINGS_AT_A_TIME]))
        while len(self._met) > _MAX_MET:
            self._met.popitem(last=False)

    async def _redial(self) -> None:
        turn = [peer for peer in self._met if peer not in self._initial_ids][:_DIALS_AT_A_TIME]
        for peer in turn:
            self._met.move_to_end(peer)  # the others have their turn next time
        dialled = await self._known_peers.dial(self._daemon, [*self._initial_ids, *turn])
        answering = {*dialled, *await self._dht.connected()}
        if answering:
            self._dht.node.forgive_all()
            # This puts both nodes back into each other's routing tables.
            await asyncio.gather(*(self._dht.node.ping(peer) for peer in answering))

    # Proofs.

    async def fetch_proof(self, peer_id: str, culprit: str) -> bytes:
        """Fetches a proof from a peer; see proof_query.py."""
        stall_s = self.manifest.run.round.stall_timeout_s
        return await fetch_proof(self._daemon.transport, peer_id, self.manifest.run_id, culprit, stall_s, MAX_BYTES)

    def excludes(self, peer_id: str, round_number: int) -> bool:
        """Returns False if the founder has pardoned a lie in this round, as far as this monitor has heard."""
        return not self._dht.door.members.exclusions.is_pardoned(peer_id, round_number)

    # Addresses.

    def addresses(self) -> list[str]:
        """Addresses of peers of the run for the next start, present ones first."""
        known = self._known_peers.of([*self.live, *self._met])
        return list(dict.fromkeys(known))[:_MAX_REMEMBERED]

    def join_command(self) -> str | None:
        """The command that joins the run; None if there is no address to offer."""
        offers = best_first(self._dht.own_maddrs) if self._is_entry else []
        reachable = [peer for peer, is_reachable in self.live.items() if is_reachable]
        given = [maddr for maddr in self._initial_peers if peer_id_of(maddr) in reachable]
        offers += best_first([*given, *self._known_peers.of(reachable)]) or list(self._initial_peers[:1])
        if not offers:
            return None
        command = join_command(self.manifest.run_id, self.manifest.run.data, offers[0])
        return command if self.invitation is None else f"{command} --invitation {self.invitation}"


def _ignore(peer_id: str, error: ProtocolError) -> None:
    """Ignores faults of calls: a malformed answer counts as no answer."""
    del peer_id, error


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """How the monitor takes part in the network."""

    initial_peers: Sequence[str]
    identity_path: Path
    host_maddrs: Sequence[str]
    announce_maddrs: Sequence[str]
    is_entry: bool
    run_id: str | None
    timeout_s: float  # to reach any peer
    admission: bytes = b""  # of the monitor's identity to a private run
    to_pass_on: str | None = None  # an invitation for those who read the command to join


async def open_watcher(options: NetworkOptions, remembered: Manifest | None, addresses: Sequence[str] = ()) -> Watcher:
    """Starts the daemon and finds the run.

    `remembered` is the manifest as an earlier monitor recorded it: with it, no peer has to answer. `addresses` are
    those of peers that earlier monitors met.

    Raises:
        AddressError: it cannot listen on the given addresses.
        BootstrapError: no peer answers, or none takes part in a run.
        ManifestError: the run's description fails verification, or it is another run.
        NetworkProcessError: the daemon did not start.
        VersionError: the run's peers speak another major version of the protocol.
    """
    daemon = await Daemon.start(
        options.identity_path, options.host_maddrs, options.announce_maddrs, client_mode=not options.is_entry
    )
    try:
        rpc = Rpc(daemon.transport, _ignore)
        rpc.admission = options.admission
        await rpc.start()
        maddrs = list(dict.fromkeys([*options.initial_peers, *usable_peer_addresses(addresses)[:_MAX_REMEMBERED]]))
        deadline = time.monotonic() + options.timeout_s
        try:
            connected = await bootstrap(daemon, maddrs, options.timeout_s if remembered is None else _CALL_TIMEOUT_S)
            left_s = deadline - time.monotonic() if remembered is None else 0.0
            answer = await ask_for_manifest(rpc, connected, options.run_id, left_s)
            manifest = remembered or answer
        except (BootstrapError, ManifestError):
            if remembered is None:
                raise
            manifest = remembered
        watcher = Watcher(daemon, rpc, manifest, maddrs, is_entry=options.is_entry)
        watcher.invitation = options.to_pass_on
        await watcher.start()
    except BaseException:
        await daemon.stop()
        raise
    return watcher
