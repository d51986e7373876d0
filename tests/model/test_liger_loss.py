"""The loss of liger_kernel against the chunked one; as a script, interpreted on the CPU, with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spes_swarm.model import output_head
from spes_swarm.model.output_head import IGNORED_TARGET, chunked_loss, liger_applies, liger_loss, linear_loss
from tests.helpers.repository import ROOT

# Sums in another order; under autocast, gradients of the logits are rounded to bf16 before the products.
_MOST_ERROR = {False: 1e-5, True: 2e-2}


def distances(device: str, autocast: bool, ignored: str, rows: int, dim: int, vocabulary: int) -> list[float]:
    """Returns the relative distances of loss, cross-entropy, z-loss and both gradients."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(rows, dim, generator=generator), torch.randn(vocabulary, dim, generator=generator)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[:: 3 if ignored == "some" else 1] = IGNORED_TARGET
    results: list[list[Tensor]] = []
    for function in (chunked_loss, liger_loss):
        rows_ND, weight_VD = (each.to(device, copy=True).requires_grad_() for each in (x, w))
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss, *reported = function(rows_ND, weight_VD, targets.to(device), 1e-3)
        results.append([loss.detach(), *reported, *torch.autograd.grad(0.7 * loss, (rows_ND, weight_VD))])
    pairs = zip(*results, strict=True)
    return [float((theirs - ours).norm() / ours.norm().clamp_min(1e-9)) for ours, theirs in pairs]


CASES = list(product((False, True), ("some", "all")))


@pytest.mark.slow
@pytest.mark.skipif(None in map(find_spec, ("liger_kernel", "triton")), reason="needs liger_kernel and triton")
def test_it_is_the_chunked_loss_when_interpreted() -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    command = [sys.executable, "-W", "ignore", str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda
@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs liger_kernel")
@pytest.mark.parametrize(("autocast", "ignored"), CASES)
def test_it_is_the_chunked_loss_on_cuda(autocast: bool, ignored: str) -> None:
    assert max(distances("cuda", autocast, ignored, 2048, 256, 5000)) < _MOST_ERROR[autocast]


def test_it_is_not_used_where_it_would_be_less_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_head, "load_liger", lambda: print)
    rows, weight = torch.zeros(2, 3).requires_grad_(), torch.zeros(4, 3)
    assert liger_applies(rows, weight, 1e-5)
    assert not liger_applies(rows, weight, 0.0)
    assert not liger_applies(rows.detach(), weight, 1e-5)
    assert not liger_applies(rows.bfloat16(), weight.bfloat16(), 1e-5)
    linear_loss(rows, weight, torch.tensor([0, 1]), 1e-5)  # on a CPU, it would print


def test_one_that_does_not_load_is_skipped_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel" / "__init__.py").write_text("raise ImportError('no\\n triton')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "liger_kernel", raising=False)
    output_head.load_liger.cache_clear()
    try:
        assert output_head.load_liger() is None
    finally:
        output_head.load_liger.cache_clear()
    assert caplog.messages == ["liger_kernel does not load: no triton; the loss is computed with torch"]


if __name__ == "__main__":
    for autocast, ignored in CASES:
        found = distances("cpu", autocast, ignored, 24, 16, 100)
        assert max(found) < _MOST_ERROR[autocast], (autocast, ignored, found)
        print(autocast, ignored, found)
