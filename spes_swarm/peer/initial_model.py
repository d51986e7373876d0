"""The model that a new run starts from: a directory, or a repository of the Hub.

Its config.json supplies the `model` section of the run, its tokenizer the `tokenizer` section. A repository is pinned
to one commit, and only configuration, tokenizer and safetensors are fetched from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_swarm.base.errors import CheckpointError, ConfigError
from spes_swarm.base.user_paths import user_path
from spes_swarm.config.model_settings import check_mixture, config_from_settings
from spes_swarm.config.model_size import NUM_EXPERTS, first_of
from spes_swarm.config.run import RunConfig
from spes_swarm.data.tokenizer import BYTES, ByteTokenizer, Tokenizer, load_tokenizer
from spes_swarm.model.initial_weights import model_section
from spes_swarm.model.saved_tensors import saved_tensors
from spes_swarm.model.sparse_model import build_model, layout_of

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class InitialModel:
    """Where an existing model is."""

    name: str  # as the user writes it
    directory: Path

    @classmethod
    def find(cls, name: str) -> InitialModel:
        """Finds the model.

        Raises:
            CheckpointError: there is no such directory.
        """
        directory = user_path(name)
        if not directory.is_dir():
            raise CheckpointError(f"{name}: no such directory")
        return cls(name, directory)

    def weights(self, say: Callable[[str], None]) -> Path:
        """Returns the directory that holds the safetensors."""
        return self.directory

    def describe_run(self, settings: Mapping[str, Any], source: str, *, adapt: bool) -> RunConfig:
        """Returns the configuration of a run that starts from this model.

        Args:
            settings: a `run` section; `name`, `model` and `tokenizer` are added where it lacks them.
            source: where they come from, for messages.
            adapt: limit the sequence length and the number of experts to those of the model.

        Raises:
            CheckpointError: config.json is missing or cannot be read.
            ConfigError: the model is not a supported mixture of experts, or the settings do not fit it.
            DataError: its tokenizer cannot be loaded.
        """
        run = {"name": self._run_name(), **settings}
        if "model" not in run:
            run["model"] = model_section(self.directory)
            check_trainable(self.name, run["model"])
            given = run.get("tokenizer")
            tokenizer = self._tokenizer() if given is None else load_tokenizer(given.get("name", BYTES))
            run.setdefault("tokenizer", {"name": tokenizer.name})
            _train_every_token(run["model"], tokenizer)
        if adapt:
            run = _adapted(run)
        return RunConfig.from_dict(run, source)

    def _run_name(self) -> str:
        last = self.directory.resolve().name.lower()
        return re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:40].strip("-") or "continued"

    def _tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer: the bytes tokenizer if it is that one, or if the model has none."""
        if not any((self.directory / file).is_file() for file in _TOKENIZER_FILES):
            return ByteTokenizer()
        tokenizer = load_tokenizer(self.directory.resolve(), local_files_only=True)
        return ByteTokenizer() if tokenizer.digest == ByteTokenizer().digest else tokenizer


def check_trainable(name: str, model: Mapping[str, Any]) -> None:
    """Refuses a model that a swarm cannot train or export, before any of its weights are read.

    Raises:
        ConfigError: the message starts with the model's name.
    """
    try:
        check_mixture(model["type"])
    except ConfigError as exc:
        raise ConfigError(f"{name}: {exc}; upcycle a dense model first: python -m spes_swarm.upcycle --help") from exc
    try:
        empty = build_model(model["type"], model["settings"], seed=0, device="cpu", on_meta=True)
        saved_tensors(empty, layout_of(empty))
    except ConfigError as exc:
        raise ConfigError(f"{name}: {exc}") from exc


def _train_every_token(model: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Sets the pad token to null where it occurs in text, since torch never trains the embedding of a pad token."""
    settings = model["settings"]
    pad, ends = settings.get("pad_token_id"), settings.get("eos_token_id")
    if pad is not None and (tokenizer.produces(pad) or pad in (ends if isinstance(ends, list) else [ends])):
        settings["pad_token_id"] = None


def _adapted(run: dict[str, Any]) -> dict[str, Any]:
    """Limits the sequence length and the number of experts to those that the model has."""
    config = config_from_settings(run["model"]["type"], run["model"]["settings"])
    experts, positions = first_of(config, NUM_EXPERTS), first_of(config, ("max_position_embeddings",))
    if isinstance(experts, int):
        run["experts_per_peer"] = max(1, min(run["experts_per_peer"], experts))
    if isinstance(positions, int):
        length = max(2, min(run["training"]["sequence_length"], positions))
        run["training"] = {**run["training"], "sequence_length": length}
    return run
