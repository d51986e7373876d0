"""The model of the peers of tests.helpers.swarm."""

from __future__ import annotations

from spes_swarm.model.sparse_model import build_model, layout_of
from spes_swarm.protocol.consensus.layout import Layout
from tests.helpers.swarm import TINY_RUN


def tiny_layout() -> Layout:
    """Layout of that model."""
    return layout_of(build_model("olmoe", TINY_RUN["model"]["settings"], 0, "cpu", on_meta=True))
