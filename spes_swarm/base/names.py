"""The one place where text that peers choose is sanitised, for every display.

A name may contain anything that its writer has signed: terminal escapes, rich markup, HTML, quotes that end an
attribute, bidi overrides, zero-width characters. `clean_name` removes all of it, so a display that forgets to escape is
ugly at worst.
"""

from __future__ import annotations

import unicodedata
from typing import Final

MAX_NAME_CHARS: Final = 40
FAULT_KIND: Final = r"^[a-z0-9_-]{1,24}$"  # needs no sanitising
_MAX_MARKS: Final = 2  # combining marks on one letter; more would cover the lines above

# Characters that are special to a terminal, rich, HTML, Markdown or a shell, and look-alikes that are not.
_LOOKALIKES: Final = str.maketrans(
    {"<": "‹", ">": "›", "&": "+", '"': "”", "'": "’", "`": "’", "\\": "∖", "[": "(", "]": ")", "$": "＄", "|": "¦"}
)
# Invisible characters that Python counts as printable (Unicode: Default_Ignorable_Code_Point, and blank glyphs).
_INVISIBLE: Final = frozenset(
    {
        0x034F,  # combining grapheme joiner
        0x115F,  # Hangul fillers
        0x1160,
        0x17B4,  # Khmer inherent vowels
        0x17B5,
        *range(0x180B, 0x1810),  # Mongolian variation selectors
        0x2800,  # blank Braille pattern
        0x3164,  # Hangul fillers
        *range(0xFE00, 0xFE10),  # variation selectors
        0xFFA0,
        *range(0xFFF0, 0xFFF9),
        *range(0xE0000, 0xE1000),  # tags and more variation selectors
    }
)


def clean_name(text: str) -> str:
    """Reduces a name to one line of visible text without markup, at most 40 characters; empty if nothing is left."""
    kept: list[str] = []
    marks = 0
    for char in unicodedata.normalize("NFC", text[: 4 * MAX_NAME_CHARS]):
        if char.isspace():
            kept.append(" ")
        elif not char.isprintable() or ord(char) in _INVISIBLE:
            continue  # controls, bidi overrides, zero width, private use, surrogates, unassigned
        elif unicodedata.category(char).startswith("M"):
            marks += 1
            if marks <= _MAX_MARKS and kept and kept[-1] != " ":
                kept.append(char)
            continue
        else:
            kept.append(char)
        marks = 0
    return " ".join("".join(kept).translate(_LOOKALIKES).split())[:MAX_NAME_CHARS].rstrip()
