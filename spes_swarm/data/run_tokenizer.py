"""The tokenizer of a run: where its files are, on this machine or with other peers.

A manifest names a tokenizer of the Hub by its hub name. Files of the founder's machine have the name
`local:LABEL:DIGEST`, which is neither a path nor a hub name: other peers have other files at the same path, and a
stranger may own the repository. LABEL is for messages, and DIGEST is that of the packed files (`tokenizer.pack`). A
peer keeps them in its output directory, where it looks first. Otherwise it looks in the folders of its data, where
`python -m spes_swarm.tokenize` writes them, in the publication that it starts from, and asks other peers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from spes_swarm.base.decoding import MAX_TOKENIZER_BYTES
from spes_swarm.base.errors import ConfigError, DataError, ManifestError, UserError, os_errors_as
from spes_swarm.base.user_paths import replace_file
from spes_swarm.config.run import RunConfig, TokenizerConfig, frozen_embedding
from spes_swarm.data.tokenizer import (
    BYTES,
    FastTokenizer,
    Tokenizer,
    is_hub_name,
    load_packed,
    load_tokenizer,
    local_path,
    pack,
)

_MAX_FOLDERS = 16  # with a tokenizer, next to one data source


@dataclass(frozen=True, kw_only=True)
class TokenizerPlaces:
    """Where the files of a run's tokenizer can be, besides the place that its name says."""

    packed: Path | None = None  # the file in OUTPUT_DIR, which is written if it is missing
    folders: Sequence[Path] = ()  # of this peer's data
    published: Callable[[], bytes | None] = lambda: None  # packed files of the publication that this peer starts from
    ask_peers: Callable[[str], bytes | None] = lambda digest: None  # packed files with this digest, from other peers


def founded_tokenizer(run: RunConfig, places: TokenizerPlaces) -> tuple[Tokenizer, TokenizerConfig]:
    """Loads the tokenizer of a run that is being founded; returns it with its description for the manifest.

    A relative path is relative to the working directory or, if there is nothing, to a folder of the data.

    Raises:
        DataError, ManifestError, ConfigError: as `run_tokenizer`.
        UserError: the output directory cannot be written.
    """
    name = run.tokenizer.name
    if name == BYTES or run.tokenizer.local is not None:
        path = None
    else:
        nearby = [start / name for folder in places.folders for start in (folder, folder.parent)]
        is_relative = not name.startswith(("/", "~")) and not Path(name).exists()
        path = next((path for path in nearby if is_relative and path.exists()), None) or local_path(name)
    if path is not None:
        run = dataclasses.replace(run, tokenizer=dataclasses.replace(run.tokenizer, name=str(path)))
    tokenizer = run_tokenizer(run, places)
    described = dataclasses.replace(run.tokenizer, digest=tokenizer.digest)
    if path is not None and isinstance(tokenizer, FastTokenizer):
        packed = pack(tokenizer.all_files)
        if len(packed) > MAX_TOKENIZER_BYTES:
            raise DataError(
                f"the files of tokenizer {str(path)!r} have {len(packed) >> 20} MiB, but at most "
                f"{MAX_TOKENIZER_BYTES >> 20} MiB can be handed to other peers: remove those that it does not need"
            )
        _store(places, packed)
        described = dataclasses.replace(
            described, name=f"local:{_label(path.absolute().parts)}:{blake3(packed).hexdigest()}"
        )
    return tokenizer, described


def run_tokenizer(run: RunConfig, places: TokenizerPlaces | None = None) -> Tokenizer:
    """Loads the tokenizer of a run, and checks that it fits the run and its model.

    Raises:
        DataError: the tokenizer cannot be found or loaded.
        ManifestError: it is not the founder's.
        ConfigError: the model's vocabulary is too small for it, or the model never trains one of its tokens.
        UserError: the output directory cannot be written.
    """
    tokenizer = _find(run.tokenizer, places or TokenizerPlaces())
    name, expected = tokenizer.name, run.tokenizer.digest
    if expected is not None and tokenizer.digest != expected:
        raise ManifestError(
            f"tokenizer {name!r} on this machine is not the one that the run uses "
            f"(digest {tokenizer.digest[:12]}, expected {expected[:12]})"
        )
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"tokenizer {name!r} has {tokenizer.vocab_size} tokens, but the model's vocabulary has only "
            f"{run.model.vocab_size}: raise run.model.settings.vocab_size or choose another tokenizer"
        )
    pad = run.model.pad_token_id
    if pad is not None and tokenizer.produces(pad):
        raise ConfigError(f"run.model.{frozen_embedding(pad, f'a token of tokenizer {name!r}')}")
    tokenizer.date = run.tokenizer.date
    return tokenizer


