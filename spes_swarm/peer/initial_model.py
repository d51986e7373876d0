"""The model that a new run starts from: a directory, or a repository of the Hub.

Its config.json supplies the `model` section of the run, its tokenizer the `tokenizer` section. A repository is pinned
to one commit, and only configuration, tokenizer and safetensors are fetched from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from huggingface_hub import close_session

from spes_swarm.base.errors import CheckpointError, ConfigError, HubError
from spes_swarm.base.user_paths import refuse_lfs_pointer
from spes_swarm.base.wording import plural
from spes_swarm.config.model_settings import check_mixture, config_from_settings
from spes_swarm.config.model_size import NUM_EXPERTS, first_of
from spes_swarm.config.run import ModelConfig, RunConfig
from spes_swarm.data.tokenizer import BYTES, TOKENIZER_FILES, ByteTokenizer, FastTokenizer, Tokenizer, load_tokenizer
from spes_swarm.model.initial_weights import (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    check_has_weights,
    indexed_files,
    model_section,
)
from spes_swarm.model.saved_tensors import saved_tensors
from spes_swarm.model.sparse_model import build_model, layout_of
from spes_swarm.publishing.client import hub_api, translate_hub_errors, with_retries
from spes_swarm.publishing.target import Location, parse_model

# What describes a model on the Hub; anything else, code above all, stays there.
_DESCRIPTION_FILES = frozenset({CONFIG_FILE, *TOKENIZER_FILES})
_MORE_TEMPLATES = re.compile(r"additional_chat_templates/[A-Za-z0-9_-]+\.jinja")


@dataclass(frozen=True)
class InitialModel:
    """An existing model in a directory, or in a repository of the Hub."""

    name: str  # as the user writes it
    location: Location

    @classmethod
    def find(cls, name: str) -> InitialModel:
        """Parses the name of a model; contacts no Hub.

        Raises:
            CheckpointError: there is no such directory, and it is not the name of a repository.
        """
        return cls(name, parse_model(name))

    @property
    def absolute_name(self) -> str:
        """The name, independent of the current directory."""
        return self.name if self.location.path is None else str(self.location.path.absolute())

    def file_stamps(self) -> dict[str, str]:
        """Returns, by name, what changes when a weight file in a directory is replaced; nothing for a repository."""
        files = self.location.path.glob("*.safetensors") if self.location.path is not None else ()
        stats = {file.name: file.stat() for file in files if file.is_file()}
        return {name: f"{stat.st_size} bytes of {stat.st_mtime_ns}" for name, stat in stats.items()}

    def description(self, *, with_tokenizer: bool = True) -> Path:
        """Returns a directory with config.json and, if wanted, the tokenizer; fetches them from a Hub.

        Raises:
            CheckpointError: the repository is not a model, or has no safetensors.
            HubError: the Hub refuses or cannot be reached.
        """
        if self.location.path is not None:
            return self.location.path
        repository = _Repository.of(self.location)
        check_has_weights(repository.files, self.name)
        if CONFIG_FILE not in repository.files:
            raise CheckpointError(f"{self.name} is not a transformers model: it has no {CONFIG_FILE}")
        wanted = _DESCRIPTION_FILES if with_tokenizer else {CONFIG_FILE}
        found = wanted & repository.files
        if with_tokenizer:
            found |= set(filter(_MORE_TEMPLATES.fullmatch, repository.files))
        return repository.fetch(sorted(found))

    def configuration(self) -> Path:
        """Returns a directory with config.json and, if there is one, generation_config.json; fetches them from a Hub.

        Raises:
            CheckpointError, HubError: as `description`.
        """
        if self.location.path is not None:
            return self.location.path
        repository = _Repository.of(self.location)
        return repository.fetch([CONFIG_FILE, *({GENERATION_FILE} & repository.files)])

    def weights(self, say: Callable[[str], None]) -> Path:
        """Returns a directory with the safetensors; fetches them from a Hub.

        Raises:
            CheckpointError, HubError: as `description`.
        """
        directory = self.description()
        if self.location.path is not None:
            return directory
        repository = _Repository.of(self.location)
        names = [SINGLE_FILE]
        if INDEX_FILE in repository.files:
            names = indexed_files(repository.fetch([INDEX_FILE]) / INDEX_FILE)
        say(f"fetching {plural(len(names), 'weight file')} of {self.name}, commit {repository.commit[:7]}")
        for number, name in enumerate(names, start=1):
            repository.fetch([name])
            if len(names) > 1:
                say(f"{number} of {len(names)} weight files are here")
        return directory

    def describe_run(
        self, settings: Mapping[str, Any], source: str, *, adapt: bool, with_tokenizer: bool = True
    ) -> RunConfig:
        """Returns the configuration of a run that starts from this model.

        Args:
            settings: a `run` section; `name`, `model` and `tokenizer` are added where it lacks them.
            source: where they come from, for messages.
            adapt: limit the sequence length and the number of experts to those of the model.
            with_tokenizer: use the model's tokenizer, and set a pad token that it produces to null. Without it, the run
                has the same shapes, and only config.json is fetched from a repository.

        Raises:
            CheckpointError: config.json is missing or cannot be read.
            ConfigError: the model is not a supported mixture of experts, or the settings do not fit it.
            DataError: its tokenizer cannot be loaded.
        """
        run = {"name": self._run_name(), **settings}
        if "model" not in run:
            directory = self.description(with_tokenizer=with_tokenizer)
            run["model"] = model_section(directory)
            check_trainable(self.name, run["model"])
            if with_tokenizer:
                self._add_tokenizer(run, directory)
            else:
                run.setdefault("tokenizer", {"name": self.name})
                run["model"]["settings"]["pad_token_id"] = None
        if adapt:
            run = _adapted(run)
        return RunConfig.from_dict(run, source)

    def _pinned_name(self) -> str | None:
        """Returns a name that refers to this commit on every peer; None for a directory."""
        if self.location.repo_id is None:
            return None
        return f"{self.location.repo_id}@{_Repository.of(self.location).commit}"

    def _add_tokenizer(self, run: dict[str, Any], directory: Path) -> None:
        given = run.get("tokenizer")
        tokenizer = self._tokenizer(directory) if given is None else load_tokenizer(given.get("name", BYTES))
        if given is None:
            name = BYTES if _is_plain_bytes(tokenizer) else self._pinned_name() or tokenizer.name
            run["tokenizer"] = {"name": name}
        _train_every_token(run["model"], tokenizer)

    def _run_name(self) -> str:
        last = self.location.repo_id or self.description().resolve().name
        return re.sub(r"[^a-z0-9]+", "-", last.rpartition("/")[2].lower()).strip("-")[:40].strip("-") or "continued"

    @staticmethod
    def _tokenizer(directory: Path) -> Tokenizer:
        """Returns the model's tokenizer, and the bytes tokenizer for a model without one."""
        files = [path for name in TOKENIZER_FILES[:3] if (path := directory / name).is_file()]
        for path in files:
            refuse_lfs_pointer(path, path.read_bytes()[:64], CheckpointError)
        if not files:
            return ByteTokenizer()
        return load_tokenizer(directory.resolve(), local_files_only=True)


