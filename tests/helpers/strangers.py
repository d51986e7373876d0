"""Strangers for tests and measurements: daemons with keys of their own that are connected, and take part in nothing.

`python -m tests.helpers.strangers MADDR... --kind KIND` runs until it is killed. Kinds: `clock`, four peers that say
that it is 10^6 s later, then right again, earlier, and right, for some seconds each. `ghosts`, fifty records with
absurd claims of rounds, steps and speeds, and four peers that answer calls, say that they train and come to no round.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from hivemind.dht import DHTNode

from spes_swarm.network.link.dht_records import RecordWriter
from spes_swarm.network.transport.dht import DhtNode
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.members.records import Progress
from tests.helpers.hostile_peer import joined
from tests.helpers.records import progress

GHOST_LIFE_S = 600.0
CLAIMS: list[dict[str, Any]] = [
    {"round": 1000},
    {"round": 2**60},
    {"round": 0},
    {"tokens_per_step": 2**50},
    {"tokens_per_second": 1e300},
]
NUM_CONNECTED, NUM_GHOSTS = 4, 50
LIE_S = 5.0
RENEW_S = 12.0  # as often as honest records in the quickstart: one that is not renewed is stale, whatever it claims


class Strangers:
    """Some connected peers without a record; all say the same of the time.

    Attributes:
        ahead_s: how far ahead of the truth they say it is.
    """

    def __init__(self) -> None:
        self.ahead_s = 0.0

    async def tell_time(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        """The `clock` service."""
        del peer_id, request
        return {"time": time.time() + self.ahead_s}


@asynccontextmanager
async def connected_strangers(maddrs: Sequence[str], identities: Sequence[Identity]) -> AsyncIterator[Strangers]:
    """One stranger for each identity, connected to all of these addresses."""
    strangers = Strangers()
    async with AsyncExitStack() as stack:
        for own in identities:
            daemon, rpc, _ = await stack.enter_async_context(joined(maddrs[0], own))
            await rpc.serve("clock", strangers.tell_time)
            for maddr in maddrs[1:]:
                await daemon.connect(maddr, 60.0)
        yield strangers


def ghost_record(expires: float, **claims: Any) -> Progress:
    """What a peer in training says of itself, with these claims."""
    return progress(expires, **{"name": "ghost", "round": 1, "loss": 1.0, "experts": [], **claims})


async def haunt(
    maddr: str, own: Identity, ghosts: Sequence[Identity], claims: Sequence[dict[str, Any]]
) -> AsyncGenerator[int, None]:
    """Stores a record for each ghost, with the claims in turn, each time it is asked; yields how many are in.

    Nobody stands behind these records.
    """
    async with joined(maddr, own) as (daemon, _, manifest):
        node = await DHTNode.create(p2p=daemon.p2p, initial_peers=[maddr], client_mode=True)
        try:
            while True:
                stored = 0
                for i, ghost in enumerate(ghosts):
                    record = ghost_record(time.time() + GHOST_LIFE_S, **claims[i % len(claims)])
                    stored += await RecordWriter(DhtNode(node), ghost, manifest.run_id).publish("progress", record)
                yield stored
        finally:
            await node.shutdown()


async def attack(maddrs: Sequence[str], kind: str, directory: Path) -> None:
    """Goes on until it is killed."""
    numbers = itertools.count()

    def identities(count: int) -> list[Identity]:
        return [Identity.load_or_create(directory / f"{next(numbers)}.key") for _ in range(count)]

    connected = identities(NUM_CONNECTED)
    async with connected_strangers(maddrs, connected) as strangers:
        if kind == "ghosts":
            ghosts, own = [*connected, *identities(NUM_GHOSTS)], identities(1)[0]
            async for stored in haunt(maddrs[0], own, ghosts, CLAIMS):
                print("records stored:", stored, flush=True)
                await asyncio.sleep(RENEW_S)
        print("connected", flush=True)
        for strangers.ahead_s in itertools.cycle((1e6, 0.0, -1e6, 0.0)):
            await asyncio.sleep(LIE_S)


def main(arguments: Sequence[str]) -> int:
    """Attacks until it is killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("maddrs", nargs="+", metavar="MADDR")
    parser.add_argument("--kind", choices=("clock", "ghosts"), required=True)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="strangers-") as directory:
        asyncio.run(attack(options.maddrs, options.kind, Path(directory)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
