"""A seeded schedule of faults for a swarm. Pure; swarm.py injects them into real processes.

A fault has a kind (`Kind`), a phase of a round (`Phase`) and the role of its victim (`Role`). The victim is the peer
that has that role at that time, so the schedule determines how many peers run at any time, but not which.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

MIN_PEERS = 2  # always left running undisturbed
STOP_S = (1.0, 15.0)  # from less than a call's timeout to more than the lifetime of a progress record
CUT_S = (3.0, 20.0)


class Kind(StrEnum):
    """The kind of a fault."""

    KILL = "kill"  # SIGKILL of the main process, as the kernel's OOM killer does
    KILL_NETWORK = "kill-network"  # SIGKILL of its network process
    KILL_DAEMON = "kill-daemon"  # SIGKILL of its p2pd
    STOP = "stop"  # SIGSTOP of the whole tree, and SIGCONT after a while
    LEAVE = "leave"  # SIGTERM
    JOIN = "join"  # a new peer starts
    RETURN = "return"  # a peer that was killed or has left restarts from its output directory
    CUT = "cut"  # the network between two halves of the swarm fails for a while


class Phase(StrEnum):
    """The phase in which a fault happens."""

    TRAINING = "training"
    RENDEZVOUS = "rendezvous"
    EXCHANGE = "exchange"
    TRANSFER = "transfer"  # while a newcomer fetches the reference


class Role(StrEnum):
    """The role of the victim."""

    ANY = "any"
    LEADER = "leader"  # of the next rendezvous
    NEWCOMER = "newcomer"  # the one that is fetching the reference


STARTING = frozenset({Kind.JOIN, Kind.RETURN})
ENDING = frozenset({Kind.KILL, Kind.KILL_NETWORK, Kind.KILL_DAEMON, Kind.LEAVE})

# Returns are about as likely as all ends together, so that the number of peers varies between its limits.
_WEIGHTS = {
    Kind.KILL: 4,
    Kind.KILL_NETWORK: 2,
    Kind.KILL_DAEMON: 2,
    Kind.STOP: 4,
    Kind.LEAVE: 3,
    Kind.JOIN: 3,
    Kind.RETURN: 6,
    Kind.CUT: 3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a schedule."""

    number: int  # from 1
    kind: Kind
    phase: Phase
    role: Role
    newcomer: Kind | None  # for Phase.TRANSFER: how the newcomer starts
    running: int  # peers that run before it (and before the newcomer starts)
    moment: float  # for Phase.TRAINING: when, as a fraction of an undisturbed round
    seconds: float  # how long a stop or a cut lasts; 0 for other kinds
    seed: int  # for the choices that depend on which peers run


def draw_schedule(
    seed: int, num_faults: int, num_peers: int, max_peers: int, kinds: Collection[Kind] = tuple(Kind)
) -> list[Fault]:
    """Draws the faults for a swarm that starts with `num_peers` peers; equal arguments give equal schedules.

    After each fault at least `MIN_PEERS` peers run undisturbed, and at most `max_peers` run.

    Raises:
        ValueError: the limits contradict each other, or none of `kinds` is possible at some point.
    """
    if not MIN_PEERS <= num_peers <= max_peers:
        raise ValueError(f"{num_peers} peers, of at least {MIN_PEERS} and at most {max_peers}")
    rng = random.Random(seed)
    running, gone = num_peers, 0
    schedule: list[Fault] = []
    for number in range(1, num_faults + 1):
        possible = [kind for kind in Kind if kind in kinds and _is_possible(kind, running, gone, max_peers)]
        if not possible:
            raise ValueError(f"with {running} of {max_peers} peers none of {', '.join(sorted(kinds))} is possible")
        kind = rng.choices(possible, [_WEIGHTS[kind] for kind in possible])[0]
        phase, role, newcomer = Phase.TRAINING, Role.ANY, None
        if kind not in STARTING:
            phases = [Phase.TRAINING, Phase.RENDEZVOUS, Phase.EXCHANGE]
            if running < max_peers and kind is not Kind.CUT:
                phases.append(Phase.TRANSFER)
            phase = rng.choice(phases)
            role = rng.choice([Role.ANY, Role.NEWCOMER if phase is Phase.TRANSFER else Role.LEADER])
        if phase is Phase.TRANSFER:
            newcomer = rng.choice([Kind.JOIN, Kind.RETURN]) if gone else Kind.JOIN
        schedule.append(
            Fault(
                number=number,
                kind=kind,
                phase=phase,
                role=role,
                newcomer=newcomer,
                running=running,
                moment=rng.uniform(0.1, 0.8),
                seconds=rng.uniform(*STOP_S) if kind is Kind.STOP else rng.uniform(*CUT_S) if kind is Kind.CUT else 0.0,
                seed=rng.getrandbits(32),
            )
        )
        started = [each for each in (kind, newcomer) if each in STARTING]
        running += len(started) - (kind in ENDING)
        gone += (kind in ENDING) - started.count(Kind.RETURN)
    return schedule


def _is_possible(kind: Kind, running: int, gone: int, max_peers: int) -> bool:
    if kind is Kind.JOIN:
        return running < max_peers
    if kind is Kind.RETURN:
        return running < max_peers and gone > 0
    return running > MIN_PEERS  # also for a stop, during which the others are on their own


def split_in_two(names: Sequence[str], seed: int) -> tuple[list[str], list[str]]:
    """Splits peers into the two sides of a cut; the first is never the smaller one."""
    rng = random.Random(seed)
    shuffled = rng.sample(sorted(names), len(names))
    smaller = rng.randint(1, len(shuffled) // 2)
    return sorted(shuffled[smaller:]), sorted(shuffled[:smaller])
