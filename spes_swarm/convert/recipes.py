"""Which dense models can become an equivalent Mixture-of-Experts of `transformers`, and with which settings.

Also the configuration of a run that starts from such a mixture.

A recipe exists where everything but the FFN is the same code in both architectures:

- qwen3 -> qwen3_moe: the same attention with per-head q/k norm; without sliding windows.
- llama -> mixtral: without biases, which Mixtral does not have.
- olmo2 -> flex_olmo: norms after attention and FFN, q/k norm over all heads. (OLMoE normalises before them.)

Everything else is refused. Gates are always normalised over the chosen experts. A mixture never ties its output head to
the embedding: a tied head of the dense model is copied, as the SPES authors do (scripts/upcycling_qwen3_to_olmoe.py of
zjr2000/SPES copies it, and their configuration of the 9B says `weight_tying: false`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from spes_swarm.base.errors import ConfigError
from spes_swarm.base.strict import Pattern, Range, Section
from spes_swarm.config.model_settings import config_from_settings, refusals
from spes_swarm.config.run import RunConfig
from spes_swarm.model.initial_weights import CONFIG_FILE, model_section, read_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MATRICES = ("gate_proj", "up_proj", "down_proj")


@dataclass(kw_only=True, slots=True, frozen=True)
class UpcyclingOptions(Section):
    """How the dense model becomes a mixture."""

    experts: Annotated[int, Range(1)]  # per layer
    top_k: Annotated[int, Range(1)]  # experts that process a token
    noise_std: Annotated[float, Range(0)] = 0.02  # of the noise on experts' weights; 0 = exact copies
    noise_fraction: Annotated[float, Range(0, 1)] = 0.5  # of an expert's weights that get noise
    router_std: Annotated[float, Range(0)] = 0.02  # routers start as N(0, std); 0 = all zeros, so ties at first
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    dtype: Annotated[str, Pattern("|".join(DTYPES), " or ".join(DTYPES))] = "float32"
    max_shard_size: str = "2GB"  # number and unit (KB, MB, GB, TB); a larger tensor has a shard of its own
    source_name: Annotated[str, Pattern(r"[\w.-]+(/[\w.-]+)?", "a name such as Qwen/Qwen3-1.7B-Base")]  # published

    def _check(self) -> None:
        if self.top_k > self.experts:
            raise ConfigError(f"top_k: found {self.top_k}, expected at most {self.experts} (experts)")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one dense architecture maps to an MoE of transformers."""

    target: str  # model type of the MoE
    settings: Callable[[PreTrainedConfig, UpcyclingOptions], dict[str, Any]]  # besides those that both types share
    required: Mapping[str, Any] = field(default_factory=dict)  # dense settings, with the only value the MoE supports
    ignored: frozenset[str] = frozenset()  # dense settings without effect if all `layer_types` are full attention
    saved_mlp: str = "mlp"  # what the MoE block is called in files
    saved_matrices: tuple[str, str, str] = MATRICES  # what gate, up and down are called in files


RECIPES: Mapping[str, Recipe] = {
    "qwen3": Recipe(
        target="qwen3_moe",
        settings=lambda dense, options: {
            "num_experts": options.experts,
            "moe_intermediate_size": dense.intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
            "sliding_window": None,
        },
        ignored=frozenset({"layer_types", "max_window_layers"}),
    ),
    "llama": Recipe(
        target="mixtral",
        settings=lambda _, options: {
            "num_local_experts": options.experts,
            "sliding_window": None,
            "router_jitter_noise": 0.0,
        },
        required={"attention_bias": False, "mlp_bias": False},
        ignored=frozenset({"pretraining_tp"}),
        saved_mlp="block_sparse_moe",
        saved_matrices=("w1", "w3", "w2"),
    ),
    "olmo2": Recipe(
        target="flex_olmo", settings=lambda _, options: {"num_experts": options.experts, "norm_topk_prob": True}
    ),
}
_REFUSED = {
    "olmo": "its LayerNorms have no weights, and no MoE of transformers has such norms",
    "olmo3": "some of its layers attend to a sliding window, and FlexOlmo's do not",
    "qwen2": "Qwen2-MoE adds a shared expert that the dense model does not have",
}


