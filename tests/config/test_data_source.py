"""The grammar of --data."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_swarm.base.errors import DataError
from spes_swarm.config.data_source import HfName, Weighted, join_mixture, parse_hf, parse_mixture


def test_a_single_source_is_left_as_it_is() -> None:
    for text in ("stdlib", "my-tokens/", "texts/*.jsonl", "2024*.txt", "a + b.txt", "hf:user/name"):
        assert parse_mixture(text) == (Weighted(1.0, text),)
        assert join_mixture(parse_mixture(text)) == text


def test_the_weights_of_a_mixture_add_up_to_1() -> None:
    mixture = parse_mixture("7*hf:user/name:en + 2.5 * texts/*.jsonl + .5*stdlib")
    assert mixture == (Weighted(0.7, "hf:user/name:en"), Weighted(0.25, "texts/*.jsonl"), Weighted(0.05, "stdlib"))
    assert parse_mixture(join_mixture(mixture)) == mixture


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0.7*a + b", "found 'b' in a mixture, expected WEIGHT*SOURCE"),
        ("a + 0.3*b", "found 'a' in a mixture"),
        ("0.7*a + ", "found '' in a mixture"),
        ("0*a + 1*b", "found the weight 0, expected a number above 0"),
        ("1e999*a + 1*b", "found the weight 1e999"),
        ("1*a + 1*a", "found 'a' twice"),
    ],
)
def test_malformed_mixtures(text: str, found: str) -> None:
    with pytest.raises(DataError) as error:
        parse_mixture(text)
    assert found in str(error.value)


def test_data_sets(tmp_path: Path) -> None:
    assert parse_hf("my-tokens/") is None
    assert parse_hf("hf:user/name") == HfName("user/name")
    assert parse_hf("hf:name:en@0a1b") == HfName("name", "en", "0a1b")
    assert parse_hf(f"hf:{tmp_path}:en") == HfName(str(tmp_path), "en", is_local=True)
    for text in ("hf:user/name:en@0a1b", "hf:user/name@main", f"hf:{tmp_path}"):
        assert str(parse_hf(text)) == text


@pytest.mark.parametrize(
    "text", ["hf:", "hf:a b", "hf:a/b/c", "hf:a:", "hf:a@", "hf:./missing", "hf:/missing/", "hf:@x"]
)
def test_malformed_names_of_data_sets(text: str) -> None:
    with pytest.raises(DataError, match="data source"):
        parse_hf(text)
