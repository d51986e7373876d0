"""A private run of real peers: who gets in, who is refused, and how somebody is out by the next round."""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hivemind.dht import DHTNode

from scripts.testing.local_peer import PATIENCE_S, LocalPeer
from spes_swarm.base.address import peer_id_of
from spes_swarm.invite import main as invite_main
from spes_swarm.monitor.__main__ import main as monitor
from spes_swarm.network.link.dht_records import RecordWriter
from spes_swarm.network.link.rpc import RefusedError
from spes_swarm.network.link.wire import open_channel
from spes_swarm.network.transport.daemon import Daemon
from spes_swarm.network.transport.dht import DhtNode
from spes_swarm.network.transport.interface import STREAM_ERRORS
from spes_swarm.protocol.admission.grants import read_invitation
from spes_swarm.protocol.members.records import Lease, Progress
from spes_swarm.protocol.rounds.frames import FrameKind
from tests.helpers.commands import output_of
from tests.helpers.hostile_peer import joined
from tests.helpers.record_reader import read_records
from tests.helpers.records import lease, progress
from tests.helpers.rounds import identity
from tests.helpers.slow_join import launch_slow
from tests.helpers.swarm import PATIENT, Swarm, equal_digests, swarm

pytestmark = pytest.mark.swarm

STEP_S = 0.3  # most of the time, others start or invite, and no round matters


def invite(peer: LocalPeer, *arguments: str) -> str:
    """What the command prints; it may be used while the peer runs."""
    return output_of(invite_main, "--output-dir", peer.output_dir, *arguments)


def word_in(text: str) -> str:
    """The invitation in a command to join."""
    (line,) = [line for line in text.splitlines() if "--invitation" in line]
    words = shlex.split(line)
    return words[words.index("--invitation") + 1]


def refused(peer: LocalPeer) -> str:
    """The one line that a peer ends with."""
    assert peer.wait() == 2
    (line,) = [line for line in peer.text().splitlines() if line.startswith("join: ")]
    assert "Traceback" not in peer.text()
    return line


def joint_round(peers: list[LocalPeer], after: int) -> int:
    """The first round after this one that exactly these peers have committed."""
    count = len(peers)
    for peer in peers:
        peer.wait_for("round", lambda event: event["round"] > after and event["peers"] == count)
    number = max(min(n for n, round_ in p.rounds().items() if n > after and round_["peers"] == count) for p in peers)
    for peer in peers:
        peer.wait_for_round(number)
    equal_digests(peers, number)
    return number


def test_a_stranger_gets_nothing_and_a_delegate_invites_while_the_founder_is_away_and_takes_it_back(
    tmp_path: Path,
) -> None:
    with swarm(tmp_path, round=PATIENT) as running:
        running.launch = launch_slow(STEP_S)
        founder = running.found("--private", "--wait-for-peers", 3)
        assert "founding a private run" in founder.wait_for_text("founding[^\n]*")[0]
        friend_word = word_in(founder.wait_for_text("others join with.*--invitation \\S+")[0])
        stranger = refused(running.join(name="stranger"))
        assert re.search(r"this run is private: ask one of its members for an invitation.*--invitation", stranger)
        friend = running.join("--invitation", friend_word, "--wait-for-peers", 3, name="friend")
        dora_word = word_in(invite(founder, "--for", "dora", "--delegate"))
        dora = running.join("--invitation", dora_word, "--wait-for-peers", 3, name="dora")
        first = joint_round([founder, friend, dora], 0)

        asyncio.run(_intrude(founder.address(), read_invitation(friend_word).admit(peer_id_of(friend.address()))))
        number = joint_round([founder, friend, dora], max(founder.rounds()))
        assert {round_["peers"] for n, round_ in founder.rounds().items() if first <= n < number} == {3}
        assert {fault["kind"] for fault in founder.events("fault")} >= {"stranger"}

        assert founder.terminate() == 0
        eve_word = word_in(invite(dora, "--for", "eve", "--experts", "1"))
        # A mistake does not use the invitation up.
        (tmp_path / "texts").mkdir()
        (tmp_path / "texts" / "a.txt").write_text("other data " * 100, encoding="utf-8")
        wrong = running.join("--invitation", eve_word, "--data", tmp_path / "texts", name="eve", via=dora)
        assert "--data-differs" in refused(wrong)
        eve = running.join("--invitation", eve_word, "--experts", 3, name="eve", via=dora)
        eve.wait_for_text("the invitation allows at most 1 expert")
        together = joint_round([friend, dora, eve], max(dora.rounds()))
        assert len(eve.rounds()[together]["experts_held"]) == 1
        thief = refused(running.join("--invitation", eve_word, name="thief", via=friend))
        assert "the invitation has been used by others already" in thief

        assert "the running peer passes it on now" in invite(dora, "--revoke", "eve")
        assert "the invitation has been revoked" in refused(eve)
        last = max(eve.rounds())
        assert last >= together
        alone = joint_round([friend, dora], last)
        for peer in (friend, dora):
            peer.wait_for_round(alone + 2)
            assert {round_["peers"] for number, round_ in peer.rounds().items() if number > alone} == {2}
        assert "revoked" in refused(running.join("--invitation", eve_word, name="eve", via=friend))

        # Whoever was away learns of it with its first call, and keeps it.
        founder = running.join(name="peer0", via=friend)
        joint_round([founder, friend, dora], max(friend.rounds()))
        assert "revoked" in invite(founder, "--list")


