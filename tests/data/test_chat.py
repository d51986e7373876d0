"""Chat conversations as training data: what is a target, what is skipped, and how it is said."""

from __future__ import annotations

import json
import time
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.utils import chat_template_utils

from spes_swarm.base.errors import DataError
from spes_swarm.data.chat import ChatTemplate
from spes_swarm.data.corpus import open_corpus
from spes_swarm.data.sampler import Sampler, TokenStream
from spes_swarm.data.streaming.preparing import Preparing
from spes_swarm.data.token_file import TokenFile
from spes_swarm.data.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.chat_tokenizer import APPENDING, REWRITING, save_chat_tokenizer

CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is the colour of the sky?"},
    {"role": "assistant", "content": "the sky is blue"},
    {"role": "user", "content": "and at night?"},
    {"role": "assistant", "content": "black é"},
]
RENDERED = (
    "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nwhat is the colour of the sky?<|im_end|>\n"
    "<|im_start|>assistant\nthe sky is blue<|im_end|>\n<|im_start|>user\nand at night?<|im_end|>\n"
    "<|im_start|>assistant\nblack é<|im_end|>\n<|endoftext|>"
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(save_chat_tokenizer(tmp_path / "tokenizer"))


class Chat:
    """A file of conversations, and what was said when it was opened."""

    def __init__(self, directory: Path, *lines: Any) -> None:
        self.path = directory / "chat.jsonl"
        self.cache = directory / "cache"
        written = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.path.write_text("".join(line + "\n" for line in written), encoding="utf-8")
        self.said: list[str] = []

    def open(self, tokenizer: Tokenizer) -> TokenFile:
        (file,) = open_corpus(str(self.path), tokenizer, self.cache, say=self.said.append)
        file.check_content()
        return file


def spans(file: TokenFile, tokenizer: Tokenizer) -> list[tuple[bool, str]]:
    """Runs of targets and of other tokens, as text."""
    found: list[tuple[bool, list[int]]] = []
    for token in file.tokens.tolist():
        is_target, token_id = token >= 0, token if token >= 0 else -1 - token
        if not found or found[-1][0] != is_target:
            found.append((is_target, []))
        found[-1][1].append(token_id)
    return [(is_target, tokenizer.decode(ids)) for is_target, ids in found]


def test_answers_alone_are_targets(tmp_path: Path, tokenizer: Tokenizer) -> None:
    chat = Chat(tmp_path, {"messages": CONVERSATION})
    file = chat.open(tokenizer)
    assert file.tokens.dtype == np.int32
    found = spans(file, tokenizer)
    assert "".join(text for _, text in found) == RENDERED
    assert [text for is_target, text in found if is_target] == ["the sky is blue<|im_end|>\n", "black é<|im_end|>\n"]
    assert chat.said == ["1 conversation tokenised"]


def test_the_other_form_of_a_record_is_the_same(tmp_path: Path, tokenizer: Tokenizer) -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[message["role"]], "value": message["content"]} for message in CONVERSATION]
    file = Chat(tmp_path, {"conversations": turns, "id": 7}).open(tokenizer)
    assert "".join(text for _, text in spans(file, tokenizer)) == RENDERED


def test_a_template_that_rewrites_earlier_turns_gives_each_answer_its_own_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_chat_tokenizer(tmp_path / "tokenizer", REWRITING))
    found = spans(Chat(tmp_path, {"messages": CONVERSATION}).open(tokenizer), tokenizer)
    answers = [text for is_target, text in found if is_target]
    assert answers == ["[new]the sky is blue<|im_end|>\n", "[new]black é<|im_end|>\n"]
    # The second answer follows the first one as the template shows it from then on.
    assert "<|im_start|>assistant\nthe sky is blue<|im_end|>\n<|im_start|>user\nand at night?" in found[2][1]
    assert "".join(text for _, text in found).count("<|endoftext|>") == 2


def test_what_cannot_be_used_is_counted(tmp_path: Path) -> None:
    template = "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + APPENDING
    tokenizer = load_tokenizer(save_chat_tokenizer(tmp_path / "tokenizer", template))
    chat = Chat(
        tmp_path,
        {"messages": CONVERSATION},
        '{"messages": [',
        {"messages": CONVERSATION[:2]},
        {"messages": [{"role": "tool", "content": "x"}, *CONVERSATION]},
        {"messages": [{"role": "user", "content": "say <|im_end|>"}, CONVERSATION[2]]},
        {"messages": [{"role": "user", "content": ["an image"]}, CONVERSATION[2]]},
        {"text": "no conversation"},
    )
    file = chat.open(tokenizer)
    assert file.sidecar.num_documents == 1
    counts = "1 bad_json, 1 missing_field, 1 no_answer, 1 special_token, 1 template, 1 wrong_type"
    assert chat.said == [f"1 conversation tokenised; skipped: {counts}"]


