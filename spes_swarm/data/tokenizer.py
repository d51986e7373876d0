"""Tokenizers: text to ids and back, with a digest that peers compare.

Three kinds share one protocol. `bytes` needs no file at all: token id = byte value, 256 = end of text. A byte-level BPE
is trained here (`train_bpe`) and loaded by the path of its tokenizer.json. Anything else is a fast tokenizer that
`transformers` can load, by path or by name, `USER/REPO[@REVISION]`. What exists here is a path; a name that looks like
a path is never looked up on the Hub.

Text is data, never a command: the characters "<|endoftext|>" inside a document become ordinary tokens, so only the
end of a document yields the end-of-text id, whatever a corpus contains.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgpack
import numpy as np
import tokenizers
from blake3 import blake3
from huggingface_hub import try_to_load_from_cache
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from spes_swarm.base.decoding import MAX_TOKENIZER_BYTES, unpack
from spes_swarm.base.errors import DataError, ProtocolError, os_errors_as
from spes_swarm.base.user_paths import user_path
from spes_swarm.config.constraints import DATE

BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"
MIN_BPE_VOCAB_SIZE = 257  # 256 bytes and the end of text

_CONFIG = "tokenizer_config.json"
# Files of a tokenizer, in any of the forms that transformers reads.
TOKENIZER_FILES = (
    "tokenizer.json",
    _CONFIG,
    "tokenizer.model",
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)

# A repository and its revision: a tag, a branch or a commit. The library uses the revision in a file name.
_REPOSITORY = r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?"
_PINNED = re.compile(rf"(?P<repo>{_REPOSITORY})@(?P<revision>[A-Za-z0-9][A-Za-z0-9._-]{{0,63}})")

_NEEDED = (*TOKENIZER_FILES, "config.json", "*.model")  # of a repository

TokenArray = NDArray[Any]  # 1-D, an integer dtype

# Two tokenizers with the same vocabulary and merges can still split text differently (another regular expression,
# another normaliser). Releases of `tokenizers` serialise these settings differently, so the digest covers the ids of
# this text instead.
_PROBE = (
    "The quick brown fox can't jump, 1234567890 3.14 times!  \n\n\n\tif x == 'y':\n        return -1e-9  # tab\there"
    "\r\nStraße ÅÅ \ufb01 ½ e\u0301 é \u0130 Привет, мир. 你好世界 こんにちは 한국어 नमस्ते مرحبا שלום "
    "\u00a0\u2028\u200b\ufeff 😀 \U0001f469\u200d\U0001f467 \x00\x07 https://example.org/a_b?c=d&e=%20 <|endoftext|> "
    "</s> ALLCAPS camelCase __dunder__ {}[]()<>;:\\/|~`@#$^&*_+\n"
)


class Tokenizer(Protocol):
    """What the rest of the package needs from a tokenizer."""

    name: str  # for display: the argument of `load_tokenizer`, or how the tokenizer was made
    digest: str  # hex BLAKE3 that identifies the mapping from text to ids; equal on peers that may share a run
    vocab_size: int  # one more than the largest id
    end_of_text: int  # the id that ends every document
    date: str  # YYYY-MM-DD: what chat templates take for today

    def produces(self, token_id: int) -> bool:
        """Returns True if the id can occur in tokenised documents, as text or as the end of one."""

    def encode(self, text: str) -> TokenArray:
        """Returns the ids of `text`, 1-D, without special tokens.

        Raises:
            UnicodeEncodeError: `text` contains a lone surrogate, which UTF-8 cannot encode.
        """

    def decode(self, ids: Sequence[int] | TokenArray) -> str:
        """Returns the text of `ids`; bytes that are not UTF-8 become U+FFFD, special tokens appear by name."""

    def save(self, directory: Path) -> None:
        """Writes files with which `transformers.AutoTokenizer.from_pretrained(directory)` produces the same ids.

        Raises:
            DataError: the directory cannot be written.
        """


class FastTokenizer:
    """A tokenizer of the `tokenizers` library.

    Pickles without `transformers`, so worker processes start fast. It owns `backend`, and disables its truncation and
    padding. `save` writes `files` (name -> content), or two default files. Chat templates take `date` for today.

    Raises:
        DataError: `end_of_text` is not in the vocabulary.
    """

    date = DATE  # YYYY-MM-DD; not part of the digest

    def __init__(
        self, name: str, backend: tokenizers.Tokenizer, end_of_text: str, files: Mapping[str, bytes] | None = None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # text is data, see the module docstring
        token_id = backend.token_to_id(end_of_text)
        if token_id is None:
            raise DataError(f"tokenizer {name!r}: its end-of-text token {end_of_text!r} is not in its vocabulary")
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.name = name
        self.digest = _digest(backend, vocabulary, token_id)
        self.vocab_size = 1 + max(vocabulary.values())
        self.end_of_text: int = token_id
        self._backend = backend
        self._end_of_text_name = end_of_text
        self.files = dict(files) if files is not None else _plain_files(backend, end_of_text)
        self.originals: dict[str, bytes] = {}  # files that `save` writes besides, or instead
        self._produced = _produced(backend, vocabulary) | {token_id}

    def __reduce__(self) -> tuple[Callable[..., FastTokenizer], tuple[Any, ...]]:
        return _unpickle_fast, (self.name, self.serialised(), self._end_of_text_name, self.files)

    def serialised(self) -> str:
        """Returns the content of a tokenizer.json, which does not say that special tokens in text are text."""
        return str(self._backend.to_str())

    def produces(self, token_id: int) -> bool:
        """See `Tokenizer`."""
        return token_id in self._produced

    def encode(self, text: str) -> TokenArray:
        """See `Tokenizer`."""
        try:
            return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.uint32)
        except TypeError:
            text.encode("utf-8")  # for a lone surrogate, this raises the error that names it
            raise

    def decode(self, ids: Sequence[int] | TokenArray) -> str:
        """See `Tokenizer`."""
        decoded: str = self._backend.decode([int(i) for i in ids], skip_special_tokens=False)
        return decoded

    @property
    def all_files(self) -> dict[str, bytes]:
        """The files that `save` writes."""
        return {**self.files, **self.originals}

    def save(self, directory: Path) -> None:
        """See `Tokenizer`."""
        with os_errors_as(DataError, f"{directory} cannot be written", "choose another directory"):
            directory.mkdir(parents=True, exist_ok=True)
            for name, content in self.all_files.items():
                (directory / name).write_bytes(content)


class ByteTokenizer(FastTokenizer):
    """Token id = byte value of the UTF-8 text; 256 ends a document. Encoding returns a view of the bytes, no copy."""

    def __init__(self) -> None:
        vocabulary = {char: byte for byte, char in enumerate(_byte_characters())}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([END_OF_TEXT])
        super().__init__(BYTES, backend, END_OF_TEXT)

    def __reduce__(self) -> tuple[Callable[..., FastTokenizer], tuple[Any, ...]]:
        return ByteTokenizer, ()

    def encode(self, text: str) -> TokenArray:
        """See `Tokenizer`; uint8 and read-only."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: Sequence[int] | TokenArray) -> str:
        """See `Tokenizer`."""
        pieces = bytearray()
        for i in ids:
            pieces += END_OF_TEXT.encode() if i == 256 else bytes((int(i),))
        return pieces.decode("utf-8", errors="replace")


