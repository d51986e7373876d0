"""The trial of an expert kernel: one that does not work is refused before anything is built."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spes_swarm.base.errors import ConfigError
from spes_swarm.config.peer import PeerConfig, override
from spes_swarm.model.kernel_trial import Layer, LayerShape, try_kernel
from spes_swarm.model.kernels import KERNELS, Groups, LoopKernel, TorchKernel
from spes_swarm.peer.step_settings import check_tools

torch.set_num_threads(1)

CPU = torch.device("cpu")


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


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing", "kernel 'missing' needs the package x"),
        ("failing", "kernel 'failing' (a test) fails at its first product: no kernel image is available; use another"),
        ("wrong", "kernel 'wrong' (a test) computes wrong results: they are off by 100%; use another"),
    ],
)
def test_a_kernel_that_does_not_work_is_refused_with_the_reason(more_kernels: None, name: str, why: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        try_kernel(name, CPU, "fp32")
    assert str(refusal.value) == why


def test_the_kernels_of_a_peer_are_those_that_there_are() -> None:
    assert PeerConfig().kernel == "torch"
    for name in KERNELS:
        assert override(PeerConfig(), kernel=name).kernel == name
    for other in ("auto", "Torch", ""):
        with pytest.raises(ConfigError, match=f"kernel: found '{other}', expected torch, megablocks or loop"):
            override(PeerConfig(), kernel=other)
    check_tools(PeerConfig(kernel="loop"), CPU)


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


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["torch", "loop"])
def test_kernels_without_packages_work_on_a_gpu(name: str, precision: str) -> None:
    try_kernel(name, torch.device("cuda"), precision)
