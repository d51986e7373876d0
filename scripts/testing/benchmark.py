"""Helpers of the benchmarks: models of several sizes, other norms, and memory as the kernel reports it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from scripts.testing.paper_config import paper_config_path
from spes_swarm.base.errors import UserError
from spes_swarm.config.file import load_config
from spes_swarm.config.run import RunConfig
from spes_swarm.model.norm import RmsNorm

TINY = "tiny"  # its step is the baseline of memory
# Hidden size, expert's FFN, layers, heads. The names are the numbers of parameters with eight experts.
SIZES = {
    TINY: (32, 32, 1, 2),
    "1M": (96, 192, 2, 4),
    "30M": (384, 768, 4, 6),
    "300M": (768, 1536, 10, 12),
}


def quickstart_run(hidden: int, ffn: int, layers: int, heads: int, sequence_length: int, **settings: Any) -> RunConfig:
    """Returns the run of quickstart-paper.yaml with a model of this size; `settings` are additional model settings."""
    run = load_config(paper_config_path()).run
    assert run is not None
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": sequence_length,
    }
    return replace(
        run,
        model=replace(run.model, settings=run.model.settings | sizes | settings),
        training=replace(run.training, sequence_length=sequence_length),
    )


@contextmanager
def torch_norms() -> Iterator[None]:
    """Lets every `RmsNorm` that is differentiated compute with torch's `rms_norm`."""
    own = RmsNorm.forward

    def forward(norm: RmsNorm, x_TD: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # `replace_norms` compares it with the library's, to the last bit
            return own(norm, x_TD)
        return functional.rms_norm(x_TD, norm.weight.shape, norm.weight, norm.variance_epsilon)

    with mock.patch.object(RmsNorm, "forward", forward):
        yield


def status_bytes(key: str, process_id: int | None = None) -> int:
    """Returns a size in /proc/PID/status, e.g. VmRSS, or VmHWM, its peak; 0 for a process that has ended.

    Without `process_id`, it is that of this process.

    Raises:
        UserError: the kernel does not report this size.
    """
    text = Path(f"/proc/{process_id or 'self'}/status").read_text(encoding="ascii")
    match = re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE)
    if match is None and process_id is None:
        raise UserError(f"this kernel does not report {key}")
    return 1024 * int(match[1]) if match else 0
