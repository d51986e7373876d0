"""Sparse upcycling: converts a dense `transformers` model to the Mixture-of-Experts that a run starts from.

Every expert starts as a copy of the dense FFN, with normal noise on a random part of its weights so that the experts
differ (SPES, arXiv 2602.11543, starts its 9B from Qwen3-1.7B-Base with N(0, 0.02) on 50 %; the idea is from Komatsuzaki
et al., arXiv 2212.05055). Gates are normalised over the chosen experts, so without noise the experts' weighted mean is
the dense FFN itself, whatever the router outputs: logits are reproduced exactly, up to rounding.

The architectures for which this holds are in recipes.py. Memory holds one shard of the output and one tensor of the
input at a time, so the size of the model does not matter.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from spes_swarm.base.errors import CheckpointError, ConfigError
from spes_swarm.base.user_paths import new_directory
from spes_swarm.config.model_settings import config_from_settings
from spes_swarm.convert.recipes import DTYPES, MATRICES, Recipe, UpcyclingOptions, moe_settings, recipe_for
from spes_swarm.model.initial_weights import INDEX_FILE, TIED, WeightDirectory, check_tied
from spes_swarm.model.sparse_model import build_model

PROVENANCE_FILE = "upcycling.json"
_ROUTER = len(MATRICES)  # its index among the random streams of a layer
_CHUNK_ELEMENTS = 1 << 16  # noise is drawn in pieces of this size; another size gives different noise
_COMPARED_SEQUENCES, _COMPARED_TOKENS = 2, 64  # the tokens are those of each sequence
_EXPERTS_PARAMETER = re.compile(
    r"(?P<mlp>.+\.(?P<layer>\d+)\.mlp)\.(?P<part>experts\.(gate_up|down)_proj|gate\.weight)"
)
# Files of a model directory other than weights and configuration: tokenizer, chat template, license.
_COPIED = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model",
    "chat_template*", "generation_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class UpcyclingReport:
    """What was written."""

    model_type: str
    num_tensors: int
    num_shards: int
    num_parameters: int
    num_bytes: int  # size of all weight files
    largest_shard: int  # bytes


def upcycle(source: Path, destination: Path, options: UpcyclingOptions) -> UpcyclingReport:
    """Writes the mixture of a dense model (config.json and safetensors) into a new directory, which appears when
    complete.

    The same source and options give the same bytes; weights do not depend on `max_shard_size`.

    Raises:
        UserError: the source cannot be read or reproduced, an option is invalid, or the destination exists or cannot
            be written. The destination is unchanged.
    """
    recipe, dense_config = recipe_for(source)
    settings = moe_settings(recipe, dense_config, options)
    moe = build_model(recipe.target, settings, seed=0, device="meta", on_meta=True)
    with torch.device("meta"):
        dense = AutoModelForCausalLM.from_config(dense_config, trust_remote_code=False)
    with WeightDirectory(source) as weights, new_directory(destination) as partial:
        is_tied = bool(dense_config.tie_word_embeddings)
        _check_source(weights, dense, is_tied, source)
        targets = {target.name: target for target in _targets(recipe, moe, options.experts, is_tied)}
        report = _write_weights(_Values(weights, options), targets, partial, options, recipe.target)
        _copy_files(source, partial)
        _write_configs(partial, recipe.target, settings, type(moe).__name__, options.dtype)
        _write_provenance(partial, dense_config.model_type, options, weights.files)
    return report


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the outputs of a dense model and its mixture differ on the same tokens."""

    max_difference: float  # largest absolute difference of two logits
    max_logit: float  # largest absolute logit of the dense model
    dense_loss: float  # nats per token
    moe_loss: float

    @property
    def is_exact(self) -> bool:
        """True if the logits are the same up to the rounding of fp32."""
        return self.max_difference <= 1e-5 * max(1.0, self.max_logit)


