"""Checkpoints that are written while training goes on: what they hold, when they are due, and what failures cost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spes_swarm.base.errors import CheckpointError
from spes_swarm.storage.checkpoint import Checkpoint, checkpoints_in, load_newest
from spes_swarm.storage.checkpoint_files import ReferenceFile
from spes_swarm.storage.checkpoint_writing import save_checkpoint
from spes_swarm.training.optimiser.moment_storage import FORMS
from spes_swarm.training.optimiser.saved_state import optimiser_arrays
from tests.helpers.lone_trainer import LoneTrainer, run_config

Make = Callable[..., LoneTrainer]
PATIENCE_S = 60.0


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[LoneTrainer] = []

    def make_one(**setup: Any) -> LoneTrainer:
        made.append(LoneTrainer(tmp_path, **setup))
        return made[-1]

    yield make_one
    for peer in made:
        peer.close()


class Gate:
    """Holds up the thread that writes a checkpoint, before it begins."""

    def __init__(self, patches: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()

        def gated(*arguments: Any) -> Any:
            assert self.open.wait(PATIENCE_S)
            return save_checkpoint(*arguments)

        patches.setattr("spes_swarm.training.saving.save_checkpoint", gated)


def newest(peer: LoneTrainer) -> Checkpoint:
    found, complaints = load_newest(peer.setup.checkpoints, "test", "me", peer.model.layout)
    assert found is not None
    assert not complaints
    return found


def one_round(peer: LoneTrainer) -> None:
    peer.trainer._train_step()
    assert peer.trainer._rounds.begin(leaving=False)
    peer.trainer._rounds.end()


def saved_rounds(peer: LoneTrainer) -> list[int]:
    peer.trainer._saver._finish()
    return [event["round"] for event in peer.events("checkpoint")]


def state_of(peer: LoneTrainer) -> tuple[np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]:
    """Live weights of what it trains, and moments."""
    live_N = np.zeros(peer.model.layout.num_elements, dtype=np.float32)
    peer.trainer._learner.live.read_trained(live_N)
    return live_N, optimiser_arrays(peer.trainer._learner.optimiser, dict(peer.model.trainable_parameters()))


def assert_holds(checkpoint: Checkpoint, peer: LoneTrainer, state: Any) -> None:
    live_N, moments = state
    found_N = np.zeros_like(live_N)
    checkpoint.live(peer.model.layout, found_N)
    assert found_N.tobytes() == live_N.tobytes()
    found = checkpoint.optimiser()
    assert found.keys() == moments.keys()
    assert all(found[name].tobytes() == moments[name].tobytes() for name in moments)


@pytest.mark.parametrize("more_steps", [0, 2], ids=["at a commit", "after steps"])
def test_a_checkpoint_holds_the_moment_it_was_taken_however_far_training_is_when_it_is_written(
    make: Make, monkeypatch: pytest.MonkeyPatch, more_steps: int
) -> None:
    gate, peer = Gate(monkeypatch), make()
    peer.trainer._saver._due_at = float("inf")
    one_round(peer)
    for _ in range(more_steps):
        peer.trainer._train_step()
    state, step = state_of(peer), peer.trainer._learner.step
    peer.trainer._saver.start()
    for _ in range(2):
        peer.trainer._train_step()
    gate.open.set()
    peer.trainer._saver._finish()
    checkpoint = newest(peer)
    assert (checkpoint.meta.round, checkpoint.meta.step, checkpoint.meta.steps_in_round) == (1, step, more_steps)
    assert checkpoint.meta.reference_digest == peer.network.reference.digest.hex()
    assert_holds(checkpoint, peer, state)
    assert not np.array_equal(state_of(peer)[0], state[0])
    # After a commit the live weights are those of the reference: they are not stored twice.
    live_bytes = (checkpoint.path / "live.safetensors").stat().st_size
    assert (live_bytes > 4 * peer.model.layout.blocks[0].size) == (more_steps > 0)


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
@pytest.mark.parametrize("states", FORMS)
def test_a_peer_resumes_from_a_background_checkpoint_as_if_it_had_not_stopped(
    make: Make, states: str, optimiser: str
) -> None:
    run = run_config(training={"optimiser": optimiser})
    peer = make(run=run, optimizer_states=states)
    one_round(peer)
    peer.trainer._saver._finish()
    checkpoint = newest(peer)
    one_round(peer)
    again = make(run=run, optimizer_states=states)
    reference_N = again.network.reference.values_N
    checkpoint.reference(again.model.layout, reference_N)
    again.network.reference.finish(1, [(block, version) for block, version in enumerate(checkpoint.meta.versions)])
    again.trainer.restore(checkpoint, again.network.reference.table)
    one_round(again)
    assert again.network.reference.digest == peer.network.reference.digest
    assert again.live().tobytes() == peer.live().tobytes()


def test_the_next_step_changes_nothing_before_all_is_copied(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, waiting = make(), threading.Event()
    copy, wait = peer.trainer._learner.live.beyond_reference, peer.trainer._saver.before_step

    def slow_copy() -> Any:
        assert waiting.wait(PATIENCE_S)  # the backward pass is done
        return copy()

    def before_step() -> None:
        waiting.set()
        wait()

    peer.trainer._saver._due_at = float("inf")
    one_round(peer)
    peer.trainer._train_step()
    state = state_of(peer)
    monkeypatch.setattr(peer.trainer._learner.live, "beyond_reference", slow_copy)
    monkeypatch.setattr(peer.trainer._saver, "before_step", before_step)
    peer.trainer._saver.start()
    peer.trainer._train_step()
    assert not np.array_equal(state_of(peer)[0], state[0])
    peer.trainer._saver._finish()
    assert_holds(newest(peer), peer, state)


def test_the_next_round_begins_once_the_reference_is_read(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, order, waiting = make(), [], threading.Event()
    write, wait, commit = ReferenceFile.write, peer.trainer._saver.before_round, peer.network.run_round

    def slow_write(file: ReferenceFile, *arguments: Any) -> bool:
        assert waiting.wait(PATIENCE_S)
        order.append("read")
        return write(file, *arguments)

    def before_round() -> None:
        waiting.set()
        wait()

    async def run_round(*arguments: Any, **named: Any) -> Any:
        order.append("round")
        return await commit(*arguments, **named)

    peer.trainer._saver._due_at = float("inf")
    one_round(peer)
    monkeypatch.setattr(ReferenceFile, "write", slow_write)
    monkeypatch.setattr(peer.trainer._saver, "before_round", before_round)
    monkeypatch.setattr(peer.network, "run_round", run_round)
    peer.trainer._train_step()
    peer.trainer._saver.start()
    one_round(peer)
    assert order == ["read"] * len(peer.model.layout.blocks) + ["round"]
    assert saved_rounds(peer) == [1]
    assert newest(peer).meta.step == 2


# When.


def test_while_one_is_being_written_no_other_is_begun(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, peer = Gate(monkeypatch), make()
    monkeypatch.setattr(peer.trainer._saver, "before_round", lambda: None)  # the gate is before the reference
    one_round(peer)
    peer.trainer._saver._due_at = 0.0
    peer.trainer._learner.round, peer.trainer._learner.step = 7, 700
    peer.trainer._saver.after_round()
    gate.open.set()
    assert saved_rounds(peer) == [1]


def test_every_round_is_saved_if_the_user_wants_that(make: Make) -> None:
    peer = make(checkpoint_minutes=0.0)
    for _ in range(4):
        one_round(peer)
    assert saved_rounds(peer) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("write_s", "due_s"), [(0.5, 30.0), (10.0, 600.0), (300.0, 1200.0)], ids=["quick", "slow", "slower"]
)
def test_a_checkpoint_is_due_after_sixty_times_its_duration_or_the_interval(
    make: Make, monkeypatch: pytest.MonkeyPatch, write_s: float, due_s: float
) -> None:
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("spes_swarm.training.saving.time", clock)
    peer = make(checkpoint_minutes=20.0)
    one_round(peer)  # the first comes at once, so that a disk that is too small is noticed at once
    clock.now += write_s
    assert saved_rounds(peer) == [1]
    clock.now = 1000.0 + due_s - 0.1
    one_round(peer)
    assert saved_rounds(peer) == [1]
    clock.now = 1000.0 + due_s + 0.1
    one_round(peer)
    assert saved_rounds(peer) == [1, 3]


def test_the_last_one_is_written_though_an_earlier_one_is_on_its_way(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, peer = Gate(monkeypatch), make(max_rounds=1)
    one_round(peer)
    peer.trainer._train_step()
    gate.open.set()
    peer.trainer._saver.save()
    assert newest(peer).meta.step == 2
    assert saved_rounds(peer) == [1, 1]


# Failures.


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Fills the disk, as far as peers can see."""

    def fill() -> None:
        monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096))

    return fill


