"""The run that begins from an upcycled model: its configuration accepts the weights, and each of its weights trains."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.utils import logging

from spes_swarm.config.file import load_config
from spes_swarm.config.run import ModelConfig, RunConfig
from spes_swarm.convert.recipes import moe_settings, recipe_for
from spes_swarm.data.tokenizer import ByteTokenizer
from spes_swarm.model.initial_weights import load_initial_reference, model_section
from spes_swarm.model.sparse_model import build_model, flat_from_model, layout_of
from spes_swarm.protocol.consensus.layout import Layout
from tests.helpers.repository import ROOT
from tests.helpers.upcycling_models import KINDS, options, save_dense

torch.set_num_threads(1)


def layout_for(model: ModelConfig) -> Layout:
    return layout_of(build_model(model.type, model.settings, 0, "meta", on_meta=True))


def initial_reference(directory: Path, model: ModelConfig) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What a founder of this model reads with --initial-weights."""
    layout = layout_for(model)
    reference_N = np.full(layout.num_elements, np.nan, dtype=np.float32)
    load_initial_reference(directory, layout, reference_N)
    assert np.isfinite(reference_N).all()
    return reference_N


@pytest.fixture
def script(
    command: Callable[[list[str]], int], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[[Path, Path, Path], RunConfig]]:
    """`upcycle --write-config`; returns the run that it wrote. It writes nothing to stderr."""

    def write_config(source: Path, mixture: Path, config: Path) -> RunConfig:
        capfd.readouterr()
        caplog.clear()
        logger.warning_once.cache_clear()  # an earlier test may have caused the same warning
        arguments = [str(source), str(mixture), "--experts", "4", "--noise-std", "0", "--write-config", str(config)]
        assert (command(arguments), capfd.readouterr().err, caplog.messages) == (0, "", [])
        run = load_config(config).run
        assert run is not None
        return run

    # This logger does not propagate, and prints to the stderr of the time when it was imported.
    logger: Any = logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    yield write_config
    logger.removeHandler(caplog.handler)


@pytest.mark.slow
def test_a_run_starts_from_a_tied_dense_model(tmp_path: Path, script: Callable[[Path, Path, Path], RunConfig]) -> None:
    """Qwen3-1.7B-Base ties its head to the embedding; the authors' mixture of it has a head of its own."""
    source = save_dense(tmp_path / "dense", "qwen3", tie_word_embeddings=True)
    ByteTokenizer().save(source)
    run = script(source, tmp_path / "moe", tmp_path / "run.yaml")
    assert run.model.settings["tie_word_embeddings"] is False
    reference_N = initial_reference(tmp_path / "moe", run.model)
    slots = {slot.name: slot for slot in layout_for(run.model).blocks[0].slots}
    head, embedding = slots["lm_head.weight"], slots["model.embed_tokens.weight"]
    np.testing.assert_array_equal(
        reference_N[head.start :][: head.size], reference_N[embedding.start :][: embedding.size]
    )


def test_the_shipped_configuration_has_the_layout_of_its_upcycled_model(tmp_path: Path) -> None:
    qwen = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
    }  # config.json of Qwen/Qwen3-1.7B-Base
    CONFIG_MAPPING["qwen3"](**qwen).save_pretrained(tmp_path)
    recipe, dense = recipe_for(tmp_path)
    upcycled = ModelConfig(type=recipe.target, settings=moe_settings(recipe, dense, options(experts=8)))
    shipped = load_config(ROOT / "configs" / "spes-9b-qwen3.yaml").run
    assert shipped is not None
    assert layout_for(shipped.model) == layout_for(upcycled)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_of_the_embedding_trains(
    tmp_path: Path, script: Callable[[Path, Path, Path], RunConfig], kind: str
) -> None:
    """Also that of the end of documents, which some dense models use as their pad token."""
    source = save_dense(tmp_path / "dense", kind, pad_token_id=256)
    ByteTokenizer().save(source)
    run = script(source, tmp_path / "moe", tmp_path / "run.yaml")
    written = json.loads((tmp_path / "moe" / "config.json").read_text(encoding="utf-8"))
    for settings in (run.model.settings, model_section(tmp_path / "moe")["settings"], written):
        assert settings["pad_token_id"] is None
    model = build_model(run.model.type, run.model.settings, 0, "cpu")
    ids_BS = torch.tensor([[7, 256, 8, 9]])
    model(input_ids=ids_BS, labels=ids_BS).loss.backward()
    assert model.get_input_embeddings().weight.grad[256].abs().max() > 0
    assert flat_from_model(model, layout_for(run.model)).shape == initial_reference(tmp_path / "moe", run.model).shape
