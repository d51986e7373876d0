"""A member that keeps the others waiting for as long as they let it, and is honest in everything else.

`python -m tests.helpers.slow_peer MADDR DIRECTORY --kind KIND` writes DIRECTORY/rounds.jsonl, a line {"round"} for each
commit that it was part of. Killing it ends the attack. It trains nothing: it contributes the reference with a little
noise, and states few tokens for it.

Kinds: `slow-push`, the last contribution to each reducer comes just before reducers stop waiting, the others spread
over the time before, so that no pause is a stall. `slow-pull`, its results come just before members stop waiting for
reducers, keepalives until then. `slow`, both. `late-leader`, it closes no group: it holds the polls of its followers
until they pass it over, and then follows the leader that calls it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from spes_swarm.base.errors import ProtocolError, RoundError, TransferError
from spes_swarm.network import run_services
from spes_swarm.network.link.wire import Channel, open_channel
from spes_swarm.network.round.exchange import Exchange
from spes_swarm.network.round.rendezvous import Rendezvous, now
from spes_swarm.network.transport.interface import STREAM_ERRORS
from spes_swarm.port.messages import CaughtUp
from spes_swarm.protocol.meeting.gathering import POLL_S
from spes_swarm.protocol.meeting.view import View
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.plan import Part
from spes_swarm.protocol.rounds.round_state import RoundState
from tests.helpers.hostile_peer import membership

SLOW = {"slow": (True, True), "slow-push": (True, False), "slow-pull": (False, True)}  # late pushes, late results
KINDS = (*SLOW, "late-leader")
LATE_SHARE = 0.9  # of a deadline
STALL_SHARE = 0.75  # of the time after which a silent peer is given up
TOKENS = 128
NOISE_RMS = 1e-5


def deadlines(exchange: Exchange, state: RoundState) -> tuple[float, float]:
    """Seconds after the start of an exchange at which the others stop waiting for contributions, and for results."""
    limits = exchange.deadlines(state)
    return limits.collect_s, limits.result_s


class SlowExchange(Exchange):
    """Sends what it owes just before it is given up."""

    def __init__(self, *arguments: Any, late_pushes: bool, late_results: bool) -> None:
        super().__init__(*arguments)
        self._late_pushes, self._late_results = late_pushes, late_results
        self._began = 0.0

    def _begin(self, state: RoundState, slack_s: float = math.inf) -> None:
        self._began = now()
        super()._begin(state, slack_s)

    async def _push(self, state: RoundState, reducer: int, parts: list[Part], deadline: float) -> None:
        if not self._late_pushes:
            await super()._push(state, reducer, parts, deadline)
            return
        stall_s = self._limits.stall_timeout_s
        last_s = min(LATE_SHARE * deadlines(self, state)[0], len(parts) * STALL_SHARE * stall_s)
        with suppress(ProtocolError, *STREAM_ERRORS):
            async with open_channel(
                self._transport, state.group.members[reducer].peer_id, self._push_name, stall_s
            ) as channel:
                await channel.send_hello(group=state.group.id)
                for number, part in enumerate(parts, start=1):
                    await asyncio.sleep(self._began + last_s * number / len(parts) - now())
                    await channel.send(state.contributions.push_frame(part))
                await channel.end()

    async def _stream_reduced(self, state: RoundState, member: int, channel: Channel) -> None:
        due = self._began + LATE_SHARE * deadlines(self, state)[1] if self._late_results else 0.0
        while (rest_s := due - now()) > 0 and state is self._round:
            await asyncio.sleep(min(rest_s, self._limits.stall_timeout_s / 4))
            await channel.send(Frame(FrameKind.KEEPALIVE))
        await super()._stream_reduced(state, member, channel)


class LateLeader(Rendezvous):
    """Lets others follow it, and closes no group."""

    async def _serve_gather(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(POLL_S)
        return {}


_BEST_LEADER = View.best_leader


def leads_nothing(view: View, round_number: int, failed: Collection[str]) -> str | None:
    """Returns the best leader but for this process's peer."""
    return _BEST_LEADER(view, round_number, {*failed, view.me})


async def attack(maddr: str, directory: Path, kind: str) -> None:
    """Takes part until it is killed."""
    if kind in SLOW:
        pushes, results = SLOW[kind]
        await _take_part(maddr, directory, partial(SlowExchange, late_pushes=pushes, late_results=results))
    else:
        with (
            mock.patch.object(run_services, "Rendezvous", LateLeader),
            mock.patch.object(View, "best_leader", leads_nothing),
        ):
            await _take_part(maddr, directory, Exchange)


async def _take_part(maddr: str, directory: Path, make_exchange: Callable[..., Exchange]) -> None:
    rng = np.random.default_rng(0)
    async with membership(maddr, directory, make_exchange, num_experts=4, tokens_per_step=1) as member:
        held = member.presence.experts
        with (directory / "rounds.jsonl").open("a", buffering=1) as log:
            while True:
                # Leaders call again and again. A call that came during the last round was for that one: a late leader
                # that comes before its followers have passed it over would find nobody to follow.
                member.listener.called.clear()
                await member.listener.called.wait()
                noise_N = rng.normal(0, NOISE_RMS, len(member.reference_N))
                member.contribution_N[:] = member.reference_N + noise_N.astype(np.float32)
                try:
                    report = await member.services.commands.run_round(TOKENS, (TOKENS,) * len(held), leaving=False)
                except (RoundError, TransferError) as exc:
                    print("round", exc, flush=True)
                    continue
                if isinstance(report, CaughtUp):
                    print("caught up", flush=True)
                    continue
                held = report.experts.held
                seconds = {"group_s": report.group_seconds, "exchange_s": report.exchange_seconds}
                log.write(json.dumps({"round": report.commit.round, **seconds}) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Attacks until it is killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("maddr")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="slow")
    options = parser.parse_args(arguments)
    asyncio.run(attack(options.maddr, options.directory, options.kind))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
