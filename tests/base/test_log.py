"""What goes to a peer's log, and what does not."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import re
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spes_swarm import publish
from spes_swarm.base import log
from spes_swarm.base.errors import LeftEarlyError, RankError, UserError
from spes_swarm.publishing.publication import PUBLICATION_FILE
from spes_swarm.training.ranks.follower import run_orders
from tests.helpers.lone_trainer import run_config
from tests.helpers.rank_trainer import replica

_LOGGER = logging.getLogger("spes_swarm.test")
_LIBRARY = logging.getLogger("some.library")


@pytest.fixture(autouse=True)
def own_context(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The log of a process is global; tests leave it as it was."""
    monkeypatch.setattr(log, "context", log.Context())
    levels = {name: logging.getLogger(name).level for name in ("spes_swarm", "hivemind")}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_a_line_says_when_where_and_what(tmp_path: Path) -> None:
    with log.writing(tmp_path / "log.txt", "info", "trainer"):
        log.context.run, log.context.peer, log.context.round = "tiny-1234", "QmAbcdef", lambda: 7
        _LOGGER.info("hello %d", 1)
    (line,) = (tmp_path / "log.txt").read_text().splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO trainer run=tiny-1234 round=7 peer=QmAbcdef "
        r"spes_swarm\.test: hello 1",
        line,
    )


def test_a_rank_and_a_publisher_name_run_and_peer_too(tmp_path: Path) -> None:
    order = dataclasses.replace(replica(run_config()), output_dir=str(tmp_path), log=("run-1", "abcdefgh", "info"))

    def no_device(wanted: object) -> None:
        raise RankError("planted")

    group: Any = SimpleNamespace(next_order=lambda: order, placement=SimpleNamespace(rank=3), own_device=no_device)
    with pytest.raises(RankError):
        run_orders(group)
    (tmp_path / PUBLICATION_FILE).touch()
    arguments = ["--to", "nowhere", "--due", "8", "--log", "run-1", "abcdefgh", "info"]
    assert publish.main([str(tmp_path), *arguments]) == 2
    lines = [line for line in (tmp_path / "log.txt").read_text().splitlines() if " ERROR " in line]
    assert " rank 3 run=run-1 round=0 peer=abcdefgh " in lines[0]
    assert " publisher run=run-1 round=8 peer=abcdefgh " in lines[1]


@pytest.mark.parametrize(
    ("level", "own", "others"),
    [("debug", 4, 2), ("info", 3, 2), ("warning", 2, 2), ("error", 1, 1)],
)
def test_the_level_is_that_of_this_package_and_others_begin_with_warnings(
    tmp_path: Path, level: str, own: int, others: int
) -> None:
    with log.writing(tmp_path / "log.txt", level, "trainer"):
        for logger in (_LOGGER, _LIBRARY):
            for method in (logger.debug, logger.info, logger.warning, logger.error):
                method("said")
    text = (tmp_path / "log.txt").read_text()
    assert text.count("spes_swarm.test: said") == own
    assert text.count("some.library: said") == others


def test_an_error_that_ends_the_process_is_logged_with_its_traceback_and_causes(tmp_path: Path) -> None:
    def open_data() -> None:
        try:
            raise KeyError("the cause")
        except KeyError as exc:
            raise UserError("no data") from exc

    with pytest.raises(UserError), log.writing(tmp_path / "log.txt", "info", "trainer"):
        open_data()
    text = (tmp_path / "log.txt").read_text()
    assert "KeyError: 'the cause'" in text
    assert "in open_data" in text
    assert text.rstrip().endswith("UserError: no data")
    assert log.where_to_read() == f"; traceback in {tmp_path / 'log.txt'}"


def test_leaving_early_is_no_error(tmp_path: Path) -> None:
    with pytest.raises(LeftEarlyError), log.writing(tmp_path / "log.txt", "info", "trainer"):
        raise LeftEarlyError("stopped while joining")
    assert (tmp_path / "log.txt").read_text() == ""


