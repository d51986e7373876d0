"""Strict YAML: the scalars of YAML 1.2, no duplicate keys, no objects, and errors that name the line."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from spes_swarm.base.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Safe YAML 1.2: `1e-4` is a number, `no` and `2024-01-01` are text, and duplicate keys are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """As SafeLoader, but refuses duplicate keys."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"duplicate key {key_node.value}", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}  # none of YAML 1.1
for _tag, _regex, _first_characters in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9]*)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?[0-9]+[eE][-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_regex})$"), list(_first_characters))


def load_yaml(path: str | Path) -> Any:
    """Reads the plain values in a YAML file; None if it is empty.

    Raises:
        ConfigError: the file cannot be read or is not YAML.
    """
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)  # a SafeLoader
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: not UTF-8 text: save it as UTF-8") from exc
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise ConfigError(f"{path}: {line}{exc.problem or exc.context}") from exc
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(exc).split())}") from exc
