"""The one place where text that peers choose becomes harmless, whatever shows it later.

A name may hold anything that its writer has signed: terminal escapes, rich markup, HTML, quotes that end an attribute,
characters that reverse the text around them or that take no room. What comes out of here has none of that, so that a
display that forgets to escape is ugly at worst.
"""

from __future__ import annotations

import unicodedata
from typing import Final

MAX_NAME_CHARS: Final = 40
_MAX_MARKS: Final = 2  # on one letter; more climb over the lines above

# What means something to a terminal, to rich, to HTML, to Markdown or to a shell, with a look-alike that does not.
_LOOKALIKES: Final = str.maketrans(
    {"<": "‹", ">": "›", "&": "+", '"': "”", "'": "’", "`": "’", "\\": "∖", "[": "(", "]": ")", "$": "＄", "|": "¦"}
)
# Invisible characters that Python counts as printable (Unicode: Default_Ignorable_Code_Point, and blanks with a shape).
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
    """A name that is one line of visible text, at most 40 characters, without markup; empty if nothing is left."""
    kept: list[str] = []
    marks = 0
    for char in unicodedata.normalize("NFC", text[: 4 * MAX_NAME_CHARS]):
        if char.isspace():
            kept.append(" ")
        elif not char.isprintable() or ord(char) in _INVISIBLE:
            continue  # controls, bidi overrides, zero width, private use, surrogates, what is not assigned
        elif unicodedata.category(char).startswith("M"):
            marks += 1
            if marks <= _MAX_MARKS and kept and kept[-1] != " ":
                kept.append(char)
            continue
        else:
            kept.append(char)
        marks = 0
    return " ".join("".join(kept).translate(_LOOKALIKES).split())[:MAX_NAME_CHARS].rstrip()
