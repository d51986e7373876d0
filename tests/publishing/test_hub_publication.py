"""`spes_swarm.json` and the card: what strangers write into them does no harm."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from safetensors.numpy import save_file

from spes_swarm.base.errors import PublicationError, UserError
from spes_swarm.publishing.card import CardFacts, Contributor, card, escape
from spes_swarm.publishing.publication import (
    MAX_HISTORY,
    MAX_PUBLICATION_BYTES,
    LossPoint,
    Publication,
    merge_history,
    parse_publication,
    read_export,
)
from spes_swarm.publishing.tensor_file import map_tensors
from tests.helpers.publications import manifest_of, packed


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Publication:
    """A good one."""
    history = [LossPoint(round=1, tokens=1000, loss=3.5), LossPoint(round=2, tokens=2000, loss=2.5)]
    return packed(tmp_path_factory.mktemp("good"), 2, tokens=2000, peers=3, history=history)[1]


def content(publication: Publication) -> dict[str, Any]:
    return dict(json.loads(publication.to_bytes()))


def parse(values: Any) -> Publication:
    return parse_publication(json.dumps(values).encode(), "test")


@pytest.mark.slow
def test_what_was_written_is_what_is_read(published: Publication) -> None:
    assert parse_publication(published.to_bytes(), "test") == published
    assert published.manifest == manifest_of()
    assert published.steps == 2 * manifest_of().run.round.inner_steps


_OTHER_RUN = manifest_of(name="other")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"format": 2}, id="format"),
        pytest.param({"surprise": 1}, id="unknown field"),
        pytest.param({"round": -1}, id="negative round"),
        pytest.param({"round": 1 << 70}, id="huge round"),
        pytest.param({"round": "2"}, id="round as text"),
        pytest.param({"tokens": 1.5}, id="fraction of a token"),
        pytest.param({"digest": "00" * 32}, id="digest of something else"),
        pytest.param({"layout": "00" * 32}, id="layout of something else"),
        pytest.param({"blocks": []}, id="no blocks"),
        pytest.param({"run_id": "test-" + "0" * 24}, id="id of another run"),
        pytest.param({"run": {"manifest": "AAAA", "signature": "AAAA"}}, id="garbage for a run"),
        pytest.param({"run": {"manifest": "not base64!", "signature": "AAAA"}}, id="no base64"),
        pytest.param(
            {
                "run": {
                    "manifest": base64.b64encode(_OTHER_RUN.data).decode(),
                    "signature": base64.b64encode(manifest_of().signature).decode(),
                },
                "run_id": _OTHER_RUN.run_id,
            },
            id="run that its founder has not signed",
        ),
        pytest.param({"files": []}, id="no files"),
        pytest.param({"files": [{"name": "../evil", "size": 1, "sha256": "0" * 64}]}, id="path upwards"),
        pytest.param({"files": [{"name": "/etc/passwd", "size": 1, "sha256": "0" * 64}]}, id="absolute path"),
        pytest.param({"files": [{"name": "a/b", "size": 1, "sha256": "0" * 64}]}, id="path downwards"),
        pytest.param({"files": [{"name": ".bashrc", "size": 1, "sha256": "0" * 64}]}, id="hidden file"),
        pytest.param({"files": [{"name": "a\n", "size": 1, "sha256": "0" * 64}]}, id="line end in a name"),
        pytest.param({"files": [{"name": "A", "size": 1, "sha256": "0" * 64}] * 2}, id="name twice"),
        pytest.param({"files": [{"name": "spes_swarm.json", "size": 1, "sha256": "0" * 64}]}, id="itself"),
        pytest.param({"history": [{"round": 1, "tokens": 1, "loss": float("nan")}]}, id="loss that is no number"),
        pytest.param({"history": [{"round": r, "tokens": 1, "loss": 1.0} for r in (2, 1)]}, id="history in disorder"),
    ],
)
def test_what_does_not_fit_is_refused(published: Publication, change: dict[str, Any]) -> None:
    with pytest.raises(PublicationError) as refusal:
        parse({**content(published), **change})
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        b'{"format":1' + b',"a":1' * 10,
        pytest.param(b" " * (MAX_PUBLICATION_BYTES + 1), id="oversized"),
    ],
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(PublicationError):
        parse_publication(data, "test")


@settings(max_examples=150)
@given(data=st.data())
def test_any_change_of_a_byte_is_refused_or_harmless(published: Publication, data: st.DataObject) -> None:
    raw = bytearray(published.to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    refusal, found = "", None
    try:
        found = parse_publication(bytes(raw), "test")
    except PublicationError as exc:
        refusal = str(exc)
    assert refusal.isprintable()  # nothing in it moves a cursor
    assert found is None or (found.manifest.run_id, found.digest) == (published.run_id, published.digest)


def test_a_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    export, publication = packed(tmp_path, 1)
    path = export / publication.weights[-1].name
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    with pytest.raises(PublicationError, match=path.name):
        read_export(export)
    path.unlink()
    with pytest.raises(PublicationError, match=path.name):
        read_export(export)


def test_histories_of_several_publishers_become_one() -> None:
    def points(*rounds: int, loss: float) -> list[LossPoint]:
        return [LossPoint(round=number, tokens=None, loss=loss) for number in rounds]

    merged = merge_history(points(1, 2, 3, loss=3.0), points(3, 5, loss=2.0))
    assert [(point.round, point.loss) for point in merged] == [(1, 3.0), (2, 3.0), (3, 2.0), (5, 2.0)]
    thinned = merge_history(points(*range(3 * MAX_HISTORY), loss=1.0))
    assert len(thinned) <= MAX_HISTORY
    assert (thinned[0].round, thinned[-1].round) == (0, 3 * MAX_HISTORY - 1)


# Safetensors headers.


def stored(header: Any, body: bytes = b"\0" * 16) -> bytes:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(data).to_bytes(8, "little") + data + body


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\xff" * 8,
        stored(b"\xff"),
        stored(b"[" * 10_000),
        stored([]),
        stored({"a": 1}),
        stored(entry(dtype="I32")),
        stored(entry(shape=[5])),
        stored(entry(shape=[-4])),
        stored(entry(shape=[2**62, 2**62])),
        stored(entry(shape=[True] * 4)),
        stored(entry(shape=[1] * 9)),
        stored(entry(data_offsets=[0, 32], shape=[8])),
        stored(entry(data_offsets=[-16, 0])),
        stored(entry(data_offsets=[0])),
        stored(entry(data_offsets=None)),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(PublicationError, match=r"model\.safetensors"):
        map_tensors(path)


def test_a_good_file_is_read_as_the_library_does(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.full(1, 7, np.float32)}
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = map_tensors(tmp_path / "x.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert np.asarray(found[name]).tobytes() == array.tobytes()


# The card.


@pytest.mark.parametrize(
    ("steps", "text"),
    [(999, "| 999 of 2,000 |"), (2000, "| 2,000 of 2,000 |"), (5070, "| 5,070; the schedule ended at 2,000 |")],
)
def test_a_card_says_how_far_the_schedule_is(published: Publication, steps: int, text: str) -> None:
    assert published.manifest.run.training.total_steps == 2000
    assert text in card(published.model_copy(update={"steps": steps}), CardFacts(), picture=False)


@pytest.mark.parametrize(
    ("facts", "tags", "source"),
    [(CardFacts(), False, "PUBLICATION"), (CardFacts(repository="you/model"), True, "you/model")],
    ids=["in a directory", "on the Hub"],
)
def test_a_card_speaks_of_revisions_only_where_there_are_any(
    published: Publication, facts: CardFacts, tags: bool, source: str
) -> None:
    text = card(published, facts, picture=False)
    assert ("has a tag: leave `revision` out" in text) == ('revision="round-' in text) == tags
    assert f"--from-hub {source}" in text
    assert "--initial-peers" in text


_HOSTILE = [
    "<script>alert(1)</script>",
    "[click](javascript:alert(1))",
    "![x](https://evil.example/x.png)",
    "| cell | cell |",
    "a\n# Heading\n",
    "`code`",
    "***bold***",
    "\u202eevil\u202c",
    "---\nlicense: mine\n---",
    "&lt;b&gt;",
    "https://evil.example",
    "\x1b[31mred",
]


@pytest.mark.parametrize("name", _HOSTILE)
def test_a_name_becomes_no_markup(published: Publication, name: str) -> None:
    plain = card(published, CardFacts(contributors=[Contributor(name="x", tokens=5)]), picture=False)
    hostile = card(published, CardFacts(contributors=[Contributor(name=name, tokens=5)]), picture=False)
    parser = MarkdownIt("commonmark").enable("table")

    def structure(text: str) -> list[str]:
        body = text.split("\n---\n", 1)[1]
        tokens = [token for outer in parser.parse(body) for token in (outer, *(outer.children or ()))]
        return [token.type for token in tokens]

    assert structure(hostile) == structure(plain)
    assert hostile.split("\n---\n", 1)[0] == plain.split("\n---\n", 1)[0]


@given(st.text())
def test_escaped_text_is_one_harmless_line(text: str) -> None:
    rendered = MarkdownIt().renderInline(escape(text))
    assert "\n" not in escape(text)
    assert "<" not in rendered


def test_the_front_matter_is_data_for_the_hub(published: Publication) -> None:
    facts = CardFacts(license="apache-2.0", base_model="allenai/OLMoE-1B-7B-0924")
    fields = yaml.safe_load(card(published, facts, picture=False).split("---\n")[1])
    assert (fields["library_name"], fields["license"]) == ("transformers", "apache-2.0")
    assert fields["base_model"] == "allenai/OLMoE-1B-7B-0924"
    assert "olmoe" in fields["tags"]
    assert "license" not in yaml.safe_load(card(published, CardFacts(), picture=False).split("---\n")[1])


@pytest.mark.parametrize("facts", [CardFacts(license="a\nb: c"), CardFacts(base_model="<b>"), CardFacts(license="")])
def test_facts_that_cannot_be_identifiers(published: Publication, facts: CardFacts) -> None:
    with pytest.raises(UserError, match="identifier"):
        card(published, facts, picture=False)


def test_an_address_is_told_only_if_it_is_given(published: Publication) -> None:
    address = "/ip4/192.0.2.7/tcp/4001/p2p/QmPeer"
    assert "/ip4/" not in card(published, CardFacts(), picture=False)
    assert f"--initial-peers {address} " in card(published, CardFacts(join_address=address), picture=False)
    with pytest.raises(UserError):
        card(published, CardFacts(join_address="```"), picture=False)


@pytest.mark.slow
def test_a_picture_takes_two_points(tmp_path: Path) -> None:
    points = [LossPoint(round=1, tokens=None, loss=3.0), LossPoint(round=2, tokens=None, loss=2.0)]
    with_picture, _ = packed(tmp_path, 2, history=points)
    without, _ = packed(tmp_path, 1, history=points)  # the second is of a later round
    assert (with_picture / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "loss.png" in (with_picture / "README.md").read_text()
    assert not (without / "loss.png").exists()
    assert "loss.png" not in (without / "README.md").read_text()