async def _intrude(maddr: str, stolen: bytes) -> None:
    """As a stranger that knows the manifest, since the run is visible to all, and one admission: that of a member."""
    founder, own = peer_id_of(maddr), identity(3)
    async with joined(maddr, own) as (daemon, rpc, manifest):
        rpc.admission = stolen
        run = {"run": manifest.run_id, "round": 1, "group": bytes(32), "offset": 0, "statement": b"", "joins": True}
        for method in ("manifest", "table", "tokens", "gather", "call", "have", "tokenizer", "reach", "nonsense"):
            with pytest.raises(RefusedError, match="this run is private"):
                await rpc.call(founder, method, run, PATIENCE_S)
        for name in ("push", "pull", "fetch"):
            with suppress(*STREAM_ERRORS):
                async with open_channel(daemon.transport, founder, f"{manifest.run_id}/{name}", PATIENCE_S) as channel:
                    frame = await channel.receive(1 << 20)
                    assert (frame.kind, len(frame.payload) < 100) == (FrameKind.ERROR, True)
        expires = time.time() + 600
        async with node_of(daemon, maddr) as node:
            writer = RecordWriter(DhtNode(node), own, manifest.run_id)  # stored in this very node, at least
            for kind, record in (("progress", progress(expires, admission=stolen)), ("leases", lease(expires))):
                await writer.publish(kind, record)
    async with joined(maddr, identity(4)) as (daemon, _, manifest), node_of(daemon, maddr) as node:
        seen = {
            *await read_records(node, manifest.run_id, "progress", Progress),
            *await read_records(node, manifest.run_id, "leases", Lease),
        }
        assert founder in seen
        assert own.peer_id not in seen


@asynccontextmanager
async def node_of(daemon: Daemon, maddr: str) -> AsyncIterator[DHTNode]:
    """A DHT node that asks those of the run."""
    node = await DHTNode.create(p2p=daemon.p2p, initial_peers=[maddr], client_mode=True)
    try:
        yield node
    finally:
        await node.shutdown()


def test_the_one_line_of_a_refusal_is_all_that_a_stranger_gets(tmp_path: Path) -> None:
    """In a run that only members see. What it is told by whom it calls is measured in tests/network/test_door.py."""
    with swarm(tmp_path, admission="allow-list", visible="members") as running:
        running.launch = launch_slow(STEP_S)
        founder = running.found()
        founder.wait_for_round(1)
        seen = output_of(monitor, "--initial-peers", founder.address(), "--once", code=2)
        assert "this run is private" in seen
        assert seen.count("\n") == 1
        line = refused(running.join(name="guest"))
        found = re.search(r"this run is private: ask its founder to allow (\w+)", line)
        assert found is not None, line
        invite(founder, "--peer", found[1])
        guest = _until_admitted(running)
        joint_round([founder, guest], max(founder.rounds()))


def _until_admitted(running: Swarm) -> LocalPeer:
    """The guest once more; the founder reads its file within a second."""
    while True:
        guest = running.join(name="guest")
        if guest.wait_for_text("private|experts|round")[0] != "private":
            return guest
        guest.wait()
