"""The documentation: its site builds, its links lead somewhere, and its commands have the flags that they use."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Not the notebook: its commands are those of the commits that it names.
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "experiments.md")]


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    """Strictly: without a page that the navigation lacks, or a link to a page or a heading that is not there."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "-f", str(ROOT / ".mkdocs.yml"), "-d", str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "tutorials" / "friends" / "index.html").exists()


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower().replace(" ", "-")


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_of_pages_outside_the_site_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    assert links
    for link in links:
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in map(_slug, headings), link


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def _commands() -> list[tuple[str, str, list[str]]]:
    """Every `python -m spes_swarm.NAME` in the pages: page, name and flags."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in text.splitlines():
            for name, rest in re.findall(r"python -m spes_swarm\.(\w+)((?: (?!#)[^`|]*)?)", line):
                flags = re.findall(r"(?<=\s)--[a-z][a-z-]*", rest.partition(" # ")[0])
                found.append((str(page.relative_to(ROOT)), name, flags))
    return found


def test_commands_in_the_pages_have_the_flags_that_they_use() -> None:
    commands = _commands()
    assert len({name for _, name, _ in commands}) > 8
    helps: dict[str, str] = {}
    for page, name, flags in commands:
        if name not in helps:
            shown = subprocess.run(
                [sys.executable, "-m", f"spes_swarm.{name}", "--help"], capture_output=True, text=True, check=False
            )
            assert shown.returncode == 0, f"{page}: {name}: {shown.stderr}"
            helps[name] = shown.stdout
        for flag in flags:
            assert re.search(rf"{flag}(?![\w-])", helps[name]), f"{page}: spes_swarm.{name} has no {flag}"