def recipe_for(source: Path) -> tuple[Recipe, PreTrainedConfig]:
    """Returns the recipe for a dense model, and the model's configuration.

    Raises:
        CheckpointError: config.json is missing or unreadable.
        ConfigError: the model cannot be reproduced exactly by an MoE of transformers; the message says why.
    """
    content = read_config(source)
    model_type = content["model_type"]
    if (recipe := RECIPES.get(model_type)) is None:
        reason = _REFUSED.get(model_type, f"supported types: {', '.join(RECIPES)}")
        raise ConfigError(f"{source}: a model of type {model_type} cannot be upcycled: {reason}")
    if content.get("quantization_config"):
        raise ConfigError(f"{source}: a quantised model cannot be upcycled; use the original weights")
    with refusals(f"{source / CONFIG_FILE}: transformers refuses it"):
        config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(content)
    for key, wanted in recipe.required.items():
        if (found := getattr(config, key)) != wanted:
            raise ConfigError(
                f"{source}: {key} is {json.dumps(found)}, which {recipe.target} cannot express; only "
                f"{model_type} models with {json.dumps(wanted)} can be upcycled"
            )
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        raise ConfigError(f"{source}: some layers do not use full attention, which {recipe.target} cannot express")
    return recipe, config


def moe_settings(recipe: Recipe, dense: PreTrainedConfig, options: UpcyclingOptions) -> dict[str, Any]:
    """Returns the MoE's settings: those of the dense model that both types have, then the recipe's.

    Raises:
        ConfigError: transformers refuses them.
    """
    general = {item.name for item in dataclasses.fields(PreTrainedConfig)}
    fields_of = [
        {item.name for item in dataclasses.fields(CONFIG_MAPPING[t])} for t in (dense.model_type, recipe.target)
    ]
    values = dense.to_dict()
    settings = {name: values[name] for name in sorted(set.intersection(*fields_of) - general)}
    if getattr(dense, "head_dim", None) is not None:  # honoured by all types, declared by some
        settings["head_dim"] = dense.head_dim
    settings |= recipe.settings(dense, options)
    settings |= {
        "num_experts_per_tok": options.top_k,
        "output_router_logits": False,
        "tie_word_embeddings": False,
        # The embedding of a pad token is never trained, and many dense models pad with the end-of-text token.
        "pad_token_id": None,
    }
    config_from_settings(recipe.target, settings)
    return settings


def starting_run(directory: Path, name: str, tokenizer: str) -> RunConfig:
    """Returns a run configuration for an upcycled mixture, with the optimisation and merging of the paper's 9B.

    Every peer must be able to load `tokenizer`, so it is not a path on this machine.

    Raises:
        CheckpointError: config.json cannot be read.
        ConfigError: the settings and the name are not valid for a run.
    """
    model = model_section(directory)
    settings = model["settings"]
    experts = next(settings[key] for key in ("num_experts", "num_local_experts") if key in settings)
    values = {
        "name": name,
        "model": model,
        "tokenizer": {"name": tokenizer},
        "training": {
            "sequence_length": min(4096, settings["max_position_embeddings"]),
            "batch_size": 64,
            "learning_rate": 1e-4,
            "warmup_steps": 2000,
            "total_steps": 100_000,
        },
        "round": {
            "inner_steps": 100,
            "window_s": 60.0,
            "stall_timeout_s": 30.0,
            "timeout_s": 3600.0,
            "progress_ttl_s": 120.0,
            "lease_s": 600.0,
        },
        "merge": {"alpha": 0.1, "steps": 12_500, "interval": 500, "neighbours": 4},
        "experts_per_peer": min(2, experts),
    }
    return RunConfig.from_dict(values, str(directory / CONFIG_FILE))
