"""The command `plan`: the settings that it recommends, what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from spes_swarm import plan as command
from spes_swarm.base.errors import CapacityError, ConfigError
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.peer.memory import step_memory
from spes_swarm.peer.memory.capacity import Workload, gigabytes
from spes_swarm.peer.memory.plan import Machine, Plan, plan
from spes_swarm.peer.memory.savings import as_flags, peers_to_try, savings, settings_of
from spes_swarm.peer.memory.step_memory import StepShape, with_layers
from tests.helpers.moe_models import save_moe
from tests.helpers.small_2b import eighth_of_2b

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def small_run() -> RunConfig:
    """One layer of four experts, with a small vocabulary: counting its steps takes little time."""
    run = with_layers(eighth_of_2b(), 1)
    settings = {**run.model.settings, "vocab_size": 512, "num_experts": 4}
    return replace(run, model=replace(run.model, settings=settings))


RUN = small_run()


def machine(device: torch.device, memory: int, host_memory: int = 10**12, ranks: int = 1) -> Machine:
    if device.type == "cpu":
        memory, host_memory = 0, memory
    return Machine(device=device, memory=memory, host_memory=host_memory, upload=20.0, download=100.0, ranks=ranks)


def planned(device: torch.device, memory: int, experts: int | None = 1, **more: Any) -> Plan:
    return plan(RUN, experts, machine(device, memory, **more), 16)


@pytest.mark.parametrize(
    ("text", "size"), [("16GB", 16 * 10**9), ("16GiB", 2**34), ("1.5g", 1_500_000_000), ("24 gb", 24 * 10**9), ("7", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert command.parse_size("--memory", text) == size


@pytest.mark.parametrize("text", ["", "16XB", "-1GB", "0GB", "GB", "9" * 400, "0.1"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--memory: found .*, expected a size such as 16GB or 16GiB"):
        command.parse_size("--memory", text)


def needed(experts: int, peer: PeerConfig, device: torch.device = CUDA, run: RunConfig = RUN) -> int:
    """Bytes of one sequence at a time: on the device, or in all on a CPU."""
    step = step_memory.step_memory(run, StepShape.of(peer, device, experts), 1)
    return Workload.of(run, peer, device).beside_activations(experts) + step.temporary


def test_the_fastest_settings_that_fit_are_chosen() -> None:
    tried = list(peers_to_try(CUDA))
    memory = needed(1, tried[3])
    fitting = next(peer for peer in tried if needed(1, peer) <= memory)
    assert settings_of(planned(CUDA, memory).peer) == settings_of(fitting)
    assert settings_of(planned(CUDA, 10**12).peer) == settings_of(tried[0])


@pytest.mark.slow
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_each_saving_saves_memory(device: torch.device) -> None:
    run = replace(RUN, model=replace(RUN.model, settings={**RUN.model.settings, "num_hidden_layers": 3}))
    tried = list(peers_to_try(device))
    assert len(tried) >= 5
    for before, after in pairwise(needed(1, peer, device, run) for peer in tried):
        assert after < before


def test_savings_begin_with_what_a_peer_has() -> None:
    given = {"foreign_experts": "int8", "optimizer_states": "device"}
    host, int4 = {"optimizer_states": "host"}, {"foreign_experts": "int4"}
    assert list(savings(given, CUDA)) == [host, host | int4]
    assert list(savings({**given, "foreign_experts": "int4"}, CUDA)) == [host]
    assert list(savings({"foreign_experts": "int4"}, CPU)) == []


def test_classes_are_those_of_the_settings() -> None:
    made = planned(CPU, 10**12)
    work = Workload.of(RUN, made.peer, CPU)
    step = step_memory.step_memory(RUN, StepShape.of(made.peer, CPU, 1), made.micro_batch_size)
    assert made.device == work.device_bytes(1) | {"activations": step.activations, "logits": step.logits}
    assert made.host == work.host_bytes(1)
    assert made.host_peak == sum(made.device.values()) + sum(made.host.values())


def test_the_bytes_of_a_round_follow_its_codecs() -> None:
    layout = Workload.of(RUN, PeerConfig(), CPU).layout
    shared, all_experts = layout.blocks[0].size, layout.num_elements - layout.blocks[0].size
    trained = shared + layout.expert_block(0).size
    int4, int8 = 0.5 + 2 / 64, 1 + 2 / 64  # bytes per value, with a scale for each block
    codecs = replace(RUN, round=replace(RUN.round, codec="int4", result_codec="int8"))
    made = plan(codecs, 1, machine(CPU, 10**12), 16)
    assert made.round_bytes == pytest.approx(15 / 16 * (shared * (int4 + int8) + all_experts * int4), rel=1e-4)
    assert made.host["checkpoint"] == 12 * trained  # moments and live weights
    # In memory: results, in the larger form, the encoded contributions, and rounding errors in fp32.
    assert made.host["round"] == pytest.approx(layout.num_elements * int8 + trained * (int4 + 4), rel=1e-4)


def test_ranks_on_a_cpu_share_its_memory() -> None:
    one, two = planned(CPU, 10**12), planned(CPU, 10**12, ranks=2)
    model = sum(one.device[name] for name in ("shared", "held", "foreign"))
    assert two.host == one.host | {"other_ranks": model + one.device["gradients"]}
    half = replace(RUN, training=replace(RUN.training, batch_size=2))
    step = step_memory.step_memory(half, StepShape.of(PeerConfig(foreign_experts="fp32"), CPU, 1), 2)
    assert two.micro_batch_size == 2
    assert two.device["activations"] + two.device["logits"] == 2 * step.temporary
    assert two.device["optimiser"] == one.device["optimiser"]


def test_ranks_on_gpus_share_the_host() -> None:
    one, two = planned(CUDA, 10**12), planned(CUDA, 10**12, ranks=2)
    model = sum(one.device[name] for name in ("shared", "held", "foreign"))
    assert two.host == one.host | {"round": max(one.host["round"], 2 * model)}
    assert {name: two.device[name] for name in ("shared", "optimiser")} == {
        name: one.device[name] for name in ("shared", "optimiser")
    }
    with pytest.raises(ConfigError, match=r"a batch of 4 cannot be divided evenly among 3; give a --batch-size"):
        planned(CUDA, 10**12, ranks=3)


TURNS = "experts take turns of 10 rounds, and stay as they are between them"


def test_as_many_experts_as_fit() -> None:
    *_, smallest = peers_to_try(CUDA)
    memory = needed(3, smallest)
    with pytest.raises(CapacityError) as raised:
        planned(CUDA, memory, 4)
    line = str(raised.value)
    assert line.startswith("training 4 experts needs at least ")
    assert re.search(r" of GPU memory.*, with --foreign-experts .*: --experts 3 would fit$", line)
    # Without a number of experts, it plans for these.
    many = replace(RUN, experts_per_peer=4)
    made = plan(many, None, machine(CUDA, memory), 16)
    assert made.experts == 3
    assert made.device_peak <= memory


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command.main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("memory", [1, 10**6])
def test_a_cpu_with_far_too_little_memory_is_told_what_all_of_it_is_for(memory: int) -> None:
    *_, smallest = peers_to_try(CPU)
    least = sum(Workload.of(RUN, replace(smallest, reference_storage="disk"), CPU).needed(1))
    with pytest.raises(CapacityError, match=f"at least {gigabytes(least)} .*{as_flags(settings_of(smallest))}: "):
        planned(CPU, memory)


def test_the_quickstart_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads(printed(capsys, "--json", "--device", "cpu", "--peers", "3", "--upload", "10"))
    assert made["device_peak"] == sum(made["device"].values())
    assert made["host_peak"] == made["device_peak"] + sum(made["host"].values())
    assert (made["experts"], made["covering_peers"], made["batch_size"], made["micro_batch_size"]) == (4, 2, 8, 8)
    assert (made["foreign_experts"], made["activation_checkpointing"]) == ("fp32", "none")
    assert made["round_seconds"] == pytest.approx(8 * made["round_bytes"] / 1e7)
    assert "--micro-batch-size          4\n" in printed(capsys, "--device", "cpu", "--batch-size", "4")


@pytest.mark.parametrize(
    ("peers", "row"),
    [
        (1, "experts that 1 such peer covers    1 of 4; " + TURNS),
        (3, "experts that 3 such peers cover    3 of 4; " + TURNS),
        (4, "experts that 4 such peers cover    4 of 4"),
        (20, "experts that 20 such peers cover   4 of 4"),
    ],
)
def test_a_plan_says_how_many_experts_such_peers_cover(peers: int, row: str) -> None:
    made = plan(RUN, 1, machine(CPU, 10**12), peers)
    assert row in command._table(made).splitlines()
    assert (made.covered_experts, made.num_experts) == (min(peers, 4), 4)


def test_experts_that_skip_rounds_cost_fewer_bytes_and_are_copied_for_checkpoints() -> None:
    def made(**changes: Any) -> Plan:
        return plan(
            replace(RUN, round=replace(RUN.round, codec="fp16", inner_steps=10, **changes)),
            2,
            machine(CPU, 10**12),
            peers=4,
        )

    always, sometimes = made(), made(expert_every=5)
    layout = Workload.of(RUN, PeerConfig(), CPU).layout
    shared, expert = layout.blocks[0].size, layout.expert_block(0).size
    assert always.round_bytes == pytest.approx(3 / 4 * 2 * (2 * shared + 4 * expert), rel=0.01)  # fp16
    assert sometimes.round_bytes == pytest.approx(3 / 4 * 2 * (2 * shared + 4 * expert / 5), rel=0.01)
    assert sometimes.step_bytes == sometimes.round_bytes // 10
    assert sometimes.host["checkpoint"] - always.host["checkpoint"] == 4 * 2 * expert


def test_json_has_everything_that_the_table_has(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--experts", "0,1"]
    made = json.loads(printed(capsys, *arguments, "--json"))
    classes = {**made["device"], **made["host"]}
    for line in printed(capsys, *arguments).splitlines():
        name, _, value = line.partition("  ")
        key = name.removeprefix("--").replace("-", "_").replace(" ", "_")
        if name.startswith("--"):
            assert str(made[key]) == value.strip()
        elif key in classes:
            assert f"{classes[key] / 1e6:.1f} MB" == value.strip()
        elif value:
            # Sums and costs, which the JSON names differently.
            assert key in {
                "training",
                "together",
                "bytes_each_way_in_a_round",
                "bytes_each_way_for_a_local_step",
                "seconds_for_them",
                "experts_that_16_such_peers_cover",
                "such_peers_that_cover_all_experts",
            }


def test_a_model_is_planned_by_its_configuration_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_moe(tmp_path / "model", "mixtral")
    for path in (tmp_path / "model").iterdir():
        if path.name != "config.json":
            path.unlink()
    config = tmp_path / "model" / "config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(values | {"pad_token_id": 2, "eos_token_id": 2}), encoding="utf-8")
    made = json.loads(printed(capsys, "--initial-weights", str(tmp_path / "model"), "--device", "cpu", "--json"))
    assert made["experts"] == 4  # all of them
    weights = sum(tensor.numel() for tensor in save_moe(tmp_path / "again", "mixtral").state_dict().values())
    assert sum(made["device"][name] for name in ("shared", "held", "foreign")) == 4 * weights


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--memory", "1MB"], "training 4 experts needs at least "),
        (["--memory", "1MB", "--experts", "4"], "plan with more memory, or with a smaller model"),
        (["--host-memory", "100kB"], " of host memory, with --foreign-experts "),
        (["--experts", "9"], "expected 1 to 8 experts"),
        (["--experts", "1,1"], "expected each expert once"),
        (["--peers", "0"], "--peers: found 0, expected more than 0"),
        (["--upload", "nan"], "--upload: found nan, expected more than 0"),
        (["--ranks", "-2"], "--ranks: found -2, expected more than 0"),
        (["--ranks", "3"], "a batch of 8 cannot be divided evenly among 3"),
        (["--batch-size", "10000000"], "batch_size: found 10000000, expected at most"),
        (["--device", "cpu", "--memory", "1GB"], "--memory is that of a GPU"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml: cannot be read"),
        (["--initial-weights", "/nowhere"], "/nowhere: no such directory"),
        (["--peers", "many"], "invalid int value"),
    ],
)
def test_what_is_impossible_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], why: str) -> None:
    assert command.main(arguments) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.startswith("plan: ")
    assert why in line


def test_a_configuration_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "peer.yaml"
    path.write_text(yaml.safe_dump({"peer": {"device": "cpu"}}), encoding="utf-8")
    assert command.main(["--config", str(path)]) == 2
    assert "a plan needs a `run` section" in capsys.readouterr().err
