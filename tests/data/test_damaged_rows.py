"""Data sets with damage: a bad row costs that row, whatever the format, and the counts say what is wrong."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from spes_swarm.base.errors import DataError
from spes_swarm.data import readers
from spes_swarm.data.files import contents
from spes_swarm.data.readers import parse_piece, read_pieces
from spes_swarm.data.streaming.dataset import StreamedDataset
from spes_swarm.data.streaming.preparing import Preparing
from spes_swarm.data.streaming.rows import RowReader, Unusable
from spes_swarm.data.streaming.stream_sampler import StreamSampler
from spes_swarm.data.tokenizer import ByteTokenizer, load_tokenizer
from tests.helpers.chat_tokenizer import save_chat_tokenizer
from tests.helpers.streamed_data import document, opened

BYTES = ByteTokenizer()
ROWS = 400
BAD = b"bad \xff byte"


def lines(numbers: Sequence[int] = range(ROWS), **changes: bytes) -> bytes:
    """JSON Lines; `changes` replaces lines by number, as in `_5=b"{"`."""
    records = [json.dumps({"id": number, "text": document(number)}).encode() for number in numbers]
    for name, line in changes.items():
        records[int(name[1:])] = line
    return b"\n".join(records) + b"\n"


def save(directory: Path, **files: bytes) -> Path:
    """Files whose names have `__` instead of a dot."""
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_bytes(content)
    return directory


def save_table(path: Path, numbers: Sequence[int], bad: Sequence[int] = (), group: int = 100) -> Path:
    """A Parquet file of documents, some of which are not UTF-8."""
    path.parent.mkdir(exist_ok=True)
    texts = [BAD if number in bad else document(number).encode() for number in numbers]
    column = pa.array(texts, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"id": list(numbers), "text": column}), path, row_group_size=group)
    return path


def prepared(dataset: StreamedDataset) -> tuple[list[str], str]:
    """The documents of a data set in their order, and what was skipped."""
    prepare = Preparing(BYTES, is_chat=False, name="set", say=lambda text: None)
    examples = [example for unit in range(dataset.num_units) for example in dataset.read(unit)]
    tokens = [prepare(example.value) for example in examples]
    return [BYTES.decode(each[:-1]) for each in tokens if each is not None], prepare.skipped


def all_but(*missing: int, rows: int = ROWS) -> list[str]:
    return [document(number) for number in range(rows) if number not in missing]


# ------------------------------------------------------------------------------------------------------- formats


def test_a_bad_byte_in_every_row_group_costs_one_row_each(tmp_path: Path) -> None:
    save_table(tmp_path / "a.parquet", range(ROWS), bad=[3, 104, 205, 399])
    dataset = opened(tmp_path)
    assert dataset.num_units == 4
    assert prepared(dataset) == (all_but(3, 104, 205, 399), "4 bad_utf8")
    # The rows have the numbers that they would have in an intact file.
    assert [example.number for example in dataset.read(0)] == list(range(100))


def test_a_damaged_page_costs_its_row_group_and_the_rows_are_counted(tmp_path: Path) -> None:
    path = save_table(tmp_path / "a.parquet", range(ROWS))
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(1).data_page_offset
    content[start : start + 100] = b"\xff" * 100
    path.write_bytes(bytes(content))
    texts, skipped = prepared(opened(tmp_path))
    assert texts == all_but(*range(100, 200))
    assert skipped.startswith("100 corrupt (a.parquet, row group 1: ")


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("files", [3, 70])
def test_one_truncated_table_costs_no_other(tmp_path: Path, files: int, number: int) -> None:
    paths = [
        save_table(tmp_path / f"{index:02}.parquet", range(index * 5, index * 5 + 5), group=2) for index in range(files)
    ]
    paths[number].write_bytes(paths[number].read_bytes()[:-40])
    texts, skipped = prepared(opened(tmp_path))
    assert texts == all_but(*range(number * 5, number * 5 + 5), rows=files * 5)
    assert skipped.startswith(f"1 corrupt (0{number}.parquet: ")


def test_columns_of_other_types_are_counted(tmp_path: Path) -> None:
    save_table(tmp_path / "0.parquet", range(5))
    others: list[Any] = [
        pa.array([1, 2]),
        pa.array([["a"], ["b"]]),
        pa.array([None, None], pa.string()),
        pa.array([b"bytes", BAD], pa.binary()),
        pa.array(["twice", "twice"]).dictionary_encode(),
    ]
    for index, column in enumerate(others, start=1):
        pq.write_table(pa.table({"text": column}), tmp_path / f"{index}.parquet")
    pq.write_table(pa.table({"id": [1]}), tmp_path / "6.parquet")
    texts, skipped = prepared(opened(tmp_path))
    assert texts == [*all_but(rows=5), "bytes", "twice", "twice"]
    assert skipped == "1 bad_utf8, 3 missing_field, 4 wrong_type"


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.list_(pa.timestamp("us")), pa.date64()], ids=str)
def test_a_date_beyond_the_last_year_costs_one_row(tmp_path: Path, kind: pa.DataType) -> None:
    values: list[Any] = [1, 2**62, 86_400_000]
    inner = pa.array(values, pa.int64()).cast(kind.value_type if pa.types.is_list(kind) else kind)
    column = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), inner) if pa.types.is_list(kind) else inner
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column}), path)
    found = list(RowReader("parquet", None).rows(str(path), 0, "text"))
    assert [isinstance(value, Unusable) for value in found] == [False, True, False]
    assert found[1] == Unusable("wrong_type")


def test_each_bad_line_of_json_costs_itself(tmp_path: Path) -> None:
    content = lines(
        _0=b"{broken",
        _6=b'{"text": "bad \xff"}',
        _7=b"[1]",
        _8=b'{"text": null}',
        _9=b'{"text": ["a"]}',
        _10=b'{"text": 5}',
        _11=b'{"id": \xff}',
        _12=b'{"text": "\\ud800"}',
        _13=b'{"id": 1}',
        _14=b"",
    )
    texts, skipped = prepared(opened(save(tmp_path, a__jsonl=b"\xef\xbb\xbf" + content)))
    assert texts == all_but(0, *range(6, 15))
    assert skipped == "1 bad_json, 3 bad_utf8, 2 missing_field, 3 wrong_type"


@pytest.mark.parametrize(
    "name",
    [
        "a__jsonl__gz",
        "a__jsonl",
        "a__jsonl__bz2",
        "a__jsonl__xz",
        "a__jsonl__zst",
        "plain__jsonl__gz",
        "utf16__jsonl",
        "frames__jsonl",
    ],
)
def test_what_a_file_is_follows_from_its_content(tmp_path: Path, name: str) -> None:
    halves = lines(range(200)), lines(range(200, ROWS))  # both formats allow several members
    content = {
        "a__jsonl__bz2": bz2.compress(lines()),
        "a__jsonl__xz": lzma.compress(lines()),
        "a__jsonl__zst": b"".join(map(zstandard.ZstdCompressor().compress, halves)),
        "frames__jsonl": b"\x50\x2a\x4d\x18\x03\0\0\0abc" + zstandard.compress(lines()),  # a skippable frame first
        "plain__jsonl__gz": lines(),
        "utf16__jsonl": lines().decode().encode("utf-16"),
    }.get(name, b"".join(map(gzip.compress, halves)))
    assert prepared(opened(save(tmp_path, **{name: content}))) == (all_but(), "")


def test_text_that_begins_almost_like_a_compressed_file_is_text(tmp_path: Path) -> None:
    assert prepared(opened(save(tmp_path, a__txt=b"BZh, a name\nanother\n"))) == (["BZh, a name", "another"], "")


def test_a_truncated_file_keeps_what_is_before(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [rng.bytes(40).hex() for _ in range(4000)]
    content = gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    save(tmp_path, a__jsonl__gz=content[: len(content) // 2], b__jsonl__gz=gzip.compress(lines(range(9))))
    found, skipped = prepared(opened(tmp_path))
    assert found[-9:] == all_but(rows=9)
    assert len(found) > 1800
    assert found[:-9] == texts[: len(found) - 9]
    assert re.search(r"1 truncated \(a\.jsonl\.gz: .*ended before", skipped)


def test_json_in_one_piece(tmp_path: Path) -> None:
    records = [{"text": document(number)} for number in range(ROWS)]
    for name, content in {
        "array": json.dumps(records),
        "indented": json.dumps(records, indent=2),
        "lines": "[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n",
    }.items():
        assert prepared(opened(save(tmp_path / name, a__json=content.encode()))) == (all_but(), "")
    cut = content[: content.rindex('"text"') + 9]
    texts, skipped = prepared(opened(save(tmp_path / "cut", a__json=cut.encode())))
    assert texts == all_but(ROWS - 1)
    assert skipped == "1 bad_json"
    assert prepared(opened(save(tmp_path / "one", a__json=json.dumps(records[3], indent=1).encode())))[0] == [
        document(3)
    ]


def test_a_value_that_datasets_cannot_decode_costs_one_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    schema = datasets.Features({"text": datasets.Image()}).arrow_schema
    images = [None, {"bytes": b"no image", "path": None}, None]
    pq.write_table(pa.table({"text": images}, schema=schema), path)
    found = list(RowReader("parquet", None).rows(str(path), 0, "text"))
    assert found == [None, Unusable("wrong_type"), None]


@pytest.mark.parametrize("rows", [5, ROWS, 1500])  # one block or several
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_indented_json_costs_what_it_costs_in_a_directory(
    tmp_path: Path, rows: int, pack: Callable[[bytes], bytes]
) -> None:
    records = [{"text": document(number), "of": {"list": [1, {"a": "}]"}]}} for number in range(rows)]
    array = json.dumps(records, indent=2)
    objects = "\n".join(json.dumps(record, indent=1) for record in records)
    quote = f'"{document(3)}'
    cases = {
        "objects": (objects, all_but(rows=rows), ""),
        "array": (array.replace(quote, quote[1:]), all_but(3, rows=rows), "1 bad_json"),
        "damaged": (objects.replace(quote, quote[1:]), all_but(3, rows=rows), "1 bad_json"),
        "bracket": (array.replace("  },\n", "  ,\n", 1), all_but(0, rows=rows), "1 bad_json"),
        "first": ("{\n" + lines(range(rows)).decode(), all_but(rows=rows), "1 bad_json"),
    }
    for name, (content, texts, skipped) in cases.items():
        path = save(tmp_path / name, a__json=pack(content.encode()))
        assert prepared(opened(path)) == (texts, skipped), name
        found, broken = [], Counter[str]()
        for piece in read_pieces(path / "a.json"):
            documents, faults = parse_piece(piece)
            found += documents
            broken += faults
        assert (found, ", ".join(f"{count} {kind}" for kind, count in broken.items())) == (texts, skipped), name


def test_a_record_that_is_too_long_costs_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not held in memory, whether it is a line or has lines of its own."""
    for module in (contents, readers):
        monkeypatch.setattr(module, "MAX_RECORD_BYTES", 1 << 17)
    monkeypatch.setattr(readers, "_PIECE_BYTES", 1 << 14)
    records = [{"text": document(number), "long": ["x" * 50] * 20_000 * (number == 3)} for number in range(ROWS)]
    for indent in (None, 1):
        content = "\n".join(json.dumps(record, indent=indent) for record in records)
        found = prepared(opened(save(tmp_path / str(indent), a__json=content.encode())))
        assert found == (all_but(3), "1 too_long")


