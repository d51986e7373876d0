"""What a directory holds is read completely or refused, and what is no data is left out and counted."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from spes_swarm import tokenize
from spes_swarm.base.errors import DataError
from spes_swarm.config.data_source import parse_hf
from spes_swarm.data.corpus import check_source, open_corpus
from spes_swarm.data.corpus_index import corpus_digest, membership, write_index
from spes_swarm.data.files.finding import ending, find_files
from spes_swarm.data.streaming.dataset import StreamedDataset
from spes_swarm.data.token_file import TokenFile
from spes_swarm.data.tokenizer import ByteTokenizer
from spes_swarm.storage.run_directory import RunDirectory
from tests.helpers.token_files import save_headerless, token_writer

BYTES = ByteTokenizer()


def jsonl(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def put(path: Path, content: bytes = b"x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def tokens(path: Path, *ids: int) -> TokenFile:
    path.parent.mkdir(parents=True, exist_ok=True)
    with token_writer(path, BYTES) as writer:
        writer.append(np.array([*ids, 256]), 1)
    return TokenFile.open(path)


def texts(source: str | Path, cache: Path, said: list[str] | None = None) -> set[str]:
    """The documents of a source."""
    said = [] if said is None else said
    ids = np.concatenate([file.tokens for file in open_corpus(str(source), BYTES, cache, say_found=said.append)])
    return set(bytes(np.where(ids == 256, 0, ids).astype(np.uint8)).decode().split("\0")) - {""}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three files of data among files of other kinds, as they lie in a clone of a data set."""
    root = tmp_path / "data"
    for number in range(3):
        put(root / f"part-{number}.json.gz", gzip.compress(jsonl(f"document {number}")))
    for name in ("README.md", "LICENSE", "README_zh.txt", "dataset_info.json", "requirements.txt", "picture.png"):
        put(root / name, b"no document")
    for name in (".git/a.jsonl", ".ipynb_checkpoints/part-0.jsonl", "__MACOSX/a.txt", ".cache/b.txt", "._part-0.jsonl"):
        put(root / name, jsonl("hidden"))
    return root


def test_documentation_and_hidden_files_are_no_data_and_all_is_counted(data: Path, cache: Path) -> None:
    said: list[str] = []
    assert texts(data, cache, said) == {"document 0", "document 1", "document 2"}
    assert said == [
        "found 3 documents and 33 tokens in 3 files (3 .json.gz); left out: 5 hidden, 2 .txt (documentation), "
        "1 .json (documentation), 1 .md (documentation), 1 .png, 1 without suffix (documentation)"
    ]
    assert texts(f"{data}/*", cache) == {"document 0", "document 1", "document 2"}  # a glob follows the same rules
    assert texts(data / "README.md", cache) == {"no document"}  # a file that is named alone is data


def test_tokenize_says_the_same(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        tokenize.main(
            [*map(str, sorted(data.glob("[!.L_]*.[gmt]*"))), "--output", str(tmp_path / "out"), "--processes", "1"]
        )
        == 0
    )
    rows = dict(line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert rows["files"].strip() == "3 (3 .json.gz)"
    assert rows["left out"].strip() == "2 .txt (documentation), 1 .md (documentation)"  # a shell's texts/* names them
    assert rows["documents"].strip() == "3"


def test_prose_and_programs_beside_records_are_documentation(tmp_path: Path, cache: Path) -> None:
    for name in ("a.md", "sub/b.rst.gz", "c.py"):
        put(tmp_path / "data" / name, gzip.compress(b"text") if name.endswith(".gz") else b"text")
    assert texts(tmp_path / "data", cache) == {"text"}
    assert len(find_files([tmp_path / "data"]).files) == 3
    put(tmp_path / "data" / "d.jsonl", jsonl("record"))
    put(tmp_path / "data" / "e.txt", b"more")
    assert texts(tmp_path / "data", cache) == {"record", "more"}
    tokens(tmp_path / "tokens" / "a.npy", 1)
    put(tmp_path / "tokens" / "notes.md")
    assert len(find_files([tmp_path / "tokens"]).files) == 1


@pytest.mark.parametrize(
    "name", ["notes.txt", "my-notes.txt", "URLs.txt", "md5sums.txt", "source_urls.txt.gz", "about.data.text"]
)
def test_notes_beside_records_are_documentation(tmp_path: Path, cache: Path, name: str) -> None:
    put(tmp_path / "data" / name, gzip.compress(b"note") if name.endswith(".gz") else b"note")
    assert texts(tmp_path / "data", cache) == {"note"}
    put(tmp_path / "data" / "d.jsonl", jsonl("record"))
    put(tmp_path / "data" / "noteworthy.txt", b"more")
    said: list[str] = []
    assert texts(tmp_path / "data", cache, said) == {"record", "more"}
    assert said[0].endswith(f"left out: 1 {ending(Path(name))} (documentation)")


def test_documentation_alone_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "README.md")
    put(tmp_path / "picture.png")
    with pytest.raises(DataError, match=r"holds no file with a known suffix \(it has 1 \.md \(documentation\), 1 \.p"):
        find_files([tmp_path])


