"""The table of a study: means and standard errors over seeds, paired differences, efficiency and bytes.

The efficiency of an arm is the number of steps in which a lone peer reaches its loss, over its own steps. Each length
of a lone run has its own schedule of the learning rate, which ends with it. Between two lengths, the loss is linear in
the logarithm of the steps. Losses and curves are averaged over seeds before they are compared; the error is that of a
jackknife over the seeds, and so includes the curve's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scripts.testing.study.arm import Arm, Study
from scripts.testing.study.course import Outcome


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean with its standard error."""

    mean: float
    stderr: float | None  # None: of a single seed

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """From independent values, at least one."""
        stderr = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(mean=statistics.fmean(values), stderr=stderr)

    def text(self, digits: int, sign: str = "") -> str:
        """Formats it: 1.643 ± 0.012."""
        error = "" if self.stderr is None else f" ± {self.stderr:.{digits}f}"
        return f"{self.mean:{sign}.{digits}f}{error}"


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Steps of a lone peer over those of an arm."""

    ratio: Estimate
    bound: str = ""  # "<" or ">": the loss lies beyond the shortest or longest lone run, and the ratio is its length

    @property
    def text(self) -> str:
        """Formats it."""
        return f"{self.bound} {self.ratio.mean:.2f}" if self.bound else self.ratio.text(2)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arm."""

    name: str
    seeds: tuple[int, ...]  # that are finished
    diverged: int  # of these, how many have no loss
    loss: Estimate | None  # nats per token
    against_baseline: Estimate | None  # paired difference of the loss
    efficiency: Efficiency | None
    bytes: float  # that a peer sends per step, over those of the arm `bytes_of`; NaN if that sends none
    bytes_per_step: float
    holders: float  # of an expert, on average
    seconds: float  # CPU time of a run, on average


# Returns the result of an arm with a seed, or None if there is none yet.
Lookup = Callable[[Arm, int], Outcome | None]


def make_table(study: Study, lookup: Lookup) -> list[Row]:
    """Returns a row for each arm that has at least one result."""
    outcomes = {arm.name: _finished(arm, study.config.seeds, lookup) for arm in study.arms}
    unit = _bytes_per_step(outcomes[study.bytes_of]) if outcomes[study.bytes_of] else math.nan
    baseline = _losses(outcomes[study.baseline])
    rows: list[Row] = []
    for arm in study.arms:
        finished = outcomes[arm.name]
        if not finished:
            continue
        losses = _losses(finished)
        differences = [losses[seed] - baseline[seed] for seed in losses if seed in baseline]
        sent = _bytes_per_step(finished)
        rows.append(
            Row(
                name=arm.name,
                seeds=tuple(finished),
                diverged=len(finished) - len(losses),
                loss=Estimate.of(list(losses.values())) if losses else None,
                against_baseline=Estimate.of(differences) if differences and arm.name != study.baseline else None,
                efficiency=_efficiency(study, arm, losses, lookup),
                bytes=sent / unit if unit else math.nan,
                bytes_per_step=sent,
                holders=statistics.fmean(outcome.holders for outcome in finished.values()),
                seconds=statistics.fmean(outcome.seconds for outcome in finished.values()),
            )
        )
    return rows


def _finished(arm: Arm, seeds: Sequence[int], lookup: Lookup) -> dict[int, Outcome]:
    found = {seed: lookup(arm, seed) for seed in seeds}
    return {seed: outcome for seed, outcome in found.items() if outcome is not None}


def _losses(finished: Mapping[int, Outcome]) -> dict[int, float]:
    return {seed: outcome.loss for seed, outcome in finished.items() if outcome.loss is not None}


def _bytes_per_step(finished: Mapping[int, Outcome]) -> float:
    return statistics.fmean(outcome.bytes_per_step for outcome in finished.values())


def _efficiency(study: Study, arm: Arm, losses: Mapping[int, float], lookup: Lookup) -> Efficiency | None:
    lone = study.lone.get(arm.name, ())
    curves = {seed: [_loss(lookup(each, seed)) for each in lone] for seed in losses}
    # Only seeds with a whole curve count, so that every point of the mean curve has the same seeds.
    whole = {seed: [loss for loss in curve if loss is not None] for seed, curve in curves.items()}
    seeds = [seed for seed in losses if lone and len(whole[seed]) == len(lone)]
    if not seeds:
        return None
    return efficiency(
        arm.config.steps,
        [losses[seed] for seed in seeds],
        [each.config.steps for each in lone],
        [whole[seed] for seed in seeds],
    )


def efficiency(
    steps: float, losses: Sequence[float], lone_steps: Sequence[int], lone_losses: Sequence[Sequence[float]]
) -> Efficiency:
    """Compares the losses of runs of `steps` steps, one per seed, with those of lone peers (`lone_losses`, per seed)
    after `lone_steps` steps, ascending.
    """

    def ratio(seeds: Sequence[int]) -> tuple[float, str]:
        curve = [statistics.fmean(lone_losses[seed][i] for seed in seeds) for i in range(len(lone_steps))]
        needed, bound = steps_to(statistics.fmean(losses[seed] for seed in seeds), lone_steps, curve)
        return needed / steps, bound

    seeds = range(len(losses))
    mean, bound = ratio(seeds)
    stderr = None
    if len(seeds) > 1:
        left_out = [ratio([seed for seed in seeds if seed != each])[0] for each in seeds]
        centre, count = statistics.fmean(left_out), len(seeds)
        stderr = math.sqrt((count - 1) / count * math.fsum((value - centre) ** 2 for value in left_out))
    return Efficiency(ratio=Estimate(mean=mean, stderr=stderr), bound=bound)


def _loss(outcome: Outcome | None) -> float | None:
    return None if outcome is None else outcome.loss


def steps_to(loss: float, lengths: Sequence[int], losses: Sequence[float]) -> tuple[float, str]:
    """Returns the steps in which runs of these lengths (ascending) and final losses reach a loss, and a bound.

    The bound is "" if the loss lies on the curve, "<" if the shortest run is better already, and ">" if no run reaches
    it; the steps are then those of the shortest or longest run. Lengths without any gain over shorter ones are skipped.
    """
    before = lengths[0], losses[0]
    if loss > losses[0]:
        return float(lengths[0]), "<"
    for length, reached in zip(lengths[1:], losses[1:], strict=True):
        if reached >= before[1]:
            continue
        if reached <= loss:
            share = (before[1] - loss) / (before[1] - reached)
            return before[0] * (length / before[0]) ** share, ""
        before = length, reached
    return (float(lengths[0]), "") if loss == losses[0] else (float(lengths[-1]), ">")


_HEADER = ("arm", "seeds", "loss", "against baseline", "efficiency", "bytes", "holders", "CPU s")


def to_markdown(rows: Sequence[Row]) -> str:
    """Formats the table."""
    lines = [_HEADER, ("---",) * len(_HEADER)]
    for row in rows:
        loss = "diverged" if row.loss is None else row.loss.text(4)
        if row.loss is not None and row.diverged:
            loss += f", {row.diverged} diverged"
        lines.append(
            (
                row.name,
                str(len(row.seeds)),
                loss,
                "-" if row.against_baseline is None else row.against_baseline.text(4, "+"),
                "-" if row.efficiency is None else row.efficiency.text,
                "-" if not row.bytes_per_step or math.isnan(row.bytes) else f"{row.bytes:.2f}",
                f"{row.holders:.2f}",
                f"{row.seconds:.0f}",
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