def load_tokenizer(name: str | Path, *, local_files_only: bool = False) -> Tokenizer:
    """Loads a tokenizer: "bytes"; a `tokenizer.json`; or a directory or hub name for `transformers.AutoTokenizer`.

    A revision (`USER/REPO@REVISION`) may follow the hub name. A commit gives every machine the same tokenizer.

    Code that comes with a tokenizer is never run. A name is looked up in the local cache first, so a peer that has used
    it once starts without a network. With `local_files_only` (or HF_HUB_OFFLINE=1) the network is never used.

    Raises:
        DataError: the tokenizer cannot be found, reached or used; the message names it and says what to do.
    """
    name = str(name)
    if name == BYTES:
        return ByteTokenizer()
    if name == "bpe":
        raise DataError(
            "tokenizer 'bpe' has to be trained on a corpus first: run python -m spes_swarm.tokenize "
            "--tokenizer bpe, then give the path of the tokenizer.json that it wrote"
        )
    path = local_path(name)
    if path is not None and path.suffix == ".json":
        return _load_json(path)
    if path is not None:
        _check_size(path / "tokenizer.json")
        return _load_transformers(name, str(path), None, local_files_only=True)
    source, revision = name, "main"
    if "@" in name:
        pinned = _PINNED.fullmatch(name)
        if pinned is None:
            raise DataError(f"tokenizer {name!r}: expected USER/REPO@REVISION, with a tag or a commit as revision")
        source, revision = pinned["repo"], pinned["revision"]
    return _load_transformers(name, source, revision, local_files_only=local_files_only)


def local_path(name: str) -> Path | None:
    """Returns the file or directory that `load_tokenizer` loads under this name; None for `bytes` and hub names.

    Raises:
        DataError: the name is a path, but there is nothing.
    """
    if name == BYTES:
        return None
    path = user_path(name)
    if path.suffix == ".json" or path.exists():
        return path
    if name.startswith((".", "/", "~")) or ("@" not in name and not is_hub_name(name)):
        raise DataError(f"tokenizer {name!r}: no such file or directory")
    if "@" not in name and "/" in name and (path.parent).is_dir():  # a stranger could own the name
        raise DataError(
            f"tokenizer {name!r}: no such file or directory in {str(path.parent)!r}; if you mean the repository of "
            f"this name on the Hub, write {name}@main"
        )
    return None


