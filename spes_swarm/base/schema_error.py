"""The first error of a pydantic validation, in one short line."""

from __future__ import annotations

from pydantic import ValidationError

_MAX_WHERE_CHARS = 80  # an unknown key may be as long as the message that it came in


def first_complaint(error: ValidationError, max_chars: int = 160) -> str:
    """The first thing that is wrong, after its place where it has one: "shards.0.name: Field required"."""
    first = error.errors()[0]
    where = ".".join(str(item) for item in first["loc"])[:_MAX_WHERE_CHARS]
    what = first["msg"][:max_chars]
    return f"{where}: {what}" if where else what