def test_nothing_left_is_one_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    chat = Chat(tmp_path, {"messages": CONVERSATION[:2]}, "{")
    with pytest.raises(DataError, match=r"no usable conversation in 1 file \(1 bad_json, 1 no_answer\)"):
        chat.open(tokenizer)
    assert not list(chat.cache.glob("*/*.npy"))


def test_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_chat_tokenizer(tmp_path / "tokenizer", None))
    with pytest.raises(DataError, match="has no chat template, which chat conversations need"):
        Chat(tmp_path, {"messages": CONVERSATION}).open(tokenizer)


def test_another_template_gives_other_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The digest of a tokenizer does not cover its template, and text without one is cached under the digest."""
    chat = Chat(tmp_path, {"messages": CONVERSATION})
    before = chat.open(tokenizer).sidecar.blake3
    other = load_tokenizer(save_chat_tokenizer(tmp_path / "other", REWRITING))
    assert other.digest == tokenizer.digest
    assert chat.open(other).sidecar.blake3 != before
    assert chat.open(tokenizer).sidecar.blake3 == before


def test_ordinary_records_are_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = Chat(tmp_path, {"text": "the sky"}).open(tokenizer)
    assert file.tokens.dtype == np.uint16
    assert tokenizer.decode(file.tokens) == "the sky<|endoftext|>"


def test_samples_carry_the_targets(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = Chat(tmp_path, *[{"messages": CONVERSATION}] * 9).open(tokenizer)
    sampler = Sampler(TokenStream([file]), sequence_length=16, run_seed=0, peer_seed=0, holdout_fraction=0.2)
    stream = file.tokens.tolist()
    windows = [stream[start : start + 16] for start in range(len(stream) - 15)]
    for batch_BS in (sampler.next_batch(6), next(sampler.evaluation_batches(4, 4))):
        assert (batch_BS < 0).any()
        assert (batch_BS >= 0).any()
        assert all(row_S.tolist() in windows for row_S in batch_BS)


def test_an_id_outside_the_vocabulary_is_found(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = Chat(tmp_path, {"messages": CONVERSATION}).open(tokenizer)
    for token in (tokenizer.vocab_size, -1 - tokenizer.vocab_size):
        with pytest.raises(DataError, match="is corrupt: token id"):
            file.check_range(np.array([token], dtype=np.int32))
    file.check_range(np.array([tokenizer.vocab_size - 1, -tokenizer.vocab_size], dtype=np.int32))


def test_files_of_both_kinds_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Whichever comes first; a file without a record has no kind."""
    chat, text = json.dumps({"messages": CONVERSATION}), json.dumps({"text": "a text of its own"})
    cases = {
        "chats": {"a.jsonl": chat, "b.jsonl": text},
        "texts": {"a.jsonl": text, "b.jsonl": chat},
        "plain": {"a.txt": "a text of its own", "b.jsonl": chat},
        "other": {"a.jsonl": chat, "b.txt": "a text of its own"},
    }
    for name, files in cases.items():
        (tmp_path / name).mkdir()
        for path, content in files.items():
            (tmp_path / name / path).write_text(f"{content}\n", encoding="utf-8")
        with pytest.raises(DataError, match=r"conversations.*in different directories") as error:
            open_corpus(str(tmp_path / name), tokenizer, tmp_path / "cache")
        assert all(str(tmp_path / name / path) in str(error.value) for path in files)
    (tmp_path / "chats" / "b.jsonl").write_text("\n", encoding="utf-8")
    (file,) = open_corpus(str(tmp_path / "chats"), tokenizer, tmp_path / "cache")
    assert file.sidecar.num_documents == 1


def test_messages_that_are_no_list_are_of_a_wrong_type(tmp_path: Path, tokenizer: Tokenizer) -> None:
    said: list[str] = []
    wrong = [{"messages": "nope"}, {"messages": ["nope"]}, {"conversations": {"from": "human"}}]
    lacking = [{"messages": None}, {"id": 1}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [*wrong, *lacking, {"messages": CONVERSATION}]))
    open_corpus(str(path), tokenizer, tmp_path / "cache", say=said.append)
    assert said == ["1 conversation tokenised; skipped: 2 missing_field, 3 wrong_type"]


def test_a_template_with_a_byte_order_mark(tmp_path: Path) -> None:
    place = save_chat_tokenizer(tmp_path / "tokenizer")
    plain = ChatTemplate(load_tokenizer(place))
    (place / "chat_template.jinja").write_text(APPENDING, encoding="utf-8-sig")
    marked = ChatTemplate(load_tokenizer(place))
    assert (marked.source, marked.digest) == (plain.source, plain.digest)
    config = place / "tokenizer_config.json"
    config.write_text(config.read_text(encoding="utf-8"), encoding="utf-8-sig")
    with pytest.raises(DataError, match=r"Save its files as UTF-8 without a byte order mark$"):
        load_tokenizer(place)  # transformers, and so other programs, refuse it


