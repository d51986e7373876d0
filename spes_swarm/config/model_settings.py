"""Builds a transformers configuration from the model type and settings of a configuration file or a manifest.

Manifests are untrusted: what their settings may contain is decided here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spes_swarm.base.errors import ConfigError
from spes_swarm.base.strict import nearest
from spes_swarm.config.model_size import EXPERTS_PER_TOKEN, NUM_EXPERTS, check_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Settings that can load code or files, or that each peer decides for itself.
_FORBIDDEN = frozenset(
    {
        "_attn_implementation",
        "_commit_hash",
        "_experts_implementation",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "auto_map",
        "dtype",
        "experts_implementation",
        "extra_config_files",
        "extra_files",
        "model_type",
        "name_or_path",
        "quantization_config",
        "torch_dtype",
        "transformers_version",
        "trust_remote_code",
    }
)
# Not fields of the configuration classes, but honoured by transformers and present in published configurations.
_EXTRA = frozenset({"head_dim", "rope_parameters", "rope_scaling", "rope_theta"})
# The only known setting that founders change, to null, see peer/initial_model.py.
_REPEATED = frozenset({"pad_token_id"})
_PUBLIC_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_MAX_REPEATED_CHARS = 16384  # in either file


def config_from_settings(model_type: str, settings: Mapping[str, Any]) -> PreTrainedConfig:
    """Builds the transformers configuration of a model; it shares nothing with `settings`.

    Raises:
        ConfigError: the type is unknown, or a setting is unknown, not allowed, or refused by transformers. The message
            starts with the key: `type` or `settings.KEY`.
    """
    config_class = _config_class(model_type)
    known = setting_names(model_type)
    for key in settings:
        if key in _FORBIDDEN:
            raise ConfigError(f"settings.{key}: not allowed in a swarm's configuration")
        if key not in known:
            raise ConfigError(f"settings.{key}: unknown key for {model_type}{nearest(key, known)}")
    check_numbers(settings)  # transformers builds lists of such lengths, and a module for each entry
    with refusals(f"settings: transformers refuses them for {model_type}"):
        return config_class(**json.loads(json.dumps(dict(settings))))  # a copy: transformers keeps its arguments


def setting_names(model_type: str) -> set[str]:
    """Returns the settings that a configuration of this type may have.

    Raises:
        ConfigError: the type is unknown; the message starts with `type`.
    """
    return (_setting_names(_config_class(model_type)) | _EXTRA) - _FORBIDDEN


def repeatable(model_type: str, section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what exports may repeat of a model's config.json (`extra_settings`) or generation_config.json.

    Left out is what can load code or files, or would replace a part of the class of transformers that reads it; if all
    together is too long, the longest values go.

    Raises:
        ConfigError: the type is unknown; the message starts with `type`.
    """
    if not values:
        return {}
    from transformers import GenerationConfig

    reader = GenerationConfig if section == "generation" else _config_class(model_type)
    lengths = {
        key: _length(value)
        for key, value in values.items()
        if _PUBLIC_NAME.fullmatch(key) and key not in _FORBIDDEN and (key in _REPEATED or not hasattr(reader, key))
    }
    while sum(lengths.values()) > _MAX_REPEATED_CHARS:
        del lengths[max(lengths, key=lengths.__getitem__)]
    return {key: values[key] for key in lengths}


def _length(value: Any) -> int:
    try:
        return len(json.dumps(value, allow_nan=False))
    except (ValueError, RecursionError):
        return _MAX_REPEATED_CHARS + 1


def check_mixture(model_type: str) -> None:
    """Refuses model types without experts.

    Called before the settings are checked: otherwise those that such a type lacks would be reported instead.

    Raises:
        ConfigError: the type is unknown, or not a mixture of experts; the message starts with `type`.
    """
    known = _setting_names(_config_class(model_type))
    if known.isdisjoint(NUM_EXPERTS) or known.isdisjoint(EXPERTS_PER_TOKEN):
        raise no_mixture(model_type)


def _config_class(model_type: str) -> type[PreTrainedConfig]:
    from transformers import CONFIG_MAPPING  # takes seconds: it imports torch

    if model_type not in CONFIG_MAPPING:
        suggestion = nearest(model_type, CONFIG_MAPPING)
        raise ConfigError(f"type: found {model_type!r}, expected a model type of transformers{suggestion}")
    config_class: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
    return config_class


def _setting_names(config_class: type[PreTrainedConfig]) -> set[str]:
    return {item.name for item in dataclasses.fields(config_class)} | set(config_class.attribute_map)


def no_mixture(model_type: str) -> ConfigError:
    """Returns the error for a model type without experts."""
    return ConfigError(f"type: found {model_type!r}, expected a mixture of experts such as olmoe or qwen3_moe")


@contextmanager
def refusals(message: str) -> Iterator[None]:
    """Turns what transformers raises for settings of the wrong type, size or combination into a ConfigError."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except KeyError as exc:
        raise ConfigError(f"{message}: {exc} is not one of the possible values") from exc
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        StrictDataclassError,
        TypeError,
        ValueError,
    ) as exc:
        reason = " ".join(str(exc).split()).partition(". Errors: ")[0]  # of each type in a union
        raise ConfigError(f"{message}: {reason}") from exc
