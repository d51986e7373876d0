"""How a command ends: its exit code, and one line on stderr that says why."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spes_swarm.base import log
from spes_swarm.base.arguments import exit_code
from spes_swarm.base.errors import ConfigError


def failing(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("--x: found 1\nfrom \x1b[31ma peer"), 2, "it: --x: found 1 from  [31ma peer\n"),
        (FileNotFoundError(2, "No such file or directory", "/x"), 2, "it: [Errno 2] No such file or directory: '/x'\n"),
        (KeyboardInterrupt(), 130, "it: interrupted\n"),
    ],
)
def test_a_failure_is_one_line(capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str) -> None:
    assert exit_code("it", failing(error)) == code
    assert capsys.readouterr() == ("", line)


def test_a_command_without_a_code_has_succeeded(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("it", lambda: None) == 0
    assert exit_code("it", lambda: 3) == 3
    assert capsys.readouterr() == ("", "")


def test_an_error_of_the_program_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_code("it", failing(ZeroDivisionError()))


def test_an_error_of_the_system_names_the_log_that_has_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "_path", "log.txt")
    assert exit_code("it", failing(OSError(24, "Too many open files"))) == 2
    assert capsys.readouterr().err == "it: [Errno 24] Too many open files; traceback in log.txt\n"
