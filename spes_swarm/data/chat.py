"""Chat conversations as training data: rendered with the tokenizer's chat template, with a loss on the answers only.

A record is a line of JSON, `{"messages": [{"role": ..., "content": ...}, ...]}` or `{"conversations": [{"from": ...,
"value": ...}, ...]}`. It is a conversation even if it has a `text` as well, which is usually the same conversation in
another model's form. An answer is what the template adds for an assistant's message to the prompt that it writes
before one; that includes the marks that end the answer. Conversations follow each other in the stream like other
documents, each ended by the end of text, which is a target where the template has no mark of its own for that.

A token that is no target is stored as its complement `~id`, a negative number: ids and targets travel in one array.

Templates are untrusted: transformers renders them in a sandbox. They write the same on every machine and on every day:
their clock stands still at the date of the tokenizer, and nothing is random. Text is untrusted, too, and a template's
marks are special tokens of the tokenizer: a conversation with one of them anywhere in a message, its role included, is
skipped. Kinds of skipped records: those of readers.py, `no_answer`, `special_token`, and `template` if that fails.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from blake3 import blake3
from numpy.typing import NDArray

from spes_swarm.base.errors import DataError
from spes_swarm.base.wording import plural
from spes_swarm.data.corpus_index import write_index
from spes_swarm.data.readers import Broken, is_json_lines, read_lines
from spes_swarm.data.token_file import TokenFile, TokenWriter
from spes_swarm.data.tokenizer import FastTokenizer, Tokenizer

_ROLES = {"human": "user", "gpt": "assistant"}  # what the second form calls them
_ANSWERING = "assistant"
_FORMS = ("messages", "conversations")  # the fields that hold a conversation
_MAX_JUDGED = 100  # records of a file that decide what it holds, ...
_MAX_READ = 10_000  # ... out of so many

_RENDERING = threading.Lock()  # held while the clock of templates stands still
# What a template may name that differs from one rendering to the next.
_VARYING = re.compile(r"strftime_now|random|lipsum")
_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}>")
_DIRECTIVE = re.compile(r"%(?P<flags>[-_0^#]*[0-9]*)[EO]?(?P<letter>[A-Za-z%])")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)

Message = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """Text of a conversation, or of a part of it."""

    text: str
    answers: tuple[tuple[int, int], ...]  # (first character, one past the last) of each answer, in order


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Takes the template from the tokenizer's files.

        Raises:
            DataError: the tokenizer has none.
        """
        assert isinstance(tokenizer, FastTokenizer)
        config = json.loads(tokenizer.files.get("tokenizer_config.json", b"{}"))
        template = tokenizer.files.get("chat_template.jinja", b"").decode("utf-8-sig") or config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if not template:
            raise DataError(
                f"tokenizer {tokenizer.name!r} has no chat template, which chat conversations need: use the tokenizer "
                "of a model that was trained on chats, or name a directory with a tokenizer and a chat_template.jinja"
            )
        self.source: str = template
        named = {key: value for key, value in config.items() if key.endswith("_token")}
        # An added token may be stored with its properties.
        self._names = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
        self._backend = tokenizers.Tokenizer.from_str(tokenizer.serialised())
        added = self._backend.get_added_tokens_decoder()
        self._marks = frozenset(added)
        self._special = [token.content for token in added.values() if token.special]
        self._end_of_text = tokenizer.end_of_text
        self._now = datetime.fromisoformat(tokenizer.date)
        # Everything that decides the tokens of a conversation, except the tokenizer, which has its own digest.
        parts: list[Any] = [self.source, sorted(self._names.items(), key=str), sorted(self._special)]
        if _VARYING.search(self.source):
            parts.append(tokenizer.date)
        if self.end_of_turn is None:
            parts.append("the end of text is a target")
        self.digest: str = blake3(json.dumps(parts).encode()).hexdigest()

    @cached_property
    def end_of_turn(self) -> int | None:
        """The id of the token that ends an answer; None if no token of its own does."""
        answer = "The sky is blue."
        for system in ([], [{"role": "system", "content": "Be brief."}]):
            messages = [*system, {"role": "user", "content": "What colour is it?"}]
            try:
                (sample,) = self.samples([*messages, {"role": _ANSWERING, "content": answer}])
            except Exception:  # see `tokenised_chat`
                continue
            ((first, after),) = sample.answers
            _, found, rest = sample.text[first:after].rpartition(answer)
            ids = self._backend.encode(rest, add_special_tokens=False).ids if found else []
            return next((token_id for token_id in ids if token_id in self._marks), None)
        return None

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Returns the text of messages; with `prompt`, also what comes before an answer to them.

        Raises:
            Exception: whatever the template raises.
        """
        from transformers.utils.chat_template_utils import render_jinja_template  # takes seconds to import

        with _standing_still(self.source, self._now):
            texts, _ = render_jinja_template(
                [list(messages)], chat_template=self.source, add_generation_prompt=prompt, **self._names
            )
        text = str(texts[0])
        address = _ADDRESS.search(text)
        if address and not any(address[0] in given for given in _texts(messages)):
            raise ValueError("the template writes an address in memory, which differs from one process to the next")
        return text

    def samples(self, messages: Sequence[Message]) -> Iterator[Rendered]:
        """Yields the texts to train on, which together have every answer once.

        That is one text if the template only ever appends. Some rewrite earlier turns, e.g. drop their reasoning: then
        an answer whose prompt does not continue the text before begins another text.

        Raises:
            Exception: whatever the template raises.
            ValueError: an answer does not continue its prompt.
        """
        text = ""
        answers: list[tuple[int, int]] = []
        for index, message in enumerate(messages):
            if message["role"] != _ANSWERING:
                continue
            before, whole = self.render(messages[:index], prompt=True), self.render(messages[: index + 1])
            if not whole.startswith(before):
                raise ValueError("the template's prompt is not where the answer begins")
            if not before.startswith(text):
                yield Rendered(text, tuple(answers))
                answers = []
            text = whole
            answers.append((len(before), len(whole)))
        if answers:
            yield Rendered(text, tuple(answers))

    def has_special(self, messages: Sequence[Message]) -> bool:
        """Returns True if any text in a message, its role for instance, contains a special token of the tokenizer."""
        return any(token in text for text in _texts(messages) for token in self._special)

    def encode(self, rendered: Rendered) -> NDArray[np.int64]:
        """Returns the ids of a text and the end of text, 1-D; the complement of those that are not of an answer."""
        encoded = self._backend.encode(rendered.text, add_special_tokens=False)
        ids_N = np.asarray([*encoded.ids, self._end_of_text], dtype=np.int64)
        starts_N = np.asarray([start for start, _ in encoded.offsets] + [len(rendered.text)])
        is_target_N = np.zeros(len(ids_N), dtype=bool)
        is_target_N[-1] = self.end_of_turn is None  # the text ends with an answer
        for first, after in rendered.answers:
            is_target_N |= (starts_N >= first) & (starts_N < after)
        return np.where(is_target_N, ids_N, ~ids_N)


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Returns the id of the token that ends an answer in a tokenizer's chat template; None if there is none."""
    try:
        return ChatTemplate(tokenizer).end_of_turn
    except DataError:
        return None