def test_every_format_counts(tmp_path: Path, cache: Path) -> None:
    contents = {
        "a.jsonl": jsonl("a"),
        "b.ndjson.bz2": bz2.compress(jsonl("b")),
        "c.JSON.xz": lzma.compress(jsonl("c")),
        "d.json": json.dumps([{"text": "d"}]).encode(),
        "e.csv.zst": zstandard.compress(b"id,text\n1,e\n"),
        "f.tsv": b"text\tid\nf\t1\n",
        "deep/er/g.txt": b"g",
        "h.txt.gz": gzip.compress(b"h"),
    }
    for name, content in contents.items():
        put(tmp_path / "data" / name, content)
    pq.write_table(pa.table({"text": ["i"]}), tmp_path / "data" / "i.parquet")
    assert texts(tmp_path / "data", cache) == set("abcdefghi")


@pytest.mark.parametrize(("content", "what"), [(b"\x93NUMPY\x01\0", "a NumPy array"), (b"\1\0\2\0", "binary")])
def test_token_ids_by_another_name_are_refused(tmp_path: Path, content: bytes, what: str) -> None:
    path = put(tmp_path / "a.bin", content)
    for source in (tmp_path, path):
        with pytest.raises(DataError, match=rf"\(it is {what}: if it holds token ids, name it \.npy\)"):
            find_files([source])
    table = put(tmp_path / "a.npy", b"PAR1" * 16)
    with pytest.raises(DataError, match=r"not a token file, but a Parquet file: give it a name that ends in \.parquet"):
        check_source(str(table))


@pytest.mark.parametrize("name", ["a.arrow", "b.tar.gz", "c.jsonl.part", "d.parquet.gz", "e.zip", "sub/part-0.gz"])
def test_data_that_cannot_be_read_are_refused(tmp_path: Path, name: str) -> None:
    put(tmp_path / "a.jsonl", jsonl("a"))
    path = put(tmp_path / name)
    with pytest.raises(DataError, match=rf"holds data that cannot be read \(1 \..*, such as {path}\): unpack"):
        find_files([tmp_path])
    assert find_files([f"{tmp_path}/*.jsonl"]).files == (tmp_path / "a.jsonl",)  # as the message advises


def test_links_are_followed_once(tmp_path: Path, cache: Path) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    put(data / "a.jsonl", jsonl("a"))
    put(other / "b.jsonl", jsonl("b"))
    put(tmp_path / "outside.jsonl", jsonl("outside"))
    (data / "more").symlink_to(other)
    (data / "again").symlink_to(other)
    (other / "back").symlink_to(data)
    (data / "up").symlink_to(tmp_path)
    (data / "same.jsonl").symlink_to("a.jsonl")
    said: list[str] = []
    assert texts(data, cache, said) == {"a", "b"}
    assert said == ["found 2 documents and 4 tokens in 2 files (2 .jsonl); left out: 1 .jsonl (a file found before)"]
    (data / "lost.jsonl").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"lost\.jsonl is a link to nowhere, which does not exist"):
        check_source(str(data))
    (data / "lost.jsonl").unlink()
    (data / "lost_folder").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"lost_folder is a link to .*nowhere, which does not exist"):
        check_source(str(data))


def test_the_cache_of_the_hub(tmp_path: Path) -> None:
    blob = put(tmp_path / "blobs" / "0123abcd", jsonl("a"))
    link = tmp_path / "snapshots" / "main" / "a.jsonl"
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)
    assert find_files([tmp_path]).files == (link,)


def test_a_damaged_file_is_named(tmp_path: Path, cache: Path) -> None:
    put(tmp_path / "data" / "a.jsonl", jsonl("a"))
    path = put(tmp_path / "data" / "b.jsonl.gz", gzip.compress(jsonl(*map(str, range(1000))))[:-20])
    said: list[str] = []
    open_corpus(str(tmp_path / "data"), BYTES, cache, say=said.append)
    assert said == [f"skipped records: 1 truncated; damaged files: 1, such as {path}"]