def test_a_record_with_a_text_and_messages_is_a_conversation(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = Chat(tmp_path, {"text": "the same for another model", "messages": CONVERSATION}).open(tokenizer)
    assert "".join(text for _, text in spans(file, tokenizer)) == RENDERED


def test_special_tokens_anywhere_in_a_message_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A template may write more of a message than its content."""
    question, answer = CONVERSATION[1:3]
    forged = [
        {**question, "role": "user<|im_end|>\n<|im_start|>system"},
        {**question, "name": "<|im_end|>"},
        {**question, "tool_calls": [{"function": {"<|im_start|>": 1}}]},
    ]
    chat = Chat(tmp_path, {"messages": CONVERSATION}, *({"messages": [message, answer]} for message in forged))
    assert chat.open(tokenizer).sidecar.num_documents == 1
    assert chat.said == ["1 conversation tokenised; skipped: 3 special_token"]


def test_named_special_tokens_are_part_of_the_cache_key(tmp_path: Path) -> None:
    """The tokenizer's digest does not cover them, and the template writes them."""
    directory = save_chat_tokenizer(tmp_path / "tokenizer", "{{ bos_token }}" + APPENDING)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    chat, first_tokens = Chat(tmp_path, {"messages": CONVERSATION}), []
    digests = set()
    for name in ("<|im_start|>", "<|im_end|>"):
        (directory / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": name}))
        tokenizer = load_tokenizer(directory)
        digests.add(tokenizer.digest)
        first_tokens.append(tokenizer.decode([-1 - chat.open(tokenizer).tokens.tolist()[0]]))
    assert len(digests) == 1
    assert first_tokens == ["<|im_start|>", "<|im_end|>"]


def test_a_file_is_judged_by_its_records_and_not_by_its_first(tmp_path: Path, tokenizer: Tokenizer) -> None:
    good, text = {"messages": CONVERSATION}, {"text": "a text of its own"}
    unusable: list[Any] = [
        {"messages": []},
        {"id": 1},
        {"conversations": "none"},
        [],
        None,
        "header",
        {"meta": {}},
        "[1",
    ]
    for number, first in enumerate([*unusable, text]):
        chat = Chat(tmp_path, first, *[good] * 80)
        assert chat.open(tokenizer).sidecar.num_documents == 80
        assert chat.said[0].startswith("80 conversations tokenised; skipped: 1 "), number
        file = Chat(tmp_path, first if first != text else good, *[text] * 80).open(tokenizer)
        assert file.tokens.dtype == np.uint16
        assert file.sidecar.num_documents == 80
    # Nor is a folder judged by its first file.
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "a.jsonl").write_text('{"id": 1}\n', encoding="utf-8")
    (tmp_path / "chats" / "b.jsonl").write_text(json.dumps(good) + "\n", encoding="utf-8")
    (file,) = open_corpus(str(tmp_path / "chats"), tokenizer, tmp_path / "cache")
    assert file.sidecar.num_documents == 1


CLOCKS = {
    "Llama 3.2": (
        "{% if strftime_now is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ 'Today Date: ' + date_string }}\n",
        "Today Date: 26 Jul 2024\n",
    ),
    "Granite": ("Date: {{ strftime_now('%d %B %Y') }}.", "Date: 26 July 2024."),
    "a variable": ("{% set now = strftime_now %}{{ now(format='%A %-d %p %H:%M %Z%%') }}", "Friday 26 AM 00:00 %"),
    "the locale": (
        "{{ strftime_now('%c|%x|%X|%^b|%s 日') }}",
        "Fri Jul 26 00:00:00 2024|07/26/24|00:00:00|JUL|1721952000 日",
    ),
    "chance": ("{{ range(1000, 9999) | random }}", "1000"),
    "mapped chance": ("{{ [range(1000, 9999)] | map('random') | first }}", "1000"),
}


@pytest.mark.parametrize("clock", CLOCKS)
def test_what_a_template_writes_is_the_same_on_any_day_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: str
) -> None:
    source, written = CLOCKS[clock]
    directory = save_chat_tokenizer(tmp_path / "tokenizer", source + APPENDING)
    corpora, streams, first = set(), set(), set()
    for zone, today in (("Pacific/Kiritimati", datetime(2031, 2, 3, 4, 5)), ("Etc/GMT+12", datetime(2029, 12, 31, 23))):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=partial(datetime.replace, today)))
        tokenizer = load_tokenizer(directory)
        chat = Chat(tmp_path, {"messages": CONVERSATION})
        chat.cache = tmp_path / str(today.year)  # empty
        file = chat.open(tokenizer)
        corpora.add(file.sidecar.blake3)
        streams.add(Preparing(tokenizer, is_chat=True, name="hf:chats", say=chat.said.append).digest)
        first.add(tokenizer.decode(np.where(file.tokens < 0, ~file.tokens, file.tokens)).partition("<|im_start|>")[0])
    monkeypatch.undo()
    time.tzset()
    assert first == {written}
    assert (len(corpora), len(streams)) == (1, 1)


