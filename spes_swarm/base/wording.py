"""How messages and displays format numbers and lists, and a message that breaks a silence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

_SILENCE_S = 3.0


@contextmanager
def said_if_slow(text: str, say: Callable[[str], None]) -> Iterator[None]:
    """Calls `say` in another thread, once, if the code inside takes more than a few seconds."""

    def speak() -> None:
        with suppress(OSError):  # nobody reads it
            say(text)

    timer = threading.Timer(_SILENCE_S, speak)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def plural(count: int, one: str) -> str:
    """Formats a count with a regular plural: "1 peer", "2,000 peers"."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"


def one_to(most: int, one: str) -> str:
    """Formats a range of counts that starts at one: "1 peer", "1 to 8 peers"."""
    return plural(most, one) if most == 1 else f"1 to {plural(most, one)}"


def alternatives(words: Sequence[str]) -> str:
    """Formats a choice: "auto", "auto or off", "auto, memory or disk"."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def loss_with_error(loss: float | None, stderr: float | None = None) -> str:
    """Formats a loss and its standard error, if known, with the same precision: 1.246 ± 0.031; "-" for None."""
    if loss is None:
        return "-"
    return f"{loss:.3f}" if stderr is None else f"{loss:.3f} ± {stderr:.3f}"


def amount(value: float) -> str:
    """Formats an amount in at most five characters: 0, 999, 1.2k, 45k, 1.2M ..."""
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if value < 999.5 or unit == "E":
            if unit and value < 9.95:
                return f"{value:.1f}{unit}"
            return f"{value:.0f}{unit}"
        value /= 1000
    raise AssertionError("the loop returns")


def seconds(value: float | None) -> str:
    """Formats a duration in at most five characters: 0s, 59s, 12m, 5h, 3d; "-" for None."""
    if value is None:
        return "-"
    if value < 99.5:
        return f"{value:.0f}s"
    if value < 99.5 * 60:
        return f"{value / 60:.0f}m"
    if value < 48 * 3600:
        return f"{value / 3600:.0f}h"
    return f"{min(value / 86400, 9999):.0f}d"


def loss(value: float | None) -> str:
    """Formats a loss in at most six characters; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.4f}" if value < 10 else f"{value:.3f}" if value < 100 else amount(value)


def with_error(value: float | None, stderr: float | None) -> str:
    """Like `loss_with_error`, with large values abbreviated."""
    if value is None or value < 100:
        return loss_with_error(value, None if stderr is None else min(stderr, 99))
    return amount(value) + ("" if stderr is None else f" ± {amount(stderr)}")


def ranges(experts: Sequence[int], separator: str = ",", none: str = "-") -> str:
    """Formats ascending numbers as ranges: 0-3,7."""
    parts: list[str] = []
    index = 0
    while index < len(experts):
        last = index
        while last + 1 < len(experts) and experts[last + 1] == experts[last] + 1:
            last += 1
        parts.append(str(experts[index]) if last == index else f"{experts[index]}-{experts[last]}")
        index = last + 1
    return separator.join(parts) or none


def cut(text: str, width: int) -> str:
    """Shortens text that is longer than `width`, with an ellipsis."""
    return text if len(text) <= width else text[: width - 1] + "…"


def two_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Formats rows of a name and its value, one per line, with the values below each other."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
