"""A stranger that is in every group: no member, without experts, work or a record, it only submits statements.

`python -m tests.helpers.intruder MADDR... --directory DIRECTORY --kind KIND` runs until it is killed, and writes
DIRECTORY/groups.jsonl, a line {"round", "parts"} for each group that it is in, with the number of parts that it is to
reduce. Its statements copy the public digests of the reference and declare the largest bandwidth that is allowed.

Kinds: `silent`, its streams stay open without an answer. `absent`, it has no streams. `lying`, it reduces properly and
hands out the averages with their sign flipped. `owing`, as `silent`, and it claims work that it never sends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ProtocolError
from spes_swarm.config.manifest import Manifest
from spes_swarm.config.round_clock import RoundClock
from spes_swarm.model.sparse_model import build_model, layout_of
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.link.wire import Channel, serve_channel
from spes_swarm.network.round.deadlines import ExchangeLimits
from spes_swarm.network.round.exchange import Exchange
from spes_swarm.network.transfer.donors import table_from_wire
from spes_swarm.network.transport.daemon import bootstrap
from spes_swarm.network.transport.interface import STREAM_ERRORS
from spes_swarm.protocol.averaging.commitments import SigningKey
from spes_swarm.protocol.bitmap import num_bitmap_bytes
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.consensus.reference import Reference, ReferenceTable
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.rounds.outcome import Bounds
from spes_swarm.protocol.rounds.plan import Part, make_plan
from spes_swarm.protocol.rounds.reducing import Reduction
from spes_swarm.protocol.rounds.round_state import RoundState
from spes_swarm.protocol.rounds.statement import Group, Statement, form_group, seal_statement
from tests.helpers.hostile_peer import joined
from tests.helpers.hosts import MEMBERS

KINDS = ("silent", "absent", "lying", "owing")
BANDWIDTH_MBPS = 1e6  # the largest that a statement may declare
CALL_S = 10.0
PAUSE_S = 0.05


class Flipped(Reduction):
    """Reduces to the mean with its sign flipped: each round undoes what it should do."""

    def _mean(self, part: Part, accumulator: Any) -> FloatArray:
        return -super()._mean(part, accumulator)


class FlippedState(RoundState):
    """The round of one that does so."""

    reduce_by = Flipped


@dataclass
class Intruder:
    """Submits a statement to every peer for each round."""

    identity: Identity
    rpc: Rpc
    manifest: Manifest
    layout: Layout
    exchange: Exchange
    kind: str
    journal: Path
    seen: set[bytes] = field(default_factory=set)  # ids of its groups
    key: SigningKey = field(default_factory=SigningKey.generate)

    @cached_property
    def certificate(self) -> bytes:
        """Shows that `key` is this peer's."""
        return self.key.certificate(self.identity, self.manifest.run_id)

    def statement(self, table: ReferenceTable) -> Statement:
        """The statement for the round after the one that a table belongs to."""
        return Statement(
            round=table.round + 1,
            held=[],
            tokens=1000 if self.kind == "owing" else 0,
            routed=[],
            rms=[0.01],
            usual_rms=[0.0, 0.0],
            vouched=b"",
            bandwidth_mbps=BANDWIDTH_MBPS,
            reachable=True,
            versions=list(table.versions),
            digests=list(table.digests),
            commits=[],
            marks=b"",
            room=0,
            fixed=True,
            leaving=False,
            leased=bytes(num_bitmap_bytes(self.layout.num_experts)),
            certificate=self.certificate,
        )

    async def haunt(self, peer_id: str) -> None:
        """Polls one peer for ever."""
        while True:
            with suppress(ProtocolError, *STREAM_ERRORS):
                await self._poll(peer_id)
            await asyncio.sleep(PAUSE_S)

    async def _poll(self, peer_id: str) -> None:
        run_id = self.manifest.run_id
        table = table_from_wire(await self.rpc.call(peer_id, "table", {}, CALL_S), self.layout)
        number = table.round + 1
        sealed = seal_statement(self.identity, run_id, self.statement(table))
        arguments = {"run": run_id, "round": number, "statement": sealed}
        answer = await self.rpc.call(peer_id, "gather", arguments, CALL_S)
        if "group" in answer:
            group = form_group(run_id, number, answer["group"], len(self.layout.blocks))
            if group.index_of(self.identity.peer_id) is not None and group.id not in self.seen:
                self.seen.add(group.id)
                self._enter(group)

    def _enter(self, group: Group) -> None:
        run = self.manifest.run
        clock = RoundClock.of(run)
        plan = make_plan(
            group,
            self.layout,
            run.round.part_elements,
            clip=run.round.clip,
            warmup_rounds=clock.round_at(run.training.warmup_steps),
            experts=clock.synchronises_experts(group.round),
        )
        me = group.index_of(self.identity.peer_id)
        assert me is not None
        with self.journal.open("a") as file:
            num_parts = sum(part.reducer == me for part in plan.parts)
            file.write(json.dumps({"round": group.round, "parts": num_parts}) + "\n")
        if self.kind == "lying":
            values_N = np.zeros(self.layout.num_elements, np.float32)  # differences need no reference
            codecs = get_codec(run.round.codec), get_codec(run.round.codec_of_results)
            bounds = Bounds(max_update_rms=1e30, bounded=False)
            reference = Reference(self.layout, values_N)
            state = FlippedState(
                group, plan, me, reference, values_N, codecs[0], bounds, self.key, result_codec=codecs[1]
            )
            self.exchange._begin(state)


async def attack(maddrs: Sequence[str], directory: Path, kind: str) -> None:
    """Goes on until it is killed."""
    identity = Identity.load_or_create(directory / "identity.key")
    async with joined(maddrs[0], identity) as (daemon, rpc, manifest):
        run = manifest.run
        layout = layout_of(build_model(run.model.type, run.model.settings, 0, "cpu", on_meta=True))
        limits = ExchangeLimits.of(run.round)
        exchange = Exchange(daemon.transport, rpc, manifest.run_id, limits, lambda peer_id, error: None, MEMBERS)
        if kind == "lying":
            await exchange.start()
        elif kind != "absent":
            for name in ("push", "pull"):
                await serve_channel(
                    daemon.transport, f"{manifest.run_id}/{name}", _say_nothing, 1e6, lambda *fault: None, MEMBERS
                )
        intruder = Intruder(identity, rpc, manifest, layout, exchange, kind, directory / "groups.jsonl")
        peers = await bootstrap(daemon, list(maddrs), 60.0)
        print("connected", flush=True)
        await asyncio.gather(*(intruder.haunt(peer_id) for peer_id in peers))


async def _say_nothing(channel: Channel) -> None:
    await asyncio.Event().wait()


def main(arguments: Sequence[str]) -> int:
    """Attacks until it is killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("maddrs", nargs="+", metavar="MADDR")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--kind", choices=KINDS, required=True)
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    asyncio.run(attack(options.maddrs, options.directory, options.kind))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