def is_hub_name(name: str) -> bool:
    """Returns True if this can be the name of a repository on the Hub, without a revision."""
    return re.fullmatch(_REPOSITORY, name) is not None and not name.endswith(".json")


def train_bpe(texts: Iterable[str], vocab_size: int) -> FastTokenizer:
    """Trains a byte-level BPE of at most `vocab_size` ids, the 256 bytes and the end of text (id 0) included; the same
    texts (read once) give the same tokenizer. A small corpus may have too few pairs to reach that size.

    Raises:
        DataError: `vocab_size` is smaller than 257.
    """
    if vocab_size < MIN_BPE_VOCAB_SIZE:
        raise DataError(f"a byte-level BPE needs a vocabulary of at least {MIN_BPE_VOCAB_SIZE}, got {vocab_size}")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(iter(texts), trainer)
    return FastTokenizer("bpe", backend, END_OF_TEXT)


def pack(files: Mapping[str, bytes]) -> bytes:
    """Returns the files of a tokenizer as one message, from which `load_packed` makes an equal one."""
    return bytes(msgpack.packb({name: files[name] for name in TOKENIZER_FILES if name in files}))


def load_packed(name: str, packed: bytes) -> FastTokenizer:
    """Loads what `pack` has returned; `name` is for display.

    Raises:
        DataError: it is damaged, too large, or not a tokenizer.
    """
    try:
        files = unpack(packed, MAX_TOKENIZER_BYTES)
    except ProtocolError as exc:
        raise DataError(f"tokenizer {name!r} is damaged: {exc.detail}") from exc
    if not isinstance(files, dict) or not all(
        key in TOKENIZER_FILES and isinstance(files[key], bytes) for key in files
    ):
        raise DataError(f"tokenizer {name!r} is damaged: unexpected files")
    with tempfile.TemporaryDirectory() as directory:
        for key, content in files.items():
            (Path(directory) / key).write_bytes(content)
        tokenizer = _load_transformers(name, directory, None, local_files_only=True)
    tokenizer.files, tokenizer.originals = files, {}
    return tokenizer


def _unpickle_fast(name: str, serialised: str, end_of_text: str, files: dict[str, bytes]) -> FastTokenizer:
    return FastTokenizer(name, tokenizers.Tokenizer.from_str(serialised), end_of_text, files)


def _byte_characters() -> list[str]:
    """Returns the visible character for each byte in GPT-2's byte-level vocabularies, in byte order."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    substitutes = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(substitutes)) for byte in range(256)]


def _produced(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> frozenset[int]:
    """Returns the ids that text can become: all but special tokens, except for the unknown token."""
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    model = json.loads(backend.to_str())["model"]
    unknown = {model.get("unk_id"), vocabulary.get(model.get("unk_token"))}
    return frozenset(i for i in vocabulary.values() if i not in special or i in unknown)


def _digest(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int], end_of_text: int) -> str:
    """Hashes what determines the ids, in a form that does not depend on the release of `tokenizers`."""
    merges = json.loads(backend.to_str())["model"].get("merges", [])
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]  # both forms are in use
    content = {
        "vocabulary": sorted(vocabulary.items(), key=lambda item: (item[1], item[0])),
        "merges": pairs,
        "end_of_text": end_of_text,
        "probe": backend.encode(_PROBE, add_special_tokens=False).ids,
    }
    return blake3(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def _plain_files(backend: tokenizers.Tokenizer, end_of_text: str) -> dict[str, bytes]:
    """Returns the two files that `AutoTokenizer` needs; built by hand, so every release gives the same."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end_of_text,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # `encode_special_tokens` is not part of tokenizer.json
        "model_max_length": 10**30,  # what transformers itself writes for "no limit"
    }
    return {
        "tokenizer.json": (backend.to_str(pretty=True) + "\n").encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }


def _load_json(path: Path) -> FastTokenizer:
    if not path.is_file():
        raise DataError(f"tokenizer {str(path)!r}: no such file")
    _check_size(path)
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8-sig"))
    except OSError as exc:
        raise DataError(f"tokenizer {str(path)!r}: {exc.strerror}") from exc
    except Exception as exc:  # `tokenizers` raises a bare Exception if it cannot parse a file
        raise DataError(f"tokenizer {str(path)!r} is not a tokenizer.json of the `tokenizers` library: {exc}") from exc
    return FastTokenizer(str(path), backend, _configured_end_of_text(path.parent / "tokenizer_config.json"))


