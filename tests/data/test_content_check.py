"""Token files are compared with their digests once per machine, and again when they have changed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from spes_swarm.base.errors import DataError
from spes_swarm.data.content_check import check_contents_once
from spes_swarm.data.token_file import TokenFile
from spes_swarm.data.tokenizer import ByteTokenizer
from tests.helpers.token_files import token_writer

BYTES = ByteTokenizer()


def token_file(path: Path, num_tokens: int = 1000) -> TokenFile:
    with token_writer(path, BYTES) as writer:
        writer.append(np.arange(num_tokens) % 256, 1)
    return TokenFile.open(path)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The token files that have been compared with their digests, in order."""
    paths: list[Path] = []
    check_content = TokenFile.check_content

    def noted(file: TokenFile) -> None:
        paths.append(file.path)
        check_content(file)

    monkeypatch.setattr(TokenFile, "check_content", noted)
    return paths


def test_contents_are_read_once_and_again_after_a_change(tmp_path: Path, reads: list[Path]) -> None:
    file = token_file(tmp_path / "a.npy")
    for _ in range(2):
        check_contents_once([file], tmp_path / "c")
    assert reads == [file.path]
    status = file.path.stat()
    content = bytearray(file.path.read_bytes())
    content[-1] = 1
    file.path.write_bytes(content)
    os.utime(file.path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(DataError, match=r"a\.npy is corrupt"):
        check_contents_once([TokenFile.open(file.path)], tmp_path / "c")
    with pytest.raises(DataError, match=r"a\.npy is corrupt"):  # what failed leaves no receipt
        check_contents_once([TokenFile.open(file.path)], tmp_path / "c")


def test_another_sidecar_needs_another_receipt(tmp_path: Path) -> None:
    file = token_file(tmp_path / "a.npy")
    check_contents_once([file], tmp_path / "c")
    sidecar = Path(f"{file.path}.json")
    sidecar.write_text(sidecar.read_text().replace(file.sidecar.blake3, "0" * 64))
    with pytest.raises(DataError, match="corrupt"):
        check_contents_once([TokenFile.open(file.path)], tmp_path / "c")


def test_without_a_cache_contents_are_read_every_time(tmp_path: Path, reads: list[Path]) -> None:
    (tmp_path / "c").write_text("a file where the directory should be")
    file = token_file(tmp_path / "a.npy")
    for _ in range(2):
        check_contents_once([file], tmp_path / "c")
    assert reads == [file.path] * 2
