"""How messages put numbers into words."""

from __future__ import annotations


def plural(count: int, one: str) -> str:
    """A count of things with a regular plural: "1 peer", "2,000 peers"."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"


def one_to(most: int, one: str) -> str:
    """How many things there may be, from one on: "1 peer", "1 to 8 peers"."""
    return plural(most, one) if most == 1 else f"1 to {plural(most, one)}"
