"""Takes pictures of the monitor's page, like the one in the README, which the first of these made.

    .venv/bin/python scripts/monitor_screenshot.py --swarm 4 --full-page            # of real peers, started for it
    .venv/bin/python scripts/monitor_screenshot.py --url http://127.0.0.1:8080/     # of a monitor that runs
    .venv/bin/python scripts/monitor_screenshot.py --synthetic 4                    # of a made-up swarm
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

from spes_swarm.base.errors import UserError
from spes_swarm.monitor.source import HeldState
from spes_swarm.monitor.views.web import listen, serve
from spes_swarm.monitor.views.web.synthetic import NAMES, SyntheticSwarm
from spes_swarm.testing.local_peer import LocalPeer

ROOT: Final = Path(__file__).resolve().parent.parent
# Chromium looks up and updates things of its own unless told not to.
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
    """The browser of this machine: $CHROMIUM, or what is on the path."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if name and (path := shutil.which(name))), None)


@contextmanager
def swarm_monitor(num_peers: int) -> Iterator[str]:
    """The address of a monitor of the quickstart run, trained by peers on this machine."""
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
        cleanup.enter_context(process)  # waits for it
        cleanup.callback(process.terminate)
        assert process.stderr is not None
        for line in process.stderr:
            if "http://" in line:
                yield "http://" + line.partition("http://")[2].strip()
                return
            print(line, end="", file=sys.stderr)
        raise UserError("the monitor ended")


@asynccontextmanager
async def synthetic_monitor(num_peers: int, num_experts: int, rounds: int, incidents: bool) -> AsyncIterator[str]:
    """The address of a monitor of a made-up swarm that has been running for a while, and stands still."""
    swarm = SyntheticSwarm(num_peers=num_peers, num_experts=num_experts)
    swarm.advance(rounds * 20.0 + 12.0)
    if incidents:
        dead, wrong = (peer.peer_id for peer in swarm.state().peers[:2])
        swarm.kill(dead)
        swarm.corrupt(wrong)
        swarm.refused = {"bad_signature": 3, "malformed": 12}
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
    """Opens the page, waits until it shows a state and so many rounds, and writes a PNG."""
    executable = find_chromium()
    if executable is None:
        raise UserError("no Chromium here (on Debian: apt-get install chromium; or set CHROMIUM)")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=list(CHROMIUM_FLAGS))
        page = await browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
        await page.emulate_media(reduced_motion="reduce", color_scheme=theme)
        await page.goto(url)
        await page.locator("#link:not([data-link=connecting])").wait_for()
        await page.locator("figure canvas").first.wait_for()
        while int((await page.locator("#round").inner_text()).replace(",", "")) < rounds:
            await page.wait_for_timeout(1_000)
        await page.wait_for_timeout(800)  # the charts are drawn in the frames that follow
        output.parent.mkdir(parents=True, exist_ok=True)
        await page.screenshot(path=output, full_page=full_page)
        await browser.close()
    # Screens have few colours: a palette halves the file, and nobody sees a difference.
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
    source.add_argument("--url", help="the page of a monitor that runs, live or with --replay")
    source.add_argument("--swarm", type=int, metavar="PEERS", help="real peers on this machine, started for it")
    source.add_argument("--synthetic", type=int, metavar="PEERS", help="a made-up swarm with so many peers")
    parser.add_argument("--experts", type=int, default=8, help="experts of the made-up swarm")
    parser.add_argument("--rounds", type=int, default=60, help="rounds before the picture")
    parser.add_argument("--incidents", action="store_true", help="some peers of the made-up swarm are in trouble")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "monitor.png")
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=1180)
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--full-page", action="store_true", help="all of the page, however high")
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