def is_same_tokenizer(given: TokenizerConfig, run: TokenizerConfig) -> bool:
    """Returns True if a configuration names the tokenizer of a run, whose description the founder has completed."""
    if given.digest not in (None, run.digest):
        return False
    if given.name == run.name or run.local is None:
        return given.name == run.name
    try:
        path = local_path(given.name)
    except UserError:
        path = None
    if path is None:  # the founder's configuration, on another machine
        named = [part for part in Path(given.name).parts if part not in ("..", "/")]
        return f"/{run.local[0]}".endswith(f"/{_label(named)}")
    with suppress(UserError):
        return load_tokenizer(path).digest == run.digest
    return False


def _label(parts: Sequence[str]) -> str:
    return re.sub(r"[^A-Za-z0-9._/+-]+", "-", "/".join(parts[-2:]))[-64:]


def _find(wanted: TokenizerConfig, places: TokenizerPlaces) -> Tokenizer:
    if wanted.local is not None:
        return _find_local(*wanted.local, wanted.digest, places)
    if wanted.digest is None or wanted.name == BYTES:
        return load_tokenizer(wanted.name)
    # A manifest may also name a path of the founder's.
    with suppress(DataError):
        if local_path(wanted.name) is not None and (found := load_tokenizer(wanted.name)).digest == wanted.digest:
            return found
    for packed in _packed_near(places.folders, wanted.name):
        if (nearby := load_packed(wanted.name, packed)).digest == wanted.digest:
            return nearby
    return load_tokenizer(wanted.name if "@" in wanted.name or not is_hub_name(wanted.name) else f"{wanted.name}@main")


def _find_local(label: str, packed_digest: str, digest: str | None, places: TokenizerPlaces) -> Tokenizer:
    equal: FastTokenizer | None = None  # gives the same ids, but has other files, such as no chat template
    for packed in _candidates(label, packed_digest, places):
        is_exact = blake3(packed).hexdigest() == packed_digest
        if not is_exact and equal is not None:
            continue
        with suppress(DataError):
            tokenizer = load_packed(label, packed)
            if is_exact:
                _store(places, packed)
                return tokenizer
            if tokenizer.digest == digest:
                equal = tokenizer
    if equal is not None:
        _store(places, pack(equal.all_files))
        return equal
    copy = f" (or {places.packed.name} of another peer's output directory to {places.packed})" if places.packed else ""
    raise DataError(
        f"the run uses the tokenizer {label!r} of its founder (digest {(digest or packed_digest)[:12]}). It "
        f"is not next to the data, and no peer has it: copy its folder into that of your --data{copy}"
    )


def _candidates(label: str, packed_digest: str, places: TokenizerPlaces) -> Iterator[bytes]:
    """Yields packed files that may be those of the run, the nearest first. Only those of peers have been verified."""
    if places.packed is not None:
        with suppress(OSError):
            if places.packed.stat().st_size <= MAX_TOKENIZER_BYTES:
                yield places.packed.read_bytes()
    yield from _packed_near(places.folders, label)
    for ask in (places.published, lambda: places.ask_peers(packed_digest)):
        if (packed := ask()) is not None:
            yield packed


def _packed_near(folders: Sequence[Path], label: str) -> Iterator[bytes]:
    """Yields the packed files of tokenizers in these folders and, with a known name, in the folders above."""
    for folder in folders:
        found = [folder / "tokenizer.json", *sorted(folder.glob("*/tokenizer.json"))[:_MAX_FOLDERS]]
        found += [folder.parent / label / "tokenizer.json", folder.parent / "tokenizer" / "tokenizer.json"]
        for path in found:
            with suppress(DataError, OSError):
                if path.is_file():
                    tokenizer = load_tokenizer(path.parent, local_files_only=True)
                    if isinstance(tokenizer, FastTokenizer):
                        yield pack(tokenizer.all_files)


def _store(places: TokenizerPlaces, packed: bytes) -> None:
    if places.packed is None:
        return
    with suppress(OSError):
        if places.packed.read_bytes() == packed:
            return
    with os_errors_as(UserError, f"{places.packed} cannot be written"):
        replace_file(places.packed, packed)
