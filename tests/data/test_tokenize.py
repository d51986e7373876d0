"""The tokenising command: the same shards however many processes, and nothing half-written."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from scripts.testing.local_peer import PATIENCE_S
from spes_swarm import tokenize
from spes_swarm.base.errors import DataError
from spes_swarm.data.corpus import open_corpus
from spes_swarm.data.sampler import TokenStream
from spes_swarm.data.sharding import DocumentFormat, sample_documents, write_shards
from spes_swarm.data.token_file import TokenFile
from spes_swarm.data.tokenizer import ByteTokenizer, FastTokenizer, load_tokenizer, train_bpe
from tests.helpers.repository import ROOT
from tests.helpers.small_disk import mounted_disk
from tests.helpers.token_files import open_checked

BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def documents() -> list[str]:
    words = ["the", "of", "spam", "eggs", "naïve", "好", "def", "return", "lambda", "x_1", "=="]
    rng = random.Random(0)
    return [" ".join(rng.choices(words, k=rng.randint(1, 400))) for _ in range(1500)]


@pytest.fixture(scope="module")
def corpus(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All formats, in the order of their names, with two broken records."""
    root = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": text}) for text in documents]
    (root / "a.jsonl").write_text("\n".join([*lines[:400], '{"text": 1}', "{"]))
    (root / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[400:800]).encode()))
    (root / "c.jsonl.zst").write_bytes(zstandard.compress("\n".join(lines[800:1200]).encode()))
    pq.write_table(pa.table({"text": documents[1200:1499]}), root / "d.parquet", row_group_size=50)
    (root / "e.txt").write_text(documents[1499])
    return root


