"""What fits into memory, counted in bytes by hand, and what is said when something does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.base.errors import CapacityError, ConfigError
from spes_swarm.config.experts_wanted import ExpertsWanted
from spes_swarm.config.file import default_config_path, load_config
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.model.sparse_model import SparseModel, build_model
from spes_swarm.peer.memory import capacity, host_memory
from spes_swarm.peer.memory.capacity import Workload, choose_device, experts_that_fit, free_bytes, plan_experts
from spes_swarm.peer.memory.host_memory import cgroup_free_bytes, free_host_bytes
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.training.optimiser.registry import make_optimiser
from tests.helpers.repository import ROOT
from tests.helpers.rounds import small_layout

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GB = 10**9


def workload(layout: Layout, device: torch.device = CPU, form: str = "fp32", result_bytes: int = 0) -> Workload:
    return Workload(layout=layout, device=device, foreign_experts=form, result_bytes=result_bytes, on_disk=False)


def with_free(patch: pytest.MonkeyPatch, *, host: int, device: int | None = None) -> None:
    """A machine with that much free memory; only the reading is replaced."""
    patch.setattr(capacity, "free_host_bytes", lambda: host)
    patch.setattr(host_memory, "free_host_bytes", lambda: host)
    patch.setattr(capacity, "free_bytes", lambda _: host if device is None else device)


def cpu_bytes(num_experts: int, shared: int, expert: int, trained: int, results: int = 0) -> int:
    """Weights and reference (8 bytes a weight); gradient, two moments, their copy and contribution (24 if trained)."""
    return 8 * (shared + num_experts * expert) + 24 * (shared + trained * expert) + results


@given(
    num_experts=st.integers(1, 8),
    shared=st.integers(2, 10_000),
    expert=st.integers(3, 10_000),
    most=st.integers(1, 8),
    result_bytes=st.integers(0, 100_000),
    free=st.integers(0, 4_000_000),
)
def test_as_many_experts_as_the_bytes_allow(
    num_experts: int, shared: int, expert: int, most: int, result_bytes: int, free: int
) -> None:
    most = min(most, num_experts)
    load = workload(small_layout(num_experts, shared, expert), CPU, result_bytes=result_bytes)

    def needed(trained: int) -> int:
        return cpu_bytes(num_experts, shared, expert, trained, result_bytes)

    with pytest.MonkeyPatch.context() as patch:
        with_free(patch, host=free)
        try:
            fit = experts_that_fit(load, None, most)
        except CapacityError as exc:
            assert needed(1) > free
            proposed = str(exc).rpartition(": ")[2].split()
            flags = dict(zip(proposed[::2], proposed[1::2], strict=False))
            if "--experts" in flags:
                smaller = replace(load, foreign_experts=flags.get("--foreign-experts", "fp32"))
                assert smaller.needed(int(flags["--experts"]))[1] <= free
            return
        assert 1 <= fit <= most
        assert needed(fit) <= free
        if fit > 1:  # something is left for activations
            assert needed(fit) <= 0.7 * free
        if fit < most:
            assert needed(fit + 1) > 0.7 * free


M = 10**6
# 82 M weights. On the CPU: 656 MB for them and the reference, 240 MB more for the shared ones, 216 MB for each trained
# expert. With a GPU, there 160 + 144 MB for each trained expert and 36 for each other one.
LARGE = small_layout(num_experts=8, shared=10 * M, expert=9 * M)


def refusal(load: Workload, wanted: int | None) -> str:
    with pytest.raises(CapacityError) as raised:
        experts_that_fit(load, wanted, 8)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("free", "wanted", "what_would_fit"),
    [
        (2.25, 8, "--experts 3 would fit"),  # 896 + 3 * 216 MB are less than 70 % of it
        (1.50, 4, "--experts 1 --foreign-experts bf16 would fit"),  # 896 + 216 - 7 * 18 MB are less than 70 %
        (1.36, 4, "--experts 1 --foreign-experts int8 would fit"),  # 896 + 216 - 7 * 26.4
        (1.29, 4, "--experts 1 --foreign-experts int4 would fit"),  # 896 + 216 - 7 * 30.9
        (0.90, 4, "--experts 1 --foreign-experts int4 would fit"),  # with nothing left
        (0.85, 4, "one expert with --foreign-experts int4 still needs 895.4 MB; use a machine with more"),
    ],
)
def test_a_refusal_says_what_would_fit(
    monkeypatch: pytest.MonkeyPatch, free: float, wanted: int, what_would_fit: str
) -> None:
    with_free(monkeypatch, host=int(free * GB))
    load = workload(LARGE)
    line = refusal(load, wanted)
    needed = 896 + 216 * wanted
    shown = f"{needed / 1000:.1f} GB" if needed >= 1000 else f"{needed:.1f} MB"
    have = f"{free:.1f} GB" if free >= 1 else f"{free * 1000:.1f} MB"
    assert line.startswith(
        f"training {wanted} experts needs {shown} of this machine's memory, but only {have} is free: {what_would_fit}"
    )
    assert refusal(load, ExpertsWanted.parse(",".join(map(str, range(wanted))) + ",").number) == line


def test_what_just_fits_is_tried_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, host=1_760 * M)
    assert experts_that_fit(workload(LARGE), 4, 8) == 4
    assert experts_that_fit(workload(LARGE), None, 8) == 1


def test_a_gpu_and_the_machine_around_it_are_checked_each(monkeypatch: pytest.MonkeyPatch) -> None:
    load = workload(LARGE, CUDA)
    with_free(monkeypatch, host=10 * GB, device=2 * GB)
    assert experts_that_fit(load, None, 8) == 8  # 160 + 8 * 144 MB are less than 1.4 GB
    with_free(monkeypatch, host=10 * GB, device=1 * GB)
    assert experts_that_fit(load, None, 8) == 2  # 160 + 2 * 144 + 6 * 36
    with_free(monkeypatch, host=10 * GB, device=500 * M)
    assert "needs 880.0 MB of the memory of cuda:0, but only 500.0 MB is free" in refusal(load, 4)
    with_free(monkeypatch, host=655 * M, device=10 * GB)
    # The reference, the contribution (19 M weights), their moments, and the model on its way to the device.
    assert "needs 884.0 MB of this machine's memory, but only 655.0 MB is free" in refusal(load, 1)


def test_moments_in_host_memory_are_suggested_for_a_small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    load = workload(LARGE, CUDA, "int4")
    with_free(monkeypatch, host=10 * GB, device=235 * M)
    # 10 + 9 M weights of 8 bytes, and 63 M of 4.5 bits: 188 MB.
    assert refusal(load, 2).endswith(": --experts 1 --optimizer-states host would fit")
    assert replace(load, optimizer_states="host").needed(1)[0] <= 235 * M
    with_free(monkeypatch, host=750 * M, device=235 * M)  # no room for them on the host
    # The reference, the contribution, the model on its way, the moments and their copy.
    assert ": one expert with --optimizer-states host still needs 819.4 MB of this machine's memory" in refusal(load, 2)


def test_the_previous_reference_on_disk_is_combined_with_other_savings(monkeypatch: pytest.MonkeyPatch) -> None:
    load = replace(workload(LARGE), previous="memory")  # 1,112 MB with one expert, and 404 for it
    with_free(monkeypatch, host=950 * M)
    assert refusal(load, 2).endswith(": --experts 1 --previous-reference disk --foreign-experts int8 would fit")
    with_free(monkeypatch, host=1_450 * M)
    assert refusal(load, 2).endswith(": --experts 1 --previous-reference disk --foreign-experts bf16 would fit")
    with_free(monkeypatch, host=890 * M)
    line = refusal(load, 2)
    assert ": one expert with --previous-reference disk --foreign-experts int4 still needs 895.4 MB;" in line
    with_free(monkeypatch, host=10 * GB, device=500 * M)  # where it does not help
    on_gpu = replace(workload(LARGE, CUDA), previous="memory")
    assert refusal(on_gpu, 4).endswith(": --experts 3 --foreign-experts int8 --optimizer-states host would fit")


def test_the_least_shortage_is_that_of_both_memories_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert needs 339.4 MB on the GPU, 152 less with its moments on the host, and there 667, 152 and 404 MB."""
    load = replace(workload(LARGE, CUDA, "int4"), previous="memory")
    with_free(monkeypatch, host=700 * M, device=320 * M)
    line = refusal(load, 2)
    assert line.startswith("training 2 experts needs 1.2 GB of this machine's memory, but only 700.0 MB is free: ")
    assert "one expert with --previous-reference disk still needs 339.4 MB of the memory of cuda:0;" in line


