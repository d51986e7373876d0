"""How many experts and sequences fit, activations included, before anything is built."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spes_swarm.base.errors import CapacityError
from spes_swarm.config.experts_wanted import ExpertsWanted
from spes_swarm.config.peer import PeerConfig, StorageOrNone
from spes_swarm.config.run import RunConfig
from spes_swarm.model.sparse_model import build_model, layout_of
from spes_swarm.peer.memory import capacity, host_memory, peer_plan, step_memory
from spes_swarm.peer.memory.capacity import Workload
from spes_swarm.peer.memory.peer_plan import PeerPlan, plan_peer
from spes_swarm.peer.memory.step_memory import StepEstimate, StepShape, layers_if_alike, with_layers
from spes_swarm.protocol.consensus.layout import Layout
from tests.helpers.small_2b import eighth_of_2b

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def four_layers() -> RunConfig:
    """An eighth of 2B with four layers; its vocabulary is small, so that most activations are those of layers."""
    run = with_layers(eighth_of_2b(), 4)
    settings = {**run.model.settings, "vocab_size": 512, "num_experts": 4}
    return replace(run, model=replace(run.model, settings=settings), training=replace(run.training, batch_size=8))


FOUR_LAYERS = four_layers()
QWEN_SETTINGS = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "vocab_size": 32,
}


def sizes(found: PeerPlan) -> tuple[int, int]:
    """Experts, and sequences at a time."""
    return found.experts, found.micro_batch_size


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_files_that_do_not_fit_on_the_disk_are_refused_before_they_are_created(tmp_path: Path, num_ranks: int) -> None:
    """Reference and contribution, also of the last round: once, however many ranks there are."""
    peer = PeerConfig(experts=ExpertsWanted.parse("1"), reference_storage="disk", output_dir=str(tmp_path))
    weights = layout(FOUR_LAYERS)
    trained = weights.blocks[0].size + weights.expert_block(0).size
    files = len(weights.blocks) + 3  # and headers
    checkpoint = 4 * weights.num_elements + 8 * trained + 8192 * files  # AdamW has two moments
    needed = 16 * weights.num_elements + checkpoint
    with pytest.MonkeyPatch.context() as patch:
        for left in (needed, needed - 1):
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=left))  # noqa: B023  # called at once
            if left == needed:
                assert plan_peer(FOUR_LAYERS, peer, CPU, num_ranks).previous == "disk"
                continue
            with pytest.raises(CapacityError, match=r" MB are needed on its disk, .* but only .* use --previous-ref"):
                plan_peer(FOUR_LAYERS, peer, CPU, num_ranks)


def test_the_previous_reference_costs_no_peer_and_no_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = PeerConfig(experts=ExpertsWanted.parse("auto"), output_dir=str(tmp_path))
    work = Workload.of(FOUR_LAYERS, replace(peer, previous_reference="none"), CPU)
    most = FOUR_LAYERS.experts_per_peer
    places: dict[StorageOrNone, str] = {"auto": "disk", "disk": "disk", "none": "none"}
    for previous, place in places.items():
        with_free(monkeypatch, int(1.3 * work.needed(most)[1]))
        workload, experts = capacity.plan_experts(FOUR_LAYERS, replace(peer, previous_reference=previous), CPU)
        assert (workload.previous, experts) == (place, most)
    with_free(monkeypatch, 10**12)
    assert plan_peer(FOUR_LAYERS, peer, CPU).previous == "memory"
    insisting = replace(peer, experts=ExpertsWanted.parse(str(most)), previous_reference="memory")
    with_free(monkeypatch, int(1.05 * work.needed(most)[1]))
    with pytest.raises(CapacityError, match=rf"--experts {most} --previous-reference disk would fit"):
        capacity.plan_experts(FOUR_LAYERS, insisting, CPU)


def test_a_disk_with_space_for_few_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first one must fit; where three do not, two of which are kept, the peer warns."""
    peer = PeerConfig(experts=ExpertsWanted.parse("1"), output_dir=str(tmp_path / "not" / "there"), keep_checkpoints=2)
    weights = layout(FOUR_LAYERS)
    trained = weights.blocks[0].size + weights.expert_block(0).size
    size = 4 * weights.num_elements + 8 * trained + 8192 * (len(weights.blocks) + 3)
    notes = []
    for left in (size, 2 * size, 3 * size):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=left))  # noqa: B023  # called at once
        notes.append(plan_peer(FOUR_LAYERS, peer, CPU).note)
    rooms = [note.partition(" has space for ")[2].partition(" of up to")[0] for note in notes]
    assert rooms == ["1 more checkpoint", "2 more checkpoints", ""]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size - 1))
    with pytest.raises(
        CapacityError, match=r"MB of it for a checkpoint, but only .* are free; free some space, or use an"
    ):
        plan_peer(FOUR_LAYERS, peer, CPU)
    (tmp_path / "not" / "there" / "checkpoints" / "round-00000001-step-0000000005").mkdir(parents=True)
    assert "has space for 0 more checkpoints" in plan_peer(FOUR_LAYERS, peer, CPU).note  # training goes on with that


def shape(checkpointing: str = "none", *, on_gpu: bool = False) -> StepShape:
    return StepShape(
        num_held=1,
        foreign_experts="bf16",
        precision="bf16" if on_gpu else "fp32",
        activation_checkpointing=checkpointing,
        on_gpu=on_gpu,
    )


def layout(run: RunConfig) -> Layout:
    return layout_of(build_model(run.model.type, run.model.settings, 0, "cpu", on_meta=True))


