"""Failed allocations and unreadable data: one line, exit code 2, and an orderly departure from the swarm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from scripts.testing.local_peer import LocalPeer
from spes_swarm.base.errors import CapacityError, DataError, DataStoppedError
from spes_swarm.storage.checkpoint import checkpoints_in, read_content
from spes_swarm.training.out_of_memory import StepFailures, as_user_error, is_out_of_memory
from tests.helpers.lone_trainer import LoneTrainer, StubSampler, run_config
from tests.helpers.starved_join import launch_starved
from tests.helpers.swarm import swarm

TOO_MUCH = 1 << 60
ADVICE = (
    "choose fewer --experts, --foreign-experts int8, --activation-checkpointing layers "
    "or, on a GPU, --optimizer-states host"
)


def test_failed_allocations_of_all_kinds_are_recognised() -> None:
    for allocate in (lambda: bytearray(TOO_MUCH), lambda: np.ones(TOO_MUCH // 16), lambda: torch.ones(TOO_MUCH // 16)):
        with pytest.raises((MemoryError, RuntimeError)) as raised:
            allocate()
        assert is_out_of_memory(raised.value), raised.value
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(OSError("No space left on device"))


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), as_user_error("here"):
        raise RuntimeError("shapes differ")


def test_a_step_without_memory_ends_training_and_is_raised_after_leaving() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    told: list[str] = []
    memory = StepFailures(
        "on cpu in a step", lambda kind, text: told.append(f"{kind}: {text}"), lambda: told.append("stop")
    )
    memory.raise_if_failed()
    with memory.guard(torch.optim.SGD([weight])):
        bytearray(TOO_MUCH)
    line = f"out of memory on cpu in a step: MemoryError; {ADVICE}"
    assert told == [f"memory: {line}", "stop"]
    assert all(parameter.grad is None for parameter in (weight,))
    with pytest.raises(CapacityError, match=line):
        memory.raise_if_failed()


def test_a_parameter_whose_state_was_half_allocated_begins_with_none() -> None:
    """AdamW takes a state that has a step count for whole, and the next step would fail for want of its moments."""
    known, new = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimiser = torch.optim.AdamW([known, new])
    known.grad = torch.ones(2)
    optimiser.step()
    memory = StepFailures("in a step", lambda kind, text: None, lambda: None)
    with memory.guard(optimiser):
        optimiser.state[new]["step"] = torch.tensor(0.0)
        bytearray(TOO_MUCH)
    assert list(optimiser.state) == [known]
    known.grad, new.grad = torch.ones(2), torch.ones(2)
    optimiser.step()


@pytest.mark.swarm
def test_a_peer_without_memory_leaves_the_swarm_in_order(tmp_path: Path) -> None:
    """Its last work is committed, its experts go to the other, and the other goes on."""
    with swarm(tmp_path) as running:
        founder = running.found("--experts", 8, "--wait-for-peers", 2)
        arguments = ["--initial-peers", founder.address(), "--experts", "2", "--wait-for-peers", "2"]
        arguments += ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--num-threads", "1"]
        with LocalPeer(tmp_path / "starved", arguments, launch_starved(125)) as peer:
            assert peer.wait() == 2
            last = peer.text().splitlines()[-1]
            assert last.startswith(
                "join: out of memory on cpu in a step: CUDA out of memory. Tried to allocate 2.00 GiB."
            )
            assert ADVICE in last
            assert "Traceback" not in peer.text()
            details = [event["detail"] for event in peer.events("fault") if event["kind"] == "memory"]
            assert details[0] == "2 sequences at a time do not fit into memory: trying 1"
            assert len(details) == 2
            (left,) = peer.events("leave")
            # 124 steps at 5 steps a round: the work of the last ones is in a round that was held for leaving. (A
            # peer that made only 24, in 0.6 s, once left before its view showed that the founder was training.)
            assert left["round"] == max(peer.rounds())
            assert peer.events("step")[-1]["round"] < left["round"]
            assert list((tmp_path / "starved" / "checkpoints").iterdir())
            assert founder.wait_for_round(left["round"] + 2)["experts_held"] == list(range(8))
        assert founder.process.poll() is None


class EndingSampler(StubSampler):
    """Data that can be read for three steps."""

    def __init__(self, error: DataError) -> None:
        self.error = error
        self.steps = 0

    def next_batch(self, batch_size: int) -> NDArray[np.int64]:
        """See BatchSource."""
        if self.steps == 3:
            raise self.error
        self.steps += 1
        return super().next_batch(batch_size)


@pytest.mark.parametrize("failed", [True, False])
def test_a_peer_without_data_leaves_in_order_and_loses_no_step(tmp_path: Path, failed: bool) -> None:
    error = DataError("hf:user/verses could not be read") if failed else DataStoppedError("stopped while waiting")
    lone = LoneTrainer(tmp_path, run_config(evaluation={"every_rounds": 0}), sampler=EndingSampler(error))
    lone.network.others = 1
    if failed:
        with pytest.raises(DataError, match="hf:user/verses could not be read"):
            lone.trainer.run()
    else:
        lone.trainer.run()
    lone.close()
    assert lone.trainer._learner.step == 3
    meta = read_content(checkpoints_in(lone.setup.checkpoints)[0]).meta
    assert (meta.step, meta.steps_in_round) == (3, 0)  # the work of all steps is in a round
    assert meta.round > 0
    assert lone.network.presences[-1] == "leaving"
    assert [event["kind"] for event in lone.events("fault")] == (["data"] if failed else [])
