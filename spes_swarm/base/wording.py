"""How messages and displays put numbers into words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def plural(count: int, one: str) -> str:
    """A count of things with a regular plural: "1 peer", "2,000 peers"."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"


def one_to(most: int, one: str) -> str:
    """How many things there may be, from one on: "1 peer", "1 to 8 peers"."""
    return plural(most, one) if most == 1 else f"1 to {plural(most, one)}"


def loss_with_error(loss: float | None, stderr: float | None = None) -> str:
    """A loss and, where it is known, its standard error, both with the same precision: 1.246 ± 0.031; "-" for None."""
    if loss is None:
        return "-"
    return f"{loss:.3f}" if stderr is None else f"{loss:.3f} ± {stderr:.3f}"


def amount(value: float) -> str:
    """At most five characters: 0, 999, 1.2k, 45k, 1.2M ..."""
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if value < 999.5 or unit == "E":
            if unit and value < 9.95:
                return f"{value:.1f}{unit}"
            return f"{value:.0f}{unit}"
        value /= 1000
    raise AssertionError("the loop returns")


def seconds(value: float | None) -> str:
    """At most five characters: 0s, 59s, 12m, 5.0h, 3d; "-" for None."""
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
    """Six characters at most; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.4f}" if value < 10 else f"{value:.3f}" if value < 100 else amount(value)


def with_error(value: float | None, stderr: float | None) -> str:
    """A loss with its standard error, where that is known: 1.246 ± 0.031; "-" for None."""
    if value is None or value < 100:
        return loss_with_error(value, None if stderr is None else min(stderr, 99))
    return amount(value) + ("" if stderr is None else f" ± {amount(stderr)}")


def ranges(experts: Sequence[int]) -> str:
    """Ascending numbers as people write them: 0-3,7; "-" for none."""
    parts: list[str] = []
    index = 0
    while index < len(experts):
        last = index
        while last + 1 < len(experts) and experts[last + 1] == experts[last] + 1:
            last += 1
        parts.append(str(experts[index]) if last == index else f"{experts[index]}-{experts[last]}")
        index = last + 1
    return ",".join(parts) or "-"


def cut(text: str, width: int) -> str:
    """The text, with an ellipsis where it is too long."""
    return text if len(text) <= width else text[: width - 1] + "…"


def listed(words: Iterable[str]) -> str:
    """Words with commas."""
    return ", ".join(words)