def test_ranks_count_in_the_memory_that_they_use() -> None:
    one, two = workload(LARGE), replace(workload(LARGE), num_ranks=3)
    assert two.device_bytes(2) == one.device_bytes(2)
    # A model of 82 M weights, and gradients of 28 M.
    assert two.host_bytes(2) == one.host_bytes(2) | {"other_ranks": 2 * 4 * (82 + 28) * M}
    on_gpus = replace(workload(LARGE, CUDA, "bf16"), num_ranks=3)
    assert on_gpus.host_bytes(2)["round"] == 3 * (4 * 28 + 2 * 54) * M


def test_host_memory_is_checked_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, peer = founding(tmp_path)
    monkeypatch.setattr(capacity, "free_bytes", lambda _: pytest.fail("a GPU was asked"))
    monkeypatch.setattr(capacity, "free_host_bytes", lambda: GB)
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: GB)
    capacity.check_host_memory(run, peer, True)
    monkeypatch.setattr(capacity, "free_host_bytes", lambda: 2 * M)
    with pytest.raises(CapacityError, match=r"of this machine's memory, but only 2\.0 MB is free"):
        capacity.check_host_memory(run, peer, True)


def test_every_class_is_counted_where_it_is() -> None:
    load = workload(LARGE, CUDA, "int8", result_bytes=7)
    assert load.device_bytes(2) == {
        "shared": 40 * M,
        "held": 72 * M,
        "foreign": 57_375_000,  # 54 M weights of 8.5 bits
        "gradients": 112 * M,
        "optimiser": 224 * M,
    }
    assert load.host_bytes(2) == {
        "reference": 328 * M,
        "contribution": 112 * M,
        "round": 112 * M + 57_375_000,
        "checkpoint": 224 * M,
    }
    # 82 M weights, 28 M of them trained.
    assert replace(load, previous="memory").host_bytes(2)["previous"] == 4 * (82 + 28) * M
    assert "previous" not in replace(load, previous="disk").host_bytes(2)
    on_disk = replace(load, on_disk=True, device=CPU)
    assert on_disk.host_bytes(2) == {"reference": 0, "contribution": 0, "round": 7, "checkpoint": 224 * M}


