"""A version of spes_swarm with one more metric, declared once: in the source of `RoundMetrics`, as developers do."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_MODULE = "spes_swarm.protocol.members.round_metrics"
_BEFORE = "    train_loss: Annotated["
_DECLARATION = """
    grad_norm: Annotated[
        NotNegative | None,
        Metric("norm of the pseudo-gradient", "dimensionless", gauge="grad_norm", over_peers=known_median),
    ] = None
"""


def declare() -> None:
    """Adds `grad_norm` in this process, which must not have imported the module that declares metrics yet."""
    assert _MODULE not in sys.modules
    spec = importlib.util.find_spec(_MODULE)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    assert source.count(_BEFORE) == 1
    module = sys.modules[_MODULE] = importlib.util.module_from_spec(spec)
    exec(compile(source.replace(_BEFORE, _DECLARATION + _BEFORE), spec.origin, "exec"), module.__dict__)
