"""The grammar of --data: one source, or a mixture such as `0.7*hf:USER/NAME + 0.3*my-tokens/`.

stdlib                              the Python standard library
hf:NAME[:CONFIG][@REVISION]         a data set of the Hub, or a directory that `datasets` can read
anything else                       a path or a glob: token files, a list of them, text or chats
WEIGHT*SOURCE + WEIGHT*SOURCE ...   a mixture: windows are drawn from each source in proportion to its weight
"""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from spes_swarm.base.errors import DataError
from spes_swarm.base.user_paths import user_path

STDLIB = "stdlib"
HF_PREFIX = "hf:"

_PLUS = re.compile(r"\s\+\s")
_TERM = re.compile(r"(?P<weight>[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?)\s*\*\s*(?P<source>\S.*)", re.DOTALL)
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_FORM = "hf:NAME[:CONFIG][@REVISION], where NAME is USER/NAME on the Hub or a directory"


@dataclass(frozen=True)
class HfName:
    """A data set for the `datasets` library."""

    name: str  # on the Hub, or the path of a directory
    config: str | None = None
    revision: str | None = None  # None: the newest; always None for a directory
    is_local: bool = False

    def __str__(self) -> str:
        config = f":{self.config}" if self.config else ""
        return HF_PREFIX + self.name + config + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class Weighted:
    """A source of a mixture."""

    weight: float  # share of the windows, above 0; the weights of a mixture add up to 1
    source: str


def parse_mixture(text: str) -> tuple[Weighted, ...]:
    """Splits --data into its sources; a single source has weight 1.

    Raises:
        DataError: a mixture is malformed.
    """
    terms = [term.strip() for term in _PLUS.split(text)]
    matches = [_TERM.fullmatch(term) for term in terms]
    if len(terms) == 1 or not any(matches):
        return (Weighted(1.0, text),)
    found: list[Weighted] = []
    for term, match in zip(terms, matches, strict=True):
        if match is None:
            raise DataError(f"--data {text!r}: found {term!r} in a mixture, expected WEIGHT*SOURCE")
        weight, source = float(match["weight"]), match["source"]
        if not (weight > 0 and math.isfinite(weight)):
            raise DataError(f"--data {text!r}: found the weight {match['weight']}, expected a number above 0")
        if any(source == other.source for other in found):
            raise DataError(f"--data {text!r}: found {source!r} twice, expected each source once")
        found.append(Weighted(weight, source))
    total = math.fsum(term.weight for term in found)
    return tuple(Weighted(term.weight / total, term.source) for term in found)


def join_mixture(terms: Sequence[Weighted]) -> str:
    """Returns the text that `parse_mixture` splits into these sources."""
    if len(terms) == 1:
        return terms[0].source
    return " + ".join(f"{term.weight!r}*{term.source}" for term in terms)


def missing_paths(text: str) -> list[str]:
    """Returns those sources of --data that name a path at which there is nothing.

    Raises:
        DataError: a mixture is malformed.
    """
    return [term.source for term in parse_mixture(text) if _is_missing(term.source)]


def _is_missing(source: str) -> bool:
    path = source.removeprefix(HF_PREFIX)
    if source == STDLIB or (path != source and not path.startswith((".", "/", "~"))):
        return False
    places = {path, path.partition(":")[0]} if path != source else {path}  # hf:DIRECTORY:CONFIG
    return not glob.has_magic(path) and not any(user_path(place).exists() for place in places)


def parse_hf(source: str) -> HfName | None:
    """Parses `hf:...`; returns None for any other source.

    Raises:
        DataError: it is malformed, or names a directory that does not exist.
    """
    if not source.startswith(HF_PREFIX):
        return None
    text = source.removeprefix(HF_PREFIX)
    if text and user_path(text).is_dir():
        return HfName(str(user_path(text).absolute()), is_local=True)
    rest, _, revision = text.partition("@")
    name, _, config = rest.partition(":")
    if name and user_path(name).is_dir():
        if revision:
            raise DataError(f"data source {source!r}: {name} is a directory, which has no revisions: leave out @...")
        return HfName(str(user_path(name).absolute()), config or None, is_local=True)
    if name.startswith((".", "/", "~")):
        raise DataError(f"data source {source!r}: directory {name} does not exist")
    if not _REPOSITORY.fullmatch(name) or rest.endswith(":") or text.endswith("@"):
        raise DataError(f"data source {source!r}: expected {_FORM}")
    return HfName(name, config or None, revision or None)
