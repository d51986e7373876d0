"""What fits into memory, counted in bytes by hand, and what is said when something does not."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.base.errors import CapacityError, ConfigError
from spes_swarm.config.file import default_config_path, load_config
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.peer import capacity
from spes_swarm.peer.capacity import Workload, choose_device, experts_that_fit, free_bytes, plan_experts
from spes_swarm.peer.host_memory import cgroup_free_bytes, free_host_bytes
from spes_swarm.protocol.consensus.layout import Layout
from tests.helpers.repository import ROOT
from tests.helpers.rounds import small_layout

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GB = 10**9


def workload(layout: Layout, device: torch.device = CPU, logits_bytes: int = 0, result_bytes: int = 0) -> Workload:
    return Workload(layout=layout, device=device, logits_bytes=logits_bytes, result_bytes=result_bytes)


def with_free(patch: pytest.MonkeyPatch, *, host: int, device: int | None = None) -> None:
    """A machine with that much free memory; only the reading is replaced."""
    patch.setattr(capacity, "free_host_bytes", lambda: host)
    patch.setattr(capacity, "free_bytes", lambda _: host if device is None else device)


def cpu_bytes(num_experts: int, shared: int, expert: int, trained: int, step: int = 0, results: int = 0) -> int:
    """Weights and reference (8 bytes a weight); gradient, two moments and contribution (16 for each trained one)."""
    return 8 * (shared + num_experts * expert) + 16 * (shared + trained * expert) + max(step, results)


@given(
    num_experts=st.integers(1, 8),
    shared=st.integers(2, 10_000),
    expert=st.integers(3, 10_000),
    most=st.integers(1, 8),
    batch_size=st.integers(1, 64),
    logits_bytes=st.integers(0, 10_000),
    result_bytes=st.integers(0, 100_000),
    free=st.integers(0, 4_000_000),
)
def test_as_many_experts_as_the_bytes_allow(
    num_experts: int,
    shared: int,
    expert: int,
    most: int,
    batch_size: int,
    logits_bytes: int,
    result_bytes: int,
    free: int,
) -> None:
    load = workload(small_layout(num_experts, shared, expert), CPU, logits_bytes, result_bytes)

    def needed(trained: int, sequences: int = batch_size) -> int:
        return cpu_bytes(num_experts, shared, expert, trained, sequences * logits_bytes, result_bytes)

    with pytest.MonkeyPatch.context() as patch:
        with_free(patch, host=free)
        try:
            fit = experts_that_fit(load, "auto", most, batch_size)
        except CapacityError as exc:
            assert needed(1) > free
            smaller = re.search(r"--batch-size (\d+) would fit", str(exc))
            if smaller is not None:
                assert needed(1, int(smaller[1])) <= free
            return
        assert 1 <= fit <= most
        assert needed(fit) <= free
        if fit > 1:  # something is left for activations
            assert needed(fit) <= 0.7 * free
        if fit < most:
            assert needed(fit + 1) > 0.7 * free


M = 10**6
# 82 M weights. On the CPU: 656 MB for them, 160 MB more for the shared ones, 144 MB for each trained expert, 100 MB a
# sequence. With a GPU, there 328 + 120 + 108 + 100 MB, and 656 MB at the least in the machine.
LARGE = small_layout(num_experts=8, shared=10 * M, expert=9 * M)


def refusal(load: Workload, wanted: int | tuple[int, ...], batch_size: int) -> str:
    with pytest.raises(CapacityError) as raised:
        experts_that_fit(load, wanted, 8, batch_size)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("free", "wanted", "batch_size", "what_would_fit"),
    [
        (2.10, 8, 2, "--experts 3 would fit"),  # 1,016 + 3 * 144 MB are less than 70 % of it
        (2.15, 4, 8, "--batch-size 1 would fit"),  # 1,392 + 100 MB
        (2.00, 4, 8, "--experts 1 --batch-size 4 would fit"),  # 960 + 400 MB
        (1.10, 4, 8, "--experts 1 --batch-size 1 would fit"),  # 960 + 100 MB, with nothing left
        (1.00, 4, 8, "one expert and one sequence at a time still need 1.1 GB; use a machine with more memory"),
    ],
)
def test_a_refusal_says_what_would_fit(
    monkeypatch: pytest.MonkeyPatch, free: float, wanted: int, batch_size: int, what_would_fit: str
) -> None:
    with_free(monkeypatch, host=int(free * GB))
    load = workload(LARGE, logits_bytes=100 * M)
    line = refusal(load, wanted, batch_size)
    needed = (816 + 144 * wanted + 100 * batch_size) / 1000
    assert line.startswith(
        f"training {wanted} experts in batches of {batch_size} needs {needed:.1f} GB of this machine's memory, but "
        f"only {free:.1f} GB is free: {what_would_fit}"
    )
    assert refusal(load, tuple(range(wanted)), batch_size) == line


def test_what_just_fits_is_tried_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, host=1_392 * M + 8 * 100 * M)
    assert experts_that_fit(workload(LARGE, logits_bytes=100 * M), 4, 8, 8) == 4
    assert experts_that_fit(workload(LARGE, logits_bytes=100 * M), "auto", 8, 8) == 1


def test_a_gpu_and_the_machine_around_it_are_checked_each(monkeypatch: pytest.MonkeyPatch) -> None:
    load = workload(LARGE, CUDA, logits_bytes=100 * M)
    with_free(monkeypatch, host=10 * GB, device=2 * GB)
    assert experts_that_fit(load, "auto", 8, 4) == 5  # 448 + 5 * 108 + 400 MB are less than 1.4 GB
    with_free(monkeypatch, host=10 * GB, device=1 * GB)
    assert "needs 1.3 GB of the memory of cuda:0, but only 1.0 GB is free" in refusal(load, 4, 4)
    with_free(monkeypatch, host=655 * M, device=10 * GB)
    assert "needs 656.0 MB of this machine's memory, but only 655.0 MB is free" in refusal(load, 1, 4)


def founding(tmp_path: Path) -> tuple[RunConfig, PeerConfig]:
    run = load_config(default_config_path()).run
    assert run is not None
    return run, PeerConfig(output_dir=str(tmp_path / "out"))


def test_the_quickstart_is_counted_without_being_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, peer = founding(tmp_path)
    with_free(monkeypatch, host=GB)
    assert plan_experts(run, peer, CPU) == 4
    # 8 sequences of 128 tokens with 272 logits each, and as many gradients: 2.2 MB. 337,216 weights: less than 10 MB.
    with_free(monkeypatch, host=3 * M)
    with pytest.raises(CapacityError, match=r"needs \d\.\d MB of this machine's memory, but only 3\.0 MB is free"):
        plan_experts(run, peer, CPU)
    with pytest.raises(ConfigError, match="expected 1 to 8 experts"):
        plan_experts(run, PeerConfig(experts="9"), CPU)


def test_a_batch_whose_logits_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's 1B: 256 sequences of 2,048 tokens with 151,665 logits are 318 GB in fp32."""
    run = load_config(ROOT / "configs" / "spes-1b.yaml").run
    assert run is not None
    with_free(monkeypatch, host=200 * GB)
    with pytest.raises(CapacityError, match=r"batches of 256 needs 6[45]\d\.\d GB .* --batch-size \d+ would fit"):
        plan_experts(run, PeerConfig(experts="4"), CPU)


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