def is_chat(file: Path) -> bool | None:
    """Returns True if most of a file's first records are conversations; None if it has neither those nor other text.

    Raises:
        DataError: the file cannot be read.
    """
    if not is_json_lines(file):
        return False
    kinds = map(_is_conversation, islice(read_lines(file, Counter()), _MAX_READ))
    votes = Counter(islice((kind for kind in kinds if kind is not None), _MAX_JUDGED))
    return votes[True] > votes[False] if votes else None


def _is_conversation(record: Any) -> bool | None:
    """Returns whether a record is meant as a conversation or as another text; None if it could be either."""
    if messages_of(record) is not None:
        return True
    if not isinstance(record, Mapping):
        return None
    return False if isinstance(record.get("text"), str) else any(form in record for form in _FORMS) or None


def check_same_kind(files: Sequence[Path], *, chats: bool) -> None:
    """Refuses files of both kinds, see `is_chat`: records of the other kind would be left out.

    Raises:
        DataError: a file is of the other kind, or cannot be read.
    """
    first: dict[bool | None, Path] = {}
    for file in files:
        first.setdefault(is_chat(file), file)
        if {True, False} <= first.keys():
            found, other = ("conversations", "other text") if chats else ("other text", "conversations")
            raise DataError(
                f"{first[chats]} has {found}, but {first[not chats]} has {other}: keep the two kinds in different "
                "directories, and train on both as a mixture (--data '0.5*CHATS + 0.5*TEXTS')"
            )


