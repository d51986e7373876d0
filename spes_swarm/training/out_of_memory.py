"""Handles failed allocations, unreadable data and lost ranks: the peer leaves the swarm gracefully and says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from spes_swarm.base.errors import CapacityError, DataError, DataStoppedError, RankError


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if an allocation failed in Python, NumPy, CUDA, or torch on the CPU (a plain RuntimeError)."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


# Kinds of the `fault` event.
_KINDS = {CapacityError: "memory", DataError: "data", RankError: "rank"}


@contextmanager
def as_user_error(when: str) -> Iterator[None]:
    """Turns a failed allocation into a CapacityError whose message begins with "out of memory" and `when`."""
    try:
        yield
    except (MemoryError, RuntimeError) as exc:
        if not is_out_of_memory(exc):
            raise
        reason = " ".join(str(exc).split())[:200] or type(exc).__name__
        advice = (
            "choose fewer --experts, --foreign-experts int8, --activation-checkpointing layers "
            "or, on a GPU, --optimizer-states host"
        )
        raise CapacityError(f"out of memory {when}: {reason}; {advice}") from exc


class StepFailures:
    """Ends training, as if the user had asked for it, when a step does not fit into memory or lacks data or a rank.

    The last round and the checkpoint take less memory than a step. The weights are those before the step, or partly
    updated if an allocation of the optimiser failed.
    """

    def __init__(self, when: str, warn: Callable[[str, str], None], stop: Callable[[], None]) -> None:
        self._when = when
        self._warn = warn
        self._stop = stop
        self._error: CapacityError | DataError | RankError | None = None

    @contextmanager
    def guard(self, optimiser: torch.optim.Optimizer) -> Iterator[None]:
        """Wraps a step: records a failure for lack of memory, data or a rank, and frees the gradients.

        A step that stopped waiting for data is not a failure. Other errors propagate.
        """
        known = set(optimiser.state)
        try:
            with as_user_error(self._when):
                yield
        except DataStoppedError:
            self._stop()
        except (CapacityError, DataError, RankError) as exc:
            self._error = type(exc)(str(exc))  # a new one: the traceback of `exc` keeps the step's activations
            optimiser.zero_grad(set_to_none=True)
            # Optimisers allocate a parameter's state tensor by tensor, and would treat a partial state as complete.
            for parameter in optimiser.state.keys() - known:
                del optimiser.state[parameter]
            self._warn(_KINDS[type(exc)], str(exc))
            self._stop()

    def raise_if_failed(self) -> None:
        """Raises the recorded error; called after the peer has left the swarm.

        Raises:
            CapacityError: a step did not fit into memory.
            DataError: the data could not be read.
            RankError: another rank of this peer has ended.
        """
        if self._error is not None:
            raise self._error
