"""Proofs among peers: kept, passed on, and what they exclude."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.proof_query import fetch_proof, stream_name
from spes_swarm.network.link.wire import Channel, serve_channel
from spes_swarm.network.round import proofs as proofs_module
from spes_swarm.network.round.proofs import Proofs
from spes_swarm.network.transport.interface import Transport
from spes_swarm.protocol.averaging.proof import open_proof
from spes_swarm.protocol.members.reputation import Reputation
from spes_swarm.protocol.rounds.track_record import TrackRecords
from tests.helpers.hosts import MEMBERS, connected, run
from tests.helpers.records import progress
from tests.helpers.rounds import identity
from tests.helpers.signed_exchange import RUN_ID, proof_against

STALL_S = 8.0
LIAR = identity(9)
A_PROOF = proof_against(LIAR)
FIRST, SECOND = 0, 1


@dataclass
class Keeper:
    """A peer with proofs."""

    peer_id: str
    transport: Transport
    run: Any
    proofs: Proofs = field(init=False)
    faults: list[tuple[str, ProtocolError]] = field(default_factory=list)
    told: int = 0  # how often it had news for others

    def tell(self) -> None:
        self.told += 1

    @property
    def excluded(self) -> list[str]:
        return self.run.tracks.conduct.exclusions.culprits  # type: ignore[no-any-return]

    async def reads(self, other: Keeper, *culprits: str, unaware: int = 2, lied: int = 7) -> bool:
        """Reads the record of another peer that lists culprits, and those of some that list none; returns whether
        anything was fetched.
        """
        listed = list(culprits or other.excluded)
        records = {f"unaware {number}": progress() for number in range(unaware)}
        self.proofs.compare({**records, other.peer_id: progress(proven=listed, proven_in=[lied] * len(listed))})
        return await self.fetches()

    async def fetches(self) -> bool:
        tasks = list(self.proofs._fetching.values())
        if tasks:
            await asyncio.wait_for(asyncio.wait(tasks), 60)
        return bool(tasks)


async def say_nothing(channel: Channel) -> None:
    del channel
    await asyncio.Event().wait()


def noted(peer_id: str, error: ProtocolError) -> None:
    del peer_id, error


@asynccontextmanager
async def keepers(*folders: Path | None, silent: int = -1, real: bool = False) -> AsyncIterator[list[Keeper]]:
    """Connected peers, in memory or with daemons, with folders for their proofs; one of them may answer nothing."""
    async with connected(len(folders), real=real) as found:
        made: list[Keeper] = []
        for host, folder in zip(found, folders, strict=True):
            reputation = Reputation()
            reputation.committed(0.0, [LIAR.peer_id], ())
            state: Any = SimpleNamespace(
                run_id=RUN_ID,
                run=SimpleNamespace(round=SimpleNamespace(stall_timeout_s=STALL_S)),
                settings=SimpleNamespace(proofs=folder),
                tracks=TrackRecords(),
                roster=SimpleNamespace(reputation=reputation),
                reference=SimpleNamespace(round=20),
                identity=SimpleNamespace(peer_id=host.peer_id),
                group=frozenset(),
            )
            keeper = Keeper(host.peer_id, host.transport, state)
            keeper.proofs = Proofs(
                host.transport, state, lambda *fault, to=keeper: to.faults.append(fault), MEMBERS, keeper.tell
            )
            if len(made) == silent:
                await serve_channel(host.transport, stream_name(RUN_ID), say_nothing, STALL_S, noted, MEMBERS)
            else:
                await keeper.proofs.start()
            made.append(keeper)
        yield made


@pytest.mark.parametrize("real", [False, True], ids=["in memory", "through daemons"])
def test_a_proof_is_passed_on_verified_and_kept(tmp_path: Path, real: bool) -> None:
    async def test() -> None:
        async with keepers(None, tmp_path, real=real) as (first, second):
            await first.proofs.add(A_PROOF)
            await first.proofs.add(A_PROOF)
            assert first.told == 1
            assert await second.reads(first)
            assert second.excluded == [LIAR.peer_id]
            ((culprit, error),) = second.faults
            assert (culprit, error.kind) == (LIAR.peer_id, "proven")
            assert "it lied in round 7, part 5: it has signed two different results; it is excluded once" in str(error)
            assert second.told == 1
            assert not await second.reads(first)
        async with keepers(None, tmp_path, real=real) as (_, again):
            assert again.excluded == [LIAR.peer_id]
            assert again.run.tracks.conduct.doubts(LIAR.peer_id, 100) == ("proven",)
            assert not again.faults

    run(test)


def test_who_lists_culprits_without_a_proof_is_not_asked_again_soon() -> None:
    async def test() -> None:
        async with keepers(None, None) as (first, second):
            assert await second.reads(first, LIAR.peer_id)
            assert not await second.reads(first, LIAR.peer_id)
            assert not second.excluded
            assert not second.faults

    run(test)


@pytest.mark.parametrize(
    "spoil",
    [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: b"", lambda data: data * 2],
    ids=["changed", "empty", "twice as long"],
)
def test_what_proves_nothing_is_not_kept(spoil: Callable[[bytes], bytes]) -> None:
    async def test() -> None:
        async with keepers(None, None) as (first, second):
            first.proofs._known[LIAR.peer_id] = spoil(A_PROOF)
            assert await second.reads(first, LIAR.peer_id)
            assert not second.excluded

    run(test)


def test_few_proofs_are_kept_about_peers_of_no_round_and_only_if_most_members_name_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Anybody can make proofs against identities of his own."""
    liars = [identity(number) for number in (10, 11, 12)]
    made = [proof_against(liar) for liar in liars]

    async def test() -> None:
        async with keepers(None, None) as (first, second):
            for each in made:
                await first.proofs.add(each)
            assert not await second.reads(first, liars[0].peer_id, unaware=1)
            assert await second.reads(first, liars[0].peer_id, unaware=0)
            assert second.excluded == [liars[0].peer_id]
            monkeypatch.setattr(proofs_module, "_MAX_BYTES_ABOUT_STRANGERS", len(made[1]) - 1)
            assert await second.reads(first, liars[1].peer_id, unaware=0)
            assert second.excluded == [liars[0].peer_id]
            second.proofs._not_before.clear()
            monkeypatch.setattr(proofs_module, "_MAX_WITH_STRANGERS", 1)
            assert not await second.reads(first, liars[2].peer_id, unaware=0)
            second.run.roster.reputation.committed(1.0, [liars[1].peer_id], ())
            assert await second.reads(first, liars[1].peer_id, unaware=9)
            assert second.excluded == [liars[0].peer_id, liars[1].peer_id]

    run(test)