def test_bad_rows_of_csv(tmp_path: Path) -> None:
    rows = ["id,text", *(f'{number},"{document(number)}"' for number in range(ROWS))]
    content = [row.encode() for row in rows]
    content[5], content[9], content[12] = b'4,"bad \xff"', b"8,a,b,c", b"11"
    content[20] = b'19,"two\nlines and ""marks"""'
    content[ROWS] = b'399,"never closed'
    texts, skipped = prepared(opened(save(tmp_path / "a", a__csv=b"\n".join(content) + b"\n")))
    expected = all_but(4, 8, 11, 399)
    expected[expected.index(document(19))] = 'two\nlines and "marks"'
    assert texts == expected
    assert skipped == "2 bad_csv, 1 bad_utf8, 1 missing_field"
    plain = [f"{number},{document(number)}" for number in range(ROWS)]
    plain[49] = '49,"never closed'
    found = prepared(opened(save(tmp_path / "b", a__csv="\n".join(["id,text", *plain]).encode())))
    assert found == (all_but(49), "1 bad_csv")
    tabs = "".join(f"{number}\t{document(number)}\n" for number in range(9))
    assert prepared(opened(save(tmp_path / "c", a__tsv=b"\xef\xbb\xbftext\tid\nx\t1\n")))[0] == ["x"]
    assert prepared(opened(save(tmp_path / "d", a__tsv=f"id\ttext\n{tabs}".encode())))[0] == all_but(rows=9)


