"""Who holds which experts, as far as one peer knows outside of rounds: its own experts, and the others' leases.

What a peer holds after a commit follows from the statements of the group alone; see reassignment.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from spes_swarm.protocol.bitmap import bitmap, members_of
from spes_swarm.protocol.members.records import Lease
from spes_swarm.protocol.members.reputation import Reputation
from spes_swarm.protocol.ownership.reassignment import (
    Holding,
    Rules,
    choose_experts,
    reassign,
    reserved_experts,
    reserving,
    resolve,
)
from spes_swarm.protocol.rounds.plan import Plan
from spes_swarm.protocol.rounds.statement import Group


@dataclass(frozen=True)
class ExpertChange:
    """What the commit of a round changes for this peer."""

    held: tuple[int, ...]
    gained: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()


@dataclass(eq=False)
class Leases:
    """The experts of one peer, and which of the others' leases count.

    Leases are read again and again from network/link/dht_records.py, which drops those that are past the end that they
    state. Only those of the electorate reserve experts.
    """

    me: str
    num_experts: int
    rules: Rules
    lease_s: float = math.inf  # lifetime of an honest lease
    reputation: Reputation = field(default_factory=Reputation)
    held: tuple[int, ...] = field(default=(), init=False)  # the experts that this peer trains now
    room: int = field(default=0, init=False)
    fixed: bool = field(default=False, init=False)
    _others: dict[str, list[int]] = field(default_factory=dict, init=False)  # by peer: what its live lease names
    _seen: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)  # its expiration, when first seen

    def update(self, records: Mapping[str, Lease]) -> None:
        """Takes in freshly read leases, except those of peers that have never answered a call, and stale ones.

        A lease that has not been renewed within its lifetime is stale, however late it claims to expire.
        """
        now = time.monotonic()
        self._seen = {
            peer: known if (known := self._seen.get(peer)) and known[0] == lease.expires else (lease.expires, now)
            for peer, lease in records.items()
            if self.reputation.has_answered(peer)
        }
        self._others = {
            peer: records[peer].experts
            for peer, (_, since) in self._seen.items()
            if peer != self.me and now - since <= self.lease_s
        }

    def choose(self, want: int) -> tuple[int, ...]:
        """Takes up to `want` experts, those with the fewest other holders; returns them."""
        self.held = choose_experts(self._others, self.me, self.num_experts, want, self.rules)
        return self.held

    def resolve(self) -> bool:
        """Gives up experts that others with a better claim chose at the same time. Returns True if unchanged."""
        before, self.held = (
            self.held,
            resolve({**self._others, self.me: self.held}, self.me, self.num_experts),
        )
        return self.held == before

    @property
    def leased_bitmap(self) -> bytes:
        """For the statement: the experts that the electorate's leases reserve, so that orphans are not adopted."""
        leases = {peer: self._others[peer] for peer in self.reputation.electorate(self._others)}
        return bitmap(reserving(leases, self.num_experts, self.rules), self.num_experts)

    def after_commit(self, group: Group, plan: Plan) -> ExpertChange:
        """Applies `reassign` to the group that has committed, and takes this peer's row of the outcome."""
        before, self.held = self.held, reassign_group(group, plan, self.num_experts, self.rules).get(self.me, ())
        gained, lost = set(self.held).difference(before), set(before).difference(self.held)
        return ExpertChange(self.held, tuple(sorted(gained)), tuple(sorted(lost)))


def reassign_group(group: Group, plan: Plan, num_experts: int, rules: Rules) -> dict[str, tuple[int, ...]]:
    """What each member that stays holds after a commit: a pure function of the group, the same on every member."""
    statements = {member.peer_id: member.statement for member in group.members}
    # Their experts go to others. A peer whose user had named experts holds none then, and later adopts any.
    ignored = {group.members[i].peer_id for i in plan.ignored}
    returns = plan.taken_back is not None  # nobody's work is in it, so who is leaving needs another round
    # Most members see the same leases: each distinct bitmap is unpacked once.
    views = {data: members_of(data, num_experts) for data in {s.leased for s in statements.values()}}
    reserved = reserved_experts(
        {expert for statement in statements.values() for expert in statement.held},
        [views[statement.leased] for statement in statements.values()],
    )
    # A block without a plan has the same version everywhere: if a member states another one, the block has a plan. Only
    # in a return it may not; but then no expert changes hands.
    versions = list(group.members[0].statement.versions[1:])
    for index, block_plan in plan.blocks.items():
        if index > 0:
            versions[index - 1] = block_plan.new_version(plan.round)
    return reassign(
        {
            peer: Holding(
                tuple(s.held), 0 if peer in ignored else s.room, s.fixed and peer not in ignored and bool(s.held)
            )
            for peer, s in statements.items()
            if returns or not s.leaving
        },
        num_experts,
        round_number=group.round,
        trained_in=versions,
        reserved=reserved,
        kept=plan.deferred,
        rules=rules,
    )
