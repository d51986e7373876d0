"""Console output of a peer: start-up lines, then a live panel on a terminal or one line per round elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spes_swarm.base.arguments import show_any_text
from spes_swarm.base.wording import loss_with_error, plural, ranges
from spes_swarm.metrics import events
from spes_swarm.peer.output import lasting
from spes_swarm.port.messages import SwarmView
from spes_swarm.protocol.consensus.lineage import BRANCH
from spes_swarm.protocol.members.twin import TWIN
from spes_swarm.protocol.rounds.track_record import STANDSTILL
from spes_swarm.training.setup import TrainingStatus

_LOGGER = logging.getLogger(__name__)
_REFRESH_S = 0.5
_MAX_FAULT_CHARS = 200
_PEERS_SHOWN = 6
View = Callable[[], SwarmView | None]


class PeerConsole:
    """Writes to standard output, unless it is quiet, and outlives it.

    Text from other peers is never interpreted as markup.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        show_any_text()
        self._console = Console(file=lasting(sys.stdout), highlight=False, soft_wrap=True, quiet=quiet)

    def say(self, text: str) -> None:
        """Prints one plain line, which also goes to the log."""
        _LOGGER.info("%s", text)
        self._console.print(text, markup=False)

    def command(self, text: str) -> None:
        """Prints a command to copy, on a line of its own."""
        self._console.print("  " + text, markup=False, style="bold")

    @property
    def is_terminal(self) -> bool:
        """True if a live panel can be shown."""
        return self._console.is_terminal

    def live(self, status: TrainingStatus, title: str, metrics: Path, view: View = lambda: None) -> LivePanel:
        """Returns a panel that shows `status` while it is open, and says that all faults are in the file `metrics`.

        `view`: what this peer knows of the others.
        """
        return LivePanel(self._console, status, title, metrics, view)


class LivePanel:
    """Redraws the panel twice a second in its own thread; does nothing without a terminal."""

    def __init__(
        self, console: Console, status: TrainingStatus, title: str, metrics: Path, view: View = lambda: None
    ) -> None:
        self._status = status
        self._view = view
        self._title = title
        self._metrics = metrics
        shown = console.is_terminal and not console.quiet
        self._live = Live(console=console, auto_refresh=False, transient=False) if shown else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="spes-panel", daemon=True)

    def __enter__(self) -> LivePanel:
        if self._live is not None:
            self._live.start()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._stop.set()
            self._thread.join()
            self._live.update(self._render(), refresh=True)
            self._live.stop()

    def _redraw(self) -> None:
        assert self._live is not None
        while not self._stop.wait(_REFRESH_S):
            self._live.update(self._render(), refresh=True)

    def _render(self) -> Panel:
        status = self._status
        table = Table.grid(padding=(0, 2))
        table.add_row("round", Text(str(status.round)), "peers", Text(str(status.peers)))
        table.add_row("loss", Text(loss_with_error(status.loss)), "eval loss", Text(last_eval_loss(status)))
        table.add_row(
            "tokens/s", Text(f"{status.tokens_per_second:,.0f}"), "my experts", Text(experts_text(status.held))
        )
        table.add_row("TFLOP/s", Text(f"{status.teraflops:,.3g}"), "MFU", Text(mfu_text(status.mfu)))
        table.add_row(
            "last round",
            Text(f"{status.round_seconds:.1f} s, {status.round_megabytes:.2f} MB"),
            "faults seen",
            Text(str(status.faults)),
        )
        below = Table.grid(padding=(0, 2))
        below.add_row(
            ProgressBar(total=1.0, completed=status.progress, width=24),
            Text(f"{status.phase}, local step {status.step}", style="dim"),
        )
        faults = [Text(line, style="dim") for line in fault_lines(status, self._metrics)]
        faults = [*(Text(line, style="yellow") for line in exclusion_lines(self._view())), *faults]
        return Panel(Group(table, below, *faults), title=Text(self._title), expand=False)


def experts_text(experts: tuple[int, ...]) -> str:
    """Formats experts as ranges: 0-3, 7."""
    return ranges(sorted(experts), ", ", "none")


def fault_lines(status: TrainingStatus, metrics: Path) -> list[str]:
    """Formats the last fault, and where to read all of them; nothing without a fault."""
    if not status.last_fault:
        return []
    fault = "".join(char if char.isprintable() else " " for char in status.last_fault)  # a peer may have worded it
    return [f"last fault: {fault}"[:_MAX_FAULT_CHARS], f"all faults: grep fault {metrics}"]


def exclusion_lines(view: SwarmView | None) -> list[str]:
    """Lists the excluded peers and those without duty; empty if there are none."""
    found = () if view is None else (("excluded", view.excluded), ("without duty", view.without_duty))
    return [f"{what}: {_short_ids(peers)}" for what, peers in found if peers]


def _short_ids(peers: Sequence[str]) -> str:
    more = f" and {len(peers) - _PEERS_SHOWN} more" if len(peers) > _PEERS_SHOWN else ""
    return ", ".join(peer_id[-8:] for peer_id in peers[:_PEERS_SHOWN]) + more


def said_fault(fault: events.Fault) -> str | None:
    """Formats a fault that is printed when it happens: an alarm, or a lie that excludes a peer; None for others."""
    if fault.kind in (TWIN, STANDSTILL, BRANCH):
        return fault.detail
    return f"peer {fault.peer}: {fault.detail}" if fault.kind == "proven" else None


def mfu_text(mfu: float | None) -> str:
    """Formats the share of the device's peak: 41.3 %; "-" if that is unknown, as on a CPU."""
    return "-" if mfu is None else f"{100 * mfu:.1f} %"


def round_line(status: TrainingStatus) -> str:
    """Formats the line for a round. The eval loss is included only if it was measured in this round."""
    measured = status.eval_loss is not None and status.eval_round == status.round
    eval_loss = f", eval loss {loss_with_error(status.eval_loss, status.eval_loss_stderr)}" if measured else ""
    return (
        f"round {status.round}: {plural(status.peers, 'peer')}, loss {loss_with_error(status.loss)}{eval_loss}, "
        f"{status.tokens_per_second:,.0f} tokens/s, {status.round_seconds:.1f} s, {status.round_megabytes:.2f} MB"
    )


def last_eval_loss(status: TrainingStatus) -> str:
    """Formats the last eval loss with the round of its measurement: 1.246 ± 0.031 (round 20)."""
    words = loss_with_error(status.eval_loss, status.eval_loss_stderr)
    return words if status.eval_loss is None else f"{words} (round {status.eval_round})"
