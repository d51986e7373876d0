"""Results of chaos experiments: seconds lost per fault, comparison of digests, and tables. Pure.

The swarm's pace is measured in the same run, from intervals between commits without a fault, by the number of peers,
since these share the machine's cores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median, quantiles
from typing import Any, NamedTuple

from scripts.testing.chaos.schedule import Fault, Kind, Phase, Role
from spes_swarm.base.wording import plural


class Commit(NamedTuple):
    """A round, as seen by the first survivor that committed it."""

    round: int
    at: float  # Unix time
    peers: int  # in the group


class UndisturbedRounds:
    """The duration of undisturbed rounds."""

    def __init__(self) -> None:
        self.samples: dict[int, list[float]] = defaultdict(list)  # peers in the group -> seconds

    def add(self, peers: int, seconds: float) -> None:
        """Adds an interval between two commits without a fault in between."""
        self.samples[peers].append(seconds)

    def interval(self, peers: int) -> float:
        """Median seconds of a round with this many peers.

        If that number was not measured, this is the lower bound that follows from the nearest one: peers share the
        cores, so fewer peers are at best proportionally faster, and more peers are not faster.

        Raises:
            ValueError: no round was measured.
        """
        if not self.samples:
            raise ValueError("no undisturbed round was measured")
        nearest = min(self.samples, key=lambda measured: (abs(measured - peers), measured))
        return median(self.samples[nearest]) * min(1.0, peers / nearest)


def seconds_lost(commits: Sequence[Commit], pace: UndisturbedRounds) -> float:
    """Excess duration over undisturbed rounds of all rounds after the first of `commits`; never negative."""
    if len(commits) < 2:
        return 0.0
    usual = sum(pace.interval(commit.peers) for commit in commits[1:])
    return max(0.0, commits[-1].at - commits[0].at - usual)


class Attempt(NamedTuple):
    """One peer's attempt at a round, in Unix times."""

    started: float  # start of the rendezvous
    grouped: float  # the group has formed, and the exchange begins
    ended: float  # commit


def phase_at(at: float, attempts: Iterable[Attempt]) -> Phase:
    """The phase of a round at a time; if the peers are in different phases, the latest one."""
    phases = {Phase.TRAINING}
    for attempt in attempts:
        if attempt.grouped <= at < attempt.ended:
            phases.add(Phase.EXCHANGE)
        elif attempt.started <= at < attempt.grouped:
            phases.add(Phase.RENDEZVOUS)
    return max(phases, key=list(Phase).index)


class Report(NamedTuple):
    """A commit as reported by a peer."""

    peer: str  # with its number of starts: reports before and after a kill count as two peers
    round: int
    digest: str
    side: str  # its side during a cut; "" otherwise


@dataclass(frozen=True)
class DigestComparison:
    """Comparison of the digests of all rounds that two or more peers committed on the same side of a cut."""

    rounds: int
    reports: int
    differing: dict[int, dict[str, str]]  # rounds with more than one digest: each peer's
    unhealed: tuple[int, ...]  # of these: two peers still differed in the next round that both committed
    open: tuple[int, ...]  # of these: two peers committed no later round together, as one of them ended


def compare_digests(reports: Iterable[Report]) -> DigestComparison:
    """Compares the digests of all rounds with at least two reports."""
    by_round: dict[tuple[int, str], dict[str, str]] = defaultdict(dict)
    by_peer: dict[str, dict[tuple[int, str], str]] = defaultdict(dict)
    for report in reports:
        by_round[report.round, report.side][report.peer] = report.digest
        by_peer[report.peer][report.round, report.side] = report.digest
    compared = {key: digests for key, digests in by_round.items() if len(digests) > 1}
    differing: dict[int, dict[str, str]] = {}
    unhealed, still_open = set(), set()
    for (number, _), digests in compared.items():
        for first, second in combinations(digests, 2):
            if digests[first] == digests[second]:
                continue
            differing.setdefault(number, {}).update(digests)
            later = [key for key in by_peer[first].keys() & by_peer[second].keys() if key[0] > number]
            if not later:
                still_open.add(number)
            elif by_peer[first][min(later)] != by_peer[second][min(later)]:
                unhealed.add(number)
    return DigestComparison(
        rounds=len(compared),
        reports=sum(map(len, compared.values())),
        differing=dict(sorted(differing.items())),
        unhealed=tuple(sorted(unhealed)),
        open=tuple(sorted(still_open - unhealed)),
    )


# Kinds of problems with their names in tables.
PROBLEMS = {
    "hang": "hangs",
    "crash": "crashes of undisturbed peers",
    "end": "victims that did not end properly",
    "accusation": "honest peers accused of lying, or without duty",
    "return": "honest rounds taken back",
    "orphan": "orphan processes",
    "socket": "leftover socket directories",
}


class Problem(NamedTuple):
    """Something that must not happen."""

    kind: str  # one of PROBLEMS
    detail: str


@dataclass(kw_only=True)
class Outcome:
    """The outcome of one fault."""

    fault: Fault
    victims: list[str]
    at: float = 0.0  # Unix time
    round: int = 0  # the last one committed by a survivor before the fault
    struck_in: Phase = Phase.TRAINING  # the actual phase of the other peers
    commits: list[Commit] = field(default_factory=list)  # from that round to the first with all peers
    together_s: float | None = None  # until a round with all peers was committed; None: never
    exit_code: int | None = None  # of a victim that was meant to end
    last_words: str = ""
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True)
class Totals:
    """Figures of a whole experiment."""

    faults: int
    rounds: int
    digests: DigestComparison
    problems: dict[str, int]  # by kind, all of PROBLEMS
    median_rounds_lost: float

    def failures(self) -> list[str]:
        """The acceptance criteria that the experiment fails."""
        failures = [f"{count} {PROBLEMS[kind]}" for kind, count in self.problems.items() if count]
        if self.digests.unhealed:
            failures.append(f"digests of rounds {self.digests.unhealed} still differed at the next commit")
        if not self.digests.rounds:
            failures.append("no digests were compared")
        if self.median_rounds_lost >= 1.0:
            failures.append(f"a fault costs {self.median_rounds_lost:.2f} rounds (median), not below 1")
        return failures


