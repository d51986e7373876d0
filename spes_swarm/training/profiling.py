"""Names for the parts of steps and rounds in traces of torch.profiler, and the recording of such a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

_SKIPPED_STEPS = 3  # the first ones allocate memory, and some compile


@contextmanager
def span(name: str) -> Iterator[None]:
    """Names the code inside, or a function that it decorates, spes/NAME in traces."""
    with record_function(f"spes/{name}"):
        yield


def start_profiler(steps: int | None, device: torch.device, path: Path, say: Callable[[str], None]) -> profile | None:
    """Starts a profiler that records so many steps, None if there are none; `step` is called before each step.

    It writes `path` after these steps, or what there is when it is stopped. A failure to write is only reported.
    """
    if steps is None:
        return None

    def write(recorded: profile) -> None:
        try:
            recorded.export_chrome_trace(str(path))
        except OSError as exc:
            say(f"the trace cannot be written: {exc}")
        else:
            say(f"the recorded steps are in {path}; open it in https://ui.perfetto.dev")

    profiler = profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda"),
        schedule=schedule(wait=_SKIPPED_STEPS, warmup=1, active=steps, repeat=1),
        on_trace_ready=write,
    )
    profiler.start()
    return profiler
