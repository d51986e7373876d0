"""The page with real peers behind it: what the fake ones of the other tests are made up after."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.helpers.browser import CHROMIUM, FLAGS, Visit
from tests.helpers.slow_join import launch_slow
from tests.helpers.swarm import Swarm, swarm

# Four peers on two cores, perhaps beside other tests: they commit rounds in their own time.
PATIENCE_MS = 600_000.0

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (on Debian: apt-get install chromium)"),
]


@contextmanager
def monitor(running: Swarm) -> Iterator[str]:
    """The address of the page of a monitor of this swarm."""
    command = [sys.executable, "-m", "spes_swarm.monitor", "--initial-peers", running.peers[0].address()]
    command += ["--web", "127.0.0.1:0", "--history", str(running.directory / "history.sqlite")]
    with (
        (running.directory / "monitor.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stderr is not None
        try:
            told = []
            for line in process.stderr:
                told.append(line)
                if "http://" in line:
                    yield "http://" + line.partition("http://")[2].strip()
                    break
            else:
                raise AssertionError(f"the monitor ended: {told}")
        finally:
            process.terminate()
            process.stderr.read()
            assert process.wait(PATIENCE_MS / 1000) == 0


def test_real_peers_are_seen_to_learn_die_and_join(tmp_path: Path) -> None:
    with swarm(tmp_path) as running, sync_playwright() as playwright:
        running.launch = launch_slow(0.3)  # the browser needs the processor
        peers = running.start_all(4, "--data", "stdlib")
        peers[0].wait_for("round", timeout_s=PATIENCE_MS / 1000)
        expect.set_options(timeout=PATIENCE_MS)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=PATIENCE_MS)
        with monitor(running) as url:
            visit = Visit(browser)
            page = visit.page
            page.goto(url)
            page.evaluate("window.sameDocument = true")
            expect(page.locator("#peers-shown")).to_have_text("4 peers")
            expect(page.locator("#rounds tr").first).to_be_attached()
            newest = page.locator("#rounds tr th").first
            before = page.locator("figure.big canvas").screenshot()
            for _ in range(2):
                expect(newest).not_to_have_text(newest.text_content() or "")
            assert page.locator("figure.big canvas").screenshot() != before

            victim = peers[3]
            victim.kill()
            expect(page.locator("tr[data-state=late]")).to_have_count(1)
            expect(page.locator("#peers-shown")).to_have_text("3 peers")
            running.join("--data", "stdlib", name="newcomer")
            expect(page.locator("#peers-shown")).to_have_text("4 peers")
            expect(page.locator("tr[data-state=training]")).to_have_count(4)
            assert page.evaluate("window.sameDocument")
            assert visit.troubles == []
            browser.close()
