"""The run on a terminal: one screen as wide as the terminal, live or printed once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from spes_swarm.base.wording import amount, cut, loss, plural, ranges, seconds, with_error
from spes_swarm.monitor.figures import (
    accusations,
    agreement,
    curve,
    dead_experts,
    name_of,
    peer_words,
    refusals,
    routing_words,
)
from spes_swarm.monitor.state import ExpertState, HistoryPoint, PeerActivity, PeerState, StateSource, SwarmState
from spes_swarm.protocol.rounds.track_record import STANDSTILL

_LEAST_WIDTH: Final = 40
_FRAME_CHARS: Final = 4
_CURVE_HEIGHT: Final = 3
_AXIS_CHARS: Final = 9
_BAR_CHARS: Final = 16
_FAULTS_SHOWN: Final = 3
_ACCUSED_SHOWN: Final = 5
_LEAST_PEERS: Final = 3
_FEW_EXPERTS: Final = 48  # up to this many there is room for the figures of each
_DOTS: Final = 16  # a row of a map has a multiple of this
_OLD_ROUNDS: Final = 5
_STYLES: Final[dict[PeerActivity, str]] = {
    "training": "green",
    "syncing": "cyan",
    "waiting": "blue",
    "joining": "blue",
    "leaving": "dim",
    "left": "dim",
    "late": "yellow",
}


def screen(state: SwarmState, history: Sequence[HistoryPoint], *, width: int, max_peers: int) -> Panel:
    """Lays out a state for a terminal of `width` columns."""
    width = max(width, _LEAST_WIDTH)
    room = width - _FRAME_CHARS
    parts: list[RenderableType] = [_head(state), _losses(state, history, room), Text()]
    if state.peers:
        parts += [_peers(state, room, max_peers), Text()]
    parts.append(_experts(state, room))
    parts += _routing(state)
    parts += _troubles(state)
    data = f" on {state.run.data}" if state.run.data is not None else ""
    title = Text(cut(f"{state.run.run_id}  {state.run.model}{data}", room - 4), style="bold")
    return Panel(Group(*parts), title=title, title_align="left", width=width, padding=(0, 1))


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


def _losses(state: SwarmState, history: Sequence[HistoryPoint], room: int) -> RenderableType:
    figures = ""
    for part in (
        f"tokens {amount(state.tokens_total)}",
        f"tokens/s {_speed(state.tokens_per_second)}",
        f"loss {loss(state.train_loss)}",
        f"eval loss {_evaluated(state, history, state.round)}",
    ):
        fits = len(figures.rpartition("\n")[2]) + 2 + len(part) <= room
        figures += ("  " if fits else "\n") * bool(figures) + part
    values = [point.train_loss for point in history if point.train_loss is not None]
    if len(values) < 2:
        return Text(figures)
    lines = curve(values, room - _AXIS_CHARS, _CURVE_HEIGHT)
    axis = [loss(max(values)), *[""] * (_CURVE_HEIGHT - 2), loss(min(values))]
    drawn = Text("\n".join(f"{mark:>{_AXIS_CHARS - 2}} ┤{line}" for mark, line in zip(axis, lines, strict=True)))
    return Group(Text(figures), drawn)


def _evaluated(state: SwarmState, history: Sequence[HistoryPoint], number: int) -> str:
    """The last loss on held-out text up to a round, with its round if that is another one."""
    last = next((p for p in reversed(history) if p.round <= number and p.eval_loss is not None), None)
    measured = last.round if last is not None else state.eval_round or number
    of = last or state  # which may have one from before the history begins
    if of.eval_loss is None or measured > number:
        return "-"
    return with_error(of.eval_loss, of.eval_loss_stderr) + (f" (round {measured})" if measured < number else "")


def _speed(speed: float) -> str:
    return f"{speed:,.0f}" if speed < 1e9 else amount(speed)


@dataclass(frozen=True)
class _Column:
    title: str  # of one or two lines
    text: Callable[[PeerState], str]
    rank: int  # where there is no room for all, those of the highest ranks are left out
    most: int = 0  # columns of the terminal that it takes if its values need them; 0: as many as the title
    right: bool = True


def _state_word(peer: PeerState) -> str:
    return peer.state if peer.agrees else "differs"


_ID: Final = _Column("id", lambda peer: peer.short_id, 8, 8, right=False)
_COLUMNS: Final = (
    _Column("name", lambda peer: peer.name or "-", 0, 40, right=False),
    _ID,
    _Column("state", _state_word, 1, 8, right=False),
    _Column("experts", lambda peer: ranges(peer.experts), 2, 40, right=False),
    _Column("tokens/s", lambda peer: amount(peer.tokens_per_second), 3),
    _Column("loss", lambda peer: loss(peer.loss), 4, 6),
    _Column("sent in\nround", lambda peer: f"{amount(peer.bytes_sent)}B", 6),
    _Column("received\nin round", lambda peer: f"{amount(peer.bytes_received)}B", 7),
    _Column("last\nreport", lambda peer: f"{seconds(peer.age_s)} ago", 5, 9),
)
_FLEXIBLE_CHARS: Final = 10  # the least width of a column that can take up to 40


def _peers(state: SwarmState, room: int, max_peers: int) -> RenderableType:
    # Peers that need attention come first.
    order = sorted(
        state.peers,
        key=lambda peer: (peer.agrees, peer.state == "left", peer.state != "late", peer.name.lower(), peer.peer_id),
    )
    shown = order[:max_peers]
    widths: dict[_Column, int] = {}
    wanted: dict[_Column, int] = {}
    for column in sorted(_COLUMNS, key=lambda column: column.rank):
        title = max(map(len, column.title.split("\n")))
        need = max([title, *(cell_len(column.text(peer)) for peer in shown)])
        wanted[column] = min(need, max(column.most, title))
        width = min(wanted[column], max(title, _FLEXIBLE_CHARS))
        if sum(widths.values()) + len(widths) + width <= room:
            widths[column] = width
    spare = room - sum(widths.values()) - (len(widths) - 1)
    for column in widths:
        more = min(spare, wanted[column] - widths[column])
        widths[column] += more
        spare -= more
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", expand=False)
    columns = [column for column in _COLUMNS if column in widths]
    for column in columns:
        justify, width = "right" if column.right else "left", widths[column]
        table.add_column(column.title, width=width, no_wrap=True, justify=justify, vertical="bottom")  # type: ignore[arg-type]
    for peer in shown:
        if _ID not in widths and not peer.name:
            peer = replace(peer, name=peer.short_id)
        styles = {"state": _STYLES[peer.state] if peer.agrees else "bold red"}
        table.add_row(*(Text(c.text(peer), styles.get(c.title, ""), overflow="ellipsis") for c in columns))
    if len(order) <= max_peers:
        return table
    return Group(table, Text(f"and {len(order) - max_peers} more", style="dim"))


def _experts(state: SwarmState, room: int) -> RenderableType:
    experts = state.experts
    ages = [expert.age_rounds for expert in experts if expert.age_rounds is not None]
    oldest = f", last trained up to {plural(max(ages), 'round')} ago" if ages and max(ages) > 0 else ""
    words = Text(f"experts {state.experts_covered} of {state.run.num_experts} held{oldest}", style="bold")
    if len(experts) <= _FEW_EXPERTS:
        return Group(words, *_cells(experts, room, with_ages=bool(oldest)))
    words.append("  holders of each; · none, + ten or more", style="not bold dim")
    dots = max(1, (room - 6) // _DOTS) * _DOTS
    rows = [experts[i : i + dots] for i in range(0, len(experts), dots)]
    lines = [
        Text(f"{row[0].expert:>5} ").append_text(Text("").join(Text(_holders(e), style=_style(e)) for e in row))
        for row in rows
    ]
    return Group(words, *lines)


def _cells(experts: Sequence[ExpertState], room: int, *, with_ages: bool) -> list[Text]:
    """A line for each figure of the experts, with a column for each expert."""
    figures: list[tuple[str, Callable[[ExpertState], str]]] = [
        ("expert", lambda expert: str(expert.expert)),
        ("holders", lambda expert: amount(len(expert.holders))),
    ]
    if with_ages:
        figures.append(("rounds untrained", lambda e: "-" if e.age_rounds is None else amount(e.age_rounds)))
    label = max(len(name) for name, _ in figures)
    width = 1 + max(2, *(len(text(expert)) for _, text in figures for expert in experts))
    in_row = max(1, (room - label) // width)
    lines = []
    for row in (experts[i : i + in_row] for i in range(0, len(experts), in_row)):
        for name, text in figures:
            line = Text(name.ljust(label), style="dim")
            for expert in row:
                style = "" if name == "expert" else _style(expert)
                line.append(f"{text(expert):>{width}}", style=f"not dim {style}")
            lines.append(line)
    return lines


def _routing(state: SwarmState) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if words := routing_words(state):
        lines.append(Text("routing: ", style="bold").append(words, style="not bold"))
    if dead := dead_experts(state):
        lines.append(Text(f"dead: {', '.join(dead)}", style="bold red"))
    return lines


def _holders(expert: ExpertState) -> str:
    count = len(expert.holders)
    return "·" if count == 0 else str(count) if count < 10 else "+"


def _style(expert: ExpertState) -> str:
    if not expert.holders:
        return "yellow" if expert.reserved else "bold red"
    return "green" if (expert.age_rounds or 0) <= _OLD_ROUNDS else "yellow"


def _troubles(state: SwarmState) -> list[RenderableType]:
    accused = list(accusations(state).values())
    lines: list[RenderableType] = [Text(line, "yellow") for line in accused[:_ACCUSED_SHOWN]]
    if len(accused) > _ACCUSED_SHOWN:
        lines.append(Text(f"and {len(accused) - _ACCUSED_SHOWN} more: --faults lists all", "dim"))
    for fault in state.faults[-_FAULTS_SHOWN:]:
        at = time.strftime("%H:%M:%S", time.localtime(fault.time))
        style = "bold red" if fault.kind == STANDSTILL else "yellow"
        lines.append(Text(f"fault at {at}: {fault.kind}, reported by {name_of(state, fault.peer_id)}", style))
    if state.refused:
        lines.append(Text(f"records refused: {refusals(state)}", style="yellow"))
    return lines


def print_once(console: Console, state: SwarmState, history: Sequence[HistoryPoint]) -> None:
    """Prints the screen once."""
    console.print(screen(state, history, width=console.width, max_peers=len(state.peers)))


async def show_live(source: StateSource, console: Console) -> None:
    """Follows the source on a terminal until cancelled."""

    def draw() -> RenderableType:
        state, history, width = source.state(), source.history(), console.width
        without = screen(state, history, width=width, max_peers=0)
        left = console.height - len(console.render_lines(without)) - 1
        return screen(state, history, width=width, max_peers=max(_LEAST_PEERS, left))

    with Live(draw(), console=console, auto_refresh=False, screen=False) as live:
        while True:
            await source.wait_for_change(60.0)
            live.update(draw(), refresh=True)


async def show_lines(source: StateSource, console: Console) -> None:
    """Follows the source without a terminal: prints a line for each round, and for each change in between."""
    before: SwarmState | None = None
    shown = 0  # the last round with a line
    while True:
        state, history = source.state(), source.history()
        for line in changes(before, state, history, shown):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        before, shown = state, history[-1].round if history else 0
        await source.wait_for_change(60.0)


def changes(before: SwarmState | None, state: SwarmState, history: Sequence[HistoryPoint], shown: int) -> list[str]:
    """One line for each notable change since the state `before`, and for each round after `shown`."""
    lines: list[str] = []
    known = {peer.peer_id: peer.state for peer in before.peers} if before is not None else {}
    for peer in state.peers:
        name = f"{peer.name or '-'} ({peer.short_id})"
        if peer.peer_id not in known:
            lines.append(f"peer {name} is present: {peer.state}, experts {ranges(peer.experts)}")
        elif known[peer.peer_id] != peer.state and {"late", "left"} & {peer.state, known[peer.peer_id]}:
            lines.append(f"peer {name} {'has left' if peer.state == 'left' else f'is {peer.state}'}")
    here = {peer.peer_id for peer in state.peers}
    gone = [peer_id for peer_id, was in known.items() if peer_id not in here and was != "left"]
    lines += [f"peer {name_of(before, peer_id)} is gone" for peer_id in gone if before]
    new = [point for point in history if point.round > shown]
    lines += [_round_line(point, state, history) for point in (new[-1:] if before is None else new)]
    if (not new) if before is None else (before.status != state.status):
        lines.append(peer_words(state))
    dead, known_dead = dead_experts(state), dead_experts(before) if before is not None else []
    lines += [f"{name} is dead" for name in dead if name not in known_dead]
    if any(peer.dead_experts is not None for peer in state.peers):  # otherwise nobody has said so
        lines += [f"{name} gets tokens again" for name in known_dead if name not in dead]
    known_accused = accusations(before) if before is not None else {}
    lines += [line for key, line in accusations(state).items() if key not in known_accused]
    if before is not None and before.refused != state.refused:
        lines.append(f"records refused: {refusals(state)}")
    return lines


def _round_line(point: HistoryPoint, state: SwarmState, history: Sequence[HistoryPoint]) -> str:
    return (
        f"round {point.round}: {plural(point.peers, 'peer')}{agreement(state)}, loss {loss(point.train_loss)}, "
        f"eval {_evaluated(state, history, point.round)}, {_speed(point.tokens_per_second)} tokens/s, "
        f"experts {point.experts_covered}/{state.run.num_experts}, {amount(point.tokens)} tokens, "
        f"{amount(point.bytes)}B sent"
    )