def test_host_memory_leaves_two_layers_on_a_gpu() -> None:
    shared = {"embed": (10 * M,)}
    layers = {f"layers.{n}.{name}": (8, size) for n in range(5) for name, size in (("up", 2 * M), ("down", M))}
    load = replace(workload(Layout.build(shared, layers), CUDA, "bf16"), foreign_storage="host")
    stored = 6 * 5 * 3 * M * 2
    assert load.device_bytes(2)["foreign"] == 2 * stored // 5
    assert load.host_bytes(2)["foreign"] == stored
    assert load.host_bytes(2)["round"] == 4 * (10 + 2 * 5 * 3) * M  # the model on its way, without others' experts


def founding(tmp_path: Path) -> tuple[RunConfig, PeerConfig]:
    run = load_config(default_config_path()).run
    assert run is not None
    return run, PeerConfig(output_dir=str(tmp_path / "out"))


def test_the_quickstart_is_counted_without_being_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, peer = founding(tmp_path)
    with_free(monkeypatch, host=GB)
    assert plan_experts(run, peer, CPU)[1] == 4
    with_free(monkeypatch, host=2 * M)  # 337,216 weights: 1.3 MB, gradients and moments of at least half of them
    with pytest.raises(CapacityError, match=r"needs \d\.\d MB of this machine's memory, but only 2\.0 MB is free"):
        plan_experts(run, peer, CPU)
    with pytest.raises(ConfigError, match="expected 1 to 8 experts"):
        plan_experts(run, PeerConfig(experts=ExpertsWanted.parse("9")), CPU)


