"""Proofs among real daemons: kept, passed on, and what they exclude."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import P2P

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.proof_query import fetch_proof
from spes_swarm.network.round import proofs as proofs_module
from spes_swarm.network.round.proofs import Proofs
from spes_swarm.protocol.averaging.proof import open_proof
from spes_swarm.protocol.members.standing import Standing
from spes_swarm.protocol.rounds.track_record import TrackRecords
from tests.helpers.hosts import MEMBERS, hosts, run
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
    p2p: P2P
    run: Any
    proofs: Proofs = field(init=False)
    faults: list[tuple[str, ProtocolError]] = field(default_factory=list)
    told: int = 0  # how often it had news for others

    def tell(self) -> None:
        self.told += 1

    @property
    def excluded(self) -> list[str]:
        return list(self.run.tracks.conduct.proven)

    async def reads(self, other: Keeper, *culprits: str, unaware: int = 2) -> bool:
        """Reads the record of another peer that lists culprits, and those of some that list none; returns whether
        anything was fetched.
        """
        records = {f"unaware {number}": progress() for number in range(unaware)}
        self.proofs.compare({**records, other.peer_id: progress(proven=list(culprits or other.excluded))})
        if self.proofs._fetching is None:
            return False
        await asyncio.wait_for(self.proofs._fetching, 60)
        return True


@asynccontextmanager
async def keepers(*folders: Path | None) -> AsyncIterator[list[Keeper]]:
    async with hosts(len(folders)) as found:
        made = []
        for host, folder in zip(found, folders, strict=True):
            if host is not found[0]:
                await host.connect(found[0])
            standing = Standing()
            standing.note_answer(LIAR.peer_id)
            state = SimpleNamespace(
                run_id=RUN_ID,
                run=SimpleNamespace(round=SimpleNamespace(stall_timeout_s=STALL_S)),
                settings=SimpleNamespace(proofs=folder),
                tracks=TrackRecords(),
                roster=SimpleNamespace(standing=standing),
            )
            keeper = Keeper(host.peer_id, host.daemon.p2p, state)
            keeper.proofs = Proofs(host.daemon.p2p, state, lambda *fault, to=keeper: to.faults.append(fault), MEMBERS)  # type: ignore[arg-type]
            keeper.proofs.on_new = keeper.tell
            await keeper.proofs.start()
            made.append(keeper)
        yield made


def test_a_proof_is_passed_on_verified_and_kept(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(None, tmp_path) as (first, second):
            assert await first.proofs.add(A_PROOF)
            assert not await first.proofs.add(A_PROOF)
            assert await second.reads(first)
            assert second.excluded == [LIAR.peer_id]
            ((culprit, error),) = second.faults
            assert (culprit, error.kind) == (LIAR.peer_id, "proven")
            assert "it lied in round 7, part 5: it has signed two different results; it is excluded" in str(error)
            assert second.told == 1
            assert not await second.reads(first)
        async with keepers(None, tmp_path) as (_, again):
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


def test_others_proofs_count_if_they_are_about_peers_met_and_own_ones_always() -> None:
    """Anybody can make proofs against identities of his own."""

    async def test() -> None:
        async with keepers(None, None) as (first, second):
            await first.proofs.add(A_PROOF)
            second.run.roster.standing = Standing()
            assert not await second.reads(first)
            second.proofs._guests = replace(MEMBERS, is_member=lambda peer_id: peer_id != LIAR.peer_id)
            assert not await second.proofs.add(A_PROOF, is_trusted=False)
            assert not second.excluded
            assert await second.proofs.add(A_PROOF)
            assert second.excluded == [LIAR.peer_id]

    run(test)


def test_a_newcomer_learns_whom_most_members_name_although_it_has_not_met_them() -> None:
    async def test() -> None:
        async with keepers(None, None) as (first, newcomer):
            await first.proofs.add(A_PROOF)
            newcomer.run.roster.standing = Standing()
            newcomer.proofs._guests = replace(MEMBERS, is_member=lambda peer_id: peer_id != LIAR.peer_id)
            assert not await newcomer.reads(first, unaware=1)
            assert await newcomer.reads(first, unaware=0)
            assert newcomer.excluded == [LIAR.peer_id]

    run(test)


def test_few_and_short_proofs_about_peers_that_took_part_in_no_round_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs_module, "_MAX_ABOUT_STRANGERS", 2)
    liars = [identity(number) for number in (10, 11, 12, 13)]
    made = [proof_against(liar) for liar in liars]

    async def test() -> None:
        async with keepers(None) as (only,):
            for liar in liars:
                only.run.roster.standing.note_answer(liar.peer_id)
            only.proofs._guests = replace(MEMBERS, is_member=lambda peer_id: peer_id == liars[3].peer_id)
            monkeypatch.setattr(proofs_module, "_MAX_BYTES_ABOUT_STRANGERS", len(made[0]) - 1)
            assert not await only.proofs.add(made[0], is_trusted=False)
            monkeypatch.setattr(proofs_module, "_MAX_BYTES_ABOUT_STRANGERS", len(made[0]) + 100)
            assert [await only.proofs.add(each, is_trusted=False) for each in made] == [True, True, False, True]

    run(test)


def test_one_record_leads_to_all_its_culprits(tmp_path: Path) -> None:
    other = identity(8)

    async def test() -> None:
        async with keepers(None, tmp_path) as (first, second):
            await first.proofs.add(A_PROOF)
            await first.proofs.add(proof_against(other))
            second.run.roster.standing.note_answer(other.peer_id)
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
            with pytest.raises(ProtocolError, match="about the run other"):
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
                assert await fetch_proof(second.p2p, first.peer_id, RUN_ID, LIAR.peer_id, STALL_S) == A_PROOF
            with pytest.raises(ProtocolError, match="refuses to send its proofs"):
                await fetch_proof(second.p2p, first.peer_id, RUN_ID, LIAR.peer_id, STALL_S)
            assert [error.kind for _, error in first.faults] == ["proven", "budget"]

    run(test)


def test_a_pardoned_lie_excludes_nobody_whoever_has_a_proof_of_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with keepers(tmp_path / "a", tmp_path / "b") as (first, second):
            await first.proofs.add(A_PROOF)
            second.run.tracks.conduct.proven.pardon(LIAR.peer_id, 7)
            assert await second.reads(first)
            assert not second.excluded
            assert not second.faults
            first.run.tracks.conduct.proven.pardon(LIAR.peer_id, 7)
            assert not first.excluded
            assert first.run.tracks.conduct.doubts(LIAR.peer_id, 8) == ()
            later = proof_against(LIAR, round_number=12)
            assert await first.proofs.add(later)
            assert await second.proofs.add(later, is_trusted=False)
            assert first.excluded == second.excluded == [LIAR.peer_id]
        async with keepers(tmp_path / "a") as (again,):  # both files are there, in whatever order
            assert again.run.tracks.conduct.proven.round_of(LIAR.peer_id) == 12
            kept = again.proofs._known[LIAR.peer_id]
            assert isinstance(kept, Path)
            assert open_proof(kept.read_bytes()).round == 12

    run(test)
