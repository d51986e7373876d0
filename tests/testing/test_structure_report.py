"""The report of the largest pieces of a package."""

from __future__ import annotations

from pathlib import Path

from scripts.structure_report import measure

_SOURCE = """\
class Wide:
    field: int
    CONSTANT = 3

    def __init__(self) -> None:
        self.first = 1
        self.second: int = 2

    def method(self) -> None:
        self.first += 1
        other = self.third = 3
        other.fourth = self.field
"""


def test_sizes(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("", encoding="utf-8")
    path = tmp_path / "wide.py"
    path.write_text(_SOURCE, encoding="utf-8")
    files, folders, functions, classes = measure(tmp_path).values()
    assert files.most_common(1) == [(str(path), 12)]
    assert folders == {str(tmp_path): 1}
    assert functions == {f"{path}:5 __init__": 3, f"{path}:9 method": 4}
    assert classes == {f"{path}:1 Wide": 4}  # field, first, second, third
