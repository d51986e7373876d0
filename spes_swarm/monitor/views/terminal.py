"""The run on a terminal: one screen that is readable at 80 columns, live or printed once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from spes_swarm.base.wording import amount, cut, loss, plural, ranges, seconds, with_error
from spes_swarm.monitor.figures import curve, dead_experts, name_of, peer_words, refusals, routing_words
from spes_swarm.monitor.state import ExpertState, HistoryPoint, PeerActivity, StateSource, SwarmState

WIDTH: Final = 80
_CURVE_HEIGHT: Final = 3
_AXIS_CHARS: Final = 9
_BAR_CHARS: Final = 16
_FAULTS_SHOWN: Final = 3
# Lines of the screen besides those of peers.
_OTHER_LINES: Final = 22
_FEW_EXPERTS: Final = 48  # up to this many there is room for the age of each
_CELLS_IN_ROW: Final = 8
_DOTS_IN_ROW: Final = 64
_OLD_ROUNDS: Final = 5
_STYLES: Final[dict[PeerActivity, str]] = {
    "training": "green",
    "syncing": "cyan",
    "waiting": "blue",
    "joining": "blue",
    "leaving": "dim",
    "late": "yellow",
}


def screen(state: SwarmState, history: Sequence[HistoryPoint], *, max_peers: int) -> Panel:
    """Lays out a state for a terminal of at least 80 columns."""
    parts: list[RenderableType] = [_head(state), _losses(state, history), Text()]
    if state.peers:
        parts += [_peers(state, max_peers), Text()]
    parts.append(_experts(state))
    parts += _routing(state)
    parts += _troubles(state)
    data = f" on {state.run.data}" if state.run.data is not None else ""
    title = Text(cut(f"{state.run.run_id}  {state.run.model}{data}", WIDTH - 8), style="bold")
    return Panel(Group(*parts), title=title, title_align="left", width=WIDTH, padding=(0, 1))


def _head(state: SwarmState) -> RenderableType:
    head = Text(f"round {state.round}  ", style="bold")
    if state.status == "no_peers":
        return head.append(peer_words(state), style="bold red")
    if state.status == "live":
        done = round(state.round_progress * _BAR_CHARS)
        head.append("█" * done + "░" * (_BAR_CHARS - done), style="not bold cyan")
        head.append(f"  next in {seconds(state.next_round_s)}  ", style="not bold")
    else:
        head.append(f"as of {time.strftime('%Y-%m-%d %H:%M', time.localtime(state.time))}  ", style="not bold")
    return head.append(peer_words(state), style="bold red" if state.consensus.differ else "not bold")


def _losses(state: SwarmState, history: Sequence[HistoryPoint]) -> RenderableType:
    figures = Text(
        f"tokens {amount(state.tokens_total)}  {_speed(state)} tokens/s  "
        f"loss {loss(state.train_loss)}  eval {_evaluated(state, history)}"
    )
    values = [point.train_loss for point in history if point.train_loss is not None]
    if len(values) < 2:
        return figures
    lines = curve(values, WIDTH - 4 - _AXIS_CHARS, _CURVE_HEIGHT)
    axis = [loss(max(values)), *[""] * (_CURVE_HEIGHT - 2), loss(min(values))]
    drawn = Text("\n".join(f"{mark:>{_AXIS_CHARS - 2}} ┤{line}" for mark, line in zip(axis, lines, strict=True)))
    return Group(figures, drawn)


def _evaluated(state: SwarmState, history: Sequence[HistoryPoint]) -> str:
    """The loss on held-out text, with its round if that is not the newest."""
    words = with_error(state.eval_loss, state.eval_loss_stderr)
    measured = next((point.round for point in reversed(history) if point.eval_loss is not None), state.round)
    return words if measured >= state.round else f"{words} (round {measured})"


def _speed(state: SwarmState) -> str:
    speed = state.tokens_per_second
    return f"{speed:,.0f}" if speed < 1e9 else amount(speed)


def _peers(state: SwarmState, max_peers: int) -> RenderableType:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", expand=False)
    for title, width in (("name", 14), ("id", 8), ("state", 8), ("experts", 10)):
        table.add_column(title, width=width, no_wrap=True)
    for title, width in (("tok/s", 5), ("loss", 6), ("up", 5), ("down", 5), ("age", 4)):
        table.add_column(title, width=width, no_wrap=True, justify="right")
    # Peers that need attention come first.
    order = sorted(state.peers, key=lambda peer: (peer.agrees, peer.state != "late", peer.name.lower(), peer.peer_id))
    for peer in order[:max_peers]:
        table.add_row(
            Text(peer.name or "-", overflow="ellipsis"),
            Text(peer.short_id),
            Text(peer.state if peer.agrees else "differs", style=_STYLES[peer.state] if peer.agrees else "bold red"),
            Text(cut(ranges(peer.experts), 10)),
            Text(amount(peer.tokens_per_second)),
            Text(loss(peer.loss)),
            Text(amount(peer.bytes_sent)),
            Text(amount(peer.bytes_received)),
            Text(seconds(peer.age_s)),
        )
    if len(order) <= max_peers:
        return table
    return Group(table, Text(f"and {len(order) - max_peers} more", style="dim"))


def _experts(state: SwarmState) -> RenderableType:
    experts = state.experts
    ages = [expert.age_rounds for expert in experts if expert.age_rounds is not None]
    oldest = f", oldest {plural(max(ages), 'round')}" if ages and max(ages) > 0 else ""
    words = Text(f"experts {state.experts_covered} of {state.run.num_experts} held{oldest}  ", style="bold")
    if len(experts) <= _FEW_EXPERTS:
        words.append("expert:holders/rounds since trained", style="not bold dim")
        rows = [experts[i : i + _CELLS_IN_ROW] for i in range(0, len(experts), _CELLS_IN_ROW)]
        lines = [Text("").join(_cell(expert) for expert in row) for row in rows]
    else:
        words.append("holders of each; · none", style="not bold dim")
        rows = [experts[i : i + _DOTS_IN_ROW] for i in range(0, len(experts), _DOTS_IN_ROW)]
        lines = [
            Text(f"{row[0].expert:>5} ").append_text(Text("").join(Text(_holders(e), style=_style(e)) for e in row))
            for row in rows
        ]
    return Group(words, *lines)


def _routing(state: SwarmState) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if words := routing_words(state):
        lines.append(Text("routing ", style="bold").append(cut(words, WIDTH - 12), style="not bold"))
    if dead := dead_experts(state):
        lines.append(Text(cut(f"dead: {', '.join(dead)}", WIDTH - 4), style="bold red"))
    return lines


def _cell(expert: ExpertState) -> Text:
    age = "-" if expert.age_rounds is None else amount(expert.age_rounds)
    return Text(f"{expert.expert}:{_holders(expert)}/{age}".ljust(9), style=_style(expert))


def _holders(expert: ExpertState) -> str:
    count = len(expert.holders)
    return "·" if count == 0 else str(count) if count < 10 else "+"


def _style(expert: ExpertState) -> str:
    if not expert.holders:
        return "yellow" if expert.reserved else "bold red"
    return "green" if (expert.age_rounds or 0) <= _OLD_ROUNDS else "yellow"


def _troubles(state: SwarmState) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for fault in state.faults[-_FAULTS_SHOWN:]:
        at = time.strftime("%H:%M:%S", time.localtime(fault.time))
        lines.append(
            Text(cut(f"fault {at} {fault.kind}, reported by {name_of(state, fault.peer_id)}", WIDTH - 4), "yellow")
        )
    if state.refused:
        lines.append(Text(cut(f"records refused: {refusals(state)}", WIDTH - 4), style="yellow"))
    return lines


def print_once(console: Console, state: SwarmState, history: Sequence[HistoryPoint]) -> None:
    """Prints the screen once."""
    console.print(screen(state, history, max_peers=len(state.peers)))


async def show_live(source: StateSource, console: Console) -> None:
    """Follows the source on a terminal until cancelled."""

    def draw() -> RenderableType:
        return screen(source.state(), source.history(), max_peers=max(3, console.height - _OTHER_LINES))

    with Live(draw(), console=console, auto_refresh=False, screen=False) as live:
        while True:
            await source.wait_for_change(60.0)
            live.update(draw(), refresh=True)


async def show_lines(source: StateSource, console: Console) -> None:
    """Follows the source without a terminal: prints a line for each round, and for each change in between."""
    before: SwarmState | None = None
    while True:
        state = source.state()
        for line in changes(before, state, source.history()):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        before = state
        await source.wait_for_change(60.0)


def changes(before: SwarmState | None, state: SwarmState, history: Sequence[HistoryPoint]) -> list[str]:
    """One line for each notable change since the state `before`."""
    lines: list[str] = []
    known = {peer.peer_id: peer.state for peer in before.peers} if before is not None else {}
    for peer in state.peers:
        name = f"{peer.name or '-'} ({peer.short_id})"
        if peer.peer_id not in known:
            lines.append(f"peer {name} is present: {peer.state}, experts {ranges(peer.experts)}")
        elif known[peer.peer_id] != peer.state and "late" in (peer.state, known[peer.peer_id]):
            lines.append(f"peer {name} is {peer.state}")
    here = {peer.peer_id for peer in state.peers}
    lines += [f"peer {name_of(before, peer_id)} is gone" for peer_id in known if before and peer_id not in here]
    if before is None or before.round != state.round:
        sent = history[-1].bytes if history else 0
        lines.append(
            f"round {state.round}: {peer_words(state)}, loss {loss(state.train_loss)}, "
            f"eval {_evaluated(state, history)}, "
            f"{_speed(state)} tokens/s, experts {state.experts_covered}/{state.run.num_experts}, "
            f"{amount(state.tokens_total)} tokens, {amount(sent)}B sent"
        )
    elif before.status != state.status:
        lines.append(peer_words(state))
    dead, known_dead = dead_experts(state), dead_experts(before) if before is not None else []
    lines += [f"{name} is dead" for name in dead if name not in known_dead]
    if any(peer.dead_experts is not None for peer in state.peers):  # otherwise nobody has said so
        lines += [f"{name} gets tokens again" for name in known_dead if name not in dead]
    if before is not None and before.refused != state.refused:
        lines.append(f"records refused: {refusals(state)}")
    return lines
