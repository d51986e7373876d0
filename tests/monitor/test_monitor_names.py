"""Names are what strangers put on other people's screens."""

from __future__ import annotations

import io
import unicodedata
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from spes_swarm.base.names import clean_name


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("laptop", "laptop"),
        ("Zoë's laptop 🚀", "Zoë’s laptop 🚀"),
        ("Ünïcödé 機械 машина", "Ünïcödé 機械 машина"),
        ("\x1b[31mred\x1b[0m", "(31mred(0m"),
        ("\x9b2Jgone", "2Jgone"),
        ("two\r\nlines\tand tab", "two lines and tab"),
        ("[bold]loud[/bold]", "(bold)loud(/bold)"),
        ("<script>alert(1)</script>", "‹script›alert(1)‹/script›"),
        ("\" onload='x'", "” onload=’x’"),
        ("\u202eevil\u202c \u2066x\u2069", "evil x"),
        ("a\u200bb\u200dc\u2060d\ufeffe\u00adf", "abcdef"),
        ("\u3164\u2800\u115f", ""),
        ("\ud800", ""),
        ("\ue000\U000f0000", ""),
        ("a" + "\u0301" * 30, "á\u0301\u0301"),
        ("  spaced \u00a0 out\u2003", "spaced out"),
        ("x" * 100, "x" * 40),
        ("", ""),
    ],
)
def test_examples(name: str, shown: str) -> None:
    assert clean_name(name) == shown


class Elements(HTMLParser):
    """Notes whatever is not plain text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.found.append(tag)


@given(st.text(st.characters(exclude_categories=[]), max_size=60))
def test_whatever_the_name_it_is_one_line_of_plain_visible_text(name: str) -> None:
    shown = clean_name(name)
    assert len(shown) <= 40
    assert shown == clean_name(shown)
    assert not set("<>&\"'`\\[]\n\r\t") & set(shown)
    assert all(unicodedata.category(char)[0] != "C" for char in shown)
    assert shown == shown.strip()
    shown.encode()


@given(st.text(max_size=60))
def test_no_markup_survives_in_a_page_or_a_terminal_that_forgets_to_escape(name: str) -> None:
    page = Elements()
    page.feed(f'<p title="{clean_name(name)}">{clean_name(name)}</p>')
    page.close()
    assert page.found == ["p", "p"]
    screen = io.StringIO()
    Console(file=screen, force_terminal=True, width=200, highlight=False, emoji=False).print(clean_name(name))
    assert "\x1b" not in screen.getvalue()
