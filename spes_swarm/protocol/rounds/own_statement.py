"""Builds this peer's statement for a round from its work and its records of the others.

Shape: N elements of the flat vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spes_swarm.base.arrays import FloatArray, pieces, scratch, sum_of_squares
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.consensus.reference import Reference
from spes_swarm.protocol.ownership.lease_table import Leases
from spes_swarm.protocol.rounds.statement import MAX_PACE, MAX_RMS, Statement
from spes_swarm.protocol.rounds.track_record import TrackRecords


@dataclass(frozen=True, slots=True)
class Work:
    """What a peer brings to a round; see the fields of Statement."""

    round: int
    held: tuple[int, ...]
    tokens: int
    routed: tuple[int, ...]
    rms: list[float]  # see difference_rms
    leaving: bool
    loss_rose: bool | None = None


def make_statement(
    work: Work,
    reference: Reference,
    lineage: Lineage,
    leases: Leases,
    tracks: TrackRecords,
    *,
    bandwidth_mbps: float,
    reachable: bool,
    certificate: bytes,
    nonce: bytes,
    before: bytes = b"",
    admission: bytes = b"",
) -> Statement:
    """Builds the statement, not yet signed."""
    commits, marks = lineage.to_lists()
    return Statement(
        round=work.round,
        held=list(work.held),
        tokens=work.tokens,
        routed=list(work.routed),
        rms=work.rms,
        usual_rms=list(tracks.usual_rms),
        vouched=tracks.to_vouchers(work.round),
        pace=min(tracks.conduct.pace, MAX_PACE),
        loss_rose=work.loss_rose,
        before=before,
        bandwidth_mbps=bandwidth_mbps,
        reachable=reachable,
        versions=list(reference.versions),
        digests=list(reference.digests),
        commits=commits,
        marks=marks,
        room=leases.room,
        fixed=leases.fixed,
        leaving=work.leaving,
        leased=leases.leased_bitmap,
        certificate=certificate,
        nonce=nonce,
        proven=tracks.conduct.exclusions.marks(),
        admission=admission,
    )


def difference_rms(reference: Reference, live_N: FloatArray, held: Sequence[int]) -> list[float]:
    """Root mean square of the differences of the shared block and of each held expert, in this order.

    A block with NaN or infinite values gives 0: it cannot be contributed, so it counts as unmoved.
    """
    base_N, blocks = reference.values_N, reference.layout.trained_blocks(held)
    return [_rms(live_N[block.start : block.stop], base_N[block.start : block.stop]) for block in blocks]


def _rms(values_N: FloatArray, base_N: FloatArray) -> float:
    energy = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for where in pieces(len(values_N)):
            out_N = scratch("own difference", where.stop - where.start)
            energy += sum_of_squares(np.subtract(values_N[where], base_N[where], out=out_N))
    return min(math.sqrt(energy / len(values_N)), MAX_RMS) if math.isfinite(energy) else 0.0
