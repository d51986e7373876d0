"""Files that are not what their names say: compression, encodings, layouts of JSON, and tables."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_swarm.base.errors import ConfigError, DataError
from spes_swarm.base.strict_yaml import load_yaml
from spes_swarm.data.corpus import open_corpus
from spes_swarm.data.files import contents
from spes_swarm.data.readers import parse_piece, read_lines, read_pieces
from spes_swarm.data.sharding import write_shards
from spes_swarm.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe
from tests.helpers.chat_tokenizer import save_chat_tokenizer

PACKS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
TEXTS = [f"document {i} ü" for i in range(30)]
RECORDS = [{"text": text, "of": {"list": [1, {"a": "}]"}]}} for text in TEXTS]
JSONL = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)
TAR = tarfile.TarInfo("a.jsonl").tobuf()


def read(path: Path, content: bytes | None = None, text_field: str = "text") -> tuple[list[str], dict[str, int]]:
    """All documents and all that was broken."""
    if content is not None:
        path.write_bytes(content)
    documents: list[str] = []
    broken: Counter[str] = Counter()
    for piece in read_pieces(path, text_field=text_field):
        found, faults = parse_piece(piece, text_field)
        documents += found
        broken += faults
    return documents, dict(broken)


# ---------------------------------------------------------------------------------------------------- compression


@pytest.mark.parametrize("actual", PACKS)
@pytest.mark.parametrize("suffix", PACKS)
def test_the_content_decides_how_it_is_decompressed(tmp_path: Path, suffix: str, actual: str) -> None:
    content = PACKS[actual](JSONL.encode())
    assert read(tmp_path / f"a.jsonl{suffix}", content) == (TEXTS, {})


@pytest.mark.parametrize("suffix", [".bz2", ".xz"])
def test_damage_in_a_compressed_file_is_one_fault(tmp_path: Path, suffix: str) -> None:
    lines = [json.dumps({"text": random.Random(i).randbytes(300).hex()}) for i in range(800)]
    packed = PACKS[suffix]("\n".join(lines).encode())
    documents, broken = read(tmp_path / f"a.jsonl{suffix}", packed[: len(packed) * 2 // 3])
    assert broken == {"truncated": 1}
    assert documents == [json.loads(line)["text"] for line in lines[: len(documents)]]
    assert suffix == ".bz2" or documents  # one block of bz2 holds all of them
    assert read(tmp_path / f"b.jsonl{suffix}", PACKS[suffix](JSONL.encode()) + b"garbage")[1] == {"corrupt": 1}


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv"])
def test_a_parquet_file_is_one_by_any_name(tmp_path: Path, name: str) -> None:
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / name)
    assert read(tmp_path / name) == (TEXTS, {})


# ------------------------------------------------------------------------------------------------------ encodings


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", JSONL),
        ("a.jsonl.gz", JSONL),
        ("a.json", json.dumps(RECORDS, ensure_ascii=False, indent=1)),
        ("a.csv", "text,id\n" + "".join(f"{text},1\n" for text in TEXTS)),
    ],
)
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str, text: str, encoding: str) -> None:
    content = text.encode(encoding)
    assert read(tmp_path / name, gzip.compress(content) if name.endswith(".gz") else content) == (TEXTS, {})
    assert read(tmp_path / "a.txt", "ü\nb".encode(encoding)) == (["ü\nb"], {})


def test_marks_of_files_that_were_joined_are_no_text(tmp_path: Path) -> None:
    marked = JSONL.encode("utf-8-sig")
    assert read(tmp_path / "a.jsonl", marked + marked) == (TEXTS * 2, {})
    assert list(read_lines(tmp_path / "a.jsonl", Counter())) == RECORDS * 2
    assert read(tmp_path / "b.jsonl", b"\xef\xbb\xbf" + marked) == (TEXTS, {})


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_an_encoding_without_a_mark_is_named(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(DataError, match=r"a\.txt is UTF-16 or UTF-32 text without a byte order mark: convert it"):
        read(tmp_path / "a.txt", "some text ü\n".encode(encoding))


def test_marks_in_settings(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base: quickstart.yaml\n", encoding="utf-8-sig")
    assert load_yaml(path) == {"base": "quickstart.yaml"}
    path.write_text("base: quickstart.yaml\n", encoding="utf-16")
    with pytest.raises(ConfigError, match=r"a\.yaml: not UTF-8 text: save it as UTF-8$"):
        load_yaml(path)
    tokenizer = train_bpe([], 257)
    tokenizer.save(tmp_path)
    for file in tmp_path.glob("*.json"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert load_tokenizer(tmp_path / "tokenizer.json").digest == tokenizer.digest


# ----------------------------------------------------------------------------------------------- what is no data


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        (
            "a.txt",
            b"version https://git-lfs.github.com/spec/v1\noid",
            "a Git LFS pointer, not the file itself: run `git lfs",
        ),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer"),
        ("a.jsonl", b"PK\x03\x04\0\0", "a zip archive or office document: unpack"),
        ("a.txt", b"%PDF-1.7\n", "a PDF document: extract"),
        ("a.jsonl", b"\x93NUMPY\x01\0", "a NumPy array: name it .npy"),
        ("a.parquet", b"ARROW1\0\0", "an Arrow file: convert"),
        ("a.jsonl", b"\n<!DOCTYPE html><html>", "a web page or XML, not data: download it again"),
        ("a.jsonl", b"\xef\xbb\xbf<!DOCTYPE html><html>", "a web page or XML, not data: download it again"),
        ("a.parquet", b"<html><body>404", "a web page or XML, not data: download it again"),
        ("a.parquet", b'{"text": "a"}\n', "JSON: name it .jsonl"),
        ("a.parquet", gzip.compress(b"PAR1", mtime=0), "compressed: unpack it"),
        ("a.jsonl.gz", gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), "compressed twice: unpack it once"),
        ("a.jsonl.gz", gzip.compress(b"PAR1", mtime=0), "Parquet inside: unpack it once"),
        pytest.param("a.jsonl.gz", gzip.compress(TAR, mtime=0), "a tar archive: unpack it", id="compressed-tar"),
        pytest.param("a.txt", TAR, "a tar archive: unpack it", id="tar"),
    ],
)
def test_what_a_file_is_instead_is_said(tmp_path: Path, name: str, content: bytes, what: str) -> None:
    with pytest.raises(DataError, match=f"{name} is {what}"):
        read(tmp_path / name, content)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
@pytest.mark.parametrize("size", [1, 2, 4096, 1 << 20])
def test_a_file_of_zeros_is_no_text_of_another_encoding(tmp_path: Path, name: str, size: int) -> None:
    with pytest.raises(DataError, match=rf"{name} holds only zeros: copy it again$"):
        read(tmp_path / name, bytes(size))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.json", "a.csv"])
def test_empty_files_hold_nothing(tmp_path: Path, name: str) -> None:
    assert read(tmp_path / name, b"") == ([], {})


# ----------------------------------------------------------------------------------------------------------- JSON

LAYOUTS: dict[str, Callable[[list[object]], str]] = {
    "array": json.dumps,
    "indented array": lambda records: json.dumps(records, indent=2),
    "array without indentation": lambda records: json.dumps(records, indent=0),
    "array of lines": lambda records: "[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n",
    "indented objects": lambda records: "\n".join(json.dumps(record, indent=1) for record in records),
    "lines with commas": lambda records: ",\r\n".join(map(json.dumps, records)),
}
values = st.recursive(
    st.none() | st.integers() | st.text(max_size=6) | st.sampled_from(["\\", '"', '\\"', "[{", "}]", "\n"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    records=st.lists(st.dictionaries(st.text(max_size=4), values, min_size=1, max_size=3), min_size=1, max_size=8),
    layout=st.sampled_from(sorted(LAYOUTS)),
    block=st.integers(1, 40),
)
def test_records_are_the_same_in_every_layout(records: list[object], layout: str, block: int) -> None:
    content = LAYOUTS[layout](records).encode()
    head = max(block, len(content) // 2)  # the layout is recognised in the first block
    pieces = [content[:head], *(content[i : i + block] for i in range(head, len(content), block))]
    joined = b"".join(block for block, _, _ in contents.json_lines((piece, 1, None) for piece in pieces))
    assert [json.loads(line.strip().removesuffix(b",")) for line in joined.split(b"\n") if line.strip()] == records


@pytest.mark.parametrize("layout", ["indented array", "array of lines", "lines with commas"])
@pytest.mark.parametrize("damage", [('"document 7', "document 7"), ("document 7", 'document" 7'), ('"list"', '"list')])
def test_a_damaged_record_costs_one_record(tmp_path: Path, layout: str, damage: tuple[str, str]) -> None:
    text = LAYOUTS[layout]([{"text": text.removesuffix(" ü"), "of": {"list": [1, {"a": 2}]}} for text in TEXTS])
    start = text.index('"document 7')
    text = text[:start] + text[start:].replace(*damage, 1)
    documents, broken = read(tmp_path / "a.json", text.encode())
    assert len(set(documents) & {f"document {i}" for i in range(30)}) == 29
    assert broken["bad_json"] == 1


@pytest.mark.parametrize("first", ["[]", "[{}]", '[{"a": 1}, {"b": 2}]', "{", "[{", "null", "[1"])
def test_a_first_line_of_another_kind_is_one_record(tmp_path: Path, first: str) -> None:
    documents, broken = read(tmp_path / "a.jsonl", f"{first}\n{JSONL}".encode())
    assert documents == TEXTS
    assert broken in ({"wrong_type": 1}, {"bad_json": 1})


def test_a_truncated_array_keeps_its_whole_records(tmp_path: Path) -> None:
    text = json.dumps(RECORDS, indent=1)
    assert read(tmp_path / "a.json", text[: text.index("document 20")].encode()) == (TEXTS[:20], {"bad_json": 1})
    noise = [{"text": random.Random(i).randbytes(300).hex()} for i in range(3000)]
    packed = gzip.compress(json.dumps(noise).encode())
    documents, broken = read(tmp_path / "b.json.gz", packed[: len(packed) // 2])
    assert broken == {"truncated": 1}
    assert documents == [record["text"] for record in noise[: len(documents)]]
    assert len(documents) > 1000


@pytest.mark.parametrize("between", ["", " "])
def test_objects_need_no_line_end_between_them(tmp_path: Path, between: str) -> None:
    content = between.join(map(json.dumps, RECORDS)).encode()
    assert read(tmp_path / "a.jsonl", content) == (TEXTS, {})
    assert read(tmp_path / "a.jsonl", content + b"\n" + content) == (TEXTS * 2, {})
    assert read(tmp_path / "a.jsonl", content + b'{"te\n' + content) == (TEXTS * 2, {"bad_json": 1})
    assert read(tmp_path / "a.jsonl", content + b"x\n" + content) == (TEXTS * 2, {"bad_json": 1})
    assert read(tmp_path / "a.jsonl", b"2024-01-01 a log\n" + content) == (TEXTS, {"bad_json": 1})


def test_objects_without_line_ends_need_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_swarm.data.readers._PIECE_BYTES", 1 << 16)
    monkeypatch.setattr("spes_swarm.data.readers.MAX_RECORD_BYTES", 1 << 18)
    assert read(tmp_path / "a.jsonl", json.dumps(RECORDS[0]).encode() * 40_000) == (TEXTS[:1] * 40_000, {})


def test_lines_that_end_in_a_carriage_return_count_no_fault(tmp_path: Path) -> None:
    broken: Counter[str] = Counter()
    (tmp_path / "a.jsonl").write_bytes(JSONL.encode().replace(b"\n", b"\r"))
    assert list(read_lines(tmp_path / "a.jsonl", broken)) == RECORDS
    assert not list(broken)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.csv", b"id,body\n1,x\n", r"1 missing_field\); is the .* 'text'\? The fields are 'id', 'body'$"),
        ("a.csv", b"id;text\n1;x\n", r"The fields are 'id;text'; the delimiter seems to be ';': convert it to commas$"),
        ("a.csv", b"id|text\n1|x\n", r"the delimiter seems to be '\|': convert it to commas$"),
        ("a.csv", b"id\ttext\n1\tx\n", r"the delimiter seems to be '\\t': name it \.tsv$"),
        ("a.tsv", b"id,text\n1,x\n", r"the delimiter seems to be ',': name it \.csv$"),
        ("a.jsonl", b"", r"no records\); there is no text in it: copy"),
        ("a.jsonl", b"{'text': 'a'}\n", r"1 bad_json\); a JSON file holds one object a line"),
        ("a.txt", "é".encode("latin-1"), r"1 bad_utf8\); it is not text in UTF-8: convert it"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "a"}]}', r"it holds conversations: pass it to --data"),
    ],
)
def test_what_to_do_about_files_without_a_document(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=why):
        write_shards([tmp_path / name], tmp_path / "out", ByteTokenizer())


def test_the_columns_of_a_table_without_text_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"is the text in the field 'text'\? The fields are 'body', 'id'$"):
        write_shards([tmp_path / "a.parquet"], tmp_path / "out", ByteTokenizer())


def test_the_fields_of_records_without_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"data": RECORDS, "version": 1}))
    with pytest.raises(
        DataError, match=r"\(1 missing_field\); is the text in the field 'text'\? The fields are 'data', 'version'"
    ):
        write_shards([tmp_path / "a.json"], tmp_path / "out", ByteTokenizer())


# --------------------------------------------------------------------------------------------------------- tables


def test_csv(tmp_path: Path) -> None:
    rows = ["id,text", "1,plain", '2,"of two\nlines, ""quoted"""', "3", '4,"never closed', "5,after", "6,too,many"]
    content = "\n".join(rows).encode() + b"\n7,bad \xff\n\n8,last"
    documents, broken = read(tmp_path / "a.csv", content)
    assert documents == ["plain", 'of two\nlines, "quoted"', "after", "last"]
    assert broken == {"missing_field": 1, "bad_csv": 2, "bad_utf8": 1}
    assert read(tmp_path / "a.csv", text_field="body") == ([], {"missing_field": 6, "bad_csv": 2})
    assert read(tmp_path / "a.tsv", b"text\tid\na, b\t1\n") == (["a, b"], {})