def test_a_glob_that_matches_folders_reads_them(tmp_path: Path, cache: Path) -> None:
    put(tmp_path / "data" / "a.jsonl", jsonl("a"))
    put(tmp_path / "data" / "sub" / "b.jsonl", jsonl("b"))
    assert texts(f"{tmp_path}/data/*", cache) == {"a", "b"}
    assert texts(f"{tmp_path}/data/**", cache) == {"a", "b"}


def test_text_beside_token_files_is_refused(tmp_path: Path) -> None:
    tokens(tmp_path / "a.npy", 1)
    put(tmp_path / "sub" / "a.jsonl", jsonl("a"))
    with pytest.raises(DataError, match=r"holds token files, such as .*a\.npy, and text, such as .*a\.jsonl: keep"):
        check_source(str(tmp_path))


def test_what_comes_with_token_files_is_not_text(tmp_path: Path, cache: Path) -> None:
    data = tmp_path / "data"
    write_index(data, [tokens(data / "tokens-00000.npy", 1)])
    BYTES.save(data / "tokenizer")
    save_headerless(data / "part-0.npy", [2, 256], "uint32")
    put(data / "part-0.csv.gz", gzip.compress(b"0,2,a,b,1\n"))  # OLMo's list of documents
    put(data / "README.md")
    (data / "corpus.json").unlink()
    found = find_files([data])
    assert found.files == (data / "part-0.npy", data / "tokens-00000.npy")
    assert found.left_out == Counter({".json (of a tokenizer)": 2, ".md (documentation)": 1})
    check_source(str(data))


def test_token_files_in_subfolders_are_one_corpus(tmp_path: Path, cache: Path) -> None:
    data = tmp_path / "data"
    parts = [tokens(data / "a" / "tokens-00000.npy", 1, 2), tokens(data / "b" / "deep" / "tokens-00000.npy", 3)]
    for part in parts:
        write_index(part.path.parent, [part])
    check_source(str(data))
    said: list[str] = []
    files = open_corpus(str(data), BYTES, cache, say_found=said.append)
    assert [file.path for file in files] == [part.path for part in parts]
    assert said == ["found 2 documents and 5 tokens in 2 files (2 .npy)"]
    shards = [(part.sidecar.blake3, part.sidecar.num_tokens) for part in parts]
    assert membership(files).digest == corpus_digest(BYTES.digest, shards)
    assert membership(open_corpus(str(data / "a"), BYTES, cache)).is_indexed


def test_a_list_leaves_out_what_it_does_not_name(tmp_path: Path, cache: Path) -> None:
    for name in ("a.npy", "b.npy"):
        tokens(tmp_path / "data" / name, 1)
    put(tmp_path / "data" / "file_list.txt", "\ufeffa.npy\n".encode())  # an editor may write a byte order mark
    said: list[str] = []
    assert len(open_corpus(str(tmp_path / "data"), BYTES, cache, say_found=said.append)) == 1
    assert said == ["found 1 document and 2 tokens in 1 file (1 .npy); left out: 1 .npy"]


def test_the_output_of_a_peer_is_no_data(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", jsonl("a"))
    for folder in (tmp_path, tmp_path / "runs" / "me"):
        for name in ("identity.key", "metrics.jsonl", "manifest.json", "port", "checkpoints/step-1/meta.json"):
            put(folder / name)
    found = find_files([tmp_path])
    assert found.files == (path,)
    assert found.left_out == {"output directory": 1}


def test_the_output_of_tokenize_is_not_its_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path / "a.txt", b"text")
    arguments = [str(tmp_path), "--output", str(tmp_path / "tokens"), "--no-progress", "--processes", "1"]
    assert tokenize.main(arguments) == 0
    assert tokenize.main([*arguments, "--overwrite"]) == 0
    assert tokenize.main([str(tmp_path / "tokens"), *arguments[1:-2], "--overwrite"]) == 2
    assert "is a token file, which needs no tokenising" in capsys.readouterr().err


def streamed(path: Path) -> tuple[list[object], str]:
    """The examples and the summary of a stream."""
    source = parse_hf(f"hf:{path}")
    assert source is not None
    dataset = StreamedDataset(source)
    return [example.value for unit in range(dataset.num_units) for example in dataset.read(unit)], dataset.summary


