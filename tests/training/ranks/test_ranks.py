"""Several ranks as one peer: who computes what, what rank 0 tells the others, and refusals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scripts.testing.forked_peer import ForkServer
from scripts.testing.local_peer import LocalPeer
from spes_swarm import join
from spes_swarm.base.errors import ConfigError, RankError
from spes_swarm.model.experts import SparseExperts
from spes_swarm.model.foreign.storage import ForeignStorage, HostStorage
from spes_swarm.model.losses import LossWeights
from spes_swarm.model.sparse_model import SparseModel, build_model
from spes_swarm.training.gradients import Gradients
from spes_swarm.training.ranks.buckets import buckets, transfer
from spes_swarm.training.ranks.group import RankGroup
from spes_swarm.training.ranks.orders import Order, Step, Stop, decode_order, encode_order
from spes_swarm.training.ranks.placement import Placement
from spes_swarm.training.ranks.shared_gradients import SharedGradients, compute_share, exchange_weights
from tests.helpers.lone_trainer import run_config
from tests.helpers.rank_trainer import replica
from tests.helpers.repository import ROOT

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "none",
}


def test_one_process_is_not_a_rank() -> None:
    assert Placement.from_environment({}) is None
    assert Placement.from_environment({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}) is None


def test_torchrun_says_which_rank_this_is() -> None:
    assert Placement.from_environment(TORCHRUN) == Placement(rank=1, world_size=2)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"MASTER_ADDR": ""}, "WORLD_SIZE is 2, but MASTER_ADDR is not set.*torchrun --standalone --nproc-per-node 2"),
        ({"RANK": ""}, "WORLD_SIZE is 2, but RANK is not set.*unset .* WORLD_SIZE "),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a number"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '9999.*not a number"),
        ({"WORLD_SIZE": "0"}, "RANK=1, WORLD_SIZE=0"),
        ({"RANK": "2"}, "RANK=2, WORLD_SIZE=2.*are not what torchrun sets"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http', not a number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 are not what torchrun sets"),
        (
            {"TORCHELASTIC_RUN_ID": ""},
            "torchrun has not started this process: unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT ",
        ),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            "only some of the 4 ranks.*scripts/slurm.sh",
        ),
        (
            {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            "only some of the 4 ranks.*scripts/slurm.sh",
        ),
    ],
)
def test_environments_that_torchrun_on_one_machine_does_not_make(changes: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Placement.from_environment({**TORCHRUN, **changes})


def test_an_environment_that_outlives_its_torchrun_is_named() -> None:
    with socket.socket() as torchrun:
        torchrun.bind(("127.0.0.1", 0))
        port = torchrun.getsockname()[1]
        left = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port)}
        why = rf"none is running at 127\.0\.0\.1:{port}: unset RANK .*TORCHELASTIC_USE_AGENT_STORE"
        with pytest.raises(ConfigError, match=why):
            Placement.from_environment(left)
        torchrun.listen()
        assert Placement.from_environment(left) == Placement(rank=1, world_size=2)


@given(st.integers(2, 16), st.integers(1, 16))
def test_the_shares_of_all_ranks_are_the_batch_in_order(world_size: int, each: int) -> None:
    batch = list(range(world_size * each))
    placements = [Placement(rank=rank, world_size=world_size) for rank in range(world_size)]
    shares = [batch[placement.share(len(batch))] for placement in placements]
    assert [sequence for share in shares for sequence in share] == batch
    assert {len(share) for share in shares} == {each}


def test_a_batch_that_cannot_be_divided_evenly_is_refused() -> None:
    placement = Placement(rank=0, world_size=4)
    placement.check_batch(8)
    for batch_size in (2, 10):
        with pytest.raises(ConfigError, match=f"a batch of {batch_size} cannot be divided.*a multiple of 4"):
            placement.check_batch(batch_size)


def test_orders_arrive_as_they_were_given() -> None:
    step = Step(held=(1, 5), all_weights=True, batch_shape=(4, 64), progress=0.1 + 0.2)
    for order in (replica(run_config(), held=(0, 7)), step, Stop()):
        assert decode_order(encode_order(order)) == order
        json.loads(encode_order(order))  # not a pickle


def test_a_replica_is_the_model_of_the_run() -> None:
    run = run_config()
    built = replica(run, held=(0, 7)).build(torch.device("cpu"))
    expected = SparseModel(build_model(run.model.type, run.model.settings, 0, "cpu"), (0, 7))
    assert built.held == expected.held
    assert shapes_of(built) == shapes_of(expected)


def shapes_of(model: SparseModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.trainable_parameters()}


DTYPES = st.sampled_from([torch.float32, torch.uint8, torch.bfloat16])
DEVICES = st.sampled_from(["cpu", "meta"])


@given(st.lists(st.tuples(st.integers(0, 20), DTYPES, DEVICES), max_size=12), st.integers(1, 80))
def test_buckets_hold_all_tensors_in_order(kinds: list[tuple[int, torch.dtype, str]], max_bytes: int) -> None:
    tensors = [torch.empty(size, dtype=dtype, device=device) for size, dtype, device in kinds]
    found = list(buckets(tensors, max_bytes))
    kept = [tensor for bucket in found for tensor in bucket]
    assert [id(tensor) for tensor in kept] == [id(tensor) for tensor in tensors if tensor.numel()]
    for bucket in found:
        assert len({(tensor.dtype, tensor.device) for tensor in bucket}) == 1
        assert len(bucket) == 1 or sum(tensor.nbytes for tensor in bucket) <= max_bytes


@pytest.mark.parametrize("received", [True, False])
def test_what_arrives_is_copied_back_where_it_is_wanted(received: bool) -> None:
    strided = torch.arange(6.0).view(2, 3).t()
    tensors = [torch.tensor(1.0), torch.arange(3.0), strided, torch.tensor([5], dtype=torch.int64)]
    expected = [tensor.clone() + (10 if received else 0) for tensor in tensors[:3]]

    def add(flat_N: Tensor) -> None:
        flat_N.add_(10)

    transfer(tensors, add, received=received)
    for tensor, wanted in zip(tensors, expected, strict=False):
        assert torch.equal(tensor, wanted)


class Meeting(RankGroup):
    """Rank 0 of two, the other of which reports what the test says."""

    def __init__(self, failures: float) -> None:
        super().__init__(Placement(rank=0, world_size=2))
        self.failures = failures
        self.added: list[Tensor] = []
        self.orders: list[Order] = []
        self.abandoned = False

    def send_order(self, order: Order) -> None:
        self.orders.append(order)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        list(tensors)

    def abandon(self) -> None:
        self.abandoned = True

    def all_reduce(self, values: Tensor) -> None:
        values[0] += self.failures

    def reduce(self, tensors: Iterable[Tensor]) -> None:
        self.added = list(tensors)

    def gather(self, own: Tensor) -> Tensor:
        return torch.stack((own, own))


def own_gradients(micro_batch_size: int, storage: ForeignStorage | None = None) -> tuple[SparseModel, Gradients]:
    run = run_config()
    model = SparseModel(build_model(run.model.type, run.model.settings, 0, "cpu"), (1, 4), foreign_storage=storage)
    device = torch.device("cpu")
    return model, Gradients(
        model,
        LossWeights(),
        micro_batch_size,
        device=device,
        autocast=contextlib.nullcontext,
        warn=lambda kind, text: None,
    )


BATCH_BS = np.arange(4 * 16, dtype=np.int64).reshape(4, 16)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_gradients_of_all_shares_add_up_to_those_of_the_batch(world_size: int) -> None:
    """Bit for bit where two numbers are added; more than two are added in another order than by one rank."""
    model, own = own_gradients(1)
    expected_loss = own.compute(BATCH_BS[:world_size], 0.0)
    expected = [parameter.grad for _, parameter in model.trainable_parameters()]
    routed_E = own.pop_routed_tokens()
    loss, sums = 0.0, [torch.zeros_like(parameter) for _, parameter in model.trainable_parameters()]
    for rank in reversed(range(world_size)):
        share = Placement(rank=rank, world_size=world_size).share(world_size)
        loss += own.compute(BATCH_BS[:world_size], 0.0, share)
        for total, (_, parameter) in zip(sums, model.trainable_parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad
    rtol, atol = (0.0, 0.0) if world_size == 2 else (1e-5, 1e-7)
    torch.testing.assert_close(sums, expected, rtol=rtol, atol=atol)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert own.pop_routed_tokens().tolist() == routed_E.tolist()


def test_a_rank_without_memory_ends_the_step_of_all_before_gradients_are_added_up() -> None:
    group = Meeting(failures=1.0)
    with pytest.raises(MemoryError, match="another rank"):
        compute_share(group, *own_gradients(2), BATCH_BS, 0.0)
    assert group.added == []


def test_rank_0_without_memory_still_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = own_gradients(2)

    def fail(*_: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(own, "compute", fail)
    seen: list[float] = []
    group = Meeting(failures=0.0)
    monkeypatch.setattr(group, "all_reduce", lambda values: seen.append(float(values[0])))
    with pytest.raises(torch.OutOfMemoryError):
        compute_share(group, model, own, BATCH_BS, 0.0)
    assert seen == [1.0]
    assert group.added == []


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    ("error", "expected"), [(NO_MEMORY, False), (RuntimeError("a bug"), True), (KeyboardInterrupt(), True)]
)
def test_a_step_that_only_rank_0_gives_up_is_the_last(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, expected: bool
) -> None:
    """The other rank would wait for the rest of the step, and rank 0 for it to hear the order to stop."""
    group = Meeting(failures=0.0)
    model, own = own_gradients(2)
    abandoned: list[bool] = []

    def fail(*_: Any) -> float:
        raise error

    monkeypatch.setattr(own, "compute", fail)
    monkeypatch.setattr(group, "send_order", lambda order: None)
    monkeypatch.setattr(group, "broadcast", lambda tensors: None)
    monkeypatch.setattr(group, "abandon", lambda: abandoned.append(True))
    with pytest.raises(type(error)):
        SharedGradients(group, model, own, torch.device("cpu")).compute(BATCH_BS, 0.0)
    assert bool(abandoned) == expected


def test_weights_that_arrive_replace_prefetched_copies() -> None:
    class Arriving(Meeting):
        def broadcast(self, tensors: Iterable[Tensor]) -> None:
            for tensor in tensors:
                tensor.fill_(3)

    class Copied:
        def __init__(self, sources: list[Tensor]) -> None:
            self.tensors = [source.clone() for source in sources]

        def ready(self) -> list[Tensor]:
            return self.tensors

        def drop(self) -> None:
            pass

        finish = drop

    model, _ = own_gradients(2, HostStorage(Copied))
    experts = next(module for module in model.module.modules() if isinstance(module, SparseExperts))
    before = experts.fetch().matrices("down_proj", torch.float32, slice(None))
    step = Step(held=(1, 4), all_weights=True, batch_shape=(1, 2), progress=0.0)
    exchange_weights(Arriving(failures=0.0), model, step)
    assert not (before == 3).any()
    assert (experts.fetch().matrices("down_proj", torch.float32, slice(None)) == 3).all()


def test_a_group_that_is_not_connected_is_refused_and_closes_quietly() -> None:
    with RankGroup(Placement(rank=0, world_size=2)) as group, pytest.raises(RankError):
        group.send_order(Stop())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"MASTER_PORT": ""}, "WORLD_SIZE is 2, but MASTER_PORT is not set"),
        ({"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}, "a batch of 32 cannot be divided evenly among 3"),
    ],
)
def test_join_refuses_in_one_line(tmp_path: Any, changes: dict[str, str], why: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "spes_swarm.join", "--output-dir", tmp_path / "peer", "--batch-size", "32"],
        cwd=ROOT,
        env={**os.environ, **TORCHRUN, **changes},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"join: {why}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "peer").exists()


def interruptible_main(arguments: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored here
    return join.main(arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "number", "code"),
    [
        (0, signal.SIGINT, 1),
        (0, signal.SIGTERM, 1),
        (1, signal.SIGINT, -signal.SIGINT),
        (1, signal.SIGTERM, -signal.SIGTERM),
        (1, signal.SIGHUP, -signal.SIGHUP),
    ],
)
def test_a_rank_that_waits_says_so_and_obeys_signals(tmp_path: Any, rank: int, number: int, code: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(free.getsockname()[1])}
    launch = ForkServer(main=interruptible_main, environment={**os.environ, **TORCHRUN, **own})
    with LocalPeer(tmp_path / "peer", [], launch) as peer:
        peer.wait_for_text(
            rf"(^|\n)rank {rank} of this peer is waiting for 1 other rank; if torchrun is not running, stop and unset "
        )
        peer.process.send_signal(number)
        assert peer.wait() == code
        assert "Traceback" not in peer.text()


@pytest.mark.parametrize(
    ("chosen", "devices", "why"),
    [
        ("cuda", 1, "1 CUDA device for 2 ranks: start torchrun with --nproc-per-node 1, or use --device cpu"),
        ("cuda:1", 2, "--device cuda:1: each rank uses the GPU of its own number; give --device cuda"),
    ],
)
def test_each_rank_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch, chosen: str, devices: int, why: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    group = RankGroup(Placement(rank=1, world_size=2))
    with pytest.raises(ConfigError, match=why):
        group.own_device(torch.device(chosen))
    assert group.own_device(torch.device("cpu")) == torch.device("cpu")


def test_each_rank_uses_the_gpu_of_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    assert RankGroup(Placement(rank=1, world_size=2)).own_device(torch.device("cuda")) == torch.device("cuda", 1)
    assert used == [torch.device("cuda", 1)]