@pytest.mark.parametrize("header", ['id,"text', '"id,text'])
def test_no_column_is_read_if_the_header_is_damaged(tmp_path: Path, header: str) -> None:
    content = "\n".join([header, *(f"{number},{document(number)}" for number in range(9))])
    save(tmp_path, a__csv=content.encode(), b__csv=b"id,text\r1,<1>\r2,<2>\r")
    assert prepared(opened(tmp_path)) == (["<1>", "<2>"], "1 bad_csv, 9 missing_field")


def test_a_bad_line_of_text(tmp_path: Path) -> None:
    content = [document(number).encode() for number in range(ROWS)]
    content[7] = BAD
    assert prepared(opened(save(tmp_path, a__txt=b"\n".join(content)))) == (all_but(7), "1 bad_utf8")


def test_files_in_an_archive(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("x/a.jsonl", lines(range(200), _3=b"{"))
        archive.writestr("x/b.jsonl", lines(range(200, ROWS)))
    dataset = opened(tmp_path)
    assert dataset.summary == f"hf:{tmp_path}: 1 file, column text"
    assert prepared(dataset) == (all_but(3), "1 bad_json")


@pytest.mark.slow
def test_a_conversation_with_a_bad_byte(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_chat_tokenizer(tmp_path / "tokenizer"))
    turns = [{"role": "user", "content": b"what?"}, {"role": "assistant", "content": b"the sky"}]
    kind = pa.list_(pa.struct({"role": pa.string(), "content": pa.binary()}))
    text = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
    column = pa.array([turns, [turns[0], {**turns[1], "content": BAD}], turns], kind)
    (tmp_path / "set").mkdir()
    pq.write_table(pa.table({"messages": column.view(text)}), tmp_path / "set" / "a.parquet")
    save(tmp_path / "json", a__jsonl=b'{"messages": [{"role": "user", "content": "\xff"}]}\n{"messages": []}\n')
    for name, usable, skipped in (("set", [0, 2], "1 bad_utf8"), ("json", [], "1 bad_utf8, 1 missing_field")):
        dataset = opened(tmp_path / name)
        prepare = Preparing(tokenizer, is_chat=dataset.is_chat, name=name, say=lambda text: None)
        arrays = [prepare(example.value) for example in dataset.read(0)]
        assert [index for index, array in enumerate(arrays) if array is not None] == usable
        assert prepare.skipped == skipped


# ------------------------------------------------------------------------------------------------- what is said


def test_what_has_no_row_to_be_read(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n"
    cases = {
        r"has no row that can be read in 2 files \(a\.parquet: ": {"a__parquet": b"PAR1", "b__parquet": b""},
        r"has no row that can be read in 1 file \(bad_json\)": {"a__jsonl": b"{broken\n" * 9},
        r"a\.parquet is a Git LFS pointer, not the file itself: run `git lfs pull`": {"a__parquet": pointer},
        r"has the columns body, expected one named text": {"a__jsonl": b'{\n{"body": "x"}\n'},
    }
    for number, (message, files) in enumerate(cases.items()):
        with pytest.raises(DataError, match=message) as caught:
            opened(save(tmp_path / str(number), **files))
        assert "\n" not in str(caught.value)


def stream(dataset: StreamedDataset, peer_id: str = "a", **changes: Any) -> StreamSampler:
    prepare = Preparing(BYTES, is_chat=False, name=dataset.name, say=changes.pop("say", lambda text: None))
    settings = {"sequence_length": 16, "run_seed": 5, "holdout_fraction": 0.1, **changes}
    return StreamSampler(dataset, prepare, peer_id=peer_id, **settings)


@pytest.mark.parametrize(
    ("bad", "advice"),
    [(range(40, ROWS), "repair the data set"), (range(0, ROWS, 7), "raise run.evaluation.holdout_fraction")],
)
def test_held_out_rows_report_what_is_wrong_with_them(tmp_path: Path, bad: range, advice: str) -> None:
    save_table(tmp_path / "a.parquet", range(ROWS), bad=bad)
    said: list[str] = []
    peer = stream(opened(tmp_path), say=said.append, sequence_length=1000)
    with pytest.raises(
        DataError,
        match=rf"\(1000\): {advice} \((\d+) of (\d+) cannot be used; .*\1 bad_utf8\), or set every_rounds to 0$",
    ):
        list(peer.evaluation_batches(4, 4))
    assert any(text.endswith("bad_utf8") for text in said)
    peer.close()


@pytest.mark.slow
@pytest.mark.parametrize("holdout_fraction", [0.001, 0.5])
def test_without_a_usable_row_the_reason_is_said(tmp_path: Path, holdout_fraction: float) -> None:
    save_table(tmp_path / "a.parquet", range(ROWS), bad=range(ROWS))
    peer = stream(opened(tmp_path), holdout_fraction=holdout_fraction)
    with pytest.raises(DataError, match=r"no usable example \(skipped so far: \d+ bad_utf8\): repair the data set"):
        list(peer.evaluation_batches(4, 4))
    with pytest.raises(DataError, match=r"no usable example for this peer \(skipped so far: .* bad_utf8\): repair"):
        peer.next_batch(1)
    peer.close()


@pytest.mark.parametrize("holdout_fraction", [0.0, 0.5])
def test_data_that_cannot_be_read_end_training_with_the_reason(tmp_path: Path, holdout_fraction: float) -> None:
    """Also if the only row, which stands for a whole file, is held out, or there is none."""
    save(tmp_path / "damaged", a__jsonl=b'{"text": "x"}\n')
    damaged = opened(tmp_path / "damaged")
    (tmp_path / "damaged" / "a.jsonl").write_bytes(gzip.compress(lines())[:20])
    save(tmp_path / "empty", a__csv=b"text\n")
    for dataset, why in (
        (damaged, r"( \(skipped so far: \d+ truncated .*\): repair)?"),
        (opened(tmp_path / "empty"), ""),
    ):
        for run_seed in range(4):
            peer = stream(dataset, run_seed=run_seed, holdout_fraction=holdout_fraction)
            with pytest.raises(DataError, match=f"has no usable example for this peer{why}"):
                peer.next_batch(1)
            peer.close()


def test_peers_agree_on_the_division_of_damaged_data(tmp_path: Path) -> None:
    save_table(tmp_path / "a.parquet", range(150), bad=range(0, 150, 7), group=50)
    save_table(tmp_path / "b.parquet", range(150, 300), bad=[200], group=50)
    content = (tmp_path / "a.parquet").read_bytes()
    start = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(1).column(1).data_page_offset
    (tmp_path / "a.parquet").write_bytes(content[:start] + b"\xff" * 60 + content[start + 60 :])
    usable = {
        number
        for number in range(300)
        if number not in range(50, 100) and number != 200 and number % 7 * (number < 150)
    }
    usable |= {number for number in range(150, 300) if number != 200}
    members = ["a", "b", "c"]
    shares: list[list[int]] = []
    held_out: set[int] = set()
    for member in members:
        peer = stream(opened(tmp_path), member)
        peer.follow(members)
        text = ""
        while peer.state()["epoch"] == 0:
            text += BYTES.decode(peer.next_batch(1)[0])
        numbers = [int(number) for number in re.findall(r"<(\d+)>x*<\|endoftext\|>", text)]
        shares.append(numbers[: next((i for i, n in enumerate(numbers) if n in numbers[:i]), len(numbers))])
        windows = "".join(BYTES.decode(batch.reshape(-1)) for batch in peer.evaluation_batches(10_000, 8))
        found = {int(number) for number in re.findall(r"<(\d+)>", windows)}
        assert not held_out or found == held_out
        held_out = found
        peer.close()
    trained = Counter(number for share in shares for number in share)
    assert set(trained.values()) == {1}
    assert trained.keys() | held_out <= usable
    assert len(usable - trained.keys() - held_out) <= 5  # cut by a window, or in the next epoch's first window
    assert not trained.keys() & held_out
