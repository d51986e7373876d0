"""A figure of a run for a report: loss, speed, peers and coverage by round. Needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from spes_swarm.base.errors import DataError, UserError
from spes_swarm.base.wording import amount, plural, seconds
from spes_swarm.monitor.state import HistoryPoint, SwarmState

_INCHES: Final = (11.0, 6.5)
_DOTS_PER_INCH: Final = 150
# Okabe and Ito's palette: distinguishable with colour blindness, and in grey.
_BLUE, _ORANGE, _GREEN, _PURPLE, _GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"


def plot_run(state: SwarmState, history: Sequence[HistoryPoint], path: Path) -> None:
    """Draws a run to a file, whose suffix selects the format (png, svg, pdf).

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
        DataError: there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator
    except ImportError as exc:
        raise UserError("--plot needs matplotlib: pip install 'spes-swarm[plot]'") from exc
    if not history:
        raise DataError("there is no committed round to plot")
    figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    (top_left, top_right), (bottom_left, bottom_right) = figure.subplots(2, 2, sharex=True)

    def draw(axes: Any, value: Callable[[HistoryPoint], float | None], **style: Any) -> None:
        drawn = [(point.round, value(point)) for point in history]
        xs, ys = [x for x, y in drawn if y is not None], [y for _, y in drawn if y is not None]
        if ys:
            marker = "o" if len(ys) == 1 else None  # a line of one point is invisible
            axes.plot(xs, ys, linewidth=1.6, marker=marker, markersize=4, **style)

    draw(top_left, lambda point: point.train_loss, color=_BLUE, label="training")
    draw(top_left, lambda point: point.eval_loss, color=_ORANGE, label="held-out text", linestyle="--")
    band = [
        (point.round, point.eval_loss - point.eval_loss_stderr, point.eval_loss + point.eval_loss_stderr)
        for point in history
        if point.eval_loss is not None and point.eval_loss_stderr is not None
    ]
    if band:
        top_left.fill_between(*zip(*band, strict=True), color=_ORANGE, alpha=0.15, linewidth=0)
    _name(top_left, "loss (median over peers)")
    if top_left.get_legend_handles_labels()[0]:
        top_left.legend(frameon=False)
    draw(top_right, lambda point: point.tokens_per_second, color=_GREEN)
    _name(top_right, "tokens per second, all peers")
    top_right.set_ylim(bottom=0)
    top_right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(max(value, 0))))
    draw(bottom_left, lambda point: point.peers, color=_PURPLE, drawstyle="steps-mid")
    _name(bottom_left, "peers in the round")
    draw(bottom_right, lambda point: point.experts_covered, color=_BLUE, drawstyle="steps-mid")
    bottom_right.axhline(state.run.num_experts, color=_GREY, linewidth=0.8, linestyle=":")
    _name(bottom_right, f"experts held, of {state.run.num_experts}")
    for axes in (bottom_left, bottom_right):
        axes.set_ylim(bottom=0)
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(
        f"{state.run.run_id}: {state.run.model}, {plural(history[-1].round, 'round')}, "
        f"{amount(state.tokens_total)} tokens in {seconds(history[-1].time - history[0].time)}",
        fontsize=11,
    )
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as exc:
        raise UserError(f"{path} cannot be written: {getattr(exc, 'strerror', None) or exc}") from exc


def _name(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
