"""Finished runs on disk: one JSON file for each arm and seed, named by the digest of everything that determines it."""

from __future__ import annotations

import json
import os
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from scripts.testing.study.arm import Arm, OuterConfig
from scripts.testing.study.course import Outcome
from spes_swarm.base.errors import DataError, os_errors_as
from spes_swarm.base.strict import Section

# Part of every digest: raise it when equal settings give other numbers than before, or a setting has a new default.
CODE_VERSION = 1


def settings_of(arm: Arm, seed: int, data: str, evaluations: int) -> dict[str, Any]:
    """Returns all that a run depends on, as plain values: without the arm's name, and without settings at their
    defaults, so that a setting that is new to the code does not repeat runs.

    Args:
        arm: of the study.
        seed: of the run.
        data: digest of the corpus.
        evaluations: of the run.
    """
    config = replace(arm.config, set={})  # part of the run's settings
    if config.mode != "diloco":
        config = replace(config, outer=OuterConfig())
    if config.mode == "lone":
        config = replace(config, peers=1, speeds=())
    run = _non_defaults(arm.with_seed(seed))
    if config.mode in ("lone", "central"):
        run.pop("ownership", None)  # its only peer holds everything
    return {
        "code": CODE_VERSION,
        "arm": _non_defaults(config),
        "run": run,
        "data": data,
        "evaluations": evaluations,
    }


def _non_defaults(section: Section) -> dict[str, Any]:
    """Returns the values of a section that differ from their defaults."""
    values: dict[str, Any] = {}
    plain = section.to_dict()
    for each in fields(section):  # type: ignore[arg-type]  # every section is a dataclass
        value = getattr(section, each.name)
        if isinstance(value, Section):
            if changed := _non_defaults(value):
                values[each.name] = changed
        elif value != (each.default_factory() if each.default_factory is not MISSING else each.default):
            values[each.name] = plain[each.name]
    return values


def key_of(settings: dict[str, Any]) -> str:
    """Returns the name of a run's file, without its suffix."""
    canonical = json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return blake3(canonical.encode()).hexdigest()[:24]


class Results:
    """The runs in a directory, which several studies and processes may share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "runs"
        with os_errors_as(DataError, f"{directory} cannot be written"):
            self._directory.mkdir(parents=True, exist_ok=True)

    def get(self, settings: dict[str, Any]) -> Outcome | None:
        """Returns a finished run, or None.

        Raises:
            DataError: its file is damaged.
        """
        path = self._path(settings)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))["outcome"]
            curve = [(int(steps), float(loss)) for steps, loss in values.pop("curve")]
            if set(values) != {each.name for each in fields(Outcome)} - {"curve"}:
                raise ValueError(f"its fields are {', '.join(values)}")
            return Outcome(curve=curve, **values)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise DataError(f"{path} is damaged ({exc}): delete it to make the run again") from exc

    def put(self, name: str, settings: dict[str, Any], outcome: Outcome) -> None:
        """Stores a finished run; the file appears only when it is complete."""
        path = self._path(settings)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        content = {"name": name, "outcome": asdict(outcome), "settings": settings}
        with os_errors_as(DataError, f"{path} cannot be written"):
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            partial.replace(path)

    def _path(self, settings: dict[str, Any]) -> Path:
        return self._directory / f"{key_of(settings)}.json"
