"""Chat conversations as training data: what is a target, what is skipped, and how it is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_swarm.base.errors import DataError
from spes_swarm.data.corpus import open_corpus
from spes_swarm.data.sampler import Sampler, TokenStream
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
