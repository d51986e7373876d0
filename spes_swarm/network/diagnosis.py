"""What a network process is doing, in lines for the log: its tasks, the round, the other peers and the streams.

Written at SIGUSR1, when a round has failed, and when an exchange has exceeded its deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any

from spes_swarm.base.wording import ranges
from spes_swarm.network.link.wire import Channel
from spes_swarm.protocol.members.roster import Roster
from spes_swarm.protocol.rounds.round_state import RoundState


def task_lines() -> Iterator[str]:
    """Every task of the running event loop, with the calls that it is in, the innermost last."""
    for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name()):
        yield f"task {task.get_name()}"
        awaited: Any = task.get_coro()
        while (frame := _attribute(awaited, "cr_frame", "gi_frame")) is not None:
            yield f"    {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
            awaited = _attribute(awaited, "cr_await", "gi_yieldfrom")


def _attribute(awaited: Any, *names: str) -> Any:
    return next((getattr(awaited, name) for name in names if hasattr(awaited, name)), None)


def exchange_lines(state: RoundState | None, last_heard: Mapping[int, float]) -> Iterator[str]:
    """The newest exchange: what this peer has reduced, and what it waits for from each member.

    `last_heard` is the monotonic time of each member's last contribution.
    """
    if state is None:
        yield "no exchange yet"
        return
    phase = "committed" if state.results.committed else "ended" if state.finished else "under way"
    yield (
        f"exchange of round {state.group.round} with {len(state.group.members)} members, {phase}: "
        f"{len(state.reduction.reduced)} of {state.reduction.num_to_reduce} parts reduced here, "
        f"{len(state.results.wanted) - len(state.results.missing())} of {len(state.results.wanted)} results here"
    )
    owed, now = state.reduction.outstanding(), time.monotonic()
    for number, member in enumerate(state.group.members):
        results = [index for index in state.results.missing() if state.plan.parts[index].reducer == number]
        waits = {
            "contributions to parts": ranges(owed.get(number, ()), none=""),
            "results of parts": ranges(results, none=""),
            "to fetch its results": "all" if number in state.unserved else "",
        }
        awaited = "; ".join(f"{what} {which}" for what, which in waits.items() if which) or "nothing"
        heard = f", last heard {now - last_heard[number]:.1f} s ago" if number in last_heard else ""
        yield f"    awaited from {member.peer_id}{' (this peer)' * (number == state.me)}: {awaited}{heard}"


def roster_lines(roster: Roster) -> Iterator[str]:
    """The other peers with a record, and how much their word counts."""
    present, electorate = ({view.peer_id for view in views} for views in (roster.present(), roster.electorate()))
    for peer_id, view in roster.peers.items():
        said = view.progress
        notes = (
            (said.reachable, "reachable"),
            (peer_id in present, "present"),
            (roster.reputation.has_answered(peer_id), "has answered"),
            (peer_id in electorate, "is in the electorate"),
        )
        remarks = ", ".join(note for holds, note in notes if holds)
        seen_s = time.monotonic() - view.seen_at
        yield f"peer {peer_id} {said.name!r}: {said.state}, round {said.round}, {seen_s:.1f} s ago; {remarks}"


def stream_lines() -> Iterator[str]:
    """The open streams of this process."""
    for channel in Channel.open_ones():
        age_s, idle_s = (time.monotonic() - at for at in (channel.opened_at, channel.active_at))
        yield f"stream {channel.name} with {channel.peer_id}: open for {age_s:.1f} s, idle for {idle_s:.1f} s"