@pytest.mark.parametrize("header", ['id,"text', '"id,text'])
def test_no_column_is_read_if_the_header_is_damaged(tmp_path: Path, header: str) -> None:
    content = f"{header}\n" + "".join(f"{i},{text}\n" for i, text in enumerate(TEXTS))
    assert read(tmp_path / "a.csv", content.encode()) == ([], {"bad_csv": 1, "missing_field": 30})


@pytest.mark.parametrize("rows", [30, 20_000])
@pytest.mark.parametrize("end", ["\r", "\r\n", "\n"])
def test_any_line_end_ends_a_row_of_csv(tmp_path: Path, end: str, rows: int) -> None:
    texts = [f"document {i} ü" for i in range(rows)]
    content = end.join(["text,id", *(f'"{text}",1' for text in texts)])
    assert read(tmp_path / "a.csv", content.encode()) == (texts, {})
    assert read(tmp_path / "b.csv", (content + end).encode()) == (texts, {})


def not_utf8(kind: str) -> pa.Array:
    """Three values, of which the second is not UTF-8, in a column of some type."""
    raw = pa.array([b"good", b"\xff\xfe", b"also"], pa.binary())
    strings = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    if kind == "list":
        return pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), strings)
    if kind == "struct":
        return pa.StructArray.from_arrays([strings], ["inner"])
    return pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int32()), strings)


