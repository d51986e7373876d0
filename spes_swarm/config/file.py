"""Configuration files: YAML with the optional sections `run:` and `peer:`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from spes_swarm.base.errors import ConfigError
from spes_swarm.base.strict import check_section, nearest_key, show
from spes_swarm.base.strict_yaml import load_yaml
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig


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

    def build_run(self) -> RunConfig | None:
        """Builds the `run:` section; imports transformers.

        Raises:
            ConfigError: its model cannot be built, or conflicts with its other settings.
        """
        return None if self.run is None else RunConfig.from_dict(self.run, self.source)


def default_config_path() -> Path:
    """The quickstart configuration inside the package."""
    return Path(__file__).parent.parent / "default_config" / "quickstart.yaml"


def load_config(path: str | Path | None = None) -> ConfigFile:
    """Reads a configuration file.

    Args:
        path: YAML with the optional sections `run:` and `peer:`; None: the quickstart inside the package.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or has an invalid setting.
    """
    raw = read_config_file(path or default_config_path())
    return ConfigFile(run=raw.build_run(), peer=raw.peer)


def read_config_file(path: str | Path) -> RawConfigFile:
    """Reads a configuration file and checks everything but its model, without transformers.

    Raises:
        ConfigError: as `load_config`, except for errors in the model.
    """
    source = str(path)
    content = load_yaml(path)
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: found {show(content)}, expected the sections run: and peer:")
    sections = {"run": RunConfig, "peer": PeerConfig}
    for key in content:
        if key not in sections:
            raise ConfigError(f"{source}: {key}: unknown key{nearest_key(sections, str(key))}")
    run = content.get("run")
    peer = content.get("peer")
    if run is not None:
        check_section(RunConfig, run, f"{source}: ", "run")
    return RawConfigFile(source, run, PeerConfig() if peer is None else PeerConfig.from_dict(peer, source))