def test_a_lie_in_a_round_to_come_is_none() -> None:
    """Whoever is pardoned up to its round would be so for ever."""
    late = proof_against(LIAR, round_number=40)

    async def test() -> None:
        async with keepers(None, None) as (first, second):
            first.run.reference.round = 30
            await first.proofs.add(late)
            with pytest.raises(ProtocolError, match="a proof about"):
                await second.proofs.add(late)
            assert not await second.reads(first, lied=40)
            assert await second.reads(first, lied=20)
            assert not second.excluded

    run(test)


def test_a_proof_about_somebody_else_than_was_asked_for_is_not_kept() -> None:
    async def test() -> None:
        async with keepers(None, None) as (first, second):
            first.proofs._known[LIAR.peer_id] = proof_against(identity(10))
            assert await second.reads(first, LIAR.peer_id)
            assert not second.excluded

    run(test)


def test_a_culprit_with_which_this_peer_is_in_a_group_is_excluded_later() -> None:
    async def test() -> None:
        async with keepers(None) as (only,):
            only.run.group = frozenset([LIAR.peer_id, only.peer_id])
            await only.proofs.add(A_PROOF)
            exclusions = only.run.tracks.conduct.exclusions
            assert LIAR.peer_id not in exclusions
            exclusions.agreed(21, {LIAR.peer_id: b"", only.peer_id: exclusions.marks()}, [only.peer_id])
            assert LIAR.peer_id in exclusions

    run(test)


def test_an_excluded_peer_gets_the_proof_against_itself_and_no_other() -> None:
    async def test() -> None:
        async with keepers(None, None) as (first, second):
            me = next(identity(number) for number in range(16) if identity(number).peer_id == second.peer_id)
            await first.proofs.add(A_PROOF)
            await first.proofs.add(proof_against(me))
            first.proofs._guests = replace(MEMBERS, admits=lambda peer_id: peer_id != me.peer_id)
            with pytest.raises(ProtocolError, match="refuses to send its proofs"):
                await fetch_proof(second.transport, first.peer_id, RUN_ID, LIAR.peer_id, STALL_S)
            second.proofs.ask_about_me(first.peer_id)
            assert await second.fetches()
            assert second.excluded == [me.peer_id]
            assert me.peer_id in second.run.tracks.conduct.exclusions
            second.proofs.ask_about_me(first.peer_id)
            assert not await second.fetches()

    run(test)


