"""Makes the missing runs of a study, several at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.testing.forked_peer import server_context
from scripts.testing.study.arm import Arm, Study
from scripts.testing.study.course import Outcome, run_arm
from scripts.testing.study.results import Results, settings_of
from spes_swarm.base.errors import CapacityError
from spes_swarm.data.corpus import open_corpus
from spes_swarm.data.sampler import TokenStream
from spes_swarm.data.tokenizer import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run: an arm with a seed."""

    arm: Arm
    seed: int
    evaluations: int
    data: str  # source of the text
    settings: dict[str, Any]  # see results.settings_of

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"{self.arm.name}, seed {self.seed}"


def open_stream(arm: Arm, data: str) -> TokenStream:
    """Opens the text of a study.

    Raises:
        DataError: see open_corpus.
    """
    return TokenStream(open_corpus(data, load_tokenizer(arm.run.tokenizer.name)))


def tasks_of(study: Study, data: str) -> Iterator[Task]:
    """Yields all runs of a study, seed by seed, each once; arms with equal settings share a run."""
    digest = open_stream(study.arms[0], data).digest
    seen: set[str] = set()
    for seed in study.config.seeds:
        for arm in study.arms:
            for each in (arm, *study.lone.get(arm.name, ())):
                evaluations = study.config.evaluations
                settings = settings_of(each, seed, digest, evaluations)
                if (text := repr(settings)) not in seen:
                    seen.add(text)
                    yield Task(arm=each, seed=seed, evaluations=evaluations, data=data, settings=settings)


def _run(task: Task, directory: Path) -> Outcome:
    torch.set_num_threads(1)
    outcome = run_arm(task.arm, task.seed, open_stream(task.arm, task.data), task.evaluations)
    Results(directory).put(task.arm.name, task.settings, outcome)
    return outcome


def _begin_worker() -> None:
    # Ctrl-C reaches all processes; without Python's handler these end at once and silently.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # a killed parent tells its workers nothing, and they would wait for tasks forever


def run_missing(study: Study, data: str, directory: Path, jobs: int, say: Callable[[str], None]) -> None:
    """Makes all runs of a study that are not in the directory yet.

    A run that was interrupted starts again the next time; finished ones are kept.

    Raises:
        UserError: of the first run that cannot be made.
        CapacityError: a process was killed from outside.
    """
    results = Results(directory)
    tasks = list(tasks_of(study, data))
    missing = [task for task in tasks if results.get(task.settings) is None]
    say(f"{len(tasks)} runs, {len(tasks) - len(missing)} of them finished before")

    def report(task: Task, outcome: Outcome, number: int) -> None:
        loss = "diverged" if outcome.loss is None else f"loss {outcome.loss:.4f}"
        say(f"[{number}/{len(missing)}] {task.title}: {loss}, {outcome.seconds:.0f} s of CPU time")

    if jobs == 1 or len(missing) < 2:
        for number, task in enumerate(missing, 1):
            report(task, _run(task, directory), number)
        return
    # Forking this process, which has used torch, may deadlock.
    with ProcessPoolExecutor(min(jobs, len(missing)), server_context(), _begin_worker) as pool:
        running = {pool.submit(_run, task, directory): task for task in missing}
        try:
            for number, future in enumerate(as_completed(running), 1):
                report(running[future], future.result(), number)
        except BrokenProcessPool as exc:
            raise CapacityError(
                "a process of the study was killed, perhaps for memory; the same command continues (try fewer --jobs)"
            ) from exc
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
