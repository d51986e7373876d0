"""Keys and values of a run: unknown, missing, of the wrong type or impossible ones are refused by name."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest

from spes_swarm.base.errors import ConfigError
from spes_swarm.config.peer import PeerConfig, override
from spes_swarm.config.run import MergeConfig, ModelConfig, RunConfig, transformers_config
from tests.helpers.config_values import VALUES, with_value


def error_of(key: str, value: Any) -> str:
    """The message about VALUES with one key changed; it must name source and key."""
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(with_value(key, value), source="f.yaml")
    message = str(caught.value)
    assert message.startswith("f.yaml: run."), message
    assert "\n" not in message
    return message


# ------------------------------------------------------------------------------------- unknown and missing keys


@pytest.mark.parametrize(
    ("key", "suggested"),
    [
        ("training.learning_rat", "learning_rate"),
        ("training.warmup", "warmup_steps"),
        ("round.inner_step", "inner_steps"),
        ("modell", "model"),
        ("learning_rate", "run.training.learning_rate"),  # the right key in the wrong section
        ("model.settings.num_expert", "num_experts"),
        ("model.settings.num_experts_per_token", "num_experts_per_tok"),
        ("evaluation.xyz", ""),  # nothing is similar, something is still suggested
    ],
)
def test_unknown_key_is_refused_with_the_nearest_one(key: str, suggested: str) -> None:
    message = error_of(key, 1)
    assert f"run.{key}: unknown key" in message
    assert f"did you mean {suggested}" in message


@pytest.mark.slow
def test_unknown_model_type_is_refused_with_the_nearest_one() -> None:
    assert "model.type: found 'olmoee', " in error_of("model.type", "olmoee")
    assert "did you mean olmoe?" in error_of("model.type", "olmoee")


def test_missing_key_is_named() -> None:
    values = copy.deepcopy(VALUES)
    del values["training"]["learning_rate"]
    with pytest.raises(ConfigError, match=r"f: run\.training\.learning_rate: missing, expected a number, above 0"):
        RunConfig.from_dict(values, "f")
    del values["training"]
    with pytest.raises(ConfigError, match=r"f: run\.training: missing, expected a section"):
        RunConfig.from_dict(values, "f")


# ------------------------------------------------------------------------------------------------ types, ranges


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("training.batch_size", True, "true"),
        ("training.batch_size", 2.0, "2.0"),
        ("training.batch_size", "2", "'2'"),
        ("training.batch_size", None, "null"),
        ("training.learning_rate", "1e-3", "'1e-3'"),
        ("training.learning_rate", True, "true"),
        ("training.learning_rate", float("nan"), "nan"),
        ("training.learning_rate", float("inf"), "inf"),
        ("training.weight_decay", 10**400, "1000"),
        ("training.local_balance_start", "off", "'off'"),
        ("round.overlap", 1, "1"),
        ("round.overlap", "no", "'no'"),
        ("name", 7, "7"),
        ("name", b"x", "b'x'"),
        ("training", [], "a list"),
        ("training", None, "null"),
        ("model.settings", [], "a list"),
        ("tokenizer.digest", "abc", "'abc'"),
    ],
)
def test_wrong_type_is_refused(key: str, value: Any, found: str) -> None:
    assert f"run.{key}: found {found}" in error_of(key, value)
    assert ", expected " in error_of(key, value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", ""),
        ("name", "Quick Start"),
        ("name", "x" * 41),
        ("name", "a\n"),
        ("tokenizer.date", "today"),
        ("tokenizer.date", "2025-02-29"),
        ("tokenizer.date", "2025-02-28T10:00"),
        ("model.init_cutoff", 0.5),
        ("model.init_cutoff", 101),
        ("training.sequence_length", 1),
        ("training.batch_size", 0),
        ("training.learning_rate", 0),
        ("training.learning_rate", -1e-3),
        ("training.warmup_steps", -1),
        ("training.warmup_start_ratio", 1.1),
        ("training.decay_norm_and_bias", 1),
        ("training.adam_beta2", 1.0),
        ("training.min_learning_rate_ratio", 1.5),
        ("training.local_balance_fraction", 0),
        ("training.seed", -1),
        ("training.seed", 2**63),
        ("round.inner_steps", 0),
        ("round.window_s", 0.0),
        ("round.max_update_rms", 0),
        ("merge.alpha", 1.01),
        ("merge.neighbours", 0),
        ("evaluation.holdout_fraction", 0.6),
        ("evaluation.every_rounds", -1),
        ("ownership.max_share", 0),
        ("ownership.max_share", 1.5),
        ("experts_per_peer", 0),
    ],
)
def test_impossible_value_is_refused(key: str, value: Any) -> None:
    assert f"run.{key}: found {value!r}, expected " in error_of(key, value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("experts_per_peer", 5, "experts_per_peer: found 5, expected 1 to 4"),
        ("visible", "members", "visible: found 'members', expected 'all' in an open run"),
        ("admission", "closed", "admission: found 'closed', expected open, invite or allow-list"),
        ("training.warmup_steps", 50, "training.warmup_steps: found 50, expected fewer than total_steps (50)"),
        ("training.optimiser", "muom", "training.optimiser: found 'muom', expected adamw or muon"),
        (
            "training.adamw_learning_rate",
            0.001,
            "training.adamw_learning_rate: found 0.001, expected null with optimiser adamw (learning_rate is its peak)",
        ),
        ("training.sequence_length", 65, "training.sequence_length: found 65, expected at most 64"),
        ("round.codec", "fp8", "round.codec: found 'fp8', expected one of fp32, fp16"),
        ("round.stall_timeout_s", 301, "round.stall_timeout_s: found 301, expected at most timeout_s (300)"),
        ("round.window_s", 301, "round.window_s: found 301, expected at most timeout_s (300)"),
        ("round.lease_s", 20, "round.progress_ttl_s: found 30, expected at most lease_s (20)"),
        ("evaluation.holdout_fraction", 0, "evaluation.holdout_fraction: found 0, "),
        ("model.settings.vocab_size", 256, "model.settings.eos_token_id: found 256, expected below vocab_size"),
        ("model.settings.num_experts_per_tok", 5, "model.settings: a token goes to 5 experts, expected 1 to 4"),
        ("model.settings.num_experts_per_tok", 0, "model.settings: a token goes to 0 experts, expected 1 to 4"),
        ("model.settings.num_experts", 0, "model.settings: found a model with 0 experts, expected at least 1"),
        ("model.settings.num_experts", 1, "model.settings: a token goes to 2 experts, expected 1 expert (all that"),
        ("model.settings.hidden_size", 33, "model.settings.hidden_size: found 33, expected a multiple of 2"),
        ("model.settings.num_key_value_heads", 3, "model.settings.num_key_value_heads: found 3, expected a divisor"),
        ("model.settings.num_hidden_layers", 0, "model.settings.num_hidden_layers: found 0, expected at least 1"),
        ("model.settings.num_hidden_layers", 2 * 10**9, "model.settings.num_hidden_layers: found 2000000000, exp"),
        ("model.settings.num_experts", 4097, "model.settings.num_experts: found 4097, expected at most 4096"),
        ("model.settings.hidden_size", 1 << 40, "model.settings.hidden_size: found 1099511627776, expected at most"),
        ("model.settings.hidden_size", "32", "model.settings: transformers refuses them for olmoe: "),
        ("model.settings.rope_parameters", [], "model.settings: transformers refuses them for olmoe: "),
        ("model.settings.rms_norm_eps", float("nan"), "model.settings.rms_norm_eps: found nan, expected a finite"),
        ("model.settings.rope_parameters", {1: 2}, "model.settings.rope_parameters: found the key 1, expected text"),
    ],
)  # fmt: skip
def test_fields_must_fit_each_other(key: str, value: Any, message: str) -> None:
    assert f"run.{message}" in error_of(key, value)


@pytest.mark.parametrize("model_type", ["llama", "vit"])
def test_model_must_be_a_mixture_of_experts(model_type: str) -> None:
    message = error_of("model", {"type": model_type})
    assert f"run.model.type: found {model_type!r}, expected a mixture of experts" in message


def test_a_type_without_experts_is_the_complaint_and_not_its_settings() -> None:
    message = error_of("model.type", "gpt2")  # the settings are still those of a mixture
    assert message.endswith("run.model.type: found 'gpt2', expected a mixture of experts such as olmoe or qwen3_moe")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("batch_size", "a whole number, at least 1 and at most 1048576 (or null)"),
        ("num_threads", "a whole number, at least 1 and at most 4096 (or null)"),
    ],
)
@pytest.mark.parametrize("value", [0, 10**9])
def test_a_flag_has_the_same_limits_whichever_is_overstepped(key: str, expected: str, value: int) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"peer.{key}: found {value}, expected {expected}") + "$"):
        override(PeerConfig(), **{key: value})


def test_bytes_tokenizer_needs_its_vocabulary() -> None:
    values = with_value("model.settings.vocab_size", 256)
    values["model"]["settings"]["eos_token_id"] = None
    with pytest.raises(ConfigError, match=r"run\.model\.settings\.vocab_size: found 256, expected at least 257"):
        RunConfig.from_dict(values, "f")
    values["tokenizer"] = {"name": "bpe"}
    RunConfig.from_dict(values, "f")


@pytest.mark.parametrize(
    "key",
    ["auto_map", "trust_remote_code", "_name_or_path", "quantization_config", "model_type", "_attn_implementation"],
)
def test_settings_that_load_code_or_files_are_refused(key: str) -> None:
    assert f"run.model.settings.{key}: not allowed" in error_of(f"model.settings.{key}", "x")


def test_initial_weights_without_a_width_have_no_cutoff() -> None:
    values = with_value("model.settings.initializer_range", 0.0)
    values["model"]["init_cutoff"] = 3
    with pytest.raises(ConfigError, match=r"run\.model\.init_cutoff: found 3, expected null unless"):
        RunConfig.from_dict(values, "f")


def test_a_configuration_of_an_earlier_version_means_what_it_meant() -> None:
    run = RunConfig.from_dict(VALUES, "f")
    assert (run.training.warmup_start_ratio, run.training.decay_norm_and_bias, run.model.init_cutoff) == (
        0,
        False,
        None,
    )
    assert run.tokenizer.date == "2024-07-26"


def test_an_open_run_is_written_as_earlier_versions_read_it() -> None:
    keys = {"admission", "visible"}
    assert not keys & RunConfig.from_dict({**VALUES, "admission": "open", "visible": "all"}, "f").to_dict().keys()
    private = RunConfig.from_dict({**VALUES, "admission": "invite", "visible": "members"}, "f")
    assert {key: private.to_dict()[key] for key in keys} == {"admission": "invite", "visible": "members"}


def test_sections_check_themselves_wherever_they_are_made() -> None:
    with pytest.raises(ConfigError, match=r"^alpha: found 2, expected a number, at least 0 and at most 1$"):
        MergeConfig(alpha=2, steps=1, interval=1)
    run = RunConfig.from_dict(VALUES, "f")
    with pytest.raises(ConfigError, match="experts_per_peer"):
        dataclasses.replace(run, experts_per_peer=9)


@pytest.mark.parametrize(
    ("experts_per_peer", "max_share", "expected"), [(1, 0.5, 2), (2, 0.75, 3), (2, 0.2, 2), (4, 0.5, 4), (1, 1.0, 4)]
)
def test_a_peer_keeps_its_share_of_four_experts_or_what_the_run_asks_for(
    experts_per_peer: int, max_share: float, expected: int
) -> None:
    run = RunConfig.from_dict(with_value("ownership", {"max_share": max_share}), "f")
    assert dataclasses.replace(run, experts_per_peer=experts_per_peer).most_experts == expected


# ------------------------------------------------------------------------------------------------- model config


@pytest.mark.parametrize(
    ("model_type", "key"), [("olmoe", "num_experts"), ("qwen3_moe", "num_experts"), ("mixtral", "num_local_experts")]
)
def test_expert_numbers_are_found_whatever_they_are_called(model_type: str, key: str) -> None:
    config = ModelConfig(type=model_type, settings={key: 6, "num_experts_per_tok": 3, "vocab_size": 60_000})
    assert (config.num_experts, config.experts_per_token, config.vocab_size) == (6, 3, 60_000)
    assert transformers_config(config).model_type == model_type


def test_a_setting_that_transformers_honours_without_declaring_it_is_accepted() -> None:
    run = RunConfig.from_dict(with_value("model.settings.head_dim", 8), "f")
    assert transformers_config(run.model).head_dim == 8


def test_the_transformers_config_shares_nothing_with_ours() -> None:
    values = with_value("model.settings.rope_parameters", {"rope_type": "default", "rope_theta": 5e5})
    config = RunConfig.from_dict(values, "f").model
    transformers_config(config).rope_parameters["rope_theta"] = 1.0
    values["model"]["settings"]["rope_parameters"]["rope_theta"] = 2.0
    assert transformers_config(config).rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize("eos", [200, [199, 200]])
def test_a_pad_token_that_ends_documents_is_refused(eos: Any) -> None:
    values = with_value("model.settings.eos_token_id", eos)
    values["model"]["settings"]["pad_token_id"] = 200
    with pytest.raises(ConfigError, match=r"model\.settings\.pad_token_id: found 200, .* expected null"):
        RunConfig.from_dict(values, "run.yaml")
    values["model"]["settings"]["pad_token_id"] = 270
    assert RunConfig.from_dict(values, "run.yaml").model.settings["pad_token_id"] == 270


@pytest.mark.parametrize("pad", [0, 255])
def test_a_pad_token_that_is_a_byte_is_refused(pad: int) -> None:
    message = error_of("model.settings.pad_token_id", pad)
    assert f"model.settings.pad_token_id: found {pad}, " in message
    assert "expected null" in message
    values = with_value("model.settings.pad_token_id", 257)  # a row that no byte needs
    assert RunConfig.from_dict(values, "run.yaml").model.settings["pad_token_id"] == 257


def test_the_pad_token_that_transformers_chooses_is_refused_too() -> None:
    values = with_value("model.settings.vocab_size", 60_000)
    del values["model"]["settings"]["pad_token_id"]  # OlmoeConfig: 1, a byte
    with pytest.raises(ConfigError, match=r"pad_token_id: found 1, .* expected null"):
        RunConfig.from_dict(values, "run.yaml")
