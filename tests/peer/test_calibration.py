"""The predicted speed against a step of the whole model, on a clock that counts operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spes_swarm.base.errors import CapacityError, ConfigError
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import ModelConfig, RunConfig
from spes_swarm.model.flops import ModelFlops
from spes_swarm.model.sparse_model import SparseModel, build_empty_model
from spes_swarm.peer import calibration
from spes_swarm.peer.calibration import calibrate
from spes_swarm.peer.memory.step_memory import with_layers
from tests.helpers.small_2b import eighth_of_2b

torch.set_num_threads(1)
CPU = torch.device("cpu")
PEER = PeerConfig(experts="1", batch_size=4, micro_batch_size="2")


def six_layers() -> RunConfig:
    run = with_layers(eighth_of_2b(), 6)
    settings = {**run.model.settings, "vocab_size": 4096, "num_experts": 4}
    return replace(run, model=replace(run.model, settings=settings))


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlopCounterMode]:
    """Replaces the clock by one that counts the operations of matrix products."""
    with FlopCounterMode(display=False) as mode:
        monkeypatch.setattr("spes_swarm.peer.calibration.time.perf_counter", lambda: mode.get_total_flops() / FLOPS)
        yield mode


FLOPS = 1e12


def operations_of_a_batch(run: RunConfig, counter: FlopCounterMode) -> float:
    probe = calibration._Probe(run, PEER, CPU)
    before = counter.get_total_flops()
    probe._take(calibration._Tokens(2, run.training.sequence_length))
    return 2 * (counter.get_total_flops() - before)


@pytest.mark.slow
@pytest.mark.parametrize("step_s", [10.0, 1e-3], ids=["whole micro-batches", "few tokens"])
def test_speed_is_that_of_the_whole_model(
    monkeypatch: pytest.MonkeyPatch, counter: FlopCounterMode, step_s: float
) -> None:
    monkeypatch.setattr(calibration, "_STEP_S", step_s)
    run = six_layers()
    speed = calibrate(run, PEER, CPU)
    expected = operations_of_a_batch(run, counter) / FLOPS
    assert speed.step_seconds == pytest.approx(expected, rel=0.05)
    assert speed.tokens_per_second == pytest.approx(4 * run.training.sequence_length / speed.step_seconds)
    assert speed.round_step_seconds == pytest.approx(run.round.inner_steps * speed.step_seconds)
    model = SparseModel(build_empty_model(run.model.type, run.model.settings), [0])
    flops = ModelFlops.of(model, run.training.sequence_length)
    tokens = 4 * run.training.sequence_length
    operations = flops.step(tokens, tokens * flops.rows_per_token // 4).model
    assert speed.teraflops == pytest.approx(operations / speed.step_seconds / 1e12)
    assert speed.mfu is None


@pytest.mark.slow
def test_two_ranks_take_half_of_the_time(counter: FlopCounterMode) -> None:
    run = with_layers(six_layers(), 1)
    one, two = (calibrate(run, PEER, CPU, ranks).step_seconds for ranks in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.05)


@pytest.mark.slow
def test_a_vocabulary_that_is_too_large_is_extrapolated(
    monkeypatch: pytest.MonkeyPatch, counter: FlopCounterMode
) -> None:
    run = six_layers()
    monkeypatch.setattr(calibration, "_ENOUGH_BYTES", 1)
    assert calibration._with_room(run, PEER, CPU).model.vocab_size == 1024
    speed = calibrate(run, PEER, CPU)
    assert speed.step_seconds == pytest.approx(operations_of_a_batch(run, counter) / FLOPS, rel=0.05)


@pytest.mark.slow
def test_others_experts_are_in_files_before_there_is_an_output_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    peer = replace(PEER, foreign_storage="disk")
    assert calibrate(with_layers(six_layers(), 2), peer, CPU).tokens_per_second > 0
    assert list(tmp_path.iterdir()) == []


def test_no_model_is_built_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "free_host_bytes", lambda: 10**6)
    monkeypatch.setattr(calibration._Probe, "__init__", lambda *_: pytest.fail("a model was made"))
    with pytest.raises(CapacityError, match=r"--calibrate: two layers of the model take .* leave --calibrate out"):
        calibrate(with_layers(six_layers(), 1), PEER, CPU)


def test_different_layers_cannot_represent_each_other() -> None:
    names = ("hidden_size", "vocab_size", "num_experts", "num_attention_heads", "num_key_value_heads")
    settings = {name: six_layers().model.settings[name] for name in names}
    settings |= {"num_experts_per_tok": 2, "num_hidden_layers": 2, "mlp_only_layers": [0]}
    model = ModelConfig(type="qwen3_moe", settings=settings)
    with pytest.raises(ConfigError, match="the layers of this model differ"):
        calibrate(replace(six_layers(), model=model), PEER, CPU)


def test_time_neither_falls_nor_starts_below_zero() -> None:
    line = calibration._Line
    assert line.through([(1.0, 3.0), (3.0, 7.0)]) == line(1.0, 2.0)
    assert line.through([(1.0, 3.0), (3.0, 2.0)]) == line(0.0, 2.0 / 3)  # disturbed
    assert line.through([(1.0, 1.0), (3.0, 9.0)]) == line(0.0, 3.0)
    assert line.through([(2.0, 4.0)]) == line(0.0, 2.0)
