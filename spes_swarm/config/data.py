"""The data of a run, as its configuration and manifest describe them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from spes_swarm.base.errors import ConfigError
from spes_swarm.base.strict import Pattern, Section, show
from spes_swarm.config.constraints import Hex64, Positive
from spes_swarm.protocol.members.records import MAX_SOURCES

Kind = Literal["stdlib", "corpus", "hf"]
RunKind = Literal["stdlib", "corpus", "hf", "mixture", "own"]
_Name = Annotated[
    str,
    Pattern(
        r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9_.+-]{0,95})?",
        "up to 96 of A-Z, a-z, 0-9, _ . + - (for hf also USER/NAME)",
    ),
]
_Part = Annotated[str, Pattern(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}", "up to 64 of A-Z, a-z, 0-9, _ . + -")]
_Revision = Annotated[str, Pattern(r"[0-9a-f]{40,64}", "the digits of a commit")]
_PythonVersion = Annotated[str, Pattern(r"[0-9][0-9a-z.+]{0,31}", "a version of Python")]

# The kinds that each key belongs to.
_KINDS_OF = {
    "name": ("corpus", "hf"),
    "digest": ("corpus", "hf"),
    "python_version": ("stdlib",),
    "config": ("hf",),
    "split": ("hf",),
    "revision": ("hf",),
}


@dataclass(kw_only=True, slots=True, frozen=True)
class MixedConfig(Section):
    """A source of a mixture; the founder's --data fills in unset fields."""

    weight: Positive  # share of the windows that are drawn from it, relative to the other sources
    kind: Kind
    name: _Name | None = None
    digest: Hex64 | None = None
    python_version: _PythonVersion | None = None
    config: _Part | None = None
    split: _Part | None = None
    revision: _Revision | None = None

    def _check(self) -> None:
        _check_source(self)


@dataclass(kw_only=True, slots=True, frozen=True)
class DataConfig(Section):
    """What the run trains on; the founder's --data fills in unset fields."""

    # stdlib: the source of Python's library; corpus: a directory of text, or token files; hf: a data set of the Hub or
    # like one; mixture: several of these; own: each peer brings its own data.
    kind: RunKind | None = None
    # Of a corpus: a label for people, which appears in commands that users paste into a shell. Of hf: USER/NAME on the
    # Hub, or the name of a directory.
    name: _Name | None = None
    # Digest of a corpus's tokens, or of an hf data set's files and column.
    digest: Hex64 | None = None
    python_version: _PythonVersion | None = None  # of the standard library's text
    config: _Part | None = None  # of hf: name of the configuration; None = the default one
    split: _Part | None = None  # of hf; None = train
    revision: _Revision | None = None  # of hf: commit on the Hub; None = a directory, or filled in by the founder
    sources: tuple[MixedConfig, ...] = ()  # of a mixture

    def _check(self) -> None:
        _check_source(self)
        if self.sources and self.kind != "mixture":
            raise ConfigError("sources: found a list, expected none unless kind is mixture")
        if self.kind == "mixture" and not 2 <= len(self.sources) <= MAX_SOURCES:
            raise ConfigError(f"sources: found {len(self.sources)}, expected 2 to {MAX_SOURCES} sources of the mixture")

    @property
    def parts(self) -> tuple[tuple[float, DataConfig], ...]:
        """A (weight, description) pair for each source; the weights add up to 1. A single source is one part."""
        if self.kind != "mixture":
            return ((1.0, self),)
        total = math.fsum(source.weight for source in self.sources)
        return tuple((source.weight / total, DataConfig(**_without_weight(source))) for source in self.sources)

    @classmethod
    def mixed(cls, parts: tuple[tuple[float, DataConfig], ...]) -> DataConfig:
        """Returns the description with these `parts`."""
        if len(parts) == 1:
            return parts[0][1]
        sources = tuple(
            MixedConfig(weight=weight, **{key: value for key, value in part.to_dict().items() if key != "sources"})
            for weight, part in parts
        )
        return cls(kind="mixture", sources=sources)


def _without_weight(source: MixedConfig) -> dict[str, Any]:
    return {key: value for key, value in source.to_dict().items() if key != "weight"}


def _check_source(source: MixedConfig | DataConfig) -> None:
    for key, kinds in _KINDS_OF.items():
        value = getattr(source, key)
        if value is not None and source.kind not in kinds:
            raise ConfigError(f"{key}: found {show(value)}, expected null unless kind is {' or '.join(kinds)}")
    if source.name == "stdlib":
        raise ConfigError("name: found 'stdlib', expected another (it means the Python standard library)")
    if source.name is not None and "/" in source.name and source.kind != "hf":
        raise ConfigError(f"name: found {show(source.name)}, expected no / unless kind is hf")
