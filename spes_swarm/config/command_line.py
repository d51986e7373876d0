"""The parser of all commands: its mistakes are one line, and an unknown flag leads to what was meant.

Flags that set fields of a section come from their declarations; see `setting`.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import Any, Literal, NoReturn, get_args, get_origin

from spes_swarm.base.errors import ConfigError
from spes_swarm.base.strict import Section, declared, hints_of
from spes_swarm.base.version import __version__

# Text from a web page may have dashes (\u2013, \u2014) where it had hyphens.
_LIKE_A_FLAG = re.compile("[-\u2013\u2014]+[^\\W\\d_][\\w.-]{0,60}")


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser with --version whose `parse_args` raises ConfigError for unknown flags and wrong values."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.add_argument("--version", action="version", version=f"spes_swarm {__version__}")
        self._words: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like argparse's; `error` looks at the words again."""
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Called by argparse for every mistake; an unknown flag is usually the reason for the others."""
        flags = self._option_string_actions
        for word in takewhile(lambda word: word != "--", self._words):
            flag = word.partition("=")[0]
            if _LIKE_A_FLAG.fullmatch(flag) and not any(known.startswith(flag) for known in flags):
                raise ConfigError(self._unknown(flag))
        raise ConfigError(f"{message}; see --help")

    def _unknown(self, flag: str) -> str:
        """Describes a word that looks like a flag, and what may be meant: another flag, or a setting."""
        from spes_swarm.config.file import setting_keys

        own = {name: known for known in self._option_string_actions for name in (_name(known),) if known[:2] == "--"}
        own |= {action.dest: action.option_strings[-1] for action in self._actions if action.option_strings}
        name = _name(flag)
        keys: dict[str, list[str]] = {}  # those that end in a name
        for key in setting_keys():
            parts = key.split(".")
            for start in range(len(parts)):
                keys.setdefault("_".join(parts[start:]), []).append(key)
        close = [name] if name in own or name in keys else difflib.get_close_matches(name, [*own, *keys], 1, 0.75)
        if not close:
            return f"unknown flag {flag}; see --help"
        settings = keys.get(close[0], [])
        of_peer = [key.removeprefix("peer.") for key in settings if key.startswith("peer.")]
        for meant in (close[0], *of_peer):
            if meant in own:
                return f"unknown flag {flag}, did you mean {own[meant]}?"
        if len(of_peer) == len(settings) and "output_dir" not in own:
            return f"{flag} is not a flag of this command; see python -m spes_swarm.join --help"
        where = "--config" if "config" in own else "--config of python -m spes_swarm.join"
        return f"unknown flag {flag}; set {' or '.join(settings[:3])} in a configuration, see {where}"


@dataclass(frozen=True)
class Flag:
    """A field of a section, as a flag."""

    field: str
    name: str  # --output-dir
    kind: Any  # bare type, such as int or a Literal
    default: Any
    help: str
    metavar: str  # empty for switches
    group: str

    @property
    def meaning(self) -> str:
        """What it is for, and its default if that says more."""
        if self.default in (None, False, ()):
            return self.help
        values = self.default if isinstance(self.default, tuple) else (self.default,)
        shown = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
        return f"{self.help} (default: {shown})"


def setting(default: Any, help: str, metavar: str = "", *, group: str = "", flag: str = "") -> Any:
    """Declares a field of a section that is also a flag.

    Args:
        default: of the field.
        help: what it is for, in `--help` and in the reference.
        metavar: what follows the flag; a Literal lists its own values.
        group: the heading under which it and the fields after it are listed; empty: that of the field before.
        flag: its name, if that is not the field's.
    """
    return field(default=default, metadata={"help": help, "metavar": metavar, "group": group, "flag": flag})


def flags_of(cls: type[Section]) -> Iterator[Flag]:
    """Yields the flags of a section whose fields are all declared by `setting`."""
    group, hints = "", hints_of(cls)
    for each in fields(cls):  # type: ignore[arg-type]  # every section is a dataclass
        about = each.metadata
        group = about["group"] or group
        kind, _, _ = declared(hints[each.name])
        metavar = "|".join(get_args(kind)) if get_origin(kind) is Literal else about["metavar"]
        name = about["flag"] or f"--{each.name.replace('_', '-')}"
        yield Flag(each.name, name, kind, each.default, about["help"], metavar, group)


def add_flags(parser: argparse.ArgumentParser, cls: type[Section]) -> None:
    """Adds the flags of a section to a parser; those that are not given have no attribute in its result."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag in flags_of(cls):
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        if flag.kind is bool:
            how: dict[str, Any] = {"action": "store_true"}
        else:
            how = {"metavar": flag.metavar, "type": flag.kind if flag.kind in (int, float) else str}
        if get_origin(flag.kind) is tuple:
            how["nargs"] = "+"
        help_text = flag.meaning.replace("%", "%%")
        groups[flag.group].add_argument(flag.name, dest=flag.field, default=argparse.SUPPRESS, help=help_text, **how)


def _name(flag: str) -> str:
    """Returns output_dir for --output-dir, and for -output_dir, --Output-Dir and others that are meant to be it."""
    return re.sub("[-.]", "_", flag.lstrip("-\u2013\u2014")).lower()


def command_parser(command: str, documentation: str | None) -> OneLineParser:
    """Returns the parser of `python -m spes_swarm.COMMAND`, described by the last paragraph of its documentation."""
    return OneLineParser(
        prog=f"python -m spes_swarm.{command}",
        description=(documentation or "").rpartition("\n\n")[2],
        formatter_class=_HelpFormatter,
    )


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds to each help text its default, except for what simply is not given."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)
