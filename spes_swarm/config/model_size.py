"""Limits on the size of a model, checked on its settings alone.

Refusing an untrusted configuration must cost nothing: computing the layout of 1024 layers with 4096 experts took 27
CPU-seconds and 1.9 GB, although no weight was ever allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from spes_swarm.base.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MAX_EXPERTS: Final = 4096
# Limits by substring of a setting's name, first match wins; several times those of the largest published models.
_LARGEST: Final = (
    ("vocab", 1 << 22),
    ("position", 1 << 31),
    ("size", 1 << 17),
    ("dim", 1 << 17),
    ("rank", 1 << 17),
    ("layer", 256),  # modules are created one by one, on any device
    ("expert", MAX_EXPERTS),
    ("head", 4096),
    ("", 1 << 31),
)
# Experts in all layers together, each a piece of the layout: DeepSeek-V3 has 15,000, Kimi K2 23,000.
_MAX_EXPERT_PIECES: Final = 1 << 16
# Kimi K2 has 1.0e12. Every peer holds all parameters, twice, in fp32.
_MAX_PARAMETERS: Final = 1 << 40

# transformers accepts any number for these, even zero and below.
_POSITIVE: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)

_LAYERS: Final = ("num_hidden_layers",)
# Names that architectures give to the number of experts.
NUM_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Names that they give to the number of experts per token.
EXPERTS_PER_TOKEN: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
_EXPERT_FFN: Final = ("moe_intermediate_size", "intermediate_size")


def first_of(config: PreTrainedConfig, names: tuple[str, ...]) -> Any:
    """Returns the first of these attributes that a configuration has, else None."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def check_numbers(settings: Mapping[str, Any], where: str = "settings") -> None:
    """Refuses numbers that are too large for any model, also in nested settings.

    Raises:
        ConfigError: its message starts with the key.
    """
    for key, value in settings.items():
        largest = next(limit for part, limit in _LARGEST if part in key)
        for number in _integers(value):
            if abs(number) > largest:
                found = str(number) if number.bit_length() <= 64 else f"a number of {number.bit_length()} bits"
                raise ConfigError(f"{where}.{key}: found {found}, expected at most {largest}")
        if isinstance(value, Mapping):
            check_numbers(value, f"{where}.{key}")


def check_values(config: PreTrainedConfig) -> None:
    """Refuses sizes below 1, dropout that is not a probability, and an epsilon below 0.

    Raises:
        ConfigError: its message starts with the key.
    """
    for key in _POSITIVE:
        number = first_of(config, (key,))
        if isinstance(number, int) and number < 1:
            raise ConfigError(f"settings.{key}: found {number}, expected at least 1")
    for key, number in vars(config).items():
        if not isinstance(number, int | float):
            continue
        if key.endswith(("dropout", "pdrop")) and not 0 <= number <= 1:
            raise ConfigError(f"settings.{key}: found {number}, expected 0 to 1")
        if key.endswith("_eps") and number < 0:
            raise ConfigError(f"settings.{key}: found {number}, expected at least 0")


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, list):
        for item in value:
            yield from _integers(item)
    elif isinstance(value, int):
        yield value


def num_parameters(config: PreTrainedConfig) -> int:
    """Counts the parameters of a mixture of experts, as if all layers were mixtures with plain attention.

    For OLMoE, Qwen3-MoE and Mixtral these are all but norms and biases, which are below 0.2 %; for others an estimate.
    """

    def number(*names: str, default: int = 0) -> int:
        value = first_of(config, names)
        return value if isinstance(value, int) else default

    hidden = number("hidden_size")
    heads = number("num_attention_heads")
    head_dim = number("head_dim", default=hidden // heads if heads else 0)
    kv_heads = number("num_key_value_heads", default=heads)
    experts = number(*NUM_EXPERTS)
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    mixture = experts * (3 * hidden * number(*_EXPERT_FFN) + hidden)  # an expert and its row of the router
    embeddings = number("vocab_size") * hidden * (1 if getattr(config, "tie_word_embeddings", False) else 2)
    return number(*_LAYERS) * (attention + mixture) + embeddings


def check_size(config: PreTrainedConfig) -> None:
    """Refuses a model that is too large to train, or whose layout alone would take long.

    Raises:
        ConfigError: its message starts with `settings`.
    """
    layers, experts = first_of(config, _LAYERS), first_of(config, NUM_EXPERTS)
    if isinstance(layers, int) and isinstance(experts, int) and layers * experts > _MAX_EXPERT_PIECES:
        raise ConfigError(
            f"settings: found {layers} layers of {experts} experts, "
            f"expected at most {_MAX_EXPERT_PIECES} experts in all layers together"
        )
    if (parameters := num_parameters(config)) > _MAX_PARAMETERS:
        raise ConfigError(
            f"settings: found a model of some {parameters / 1e9:,.0f} billion parameters, "
            f"expected at most {_MAX_PARAMETERS / 1e9:,.0f} billion"
        )
