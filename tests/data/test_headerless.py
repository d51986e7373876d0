"""Token files without a sidecar, and lists of token files, as SPES's and OLMo's data preparation leaves them."""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spes_swarm.base.errors import DataError, LeftEarlyError
from spes_swarm.data import headerless
from spes_swarm.data.content_check import check_contents_once
from spes_swarm.data.corpus import check_source, open_corpus
from spes_swarm.data.corpus_index import membership
from spes_swarm.data.file_list import listed_token_files
from spes_swarm.data.sampler import TokenStream
from spes_swarm.data.token_file import TokenFile
from spes_swarm.data.tokenizer import ByteTokenizer
from tests.helpers.token_files import Vocabulary, save_headerless, token_writer

BYTES = ByteTokenizer()
QWEN = Vocabulary(151_665)
OLMO = Vocabulary(50_304)
NUMBERS = itertools.count()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The headerless files that have been read whole, in order."""
    paths: list[Path] = []
    described = headerless._described

    def noted(path: Path, size: int, tokenizer: Any) -> Any:
        paths.append(path)
        return described(path, size, tokenizer)

    monkeypatch.setattr(headerless, "_described", noted)
    return paths


def one(source: Path, tokenizer: Any, cache: Path) -> TokenFile:
    (file,) = open_corpus(str(source), tokenizer, cache)
    return file


# ------------------------------------------------------------------------------------------------------- reading


def test_a_file_of_uint32_is_described_by_what_it_holds(tmp_path: Path, cache: Path) -> None:
    tokens = [7, 151_664, 0, 65_536, 9, 0]
    file = one(save_headerless(tmp_path / "a.npy", tokens, "uint32"), QWEN, cache)
    assert file.tokens.tolist() == tokens
    assert not file.has_header
    described = file.sidecar
    assert (described.dtype, described.num_tokens, described.max_token) == ("uint32", 6, 151_664)
    assert described.num_documents == 2
    assert described.blake3 == blake3(np.array(tokens, "<u4").tobytes()).hexdigest()
    assert (described.tokenizer, described.tokenizer_digest) == (QWEN.name, QWEN.digest)
    assert (described.vocab_size, described.end_of_text) == (QWEN.vocab_size, 0)
    file.check_content()
    with pytest.raises(ValueError, match="read-only"):
        file.tokens[0] = 1


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), vocab_size=st.integers(2, 200_000))
def test_ids_come_back_whatever_their_size_and_the_vocabulary(
    tmp_path: Path, data: st.DataObject, vocab_size: int
) -> None:
    tokens = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=30))
    dtype = data.draw(st.sampled_from(["uint16", "uint32"] if vocab_size <= 1 << 16 else ["uint32"]))
    # Pairs of uint16 are a uint32 of this vocabulary only if every second one is 0: then nobody could tell.
    assume(any(tokens) and (dtype == "uint32" or len(tokens) % 2 or any(tokens[1::2])))
    # Ids of which every second one is hardly more than 0 are refused, in either byte order.
    assume(len(tokens) < 8 or (max(tokens[1::2]) > 7 and not set(tokens[::2]) <= set(range(0, 2048, 256))))
    # A new name for each: a file that is replaced twice within a tick of the clock looks the same.
    path = save_headerless(tmp_path / f"{next(NUMBERS)}.npy", tokens, dtype)
    file = one(path, Vocabulary(vocab_size), tmp_path / "cache")
    assert (file.tokens.tolist(), file.sidecar.dtype) == (tokens, dtype)


def test_files_with_and_without_a_header_may_lie_side_by_side(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "data").mkdir()
    with token_writer(tmp_path / "data" / "b.npy", BYTES) as writer:
        writer.append(np.arange(5), 1)
    save_headerless(tmp_path / "data" / "a.npy", [1, 2, 256], "uint32")
    save_headerless(tmp_path / "data" / "c.npy", [3, 4, 256], "uint16")
    check_source(str(tmp_path / "data"))
    files = open_corpus(str(tmp_path / "data"), BYTES, cache)
    assert [file.tokens.tolist() for file in files] == [[1, 2, 256], [0, 1, 2, 3, 4], [3, 4, 256]]
    assert membership(files).num_shards == 3


def test_files_that_never_end_a_document_are_mentioned(tmp_path: Path, cache: Path) -> None:
    said: list[str] = []
    save_headerless(tmp_path / "a.npy", [1, 2, 256], "uint32")
    open_corpus(str(tmp_path), BYTES, cache, say=said.append)
    assert said == []
    save_headerless(tmp_path / "b.npy", [1, 2, 3], "uint32")
    for _ in range(2):  # also from the cache
        open_corpus(str(tmp_path), BYTES, cache, say=said.append)
    assert said[0] == said[1]
    assert said[0].startswith("no document ends (id 256 of 'bytes') in 1 token file without a header, such as ")


# ------------------------------------------------------------------------------------------------ read only once


def test_a_file_is_read_once_and_again_after_a_change(tmp_path: Path, cache: Path, scans: list[Path]) -> None:
    path = save_headerless(tmp_path / "a.npy", [1, 2, 256], "uint32")
    first = one(path, BYTES, cache).sidecar
    assert one(path, BYTES, cache).sidecar == first
    assert scans == [path]
    status = path.stat()
    save_headerless(path, [1, 3, 256], "uint32")  # the same size
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert one(path, BYTES, cache).sidecar.blake3 != first.blake3
    assert one(path, OLMO, cache).sidecar.vocab_size == OLMO.vocab_size  # for another run
    assert scans == [path] * 3


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b"[1]"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, cache: Path, scans: list[Path], damage: bytes) -> None:
    path = save_headerless(tmp_path / "a.npy", [1, 2, 256], "uint32")
    first = one(path, BYTES, cache).sidecar
    (description,) = (cache / "headerless").iterdir()
    description.write_bytes(damage)
    for _ in range(2):
        assert one(path, BYTES, cache).sidecar == first
    assert scans == [path, path]


def test_without_a_cache_a_file_is_read_every_time(tmp_path: Path, cache: Path, scans: list[Path]) -> None:
    cache.write_text("a file where the directory should be")
    path = save_headerless(tmp_path / "a.npy", [1, 2, 256], "uint32")
    for _ in range(2):
        assert one(path, BYTES, cache).tokens.tolist() == [1, 2, 256]
    assert scans == [path, path]


def test_what_was_read_to_be_described_is_not_read_again_to_be_compared(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = one(save_headerless(tmp_path / "a.npy", [1, 2, 256], "uint32"), BYTES, cache)
    monkeypatch.delattr(TokenFile, "check_content")
    check_contents_once([file], cache)


def test_reading_for_long_is_announced_and_can_be_left(
    tmp_path: Path, cache: Path, scans: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headerless, "WORTH_SAYING_BYTES", 1000)
    save_headerless(tmp_path / "a.npy", [256] * 10, "uint32")
    save_headerless(tmp_path / "b.npy", [256] * 1000, "uint32")
    said: list[str] = []
    for _ in range(2):
        open_corpus(str(tmp_path), BYTES, cache, say=said.append)
    (line,) = said
    assert "b.npy" in line
    assert "once" in line

    def leave() -> None:
        raise LeftEarlyError("stopped")

    save_headerless(tmp_path / "c.npy", [1], "uint32")
    scans.clear()
    with pytest.raises(LeftEarlyError):
        open_corpus(str(tmp_path), BYTES, cache, pause=leave)
    assert scans == []


# ------------------------------------------------------------------------------------------------------- refusals


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "tokenizer", "why"),
    [
        (b"", QWEN, "is empty"),
        (b"abc", QWEN, "has 3 bytes, which is not a whole number of token ids"),
        (np.array([5, 151_665, 6], "<u4").tobytes(), QWEN, "as uint32, it holds the id 151665"),
        # Every file of uint16 is of this vocabulary, also one that was cut or never held ids.
        (np.array([5, 6, 7], "<u2").tobytes(), QWEN, "it has 6 bytes, which is not a whole number of uint32 ids"),
        (np.array([5, 6, 7, 8], "<u2").tobytes(), QWEN, "as uint32, it holds the id 524295"),
        (np.array([5, 50_304], "<u4").tobytes(), OLMO, "as uint32, it holds the id 50304; as uint16, it holds the id "),
        (
            np.array([5, 50_304, 1], "<u2").tobytes(),
            OLMO,
            "a whole number of uint32 ids; as uint16, it holds the id",
        ),
        (b"once upon a time", BYTES, "vocabulary of 257 tokens (as uint32, it holds the id"),
    ],
)
def test_what_is_not_of_the_vocabulary_ends_in_one_line(
    tmp_path: Path, cache: Path, content: bytes, tokenizer: Any, why: str
) -> None:
    path = write(tmp_path / "a.npy", content)
    with pytest.raises(DataError) as caught:
        open_corpus(str(path), tokenizer, cache)
    line = str(caught.value)
    assert line.startswith(f"{path} has no .npy header")
    assert why in line
    assert "\n" not in line
    assert not cache.exists()


@pytest.mark.parametrize("content", [b"", b"abc"])
def test_a_size_that_cannot_be_is_found_before_the_tokenizer_is_known(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match=r"has no \.npy header and .*: copy it again"):
        check_source(str(write(tmp_path / "a.npy", content)))


def test_a_damaged_file_of_ours_is_not_taken_for_one_without_a_header(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.npy"
    with token_writer(path, BYTES) as writer:
        writer.append(np.arange(5), 1)
    write(path, b"\0\0\0\0" + path.read_bytes()[4:])
    for opened in (lambda: check_source(str(path)), lambda: one(path, BYTES, cache)):
        with pytest.raises(DataError, match=r"does not start like a \.npy file"):
            opened()


# ------------------------------------------------------------------------------------- other widths and byte orders


def zipf_ids(vocab_size: int, count: int = 5000) -> NDArray[np.int64]:
    """Ids with about the frequencies of text."""
    return (np.random.default_rng(0).zipf(1.2, count) - 1) % vocab_size


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "advice"),
    [
        ("<u8", 257, "64-bit"),
        ("<i8", 50_304, "64-bit"),
        ("<u8", 65_536, "64-bit"),
        ("<i8", 151_665, "64-bit"),
        (">u8", 50_304, "big-endian 64-bit"),
        (">u8", 151_665, "big-endian 64-bit"),
        (">u4", 257, "big-endian 32-bit"),
        (">i4", 65_536, "big-endian 32-bit"),
        (">u4", 151_665, "big-endian 32-bit"),
        (">u2", 257, "big-endian 16-bit"),
        (">u2", 50_304, "big-endian 16-bit"),
    ],
)
@pytest.mark.parametrize("count", [4, 5000])
def test_ids_of_another_form_are_refused_and_the_advice_works(
    tmp_path: Path, cache: Path, dtype: str, vocab_size: int, advice: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Vocabulary(vocab_size)
    ids = zipf_ids(vocab_size)[:count] if count > 4 else np.array([5, vocab_size - 1, 255, 40])
    path = write(tmp_path / "a.npy", ids.astype(dtype).tobytes())
    with pytest.raises(DataError, match=rf"its ids seem to be {advice}, so convert it with numpy\.save\(") as caught:
        one(path, tokenizer, cache)
    monkeypatch.chdir(tmp_path)
    command = str(caught.value).partition("convert it with ")[2]
    eval(command, {"numpy": np, "NEW": "b.npy"})
    assert one(tmp_path / "b.npy", tokenizer, cache).tokens.tolist() == ids.tolist()


def test_uint32_of_a_larger_vocabulary_are_not_taken_for_uint16(tmp_path: Path, cache: Path) -> None:
    """Every uint16 is an id of this vocabulary."""
    path = save_headerless(tmp_path / "a.npy", zipf_ids(151_665), "uint32")
    with pytest.raises(DataError, match=r"as uint16, every second id is 0 or nearly so"):
        one(path, Vocabulary(65_536), cache)


@pytest.mark.parametrize("vocab_size", [257, 50_304, 65_536, 151_665])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_ids_of_text_are_never_refused(tmp_path: Path, cache: Path, dtype: str, vocab_size: int) -> None:
    if dtype == "uint16" and vocab_size > 1 << 16:
        return
    ids = zipf_ids(vocab_size)
    assert one(save_headerless(tmp_path / "a.npy", ids, dtype), Vocabulary(vocab_size), cache).tokens.tolist() == (
        ids.tolist()
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 1\n",
            "is a Git LFS pointer, .*git lfs pull",
        ),
        (b"once upon a time there was a token file " * 40, "is not a token file, but text"),
        ("\u4e00\u4e8c".encode() * 2000, "is not a token file, but text"),
        (b"PK\x03\x04" + bytes(100), "is not a token file, but an archive: unpack it"),
        (gzip.compress(bytes(1000), mtime=0), "is not a token file, but an archive: unpack it"),
        (bz2.compress(bytes(1000)), "is not a token file, but an archive: unpack it"),
        (lzma.compress(bytes(1000)), "is not a token file, but an archive: unpack it"),
        (b"\x93NUMPY\x01\x00", "its header is damaged"),
    ],
)
def test_what_is_no_token_file_is_named_before_the_tokenizer_is_known(
    tmp_path: Path, cache: Path, content: bytes, why: str
) -> None:
    path = write(tmp_path / "a.npy", content)
    for opened in (lambda: check_source(str(path)), lambda: one(path, Vocabulary(65_536), cache)):
        with pytest.raises(DataError, match=why):
            opened()


def test_a_file_of_zeros_is_refused(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(DataError, match="holds only zeros: copy it again"):
        one(write(tmp_path / "a.npy", bytes(4096)), QWEN, cache)


# ------------------------------------------------------------------------------------------------- numpy.save


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<u4", ">u4", "<i4", "<i8", ">i8", "<u8", "|u1"])
@pytest.mark.parametrize("shape", [(240,), (12, 20), (2, 10, 12)])
def test_a_saved_array_is_read_row_by_row(tmp_path: Path, cache: Path, dtype: str, shape: tuple[int, ...]) -> None:
    ids = np.arange(240).reshape(shape)
    path = tmp_path / "a.npy"
    np.save(path, ids.astype(dtype))
    check_source(str(path))
    for _ in range(2):  # also from the cache
        file = one(path, BYTES, cache)
        assert file.tokens.tolist() == ids.reshape(-1).tolist()
        assert (file.sidecar.num_tokens, file.sidecar.max_token, file.has_header) == (240, 239, False)
        TokenStream([file]).read(100, window_S := np.empty(16, np.int64))
        assert window_S.tolist() == list(range(100, 116))
    if dtype not in ("<u2", "<u4"):  # the same ids in a file of this package
        with token_writer(tmp_path / "own.npy", BYTES) as writer:
            writer.append(np.arange(240), 0)
        assert file.sidecar.blake3 == TokenFile.open(tmp_path / "own.npy").sidecar.blake3


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.zeros(9), "its dtype is '<f8', and ids are integers; save a 1-D array of token ids"),
        (np.ones(9, bool), r"its dtype is '\|b1'"),
        (np.array([{}], object), r"its dtype is '\|O'"),
        (np.zeros(0, np.uint16), "it is empty"),
        (np.asfortranarray(np.zeros((3, 4), np.uint16)), "column by column"),
        (np.array([5, -100]), "holds the id -100, which is not in .* 257 tokens: remove padding"),
        (np.array([5, 257]), "holds the id 257, which is not in the run's vocabulary of 257 tokens"),
    ],
)
def test_an_array_that_holds_no_ids_of_the_run(tmp_path: Path, cache: Path, array: NDArray[Any], why: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(DataError, match=why) as caught:
        one(tmp_path / "a.npy", BYTES, cache)
    assert "\n" not in str(caught.value)


def test_a_saved_array_that_was_cut(tmp_path: Path, cache: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(200))
    with (tmp_path / "a.npy").open("r+b") as file:
        file.truncate(1000)
    for opened in (lambda: check_source(str(tmp_path / "a.npy")), lambda: one(tmp_path / "a.npy", BYTES, cache)):
        with pytest.raises(DataError, match=r"is truncated: 1000 bytes instead of 1728; copy it again"):
            opened()


# ---------------------------------------------------------------------------------------------------------- lists


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A directory with a list of three files in another, as `find` lists them: in any order, with all else."""
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    for number in range(3):
        save_headerless(tokens / f"0_{number}.npy", [number, 256], "uint32")
    write(tokens / "0_1.csv.gz", b"x")
    lists = tmp_path / "lists"
    lists.mkdir()
    names = ("0_2.npy", "0_1.csv.gz", "0_0.npy", "0_1.npy")
    (lists / "file_list.txt").write_text("".join(f"{tokens / name}\n" for name in names) + "\n")
    return lists


