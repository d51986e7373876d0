"""What becomes of a peer when an allocation fails: it leaves the swarm in order and says what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from spes_swarm.base.errors import CapacityError


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if an allocation failed: in Python, numpy, CUDA, or torch on the CPU, which has no type for it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


@contextmanager
def as_user_error(when: str) -> Iterator[None]:
    """Turns a failed allocation into a CapacityError that begins "out of memory" and says when."""
    try:
        yield
    except (MemoryError, RuntimeError) as exc:
        if not is_out_of_memory(exc):
            raise
        reason = " ".join(str(exc).split())[:200] or type(exc).__name__
        advice = "choose a smaller --batch-size, or fewer --experts"
        raise CapacityError(f"out of memory {when}: {reason}; {advice}") from exc


class StepMemory:
    """Ends training as if the user had asked for it when a step does not fit into memory.

    A last round and a checkpoint take less memory than a step. The weights are then those before the step, or, where
    the optimiser's own allocations failed, have moved in part.

    Args:
        when: completes "out of memory ...".
        warn: is told why training ends.
        stop: ends training.
    """

    def __init__(self, when: str, warn: Callable[[str, str], None], stop: Callable[[], None]) -> None:
        self._when = when
        self._warn = warn
        self._stop = stop
        self._error: CapacityError | None = None

    @contextmanager
    def guard(self, optimiser: torch.optim.Optimizer) -> Iterator[None]:
        """Around a step: a failed allocation is remembered and gradients are given up; other errors pass."""
        known = set(optimiser.state)
        try:
            with as_user_error(self._when):
                yield
        except CapacityError as exc:
            self._error = CapacityError(str(exc))  # a new one: the old one keeps the step's activations
            optimiser.zero_grad(set_to_none=True)
            # Optimisers allocate a parameter's state piece by piece, and take half of one for all of it ever after.
            for parameter in optimiser.state.keys() - known:
                del optimiser.state[parameter]
            self._warn("memory", str(exc))
            self._stop()

    def raise_if_exhausted(self) -> None:
        """After leaving.

        Raises:
            CapacityError: a step did not fit into memory.
        """
        if self._error is not None:
            raise self._error