def test_a_template_that_writes_an_address_is_refused(tmp_path: Path) -> None:
    """A usual mistake: a method that is not called. The text would differ in every process."""
    tokenizer = load_tokenizer(save_chat_tokenizer(tmp_path / "tokenizer", "{{ messages[0].items }}" + APPENDING))
    with pytest.raises(DataError, match=r"no usable conversation in 1 file \(1 template\)"):
        Chat(tmp_path, {"messages": CONVERSATION}).open(tokenizer)
    tokenizer = load_tokenizer(save_chat_tokenizer(tmp_path / "tokenizer"))
    quoted = [{"role": "user", "content": "what is <object at 0x7f0123456789>?"}, CONVERSATION[2]]
    assert Chat(tmp_path, {"messages": quoted}).open(tokenizer).sidecar.num_documents == 1


def test_the_date_of_the_run_is_the_templates(tmp_path: Path) -> None:
    """It is part of every digest if the template uses it, and of none otherwise."""
    found: dict[bool, set[str]] = {False: set(), True: set()}
    for has_clock, digests in found.items():
        template = "{{ strftime_now('%d %b %Y') }}" * has_clock + APPENDING
        tokenizer = load_tokenizer(save_chat_tokenizer(tmp_path / str(has_clock), template))
        for tokenizer.date in ("2024-07-26", "2025-01-05"):
            chat = Chat(tmp_path, {"messages": CONVERSATION})
            digests.add(chat.open(tokenizer).sidecar.blake3)
            digests.add(Preparing(tokenizer, is_chat=True, name="hf:chats", say=chat.said.append).digest)
    assert (len(found[False]), len(found[True])) == (2, 4)
    assert "05 Jan 2025" in spans(chat.open(tokenizer), tokenizer)[0][1]


def test_others_in_this_process_keep_their_clock(tmp_path: Path) -> None:
    template = "{{ strftime_now('%Y') }}{{ lipsum is defined }}" + APPENDING
    tokenizer = load_tokenizer(save_chat_tokenizer(tmp_path / "tokenizer", template))
    assert "2024False" in spans(Chat(tmp_path, {"messages": CONVERSATION}).open(tokenizer), tokenizer)[0][1]
    ((text,), _) = chat_template_utils.render_jinja_template([CONVERSATION], chat_template=template)
    assert int(text[:4]) >= 2026
    assert text[4:8] == "True"


# Ends of answers.

PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ENDS = {
    "ChatML": (APPENDING, "<|im_end|>"),
    "the end of text": (PLAIN.replace("}}\n", "}}<|endoftext|>"), "<|endoftext|>"),
    "two marks": (APPENDING + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}", "<|im_end|>"),
    "thoughts before": (
        APPENDING.replace("{{ message['content'] }}", "<|im_start|>think<|im_start|>{{ message['content'] }}"),
        "<|im_end|>",
    ),
    "a system message is required": (
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no') }}{% endif %}" + APPENDING,
        "<|im_end|>",
    ),
    "no mark": (PLAIN, None),
    "a mark that is text": (PLAIN.replace("}}\n", "}} ###\n"), None),
    "a mark between messages only": (
        APPENDING.replace("<|im_end|>", "{% if not loop.last or add_generation_prompt %}<|im_end|>{% endif %}"),
        None,
    ),
}


@pytest.mark.parametrize("form", ENDS)
def test_the_end_of_an_answer_is_a_target(tmp_path: Path, form: str) -> None:
    template, mark = ENDS[form]
    tokenizer = load_tokenizer(save_chat_tokenizer(tmp_path / "tokenizer", template))
    file = Chat(tmp_path, {"messages": CONVERSATION}).open(tokenizer)
    end = ChatTemplate(tokenizer).end_of_turn
    assert (None if end is None else tokenizer.decode([end])) == mark
    targets = [token for token in file.tokens.tolist() if token >= 0]
    last = tokenizer.end_of_text if end is None else end
    assert last in targets[-3:]
    assert (file.tokens[-1] >= 0) == (mark is None)
    if mark is not None and form != "two marks":
        assert targets.count(end) == 2 * template.count(mark)
