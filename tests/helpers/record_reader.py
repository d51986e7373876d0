"""Reads the records of a run from the DHT, as a member does that searches it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hivemind.dht import DHTNode

from spes_swarm.network.link.dht_records import RunRecordValidator, accept, everybody
from spes_swarm.network.link.known_records import KnownRecords
from spes_swarm.network.transport.dht import DhtNode
from spes_swarm.protocol.members.signed import Model


async def read_records(
    node: DHTNode, run_id: str, kind: str, schema: type[Model], now: Callable[[], float] = time.time
) -> dict[str, Model]:
    """The valid, unexpired records of a kind by peer id."""
    nobody: Any = None  # is asked
    validator = RunRecordValidator(run_id, now)
    known = KnownRecords(DhtNode(node), nobody, validator, run_id, now, everybody, accept, members=tuple, near=tuple)
    await known.search(kind)
    return known.of(kind, schema)
