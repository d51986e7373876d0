"""Cases for tests of who trains which expert from round to round: a table, the rules, and what they decide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from spes_swarm.protocol.ownership.reassignment import Holding, Rules, reassign

Outcome = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """Arguments of `reassign`."""

    table: dict[str, Holding]
    num_experts: int
    round_number: int
    trained_in: tuple[int, ...]
    reserved: frozenset[int] = frozenset()
    rules: Rules = field(default_factory=Rules)
    kept: frozenset[int] = frozenset()

    @property
    def rotates(self) -> bool:
        return self.round_number % self.rules.rotate_every_rounds == 0

    @property
    def movable(self) -> dict[str, Holding]:
        return {peer: holding for peer, holding in self.table.items() if not holding.fixed}

    @property
    def takeable(self) -> set[int]:
        """Experts that somebody holds, or that nobody has a lease on."""
        held = {e for holding in self.table.values() for e in holding.experts}
        return {e for e in range(self.num_experts) if e in held or e not in self.reserved}

    @property
    def limit(self) -> int:
        return self.rules.most_each or self.num_experts

    def after(self, outcome: Mapping[str, tuple[int, ...]]) -> Case:
        return replace(self, table={p: replace(h, experts=outcome[p]) for p, h in self.table.items()})


def decide(case: Case) -> Outcome:
    return reassign(
        case.table,
        case.num_experts,
        round_number=case.round_number,
        trained_in=case.trained_in,
        reserved=case.reserved,
        kept=case.kept,
        rules=case.rules,
    )


def counts(table: Mapping[str, Collection[int]]) -> Counter[int]:
    return Counter(e for experts in table.values() for e in experts)


def before(case: Case) -> Outcome:
    return {peer: holding.experts for peer, holding in case.table.items()}


def gained(case: Case, outcome: Outcome) -> int:
    return sum(len(set(experts) - set(case.table[peer].experts)) for peer, experts in outcome.items())


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    fixed: bool = True,
    targets: bool = True,
    reservations: bool = True,
    fits: bool = False,
    limits: bool = True,
) -> Case:
    """Any table at all: peers without room, with more than they have room for, with nothing to do."""
    num_experts = draw(st.integers(1, 7))
    table = {}
    for number in range(draw(st.integers(0, 6))):
        experts = draw(st.sets(st.integers(0, num_experts - 1)))
        room = draw(st.integers(len(experts) if fits else 0, num_experts + 1))
        table[f"peer{number}"] = Holding(tuple(sorted(experts)), room, fixed and draw(st.integers(0, 3)) == 0)
    round_number = draw(st.integers(1, 40))
    return Case(
        table,
        num_experts,
        round_number,
        tuple(draw(st.lists(st.integers(0, round_number), min_size=num_experts, max_size=num_experts))),
        frozenset(draw(st.sets(st.integers(0, num_experts - 1)))) if reservations else frozenset(),
        Rules(
            draw(st.sampled_from([None, None, 1, 2, 3, 5])) if targets else None,
            draw(st.sampled_from([1, 3, 50])),
            draw(st.sampled_from([None, 1, 2, 4])) if limits else None,
        ),
    )


# "c" offers expert 1, which somebody has named; "a" adopts expert 0 instead, which "c" can then give up.
AT_SECOND_CHOICE = Case(
    {"a": Holding((), 1), "b": Holding((1,), 0, fixed=True), "c": Holding((0, 1, 2), 3)},
    3,
    1,
    (0, 0, 0),
    rules=Rules(rotate_every_rounds=50, most_each=2),
)
# "a" gives up one of its two, and "b", which had that one, too, takes its turn at the third.
LIMITED_IN_ROTATION = Case(
    {"a": Holding((0, 1), 0, fixed=True), "b": Holding((0,), 1)},
    3,
    1,
    (0, 0, 0),
    rules=Rules(rotate_every_rounds=1, most_each=1),
)
# What "b" offers and nobody takes returns to it, although "a" has a replica of another expert of "b" by then.
SURPLUS_THAT_RETURNS = Case(
    {
        "a": Holding((), 1),
        "b": Holding((1, 2, 4), 4),
        "c": Holding((0, 4), 4, fixed=True),
        "d": Holding((), 5),
        "e": Holding((0, 1, 2, 3, 4), 3),
    },
    5,
    1,
    (2, 1, 0, 1, 2),
    reserved=frozenset({0}),
    rules=Rules(replicas=1, rotate_every_rounds=50, most_each=2),
)
