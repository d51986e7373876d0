"""Takes screenshots of the monitor's page; the first of these commands made the one in the README.

    .venv/bin/python scripts/monitor_screenshot.py --synthetic 4 --rounds 120 --full-page    # the same each time
    .venv/bin/python scripts/monitor_screenshot.py --url http://127.0.0.1:8080/     # of a running monitor
    .venv/bin/python scripts/monitor_screenshot.py --swarm 4 --output x.png         # of real peers, started for it
    .venv/bin/python scripts/monitor_screenshot.py --synthetic 1000 --experts 1024 --width 390 --theme dark

Needs Chromium (on Debian: apt-get install chromium) and the development tools (`scripts/setup.sh`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, Literal

from PIL import Image
from playwright.async_api import Error, async_playwright

from scripts.testing.local_peer import LocalPeer
from scripts.testing.synthetic_swarm import NAMES, SyntheticSwarm
from spes_swarm.base.errors import UserError
from spes_swarm.monitor.source import HeldState
from spes_swarm.monitor.views.web import listen, serve

ROOT: Final = Path(__file__).resolve().parent.parent
# Without these flags Chromium looks up and updates its own components.
CHROMIUM_FLAGS: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
Theme = Literal["light", "dark"]


def find_chromium() -> str | None:
    """The path of this machine's browser: $CHROMIUM, or the first one on PATH; None if there is none."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if name and (path := shutil.which(name))), None)


@contextmanager
def swarm_monitor(num_peers: int) -> Iterator[str]:
    """Runs a monitor of the quickstart run, trained by peers on this machine; yields its URL."""
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="spes-picture-")))
        common = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--num-threads", "1", "--wait-for-peers", str(num_peers)]
        peers: list[LocalPeer] = []
        for name in NAMES[:num_peers]:
            through = ["--initial-peers", peers[0].address()] if peers else []
            peers.append(cleanup.enter_context(LocalPeer(folder / name, [*common, "--name", name, *through])))
        command = [sys.executable, "-m", "spes_swarm.monitor", "--initial-peers", peers[0].address()]
        command += ["--web", "127.0.0.1:0", "--history", str(folder / "history.sqlite")]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        cleanup.enter_context(process)  # waits for its end
        cleanup.callback(process.terminate)
        assert process.stderr is not None
        for line in process.stderr:
            if "http://" in line:
                yield "http://" + line.partition("http://")[2].strip()
                return
            print(line, end="", file=sys.stderr)
        raise UserError("the monitor ended before it served its page")


@asynccontextmanager
async def synthetic_monitor(num_peers: int, num_experts: int, rounds: int, incidents: bool) -> AsyncIterator[str]:
    """Runs a monitor of a synthetic swarm, frozen after some rounds; yields its URL."""
    swarm = SyntheticSwarm(num_peers=num_peers, num_experts=num_experts)
    swarm.advance(rounds * 20.0 + 12.0)
    if incidents:
        dead, wrong = (peer.peer_id for peer in swarm.state().peers[:2])
        swarm.kill(dead)
        swarm.corrupt(wrong)
        swarm.starve(5)
        swarm.refused = {"forged": 3, "malformed": 12}
        swarm.advance(17.0)
        swarm.join("newcomer")
    bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    source = HeldState(swarm.state(), swarm.history())
    serving = asyncio.create_task(serve(source, listen("127.0.0.1", 0), announce=bound.set_result))
    try:
        yield await bound
    finally:
        serving.cancel()
        await asyncio.wait((serving,))


async def photograph(
    url: str, output: Path, *, width: int, height: int, theme: Theme, full_page: bool, rounds: int = 0
) -> None:
    """Opens the page, waits until it shows a state and at least `rounds` rounds, and writes a PNG."""
    executable = find_chromium()
    if executable is None:
        raise UserError("Chromium not found (on Debian: apt-get install chromium; or set CHROMIUM)")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=list(CHROMIUM_FLAGS))
        page = await browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
        await page.emulate_media(reduced_motion="reduce", color_scheme=theme)
        await page.goto(url)
        await page.locator("#link:not([data-link=connecting])").wait_for()
        await page.locator("figure canvas").first.wait_for()
        while int((await page.locator("#round").inner_text()).replace(",", "")) < rounds:
            await page.wait_for_timeout(1_000)
        await page.wait_for_timeout(800)  # the next frames draw the charts
        output.parent.mkdir(parents=True, exist_ok=True)
        await page.screenshot(path=output, full_page=full_page)
        await browser.close()
    # The page has few colours: a palette halves the file without a visible difference.
    with Image.open(output) as picture:
        palette = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    palette.save(output, optimize=True)


async def _run(arguments: argparse.Namespace) -> None:
    names = ("output", "width", "height", "theme", "full_page")
    options = {name: getattr(arguments, name) for name in names}
    if arguments.url is not None:
        await photograph(arguments.url, **options)
    elif arguments.swarm is not None:
        with swarm_monitor(arguments.swarm) as url:
            await photograph(url, **options, rounds=arguments.rounds)
    else:
        made_up = (arguments.synthetic, arguments.experts, arguments.rounds, arguments.incidents)
        async with synthetic_monitor(*made_up) as url:
            await photograph(url, **options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--url", help="page of a running monitor, live or with --replay")
    source.add_argument("--swarm", type=int, metavar="PEERS", help="real peers on this machine, started for it")
    source.add_argument("--synthetic", type=int, metavar="PEERS", help="a synthetic swarm with this many peers")
    parser.add_argument("--experts", type=int, default=8, help="experts of the synthetic swarm")
    parser.add_argument("--rounds", type=int, default=60, help="rounds before the screenshot")
    parser.add_argument("--incidents", action="store_true", help="add late and differing peers to the synthetic swarm")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "monitor.png")
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=1180)
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--full-page", action="store_true", help="capture the whole page, not only the viewport")
    arguments = parser.parse_args()
    try:
        asyncio.run(_run(arguments))
    except (UserError, Error) as error:
        print(f"monitor_screenshot: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(f"{arguments.output}: {arguments.output.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