@pytest.fixture(scope="module")
def bpe(documents: list[str]) -> FastTokenizer:
    return train_bpe(documents, 500)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "spes_swarm.tokenize", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        # A shell starts background jobs with SIGINT ignored, and that is inherited: these tests may run in one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_every_format_in_order(documents: list[str], corpus: Path, tmp_path: Path) -> None:
    files = sorted(corpus.iterdir())
    progress: list[int] = []
    summary = write_shards(files, tmp_path, BYTES, shard_tokens=100_000, on_progress=progress.append)
    opened = [open_checked(path, BYTES) for path in summary.shards]
    assert len(opened) > 5
    expected = b"".join(text.encode() + b"\0" for text in documents)
    tokens = np.concatenate([file.tokens for file in opened])
    assert np.where(tokens == 256, 0, tokens).astype(np.uint8).tobytes() == expected
    assert (summary.num_tokens, summary.num_documents) == (len(tokens), len(documents))
    assert summary.broken == {"wrong_type": 1, "bad_json": 1}
    assert sum(file.sidecar.num_documents for file in opened) == len(documents)
    assert all(file.tokens[-1] == 256 for file in opened)  # no document is divided
    assert all(100_000 <= len(file.tokens) < 110_000 for file in opened[:-1])
    assert [path.name for path in summary.shards[:2]] == ["tokens-00000.npy", "tokens-00001.npy"]
    assert sum(progress) == pytest.approx(sum(file.stat().st_size for file in files), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_number_of_processes_does_not_matter(corpus: Path, bpe: FastTokenizer, tmp_path: Path, kind: str) -> None:
    tokenizer = bpe if kind == "bpe" else BYTES
    files = sorted(corpus.iterdir()) * 3
    summaries = [write_shards(files, tmp_path / str(n), tokenizer, shard_tokens=50_000, processes=n) for n in (1, 2)]
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert summaries[0].broken == summaries[1].broken == {"wrong_type": 3, "bad_json": 3}
    assert len(summaries[0].shards) > 3


@pytest.mark.slow
def test_long_documents_are_encoded_in_bounded_parts(bpe: FastTokenizer, tmp_path: Path) -> None:
    text = "def spam(eggs):\n    return eggs\n" * 80_000
    path = tmp_path / "a.txt"
    path.write_text(text)
    summary = write_shards([path], tmp_path / "out", bpe)
    tokens = TokenFile.open(summary.shards[0], bpe).tokens
    assert summary.num_documents == 1
    assert tokens[-1] == bpe.end_of_text
    assert bpe.decode(tokens[:-1]) == text


def test_shards_of_an_earlier_run_are_not_mixed_in(corpus: Path, tmp_path: Path) -> None:
    files = [corpus / "a.jsonl"]
    assert len(write_shards(files, tmp_path, BYTES, shard_tokens=20_000).shards) > 2
    with pytest.raises(DataError, match="--overwrite"):
        write_shards(files, tmp_path, BYTES)
    write_shards(files, tmp_path, BYTES, overwrite=True)
    assert sorted(contents(tmp_path)) == ["corpus.json", "tokens-00000.npy", "tokens-00000.npy.json"]


def test_a_failure_leaves_whole_shards_only(corpus: Path, tmp_path: Path) -> None:
    seen = 0

    def interrupt(num_bytes: int) -> None:
        nonlocal seen
        seen += num_bytes
        if seen > 300_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards([corpus / "a.jsonl"] * 2, tmp_path, BYTES, shard_tokens=150_000, on_progress=interrupt)
    names = sorted(contents(tmp_path))
    assert names
    assert all(name.endswith((".npy", ".npy.json")) and not name.startswith(".") for name in names)
    for path in tmp_path.glob("*.npy"):
        open_checked(path, BYTES)


@pytest.mark.parametrize("options", [{"processes": 0}, {"shard_tokens": 0}])
def test_impossible_numbers(corpus: Path, tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(DataError, match="at least 1"):
        write_shards([corpus / "a.jsonl"], tmp_path, BYTES, **options)  # type: ignore[arg-type]


def test_a_sample_takes_from_every_file(corpus: Path, documents: list[str]) -> None:
    files = sorted(corpus.iterdir())
    sample = list(sample_documents(files, 10_000, DocumentFormat()))
    assert documents[0] in sample
    assert documents[400] in sample
    assert sum(map(len, sample)) <= 10_000


@pytest.mark.slow
def test_command_line(corpus: Path, tmp_path: Path) -> None:
    process = start(corpus, "--output", tmp_path, "--tokenizer", "bpe", "--bpe-vocab-size", 280, "--processes", 2)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    rows = dict(line.strip().split("  ", 1) for line in out.splitlines())
    assert rows["documents"].strip() == "1,500"
    assert rows["bad_json"].strip() == rows["wrong_type"].strip() == "1"
    tokenizer = load_tokenizer(tmp_path / "tokenizer" / "tokenizer.json")
    assert tokenizer.vocab_size == 280
    files = open_corpus(str(tmp_path), tokenizer)
    for file in files:
        file.check_content()
    stream = TokenStream(files)
    assert f"{stream.num_tokens:,}" == rows["tokens"].strip()


def test_mistakes_end_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "a.txt"
    text.write_text("hello")
    chats, records = tmp_path / "chats.jsonl", tmp_path / "records.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    records.write_text('{"text": "hello"}\n')
    mistakes = [
        [str(tmp_path / "nothing.txt")],
        [str(text), "--tokenizer", "./missing"],
        [str(text), "--tokenizer", "bpe", "--bpe-vocab-size", "10"],
        [str(text), "--processes", "0"],
        [str(chats), "--processes", "1"],
        [str(chats), str(records), "--processes", "1"],
    ]
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        for number, mistake in enumerate(mistakes):
            assert tokenize.main([*mistake, "--output", str(tmp_path / str(number)), "--no-progress"]) == 2
            captured = capsys.readouterr()
            assert captured.out == ""
            assert captured.err.startswith("tokenize: ")
            assert captured.err.count("\n") == 1
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def limited_disk(directory: Path) -> AbstractContextManager[Path]:
    return mounted_disk(directory, 1 << 20)


@contextmanager
def limited_files(directory: Path) -> Iterator[Path]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        yield directory
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limited", [limited_disk, limited_files])
def test_a_full_disk_is_reported_with_the_file_and_leaves_nothing_half_written(
    limited: Callable[[Path], AbstractContextManager[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"some text\n" * 200_000)
    with limited(tmp_path / "full") as full:
        output = full / "out"
        assert tokenize.main([str(text), "--output", str(output), "--no-progress", "--processes", "1"]) == 2
        assert list(output.iterdir()) == []
    error = capsys.readouterr().err
    assert re.fullmatch(rf"tokenize: {output}/tokens-00000\.npy cannot be written: .*; free some space\n", error)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["Ctrl-C", "closed terminal"])
def test_what_a_terminal_sends_to_all_processes_leaves_whole_shards(
    corpus: Path, bpe: FastTokenizer, tmp_path: Path, number: int
) -> None:
    with (tmp_path / "long.jsonl").open("w") as file:
        for _ in range(200):  # a BPE is at work on this for many seconds
            file.write((corpus / "a.jsonl").read_text() + "\n")
    bpe.save(tmp_path / "tokenizer")
    output = tmp_path / "out"
    name = tmp_path / "tokenizer" / "tokenizer.json"
    options = ["--tokenizer", name, "--shard-tokens", 300_000, "--processes", 2, "--progress"]
    process = start(tmp_path / "long.jsonl", "--output", output, *options)
    assert process.stderr is not None
    shown = ""
    while "B/s" not in shown.replace("?B/s", ""):  # the bar knows a rate: work is under way
        character = process.stderr.read(1)
        assert character, shown
        shown += character
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "interrupted; complete shards are kept\n" in err
    if number == signal.SIGINT:  # SIGHUP also ends the resource tracker of multiprocessing, which complains
        assert "Traceback" not in shown + err
    assert not [path for path in output.iterdir() if path.name.startswith(".")]
    for path in output.glob("*.npy"):
        open_checked(path, bpe)
