"""A cache of planned steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spes_swarm.config.run import RunConfig
from spes_swarm.peer.memory import step_memory
from spes_swarm.peer.memory.step_memory import StepMemory, StepShape


@pytest.fixture(scope="package", autouse=True)
def _each_step_is_taken_once() -> Iterator[None]:
    """Caches steps: each takes most of a second, and these tests need the same few many times."""
    take, taken = step_memory.step_memory, dict[tuple[str, StepShape, int], StepMemory]()

    def remembered(run: RunConfig, shape: StepShape, micro_batch_size: int) -> StepMemory:
        key = repr(run), shape, micro_batch_size
        if key not in taken:
            taken[key] = take(run, shape, micro_batch_size)
        return taken[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_memory, "step_memory", remembered)
        yield