@torch.no_grad()
def compare(source: Path, destination: Path, options: UpcyclingOptions) -> Comparison:
    """Runs both models in fp32 on the same random token ids, one model after the other.

    The dense weights are rounded to the dtype of the output first, so that noise is the only difference.
    """
    dtype = DTYPES[options.dtype]
    dense = _load(source, dtype)
    ids_BT = torch.randint(
        dense.config.vocab_size,
        (_COMPARED_SEQUENCES, min(_COMPARED_TOKENS, dense.config.max_position_embeddings)),
        generator=torch.Generator().manual_seed(options.seed),
    )
    dense_logits_BTV = dense(ids_BT).logits
    del dense
    moe_logits_BTV = _load(destination, dtype)(ids_BT).logits
    return Comparison(
        max_difference=float((moe_logits_BTV - dense_logits_BTV).abs().max()),
        max_logit=float(dense_logits_BTV.abs().max()),
        dense_loss=_loss(dense_logits_BTV, ids_BT),
        moe_loss=_loss(moe_logits_BTV, ids_BT),
    )


def _load(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    return model.float().eval()


def _loss(logits_BTV: Tensor, ids_BT: Tensor) -> float:
    return float(functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()))


# ------------------------------------------------------------------------------------------------- the source


def _check_source(weights: WeightDirectory, dense: nn.Module, is_tied: bool, source: Path) -> None:
    """Refuses weights that are not exactly those of the dense model."""
    shapes = {name: tuple(parameter.shape) for name, parameter in dense.named_parameters()}
    for name, shape in shapes.items():
        if name not in weights.names:
            raise CheckpointError(f"{source}: {name} is missing")
        if weights.shape(name) != shape:
            raise CheckpointError(f"{source}: {name} has the shape {weights.shape(name)}, expected {shape}")
        weights.check_float(name)
    for name in weights.names:
        # Old Llama files contain the rotary frequencies, which are computed from the configuration.
        if name not in shapes and not name.endswith("rotary_emb.inv_freq") and not (is_tied and name == TIED[0]):
            raise CheckpointError(f"{source}: {name} is not a parameter of a {type(dense).__name__}")
    check_tied(weights, is_tied, source)


# ------------------------------------------------------------------------------------------------- the weights


