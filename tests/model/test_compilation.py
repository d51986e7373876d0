"""Compiled layers against the plain ones, and what a machine without a compiler is told."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, nn

from spes_swarm.base.errors import ConfigError
from spes_swarm.model.activation_checkpointing import checkpoint_activations
from spes_swarm.model.compilation import check_compiler, compile_layers
from spes_swarm.model.losses import LossWeights, language_model_loss
from spes_swarm.model.output_head import output_head
from spes_swarm.model.sparse_model import SparseModel, build_model

torch.set_num_threads(1)

# Raised inside torch's compiler.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

CPU = torch.device("cpu")
SETTINGS = {
    "olmoe": {"intermediate_size": 16},
    "qwen3_moe": {"moe_intermediate_size": 16, "intermediate_size": 20, "head_dim": 8},
}
COMMON = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WEIGHTS = LossWeights(load_balance=0.5, router_z=0.25, logit_z=0.125)


def step(model_type: str, checkpointing: str, *, compiled: bool) -> tuple[dict[str, Tensor], list[int], int]:
    """Returns a step's gradients, the tokens that each expert got, and how many graphs were compiled."""
    torch._dynamo.reset()  # forgets what other tests have compiled
    torch._dynamo.utils.counters.clear()
    sparse = SparseModel(build_model(model_type, COMMON | SETTINGS[model_type], seed=0, device="cpu"), (1, 4))
    checkpoint_activations(sparse.module, checkpointing)
    if compiled:
        compile_layers(sparse.module)
    sparse.module.train()
    ids = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(1))
    torch.autograd.backward(language_model_loss(sparse.module, ids, WEIGHTS, sparse.held, progress=0.5).total)
    gradients = {name: p.grad for name, p in sparse.trainable_parameters() if p.grad is not None}
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return gradients, sparse.pop_routed_tokens().tolist(), num_graphs


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++, which is not installed")
@pytest.mark.parametrize(
    ("model_type", "checkpointing"),
    [("olmoe", "none"), ("olmoe", "layers"), ("qwen3_moe", "none"), ("qwen3_moe", "selective")],
)
def test_gradients_are_those_of_the_plain_step(model_type: str, checkpointing: str) -> None:
    plain, plain_tokens, _ = step(model_type, "none", compiled=False)
    ours, tokens, num_graphs = step(model_type, checkpointing, compiled=True)
    assert num_graphs > 0
    assert ours.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6)
    assert tokens == plain_tokens


def test_nothing_is_compiled_to_find_the_output_head() -> None:
    sparse = SparseModel(build_model("olmoe", COMMON | SETTINGS["olmoe"], seed=0, device="cpu"), (1, 4))
    compile_layers(sparse.module)
    torch._dynamo.utils.counters.clear()
    assert output_head(sparse.module) is not None
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler, and no-such-compiler is not installed; install it"):
        check_compiler(CPU)


def test_a_compiler_that_fails_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(torch, "compile", fail)
    with pytest.raises(ConfigError, match=r"fails on this machine: first line second line; use false$"):
        check_compiler(CPU)


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(ConfigError, match="the layers of Linear are not supported; use false"):
        compile_layers(nn.Linear(1, 1))
