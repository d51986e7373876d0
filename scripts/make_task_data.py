"""Makes the data of the local tasks from the tests of the standard library: python scripts/make_task_data.py

The data source `stdlib`, on which a run trains by default, leaves tests out, so no such run has seen this text. The
files in spes_swarm/convert/tasks were made with CPython 3.11.7; another release has other tests and gives other
questions.
"""

from __future__ import annotations

import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_TASKS = Path(__file__).resolve().parents[1] / "spes_swarm" / "convert" / "tasks"
_SOURCES = (
    "test_bisect", "test_calendar", "test_deque", "test_difflib", "test_fractions", "test_heapq", "test_shlex",
    "test_statistics", "test_string", "test_textwrap",
)  # fmt: skip
_NUM_QUESTIONS = 200
_NUM_CHOICES = 4
_WORD = re.compile(r"\w+|[^\w\s]+")
_MIN_WORDS = 5  # different ones, in a line that a question is about
_CONTEXT_BYTES = (30, 80)  # with the answer it fits into 128 tokens of a byte tokenizer
_LINE_BYTES = (20, 44)
_NUM_TEXTS = 100
_TEXT_BYTES = 256


def main() -> int:
    """Writes both files; returns the exit code."""
    directory = Path(sysconfig.get_path("stdlib")) / "test"
    missing = [name for name in _SOURCES if not (directory / f"{name}.py").is_file()]
    if missing:
        print(f"make_task_data: this Python comes without its tests: {', '.join(missing)}", file=sys.stderr)
        return 2
    texts = [(directory / f"{name}.py").read_text(encoding="utf-8") for name in _SOURCES]
    _write("python_lines.jsonl", _questions(texts, random.Random(0)))
    _write("python_bytes.jsonl", ({"text": text} for text in _excerpts(texts, random.Random(0))))
    return 0


def _questions(texts: Iterable[str], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Two lines of code, and four orders of the words of the third, of which one is the author's."""
    candidates: list[tuple[str, str]] = []
    for text in texts:
        lines = text.splitlines()
        for first, second, third in zip(lines, lines[1:], lines[2:], strict=False):
            context, line = f"{first}\n{second}\n", f"{third}\n"
            if (
                first.strip()
                and second.strip()
                and (context + line).isascii()
                and _CONTEXT_BYTES[0] <= len(context) <= _CONTEXT_BYTES[1]
                and _LINE_BYTES[0] <= len(line) <= _LINE_BYTES[1]
                and len(set(_WORD.findall(line))) >= _MIN_WORDS
            ):
                candidates.append((context, line))
    for number, (context, line) in enumerate(rng.sample(candidates, _NUM_QUESTIONS)):
        choices = {line: None}  # the same bytes in all of them, so that only their order can tell
        while len(choices) < _NUM_CHOICES:
            choices[_shuffled(line, rng)] = None
        others = [choice for choice in choices if choice != line]
        answer = number % _NUM_CHOICES
        yield {"context": context, "choices": [*others[:answer], line, *others[answer:]], "answer": answer}


def _shuffled(line: str, rng: random.Random) -> str:
    words = _WORD.findall(line)
    rng.shuffle(words)
    rest = iter(words)
    return _WORD.sub(lambda _: next(rest), line)


def _excerpts(texts: Iterable[str], rng: random.Random) -> Iterator[str]:
    """Pieces of code that begin with a line."""
    joined = "".join(text for text in texts if text.isascii())
    for _ in range(_NUM_TEXTS):
        start = 1 + joined.index("\n", rng.randrange(len(joined) - 2 * _TEXT_BYTES))
        yield joined[start : start + _TEXT_BYTES]


def _write(name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    (_TASKS / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
