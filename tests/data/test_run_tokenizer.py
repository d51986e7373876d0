"""The tokenizer of a run: paths and hub names are told apart, and files of the founder's are found by their digest."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from blake3 import blake3
from transformers import AutoTokenizer

from spes_swarm.base.errors import DataError, ManifestError
from spes_swarm.config.run import RunConfig
from spes_swarm.data.run_tokenizer import TokenizerPlaces, founded_tokenizer, is_same_tokenizer, run_tokenizer
from spes_swarm.data.tokenizer import FastTokenizer, load_packed, load_tokenizer, pack, train_bpe
from tests.helpers.chat_tokenizer import APPENDING, save_chat_tokenizer
from tests.helpers.swarm import TINY_RUN, merged

TEXT = "what is the colour of the sky? the sky is blue. " * 9
OTHER = "no word of this sentence resembles one of that; " * 9


def named(name: str, digest: str | None = None) -> RunConfig:
    changes = {"tokenizer": {"name": name, "digest": digest}, "model": {"settings": {"vocab_size": 272}}}
    return RunConfig.from_dict(merged(TINY_RUN, changes), "test")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were looked up on the Hub, all in vain."""
    asked: list[str] = []
    real: Callable[..., Any] = AutoTokenizer.from_pretrained

    def from_pretrained(source: str, **options: Any) -> Any:
        if Path(source).is_dir():
            return real(source, **options)
        asked.append(source)
        raise OSError("the Hub was asked")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    return asked


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The founder's working directory, with a tokenizer in my-bpe/tokenizer."""
    (tmp_path / "founder").mkdir()
    monkeypatch.chdir(tmp_path / "founder")
    train_bpe([TEXT], 265).save(tmp_path / "founder" / "my-bpe" / "tokenizer")
    return tmp_path / "founder"


def founded(name: str, *folders: Path, packed: Path | None = None) -> RunConfig:
    """What the manifest says of a run that is founded with this name."""
    _, described = founded_tokenizer(named(name), TokenizerPlaces(packed=packed, folders=folders))
    return dataclasses.replace(named(name), tokenizer=described)


@pytest.fixture
def elsewhere(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: list[str]) -> tuple[RunConfig, bytes]:
    """A run and the files of its tokenizer; from now on in a directory without them."""
    run = founded("my-bpe/tokenizer", packed=tmp_path / "packed")
    (tmp_path / "friend").mkdir()
    monkeypatch.chdir(tmp_path / "friend")
    return run, (tmp_path / "packed").read_bytes()


# The founder.


@pytest.mark.parametrize("form", ["my-bpe/tokenizer", "./my-bpe/tokenizer", "my-bpe/tokenizer/", "{}/my-bpe/tokenizer"])
def test_files_of_the_founder_get_a_name_that_is_no_path_and_no_hub_name(here: Path, form: str, hub: list[str]) -> None:
    run = founded(form.format(here))
    assert run.tokenizer.local is not None
    label, digest = run.tokenizer.local
    assert label == "my-bpe/tokenizer"
    tokenizer = load_tokenizer(here / "my-bpe" / "tokenizer")
    assert isinstance(tokenizer, FastTokenizer)
    assert (run.tokenizer.digest, digest) == (tokenizer.digest, blake3(pack(tokenizer.all_files)).hexdigest())
    assert str(here) not in run.tokenizer.name
    assert hub == []
    with pytest.raises(DataError, match="no such file"):
        load_tokenizer(run.tokenizer.name)
    assert hub == []


def test_names_of_the_hub_and_bytes_stay_as_they_are(hub: list[str]) -> None:
    assert founded("bytes").tokenizer.name == "bytes"
    with pytest.raises(DataError, match="the Hub was asked"):
        founded("user/model")