@pytest.mark.parametrize("name", ["", "file_list.txt"])
def test_a_list_stands_for_the_files_that_it_names_in_the_order_of_their_paths(
    listed: Path, cache: Path, name: str
) -> None:
    source = str(listed / name)
    check_source(source)
    assert [file.tokens.tolist() for file in open_corpus(source, BYTES, cache)] == [[0, 256], [1, 256], [2, 256]]


def test_a_list_names_the_files_of_its_folder_by_themselves(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "part").mkdir(parents=True)
    path = save_headerless(tmp_path / "data" / "part" / "a.npy", [1, 256], "uint32")
    save_headerless(tmp_path / "data" / "left_out.npy", [2, 256], "uint32")
    index = tmp_path / "data" / "file_list.txt"
    monkeypatch.chdir(tmp_path)
    for entry in ("part/a.npy", "./part/a.npy", "data/part/a.npy"):  # the last as `find data` writes it
        index.write_text(f"{entry}\n./file_list.txt\n")
        assert [file.path.resolve() for file in open_corpus("data", BYTES, cache)] == [path]


def test_a_file_that_is_listed_twice_counts_once(listed: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = listed.parent / "tokens"
    (tokens / "9.npy").symlink_to("0_1.npy")
    (tokens / "same.npy").hardlink_to(tokens / "0_2.npy")
    (listed.parent / "mirror").symlink_to(tokens)
    monkeypatch.chdir(tokens)
    names = (
        "0_0.npy",
        "./0_0.npy",
        "../tokens/0_1.npy",
        "9.npy",
        "same.npy",
        str(listed.parent / "mirror" / "0_0.npy"),
    )
    with (listed / "file_list.txt").open("a") as index:
        index.write("\n".join(names) + "\n")
    found = open_corpus(str(listed), BYTES, cache)
    assert sorted(file.tokens.tolist() for file in found) == [[0, 256], [1, 256], [2, 256]]


def test_a_listed_file_that_is_missing_is_named(listed: Path, cache: Path) -> None:
    (listed.parent / "tokens" / "0_0.npy").unlink()
    for opened in (lambda: check_source(str(listed)), lambda: open_corpus(str(listed), BYTES, cache)):
        with pytest.raises(DataError, match=r"file_list\.txt, line 3: .*0_0\.npy does not exist here"):
            opened()


def test_a_text_that_is_called_like_a_list_is_text(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "file_list.txt", b"a list of words\n")
    assert listed_token_files(path) == []
    assert bytes(one(path, BYTES, cache).tokens[:-1].tolist()) == b"a list of words\n"