@dataclass(frozen=True)
class _Repository:
    """One commit of a repository on the Hub."""

    repo_id: str
    commit: str
    files: frozenset[str]

    @classmethod
    @lru_cache(maxsize=4)  # the description and the weights are of one commit, even if another is pushed meanwhile
    def of(cls, location: Location) -> _Repository:
        assert location.repo_id is not None
        api, label = hub_api(), location.repo_id
        try:
            with translate_hub_errors(label):
                info = with_retries(lambda: api.model_info(label, revision=location.revision))
        except HubError as exc:
            raise HubError(f"{exc}; nor is {label} a directory here") from exc
        return cls(label, str(info.sha), frozenset(file.rfilename for file in info.siblings or ()))

    def fetch(self, names: Sequence[str]) -> Path:
        """Fetches files into the library's cache; returns their directory, which has links to them."""
        download = hub_api().hf_hub_download
        with translate_hub_errors(self.repo_id):
            for name in names:
                if name not in self.files:
                    raise CheckpointError(f"{self.repo_id}: {name} is missing at commit {self.commit[:7]}")
                path = with_retries(partial(download, self.repo_id, name, revision=self.commit))
            # The session that follows forks, and a child must not share an open connection.
            close_session()
        return Path(path).parent


def _is_plain_bytes(tokenizer: Tokenizer) -> bool:
    """Returns True for the bytes tokenizer, unless the model's has a template or settings of its own."""
    return isinstance(tokenizer, FastTokenizer) and tokenizer.all_files == ByteTokenizer().all_files


def check_trainable(name: str, model: Mapping[str, Any]) -> None:
    """Refuses a model that a swarm cannot train or export, before any of its weights are read.

    Raises:
        ConfigError: the message starts with the model's name.
    """
    try:
        check_mixture(model["type"])
    except ConfigError as exc:
        raise ConfigError(f"{name}: {exc}; upcycle a dense model first: python -m spes_swarm.upcycle --help") from exc
    # Whether a pad token is valid depends on the tokenizer, which is not loaded yet.
    settings = {**model["settings"], "pad_token_id": None}
    try:
        ModelConfig(type=model["type"], settings=settings)
        empty = build_model(model["type"], settings, seed=0, device="cpu", on_meta=True)
        saved_tensors(empty, layout_of(empty))
    except ConfigError as exc:
        raise ConfigError(f"{name}: {exc}") from exc


def _train_every_token(model: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Sets the pad token to null where it occurs in text, since torch never trains the embedding of a pad token.

    A pad token outside the vocabulary, which torch refuses, is set to null too: published configurations contain -1.
    """
    config = config_from_settings(model["type"], model["settings"])
    pad, ends = first_of(config, ("pad_token_id",)), first_of(config, ("eos_token_id",))
    if pad is None:
        return
    is_end = pad in (ends if isinstance(ends, list) else [ends])
    if is_end or tokenizer.produces(pad) or not 0 <= pad < first_of(config, ("vocab_size",)):
        model["settings"]["pad_token_id"] = None


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
