"""Checkpoints whose content follows from the number of their round."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from spes_swarm.base.arrays import FloatArray
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.consensus.reference import Reference
from spes_swarm.storage.checkpoint import CheckpointMeta, load_newest
from spes_swarm.storage.checkpoint_files import Array
from spes_swarm.storage.checkpoint_writing import PeerState, save_checkpoint
from tests.helpers.rounds import small_layout

LAYOUT = small_layout(4)
RUN, PEER = "run-1", "peer-1"
HELD = [1, 3]
UNCHANGED_BLOCKS = (1, 3)  # of the experts that nobody trains: equal in all rounds


def meta(round_number: int, **changes: object) -> CheckpointMeta:
    """The metadata of a round."""
    made = CheckpointMeta(
        run_id=RUN,
        peer_id=PEER,
        layout_digest=LAYOUT.digest,
        round=round_number,
        versions=[round_number, 0, 1, 2, 3],
        reference_digest="ab" * 32,
        held=HELD,
        step=10 * round_number,
        tokens=64,
        steps_in_round=1,
        routed=[0, 5, 0, 6],
        cursor={"position": 7},
        commits=[1],
        marks="ab" * 8,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def values(seed: int, layout: Layout = LAYOUT) -> FloatArray:
    """Normally distributed weights."""
    return np.random.default_rng(seed).normal(size=layout.num_elements).astype(np.float32)


def reference(round_number: int, layout: Layout = LAYOUT) -> FloatArray:
    """The reference of a round."""
    reference_N = values(round_number, layout)
    for index in UNCHANGED_BLOCKS:
        block = layout.blocks[index]
        reference_N[block.start : block.stop] = values(0, layout)[block.start : block.stop]
    return reference_N


def live(round_number: int, layout: Layout = LAYOUT) -> dict[int, FloatArray]:
    """The live weights of the shared block and of expert 1; those of expert 3 equal the reference."""
    live_N = values(100 + round_number, layout)
    return {block.index: live_N[block.start : block.stop] for block in layout.trained_blocks(HELD[:1])}


def moments(round_number: int) -> dict[str, Array]:
    """The optimiser state of a round."""
    rng = np.random.default_rng(round_number)
    return {
        "w/step": np.array(round_number, dtype=np.float32),
        "w/exp_avg": rng.normal(size=(3, 4)).astype(np.float32),
        "w/exp_avg_sq": rng.normal(size=(3, 4)).astype(np.float32),
    }


def state(round_number: int, layout: Layout = LAYOUT, **changes: Any) -> PeerState:
    """All of these."""
    reference_N = reference(round_number, layout)
    made = PeerState(
        meta=meta(round_number, layout_digest=layout.digest),
        layout=layout,
        reference_N=reference_N,
        digests=Reference(layout, reference_N).digests,
        live=live(round_number, layout),
        optimiser=moments(round_number),
    )
    return dataclasses.replace(made, **changes)


def save(directory: Path, round_number: int, keep: int = 2, layout: Layout = LAYOUT) -> Path:
    """Writes the checkpoint of a round."""
    return save_checkpoint(directory, state(round_number, layout), keep).path


def newest_round(directory: Path, layout: Layout = LAYOUT) -> int | None:
    """The round that a peer would resume from, its content compared with what was saved; None if there is none."""
    found, _ = load_newest(directory, RUN, PEER, layout)
    if found is None:
        return None
    number = found.meta.round
    assert found.meta == meta(number, layout_digest=layout.digest)
    reference_N, live_N = (np.full(layout.num_elements, np.nan, np.float32) for _ in range(2))
    found.reference(layout, reference_N)
    found.live(layout, live_N)
    assert reference_N.tobytes() == reference(number, layout).tobytes()
    expected_N = np.full(layout.num_elements, np.nan, np.float32)  # blocks that are not trained stay as they were
    for block in layout.trained_blocks(HELD):
        saved_N = live(number, layout).get(block.index, reference(number, layout)[block.start : block.stop])
        expected_N[block.start : block.stop] = saved_N
    assert live_N.tobytes() == expected_N.tobytes()
    expected = moments(number)
    assert found.optimiser().keys() == expected.keys()
    for name, array in found.optimiser().items():
        assert np.array_equal(array, expected[name])
        assert (array.shape, array.dtype) == (expected[name].shape, expected[name].dtype)
    return number