@pytest.mark.parametrize(("optimiser", "moments"), [("adamw", 8), ("muon", 4)])
def test_moments_take_what_the_optimiser_stores(tmp_path: Path, optimiser: Any, moments: int) -> None:
    run, peer = founding(tmp_path)
    # Without error feedback, whose rounding errors are in checkpoints, too.
    round_section = replace(run.round, codec="fp16")
    run = replace(run, training=replace(run.training, optimiser=optimiser), round=round_section)
    load = Workload.of(run, peer, CPU)
    model = SparseModel(build_model(run.model.type, run.model.settings, 0, "cpu"), range(4))
    made = make_optimiser(model, run.training)
    for _, parameter in model.trainable_parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    stored = sum(value.nbytes for state in made.state.values() for key, value in state.items() if key != "step")
    assert load.device_bytes(4)["optimiser"] == load.host_bytes(4)["checkpoint"] == stored
    more = load.device_bytes(5)["optimiser"] - load.device_bytes(4)["optimiser"]
    assert more == moments * load.layout.expert_block(0).size


def test_the_2b_model_fits_into_16_gb_with_one_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_config(ROOT / "configs" / "spes-2b.yaml").run
    assert run is not None
    with_free(monkeypatch, host=24 * GB, device=16 * GB)
    assert plan_experts(run, PeerConfig(experts=ExpertsWanted.parse("1")), CUDA)[1] == 1
    with_free(monkeypatch, host=24 * GB, device=12 * GB)
    with pytest.raises(CapacityError, match=r"needs 1[34]\.\d GB of the memory of cuda:0, but only 12\.0 GB is free"):
        plan_experts(run, PeerConfig(experts=ExpertsWanted.parse("1")), CUDA)


# What is free.


def test_the_memory_of_this_machine() -> None:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    total = int(lines["MemTotal"].split()[0]) * 1024
    assert 0 < free_bytes(CPU) < total
    assert free_host_bytes() <= psutil.virtual_memory().total


def group(path: Path, **files: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name.replace("memory_", "memory.", 1)).write_text(f"{content}\n", encoding="ascii")


def test_every_control_group_above_a_process_counts(tmp_path: Path) -> None:
    process = tmp_path / "cgroup"
    process.write_text("0::/user.slice/job\n", encoding="ascii")
    group(tmp_path / "fs", memory_stat="anon 1")  # the root has no limit
    group(tmp_path / "fs/user.slice", memory_max=8 * GB, memory_current=7 * GB, memory_stat=f"inactive_file {GB}")
    group(tmp_path / "fs/user.slice/job", memory_max="max", memory_current=1, memory_stat="inactive_file 0")
    assert list(cgroup_free_bytes(process, tmp_path / "fs")) == [2 * GB]
    group(tmp_path / "fs/user.slice/job", memory_max=3 * GB)
    assert sorted(cgroup_free_bytes(process, tmp_path / "fs")) == [2 * GB, 3 * GB - 1]


def test_a_container_sees_its_own_control_group_as_the_root(tmp_path: Path) -> None:
    process = tmp_path / "cgroup"
    process.write_text("0::/docker/0123\n", encoding="ascii")
    group(tmp_path / "fs", memory_max=4 * GB, memory_current=GB, memory_stat="inactive_file 0")
    assert list(cgroup_free_bytes(process, tmp_path / "fs")) == [3 * GB]


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    process = tmp_path / "cgroup"
    process.write_text("5:cpu:/job\n4:memory:/job\n0::/\n", encoding="ascii")
    group(
        tmp_path / "fs/memory/job",
        memory_limit_in_bytes=4 * GB,
        memory_usage_in_bytes=3 * GB,
        memory_stat="inactive_file 7\ntotal_inactive_file 1000",
    )
    assert list(cgroup_free_bytes(process, tmp_path / "fs")) == [GB + 1000]


def test_no_control_groups(tmp_path: Path) -> None:
    assert list(cgroup_free_bytes(tmp_path / "none", tmp_path)) == []


# Devices.


def test_a_cuda_device_of_a_number_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="device 'cuda:2' was requested, but this machine has 2 CUDA devices"):
        choose_device("cuda:2")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_memory_of_the_gpu() -> None:
    free, total = torch.cuda.mem_get_info()
    assert free_bytes(torch.device("cuda")) == pytest.approx(free, abs=total * 0.05)
