"""The commands of the README and of the tutorials do what the text around them says, run from the text itself."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.testing.local_peer import PATIENCE_S
from spes_swarm import export, invite
from tests.helpers.repository import ROOT
from tests.helpers.swarm import Swarm, swarm

PAGES = {page.name: page for page in [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]}
FOLLOWED = ["README.md", "two-machines.md", "friends.md"]

# How commands that are not run begin, and why they are not. A new command is run, or it needs a line here.
NOT_RUN = {
    "git clone": "the repository is here",
    "cd": "it goes to where the commands are run",
    "bash scripts/setup.sh": "whoever runs the tests has run it",
    "bash scripts/demo.sh": "it installs, and takes minutes; it is run by hand",
    "sbatch": "tests/test_slurm.py runs the script that it submits",
    ".venv/bin/python -m spes_swarm.plan --config configs/spes-2b.yaml": "tests/peer/memory plans such steps",
    ".venv/bin/python -m spes_swarm.monitor --initial-peers /ip4/10.0.0.5": "of a cluster; as in two-machines.md",
    ".venv/bin/python -m spes_swarm.monitor --initial-peers /ip4/203.0.113.7": "test_monitor_web_swarm.py serves it",
    ".venv/bin/python -m spes_swarm.publish": "it needs the Hub; tests/publishing have a stand-in",
}
# What stands in a page for its reader's own address, run and invitation.
ADDRESS, RUN_ID, INVITATION = r"/ip4/[0-9.]+/tcp/[0-9]+/p2p/Qm\w+(\.\.\.)?", r"quickstart-[0-9a-f]+\.\.\.", r"spes1\.+"


def commands(page: Path) -> Iterator[list[str]]:
    """Yields the words of each shell command of a page."""
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        lines = ""
        for line in block.splitlines(keepends=True):
            lines += re.sub(r"\s+# .*", "", line)
            if line.endswith("\\\n") or lines.count("'") % 2:
                continue
            for command in lines.split(" && "):
                yield shlex.split(command.replace("\\\n", " "))
            lines = ""


def reason(words: list[str]) -> str | None:
    """Why a command is not run; None if it is."""
    return next((why for start, why in NOT_RUN.items() if " ".join(words).startswith(start)), None)


class Reader:
    """Follows a page on one machine, in a directory of its own."""

    def __init__(self, running: Swarm) -> None:
        self.running = running
        self.invitations: list[str] = []

    def own(self, word: str) -> str:
        """A word of a command, or what this reader has in its place."""
        if re.fullmatch(ADDRESS, word):
            return self.running.peers[0].address()
        if word == "/ip4/0.0.0.0/tcp/31337":  # another test may use that port
            return "/ip4/127.0.0.1/tcp/0"
        if re.fullmatch(INVITATION, word):
            return self.invitations[0]
        if self.running.peers and re.search(RUN_ID, word):
            word = re.sub(RUN_ID, self.running.peers[0].wait_for_text(r"\nrun (\S+)")[1], word)
        return str(self.running.directory / word) if word.startswith(("runs/", "texts/", "friends.yaml")) else word

    def follow(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        """Runs a command and checks what it does."""
        if words[1] == "-c":
            exec(words[2], {})
            assert capsys.readouterr().out.startswith("def main():\n")
            return
        module, arguments = words[2], [self.own(word) for word in words[3:]]
        if module == "spes_swarm.join":
            self.join(arguments)
        elif module == "spes_swarm.invite":
            assert invite.main(arguments) == 0
            self.invitations += re.findall(r"spes1\.\S+", capsys.readouterr().out)
        elif module == "spes_swarm.monitor":
            command = [sys.executable, "-m", module, *arguments]
            seen = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
            assert "2 peers, all agree" in seen.stdout
        elif module == "spes_swarm.export":
            for peer in self.running.peers:
                peer.wait_for("checkpoint")
            assert export.main(arguments) == 0
            capsys.readouterr()
        else:
            pytest.fail(f"{shlex.join(words)}: run it here, or say in NOT_RUN why not")

    def join(self, arguments: list[str]) -> None:
        """Starts a peer; all then commit a round together."""
        if "--announce-maddrs" in arguments:  # this machine does not have that address
            at = arguments.index("--announce-maddrs")
            del arguments[at : at + 2]
        if "--data" not in arguments:  # the standard library's source takes seconds to read
            arguments += ["--data", str(self.running.directory / "texts")]
        given = arguments.index("--output-dir") if "--output-dir" in arguments else None
        self.running.start("runs/peer" if given is None else arguments[given + 1], *arguments)
        for peer in self.running.peers:
            peer.wait_for("round", lambda event: event["peers"] == len(self.running.peers))


@pytest.mark.parametrize("page", PAGES)
def test_each_command_is_run_or_there_is_a_reason(page: str) -> None:
    for words in commands(PAGES[page]):
        assert reason(words) or (page in FOLLOWED and words[0] == ".venv/bin/python"), shlex.join(words)


@pytest.mark.swarm
@pytest.mark.parametrize("page", FOLLOWED)
def test_what_a_page_tells_works(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "some.txt").write_text("to be or not to be\n" * 5000, encoding="utf-8")
    text = PAGES[page].read_text(encoding="utf-8")
    for name, content in re.findall(r"`(\w+\.yaml)`.*?```yaml\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).write_text(content, encoding="utf-8")
    with swarm(tmp_path) as running:
        reader = Reader(running)
        for words in commands(PAGES[page]):
            if reason(words) is None:
                reader.follow(words, capsys)
        assert len(running.peers) == 2
