"""How messages put numbers into words."""

from __future__ import annotations


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
