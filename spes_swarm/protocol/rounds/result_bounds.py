"""Finds results that cannot be the mean of the planned contributions: a pure function of plan and results.

The norm of a weighted mean is at most the weighted mean of the norms (triangle inequality), and these follow from the
plan. A reducer encodes each result once for all members, and a member that scaled it would diverge from the others. So
a result that is too long is dropped, and its part stays at the old reference. All members that received the same
results drop the same ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from spes_swarm.protocol.averaging.clipping import MAX_ROUNDS_APART, EnergyBudget
from spes_swarm.protocol.rounds.plan import BlockPlan, Form, Plan


@dataclass(frozen=True, slots=True)
class Excess:
    """Parts of one block for which a reducer sent results that are too long."""

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
    """Finds the results of other reducers that the member `me` must drop.

    A result is given as the included members and the sum of squares of its difference to the plan's base. Blocks whose
    base this member does not hold are skipped: it cannot compute the difference.
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
            size = plan.parts[index].size
            if not (budget.allows_part(energy, size) and budget.spend(energy, size)):
                dropped.append(index)
        if dropped:
            excess.append(Excess(reducer, block, tuple(dropped)))
    return excess
