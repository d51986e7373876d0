"""Who trains which expert: deterministic rules on the table of leases, without any I/O.

The table maps each peer to the experts it holds. All peers see (nearly) the same table and apply the same rules, so
what one decides the others can predict; where two decide at the same time, a hash of peer and expert says who yields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from blake3 import blake3

LeaseTable = Mapping[str, Collection[int]]


def priority(peer_id: str, expert: int) -> bytes:
    """Rendezvous hash of a peer and an expert; of several peers the smallest has the best claim."""
    return blake3(f"{peer_id}|{expert}".encode()).digest()


def coverage(leases: LeaseTable, num_experts: int) -> list[int]:
    """Number of holders of each expert."""
    counts = Counter(expert for experts in leases.values() for expert in experts)
    return [counts[expert] for expert in range(num_experts)]


def choose_experts(leases: LeaseTable, me: str, num_experts: int, want: int) -> tuple[int, ...]:
    """The `want` experts that the others hold least; ties go by rendezvous hash."""
    others = coverage({peer: experts for peer, experts in leases.items() if peer != me}, num_experts)
    ranked = sorted(range(num_experts), key=lambda expert: (others[expert], priority(me, expert)))
    return tuple(sorted(ranked[:want]))


def settle(leases: LeaseTable, me: str, num_experts: int) -> tuple[int, ...]:
    """What `me` should hold after several peers chose at the same time.

    An expert that others hold too is given up for one without a holder, unless this peer has the best claim to it.
    Repeated by all peers until nothing changes, it covers every expert that there is room for.
    """
    mine = sorted(leases[me])
    counts = coverage(leases, num_experts)
    uncovered = sorted((e for e in range(num_experts) if counts[e] == 0), key=lambda e: priority(me, e))
    for expert in list(mine):
        holders = [peer for peer, experts in leases.items() if expert in experts]
        if uncovered and len(holders) > 1 and min(holders, key=lambda peer: priority(peer, expert)) != me:
            mine[mine.index(expert)] = uncovered.pop(0)
    return tuple(sorted(mine))