def with_free(patch: pytest.MonkeyPatch, free: int) -> None:
    """A machine with that much free memory on the device and on the host; only the reading is replaced."""
    for module in (capacity, host_memory, peer_plan):
        patch.setattr(module, "free_host_bytes", lambda: free)
    for module in (capacity, peer_plan):
        patch.setattr(module, "free_bytes", lambda _: free)


def test_only_layers_that_are_alike_stand_for_each_other() -> None:
    settings, four = FOUR_LAYERS.model.settings, layout(FOUR_LAYERS)
    assert layers_if_alike(settings, four) == 4
    assert layers_if_alike({**settings, "layer_types": ["full_attention"] * 4}, four) is None
    assert layers_if_alike({**settings, "num_hidden_layers": 3}, four) is None
    odd = build_model("qwen3_moe", QWEN_SETTINGS | {"mlp_only_layers": [0]}, 0, "cpu", on_meta=True)
    assert layers_if_alike({"num_hidden_layers": 3}, layout_of(odd)) is None


def test_the_largest_micro_batch_is_the_largest_that_fits() -> None:
    estimate = StepEstimate(FOUR_LAYERS, shape(), layout(FOUR_LAYERS))
    assert estimate.largest_micro_batch(estimate.temporary(1) - 1, 4) == 0
    for size in (1, 2, 4, 8):
        assert estimate.largest_micro_batch(estimate.temporary(size), 8) == size
    assert estimate.largest_micro_batch(estimate.temporary(4), 3) == 3
    assert estimate.largest_micro_batch(1e18, 1) == 1


def needed(device: torch.device, peer: PeerConfig, sequences: int) -> tuple[int, int]:
    """Returns the bytes without and with activations, of one expert."""
    work = Workload.of(FOUR_LAYERS, peer, device)
    static = work.needed(1)[0 if device.type == "cuda" else 1]
    one = replace(shape(on_gpu=device.type == "cuda"), foreign_experts=work.foreign_experts)
    return static, static + step_memory.step_memory(FOUR_LAYERS, one, sequences).temporary


@pytest.mark.parametrize(("device", "share"), [(CPU, 0.7), (CUDA, 0.95)])
def test_as_many_sequences_as_fit(monkeypatch: pytest.MonkeyPatch, device: torch.device, share: float) -> None:
    peer = PeerConfig(experts=ExpertsWanted.parse("1"))
    with_free(monkeypatch, int(1.01 * needed(device, peer, 4)[1] / share))
    assert sizes(plan_peer(FOUR_LAYERS, peer, device)) == (1, 4)
    assert plan_peer(FOUR_LAYERS, replace(peer, micro_batch_size="3"), device).micro_batch_size == 3
    with_free(monkeypatch, int(1.01 * needed(device, peer, 2)[1] / share))
    assert plan_peer(FOUR_LAYERS, peer, device).micro_batch_size == 2
    assert plan_peer(FOUR_LAYERS, replace(peer, micro_batch_size="4"), device).micro_batch_size == 2
    with_free(monkeypatch, int(1.01 * needed(device, peer, 1)[1]))  # nothing to spare
    assert plan_peer(FOUR_LAYERS, peer, device).micro_batch_size == 1


def test_a_step_that_cannot_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = PeerConfig(experts=ExpertsWanted.parse("1"))
    static, together = needed(CUDA, peer, 1)
    with_free(monkeypatch, (static + together) // 2)
    with pytest.raises(CapacityError) as raised:
        plan_peer(FOUR_LAYERS, peer, CUDA)
    line = str(raised.value)
    assert "\n" not in line
    assert line.startswith(f"training 1 expert needs {together / 1e6:.1f} MB of the memory of cuda:0, activations of ")
    assert line.endswith("MB is free: --activation-checkpointing layers would fit")
    # What it proposes does fit.
    assert plan_peer(FOUR_LAYERS, replace(peer, activation_checkpointing="layers"), CUDA).micro_batch_size >= 1
    layers = replace(shape("layers", on_gpu=True), foreign_experts="bf16")
    with_free(monkeypatch, static + step_memory.step_memory(FOUR_LAYERS, layers, 1).temporary - 1)
    with pytest.raises(CapacityError, match=r"--activation-checkpointing layers --foreign-experts int8 would fit$"):
        plan_peer(FOUR_LAYERS, peer, CUDA)
    long = replace(FOUR_LAYERS, training=replace(FOUR_LAYERS.training, sequence_length=2048))
    with pytest.raises(CapacityError, match=r"a smaller model or shorter sequences$"):
        plan_peer(long, peer, CUDA)


def test_automatic_experts_make_room_for_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(FOUR_LAYERS, experts_per_peer=4, training=replace(FOUR_LAYERS.training, sequence_length=1024))
    work = Workload.of(run, PeerConfig(), CUDA)
    two = StepShape(num_held=4, foreign_experts="bf16", precision="bf16", activation_checkpointing="none", on_gpu=True)
    with_free(monkeypatch, work.needed(2)[0] + step_memory.step_memory(run, two, 1).temporary + 1000)
    assert sizes(plan_peer(run, PeerConfig(), CUDA)) == (2, 1)


def test_a_small_model_takes_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepEstimate, "temporary", lambda *_: pytest.fail("a step was estimated"))
    with_free(monkeypatch, 10**12)
    assert sizes(plan_peer(FOUR_LAYERS, PeerConfig(experts=ExpertsWanted.parse("1")), CPU)) == (1, 8)