def test_without_room_for_another_checkpoint_training_goes_on_with_the_one_before(
    make: Make, full_disk: Callable[[], None]
) -> None:
    peer = make(checkpoint_minutes=0.0)
    one_round(peer)
    assert saved_rounds(peer) == [1]
    full_disk()
    one_round(peer)
    one_round(peer)
    assert saved_rounds(peer) == [1]
    assert newest(peer).meta.round == 1
    faults = [event["detail"] for event in peer.events("fault") if event["kind"] == "checkpoint"]
    assert [
        f"of round {number} could not be written: No space left on device" in faults[number - 2] for number in (2, 3)
    ]
    assert [f"training goes on, but {fault}" for fault in faults] == peer.said
    assert peer.setup.status.faults == 2
    with pytest.raises(CheckpointError, match="No space left on device"):  # but it does not leave without a word
        peer.trainer._saver.save()


def test_without_room_for_the_first_checkpoint_training_ends(make: Make, full_disk: Callable[[], None]) -> None:
    peer = make()
    full_disk()
    one_round(peer)
    with pytest.raises(CheckpointError, match="there is no earlier one"):
        peer.trainer._saver._finish()
    assert checkpoints_in(peer.setup.checkpoints) == []
    assert not any(peer.setup.checkpoints.iterdir())