@pytest.mark.parametrize("kind", ["list", "struct"])
def test_a_nested_value_that_is_not_utf8_costs_one_record(tmp_path: Path, kind: str) -> None:
    pq.write_table(pa.table({"text": not_utf8(kind), "good": ["a", "b", "c"]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ([], {"bad_utf8": 1, "wrong_type": 2})
    assert read(tmp_path / "a.parquet", text_field="good") == (["a", "b", "c"], {})


@pytest.mark.parametrize(
    "column",
    [
        pa.array([2**62], pa.timestamp("us")),  # beyond the year 9999
        pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        pa.array([1.5]),
        pa.array([[b"\xff"]], pa.list_(pa.binary())),
    ],
    ids=str,
)
def test_columns_of_other_types_are_counted(tmp_path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ([], {"wrong_type": 1})


@pytest.mark.slow
def test_no_damage_to_a_table_escapes(tmp_path: Path) -> None:
    """Random bytes of a Parquet file are changed: whatever pyarrow raises, it is counted."""
    buffer = io.BytesIO()
    table = pa.table({"text": [f"document {i} " * 5 for i in range(200)], "list": [["a"]] * 200})
    pq.write_table(table, buffer, row_group_size=50)
    rng = random.Random(0)
    for _ in range(200):
        content = bytearray(buffer.getvalue())
        for _ in range(rng.randint(1, 6)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path = tmp_path / "a.parquet"
        path.write_bytes(content)
        documents, broken = read(path)
        list(read_lines(path, Counter()))
        assert documents or broken


@pytest.mark.slow
def test_conversations_in_parquet(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_chat_tokenizer(tmp_path / "tokenizer"))
    turns = [{"role": "user", "content": "the sky?"}, {"role": "assistant", "content": "is blue"}]
    records = [{"messages": turns}, {"messages": [{**turns[0], "name": "ada"}, turns[1]]}, {"messages": None}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(records[:2], indent=1))
    said: list[str] = []
    opened = [
        open_corpus(str(tmp_path / name), tokenizer, tmp_path / "cache", say=said.append)[0].sidecar.blake3
        for name in ("a.parquet", "a.json")
    ]
    assert opened[0] == opened[1]
    assert said == ["2 conversations tokenised; skipped: 1 missing_field", "2 conversations tokenised"]


def test_a_conversation_that_is_not_utf8_costs_one_record(tmp_path: Path) -> None:
    pq.write_table(pa.table({"messages": not_utf8("list")}), tmp_path / "a.parquet")
    broken: Counter[str] = Counter()
    assert list(read_lines(tmp_path / "a.parquet", broken)) == [{"messages": ["good"]}, {"messages": ["also"]}]
    assert broken == {"bad_utf8": 1}
