"""Tokenises the examples of a streamed data set: documents of text, or conversations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from spes_swarm.data.chat import ChatTemplate, tokenised_chat
from spes_swarm.data.files.tables import without_nulls
from spes_swarm.data.readers import Broken
from spes_swarm.data.sharding import encoded_parts
from spes_swarm.data.streaming.rows import Unusable, has_surrogates
from spes_swarm.data.tokenizer import TokenArray, Tokenizer


class Preparing:
    """Tokenises examples; counts unusable ones by kind (see readers.py, chat.py and rows.py).

    Args:
        tokenizer: of the run.
        is_chat: whether examples are records with conversations instead of texts.
        name: of the data set.
        say: gets the counts when the 1st, 10th, 100th, ... example is skipped.

    Raises:
        DataError: the examples are conversations, and the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer, *, is_chat: bool, name: str, say: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer) if is_chat else None
        self._name = name
        self._say = say
        self._broken: Broken = Counter()
        self._details: dict[str, str] = {}  # of the first example of a kind
        self._tell_at = 1

    @property
    def digest(self) -> str:
        """Identifies what decides the tokens, except the tokenizer, which has its own digest."""
        return "text" if self._template is None else self._template.digest

    @property
    def skipped(self) -> str:
        """The unusable examples so far, by kind."""
        counts = sorted(self._broken.items())
        return ", ".join(f"{number} {kind}{self._details.get(kind, '')}" for kind, number in counts)

    def __call__(self, value: Any) -> TokenArray | None:
        """Returns the tokens of an example, int64 (N,), with the end of text; None if it is unusable."""
        if isinstance(value, Unusable):
            self._broken[value.kind] += 1
            if value.detail:
                self._details.setdefault(value.kind, f" ({value.detail})")
            tokens = None
        else:
            tokens = self._text(value) if self._template is None else self._chat(value, self._template)
        if (skipped := self._broken.total()) >= self._tell_at:
            self._say(f"{self._name}: examples skipped so far: {self.skipped}")
            while self._tell_at <= skipped:
                self._tell_at *= 10
        return tokens

    def _text(self, text: Any) -> TokenArray | None:
        if isinstance(text, bytes):  # a column of bytes
            text = text.decode("utf-8", "surrogateescape")
        if not isinstance(text, str):
            self._broken["missing_field" if text is None else "wrong_type"] += 1
        elif not text.strip():
            self._broken["empty"] += 1
        else:
            try:
                parts = encoded_parts(text, self._tokenizer)
            except UnicodeEncodeError:  # a lone surrogate, which rows.py makes of bytes that are not UTF-8
                self._broken["bad_utf8"] += 1
            else:
                return np.concatenate([*parts, [self._tokenizer.end_of_text]]).astype(np.int64)
        return None

    def _chat(self, record: Any, template: ChatTemplate) -> TokenArray | None:
        if has_surrogates(record):
            self._broken["bad_utf8"] += 1
            return None
        samples = tokenised_chat(without_nulls(record), template, self._broken)
        return np.concatenate(samples) if samples else None
