"""Names for the parts of steps and rounds in traces of torch.profiler, and the recording of such a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from spes_swarm.training.setup import TrainerSetup

_SKIPPED_STEPS = 3  # the first ones allocate memory, and some compile


@contextmanager
def span(name: str) -> Iterator[None]:
    """Names the code inside, or a function that it decorates, spes/NAME in traces."""
    with record_function(f"spes/{name}"):
        yield


def start_profiler(setup: TrainerSetup) -> profile | None:
    """Starts a profiler if steps are to be recorded; `step` is called before each step.

    It writes trace.json.gz after these steps, or what there is when it is stopped. A failure to write is only reported.
    """
    path = setup.checkpoints.with_name("trace.json.gz")

    def write(recorded: profile) -> None:
        try:
            recorded.export_chrome_trace(str(path))
        except OSError as exc:
            setup.say(f"the trace cannot be written: {exc}")
        else:
            setup.say(f"the recorded steps are in {path}; open it in https://ui.perfetto.dev")

    if setup.profile_steps is None:
        return None
    profiler = profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (setup.device.type == "cuda"),
        schedule=schedule(wait=_SKIPPED_STEPS, warmup=1, active=setup.profile_steps, repeat=1),
        on_trace_ready=write,
    )
    profiler.start()
    return profiler
