"""A stranger's description of a run is refused by its numbers, before anything of their size is made."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from spes_swarm.base.errors import ConfigError, ManifestError
from spes_swarm.config.file import load_config
from spes_swarm.config.manifest import found_run, open_manifest
from spes_swarm.config.run import RunConfig, transformers_config
from tests.helpers.repository import ROOT
from tests.helpers.rounds import identity
from tests.helpers.swarm import TINY_RUN, merged

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def run_with(**changes: Any) -> RunConfig:
    return RunConfig.from_dict(merged(TINY_RUN, changes), "it")


def settings(**changes: Any) -> dict[str, Any]:
    return {"model": {"settings": changes}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (settings(num_hidden_layers=1024, num_experts=4096), "num_hidden_layers: found 1024, expected at most 256"),
        (settings(num_hidden_layers=17, num_experts=4096), "17 layers of 4096 experts, expected at most 65536"),
        (settings(num_hidden_layers=256, num_experts=257), "256 layers of 257 experts, expected at most 65536"),
        (settings(hidden_size=1 << 18), "hidden_size: found 262144, expected at most 131072"),
        (settings(intermediate_size=1 << 18), "intermediate_size: found 262144, expected at most 131072"),
        (settings(vocab_size=1 << 23), "vocab_size: found 8388608, expected at most 4194304"),
        (settings(num_attention_heads=1 << 13), "num_attention_heads: found 8192, expected at most 4096"),
        (
            settings(hidden_size=1 << 15, intermediate_size=1 << 17, num_experts=128),
            "a model of some 3,.* billion",
        ),
        (settings(max_position_embeddings=1 << 40), "max_position_embeddings: found 1099511627776"),
        (settings(rope_parameters={"rope_type": "default", "layers": [1, 1 << 50]}), "rope_parameters.layers: found"),
        (settings(eos_token_id=1 << 5000), "eos_token_id: found a number of 5001 bits"),
        ({"training": {"batch_size": 1 << 40}}, "training.batch_size: found 1099511627776, .* at most 1048576"),
        ({"training": {"sequence_length": 1 << 40}}, "training.sequence_length: found 1099511627776"),
        ({"training": {"batch_size": 1 << 20}}, "training.batch_size: found 1048576, expected at most 262144 with"),
        ({"training": {"total_steps": 1 << 41}}, "training.total_steps: found"),
        ({"merge": {"neighbours": 1 << 41}}, "merge.neighbours: found"),
        ({"evaluation": {"sequences": 1 << 41}}, "evaluation.sequences: found"),
        (
            {**settings(hidden_size=4096, intermediate_size=4096, num_experts=128), "round": {"part_elements": 100}},
            "round.part_elements: found 100, expected at least 7.. for a model of this size",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_it_is_refused_at_once(changes: dict[str, Any], message: str) -> None:
    run_with()  # transformers is imported by now
    before = time.process_time()
    with pytest.raises(ConfigError, match=message):
        run_with(**changes)
    assert time.process_time() - before < 2.0


def test_a_founder_who_signs_it_is_refused_too() -> None:
    """What a hostile founder's peer answers is read by the same rules; only its own program would write it."""
    honest = found_run(run_with(), "0" * 64, identity(0))
    data = honest.data.replace(b'"batch_size":2', b'"batch_size":1099511627776')
    assert data != honest.data
    signature = identity(0).sign(b"spes_swarm/1\0manifest\0" + data)
    with pytest.raises(ManifestError, match=r"training\.batch_size: found 1099511627776"):
        open_manifest({"manifest": data, "signature": signature}, "peer")


@pytest.mark.slow
def test_the_parameters_are_counted_without_a_model() -> None:
    """Against models that were built, on the meta device: norms are all that is left out."""
    for path in CONFIGS:
        run = load_config(path).run
        assert run is not None, path
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(transformers_config(run.model))
        counted = sum(parameter.numel() for parameter in model.parameters())
        norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
        assert run.model.num_parameters == counted - norms, path


def test_tied_embeddings_count_once() -> None:
    tied, untied = (run_with(**settings(tie_word_embeddings=tie)).model.num_parameters for tie in (True, False))
    vocabulary, hidden = (TINY_RUN["model"]["settings"][key] for key in ("vocab_size", "hidden_size"))
    assert untied - tied == vocabulary * hidden


def test_the_largest_published_mixtures_are_accepted() -> None:
    """DeepSeek-V3 with 671 billion parameters, as transformers knows it; all its layers are taken for mixtures."""
    model = {"type": "deepseek_v3", "settings": {"vocab_size": 129280}}
    run = RunConfig.from_dict({**merged(TINY_RUN, {}), "model": model}, "it")
    assert 6.7e11 < run.model.num_parameters < 7.2e11


def test_a_peers_own_batch_is_bounded_with_the_runs_sequences() -> None:
    training = run_with().training
    assert (training.batch_size_of(None), training.batch_size_of(7)) == (2, 7)
    with pytest.raises(ConfigError, match="batch_size: found 262145, expected at most 262144 with sequences of 64"):
        training.batch_size_of(262_145)
