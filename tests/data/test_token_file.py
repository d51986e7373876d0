"""Token files: whole or absent, and anything damaged is named with its remedy."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spes_swarm.base.errors import DataError
from spes_swarm.data import token_file
from spes_swarm.data.token_file import TokenFile, TokenWriter, sidecar_path, token_dtype
from spes_swarm.data.tokenizer import ByteTokenizer, train_bpe
from tests.helpers.token_files import open_checked, token_writer

BYTES = ByteTokenizer()
TOKENS = np.arange(1000) % 257


def write(path: Path, tokens: np.ndarray[tuple[int], np.dtype[np.int64]] = TOKENS) -> Path:
    with token_writer(path, BYTES) as writer:
        writer.append(tokens[:300], 2)
        writer.append(tokens[300:], 1)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "t.npy")


@pytest.mark.parametrize("call", [1, 2])
def test_an_interruption_while_a_file_is_completed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """By Ctrl-C, while the tokens or the sidecar are synced to disk."""
    calls: list[Path] = []

    def interrupted(path: Path) -> None:
        calls.append(path)
        if len(calls) == call:
            raise KeyboardInterrupt

    monkeypatch.setattr(token_file, "sync_to_disk", interrupted)
    writer = TokenWriter(tmp_path / "t.npy", BYTES)
    writer.append(TOKENS, 1)
    with pytest.raises(KeyboardInterrupt):
        writer.commit()
    writer.abort()
    assert not list(tmp_path.iterdir())


def test_numpy_reads_what_was_written(path: Path) -> None:
    array = np.load(path, allow_pickle=False)
    assert array.dtype == np.uint16
    assert array.tolist() == TOKENS.tolist()
    side = json.loads(sidecar_path(path).read_text())
    assert (side["num_tokens"], side["num_documents"], side["max_token"]) == (1000, 3, 256)
    assert side["blake3"] == blake3(TOKENS.astype("<u2").tobytes()).hexdigest()
    assert (side["tokenizer"], side["tokenizer_digest"]) == ("bytes", BYTES.digest)
    assert sorted(p.name for p in path.parent.iterdir()) == ["t.npy", "t.npy.json"]


def test_open_maps_and_verifies(path: Path) -> None:
    file = open_checked(path, BYTES)
    assert file.tokens.tolist() == TOKENS.tolist()
    assert not file.tokens.flags.writeable


def test_numpys_own_files_are_read_too(path: Path) -> None:
    np.save(path, TOKENS.astype(np.uint16))
    assert open_checked(path, BYTES).tokens.tolist() == TOKENS.tolist()


def test_dtype_follows_the_vocabulary() -> None:
    assert [token_dtype(n).str for n in (257, 65536, 65537)] == ["<u2", "<u2", "<u4"]


def test_an_interrupted_writer_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with token_writer(tmp_path / "t.npy", BYTES) as writer:
            writer.append(TOKENS, 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_writer_leaves_the_older_file(path: Path) -> None:
    writer = TokenWriter(path, BYTES)
    writer.append(TOKENS[:10], 1)
    writer.abort()
    open_checked(path, BYTES)
    write(path, TOKENS[::-1].copy())
    assert open_checked(path, BYTES).tokens[0] == TOKENS[-1]


def test_writer_refuses_impossible_ids_and_nothing(tmp_path: Path) -> None:
    for bad in (-1, 257):
        writer = TokenWriter(tmp_path / "t.npy", BYTES)
        with pytest.raises(DataError, match=f"id {bad}, outside"):
            writer.append(np.array([1, bad]), 1)
        writer.abort()
    with pytest.raises(DataError, match="no tokens"):
        TokenWriter(tmp_path / "t.npy", BYTES).commit()
    assert list(tmp_path.iterdir()) == []


def test_unwritable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="choose another directory"):
        TokenWriter(tmp_path / "file" / "t.npy", BYTES)


def test_another_tokenizer_is_refused(path: Path) -> None:
    with pytest.raises(DataError, match=r"made with the tokenizer 'bytes'.*tokenise the text again"):
        TokenFile.open(path, train_bpe([], 257))
    assert TokenFile.open(path).sidecar.vocab_size == 257


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def saved(array: np.ndarray[Any, Any]) -> Callable[[Path], None]:
    return lambda path: np.save(path, array, allow_pickle=True)


def change_sidecar(**changes: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        side = sidecar_path(path)
        side.write_text(json.dumps({**json.loads(side.read_text()), **changes}))

    return change


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda p: p.unlink(), "No such file"),
    "no sidecar": (lambda p: sidecar_path(p).unlink(), "no sidecar"),
    "truncated": (truncate, "truncated"),
    "longer": (extend, "longer"),
    "header only": (lambda p: os.truncate(p, 40), "damaged"),
    "nothing": (lambda p: os.truncate(p, 0), "does not start"),
    "wrong magic": (lambda p: p.write_bytes(b"PK\x03\x04" + p.read_bytes()), "does not start"),
    "text": (lambda p: p.write_text("hello"), "does not start"),
    "objects": (saved(np.array([{"a": 1}, None], dtype=object)), r"dtype is '\|O'"),
    "floats": (saved(np.zeros(1000)), "dtype is '<f8'"),
    "structured": (saved(np.zeros(3, dtype=[("a", "<u2")])), "dtype"),
    "two dimensions": (saved(np.zeros((10, 100), np.uint16)), "not one dimension"),
    "empty": (saved(np.zeros(0, np.uint16)), "empty"),
    "another length": (saved(np.zeros(999, np.uint16)), "999 tokens.*do not belong together"),
    "another dtype": (saved(np.zeros(1000, np.uint32)), "do not belong together"),
    "sidecar no JSON": (lambda p: sidecar_path(p).write_bytes(b"\xff{"), "is not JSON"),
    "sidecar foreign": (lambda p: sidecar_path(p).write_text("[]"), "does not describe"),
    "sidecar newer": (change_sidecar(version=2), "format version 2"),
    "sidecar garbled": (change_sidecar(num_tokens="1000", blake3=None), "invalid fields: blake3, num_tokens"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(path: Path, name: str) -> None:
    damage, words = DAMAGES[name]
    damage(path)
    with pytest.raises(DataError, match=words) as caught:
        TokenFile.open(path, BYTES)
    assert "t.npy" in str(caught.value)


def test_changed_tokens_are_found_by_the_content_check(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    TokenFile.open(path, BYTES)
    with pytest.raises(DataError, match="do not match their digest"):
        open_checked(path, BYTES)


def test_ids_beyond_the_vocabulary_are_found(path: Path) -> None:
    np.save(path, np.full(1000, 300, np.uint16))
    with pytest.raises(DataError, match="token id 300 in a vocabulary of 257"):
        open_checked(path, BYTES)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 160), replacement=st.binary(min_size=1, max_size=12))
def test_any_damage_to_the_header_is_a_data_error_or_harmless(path: Path, position: int, replacement: bytes) -> None:
    original = path.read_bytes()
    path.write_bytes(original[:position] + replacement + original[position + len(replacement) :])
    try:
        try:
            file = TokenFile.open(path, BYTES)
        except DataError:
            return
        assert len(file.tokens) == 1000
    finally:
        path.write_bytes(original)


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300) | st.text(st.sampled_from("{}[]()'\",:0123456789<u2 descrshape"), max_size=200))
def test_any_header_text_is_a_data_error(path: Path, content: bytes | str) -> None:
    header = content if isinstance(content, bytes) else content.encode()
    foreign = path.with_name("foreign.npy")
    foreign.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(DataError):
        TokenFile.open(foreign)


def test_a_token_file_is_immutable(path: Path) -> None:
    file = TokenFile.open(path)
    with pytest.raises(dataclasses.FrozenInstanceError):
        file.path = path  # type: ignore[misc]
