"""Configuration files: YAML with the optional sections `run:` and `peer:`.

A file may begin with `base: FILE.yaml`, whose settings it changes: a path, relative to the file, or the name of a
configuration that comes with the package. That may have a base, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from spes_swarm.base.errors import ConfigError
from spes_swarm.base.strict import check_section, nearest_key, show
from spes_swarm.base.strict_yaml import load_yaml
from spes_swarm.base.user_paths import user_path
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig

# In place of a model section that is still to be written.
_LATER = {"model": {"type": "from the initial weights"}}


class ConfigFile(NamedTuple):
    """The content of a configuration file."""

    run: RunConfig | None  # None: the file has no `run:` section
    peer: PeerConfig  # defaults where the file has no `peer:` section


@dataclass(frozen=True)
class RawConfigFile:
    """The same before its model is built, which takes seconds."""

    source: str
    run: Mapping[str, Any] | None  # keys and values are those of a RunConfig
    peer: PeerConfig

    @property
    def lacks_model(self) -> bool:
        """Whether there is a `run:` section without a model, which the initial weights supply."""
        return self.run is not None and "model" not in self.run

    def build_run(self) -> RunConfig | None:
        """Builds the `run:` section; imports transformers.

        Raises:
            ConfigError: its model cannot be built, or conflicts with its other settings.
        """
        return None if self.run is None else RunConfig.from_dict(self.run, self.source)


def default_config_path() -> Path:
    """The quickstart configuration inside the package."""
    return Path(__file__).parent.parent / "default_config" / "quickstart.yaml"


def continued_config_path() -> Path:
    """The configuration inside the package for training an existing model; it has no `model` section."""
    return default_config_path().with_name("continued.yaml")


def setting_keys() -> Iterator[str]:
    """Yields the dotted keys of all settings; of the model's, which depend on its type, those of the quickstart."""
    yield from RunConfig.keys("run")
    yield from (f"run.model.settings.{key}" for key in load_yaml(default_config_path())["run"]["model"]["settings"])
    yield from PeerConfig.keys("peer")


def load_config(path: str | Path | None = None) -> ConfigFile:
    """Reads a configuration file.

    Args:
        path: YAML with the optional sections `run:` and `peer:`; None: the quickstart inside the package.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or has an invalid setting.
    """
    raw = read_config_file(path or default_config_path())
    return ConfigFile(run=raw.build_run(), peer=raw.peer)


def read_config_file(path: str | Path, initial_weights: str | None = None) -> RawConfigFile:
    """Reads a configuration file and checks everything but its model, without transformers.

    With initial weights, here or in its `peer` section, the `run` section may lack the `model`.

    Raises:
        ConfigError: as `load_config`, except for errors in the model.
    """
    source = str(path)
    if not (path := Path(path)).exists() and path.name in (shipped := _shipped()):
        raise ConfigError(f"{path} does not exist; the {path.name} of this package is {shipped[path.name]}")
    content = _read_layers(path)
    if (base := content.pop("base", None)) is not None:
        source += f" (with its base {base})"
    sections = {"run": RunConfig, "peer": PeerConfig}
    for key in content:
        if key not in sections:
            raise ConfigError(f"{source}: {key}: unknown key{nearest_key(sections, str(key))}")
    run = content.get("run")
    own = content.get("peer")
    peer = PeerConfig() if own is None else PeerConfig.from_dict(own, source)
    if run is not None:
        model_follows = (initial_weights or peer.initial_weights) is not None and isinstance(run, dict)
        check_section(RunConfig, _LATER | run if model_follows else run, f"{source}: ", "run")
    return RawConfigFile(source, run, peer)


def _read_content(path: Path) -> dict[str, Any]:
    content = load_yaml(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: found {show(content)}, expected the sections run: and peer:")
    return content


def _read_layers(path: Path, built_on: frozenset[Path] = frozenset()) -> dict[str, Any]:
    """The content of a file with those of its bases below it; `built_on`: the files that have it as a base."""
    content = _read_content(path)
    name = content.get("base")
    if name is None:
        return content
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{path}: base: found {show(name)}, expected a file next to this one, or its path")
    base, built_on, shipped = path.parent / user_path(name), built_on | {path.resolve()}, _shipped()
    if not base.exists() and name in shipped:
        base = shipped[name]
    if not base.exists():
        raise ConfigError(
            f"{path}: base: {base} does not exist; give a path, or one of those that come with the package: "
            + ", ".join(sorted(shipped))
        )
    if base.resolve() in built_on:
        raise ConfigError(f"{path}: base: found {show(name)}, which is this file, or has it as a base")
    try:
        below = _read_layers(base, built_on)
    except ConfigError as exc:
        raise ConfigError(f"{path}: base: {exc}") from None
    layers: dict[str, Any] = _overlay(below, content)
    return layers


def _shipped() -> dict[str, Path]:
    """The configurations inside the package and, in a clone, next to it, by name."""
    packaged = default_config_path().parent
    folders = (packaged.parents[1] / "configs", packaged)
    return {path.name: path for folder in folders for path in folder.glob("*.yaml")}


def _overlay(base: Any, changes: Any) -> Any:
    """Returns the values of `base` with those of `changes` in their places, section by section."""
    if isinstance(base, dict) and changes is None:  # an empty section
        return base
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    return base | {key: _overlay(base.get(key), value) for key, value in changes.items()}
