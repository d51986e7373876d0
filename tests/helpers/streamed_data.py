"""Small data sets on disk for `datasets`, with numbered documents."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spes_swarm.config.data_source import parse_hf
from spes_swarm.data.streaming.dataset import StreamedDataset


def document(number: int) -> str:
    """A text whose length differs from that of its neighbours."""
    return f"<{number}>" + "x" * (number * 7 % 40)


def save_jsonl(directory: Path, files: Sequence[Iterable[int]], *, packed: bool = False) -> Path:
    """One JSON Lines file for each group of numbers."""
    directory.mkdir(parents=True, exist_ok=True)
    for index, numbers in enumerate(files):
        text = "".join(json.dumps({"id": number, "text": document(number)}) + "\n" for number in numbers)
        path = directory / f"part-{index:05d}.jsonl{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return directory


def save_parquet(directory: Path, files: Sequence[Iterable[int]], rows_in_group: int) -> Path:
    """One Parquet file for each group of numbers."""
    directory.mkdir(parents=True, exist_ok=True)
    for index, numbers in enumerate(files):
        ids = list(numbers)
        table = pa.table({"id": ids, "text": [document(number) for number in ids]})
        pq.write_table(table, directory / f"part-{index:05d}.parquet", row_group_size=rows_in_group)
    return directory


def save_records(directory: Path, *records: Any) -> Path:
    """A JSON Lines file of records."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "part.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return directory


def opened(directory: Path) -> StreamedDataset:
    """The data set in a directory."""
    name = parse_hf(f"hf:{directory}")
    assert name is not None
    return StreamedDataset(name)
