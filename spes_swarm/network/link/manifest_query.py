"""Asks peers for the manifest of their run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

from spes_swarm.base.errors import BootstrapError, ProtocolError
from spes_swarm.config.manifest import Manifest, open_manifest
from spes_swarm.network.link.rpc import Rpc

_CALL_TIMEOUT_S, _LEAST_TIMEOUT_S = 10.0, 2.0
_PAUSE_S = 1.0


async def ask_for_manifest(rpc: Rpc, peers: Collection[str], run_id: str | None, timeout_s: float) -> Manifest:
    """Asks peers for the manifest of the run they take part in, until one of them sends it.

    Raises:
        BootstrapError: none of them takes part in a run yet.
        ManifestError: the manifest fails verification, or is not of `run_id`.
    """
    deadline = time.monotonic() + timeout_s
    reasons: dict[str, str] = {}
    while True:
        for peer in peers:
            left_s = max(deadline - time.monotonic(), _LEAST_TIMEOUT_S)
            try:
                answer = await rpc.call(peer, "manifest", {}, min(_CALL_TIMEOUT_S, left_s))
            except (OSError, ProtocolError) as exc:
                reasons[peer] = str(exc) or type(exc).__name__
                continue
            return open_manifest(answer, source=peer, expected_run_id=run_id)
        if time.monotonic() + _PAUSE_S > deadline:
            details = "; ".join(f"{peer}: {reason}" for peer, reason in reasons.items())
            raise BootstrapError(f"the initial peers answer, but none of them takes part in a run: {details}")
        await asyncio.sleep(_PAUSE_S)
