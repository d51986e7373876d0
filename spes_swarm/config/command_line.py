"""The parser of all commands: its mistakes are one line, and an unknown flag leads to what was meant."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from itertools import takewhile
from typing import Any, NoReturn

from spes_swarm.base.errors import ConfigError
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