def test_a_silent_peer_does_not_keep_others_from_being_asked() -> None:
    async def test() -> None:
        async with keepers(None, None, None, silent=1) as (first, silent, third):
            await first.proofs.add(A_PROOF)
            listed = progress(proven=[LIAR.peer_id], proven_in=[7])
            third.proofs.compare({silent.peer_id: listed, first.peer_id: listed})
            await asyncio.wait_for(third.proofs._fetching[first.peer_id], 60)
            assert third.excluded == [LIAR.peer_id]
            assert not third.proofs._fetching[silent.peer_id].done()
            await third.proofs.stop()

    run(test)


def test_one_record_leads_to_all_its_culprits(tmp_path: Path) -> None:
    other = identity(8)

    async def test() -> None:
        async with keepers(None, tmp_path) as (first, second):
            await first.proofs.add(A_PROOF)
            await first.proofs.add(proof_against(other))
            second.run.roster.reputation.committed(1.0, [other.peer_id], ())
            assert await second.reads(first)
            assert second.excluded == [LIAR.peer_id, other.peer_id]
            assert len(list(tmp_path.glob("*.proof"))) == 2

    run(test)


def test_long_proofs_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs_module, "_FRAME_BYTES", 100)

    async def test() -> None:
        async with keepers(None, None) as (first, second):
            await first.proofs.add(A_PROOF)
            assert await second.reads(first)
            assert second.proofs._known[LIAR.peer_id] == A_PROOF

    run(test)


def test_a_proof_about_another_run_is_refused() -> None:
    async def test() -> None:
        async with keepers(None) as (only,):
            with pytest.raises(ProtocolError, match="of the run other"):
                await only.proofs.add(proof_against(LIAR, "other"))
            assert not only.excluded

    run(test)


@pytest.mark.parametrize("is_member", [True, False])
def test_nobody_gets_proofs_without_end(is_member: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = "_BYTES_PER_MEMBER" if is_member else "_BYTES_PER_HOST"
    monkeypatch.setattr(proofs_module, limit, 2 * len(A_PROOF))

    async def test() -> None:
        async with keepers(None, None) as (first, second):
            first.proofs._guests = replace(MEMBERS, is_member=lambda peer_id: is_member)
            await first.proofs.add(A_PROOF)
            for _ in range(2):
                assert await fetch_proof(second.transport, first.peer_id, RUN_ID, LIAR.peer_id, STALL_S) == A_PROOF
            with pytest.raises(ProtocolError, match="refuses to send its proofs"):
                await fetch_proof(second.transport, first.peer_id, RUN_ID, LIAR.peer_id, STALL_S)
            assert [error.kind for _, error in first.faults] == ["proven", "budget"]

    run(test)


def test_a_pardoned_lie_excludes_nobody_whoever_has_a_proof_of_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path / "a", tmp_path / "b") as (first, second):
            await first.proofs.add(A_PROOF)
            second.run.tracks.conduct.exclusions.pardon(LIAR.peer_id, 7)
            assert not await second.reads(first)
            await second.proofs.add(A_PROOF)
            assert second.told == 0
            first.run.tracks.conduct.exclusions.pardon(LIAR.peer_id, 7)
            assert first.excluded == second.excluded == []
            assert first.run.tracks.conduct.doubts(LIAR.peer_id, 8) == ()
            later = proof_against(LIAR, round_number=12)
            await first.proofs.add(later)
            assert await second.reads(first, lied=12)
            assert first.excluded == second.excluded == [LIAR.peer_id]
        async with keepers(tmp_path / "a") as (again,):  # both files are there, in whatever order
            assert LIAR.peer_id in again.run.tracks.conduct.exclusions
            assert again.run.tracks.conduct.exclusions.lie_of(LIAR.peer_id) == 12
            kept = again.proofs._known[LIAR.peer_id]
            assert isinstance(kept, Path)
            assert open_proof(kept.read_bytes()).round == 12

    run(test)
