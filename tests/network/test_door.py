"""The door of a private run between real daemons: who is answered, and how the members learn of acts."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from spes_swarm.base.errors import InvitationError, ProtocolError
from spes_swarm.config.admission import check_admission
from spes_swarm.config.manifest import Manifest, found_run
from spes_swarm.network.link.door import VISIBLE, Door
from spes_swarm.network.link.rpc import RefusedError
from spes_swarm.protocol.admission import acts
from spes_swarm.protocol.admission.grants import Chain, Grant, Invitation, extend, new_key
from spes_swarm.protocol.rounds.statement import Statement
from spes_swarm.storage.acts_file import ActsFile
from tests.helpers.hosts import Host, hosts, run
from tests.helpers.lone_trainer import run_config
from tests.helpers.meeting import statement_fields
from tests.helpers.records import lease, progress
from tests.helpers.rounds import identity

REASONABLE_S = 60.0
FOUNDER = identity(0)


def manifest(admission: Any = "invite", visible: Any = "all") -> Manifest:
    return found_run(dataclasses.replace(run_config(), admission=admission, visible=visible), "ab" * 32, FOUNDER)


def invitation(run_id: str, **terms: Any) -> tuple[Chain, Invitation]:
    secret, public = new_key()
    chain = extend(None, FOUNDER, run_id, Grant(key=public, **terms))
    return chain, Invitation(run_id, chain.wire, secret)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(REASONABLE_S):
        while not holds():  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.05)


async def echo(peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
    return {"echo": request.get("word"), "caller": peer_id}


class Party:
    """Connected hosts with doors; the first is the founder."""

    def __init__(self, manifest: Manifest, started: list[Host], directory: Path) -> None:
        self.manifest = manifest
        self.hosts = started
        self.doors: list[Door] = []
        for number, host in enumerate(started):
            self.doors.append(Door(host.rpc, manifest, time.time, ActsFile(directory / f"acts{number}.txt")))

    async def open(self, number: int, admission: bytes = b"", others: Collection[str] = ()) -> None:
        host, door = self.hosts[number], self.doors[number]
        host.rpc.admission = admission
        await door.open(host.peer_id, others)
        door.present = door.electorate = lambda: [other.peer_id for other in self.hosts if other is not host]
        for method in ("table", "ping", "manifest"):
            await host.rpc.serve(method, echo)

    async def call(self, caller: int, called: int, method: str = "table", **arguments: Any) -> dict[str, Any]:
        return await self.hosts[caller].rpc.call(self.hosts[called].peer_id, method, arguments, REASONABLE_S)

    def revoke(self, **target: Any) -> bytes:
        return acts.revoke(FOUNDER, None, self.manifest.run_id, acts.Target(at=time.time(), **target))


@asynccontextmanager
async def party(count: int, directory: Path, **settings: str) -> AsyncIterator[Party]:
    async with hosts(count) as started:
        for host in started[1:]:
            await host.connect(started[0])
        if count > 2:
            await started[2].connect(started[1])
        yield Party(manifest(**settings), started, directory)


def test_a_stranger_is_refused_and_a_member_is_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with party(2, tmp_path) as here:
            await here.open(0)
            with pytest.raises(RefusedError, match="this run is private: ask one of its members for an invitation"):
                await here.call(1, 0)
            _, sent = invitation(here.manifest.run_id)
            here.hosts[1].rpc.admission = sent.admit(here.hosts[1].peer_id)
            assert (await here.call(1, 0, word="hello"))["echo"] == "hello"
            # Somebody else's admission is worth nothing.
            here.doors[0].members._chains.clear()
            here.hosts[1].rpc.admission = sent.admit(identity(5).peer_id)
            with pytest.raises(RefusedError):
                await here.call(1, 0)

    run(scenario)


@pytest.mark.parametrize("visible", ["all", "members"])
def test_who_only_watches_gets_what_is_visible(tmp_path: Path, visible: str) -> None:
    async def scenario() -> None:
        async with party(2, tmp_path, visible=visible) as here:
            await here.open(0)
            for method in ("ping", "manifest"):
                if visible == "all":
                    await here.call(1, 0, method)
                else:
                    with pytest.raises(RefusedError):
                        await here.call(1, 0, method)
            with pytest.raises(RefusedError):
                await here.call(1, 0, "acts", known=b"")
            with pytest.raises(RefusedError):  # it says that it is going to take part
                await here.call(1, 0, "manifest", joins=True)

    run(scenario)


def test_a_member_that_has_started_again_is_shown_the_admission_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with party(2, tmp_path) as here:
            await here.open(0)
            _, sent = invitation(here.manifest.run_id)
            await here.open(1, sent.admit(here.hosts[1].peer_id))
            await here.call(1, 0)
            here.doors[0] = Door(here.hosts[0].rpc, here.manifest, time.time)
            await here.open(0)
            await here.call(1, 0)

    run(scenario)


def test_a_revocation_in_the_file_of_one_member_reaches_all_and_survives(tmp_path: Path) -> None:
    """The command appends to the file; the third peer is not connected to whoever did so in time."""

    async def scenario() -> None:
        async with party(3, tmp_path) as here:
            _, sent = invitation(here.manifest.run_id)
            for number in range(3):
                await here.open(number, sent.admit(here.hosts[number].peer_id) if number else b"")
            outsider = identity(7).peer_id
            for door in here.doors:
                door.members.learn(outsider, sent.admit(outsider), time.time())
                assert door.admits(outsider)
            await here.call(1, 0)
            await here.call(2, 1)
            ActsFile(tmp_path / "acts1.txt").append(here.revoke(peer=outsider))
            here.doors[1].read_file()
            assert not here.doors[1].admits(outsider)
            await until(lambda: not any(door.admits(outsider) for door in here.doors))
            await until(lambda: all(len(ActsFile(tmp_path / f"acts{i}.txt").read_new()) == 1 for i in range(3)))
            again = Door(here.hosts[2].rpc, here.manifest, time.time, ActsFile(tmp_path / "acts2.txt"))
            again.read_file()
            again.members.learn(outsider, sent.admit(outsider), time.time())
            assert not again.admits(outsider)

    run(scenario)


def test_a_leader_learns_of_a_revocation_from_the_call_that_depends_on_it(tmp_path: Path) -> None:
    """It never heard of it before: the follower's `gather` is answered after the leader has asked for its acts."""

    async def scenario() -> None:
        async with party(2, tmp_path) as here:
            _, sent = invitation(here.manifest.run_id)
            await here.open(0)
            await here.open(1, sent.admit(here.hosts[1].peer_id))
            outsider = identity(7).peer_id
            here.doors[0].members.learn(outsider, sent.admit(outsider), time.time())
            seen = []

            async def gather(peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
                del peer_id, request
                seen.append(here.doors[0].admits(outsider))
                return {}

            await here.hosts[0].rpc.serve("gather", gather)
            await here.call(1, 0, "gather")
            here.doors[1].present = tuple  # nobody is told
            here.doors[1].members.add(here.revoke(peer=outsider))
            await here.call(1, 0, "gather")
            assert seen == [True, False]

    run(scenario)


def test_a_peer_that_is_revoked_learns_that_it_is_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with party(2, tmp_path) as here:
            _, sent = invitation(here.manifest.run_id)
            await here.open(0)
            await here.open(1, sent.admit(here.hosts[1].peer_id))
            await here.call(1, 0)
            assert here.doors[1].why_out(here.hosts[1].peer_id) is None
            here.doors[0].present = tuple
            here.doors[0].members.add(here.revoke(peer=here.hosts[1].peer_id))
            with pytest.raises(RefusedError):
                await here.call(1, 0)
            reason = here.doors[1].why_out(here.hosts[1].peer_id)
            assert reason is not None
            assert "most members refuse this peer: the invitation has been revoked" in reason
            here.doors[1].electorate = tuple  # only those count whose work is in its commits
            assert here.doors[1].why_out(here.hosts[1].peer_id) is None

    run(scenario)


def test_nobody_talks_a_founder_out_of_its_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with party(2, tmp_path) as here:
            _, sent = invitation(here.manifest.run_id)
            await here.open(0)
            await here.open(1, sent.admit(here.hosts[1].peer_id))
            await here.call(1, 0)

            async def refuse(peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
                del peer_id, request
                return {"error": "go away", "refused": True}

            await here.hosts[1].rpc.serve("ping", refuse)
            with pytest.raises(RefusedError, match="go away"):
                await here.call(0, 1, "ping")
            assert here.doors[0].why_out(FOUNDER.peer_id) is None

    run(scenario)


def test_a_newcomer_learns_from_those_it_is_connected_to_who_the_members_are(tmp_path: Path) -> None:
    """The founder is away: that the two others are allowed, only they can tell."""

    async def scenario() -> None:
        async with party(3, tmp_path, admission="allow-list") as here:
            one, two = (host.peer_id for host in here.hosts[1:])
            for peer in (one, two):
                chain = extend(None, FOUNDER, here.manifest.run_id, Grant(peer=peer))
                here.doors[1].members.add(acts.allow(chain))
            await here.open(1)
            assert not here.doors[2].admits(one)
            await here.open(2, others=[one])
            assert all(here.doors[2].admits(peer) for peer in (one, two))

    run(scenario)


def test_the_admission_of_a_peer_that_answers_is_known_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with party(3, tmp_path) as here:
            _, sent = invitation(here.manifest.run_id)
            one, two = (host.peer_id for host in here.hosts[1:])
            await here.open(1, sent.admit(one))
            here.hosts[2].rpc.admission = sent.admit(two)
            await here.call(2, 1, "manifest", joins=True)  # before it knows the founder's key
            await here.open(2, sent.admit(two), others=[one])
            assert here.doors[2].admits(one)

    run(scenario)


def test_what_a_stranger_gets_is_small(tmp_path: Path) -> None:
    """Whatever it asks, beside what a monitor may have."""

    async def scenario() -> None:
        async with party(2, tmp_path) as here:
            await here.open(0)
            sizes = []
            send = here.hosts[1].rpc._send

            async def measured(*arguments: Any, **options: Any) -> dict[str, Any]:
                answer = await send(*arguments, **options)
                sizes.append(len(msgpack.packb(answer)))
                return answer

            here.hosts[1].rpc._send = measured  # type: ignore[method-assign]
            for method in ("table", "gather", "call", "have", "tokens", "tokenizer", "no such method"):
                assert method not in VISIBLE
                with pytest.raises(RefusedError):
                    await here.call(1, 0, method)
            assert len(sizes) == 7
            assert sum(sizes) < 4096

    run(scenario)


# Records and statements.


def lone_door(**settings: str) -> Door:
    class Silent:
        admission = b""

    return Door(Silent(), manifest(**settings), time.time)  # type: ignore[arg-type]


def test_records_of_others_than_members_do_not_count() -> None:
    door = lone_door()
    _, sent = invitation(door.members._run_id, experts=1, may_publish=False)
    for record in (progress(), progress(admission=sent.admit("another")), lease(1.0, experts=[0])):
        with pytest.raises(ProtocolError, match="stranger"):
            door.vet_record("peer", record)
    door.vet_record(FOUNDER.peer_id, progress())
    door.vet_record("peer", progress(admission=sent.admit("peer")))
    door.vet_record("peer", lease(1.0, experts=[0]))
    with pytest.raises(ProtocolError, match="has 2 experts and may have 1"):
        door.vet_record("peer", lease(1.0, experts=[0, 1]))
    lone_door(admission="open").vet_record("anybody", progress())


# Before anything is asked.


def test_an_own_invitation_is_checked_against_the_manifest() -> None:
    run_manifest = manifest()
    other = dataclasses.replace(run_config(), name="other", admission="invite")
    of_other = found_run(other, "ab" * 32, FOUNDER)
    now = time.time()
    check_admission(run_manifest, FOUNDER.peer_id, b"", now)
    check_admission(manifest(admission="open"), "me", b"", now)
    _, sent = invitation(run_manifest.run_id, expires=now)
    check_admission(run_manifest, "me", sent.admit("me"), now - 1)
    for admission, why in (
        (b"", "is private: ask one of its members"),
        (sent.admit("me"), "the invitation has expired"),
        (invitation(of_other.run_id)[1].admit("me"), "is not valid for run"),
        (b"garbage", "is not valid for run"),
    ):
        with pytest.raises(InvitationError, match=why):
            check_admission(run_manifest, "me", admission, now)


def test_a_statement_shows_the_admission_that_counts() -> None:
    door = lone_door()
    _, sent = invitation(door.members._run_id, experts=1, weight=0.25)
    admission = sent.admit("peer")
    fields = {**statement_fields(), "held": [0], "routed": [1], "rms": [0.0, 0.0], "room": 1}
    shown = Statement.model_validate({**fields, "admission": admission})
    assert door.vet_statement("peer", shown) == 0.25
    for other in ({"admission": b""}, {"admission": b"garbage"}):
        with pytest.raises(ProtocolError, match="stranger"):
            door.vet_statement("peer", Statement.model_validate({**fields, **other}))
    with pytest.raises(ProtocolError, match="has 2 experts and may have 1"):
        door.vet_statement("peer", shown.model_copy(update={"room": 2}))
    assert door.vet_statement(FOUNDER.peer_id, Statement.model_validate(fields)) == 1.0


# Exclusion, which is the same in an open run.


@pytest.mark.parametrize("admission", ["open", "invite"])
def test_an_excluded_peer_gets_nothing_and_says_nothing(tmp_path: Path, admission: str) -> None:
    async def scenario() -> None:
        async with party(2, tmp_path, admission=admission) as here:
            _, sent = invitation(here.manifest.run_id)
            door, culprit = here.doors[0], here.hosts[1].peer_id
            await here.open(0)
            await here.open(1, sent.admit(culprit))
            await here.call(1, 0)
            door.vet_record(culprit, progress(admission=sent.admit(culprit)))
            assert door.admits(culprit)
            asked: list[str] = []
            here.doors[1].on_refusal = asked.append
            door.members.exclusions.note_lie(culprit, 5)
            assert not door.admits(culprit)
            for method in (*VISIBLE, "table", "acts"):
                with pytest.raises(RefusedError, match="is excluded: a proof shows a lie in round 5"):
                    await here.call(1, 0, method)
            assert set(asked) == {here.hosts[0].peer_id}
            for record in (progress(admission=sent.admit(culprit)), lease(1.0)):
                with pytest.raises(ProtocolError, match=r"^excluded: "):
                    door.vet_record(culprit, record)
            # Leaders that have no proof yet may have closed a group with it.
            statement = Statement.model_validate({**statement_fields(), "admission": sent.admit(culprit)})
            assert door.vet_statement(culprit, statement) == 1.0
            door.members.exclusions.agreed(10, {}, ())
            with pytest.raises(ProtocolError, match=r"^excluded: "):
                door.vet_statement(culprit, statement.model_copy(update={"round": 30}))

    run(scenario)


def test_in_an_open_run_nobody_is_out_on_others_word(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with party(2, tmp_path, admission="open") as here:
            for number in range(2):
                await here.open(number)
            me = here.hosts[1].peer_id
            here.doors[0].members.exclusions.note_lie(me, 5)
            with pytest.raises(RefusedError):
                await here.call(1, 0)
            assert here.doors[1].why_out(me) is None
            here.doors[1].members.exclusions.note_lie(me, 5)  # it has got the proof
            reason = here.doors[1].why_out(me)
            assert reason is not None
            assert reason.startswith(f"this peer may no longer take part: {me} is excluded")

    run(scenario)


def test_in_an_open_run_a_pardon_reaches_all_who_know_members(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with party(3, tmp_path, admission="open") as here:
            culprit = identity(7).peer_id
            for number in range(3):
                await here.open(number)
                here.doors[number].members.exclusions.note_lie(culprit, 5)
            run_id = here.manifest.run_id
            pardon = acts.pardon(FOUNDER, run_id, acts.Pardon(peer=culprit, round=5, at=time.time()))
            ActsFile(tmp_path / "acts0.txt").append(pardon)
            here.hosts[2].rpc.is_member = lambda peer_id: False
            here.doors[0].read_file()
            await until(lambda: all(door.admits(culprit) for door in here.doors[:2]))
            assert not here.doors[2].admits(culprit)
            here.hosts[2].rpc.is_member = lambda peer_id: True
            await here.call(2, 0)
            await until(lambda: here.doors[2].admits(culprit))
            for number in range(3):
                assert ActsFile(tmp_path / f"acts{number}.txt").read_new() == [pardon]

    run(scenario)