@pytest.mark.slow
def test_a_stream_follows_links_once(tmp_path: Path) -> None:
    put(tmp_path / "linked" / "train" / "a.jsonl", jsonl("a"))
    put(tmp_path / "other" / "b.jsonl", jsonl("b"))
    put(tmp_path / "tests" / "c.jsonl", jsonl("held out"))
    for name, target in {"train/more": "other", "train/again": "other", "test": "tests"}.items():
        (tmp_path / "linked" / name).symlink_to(tmp_path / target)
    (tmp_path / "other" / "back").symlink_to(tmp_path / "linked")
    (tmp_path / "linked" / "train" / "same.jsonl").hardlink_to(tmp_path / "linked" / "train" / "a.jsonl")
    values, summary = streamed(tmp_path / "linked")
    assert values == ["a", "b"]  # a folder `test` is another split, linked or not
    assert summary.endswith("2 files, column text; left out: 1 .jsonl (a file found before)")


@pytest.mark.slow
def test_a_stream_leaves_out_what_is_no_data(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", jsonl("a"))
    for name in ("notes.txt", "tokenizer.json", "tokenizer_config.json"):
        put(tmp_path / name, b"{}")
    values, summary = streamed(tmp_path)
    assert values == ["a"]
    assert summary.endswith("column text; left out: 2 .json (of a tokenizer), 1 .txt (documentation)")
    put(tmp_path / "a.jsonl", b"PK\x03\x04\0\0")
    with pytest.raises(DataError, match=r"a\.jsonl is a zip archive"):
        streamed(tmp_path)
    put(tmp_path / "a.jsonl", b"PAR1")
    with pytest.raises(DataError, match=r"a\.jsonl is a Parquet file: give it a name that ends in \.parquet"):
        streamed(tmp_path)
    (tmp_path / "a.jsonl").unlink()
    put(tmp_path / "a.csv", b"id;text\n1;x\n")
    with pytest.raises(DataError, match=r"has the columns id;text, .*; the delimiter seems to be ';'"):
        streamed(tmp_path)


@pytest.mark.slow
def test_a_stream_reads_a_directory_completely_or_refuses_it(data: Path, tmp_path: Path) -> None:
    def opened(path: Path) -> int:
        source = parse_hf(f"hf:{path}")
        assert source is not None
        return StreamedDataset(source).num_units

    for name in ("README_zh.txt", "requirements.txt"):
        (data / name).unlink()
    assert opened(data) == 3
    put(data / "more.csv", b"text\na\n")
    with pytest.raises(DataError, match=r"would leave out data files \(1 \.csv\): a stream has one format"):
        opened(data)
    put(tmp_path / "texts" / "a.txt")
    put(tmp_path / "texts" / "LICENSE.txt")
    assert opened(tmp_path / "texts") == 1
    (tmp_path / "texts" / "a.txt").unlink()
    with pytest.raises(DataError, match=r"holds no file with a known suffix \(it has 1 \.txt \(documentation\)\)"):
        opened(tmp_path / "texts")
    for name in "ab":
        put(tmp_path / "chosen" / name / "one.jsonl", jsonl(name))
    for choice in (b"data_files: a/one.jsonl", b"data_dir: a"):
        put(tmp_path / "chosen" / "README.md", b"---\nconfigs:\n- config_name: default\n  " + choice + b"\n---\n")
        assert opened(tmp_path / "chosen") == 1  # its README says which files are data
    put(tmp_path / "capitals" / "A.JSONL", jsonl("a"))  # which `datasets` does not know
    with pytest.raises(DataError, match=r"capitals holds no files that can be streamed \(1 \.jsonl\): leave out"):
        opened(tmp_path / "capitals")


def test_what_a_peer_writes_into_its_output_directory_is_no_data(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    written = [getattr(directory, name) for name, member in vars(RunDirectory).items() if isinstance(member, property)]
    assert len(written) >= 5
    for path in written:
        put(path / "a.json" if path.suffix == "" and not path.name.startswith(".") else path, b"{}")
    put(tmp_path / "publication" / "history.json", b"{}")
    put(tmp_path / "manifest.json", b"{}")
    put(tmp_path / "text.jsonl", jsonl("a document"))
    assert [path.name for path in find_files([tmp_path]).files] == ["text.jsonl"]


def test_a_hard_link_is_a_file_found_before(tmp_path: Path) -> None:
    first = put(tmp_path / "data" / "a.jsonl", jsonl("a document"))
    (tmp_path / "data" / "b.jsonl").hardlink_to(first)
    found = find_files([tmp_path / "data"])
    assert found.files == (first,)
    assert found.left_out == Counter({".jsonl (a file found before)": 1})
