"""The documentation: its site builds, and its links lead somewhere; tests/config/test_command_line.py has its flags."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    """Strictly: without a page that the navigation lacks, or a link to a page or a heading that is not there."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "-f", str(ROOT / ".mkdocs.yml"), "-d", str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "tutorials" / "friends" / "index.html").exists()


def test_figures_are_shown_load_nothing_and_follow_the_colour_scheme() -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    assert "```mermaid" not in shown  # the site would load a script from another host
    for figure in (ROOT / "docs" / "figures").iterdir():
        assert f"figures/{figure.name})" in shown
        text = figure.read_text(encoding="utf-8")
        assert "prefers-color-scheme: dark" in text
        assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]


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
