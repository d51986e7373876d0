"""Strict dataclasses: configuration sections that check their own fields, read from plain values and written back.

A field's declared type states what it accepts, and error messages are derived from it:

    @dataclass(kw_only=True, slots=True, frozen=True)
    class Example(Section):
        rounds: Annotated[int, Range(1)]

Allowed are int, float, bool and str, `Annotated` with a `Range` or a `Pattern`, any type with a `Grammar`, `Literal`
text, nested sections, `tuple[T, ...]` and `tuple[T, T]` of any of these, `dict[str, ...]` for JSON values, and any of
these `| None`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from spes_swarm.base.errors import ConfigError
from spes_swarm.base.wording import alternatives, plural


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a field accepts."""

    low: float
    high: float = math.inf
    open_low: bool = False  # low itself is excluded

    def holds(self, value: float) -> bool:
        """Returns True if the field accepts `value`."""
        return (value > self.low if self.open_low else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        lower = f"above {_plain_number(self.low)}" if self.open_low else f"at least {_plain_number(self.low)}"
        return lower if self.high == math.inf else f"{lower} and at most {_plain_number(self.high)}"


def _plain_number(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


@dataclass(frozen=True, slots=True)
class Pattern:
    """The text that a field accepts."""

    regex: str
    meaning: str  # completes "expected ..."

    def holds(self, value: str) -> bool:
        """Returns True if the field accepts `value`."""
        return re.fullmatch(self.regex, value) is not None

    def __str__(self) -> str:
        return self.meaning


@dataclass(frozen=True, slots=True)
class Grammar:
    """The text that a field accepts, which holds what that text means; its `str` is the text again."""

    parse: Callable[[str], Any]  # raises a ConfigError that lacks the name of the field
    meaning: str  # completes "expected ..."

    def __str__(self) -> str:
        return self.meaning


class Section:
    """Base class of all sections: converts its fields to their declared types and checks them."""

    __slots__ = ()
    # True if `_check` needs libraries that take seconds to import; `check_section` then skips it.
    check_is_slow = False

    def __post_init__(self) -> None:
        for name, hint in hints_of(type(self)).items():
            # Sections are frozen; only here does an int become the declared float, and a list a tuple.
            object.__setattr__(self, name, _checked(hint, getattr(self, name), name))
        self._check()

    def to_dict(self) -> dict[str, Any]:
        """Converts a section to plain JSON values: dicts, lists and scalars that share nothing with it."""
        return {name: _plain(getattr(self, name)) for name in hints_of(type(self))}

    @classmethod
    def keys(cls, key: str) -> Iterator[str]:
        """Yields the dotted keys of the fields, and of those of nested sections, of a section whose key is `key`."""
        for name, hint in hints_of(cls).items():
            yield f"{key}.{name}"
            if _is_section(hint):
                yield from hint.keys(f"{key}.{name}")

    def _check(self) -> None:
        """Checks several fields against each other; the message of a ConfigError starts with the dotted key."""


_S = TypeVar("_S", bound=Section)


# typing would evaluate every annotation again for every value. (No functools.cache: to mypy, a class is not hashable.)
_HINTS: dict[type[Section], dict[str, Any]] = {}


def hints_of(cls: type[Section]) -> dict[str, Any]:
    """Returns the declared types of a section's fields, by name."""
    if cls not in _HINTS:
        _HINTS[cls] = get_type_hints(cls, include_extras=True)
    return _HINTS[cls]


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def read_section(cls: type[_S], values: Any, where: str, key: str) -> _S:
    """Builds a section, and those nested in it, from plain values; messages start with `where` and the dotted `key`.

    Raises:
        ConfigError: naming the dotted key, what was found and what is expected.
    """
    hints = _check_keys(cls, values, where, key)
    arguments = {
        name: read_section(hints[name], value, where, f"{key}.{name}") if _is_section(hints[name]) else value
        for name, value in values.items()
    }
    try:
        return cls(**arguments)
    except ConfigError as exc:
        raise ConfigError(f"{where}{key}.{exc}") from None


def check_section(cls: type[Section], values: Any, where: str, key: str) -> None:
    """Makes the checks of `read_section`, except `_check` of sections with `check_is_slow`.

    Takes the same arguments.

    Raises:
        ConfigError: as `read_section`.
    """
    if not cls.check_is_slow:
        read_section(cls, values, where, key)
        return
    for name, hint in _check_keys(cls, values, where, key).items():
        if name not in values:
            continue
        if _is_section(hint):
            check_section(hint, values[name], where, f"{key}.{name}")
            continue
        try:
            _checked(hint, values[name], name)
        except ConfigError as exc:
            raise ConfigError(f"{where}{key}.{exc}") from None


def _check_keys(cls: type[Section], values: Any, where: str, key: str) -> dict[str, Any]:
    """Returns the declared types of a section; refuses unknown keys, and missing ones that have no default."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}{key}: found {show(values)}, expected a section of keys")
    hints = hints_of(cls)
    for name in values:
        if name not in hints:
            raise ConfigError(f"{where}{key}.{name}: unknown key{nearest_key(hints, str(name), f'{key}.')}")
    missing = [
        item.name
        for item in dataclasses.fields(cls)  # type: ignore[arg-type]  # every section is a dataclass
        if item.default is item.default_factory is dataclasses.MISSING and item.name not in values
    ]
    if missing:
        raise ConfigError(f"{where}{key}.{missing[0]}: missing, expected {expectation(hints[missing[0]])}")
    return hints


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def _checked(hint: Any, value: Any, key: str) -> Any:
    """Converts a value to its declared type, or raises a ConfigError that starts with the key."""
    base, constraint, optional = declared(hint)
    if value is None and optional:
        return None
    wrong = ConfigError(f"{key}: found {show(value)}, expected {expectation(hint)}")
    if get_origin(base) is tuple:
        if not isinstance(value, list | tuple):
            raise wrong
        item_hint, *others = get_args(base)
        if Ellipsis not in others and len(value) != 1 + len(others):
            raise ConfigError(f"{key}: found {plural(len(value), 'value')}, expected {1 + len(others)}")
        if _is_section(item_hint):
            built = (
                item if isinstance(item, item_hint) else read_section(item_hint, item, "", f"{key}.{index}")
                for index, item in enumerate(value)
            )
            return tuple(built)
        return tuple(_checked(item_hint, item, f"{key}.{index}") for index, item in enumerate(value))
    if get_origin(base) is dict:
        if not isinstance(value, dict):
            raise wrong
        return _checked_setting(value, key, depth=0)
    if get_origin(base) is Literal:
        if not (isinstance(value, str) and value in get_args(base)):
            raise wrong
        return value
    if isinstance(constraint, Grammar) and type(value) is str:
        try:
            return constraint.parse(value)
        except ConfigError as exc:
            raise ConfigError(f"{key}: {exc}") from None
    # A bool is an int in Python, but `true` in place of a number is a mistake.
    if base is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise wrong from None
    if type(value) is not base or (base is float and not math.isfinite(value)):
        raise wrong
    if isinstance(constraint, Range | Pattern) and not constraint.holds(value):
        raise wrong
    return value + 0.0 if base is float else value  # -0.0 becomes 0.0: equal values give equal bytes


def _checked_setting(value: Any, key: str, depth: int) -> Any:
    """Checks and copies a JSON value of bounded depth."""
    if depth > 8:  # a YAML alias may even contain itself
        raise ConfigError(f"{key}: nested too deeply")
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                raise ConfigError(f"{key}: found the key {show(name)}, expected text")
        return {name: _checked_setting(item, f"{key}.{name}", depth + 1) for name, item in value.items()}
    if isinstance(value, list):
        return [_checked_setting(item, f"{key}.{index}", depth + 1) for index, item in enumerate(value)]
    if value is not None and type(value) not in (int, float, bool, str):
        raise ConfigError(f"{key}: found {show(value)}, expected a number, text, true, false, null, list or mapping")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigError(f"{key}: found {show(value)}, expected a finite number")
        return value + 0.0
    return value


def declared(hint: Any) -> tuple[Any, Range | Pattern | Grammar | None, bool]:
    """Splits a type hint into the bare type, its constraint, and whether None is allowed."""
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (item for item in get_args(hint) if item is not type(None))
        base, constraint, _ = declared(inner)
        return base, constraint, True
    if get_origin(hint) is Annotated:
        base, constraint = get_args(hint)
        return base, constraint, False
    return hint, None, False


def expectation(hint: Any) -> str:
    """Describes in words what a declared type accepts."""
    base, constraint, optional = declared(hint)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if isinstance(constraint, Pattern | Grammar):
        text = str(constraint)
    elif get_origin(base) is Literal:
        text = alternatives(get_args(base))
    elif get_origin(base) is tuple:
        text = "a list"
    elif get_origin(base) is dict or _is_section(base):
        text = "a section of keys"
    else:
        text = names[base] + (f", {constraint}" if constraint else "")
    return f"{text} (or null)" if optional else text


def show(value: Any) -> str:
    """Describes a value that was found: scalars roughly as in YAML, shortened; containers by their kind."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping | list | tuple):
        return "a section of keys" if isinstance(value, Mapping) else "a list"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def differences(given: Mapping[str, Any], expected: Mapping[str, Any], key: str, most: int = 4) -> str:
    """Lists the settings, of all sections below the dotted `key`, in which plain values differ; "" if in none."""
    lines = list(_differences(given, expected, key))
    more = [f"and {plural(len(lines) - most, 'other')}"] if len(lines) > most else []
    return ", ".join(lines[:most] + more)


def _differences(given: Any, expected: Any, key: str) -> Iterator[str]:
    if isinstance(given, Mapping) and isinstance(expected, Mapping):
        for name in [*expected, *(name for name in given if name not in expected)]:
            yield from _differences(given.get(name), expected.get(name), f"{key}.{name}")
    elif given != expected:
        yield f"{key} ({_brief(expected)}, given {_brief(given)})"


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown word: the closest known one."""
    nearest = difflib.get_close_matches(word[:80], list(known), n=1, cutoff=0.0)  # an untrusted word may be very long
    return f", did you mean {nearest[0]}?" if nearest else ""


def nearest_key(keys: Mapping[str, Any], word: str, prefix: str = "") -> str:
    """Returns the end of a message about an unknown key: the same key in a nested section, else the closest key.

    `prefix` is the dotted key of the section, with a trailing dot.
    """
    for section, hint in keys.items():
        if _is_section(hint) and word in hints_of(hint):
            return f", did you mean {prefix}{section}.{word}?"
    return nearest(word, keys)