@dataclass(frozen=True, slots=True)
class _Target:
    """One tensor of the output."""

    name: str  # in the file
    shape: tuple[int, ...]
    source: str | None  # tensor of the dense model to start from; None for a router
    stream: tuple[int, ...] | None  # random stream: (layer, matrix, expert), or (layer, _ROUTER); None for a plain copy

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def _targets(recipe: Recipe, moe: nn.Module, experts: int, is_tied: bool) -> Iterator[_Target]:
    """Yields the output tensors. Copies of one matrix are consecutive, so that it is read once.

    With `is_tied` the dense model has no output head of its own: the mixture's starts as a copy of the embedding.
    """
    for name, parameter in moe.named_parameters():
        shape = tuple(parameter.shape)
        match = _EXPERTS_PARAMETER.fullmatch(name)
        if match is None:
            yield _Target(name, shape, TIED[1] if is_tied and name == TIED[0] else name, None)
            continue
        layer, mlp = int(match["layer"]), match["mlp"]
        saved = mlp.removesuffix("mlp") + recipe.saved_mlp
        if match["part"] == "gate.weight":
            yield _Target(f"{saved}.gate.weight", shape, None, (layer, _ROUTER))
            continue
        is_down = match["part"] == "experts.down_proj"
        rows, columns = shape[1:]
        for matrix in (2,) if is_down else (0, 1):
            for expert in range(experts):
                yield _Target(
                    f"{saved}.experts.{expert}.{recipe.saved_matrices[matrix]}.weight",
                    (rows, columns) if is_down else (rows // 2, columns),
                    f"{mlp}.{MATRICES[matrix]}.weight",
                    (layer, matrix, expert),
                )


@dataclass(eq=False)
class _Values:
    """Makes the values of output tensors; caches the input tensor that was read last."""

    weights: WeightDirectory
    options: UpcyclingOptions
    _last: tuple[str, Tensor] | None = field(default=None, init=False)

    def fill(self, out: Tensor, target: _Target) -> None:
        """Writes the values of a tensor into `out`, contiguous and of the target's shape."""
        options = self.options
        if target.stream is None:
            out.copy_(self._read(target.source))
            return
        # One stream per (layer, matrix, expert), so noise depends on neither order nor sharding.
        rng = np.random.default_rng(np.random.SeedSequence(options.seed, spawn_key=target.stream))
        if target.source is None:
            router = rng.standard_normal(target.shape, dtype=np.float32) * np.float32(options.router_std)
            out.copy_(torch.from_numpy(router))
            return
        source = self._read(target.source)
        if options.noise_std == 0 or options.noise_fraction == 0:
            out.copy_(source)
            return
        out_N, source_N = out.view(-1), source.view(-1)
        for start in range(0, out_N.numel(), _CHUNK_ELEMENTS):
            piece = slice(start, start + _CHUNK_ELEMENTS)
            out_N[piece] = source_N[piece] + _noise(rng, source_N[piece].numel(), options)

    def _read(self, name: str | None) -> Tensor:
        assert name is not None
        if self._last is None or self._last[0] != name:
            self._last = None  # frees it before the next one is read
            self._last = (name, self.weights.read(name))
        return self._last[1]


def _noise(rng: np.random.Generator, size: int, options: UpcyclingOptions) -> Tensor:
    """N(0, noise_std) on `noise_fraction` of `size` elements, zero on the others; fp32."""
    noise_N = rng.standard_normal(size, dtype=np.float32)
    noise_N *= np.float32(options.noise_std)
    noise_N *= rng.random(size, dtype=np.float32) < options.noise_fraction
    return torch.from_numpy(noise_N)


def _write_weights(
    values: _Values, targets: Mapping[str, _Target], directory: Path, options: UpcyclingOptions, model_type: str
) -> UpcyclingReport:
    """Writes the shards, and the index if there are several."""
    dtype = DTYPES[options.dtype]
    try:
        split = split_state_dict_into_shards_factory(
            dict(targets),
            get_storage_size=lambda target: target.size * dtype.itemsize,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=options.max_shard_size,
        )
    except ValueError as exc:
        raise ConfigError(f"max_shard_size: found {options.max_shard_size!r}, expected a size such as 2GB") from exc
    # One buffer for all shards: allocating each tensor separately fragments memory, at worst by the size of a shard.
    buffer_N = torch.empty(
        max(sum(targets[name].size for name in names) for names in split.filename_to_tensors.values()), dtype=dtype
    )
    sizes = []
    for file_name, names in split.filename_to_tensors.items():
        shard = {}
        start = 0
        for name in names:
            target = targets[name]
            shard[name] = buffer_N[start : start + target.size].view(target.shape)
            values.fill(shard[name], target)
            start += target.size
        save_file(shard, directory / file_name, {"format": "pt"})
        (directory / file_name).chmod(0o644)  # save_file makes it private
        sizes.append((directory / file_name).stat().st_size)
    if split.is_sharded:
        _write_json(directory / INDEX_FILE, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    return UpcyclingReport(
        model_type=model_type,
        num_tensors=len(targets),
        num_shards=len(sizes),
        num_parameters=sum(target.size for target in targets.values()),
        num_bytes=sum(sizes),
        largest_shard=max(sizes),
    )


# --------------------------------------------------------------------------------------------- the other files


def _copy_files(source: Path, directory: Path) -> None:
    for pattern in _COPIED:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and path.suffix not in (".bin", ".pt", ".safetensors"):
                shutil.copyfile(path, directory / path.name)


def _write_configs(
    directory: Path, model_type: str, settings: Mapping[str, Any], architecture: str, dtype: str
) -> None:
    config = config_from_settings(model_type, settings)
    config.architectures = [architecture]
    config.dtype = dtype
    config.save_pretrained(directory)
    if not (directory / "generation_config.json").exists():
        GenerationConfig.from_model_config(config).save_pretrained(directory)


def _write_provenance(directory: Path, model_type: str, options: UpcyclingOptions, files: tuple[Path, ...]) -> None:
    """Records where the weights come from, and nothing about this machine."""
    digests = {}
    for path in files:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    content = {
        "source": options.source_name,
        "source_model_type": model_type,
        "source_sha256": digests,
        "experts": options.experts,
        "experts_per_token": options.top_k,
        "noise": {"distribution": "normal", "std": options.noise_std, "fraction": options.noise_fraction},
        "router": {"distribution": "normal", "std": options.router_std},
        "seed": options.seed,
        "dtype": options.dtype,
        "numpy": np.__version__,  # its generator drew the noise
    }
    _write_json(directory / PROVENANCE_FILE, content)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
