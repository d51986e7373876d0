"""Where a node stores what it writes; the nodes are real."""

from __future__ import annotations

import time

import pytest
from hivemind.dht.routing import DHTID

from spes_swarm.network.link.dht_records import RunRecordValidator, record_key
from spes_swarm.network.transport.dht import DhtNode
from spes_swarm.protocol.members.signed import seal
from tests.helpers.hosts import Host, hosts, run
from tests.helpers.records import lease
from tests.helpers.rounds import identity

RUN = "run-1"
KEY = record_key(RUN, "leases")
_REPLICAS = 5


@pytest.mark.slow
def test_five_nodes_store_a_record_and_others_stand_in_for_those_that_are_gone() -> None:
    async def scenario() -> None:
        async with hosts(8) as peers:
            nodes: dict[str, DhtNode] = {}
            for host in peers:
                known = await peers[0].maddrs() if nodes else []
                if known:
                    await host.connect(peers[0])
                node = await DhtNode.start(
                    host.daemon.p2p, known, RunRecordValidator(RUN, time.time), time.time, None, client_mode=False
                )
                nodes[host.peer_id] = node
            writer, nearest = peers[0].peer_id, sorted(nodes, key=lambda peer: distance(nodes[peer]))
            assert await store(nodes, peers[0], time.time() + 60) == set(nearest[:_REPLICAS])
            gone = next(peer for peer in nearest if peer != writer)
            await nodes.pop(gone).stop()
            await next(host for host in peers if host.peer_id == gone).daemon.stop()
            left = [peer for peer in nearest if peer != gone]
            expires = time.time() + 70
            assert await store(nodes, peers[0], expires) == set(left[:_REPLICAS])
            assert await store(nodes, peers[0], expires - 1) == set(), "nobody takes an older one"
            for node in nodes.values():
                await node.stop()

    run(scenario)


def distance(node: DhtNode) -> int:
    """To the key."""
    own: DHTID = node._node.node_id
    return int(own.xor_distance(DHTID.generate(source=KEY)))


async def store(nodes: dict[str, DhtNode], host: Host, expires: float) -> set[str]:
    """Who has a new record; they have it as it was written."""
    sealed = seal(identity(0), "leases", RUN, lease(expires))
    taken = await nodes[host.peer_id].store(KEY, sealed, expires, host.peer_id)
    assert taken == {peer for peer, node in nodes.items() if (host.peer_id, sealed, expires) in node.stored(KEY)}
    return taken