def rounds_lost(outcome: Outcome, pace: UndisturbedRounds) -> float:
    """Seconds lost as a multiple of an undisturbed round of the peers that ran."""
    return seconds_lost(outcome.commits, pace) / pace.interval(outcome.fault.running)


def totals(outcomes: Sequence[Outcome], reports: Sequence[Report], pace: UndisturbedRounds) -> Totals:
    """Computes the figures of a whole experiment."""
    problems = [problem.kind for outcome in outcomes for problem in outcome.problems]
    lost = [rounds_lost(outcome, pace) for outcome in outcomes if outcome.commits]
    return Totals(
        faults=len(outcomes),
        rounds=len({report.round for report in reports}),
        digests=compare_digests(reports),
        problems={kind: problems.count(kind) for kind in PROBLEMS},
        median_rounds_lost=median(lost) if lost else 0.0,
    )


def fault_table(outcomes: Sequence[Outcome], pace: UndisturbedRounds) -> str:
    """One line for each kind of fault, in Markdown.

    "late" is the delay of the first commit after the fault. "lost" is the excess duration of all rounds up to the first
    with all peers, which includes the cost of the victim's return.
    """
    header = ["fault", "count", "next commit late, s", "lost, s", "lost, rounds", "whole again after, s"]
    rows = []
    for kind in [*Kind, None]:
        chosen = [outcome for outcome in outcomes if kind in (None, outcome.fault.kind) and outcome.commits]
        if chosen:
            late = [seconds_lost(outcome.commits[:2], pace) for outcome in chosen]
            lost = [seconds_lost(outcome.commits, pace) for outcome in chosen]
            rounds = [rounds_lost(outcome, pace) for outcome in chosen]
            whole = [outcome.together_s for outcome in chosen if outcome.together_s is not None]
            spreads = [_spread(late, 1), _spread(lost, 1), _spread(rounds, 2), _spread(whole, 1)]
            rows.append([kind.value if kind is not None else "all", str(len(chosen)), *spreads])
    return "Median / 90th percentile / maximum:\n\n" + markdown(header, rows)


def totals_table(result: Totals) -> str:
    """The whole experiment, in Markdown."""
    digests = result.digests
    rows = [
        ("faults injected", result.faults),
        ("rounds committed", result.rounds),
        ("rounds of which digests were compared", digests.rounds),
        ("digests compared", digests.reports),
        ("rounds with differing digests", len(digests.differing)),
        ("of these not healed at the next commit", len(digests.unhealed)),
        ("of these unknown, as a peer had ended", len(digests.open)),
        *((what, result.problems[kind]) for kind, what in PROBLEMS.items()),
        ("median rounds lost per fault", f"{result.median_rounds_lost:.2f}"),
    ]
    return markdown(["", "total"], [[name, str(value)] for name, value in rows])


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with aligned columns."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def _spread(values: Sequence[float], digits: int) -> str:
    """Median, 90th percentile and maximum."""
    if not values:
        return "-"
    p90 = quantiles(values, n=10, method="inclusive")[8] if len(values) > 1 else values[0]
    return " / ".join(f"{value:.{digits}f}" for value in (median(values), p90, max(values)))


def describe(outcome: Outcome, pace: UndisturbedRounds) -> str:
    """One line about a fault, and one for each of its problems."""
    fault = outcome.fault
    line = f"{fault.number:3}. round {outcome.round}, {plural(fault.running, 'peer')}: {fault.kind}"
    line += f" {fault.seconds:.1f} s" if fault.seconds else ""
    line += f" of {', '.join(outcome.victims)}"
    line += f" ({fault.role})" if fault.role is not Role.ANY else ""
    line += f" in {outcome.struck_in}"
    line += f" (aimed at {fault.phase})" if outcome.struck_in is not fault.phase else ""
    line += f" of a {fault.newcomer}" if fault.newcomer is not None else ""
    if outcome.commits:
        line += f": next commit {seconds_lost(outcome.commits[:2], pace):.1f} s late"
        line += f", lost {seconds_lost(outcome.commits, pace):.1f} s = {rounds_lost(outcome, pace):.2f} rounds"
    if outcome.together_s is not None:
        line += f", whole again after {outcome.together_s:.1f} s"
    if outcome.exit_code is not None:
        line += f", exit code {outcome.exit_code}"
    return "\n".join([line, *(f"     {problem.kind.upper()}: {problem.detail}" for problem in outcome.problems)])


def to_json(outcome: Outcome, pace: UndisturbedRounds) -> dict[str, Any]:
    """An outcome with its derived figures, as JSON values."""
    fault = outcome.fault
    return {
        **{key: getattr(fault, key) for key in ("number", "kind", "phase", "role", "newcomer", "running", "seconds")},
        "victims": outcome.victims,
        "at": outcome.at,
        "round": outcome.round,
        "struck_in": outcome.struck_in,
        "commits": [commit._asdict() for commit in outcome.commits],
        "seconds_lost": seconds_lost(outcome.commits, pace),
        "next_commit_late_s": seconds_lost(outcome.commits[:2], pace),
        "rounds_lost": rounds_lost(outcome, pace),
        "together_s": outcome.together_s,
        "exit_code": outcome.exit_code,
        "last_words": outcome.last_words,
        "problems": [problem._asdict() for problem in outcome.problems],
    }
