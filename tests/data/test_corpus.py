"""Readers of every format, what they pass over, and the cache of tokenised sources."""

from __future__ import annotations

import builtins
import gzip
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.testing.entropy import unigram_entropy
from scripts.testing.local_peer import PATIENCE_S
from spes_swarm.base.errors import DataError
from spes_swarm.data import readers
from spes_swarm.data.corpus import default_cache_dir, open_corpus, stdlib_files
from spes_swarm.data.files import contents
from spes_swarm.data.files.finding import find_files
from spes_swarm.data.readers import parse_piece, read_pieces
from spes_swarm.data.token_file import TokenFile
from spes_swarm.data.tokenizer import ByteTokenizer, train_bpe
from tests.helpers.token_files import token_writer

BYTES = ByteTokenizer()
RECORDS = [json.dumps({"text": f"document {i} ü", "n": i}, ensure_ascii=False) for i in range(50)]
TEXTS = [f"document {i} ü" for i in range(50)]
JSONL = ("\n".join(RECORDS) + "\n").encode()


def read(path: Path, **options: Any) -> tuple[list[str], dict[str, int]]:
    """All documents and all that was broken."""
    documents: list[str] = []
    broken: Counter[str] = Counter()
    for piece in read_pieces(path, **options):
        found, faults = parse_piece(piece, options.get("text_field", "text"))
        documents += found
        broken += faults
    return documents, dict(broken)


