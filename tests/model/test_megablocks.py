"""The kernel megablocks: what it lacks is named, and what it computes is what the loop does."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from spes_swarm.base.errors import ConfigError
from spes_swarm.model.expert_mlp import Routing
from spes_swarm.model.kernel_trial import Layer, LayerShape
from spes_swarm.model.kernels import Groups, LoopKernel, load_kernel
from spes_swarm.model.kernels.megablocks import _prebuilt
from spes_swarm.model.losses import LossWeights, language_model_loss
from spes_swarm.model.sparse_model import SparseModel, build_model
from tests.helpers import megablocks_parts
from tests.helpers.repository import ROOT

torch.set_num_threads(1)

_MODULES = (
    *("megablocks", "megablocks.ops", "megablocks.backend", "megablocks.backend.kernels", "megablocks_ops"),
    *("grouped_gemm", "grouped_gemm.backend", "grouped_gemm_backend", "stk", "kernels"),
)
_WORKING = {
    "megablocks/__init__.py": "",
    "megablocks/ops/__init__.py": "",
    "megablocks/backend/__init__.py": "",
    "megablocks/backend/kernels.py": "",
    "grouped_gemm/__init__.py": "",
    "grouped_gemm/backend.py": "gmm = None",
}


def install(root: Path, monkeypatch: pytest.MonkeyPatch, modules: dict[str, str]) -> None:
    """Makes modules that can be imported in this test, from their files' names and sources."""
    for name, source in modules.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(root)
    for name in _MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"megablocks/__init__.py": "import absent"}, r"needs the module absent, which is not installed: see"),
        (
            {"megablocks/ops/__init__.py": "raise ModuleNotFoundError(\"No module named 'megablocks_ops'.\")"},
            r"needs megablocks_ops, the compiled part of megablocks, which was not built when it was installed: see",
        ),
        (
            {"grouped_gemm/backend.py": "import grouped_gemm_backend"},
            r"needs grouped_gemm_backend, the compiled part of grouped_gemm, which was not built",
        ),
        ({"grouped_gemm/__init__.py": "", "grouped_gemm/backend.py": None}, r"needs the module grouped_gemm\.backend"),
        (
            {"grouped_gemm/__init__.py": "raise OSError('libcudart.so.12: cannot open shared object file')"},
            r"grouped_gemm\.backend \(it must be built for this torch\) does not load: libcudart\.so\.12: cannot open",
        ),
        (
            {"megablocks/ops/__init__.py": "raise ImportError('undefined symbol:\\n _ZN3c10')"},
            r"megablocks\.ops \(it must be built for this torch\) does not load: undefined symbol: _ZN3c10; see",
        ),
    ],
)
def test_what_the_installed_package_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], why: str
) -> None:
    modules = {name: source for name, source in {**_WORKING, **changed}.items() if source is not None}
    install(tmp_path, monkeypatch, modules)
    with pytest.raises(ConfigError, match=why) as raised:
        load_kernel("megablocks")
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("installed", [True, False])
def test_it_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    install(tmp_path, monkeypatch, {**_WORKING, "kernels/__init__.py": ""})
    if not installed:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "megablocks" else find_spec(name))
    with pytest.raises(ConfigError, match="kernel 'megablocks' needs a CUDA device"):
        load_kernel("megablocks")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def get_kernel(repo_id, version):\n    raise OSError('offline:\\n no connection')", "offline: no connection"),
        ("", "has no attribute 'get_kernel'"),
        ("def get_kernel(repo_id, version):\n    import types\n    return types", "has no attribute 'ops'"),
    ],
)
def test_what_the_prebuilt_one_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    install(tmp_path, monkeypatch, {"kernels/__init__.py": source})
    with pytest.raises(ConfigError, match=why) as raised:
        _prebuilt()
    assert "kernels-community/megablocks (prebuilt, from the Hub) does not load" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_layer_with_its_dispatch_computes_what_the_loop_does() -> None:
    """The compiled parts and the triton kernels are stand-ins here; the way of the rows is what is tested."""
    assert megablocks_parts.distance(megablocks_parts) < 2e-2  # of bf16


@pytest.mark.parametrize("held", [(), (1, 4), tuple(range(6))])
def test_its_dispatch_moves_rows_as_torch_does(held: tuple[int, ...]) -> None:
    kernel = megablocks_parts.kernel(megablocks_parts)
    slots_TK = torch.randint(0, 6, (7, 3), generator=torch.Generator().manual_seed(0))
    ours = Routing.of(slots_TK, 6, len(held), kernel.dispatch)
    theirs = Routing.of(slots_TK, 6, len(held))
    for name in ("token_S", "row_TK", "ends_E"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert (ours.counts, ours.num_held_rows) == (theirs.counts, theirs.num_held_rows)
    assert ours.dispatch_of(kernel, 8) is kernel.dispatch
    assert ours.dispatch_of(kernel, 2**31) is None  # its int32 would overflow
    assert ours.dispatch_of(LoopKernel(), 8) is None


def test_it_multiplies_in_bf16_only() -> None:
    with pytest.raises(ConfigError, match="multiplies in bf16 only, not in float32: use precision bf16"):
        megablocks_parts.kernel(megablocks_parts).product(torch.ones(1, 2), torch.ones(1, 2, 2), Groups.single(1))


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("megablocks") is None or find_spec("triton") is None, reason="needs megablocks and triton"
)
def test_its_triton_kernels_compute_what_the_loop_does() -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "helpers" / "megablocks_parts.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2e-2  # of bf16


@pytest.mark.cuda
@pytest.mark.parametrize("held", [0, 3, 8])
def test_on_cuda_it_computes_what_the_loop_does(held: int) -> None:
    try:
        kernel = load_kernel("megablocks")
    except ConfigError as exc:
        pytest.skip(str(exc))
    shape = LayerShape(tokens=512, top_k=2, dim=256, ffn=128, experts=8, held=held)
    assert Layer(shape, torch.device("cuda"), "bf16", leave_out=True).distance(kernel, LoopKernel()) < 2e-2


@pytest.mark.cuda
def test_on_cuda_a_whole_model_trains_with_it() -> None:
    try:
        load_kernel("megablocks")
    except ConfigError as exc:
        pytest.skip(str(exc))
    settings = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    losses = []
    for kernel in ("megablocks", "torch"):
        sparse = SparseModel(build_model("olmoe", settings, 0, "cuda"), (0, 1), kernel)
        ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1)).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            total = language_model_loss(sparse.module, ids, LossWeights(), sparse.held, progress=0.5).total
        torch.autograd.backward(total)
        losses.append(total.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
