"""Results that cannot be the mean of what the plan says goes into them: a pure function of plan and results.

A weighted mean is never longer than the weighted mean of the lengths that go into it (triangle inequality), and these
stand in the plan. A reducer encodes a result once for all, and nobody may change it without falling out of step, so
what is too long is dropped: its parts stay at the old reference. Every member that was sent the same results drops the
same ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from spes_swarm.protocol.rounds.clipping import MAX_ROUNDS_APART, EnergyBudget
from spes_swarm.protocol.rounds.plan import BlockPlan, Form, Plan


@dataclass(frozen=True, slots=True)
class Excess:
    """Parts of one block with which a reducer has gone too far."""

    reducer: int
    block: int
    parts: tuple[int, ...]


def mean_bound_rms(block_plan: BlockPlan, included: frozenset[int]) -> float:
    """The largest RMS over the whole block that the mean of these members' contributions can have."""
    entries = [
        (c.weight, c.limit_rms * (1 + MAX_ROUNDS_APART) if c.form is Form.FULL else c.bound_rms)
        for c in block_plan.contributions
        if c.member in included
    ]
    total = sum(weight for weight, _ in entries)
    return sum(weight / total * rms for weight, rms in entries) if entries else math.inf


def excessive_results(plan: Plan, me: int, results: Mapping[int, tuple[frozenset[int], float]]) -> list[Excess]:
    """The results to drop, of all other reducers.

    Args:
        plan: of the round.
        me: whose results these are.
        results: of each part, who is included, and the sum of squares of its difference to the plan's base.

    Returns:
        Nothing of blocks of which this member does not hold the base: it cannot know how far away that is.
    """
    of_reducer: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for part in plan.parts:
        block_plan = plan.block_of(part)
        if part.reducer != me and me in block_plan.in_base and block_plan.contributions:
            of_reducer[part.reducer, part.block].append(part.index)
    block_elements: defaultdict[int, int] = defaultdict(int)
    for part in plan.parts:
        block_elements[part.block] += part.size
    excess: list[Excess] = []
    for (reducer, block), indices in of_reducer.items():
        elements = sum(plan.parts[index].size for index in indices)
        budgets: dict[frozenset[int], EnergyBudget] = {}
        dropped = []
        for index in indices:
            if index not in results:
                continue
            included, energy = results[index]
            if included not in budgets:
                bound_rms = mean_bound_rms(plan.blocks[block], included)
                budgets[included] = EnergyBudget(bound_rms, block_elements[block], elements)
            budget = budgets[included]
            if not (budget.allows_part(energy, plan.parts[index].size) and budget.spend(energy)):
                dropped.append(index)
        if dropped:
            excess.append(Excess(reducer, block, tuple(dropped)))
    return excess