def write_chat_shard(
    files: Sequence[Path], output: Path, tokenizer: Tokenizer, template: ChatTemplate, say: Callable[[str], None]
) -> None:
    """Tokenises all conversations into one token file in `output`, and says how many were skipped and why.

    Raises:
        DataError: no usable conversation, or `output` cannot be written.
    """
    broken: Broken = Counter()
    count = 0
    writer = TokenWriter(output / "tokens-00000.npy", tokenizer, has_context=True)
    try:
        for path in files:
            for record in read_lines(path, broken):
                arrays = tokenised_chat(record, template, broken)
                if arrays:
                    writer.append(np.concatenate(arrays), len(arrays))
                    count += 1
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(broken.items()))
        if not count:
            raise DataError(f"no usable conversation in {plural(len(files), 'file')} ({kinds or 'no records'})")
        say(f"{plural(count, 'conversation')} tokenised" + (f"; skipped: {kinds}" if kinds else ""))
        write_index(output, [TokenFile.open(writer.commit())])
    finally:
        writer.abort()


def tokenised_chat(record: Any, template: ChatTemplate, broken: Broken) -> list[NDArray[np.int64]]:
    """Returns the samples of a record, each 1-D (see `ChatTemplate.encode`); none, counted, if it is unusable."""
    messages = messages_of(record)
    if messages is None:
        lacks = isinstance(record, Mapping) and not any(record.get(form) for form in _FORMS)
        broken["missing_field" if lacks else "wrong_type"] += 1
    elif not all(isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages):
        broken["wrong_type"] += 1
    elif not any(message["role"] == _ANSWERING for message in messages):
        broken["no_answer"] += 1
    elif template.has_special(messages):
        broken["special_token"] += 1
    else:
        try:
            return [template.encode(sample) for sample in template.samples(messages)]
        except Exception:  # jinja2 has errors of its own, and a template may call what it likes
            broken["template"] += 1
    return []


def messages_of(record: Any) -> list[Message] | None:
    """Returns the messages of a record in the first form; None if it is no conversation."""
    if not isinstance(record, Mapping):
        return None
    for key in _FORMS:
        turns = record.get(key)
        if isinstance(turns, list) and turns and all(isinstance(turn, Mapping) for turn in turns):
            return [_message(turn) for turn in turns]
    return None


def _message(turn: Mapping[str, Any]) -> Message:
    if "from" not in turn:
        return dict(turn)
    return {"role": _ROLES.get(str(turn["from"]), turn["from"]), "content": turn.get("value")}


def _texts(value: Any) -> Iterator[str]:
    """Yields all text in a JSON value, including the keys of mappings: a template may write any of it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


@contextmanager
def _standing_still(source: str, now: datetime) -> Iterator[None]:
    """Keeps the clock and chance away from a template while transformers renders it."""
    from jinja2 import pass_context
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(source).environment  # transformers caches it, and others may use it, too
    names, filters = environment.globals, environment.filters

    @pass_context
    def first(_: Any, values: Any) -> Any:
        return filters["first"](environment, values)

    with _RENDERING:
        before = {**names}, filters["random"]
        names["strftime_now"] = lambda format: _strftime(now, format)
        filters["random"] = first
        names.pop("lipsum", None)
        try:
            yield
        finally:
            names.update(before[0])
            filters["random"] = before[1]


def _strftime(time: datetime, form: str) -> str:
    """As `time.strftime(form)`, but in English and UTC, whatever the locale and time zone of this machine."""

    def written(match: re.Match[str]) -> str:
        day, month, clock = _DAYS[time.weekday()], _MONTHS[time.month - 1], "AM" if time.hour < 12 else "PM"
        names = {
            **{"a": day[:3], "A": day, "b": month[:3], "B": month, "h": month[:3], "p": clock, "P": clock.lower()},
            **{"c": time.ctime(), "x": f"{time:%m/%d/%y}", "X": f"{time:%H:%M:%S}", "r": f"{time:%I:%M:%S} {clock}"},
            **{"s": f"{time.replace(tzinfo=UTC).timestamp():.0f}", "z": "", "Z": ""},
        }
        text = names.get(match["letter"])
        if text is None:
            return time.strftime(f"%{match['flags']}{match['letter']}")
        return text.upper() if "^" in match["flags"] else text

    return _DIRECTIVE.sub(written, form)
