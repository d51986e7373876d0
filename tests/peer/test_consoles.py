"""Consoles that cannot show every character: what they cannot show is replaced, and nothing ends because of it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from spes_swarm.base.arguments import exit_code
from spes_swarm.peer.panel import PeerConsole
from spes_swarm.training.setup import TrainingStatus
from tests.helpers.repository import ROOT
from tests.helpers.swarm import REASONABLE_S, TINY_RUN

TEXT = "1.246 \N{PLUS-MINUS SIGN} 0.031 \N{LLAMA} \udcff"


@pytest.fixture(autouse=True)
def _no_captured_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest also captures what does not propagate, and pytest-xdist cannot send a lone surrogate."""
    monkeypatch.setattr(logging.getLogger("spes_swarm.peer.panel"), "disabled", True)


@contextlib.contextmanager
def ascii_console(errors: str = "strict") -> Iterator[io.BytesIO]:
    written = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(written, encoding="ascii", errors=errors, write_through=True)):
        yield written


def test_a_peer_speaks_to_any_console() -> None:
    with ascii_console() as written:
        console = PeerConsole()
        console.say(TEXT)
        console.command(TEXT)
        assert written.getvalue() == b"1.246 ? 0.031 ? ?\n  1.246 ? 0.031 ? ?\n"


def test_the_panel_fits_any_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    status = TrainingStatus(eval_loss=1.246, eval_loss_stderr=0.031, eval_round=1)
    with ascii_console() as written:
        with PeerConsole().live(status, TEXT, Path("metrics.jsonl")):
            pass
        assert b"1.246 ? 0.031 (round 1)" in written.getvalue()


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter with LC_ALL=C
def test_a_command_prints_to_any_console(errors: str) -> None:
    with ascii_console(errors) as written:
        assert exit_code("any", lambda: print(TEXT)) == 0
        assert written.getvalue() == b"1.246 ? 0.031 ? ?\n"


@contextlib.contextmanager
def lost_outputs() -> Iterator[tuple[int, int]]:
    """Yields a pipe that nobody reads any more, and a terminal that has been closed."""
    reader, pipe = os.pipe()
    shown, terminal = pty.openpty()
    os.close(reader)
    os.close(shown)
    try:
        yield pipe, terminal
    finally:
        os.close(pipe)
        os.close(terminal)


@pytest.mark.parametrize("lost", ["pipe", "terminal", "disk"])
def test_a_peers_console_outlives_its_output(lost: str, capfd: pytest.CaptureFixture[str]) -> None:
    with lost_outputs() as (pipe, terminal), Path("/dev/full").open("wb") as disk:
        number = {"pipe": pipe, "terminal": terminal, "disk": disk.fileno()}[lost]
        with os.fdopen(os.dup(number), "w") as output:
            with contextlib.redirect_stdout(output):
                console = PeerConsole()
                console.say(TEXT)
                console.command(TEXT)
                with console.live(TrainingStatus(), TEXT, Path("metrics.jsonl")):
                    pass
            output.flush()  # as Python does when it ends
    assert capfd.readouterr().err == "join: standard output cannot be written; training goes on, see metrics.jsonl\n"


_SPEAKS = """
import sys
from spes_swarm.peer.output import keep_output

keep_output()
kept = open(sys.argv[1], "w")
print(sys.argv[2])
print(sys.argv[2], file=sys.stderr, flush=True)
sys.stderr.write(sys.argv[2])
sys.stdout.flush()
print(sys.argv[2])
kept.write("it goes on")
"""


@pytest.mark.parametrize(
    "redirected",
    [
        ">&-",
        "2>&-",
        "<&- >&- 2>&-",
        ">/dev/full",
        "2>/dev/full",
        ">/dev/full 2>&1",
        ">&PIPE",
        "2>&PIPE",
        ">&PIPE 2>&1",
        "<&TERMINAL >&TERMINAL 2>&1",
        ">&PIPE 2>&-",
    ],
)
@pytest.mark.parametrize(
    "environment",
    [{}, {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "ascii:strict"}],
    ids=["plain", "unbuffered ascii"],
)
def test_a_process_outlives_its_output(tmp_path: Path, redirected: str, environment: dict[str, str]) -> None:
    kept = tmp_path / "kept"
    with lost_outputs() as (pipe, terminal):
        form = redirected.replace("PIPE", str(pipe)).replace("TERMINAL", str(terminal))
        done = subprocess.run(
            ["/bin/bash", "-c", f'exec "$@" {form}', "bash", sys.executable, "-c", _SPEAKS, kept, "\N{LLAMA}"],
            cwd=ROOT,
            env={**os.environ, **environment},
            pass_fds=(pipe, terminal),
            capture_output=True,
            timeout=REASONABLE_S,
            check=False,
        )
    assert done.returncode == 0
    assert kept.read_text(encoding="utf-8") == "it goes on"  # and nothing that was printed


@pytest.mark.parametrize("redirected", ["2>&TERMINAL", ">/dev/full 2>/dev/full"])
def test_a_mistake_that_cannot_be_reported_has_its_exit_code(redirected: str) -> None:
    with lost_outputs() as (_, terminal):
        command = f'exec "$@" {redirected.replace("TERMINAL", str(terminal))}'
        join = ["bash", sys.executable, "-m", "spes_swarm.join", "--bad"]
        done = subprocess.run(["/bin/bash", "-c", command, *join], cwd=ROOT, pass_fds=(terminal,), check=False)
    assert done.returncode == 2


_TRAINS_AND_EXPORTS = """
import sys
from spes_swarm import export, join

*arguments, output, model = sys.argv[1:]
code = join.main([*arguments, "--output-dir", output])
sys.exit(code or export.main([output, model]))
"""


@pytest.mark.slow
def test_a_peer_trains_and_is_exported_without_utf_8(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump({"run": TINY_RUN}), encoding="utf-8")
    output, model = (os.fsencode(tmp_path) + name for name in (b"/\xff \xf0\x9f\xa6\x99", b"/model \xff \xc2\xb1"))
    name = "Zo\N{LATIN SMALL LETTER E WITH ACUTE} \N{LLAMA}"
    arguments = ["--config", str(run), "--name", name, "--max-rounds", "1", "--num-threads", "1"]
    arguments += ["--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", _TRAINS_AND_EXPORTS, *arguments, output, model],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **locale},
        capture_output=True,
        timeout=REASONABLE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"round 1: 1 peer, " in done.stdout
    assert b"round 1 of " in done.stdout
    assert done.stdout.isascii()
