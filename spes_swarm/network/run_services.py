"""The services of one run inside the network process.

Shapes: N elements of the flat vector.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from spes_swarm.base.errors import InvitationError, ProtocolError, RoundError, TransferError
from spes_swarm.base.log import context, where_to_read
from spes_swarm.network.announcer import Announcer
from spes_swarm.network.diagnosis import roster_lines
from spes_swarm.network.link.clock import steady_clock
from spes_swarm.network.link.daemon import Daemon
from spes_swarm.network.link.dht_records import Records, RunRecordValidator
from spes_swarm.network.link.greetings import Greetings
from spes_swarm.network.link.known_peers import KnownPeers
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.link.run_dht import RunDht
from spes_swarm.network.link.wire import Guests
from spes_swarm.network.round.audits import Audits
from spes_swarm.network.round.company import Company
from spes_swarm.network.round.deadlines import ExchangeLimits
from spes_swarm.network.round.exchange import Exchange
from spes_swarm.network.round.rendezvous import Rendezvous
from spes_swarm.network.round.sync_round import SyncRounds
from spes_swarm.network.round.token_count import TokenCount
from spes_swarm.network.run_state import RunState
from spes_swarm.network.transfer.catching_up import CatchingUp
from spes_swarm.network.transfer.transfer import Transfer
from spes_swarm.port.commands import Called, Listener, RunCommands
from spes_swarm.port.messages import (
    CaughtUp,
    Presence,
    RoundReport,
    RunSettings,
    SwarmView,
    TokenCounts,
    TransferReport,
)
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.consensus.reference import ReferenceTable
from spes_swarm.protocol.members.election import periods_to_wait
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.members.records import Lease, Progress, RecentFaults, Record, Volunteer
from spes_swarm.protocol.members.standing import Neighbour
from spes_swarm.protocol.members.twin import twin_fault

_ROUND_REFRESH_S = 1.0  # how long a round waits for the newest records
_FRESH_S = 0.5  # it does not wait for records if some were read so recently
_SHORT_ROUND_S = 1.0  # rounds that take longer are announced while they are under way
_REFRESH_S = 1.0  # how often other peers' records are read
_MAX_CHANGES = 8  # of a claim; 32 peers that start together need at most 5
_LOGGER = logging.getLogger(__name__)
_Record = TypeVar("_Record", bound=Record)


class RunServices(RunCommands):
    """Creates, starts and connects the services of one run; executes the trainer's run commands."""

    def __init__(self, listener: Listener, daemon: Daemon, rpc: Rpc, identity: Identity, settings: RunSettings) -> None:
        state = self._state = RunState.of(identity, settings)
        run, p2p = state.run, daemon.p2p
        context.run, context.round = state.run_id, lambda: state.reference.round
        self._listener = listener
        self._daemon = daemon
        rpc.admission = settings.admission
        self._dht = RunDht(daemon, rpc, settings.manifest, self._on_fault, settings.tokenizer, settings.acts)
        door = self._door = self._dht.door
        self._admit_members_only(rpc)
        self._faults = RecentFaults(self._dht.now)
        self._ahead = 0  # the round that other peers gather for, if it is beyond this peer's next one
        self._company = Company(state.roster, run.round.progress_ttl_s, self._refresh_quietly)
        self._volunteers: dict[str, Volunteer] = {}
        self._known_peers = KnownPeers(settings.initial_peers)
        self._tasks: list[asyncio.Task[None]] = []
        self._round_task: asyncio.Task[Any] | None = None
        self._greetings = Greetings(rpc, state.roster, self._known_peers, self._own_maddrs, daemon.connections)
        guests = Guests(admits=door.admits, is_member=state.is_member)
        limits, stall_s = ExchangeLimits.of(run.round), run.round.stall_timeout_s
        self._exchange = Exchange(p2p, rpc, state.run_id, limits, self._on_fault, guests)
        self._exchange.slack_s = lambda: state.roster.standing.grace_s
        self._exchange.on_late = lambda: listener.report("the exchange has exceeded its first deadline")
        self._audits = Audits(p2p, state, self._on_fault, guests, lambda: self._exchange.current)
        self._transfer = Transfer(
            p2p, rpc, state.run_id, state.reference, stall_s, self._on_fault, guests, settings.upload_mbps
        )
        self._rendezvous = Rendezvous(
            rpc,
            identity,
            state.run_id,
            len(settings.layout.blocks),
            reachable=not settings.client_mode,
            window_s=run.round.window_s,
            exchange_s=run.round.timeout_s,
            live_peers=lambda: state.roster.neighbours(run.round.window_s),
            defers=lambda: state.roster.defers,
            target_round=self._target_round,
            on_called=lambda round_number: listener.notify(Called(round_number)),
            on_ahead=self._on_ahead,
            leaves_out=lambda peer: state.roster.standing.leaves_out(peer) or not door.admits(peer),
            vet=door.vet_statement,
            is_blind=lambda: self._company.is_blind,
            on_stall=state.tracks.conduct.note_stall,
            without_duty=lambda: state.roster.standing.without_duty,
        )
        self._announcer = Announcer(state, self._faults, self._dht.now, lambda: self.reachable, self._on_fault)
        self._audits.proofs.on_new, self._audits.proofs.inviter = self._announcer.announce_soon, door.members.inviter
        door.on_refusal = self._audits.proofs.ask_about_me
        self._catching_up = CatchingUp(state, self._transfer, self.refresh)
        self._token_count = TokenCount(
            rpc, state, self._announcer, lambda: self.reachable, lambda: self._rendezvous.gathering
        )
        services = self._exchange, self._audits, self._transfer, self._announcer
        self._rounds = SyncRounds(state, self._rendezvous, *services, listener)
        self._records: Records | None = None

    def _admit_members_only(self, rpc: Rpc) -> None:
        state, door = self._state, self._door
        door.present = lambda: [view.peer_id for view in state.roster.present()]
        door.voices = lambda: list(filter(state.roster.standing.is_member, door.present()))
        state.roster.admits = door.admits
        state.tracks.conduct.exclusions = door.members.exclusions
        rpc.on_contact = lambda peer: state.roster.standing.note_answer(peer) if door.admits(peer) else None
        rpc.is_member = state.is_member

    async def start(self) -> None:
        """Synchronises the clock with the swarm, joins the DHT and registers the services."""
        settings, run_id, initial_peers = self._state.settings, self._state.run_id, self._state.initial_peers
        rules = self._dht.now, self._is_known, self._door.vet_record
        validator = RunRecordValidator(run_id, *rules)
        await self._audits.start()  # before anybody is asked: it reads whom proofs exclude
        await self._dht.join(
            settings.initial_peers,
            validator,
            lambda connected: initial_peers or connected,
            client_mode=settings.client_mode,
        )
        self._records = Records(self._dht.node, self._state.identity, run_id, *rules)
        self._announcer.open(self._records)
        await self._dht.serve()
        await self._greetings.start()
        await self._token_count.start()
        await self._exchange.start()
        await self._transfer.start()
        await self._rendezvous.start()
        await self.refresh()
        self.repeat(self._announcer.announce, 0.3)  # a burst of events needs only one record
        self.repeat(self._look_around, _REFRESH_S)
        self.repeat(self._keep_time, 0.0)
        self.repeat(self._reunite, _REFRESH_S)

    def describe(self) -> Iterator[str]:
        """What the services of the run are doing, in lines for the log."""
        yield from self._rendezvous.describe()
        yield from self._exchange.describe()
        yield from roster_lines(self._state.roster)

    def _on_fault(self, peer_id: str, error: ProtocolError) -> None:
        """Reports a fault to the trainer and, by its kind only, in the next progress record."""
        self._faults.note(error.kind)
        self._state.tracks.conduct.note_fault(peer_id, error.kind)
        self._listener.on_fault(peer_id, error)

    def _is_known(self, peer_id: str) -> bool:
        """Returns True if this peer has been in contact with another one, so that a process is behind its records."""
        me, standing = self._state.identity.peer_id, self._state.roster.standing
        return peer_id == me or standing.has_answered(peer_id) or self._dht.has_met(peer_id)

    # Reachability; see connectivity.RunPeers.

    def _own_maddrs(self) -> list[str]:
        """This peer's addresses, as other peers get them; none while it cannot be reached."""
        return self._dht.own_maddrs if self.reachable else []

    @property
    def reachable(self) -> bool:
        """True if this peer announces that it can be reached."""
        return self._rendezvous.reachable

    def set_reach(self, reachable: bool, address: str | None) -> None:
        """Sets `reachable`. `address` is where other peers got through, None if they did not."""
        if self._rendezvous.reachable != reachable:
            self._rendezvous.reachable = reachable
            self._announcer.announce_soon()
        maddr = f"{address}/p2p/{self._state.identity.peer_id}"
        if address is not None and maddr not in self._dht.own_maddrs:
            self._dht.own_maddrs.append(maddr)

    def neighbours(self) -> list[Neighbour]:
        """The other live peers."""
        return [Neighbour(view.peer_id, view.progress.reachable) for view in self._state.roster.present()]

    async def maddrs_of(self, peer_id: str) -> list[str]:
        """Asks a peer for its addresses; returns the last known ones if it does not answer."""
        return await self._greetings.greet(peer_id)

    def repeat(self, action: Callable[[], Coroutine[Any, Any, None]], pause_s: float) -> None:
        """Repeats an action while the run is open. An unexpected error is reported and does not end the loop."""

        async def run() -> None:
            logged = ""
            while True:
                try:
                    await action()
                except Exception as exc:  # any error: a peer that stops publishing or reading would split the swarm
                    detail = f"{exc!r}{where_to_read()}"
                    if detail != logged:  # the same one every second would drive all else out of the log
                        _LOGGER.exception("%s failed", action.__qualname__)
                        logged = detail
                    self._on_fault(self._state.identity.peer_id, ProtocolError("internal", detail))
                await asyncio.sleep(pause_s)

        self._tasks.append(asyncio.create_task(run()))

    async def count_tokens(self) -> TokenCounts:
        """See RunCommands."""
        return await self._token_count.others()

    # The reference.

    async def adopt(self, table_round: int, versions: tuple[int, ...], lineage: Lineage, swarm_tokens: int = 0) -> str:
        """See RunCommands."""
        self._state.lineage = lineage
        self._state.swarm_tokens.count = swarm_tokens
        self._state.reference.finish(table_round, list(enumerate(versions)))
        self._transfer.open()
        return self._state.reference.digest.hex()

    async def download(self, if_newer: bool, partial: Path | None = None) -> TransferReport | None:
        """See RunCommands."""
        report = await self._catching_up.download(if_newer, partial, self._listener.notify)
        if report is not None:
            _LOGGER.info("fetched the reference: %s", report)
            self._state.roster.standing.follow()
            self._state.swarm_tokens.missed_commits()
            self._announcer.learn_swarm_tokens()
        return report

    async def swarm_table(self) -> ReferenceTable | None:
        """See RunCommands."""
        return await self._catching_up.swarm_table()

    async def table(self) -> ReferenceTable:
        """See RunCommands."""
        return self._state.reference.table

    async def lineage(self) -> tuple[list[int], bytes]:
        """See RunCommands."""
        return self._state.lineage.to_lists()

    async def swarm_tokens(self) -> int:
        """See RunCommands."""
        return self._state.swarm_tokens.count

    # Records.

    def beat(self) -> None:
        """Notes that the trainer is alive; see port.commands.ProcessCommands."""
        self._announcer.beat()

    async def _look_around(self) -> None:
        self._door.read_file()
        try:
            await self.refresh()
        finally:
            self._listener.notify(self._view())

    async def _reunite(self) -> None:
        live = {self._state.identity.peer_id, *(view.peer_id for view in self._state.roster.present())}
        await self._known_peers.reunite(live, self._daemon, self._dht.node)

    async def _keep_time(self) -> None:
        if await self._dht.check_time(self._clock_voices) > 0:
            self._announcer.announce_soon()  # to peers that were ahead, this peer's records had expired

    def _clock_voices(self, connected: set[str]) -> Collection[str]:
        # Includes peers that are merely connected: to a peer whose clock is ahead, the others' records have expired.
        return self._state.roster.standing.clock_voices({*self._door.present(), *connected}, time.monotonic())

    async def _refresh_quietly(self) -> None:
        with suppress(Exception):  # reported where records are read all the time; see `repeat`
            await self.refresh()

    async def refresh(self) -> None:
        """Reads other peers' records and greets new peers, so that connections exist before the first round."""
        assert self._records is not None
        read = self._records.read
        progress, leases = await asyncio.gather(read("progress", Progress), read("leases", Lease))
        new = self._state.roster.update(progress)
        me, now = self._state.identity.peer_id, self._dht.now()
        if me in progress and self._announcer.twins.read(progress[me].expires, now):
            self._tasks.append(asyncio.create_task(self._report_twin(me)))
        self._state.leases.update(self._heard_of(leases))
        self._audits.proofs.compare(progress)
        self._company.note_read()
        self._announcer.learn_swarm_tokens()
        if self._announcer.volunteering is not None:
            self._volunteers = self._heard_of(await self._records.read("publishers", Volunteer))
        self._greetings.greet_soon(new)

    async def _report_twin(self, me: str) -> None:
        self._on_fault(me, twin_fault(me, self._own_maddrs(), await self._greetings.own_endpoints()))

    def _heard_of(self, records: dict[str, _Record]) -> dict[str, _Record]:
        """Returns the records of peers that have answered a call; others reserve no experts and publish nothing."""
        return {peer: record for peer, record in records.items() if self._state.roster.standing.has_answered(peer)}

    async def view(self) -> SwarmView:
        """See RunCommands."""
        await self.refresh()
        await self._greetings.first_answers()  # or a peer that leaves now could take itself for the only one
        return self._view()

    def _view(self) -> SwarmView:
        roster, own_round, me = self._state.roster, self._state.reference.round, self._state.identity.peer_id
        volunteering = self._announcer.volunteering
        answering, voices = roster.answering(), roster.voices()
        ready = tuple(view.peer_id for view in answering if view.progress.state in ("waiting", "training"))
        dead_votes, reports = roster.dead_votes()
        held = {e for view in answering for e in view.progress.experts} | set(self._state.leases.held)
        return SwarmView(
            num_peers=len(answering),
            num_ready=len(ready),
            num_training=sum(view.progress.state == "training" for view in answering),
            tokens_per_step=roster.tokens_per_step(self._announcer.tokens_per_step),
            tokens=roster.tokens_since_commit(own_round, self._state.run.round.progress_ttl_s),
            tokens_per_second=sum(view.progress.tokens_per_second for view in voices),
            at=time.monotonic(),
            swarm_round=roster.swarm_round(own_round),
            experts_covered=len(held),
            ready=ready,
            data=roster.data_positions(),
            routing_reports=reports,
            dead_votes=dead_votes,
            excluded=self._state.tracks.conduct.exclusions.excluded,
            without_duty=tuple(roster.standing.without_duty),
            out=self._door.why_out(me),
            publishing_periods=periods_to_wait(self._volunteers, volunteering[0], me) if volunteering else 0,
        )

    async def volunteer(self, target: bytes | None, publishing: bool) -> None:
        """See RunCommands."""
        self._announcer.volunteering = (target, publishing) if target is not None else None
        self._announcer.announce_soon()

    async def peer_maddrs(self) -> list[str]:
        """See RunCommands."""
        return self._known_peers.of([view.peer_id for view in self._state.roster.answering()])

    async def set_presence(self, presence: Presence) -> None:
        """See RunCommands."""
        self._announcer.set_presence(presence)

    # Leases.

    async def claim(self, experts: tuple[int, ...] | int, room: int, fixed: bool) -> tuple[int, ...]:
        """See RunCommands."""
        assert self._records is not None
        most = self._door.terms(self._state.identity.peer_id).experts
        if most is not None:
            room, experts = min(room, most), experts[:most] if isinstance(experts, tuple) else min(experts, most)
        self._state.leases.room, self._state.leases.fixed = room, fixed
        await self.refresh()
        await self._audits.proofs.fetched()  # before its first round, a newcomer knows whom a proof excludes
        if isinstance(experts, tuple):
            self._state.leases.held = experts
            await self._announcer.publish_lease()
            return experts
        self._state.leases.choose(experts)
        await self._announcer.publish_lease()
        # Peers that start together make the same choice; look again until the choices have settled. If others change
        # theirs again and again, the last one stands, and the next commits resolve what is left.
        quiet = changes = 0
        while quiet < 2 and changes < _MAX_CHANGES:
            await asyncio.sleep(_REFRESH_S)
            self._state.leases.update(self._heard_of(await self._records.read("leases", Lease)))
            if self._state.leases.settle():
                quiet += 1
            else:
                quiet, changes = 0, changes + 1
                await self._announcer.publish_lease()
        return self._state.leases.held

    # Rounds.

    def _target_round(self) -> int:
        return max(self._state.roster.swarm_round(self._state.reference.round) + 1, self._ahead)

    def _on_ahead(self, round_number: int) -> None:
        # At most one round beyond this peer's next one: calls prove nothing, and must not drive the round number.
        if round_number <= self._state.reference.round + 2:
            self._ahead = round_number

    async def run_round(
        self, tokens: int, routed: tuple[int, ...], leaving: bool, loss_rose: bool | None = None
    ) -> RoundReport | CaughtUp:
        """See RunCommands."""
        if (reason := self._door.why_out(self._state.identity.peer_id)) is not None:
            raise InvitationError(reason)
        self._round_task = asyncio.current_task()
        self._announcer.in_round = True
        # Writing a record slows a short round, which is over before others could read it.
        announcement = asyncio.get_running_loop().call_later(_SHORT_ROUND_S, self._announcer.announce_soon)
        try:
            outcome = await self._hold_round(tokens, routed, leaving, loss_rose)
            self._door.members.settle({self._state.identity.peer_id, *self._door.voices()})
            self._listener.notify(self._view())  # the trainer's is from before the commit
            return outcome
        except (RoundError, TransferError) as exc:
            self._faults.note("round")
            self._listener.report(f"the round has failed: {exc}")
            raise
        except Exception as exc:  # one failed round must not end the session; its work is in the next difference
            _LOGGER.exception("the round has failed")
            raise RoundError(f"unexpected error: {exc!r}{where_to_read()}") from exc
        finally:
            announcement.cancel()
            self._announcer.in_round = False
            self._announcer.announce_soon()

    @property
    def in_round(self) -> bool:
        """True if a round is under way."""
        return self._announcer.in_round

    async def cancel_round(self) -> None:
        """See RunCommands."""
        if self._round_task is not None and not self._round_task.done():
            self._round_task.cancel()
            await asyncio.wait({self._round_task})

    async def _hold_round(
        self, tokens: int, routed: tuple[int, ...], leaving: bool, loss_rose: bool | None
    ) -> RoundReport | CaughtUp:
        # A frozen node slows the DHT for seconds while the other peers wait; records are read all the time anyway. All
        # peers begin a round at the same time, so a search by each delays short rounds.
        if steady_clock() - self._company.read_at > _FRESH_S:
            await asyncio.wait({asyncio.create_task(self._refresh_quietly())}, timeout=_ROUND_REFRESH_S)
        await self._company.find_again()
        await self._company.await_beginners()
        caught_up = await self._catching_up.resync_if_diverged()
        if caught_up is not None:
            if caught_up.complete:
                self._state.lineage = Lineage({})  # no block of its old lineage is left, as for a newcomer
                self._state.roster.standing.follow()
            self._state.swarm_tokens.missed_commits()
            self._ahead = 0
            self._rendezvous.reset()
            self._state.roster.standing.without_duty = {}  # as of a group that others have left behind
            return caught_up
        return await self._rounds.hold(self._target_round(), tokens, routed, leaving, loss_rose)

    async def traffic(self) -> tuple[int, int]:
        """See RunCommands."""
        with self._transfer.round_under_way():  # other members still fetch their results from here
            self._announcer.set_traffic(*await self._exchange.traffic())
        return self._announcer.traffic

    async def leave(self) -> None:
        """Releases the lease, announces that this peer is leaving, and leaves the DHT."""
        for task in self._tasks:
            task.cancel()
        self._audits.end(keep=False)
        await self._rounds.lasting_records.close()
        await self._audits.proofs.stop()
        await self._announcer.say_goodbye()
        await self._dht.leave()
