"""The figures of a study, with error bars. Needs the extra `plot`."""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scripts.testing.study.arm import Study
from scripts.testing.study.table import Estimate, Lookup, Row
from spes_swarm.base.errors import DataError, os_errors_as

_DOTS_PER_INCH: Final = 100
_BLUE, _GREY = "#0072B2", "#666666"


def can_plot() -> bool:
    """Returns True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_plots(study: Study, rows: Sequence[Row], lookup: Lookup, directory: Path) -> list[Path]:
    """Draws the loss of each arm, loss against bytes, and loss over steps; returns the files.

    Raises:
        DataError: a file cannot be written.
    """
    drawn = [row for row in rows if row.loss is not None]
    if not drawn:
        return []
    paths = [
        _save(_losses(drawn), directory / "losses.png"),
        _save(_curves(study, drawn, lookup), directory / "curves.png"),
    ]
    if sum(row.bytes > 0 for row in drawn) > 1:
        paths.append(_save(_bytes(drawn), directory / "bytes.png"))
    return paths


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _losses(rows: Sequence[Row]) -> Any:
    figure, axes = _figure(8, 1 + 0.3 * len(rows))
    for place, row in enumerate(rows):
        assert row.loss is not None
        axes.errorbar(row.loss.mean, place, xerr=row.loss.stderr, fmt="o", color=_BLUE, capsize=3, markersize=4)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("held-out loss, nats per token (mean and standard error over seeds)")
    return figure


def _bytes(rows: Sequence[Row]) -> Any:
    figure, axes = _figure(8, 5)
    for row in rows:
        if row.loss is not None and row.bytes > 0:
            axes.errorbar(row.bytes, row.loss.mean, yerr=row.loss.stderr, fmt="o", color=_BLUE, capsize=3, markersize=4)
            axes.annotate(
                row.name, (row.bytes, row.loss.mean), (5, 3), textcoords="offset points", fontsize=7, color=_GREY
            )
    axes.set_xscale("log")
    for axis_labels in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        axis_labels("{x:g}")
    axes.set_xlabel("bytes that a peer sends per step, relative")
    axes.set_ylabel("held-out loss, nats per token")
    return figure


def _curves(study: Study, rows: Sequence[Row], lookup: Lookup) -> Any:
    figure, axes = _figure(9, 5.5)
    arms = {arm.name: arm for arm in study.arms}
    for row in rows:
        by_steps: dict[int, list[float]] = {}
        for seed in row.seeds:
            outcome = lookup(arms[row.name], seed)
            for steps, loss in outcome.curve if outcome is not None else ():
                by_steps.setdefault(steps, []).append(loss)
        steps_in_order = sorted(by_steps)
        estimates = [Estimate.of(by_steps[steps]) for steps in steps_in_order]
        means = [each.mean for each in estimates]
        (line,) = axes.plot(steps_in_order, means, linewidth=1.4, label=row.name)
        band = [each.stderr or 0.0 for each in estimates]
        axes.fill_between(
            steps_in_order,
            [mean - error for mean, error in zip(means, band, strict=True)],
            [mean + error for mean, error in zip(means, band, strict=True)],
            color=line.get_color(),
            alpha=0.15,
            linewidth=0,
        )
    last = [row.loss.mean for row in rows if row.loss is not None and math.isfinite(row.loss.mean)]
    axes.set_ylim(min(last) - 0.05, statistics.median(last) + 1.0)
    axes.set_xlabel("steps of a peer")
    axes.set_ylabel("held-out loss, nats per token")
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _save(figure: Any, path: Path) -> Path:
    with os_errors_as(DataError, f"{path} cannot be written"):
        figure.savefig(path)
    return path
