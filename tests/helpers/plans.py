"""Plans of groups with unsigned statements, and what they say."""

from __future__ import annotations

from typing import Any

from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.rounds.plan import Contribution, Plan, make_plan
from spes_swarm.protocol.rounds.statement import Member
from tests.helpers.unsigned_groups import MAX_PART, group


def plan_of(layout: Layout, *members: Member, max_part: int = MAX_PART) -> Plan:
    """The plan of a group of these members."""
    return make_plan(group(members), layout, max_part)


def contributors(plan: Plan, block: int) -> dict[int, Contribution]:
    """The contributions to a block, by member."""
    return {c.member: c for c in plan.blocks[block].contributions}


def reduced(plan: Plan, block: int | None = None) -> dict[int, int]:
    """Elements that each member reduces."""
    sums: dict[int, int] = {}
    for part in plan.parts:
        if block in (None, part.block):
            sums[part.reducer] = sums.get(part.reducer, 0) + part.size
    return sums


def at(layout: Layout, version: int, fork: int = 0) -> dict[str, Any]:
    """Fields of a statement whose writer has this base of all blocks; those of other forks have other digests."""
    num_blocks = len(layout.blocks)
    return {"versions": [version] * num_blocks, "digests": [bytes([version, fork]) * 16] * num_blocks}
