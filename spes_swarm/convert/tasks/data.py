"""Loads the data of a local task; named by the YAML files next to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset


def load(file: str, **_: Any) -> dict[str, Dataset]:
    """The rows of a JSON-lines file in this directory, as the split `test`. Needs neither network nor cache."""
    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}
