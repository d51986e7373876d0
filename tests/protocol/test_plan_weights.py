"""How much the work of each member weighs in an average."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spes_swarm.protocol.averaging.clipping import MAX_WEIGHT_RATIO
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK
from spes_swarm.protocol.rounds.plan import Contribution, Form, Plan, make_plan
from spes_swarm.protocol.rounds.vouchers import vouchers
from tests.helpers.plans import contributors, plan_of
from tests.helpers.rounds import small_layout
from tests.helpers.unsigned_groups import MAX_PART, group, member


def weights(plan: Plan, block: int) -> list[float]:
    return [c.weight for c in plan.blocks[block].contributions]


def test_shared_weights_are_tokens_and_expert_weights_are_routed_tokens() -> None:
    layout = small_layout(2)
    plan = plan_of(
        layout,
        member("a", layout, tokens=150, held=[0], routed=[50]),
        member("b", layout, tokens=100, held=[0, 1], routed=[30, 5]),
    )
    assert weights(plan, 0) == [150.0, 100.0]
    assert weights(plan, 1) == [50.0, 30.0]
    assert weights(plan, 2) == [5.0]


def test_an_absurd_claim_weighs_at_most_a_fixed_multiple_of_the_median() -> None:
    layout = small_layout(1)
    tokens = [90, 100, 110, 10**12]
    plan = plan_of(layout, *(member(f"p{i}", layout, tokens=t) for i, t in enumerate(tokens)))
    limit = MAX_WEIGHT_RATIO * 100  # the lower median
    assert weights(plan, 0) == [90.0, 100.0, 110.0, limit]


def test_a_holder_to_which_nothing_was_routed_leaves_the_expert_to_the_others() -> None:
    layout = small_layout(1)
    plan = plan_of(layout, member("a", layout, held=[0], routed=[0]), member("b", layout, held=[0], routed=[8]))
    assert contributors(plan, 1) == {1: Contribution(1, 8.0, Form.DELTA, stated_rms=0.01)}


def test_an_expert_without_any_tokens_still_follows_its_holders() -> None:
    """Weight decay and merges have changed it."""
    layout = small_layout(1)
    plan = plan_of(layout, member("a", layout, held=[0], routed=[0]), member("b", layout, held=[0], routed=[0]))
    assert weights(plan, 1) == [1.0, 1.0]


def test_a_member_weighs_no_more_than_its_invitation_allows() -> None:
    layout = small_layout()
    experts = {"held": [0], "routed": [300]}
    limited = replace(member("limited", layout, tokens=1000, held=[0, 1], routed=[900, 50]), most_weight=0.1)
    others = [member(name, layout, tokens=300, **experts) for name in ("b", "c")]
    plan = plan_of(layout, limited, *others)
    place = 2  # by name
    for block in (0, 1):
        weights = {i: contribution.weight for i, contribution in contributors(plan, block).items()}
        assert weights[place] / sum(weights.values()) == pytest.approx(0.1)
        assert weights[0] == weights[1]
    assert contributors(plan, 2)[place].weight > 0  # of an expert that nobody else trains, it is the only teacher


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ((100, 100, 100, 100), (1.0, 0.1, 0.1, 0.1), (0.7, 0.1, 0.1, 0.1)),
        ((10, 640, 640, 640), (1.0, 0.3, 0.3, 0.3), (0.1, 0.3, 0.3, 0.3)),
        ((100, 100, 10, 100), (1.0, 0.1, 0.1, 1.0), None),  # the third is within its limit
        ((100, 100, 100, 100), (0.1, 0.1, 0.2, 0.2), (1 / 6, 1 / 6, 1 / 3, 1 / 3)),  # nobody is unlimited
    ],
)
def test_limits_hold_together(
    tokens: tuple[int, ...], most: tuple[float, ...], expected: tuple[float, ...] | None
) -> None:
    layout = small_layout()
    members = [
        replace(member(name, layout, tokens=count), most_weight=share)
        for name, count, share in zip("abcd", tokens, most, strict=True)
    ]
    weights = [contribution.weight for _, contribution in sorted(contributors(plan_of(layout, *members), 0).items())]
    shares = [weight / sum(weights) for weight in weights]
    if expected is not None:
        assert shares == pytest.approx(list(expected), rel=0.02)
    else:
        assert shares[1] == pytest.approx(0.1)
        assert shares[2] < 0.1
        assert shares[0] == pytest.approx(shares[3])


def test_the_work_of_a_member_that_most_ignore_does_not_count() -> None:
    """Three of four say so of d. Otherwise it would decide limits and the weight of expert 0."""
    layout = small_layout(3, shared=20_000)
    held = {"a": [0], "b": [0], "c": [1], "d": [0, 2]}
    members = [
        member(
            name,
            layout,
            held=held[name],
            tokens=10**9 if name == "d" else 100,
            routed=[10**9 if name == "d" else 50] * len(held[name]),
            vouched=vouchers({}, set("abcd") - {name}, doubted={"d"} - {name}, ignored={"d"} - {name}),
        )
        for name in "abcd"
    ]
    plan = plan_of(layout, *members)
    assert plan.ignored == plan.without_duty == {3}
    assert {i: c.weight for i, c in contributors(plan, SHARED_BLOCK).items()} == {0: 100, 1: 100, 2: 100}
    assert {i: c.weight for i, c in contributors(plan, 1).items()} == {0: 50, 1: 50}
    assert 3 not in plan.blocks  # of an expert that it alone holds, nothing changes
    assert plan.claims[3].tokens_ratio == 0
    assert {part.block for part in plan.wanted(3)} == {0, 1, 2}  # it is told the results like any other
    noticed_by_one = [
        replace(m, statement=m.statement.model_copy(update={"vouched": b""})) if m.peer_id in "bc" else m
        for m in members
    ]
    plan = plan_of(layout, *noticed_by_one)
    assert plan.ignored == frozenset()
    assert contributors(plan, SHARED_BLOCK).keys() == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("new_tokens", "expected"),
    [
        ((100,), 1 / 5),  # no more than a third anyway
        ((10**9,), 1 / 3),  # believed up to twice the median
        ((10**9, 10**9), 1 / 3),
        ((10**9, 10**9, 100), 1 / 3),
        ((100, 100, 100, 100), 1 / 2),  # each side calls the other new
        ((100,) * 5, 2 / 3),  # a majority calls the others new
    ],
)
def test_new_identities_weigh_at_most_a_third_together(new_tokens: tuple[int, ...], expected: float) -> None:
    layout = small_layout(2, shared=20_000)
    known, new = "abcd", [f"new{i}" for i in range(len(new_tokens))]
    said = {own: vouchers({}, {*known, *new} - {own}, established=set(known) - {own}) for own in known}
    said |= {own: vouchers({}, {*known, *new} - {own}, established=set(new) - {own}) for own in new}
    tokens = dict.fromkeys(known, 100) | dict(zip(new, new_tokens, strict=True))
    held = {name: [0] if name in known else [0, 1] for name in tokens}
    members = [
        member(n, layout, tokens=t, held=held[n], routed=[t] * len(held[n]), vouched=said[n]) for n, t in tokens.items()
    ]

    def share(plan: Plan, block: int) -> float:
        weights = {i: c.weight for i, c in contributors(plan, block).items()}
        return sum(weight for i, weight in weights.items() if i >= len(known)) / sum(weights.values())

    limited = make_plan(group(members), layout, MAX_PART, most_of_newcomers=1 / 3)
    assert share(limited, SHARED_BLOCK) == pytest.approx(expected)
    assert share(limited, 1) == pytest.approx(expected)
    assert contributors(limited, 2).keys() == set(range(len(known), len(members)))  # nobody else trains that one
    counted = [min(tokens, 200) for tokens in new_tokens]
    private = share(plan_of(layout, *members), SHARED_BLOCK)
    assert private == pytest.approx(sum(counted) / (sum(counted) + 400))
