"""The choice of an expert kernel: fixed on a CPU, measured elsewhere, without kernels that do not work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spes_swarm.base.errors import ConfigError
from spes_swarm.config.file import default_config_path, load_config
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.model import kernel_choice
from spes_swarm.model.kernel_choice import (
    KernelChoice,
    Layer,
    LayerShape,
    choose_kernel,
    fastest,
    measured_choice,
    try_kernel,
)
from spes_swarm.model.kernels import KERNELS, Groups, LoopKernel, TorchKernel
from spes_swarm.peer.step_settings import check_tools, kernel_of

torch.set_num_threads(1)

CPU = torch.device("cpu")
SMALL = LayerShape(tokens=16, top_k=2, dim=8, ffn=4, experts=3, held=1)


def _quickstart() -> RunConfig:
    run = load_config(default_config_path()).run
    assert run is not None
    return run


def _with_held(held: int) -> LayerShape:
    return LayerShape(tokens=16, top_k=1, dim=8, ffn=4, experts=3, held=held)


class _Other(LoopKernel):
    source = "a test"


class _Failing(_Other):
    def product(self, x_TD: Tensor, w_GFD: Tensor, groups: Groups) -> Tensor:
        raise RuntimeError("no kernel image\nis available")


class _Wrong(_Other):
    def weight_gradient(self, grad_y_TF: Tensor, x_TD: Tensor, groups: Groups) -> Tensor:
        return 2 * super().weight_gradient(grad_y_TF, x_TD, groups)


def _missing() -> LoopKernel:
    raise ConfigError("kernel 'missing' needs the package x")


@pytest.fixture
def more_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in {"missing": _missing, "failing": _Failing, "wrong": _Wrong}.items():
        monkeypatch.setitem(KERNELS, name, make)


def test_kernels_that_do_not_work_are_skipped_with_the_reason_in_one_line(more_kernels: None) -> None:
    choice = measured_choice(SMALL, CPU, "fp32")
    assert choice.kernel in ("torch", "loop")
    for reason in (
        "skipped: kernel 'missing' needs the package x",
        "skipped: kernel 'failing' (a test) fails at its first product: no kernel image is available",
        "skipped: kernel 'wrong' (a test) computes wrong results: they are off by 100%",
    ):
        assert reason in choice.kernel_reason
    assert "\n" not in choice.kernel_reason


@pytest.mark.parametrize(("name", "why"), [("failing", "first product"), ("wrong", "wrong results"), ("x", "unknown")])
def test_a_kernel_named_by_the_user_must_work(more_kernels: None, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_tools(PeerConfig(kernel=name), CPU)


def test_torch_is_preferred_unless_another_is_clearly_faster() -> None:
    sources = {"torch": "torch", "loop": "torch", "other": "other 1.0"}
    assert fastest({"torch": 1.0, "other": 0.96}, sources).kernel == "torch"
    assert fastest({"torch": 1.0, "other": 0.9, "loop": 2.0}, sources) == KernelChoice(
        "other", "a layer takes other (other 1.0) 900 ms, torch 1e+03 ms, loop 2e+03 ms"
    )
    assert fastest({"loop": 2.0, "other": 3.0}, sources).kernel == "loop"
    assert fastest({}, {}, ["skipped"]) == KernelChoice("torch", "none could be measured; skipped")


@pytest.mark.parametrize(("held", "precision"), [(0, "fp32"), (2, "bf16"), (5, "fp32")])
def test_a_layer_computes_the_same_with_every_kernel(held: int, precision: str) -> None:
    shape = LayerShape(tokens=48, top_k=2, dim=64, ffn=32, experts=5, held=held)
    layer = Layer(shape, CPU, precision)
    assert layer.distance(TorchKernel(), LoopKernel()) < 1e-6
    assert len(layer.compute(LoopKernel())) == (3 if held == 0 else 5)


def test_experts_can_be_left_out() -> None:
    *_, gate_up_HFD, down_HDF = Layer(_with_held(3), CPU, "fp32", leave_out=True).compute(LoopKernel())
    for grad in (gate_up_HFD, down_HDF):
        assert not grad[[0, 2]].any()
        assert grad[1].any()


def test_on_a_cpu_it_is_torch_without_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "measured_choice", None)
    assert choose_kernel(SMALL, CPU, "fp32").kernel == "torch"
    assert kernel_of(_quickstart(), PeerConfig(), CPU, 1, 2).kernel == "torch"
    assert kernel_of(_quickstart(), PeerConfig(kernel="loop"), CPU, 1, 2) == KernelChoice("loop", "as set, with torch")


def test_the_layer_that_is_measured_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []

    def measure(*arguments: Any) -> KernelChoice:
        measured.append(arguments)
        return KernelChoice("torch", "")

    monkeypatch.setattr("spes_swarm.peer.step_settings.choose_kernel", measure)
    run = _quickstart()
    kernel_of(run, PeerConfig(precision="bf16"), CPU, 1, 2)
    settings: Any = run.model.settings
    expected = LayerShape(
        tokens=2 * run.training.sequence_length,
        top_k=settings["num_experts_per_tok"],
        dim=settings["hidden_size"],
        ffn=settings["intermediate_size"],
        experts=settings["num_experts"],
        held=1,
    )
    assert measured == [(expected, CPU, "bf16")]


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_measures(precision: str) -> None:
    choice = choose_kernel(SMALL, torch.device("cuda"), precision)
    assert choice.kernel in KERNELS
    assert "a layer takes" in choice.kernel_reason
    try_kernel(choice.kernel, torch.device("cuda"), precision)


def test_code_from_the_hub_runs_only_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "would_be_downloaded", lambda: True)
    monkeypatch.setitem(KERNELS, "megablocks", lambda: pytest.fail("it was loaded"))
    choice = measured_choice(SMALL, CPU, "fp32")
    assert choice.kernel in ("torch", "loop")
    assert "the prebuilt megablocks is code from the Hub" in choice.kernel_reason