def test_warnings_of_libraries_are_logged_and_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log.writing(tmp_path / "log.txt", "info", "trainer"), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("tensor cores are not enabled", UserWarning, stacklevel=1)
    said = (tmp_path / "log.txt").read_text()  # hivemind, once imported, calls the level WARN
    assert re.search(r" WARN(ING)? trainer run=- .* py\.warnings: .*UserWarning: tensor cores are not enabled", said)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_importing_hivemind_prints_nothing() -> None:
    program = """
from spes_swarm.base.log import quiet_import_of_hivemind
with quiet_import_of_hivemind():
    import spes_swarm.network.link.rpc
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_thread_that_fails_is_logged_and_named_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ValueError("planted")

    with log.writing(tmp_path / "log.txt", "info", "trainer"):
        thread = threading.Thread(target=fail, name="checkpoint")
        thread.start()
        thread.join()
    assert "in fail" in (tmp_path / "log.txt").read_text()
    said = capsys.readouterr().err
    assert said == f"unexpected error in thread checkpoint: ValueError('planted'); traceback in {tmp_path}/log.txt\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("token hf_abcdefghijklmnop failed", "token (secret) failed"),
        ("Authorization: Bearer abc.def-ghi_jkl", "Authorization: Bearer (secret)"),
        ("GET https://host/x?X-Amz-Signature=0123456789abcdef&y=1", "GET https://host/x?X-Amz-Signature=(secret)&y=1"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nafter", "(secret)\n    after"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE, and no end", "(secret)"),
        ("the variable's value is s3cr3t-v4lue", "the variable's value is (secret)"),
        ("half_of_it is no token", "half_of_it is no token"),
    ],
    ids=["hub", "bearer", "signature", "key", "cut key", "variable", "none"],
)
def test_secrets_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, shown: str) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-v4lue")
    with log.writing(tmp_path / "log.txt", "info", "trainer"):
        _LOGGER.info("%s", text)
    assert (tmp_path / "log.txt").read_text().partition("spes_swarm.test: ")[2] == shown + "\n"


def test_text_from_others_cannot_pass_for_a_line_of_the_log(tmp_path: Path) -> None:
    with log.writing(tmp_path / "log.txt", "info", "trainer"):
        _LOGGER.info("fault: %s", "x\n2026-01-01T00:00:00.000Z INFO trainer\r\x1b[2J\x85\u2028\ttab")
    said = (tmp_path / "log.txt").read_bytes().decode().partition("fault: ")[2]
    assert said == "x\n    2026-01-01T00:00:00.000Z INFO trainer\\r\\x1b[2J\\x85\\u2028\ttab\n"


def _write_many(number: int, lines: int, together: Barrier | None = None) -> None:
    log.enter_process(f"process{number}", lambda: None)
    for line in range(lines):
        if together is not None and line % 50 == 0:
            together.wait()
        _LOGGER.info("line %d of %d", line, number)


def test_processes_share_a_file_that_is_rotated_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MAX_BYTES", 20_000)
    num_lines, num_processes = 500, 3
    with log.writing(tmp_path / "log.txt", "info", "trainer"):
        fork = multiprocessing.get_context("fork")
        together = fork.Barrier(num_processes)  # or else the first may be done, and its lines gone, before the last
        children = [
            fork.Process(target=_write_many, args=(number, num_lines, together)) for number in range(num_processes)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join()
            assert child.exitcode == 0
        written = sorted(tmp_path.glob("log*.txt"))
        assert [path.name for path in written] == ["log.1.txt", "log.2.txt", "log.3.txt", "log.txt"]
        lines = [line for path in written for line in path.read_text().splitlines()]
        assert all(path.stat().st_size < 20_000 + 1000 for path in written)
    # Nothing is torn, and of each process the lines that are left are its last ones.
    for number in range(num_processes):
        own = [int(m[1]) for line in lines if (m := re.search(rf" process{number} .*: line (\d+) of {number}$", line))]
        assert sorted(own) == list(range(num_lines - len(own), num_lines))
        assert len(own) > num_lines / 10
    assert len(lines) < num_lines * num_processes


def test_a_log_that_cannot_be_written_any_more_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "peer"
    directory.mkdir()
    with log.writing(directory / "log.txt", "info", "trainer"):
        (directory / "log.txt").unlink()
        directory.rmdir()
        _LOGGER.info("lost")
        directory.mkdir()
        _LOGGER.info("there again")
    assert "there again" in (directory / "log.txt").read_text()
    assert capsys.readouterr().err == ""


def test_a_file_that_cannot_be_renamed_keeps_no_process_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "MAX_BYTES", 100)
    (tmp_path / "log.2.txt").touch()
    (tmp_path / "log.3.txt").mkdir()
    with log.writing(tmp_path / "log.txt", "info", "trainer"):
        _LOGGER.info("%s", 100 * "x")
        child = multiprocessing.get_context("fork").Process(target=_write_many, args=(1, 2))
        child.start()
        child.join(60)
        ended = child.exitcode
        child.kill()
    assert ended == 0
    assert "line 1 of 1" in (tmp_path / "log.txt").read_text()


def test_a_full_disk_ends_no_session_not_even_when_the_log_is_closed() -> None:
    with log.writing(Path("/dev/full"), "info", "trainer"):
        _LOGGER.info("lost")


def test_stacks_never_go_to_another_file(tmp_path: Path) -> None:
    directory, other = tmp_path / "peer", tmp_path / "other"
    directory.mkdir()
    reported = threading.Event()
    with log.writing(directory / "log.txt", "info", "trainer"):
        log.context.report = reported.set
        shutil.rmtree(directory)
        _LOGGER.info("lost")
        with other.open("w"):  # has the descriptor that the log had
            signal.raise_signal(signal.SIGUSR1)
            assert reported.wait(60)
    assert other.read_bytes() == b""


def test_a_log_that_cannot_be_opened_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"log\.txt cannot be written: No such file"):
        log.writing(tmp_path / "missing" / "log.txt", "info", "trainer").__enter__()


def test_a_signal_writes_all_stacks_and_the_report(tmp_path: Path) -> None:
    reported = threading.Event()
    before = signal.getsignal(signal.SIGUSR1)
    with log.writing(tmp_path / "log.txt", "info", "trainer"):
        log.context.report = reported.set
        signal.raise_signal(signal.SIGUSR1)
        assert reported.wait(60)
    assert "test_a_signal_writes_all_stacks_and_the_report" in (tmp_path / "log.txt").read_text()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_libraries_write_to_the_log_and_nowhere_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("some.noisy.library")
    logger.addHandler(logging.StreamHandler())
    logger.propagate = False
    log.divert("some.noisy.library")
    logger.warning("unheard")
    with log.writing(tmp_path / "log.txt", "info", "trainer"):
        logger.warning("heard")
    assert "heard" in (tmp_path / "log.txt").read_text()
    assert capsys.readouterr().err == ""