def test_a_relative_path_may_lie_beside_the_data(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = founded("my-bpe/tokenizer").tokenizer
    monkeypatch.chdir(tmp_path)
    assert founded("my-bpe/tokenizer", here / "my-bpe").tokenizer == expected
    assert founded("tokenizer", here / "my-bpe").tokenizer == expected


@pytest.mark.parametrize(
    "name",
    [
        "./my-bpe/none",
        "../none/tokenizer",
        "/nowhere/tokenizer",
        "~/no-such/tokenizer",
        "none/tokenizer/",
        "a/b/tokenizer",
        "C:\\my-bpe\\tokenizer",
        "my-bpe\\tokenizer",
        "my bpe/tokenizer",
        "none/tokenizer.json",
        "local:none:" + 64 * "0",
    ],
)
def test_a_path_without_files_is_never_looked_up_on_the_hub(here: Path, name: str, hub: list[str]) -> None:
    with pytest.raises(DataError):
        founded(name)
    with pytest.raises(DataError):
        run_tokenizer(named(name, 64 * "0"))
    assert hub == []


def test_a_misspelt_path_is_not_taken_for_a_repository(here: Path, hub: list[str]) -> None:
    with pytest.raises(DataError, match=r"no such file or directory in 'my-bpe'; .* write my-bpe/tokeniser@main"):
        founded("my-bpe/tokeniser")
    assert hub == []


def test_a_repository_is_not_taken_for_a_directory_of_its_name(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train_bpe([OTHER], 265)
    expected.save(tmp_path / "downloaded")
    asked: list[tuple[str, str]] = []

    def download(repo_id: str, *, revision: str, **_: object) -> str:
        asked.append((repo_id, revision))
        return str(tmp_path / "downloaded")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    loaded = load_tokenizer("my-bpe/tokenizer@main")
    assert loaded.digest == expected.digest
    assert asked == [("my-bpe/tokenizer", "main")]
    loaded.save(tmp_path / "exported")
    assert load_tokenizer(tmp_path / "exported").digest == expected.digest


def test_a_configuration_agrees_with_the_run_that_was_founded_from_it(
    elsewhere: tuple[RunConfig, bytes], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = elsewhere[0].tokenizer
    given = named("my-bpe/tokenizer").tokenizer
    assert is_same_tokenizer(given, run)  # nothing is there, as for anyone who got the founder's file
    assert is_same_tokenizer(named("tokenizer").tokenizer, run)  # a founder finds this name beside its data
    assert not is_same_tokenizer(named("your-bpe/tokenizer").tokenizer, run)
    monkeypatch.chdir(here)
    assert is_same_tokenizer(given, run)
    assert is_same_tokenizer(run, run)
    assert not is_same_tokenizer(named("bytes").tokenizer, run)
    train_bpe([OTHER], 265).save(here / "my-bpe" / "tokenizer")
    assert not is_same_tokenizer(given, run)


# Those who join.


def test_the_copy_in_the_output_directory_is_enough(elsewhere: tuple[RunConfig, bytes], tmp_path: Path) -> None:
    run, _ = elsewhere
    tokenizer = run_tokenizer(run, TokenizerPlaces(packed=tmp_path / "packed"))
    assert (tokenizer.digest, tokenizer.name) == (run.tokenizer.digest, "my-bpe/tokenizer")
    assert tokenizer.encode("the sky").tolist() == train_bpe([TEXT], 265).encode("the sky").tolist()


@pytest.mark.parametrize("place", ["tokenizer", "renamed", ".", "../tokenizer", "../my-bpe/tokenizer"])
def test_it_is_found_beside_the_data(elsewhere: tuple[RunConfig, bytes], tmp_path: Path, place: str) -> None:
    run, packed = elsewhere
    data = tmp_path / "copies" / "copied"
    train_bpe([OTHER], 265).save(data / "another")
    train_bpe([TEXT], 265).save(data / place)
    places = TokenizerPlaces(packed=tmp_path / "mine", folders=[data])
    assert run_tokenizer(run, places).digest == run.tokenizer.digest
    assert (tmp_path / "mine").read_bytes() == packed  # for exports, and for peers that ask


def test_peers_hand_it_over(elsewhere: tuple[RunConfig, bytes], tmp_path: Path) -> None:
    run, packed = elsewhere
    assert run.tokenizer.local is not None
    asked: list[str] = []

    def ask_peers(digest: str) -> bytes:
        asked.append(digest)
        return packed

    places = TokenizerPlaces(packed=tmp_path / "mine", ask_peers=ask_peers)
    for _ in range(2):
        assert run_tokenizer(run, places).digest == run.tokenizer.digest
    assert asked == [run.tokenizer.local[1]]


def test_a_publication_has_it(elsewhere: tuple[RunConfig, bytes], tmp_path: Path) -> None:
    run, packed = elsewhere
    assert run_tokenizer(run, TokenizerPlaces(published=lambda: packed)).digest == run.tokenizer.digest
    other = pack(train_bpe([OTHER], 265).files)
    with pytest.raises(DataError, match="no peer has it"):
        run_tokenizer(run, TokenizerPlaces(published=lambda: other))


def test_other_files_at_the_founders_path_do_not_matter(elsewhere: tuple[RunConfig, bytes], tmp_path: Path) -> None:
    run, packed = elsewhere
    train_bpe([OTHER], 265).save(Path("my-bpe") / "tokenizer")
    assert run_tokenizer(run, TokenizerPlaces(ask_peers=lambda _: packed)).digest == run.tokenizer.digest
    with pytest.raises(DataError) as caught:
        run_tokenizer(run, TokenizerPlaces(packed=tmp_path / "out" / "tokenizer.msgpack", folders=[Path("my-bpe")]))
    line = str(caught.value)
    assert "tokenizer 'my-bpe/tokenizer' of its founder" in line
    assert f"tokenizer.msgpack of another peer's output directory to {tmp_path}" in line
    assert "\n" not in line


def test_files_with_the_chat_template_are_preferred_to_equal_ids(tmp_path: Path) -> None:
    run = founded(str(save_chat_tokenizer(tmp_path / "founder")), packed=tmp_path / "packed")
    save_chat_tokenizer(tmp_path / "data" / "tokenizer", template=None)
    packed = (tmp_path / "packed").read_bytes()
    places = TokenizerPlaces(packed=tmp_path / "mine", folders=[tmp_path / "data"])
    alone = run_tokenizer(run, places)
    assert alone.digest == run.tokenizer.digest
    tokenizer = run_tokenizer(run, dataclasses.replace(places, ask_peers=lambda _: packed))
    assert isinstance(tokenizer, FastTokenizer)
    assert tokenizer.files["chat_template.jinja"].decode() == APPENDING
    tokenizer.save(tmp_path / "exported")
    assert (tmp_path / "exported" / "chat_template.jinja").read_text() == APPENDING


@pytest.mark.parametrize("name", ["my-bpe/tokenizer", "/home/founder/my-bpe/tokenizer"])
def test_a_manifest_of_an_earlier_version_names_a_path(
    elsewhere: tuple[RunConfig, bytes], here: Path, name: str, hub: list[str]
) -> None:
    run = named(name, elsewhere[0].tokenizer.digest)
    assert run_tokenizer(run, TokenizerPlaces(folders=[here / "my-bpe"])).digest == run.tokenizer.digest
    assert hub == []


def test_bytes_of_another_tokenizer_are_refused(here: Path) -> None:
    with pytest.raises(ManifestError, match="not the one that the run uses"):
        run_tokenizer(named("bytes", 64 * "0"))


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xff\xff",
        msgpack.packb([1, 2]),
        msgpack.packb({"../../evil": b"x"}),
        msgpack.packb({"tokenizer.json": "text"}),
        msgpack.packb({"modeling.py": b"raise SystemExit", "tokenizer.json": b"{}"}),
        msgpack.packb({"tokenizer.json": b'{"hello": 1}'}),
        msgpack.packb({"tokenizer_config.json": json.dumps({"auto_map": {"AutoTokenizer": "evil.Evil"}}).encode()}),
    ],
)
def test_packed_files_are_data(packed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(DataError, match="tokenizer 'theirs'") as caught:
        load_packed("theirs", packed)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(65 << 20)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(DataError, match="more than 64 MiB"):
            load_tokenizer(path)
