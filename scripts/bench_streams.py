"""Counts the streams whose last bytes are lost, depending on which side closes first.

    .venv/bin/python scripts/bench_streams.py --streams 10000 --closes server

A server sends frames over a stream to a client that begins to read a few milliseconds later, as on a busy machine. Each
side has its own p2pd on 127.0.0.1. Prints as JSON the number of streams, and of those that ended before the last frame.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.daemon import Daemon, bootstrap
from spes_swarm.network.link.wire import STREAM_ERRORS, Channel, open_channel
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.rounds.frames import Frame, FrameKind

NAME, MADDR, TIMEOUT_S = "bench", "/ip4/127.0.0.1/tcp/0", 60.0
NUM_FRAMES, FRAME_BYTES, LATE_S = 6, 100_000, 0.005


async def measure(directory: Path, num_streams: int, server_closes: bool) -> dict[str, Any]:
    """Opens the streams one after the other, and counts those that were cut off."""
    identities = [Identity.load_or_create(directory / f"{role}.key") for role in ("server", "client")]
    server, client = [await Daemon.start(identity.path, [MADDR]) for identity in identities]
    sent = asyncio.Event()

    async def serve(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(str(info.peer_id), reader, writer, TIMEOUT_S)
        for part in range(NUM_FRAMES):
            await channel.send(Frame(FrameKind.DATA, part=part, payload=bytes(FRAME_BYTES)))
        await channel.send(Frame(FrameKind.END))
        sent.set()
        if not server_closes:
            await channel.wait_until_closed()
        channel.close()

    async def is_whole() -> bool:
        sent.clear()
        try:
            async with open_channel(client.p2p, server.peer_id, NAME, TIMEOUT_S) as channel:
                await channel.send_hello()
                await sent.wait()
                await asyncio.sleep(LATE_S)
                while (await channel.receive(FRAME_BYTES)).kind is not FrameKind.END:
                    pass
        except (ProtocolError, *STREAM_ERRORS):
            return False
        return True

    try:
        await server.p2p.add_binary_stream_handler(NAME, serve)
        await bootstrap(client, [maddr for maddr in await server.maddrs() if "127.0.0.1" in maddr], TIMEOUT_S)
        lost = [not await is_whole() for _ in range(num_streams)]
    finally:
        await client.stop()
        await server.stop()
    return {"streams": num_streams, "cut_off": sum(lost)}


def main() -> None:
    """Measures and prints one configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--closes", choices=("server", "client"), required=True)
    arguments = parser.parse_args()
    with TemporaryDirectory() as directory:
        print(json.dumps(asyncio.run(measure(Path(directory), arguments.streams, arguments.closes == "server"))))


if __name__ == "__main__":
    main()
