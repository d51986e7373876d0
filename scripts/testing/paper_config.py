"""The configuration from which measurements start."""

from __future__ import annotations

from pathlib import Path

from spes_swarm.config.file import default_config_path


def paper_config_path() -> Path:
    """The quickstart with the paper's optimiser, inside the package."""
    return default_config_path().with_name("quickstart-paper.yaml")