def put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, piece_bytes: int) -> None:
    monkeypatch.setattr(readers, "_PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(contents, "_READ_BYTES", 4 * piece_bytes)
    packs: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
    pack = packs[suffix]
    content = pack(JSONL) if suffix == "" else pack(JSONL[:700]) + pack(JSONL[700:])  # several members are one file
    assert read(put(tmp_path / f"a.jsonl{suffix}", content)) == (TEXTS, {})
    assert len(list(read_pieces(tmp_path / f"a.jsonl{suffix}"))) > 1 or piece_bytes > 1000


def test_gzip_padding_is_no_fault(tmp_path: Path) -> None:
    assert read(put(tmp_path / "a.jsonl.gz", gzip.compress(JSONL) + b"\0" * 600)) == (TEXTS, {})


@pytest.mark.slow
def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": TEXTS, "n": list(range(50))}), path, row_group_size=7)
    assert read(path, text_field="body") == (TEXTS, {})
    assert read(path) == ([], {"missing_field": 50})
    assert read(path, text_field="n") == ([], {"wrong_type": 50})
    assert sum(p.source_bytes for p in read_pieces(path, text_field="body")) <= path.stat().st_size


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_column_types(tmp_path: Path, kind: pa.DataType) -> None:
    array = pa.array(["one", None, "", "two ü"], pa.string() if pa.types.is_dictionary(kind) else kind)
    pq.write_table(pa.table({"text": array.cast(kind)}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == (["one", "two ü"], {"missing_field": 1, "empty": 1})


def test_parquet_with_broken_strings(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"\xff\xfe", b"also"], pa.binary())
    broken_strings = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"text": broken_strings}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == (["good", "also"], {"bad_utf8": 1})


def test_damaged_parquet(tmp_path: Path) -> None:
    assert read(put(tmp_path / "a.parquet", b"PAR1 nonsense PAR1")) == ([], {"corrupt": 1})
    path = tmp_path / "b.parquet"
    pq.write_table(pa.table({"text": TEXTS}), path, row_group_size=10, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    offset = pq.read_metadata(path).row_group(2).column(0).data_page_offset
    content[offset : offset + 20] = b"\xff" * 20
    path.write_bytes(content)
    assert read(path) == (TEXTS[:20] + TEXTS[30:], {"corrupt": 1})


def test_broken_json_records_are_counted_and_passed_over(tmp_path: Path) -> None:
    lines = [
        b'{"text": "first"}',
        b'{"text": "cut',
        b'{"text": "bad \xff byte"}',
        b'{"body": "elsewhere"}',
        b'{"text": 5}',
        b'{"text": null}',
        b'["text"]',
        b'{"text": "lone \\ud800 surrogate"}',
        b'{"text": "  "}',
        b"[" * 100_000,
        b"",
        b'{"text": "last"}\r',
    ]
    documents, broken = read(put(tmp_path / "a.jsonl", b"\n".join(lines)))
    assert documents == ["first", "last"]
    assert broken == {"bad_json": 2, "bad_utf8": 2, "missing_field": 2, "wrong_type": 2, "empty": 1}


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_a_truncated_tail_costs_the_tail(tmp_path: Path, suffix: str, pack: Any) -> None:
    noise = np.random.default_rng(0).bytes(200_000).hex()  # incompressible enough to span several blocks
    lines = [json.dumps({"text": noise[i : i + 500]}) for i in range(0, 400_000, 500)]
    packed = pack(("\n".join(lines) + "\n").encode())
    documents, broken = read(put(tmp_path / f"a.jsonl{suffix}", packed[: len(packed) * 2 // 3]))
    assert broken == {"truncated": 1}
    assert 100 < len(documents) < 800
    assert documents == [json.loads(line)["text"] for line in lines[: len(documents)]]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_a_corrupt_stream_is_one_fault(tmp_path: Path, suffix: str, pack: Any) -> None:
    assert read(put(tmp_path / f"a.jsonl{suffix}", b"\xff damaged")) == ([], {"corrupt": 1})
    documents, broken = read(put(tmp_path / f"b.jsonl{suffix}", pack(JSONL) + b"garbage behind it"))
    assert (documents, broken) == (TEXTS, {"corrupt": 1})


def test_records_that_are_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr(readers, "_PIECE_BYTES", 100)
    monkeypatch.setattr(contents, "_READ_BYTES", 64)
    long = json.dumps({"text": "x" * 5000}).encode()
    content = JSONL[:200].rsplit(b"\n", 1)[0] + b"\n" + long + b"\n" + RECORDS[7].encode() + b"\n" + long
    documents, broken = read(put(tmp_path / "a.jsonl", content))
    assert documents[-1] == TEXTS[7]
    assert broken == {"too_long": 2}


def test_text_modes(tmp_path: Path) -> None:
    text = "one\ntwo\r\n\r\nthree\n\n\n \nfour\n"
    path = put(tmp_path / "a.txt", text.encode())
    assert read(path) == ([text], {})
    assert read(path, text_mode="paragraph") == (["one\ntwo", "three", "four\n"], {})
    assert read(path, text_mode="line") == (["one", "two", "three", "four"], {})
    assert read(put(tmp_path / "b.txt", b"\xff")) == ([], {"bad_utf8": 1})
    assert read(put(tmp_path / "c.txt", b"")) == ([], {})
    assert read(put(tmp_path / "d.md.gz", gzip.compress(b"# Title"))) == (["# Title"], {})


@settings(max_examples=50)
@given(
    lines=st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"])), max_size=40),
    cut=st.integers(1, 40),
)
def test_pieces_do_not_change_the_documents(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], cut: int
) -> None:
    path = put(tmp_path_factory.mktemp("t") / "a.txt", "\n".join(lines).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_PIECE_BYTES", cut)
        patch.setattr(contents, "_READ_BYTES", cut)
        assert read(path, text_mode="line")[0] == [line for line in lines if line.strip()]


def test_find_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.jsonl", "sub/c.parquet", "image.png"):
        put(tmp_path / name, b"x")
    everything = [tmp_path / "a.jsonl", tmp_path / "b.txt", tmp_path / "sub" / "c.parquet"]
    assert find_files([tmp_path]).files == tuple(everything)
    assert find_files([str(tmp_path / "*.txt"), tmp_path / "b.txt"]).files == tuple(everything[1:2])
    with pytest.raises(DataError, match=r"image\.png has an unknown suffix; known suffixes: \.txt"):
        find_files([tmp_path / "image.png"])
    with pytest.raises(DataError, match="matches no file"):
        find_files([tmp_path / "*.md"])


@pytest.mark.parametrize(("name", "package"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    real = builtins.__import__

    def without(module: str, *rest: Any) -> Any:
        if module.partition(".")[0] == package:
            raise ImportError(module)
        return real(module, *rest)

    path = put(tmp_path / name, zstandard.compress(b"x") if package == "zstandard" else b"PAR1")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=rf"{package}: pip install 'spes-swarm\[corpora\]'"):
        read(path)


def test_stdlib_is_the_librarys_own_source() -> None:
    names = [path.as_posix() for path in stdlib_files()]
    assert any(name.endswith("/argparse.py") for name in names)
    assert any(name.endswith("/asyncio/base_events.py") for name in names)
    assert not any("/site-packages/" in name or "/test/" in name or "_sysconfigdata" in name for name in names)
    assert names == [path.as_posix() for path in stdlib_files()]


def paths(source: str | Path, cache: Path | None = None) -> list[Path]:
    return [file.path for file in open_corpus(str(source), BYTES, cache)]


@pytest.mark.slow
def test_stdlib_tokens(tmp_path: Path) -> None:
    (file,) = open_corpus("stdlib", BYTES, tmp_path)
    file.check_content()
    assert file.sidecar.num_documents > 300
    assert len(file.tokens) > 5_000_000
    first = stdlib_files()[0].read_bytes()
    assert BYTES.decode(file.tokens[: len(first)]) == first.decode()
    assert file.tokens[len(first)] == 256
    assert 2.5 < unigram_entropy(file.tokens) < 3.8
    before = file.path.stat()
    assert paths("stdlib", tmp_path) == [file.path]
    assert file.path.stat().st_mtime_ns == before.st_mtime_ns  # from the cache


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    text = put(tmp_path / "a.txt", b"hello")
    (path,) = paths(text, tmp_path / "cache")
    os.truncate(path, 130)
    assert paths(text, tmp_path / "cache") == [path]
    assert TokenFile.open(path, BYTES).tokens.tolist() == [*b"hello", 256]


def test_the_cache_knows_what_changed(tmp_path: Path) -> None:
    text = put(tmp_path / "a.txt", b"hello\nworld")
    cache = tmp_path / "cache"
    entries = {open_corpus(str(text), BYTES, cache)[0].path.parent}
    entries.add(open_corpus(str(text), train_bpe([], 257), cache)[0].path.parent)
    put(text, b"hello\nworld!")
    entries.add(open_corpus(str(text), BYTES, cache)[0].path.parent)
    assert len(entries) == 3
    assert not list(cache.glob("*.partial"))


def _open_at_the_same_time(barrier: Any, results: Any, source: str, cache: Path) -> None:
    barrier.wait(PATIENCE_S)
    results.put([(str(p), p.stat().st_ino) for p in paths(source, cache)])


@pytest.mark.slow
def test_several_processes_may_start_at_the_same_time(tmp_path: Path) -> None:
    source = put(tmp_path / "a.txt", b"some text\n" * 200_000)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    workers = [
        context.Process(target=_open_at_the_same_time, args=(barrier, results, str(source), tmp_path / "cache"))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    answers = [results.get(timeout=PATIENCE_S) for _ in workers]
    for worker in workers:
        worker.join(PATIENCE_S)
        assert worker.exitcode == 0
    assert answers[0] == answers[1] == answers[2]  # one file, written once
    assert len(answers[0]) == 1


def test_token_files_are_used_where_they_lie(tmp_path: Path) -> None:
    for name in ("b.npy", "a.npy"):
        with token_writer(tmp_path / name, BYTES) as writer:
            writer.append(np.arange(5), 1)
    assert paths(tmp_path) == [tmp_path / "a.npy", tmp_path / "b.npy"]
    assert paths(tmp_path / "b.npy") == [tmp_path / "b.npy"]
    with pytest.raises(DataError, match="made with the tokenizer 'bytes'"):
        open_corpus(str(tmp_path), train_bpe([], 257))


def test_sources_that_cannot_be_opened(tmp_path: Path) -> None:
    for source in ("nowhere.txt", "stdlibb"):
        with pytest.raises(DataError, match=f"'{source}' does not exist: give 'stdlib'"):
            open_corpus(source, BYTES, tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        open_corpus(str(tmp_path / "a.npy"), BYTES)
    with pytest.raises(DataError, match="holds no file"):
        open_corpus(str(tmp_path), BYTES, tmp_path)
    empty = put(tmp_path / "a.jsonl", b"{}\n")
    with pytest.raises(DataError, match=r"no usable document.*1 missing_field"):
        open_corpus(str(empty), BYTES, tmp_path / "cache")
    with pytest.raises(DataError, match="set XDG_CACHE_HOME"):
        open_corpus(str(put(tmp_path / "b.txt", b"x")), BYTES, empty / "cache")


def test_default_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_cache_dir() == tmp_path / ".cache" / "spes_swarm"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/spes_swarm")


@pytest.mark.slow
def test_importing_readers_needs_no_optional_package() -> None:
    script = (
        "import sys, spes_swarm.data.corpus; sys.exit(any(m in sys.modules for m in ('pyarrow', 'zstandard', 'torch')))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "-c", script], environment) == 0