def _check_size(path: Path) -> None:
    if path.exists() and path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise DataError(f"{path} has more than {MAX_TOKENIZER_BYTES >> 20} MiB, which no tokenizer.json has")


def _configured_end_of_text(path: Path) -> str:
    """Returns the end-of-text token configured next to a tokenizer.json, by default this package's own."""
    if not path.is_file():
        return END_OF_TEXT
    try:
        token = json.loads(path.read_text(encoding="utf-8-sig")).get("eos_token")
    except (OSError, ValueError, AttributeError) as exc:
        raise DataError(f"{path} is not a tokenizer configuration: {exc}") from exc
    if isinstance(token, dict):  # a serialised AddedToken
        token = token.get("content")
    return token if isinstance(token, str) else END_OF_TEXT


def _load_transformers(name: str, source: str, revision: str | None, *, local_files_only: bool) -> FastTokenizer:
    """Loads a directory, or with a revision a repository of the Hub."""
    from huggingface_hub import snapshot_download
    from transformers import AutoTokenizer  # takes seconds to import; "bytes" and tokenizer.json do not need it

    def attempt(local: bool) -> tuple[str, Any]:
        place = source
        if revision is not None and Path(source).exists():  # transformers would load the directory of this name
            place = snapshot_download(source, revision=revision, allow_patterns=list(_NEEDED), local_files_only=local)
        return place, AutoTokenizer.from_pretrained(
            place, revision=revision or "main", trust_remote_code=False, local_files_only=local
        )

    try:
        try:
            place, loaded = attempt(True)
        except (OSError, ValueError):
            if local_files_only:
                raise
            place, loaded = attempt(False)
    except Exception as exc:  # the hub client, transformers and tokenizers each raise their own types
        reason = " ".join(str(exc).split())[:300]
        if not isinstance(exc, OSError | ValueError):  # such as a KeyError for a missing part of a file
            reason = f"{type(exc).__name__} {reason}"
        advice = (
            "Save its files as UTF-8 without a byte order mark"
            if "UTF-8 BOM" in reason
            else "Its files are damaged or incomplete: copy them again, or choose another tokenizer"
            if revision is None
            else "Check the name and the network, or download it first and give its directory; "
            "'bytes' needs no download"
        )
        raise DataError(f"tokenizer {name!r} could not be loaded: {reason.rstrip('. ')}. {advice}") from exc
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise DataError(f"tokenizer {name!r} has no fast version (tokenizer.json), which this package needs")
    if loaded.eos_token is None:
        raise DataError(f"tokenizer {name!r} has no end-of-text token: set eos_token in its tokenizer_config.json")
    templates = loaded.chat_template  # several would be written to a subfolder
    with tempfile.TemporaryDirectory() as directory:
        loaded.save_pretrained(directory, save_jinja_files=not isinstance(templates, dict))
        files = {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir()) if path.is_file()}
    found = FastTokenizer(name, tokenizers.Tokenizer.from_str(backend.to_str()), loaded.eos_token, files)
    found.originals = _originals(place, revision, json.loads(files[_CONFIG]), has_templates=bool(templates))
    return found


def _originals(source: str, revision: str | None, config: dict[str, Any], *, has_templates: bool) -> dict[str, bytes]:
    """Returns a tokenizer's files as they came, for other programs and versions of transformers.

    `config` is what this version writes into tokenizer_config.json, which has the chat templates if there are several.
    """
    found: dict[str, bytes] = {}
    for name in TOKENIZER_FILES:
        cached = None if Path(source).exists() else try_to_load_from_cache(source, name, revision=revision)
        path = Path(cached) if isinstance(cached, str) else Path(source) / name
        with suppress(OSError):  # transformers has not needed it
            found[name] = path.read_bytes()
    kept = json.loads(found[_CONFIG]) if _CONFIG in found else dict(config)
    if "chat_template" in config:
        kept["chat_template"] = config["chat_template"]
        found.pop("chat_template.jinja", None)
    for key in ("auto_map", "is_local", "local_files_only"):  # code, and what this version adds
        kept.pop(key, None)
    if has_templates:
        kept.pop("split_special_tokens", None)  # the marks that a template writes are tokens
    if kept.get("tokenizer_class") == "TokenizersBackend":  # what transformers 5 calls it
        kept["tokenizer_class"] = "PreTrainedTokenizerFast"
    if _CONFIG not in found or kept != json.loads(found[_CONFIG]):
        found[_CONFIG] = (json.dumps(kept, indent=2, ensure_ascii=False) + "\n").encode()
    return found
