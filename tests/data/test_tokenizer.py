"""Tokenizers: exact bytes, the same ids through transformers, digests that tell mappings apart."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models
from transformers import AutoTokenizer, OlmoeConfig, PreTrainedTokenizerFast

from spes_swarm.base.errors import DataError
from spes_swarm.data.tokenizer import END_OF_TEXT, ByteTokenizer, FastTokenizer, load_tokenizer, train_bpe

TEXTS = ["def f(x):\n    return x + 1\n" * 20, "the cat sat on the mat, the dog did not. " * 20, "Größe 你好 😀 " * 9]
BYTES = ByteTokenizer()
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@pytest.fixture(scope="module")
def saved_bytes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("bytes")
    BYTES.save(directory)
    OlmoeConfig().save_pretrained(directory)  # an exported model lies beside its tokenizer
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def bpe() -> FastTokenizer:
    return train_bpe(TEXTS, 400)


def test_bytes_facts() -> None:
    assert (BYTES.name, BYTES.vocab_size, BYTES.end_of_text) == ("bytes", 257, 256)
    assert len(BYTES.digest) == 64


@given(UNICODE)
def test_byte_ids_are_the_utf8_bytes(text: str) -> None:
    assert BYTES.encode(text).tolist() == list(text.encode("utf-8"))
    assert BYTES.decode(BYTES.encode(text)) == text


@given(text=UNICODE)
def test_transformers_agrees_on_bytes(saved_bytes: Any, text: str) -> None:
    ids = saved_bytes(text)["input_ids"]
    assert ids == list(text.encode("utf-8"))
    assert saved_bytes.decode(ids) == text


@pytest.mark.slow
@given(ids=st.lists(st.integers(0, 256), max_size=40))
def test_transformers_agrees_on_decoding_anything(saved_bytes: Any, ids: list[int]) -> None:
    assert saved_bytes.decode(ids) == BYTES.decode(ids)


def test_transformers_knows_the_end_of_text(saved_bytes: Any) -> None:
    assert saved_bytes.eos_token_id == 256
    assert len(saved_bytes) == 257


def test_the_name_of_a_special_token_in_text_is_text(bpe: FastTokenizer, tmp_path: Path) -> None:
    text = f"before {END_OF_TEXT} after"
    bpe.save(tmp_path)
    for tokenizer in (BYTES, bpe, pickle.loads(pickle.dumps(bpe)), load_tokenizer(tmp_path / "tokenizer.json")):
        ids = tokenizer.encode(text).tolist()
        assert tokenizer.end_of_text not in ids
        assert tokenizer.decode(ids) == text
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == bpe.encode(text).tolist()


def test_lone_surrogates_are_refused(bpe: FastTokenizer) -> None:
    for tokenizer in (BYTES, bpe):
        with pytest.raises(UnicodeEncodeError):
            tokenizer.encode("\ud800")


def test_bpe_training_is_deterministic(bpe: FastTokenizer) -> None:
    again = train_bpe(iter(TEXTS), 400)
    assert again.digest == bpe.digest
    assert train_bpe(TEXTS, 280).digest != bpe.digest
    assert bpe.vocab_size <= 400
    assert len(bpe.encode(TEXTS[1])) < len(TEXTS[1]) / 2


@given(text=UNICODE)
def test_bpe_round_trip(bpe: FastTokenizer, text: str) -> None:
    assert bpe.decode(bpe.encode(text)) == text


def test_saved_bpe_is_the_same_everywhere(bpe: FastTokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    by_transformers = AutoTokenizer.from_pretrained(tmp_path)
    by_path = load_tokenizer(tmp_path / "tokenizer.json")
    by_directory = load_tokenizer(str(tmp_path))
    for text in [*TEXTS, "  unseen \n\n\t text, don't", ""]:
        ids = bpe.encode(text).tolist()
        assert by_transformers(text)["input_ids"] == ids
        assert by_path.encode(text).tolist() == by_directory.encode(text).tolist() == ids
    assert by_path.digest == by_directory.digest == bpe.digest
    assert by_path.end_of_text == by_directory.end_of_text == by_transformers.eos_token_id == bpe.end_of_text


def test_a_saved_transformers_tokenizer_keeps_its_ids(bpe: FastTokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path / "plain")
    source = AutoTokenizer.from_pretrained(tmp_path / "plain", chat_template="{{ messages }}")
    assert isinstance(source, PreTrainedTokenizerFast)
    source.save_pretrained(tmp_path / "source")
    loaded = load_tokenizer(tmp_path / "source")
    loaded.save(tmp_path / "copy")
    copy = AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert copy(TEXTS[0])["input_ids"] == bpe.encode(TEXTS[0]).tolist()
    assert copy.chat_template == "{{ messages }}"
    assert loaded.digest == bpe.digest


def test_pickled_tokenizers_are_the_same(bpe: FastTokenizer, tmp_path: Path) -> None:
    for tokenizer in (BYTES, bpe):
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert (copy.digest, copy.name, type(copy)) == (tokenizer.digest, tokenizer.name, type(tokenizer))
        assert copy.encode(TEXTS[2]).tolist() == tokenizer.encode(TEXTS[2]).tolist()
        tokenizer.save(tmp_path / "a")
        copy.save(tmp_path / "b")
        for file in (tmp_path / "a").iterdir():
            assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_the_digest_sees_another_pre_tokenizer_with_the_same_vocabulary(bpe: FastTokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["use_regex"] = False
    path.write_text(json.dumps(content))
    assert load_tokenizer(path).digest != bpe.digest


def test_the_digest_ignores_how_the_file_is_written(bpe: FastTokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]  # as older releases do
    path.write_text(json.dumps(content))
    assert load_tokenizer(path).digest == bpe.digest


@pytest.mark.parametrize(
    ("name", "words"),
    [("bpe", "trained"), ("./nowhere", "no such"), ("/nowhere/tokenizer.json", "no such file")],
)
def test_names_that_cannot_be_loaded(name: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load_tokenizer(name)


def test_no_network_is_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def unreachable(source: str, *, revision: str, trust_remote_code: bool, local_files_only: bool) -> None:
        assert not trust_remote_code
        asked.append(local_files_only)
        raise OSError("We couldn't connect to\n'https://huggingface.co'")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(DataError, match="'some/model' could not be loaded: We couldn't connect to 'https") as caught:
        load_tokenizer("some/model")
    assert asked == [True, False]  # the cache first
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError):
        load_tokenizer("some/model", local_files_only=True)
    assert asked == [True, False, True]


@pytest.mark.parametrize("name", ["user/model@", "user/model@../../secret", "user/model@v1@v2", "@v1"])
def test_a_malformed_revision_is_refused_before_any_request(name: str) -> None:
    with pytest.raises(DataError, match="expected USER/REPO@REVISION"):
        load_tokenizer(name)


def test_files_that_are_no_tokenizer(bpe: FastTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"hello": 1}')
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_tokenizer(path)
    bpe.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(DataError, match="'</s>' is not in its vocabulary"):
        load_tokenizer(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"could not be loaded: .*\. Its files are damaged or incomplete"):
        load_tokenizer(tmp_path / "empty")
    (tmp_path / "empty" / "tokenizer.json").write_text('{"hello": 1}')
    with pytest.raises(DataError, match=r"could not be loaded: KeyError 'added_tokens'\. Its files are damaged"):
        load_tokenizer(tmp_path / "empty")


def test_bpe_vocabulary_must_hold_all_bytes() -> None:
    with pytest.raises(DataError, match="at least 257"):
        train_bpe(TEXTS, 256)
    assert train_bpe([], 257).vocab_size == 257


def test_which_ids_can_stand_in_data(bpe: FastTokenizer) -> None:
    for tokenizer in (BYTES, bpe):
        size = tokenizer.vocab_size
        assert [i for i in range(-1, size + 2) if not tokenizer.produces(i)] == [-1, size, size + 1]


def test_special_tokens_other_than_the_end_of_text_never_stand_in_data(bpe: FastTokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens(["<pad>"])
    padded = FastTokenizer("padded", backend, "<|endoftext|>")
    pad = backend.token_to_id("<pad>")
    assert pad is not None
    assert pad not in padded.encode("a <pad> b <pad>")
    assert not padded.produces(pad)
    assert padded.produces(padded.end_of_text)


def test_an_unknown_token_can_stand_in_data() -> None:
    vocabulary = {"[UNK]": 0, "[PAD]": 1, "[END]": 2, "known": 3}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.add_special_tokens(["[UNK]", "[PAD]", "[END]"])
    words = FastTokenizer("words", backend, "[END]")
    assert words.encode("strange").tolist() == [0]
    assert [words.produces(i) for i in range(4)] == [True, False, True, True]
