from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_swarm.config import (
    EvaluationConfig,
    MergeConfig,
    ModelConfig,
    PeerConfig,
    RoundConfig,
    RunConfig,
    TokenizerConfig,
    TrainingConfig,
    canonical_json,
    default_config_path,
    load_config,
    override,
    parse_experts,
    transformers_config,
)
from spes_swarm.errors import ConfigError

VALUES: dict[str, Any] = {
    "name": "test",
    "model": {
        "type": "olmoe",
        "settings": {
            "vocab_size": 272,
            "hidden_size": 32,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 64,
            "eos_token_id": 256,
            "pad_token_id": None,
        },
    },
    "training": {
        "sequence_length": 64,
        "batch_size": 2,
        "learning_rate": 1e-3,
        "warmup_steps": 5,
        "total_steps": 50,
    },
    "round": {"inner_steps": 5},
    "merge": {"steps": 10, "interval": 5},
    "experts_per_peer": 2,
}


def with_value(key: str, value: Any) -> dict[str, Any]:
    """VALUES with one dotted key changed."""
    values = copy.deepcopy(VALUES)
    *sections, last = key.split(".")
    target = values
    for section in sections:
        target = target.setdefault(section, {})
    target[last] = value
    return values


def error_of(key: str, value: Any) -> str:
    """The message about VALUES with one key changed; it must name source and key."""
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(with_value(key, value), source="f.yaml")
    message = str(caught.value)
    assert message.startswith("f.yaml: run."), message
    assert "\n" not in message
    return message


def yaml_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "f.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def yaml_error(tmp_path: Path, text: str) -> str:
    path = yaml_file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


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
        ("training.sequence_length", 1),
        ("training.batch_size", 0),
        ("training.learning_rate", 0),
        ("training.learning_rate", -1e-3),
        ("training.warmup_steps", -1),
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
        ("experts_per_peer", 0),
    ],
)
def test_impossible_value_is_refused(key: str, value: Any) -> None:
    assert f"run.{key}: found {value!r}, expected " in error_of(key, value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("experts_per_peer", 5, "experts_per_peer: found 5, expected 1 to 4"),
        ("training.warmup_steps", 50, "training.warmup_steps: found 50, expected fewer than total_steps (50)"),
        ("training.sequence_length", 65, "training.sequence_length: found 65, expected at most 64"),
        ("round.codec", "fp8", "round.codec: found 'fp8', expected one of fp32, fp16"),
        ("round.stall_timeout_s", 301, "round.stall_timeout_s: found 301, expected at most timeout_s (300)"),
        ("round.window_s", 301, "round.window_s: found 301, expected at most timeout_s (300)"),
        ("round.lease_s", 20, "round.progress_ttl_s: found 30, expected at most lease_s (20)"),
        ("evaluation.holdout_fraction", 0, "evaluation.holdout_fraction: found 0, "),
        ("model.settings.vocab_size", 256, "model.settings.eos_token_id: found 256, expected below vocab_size"),
        ("model.settings.num_experts_per_tok", 5, "model.settings: a token goes to 5 experts, expected 1 to 4"),
        ("model.settings.num_experts_per_tok", 0, "model.settings: a token goes to 0 experts, expected 1 to 4"),
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


def test_sections_check_themselves_wherever_they_are_made() -> None:
    with pytest.raises(ConfigError, match=r"^alpha: found 2, expected a number, at least 0 and at most 1$"):
        MergeConfig(alpha=2, steps=1, interval=1)
    run = RunConfig.from_dict(VALUES, "f")
    with pytest.raises(ConfigError, match="experts_per_peer"):
        dataclasses.replace(run, experts_per_peer=9)


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


# ---------------------------------------------------------------------------------------------------- round trip

positive = st.floats(1e-12, 1e6, allow_subnormal=False)
fraction = st.floats(0, 1)


@st.composite
def runs(draw: st.DrawFn) -> RunConfig:
    num_experts = draw(st.integers(1, 16))
    total_steps = draw(st.integers(1, 10**6))
    timeout_s, lease_s = draw(positive), draw(positive)
    heads = draw(st.integers(1, 4))
    return RunConfig(
        name=draw(st.from_regex(r"[a-z0-9-]{1,40}", fullmatch=True)),
        model=ModelConfig(
            type=draw(st.sampled_from(["olmoe", "qwen3_moe"])),
            settings={
                "num_experts": num_experts,
                "num_experts_per_tok": draw(st.integers(1, num_experts)),
                "num_attention_heads": heads,
                "num_key_value_heads": draw(st.sampled_from([1, heads])),
                "hidden_size": heads * draw(st.integers(1, 100)),
                "max_position_embeddings": 4096,
                "rms_norm_eps": draw(positive),
                "tie_word_embeddings": draw(st.booleans()),
                "rope_parameters": {"rope_type": "default", "rope_theta": draw(positive)},
                "eos_token_id": draw(st.none() | st.lists(st.integers(0, 255), max_size=3)),
            },
        ),
        tokenizer=TokenizerConfig(
            name=draw(st.sampled_from(["bytes", "bpe", "Qwen/Qwen2.5-0.5B"])),
            digest=draw(st.none() | st.from_regex(r"[0-9a-f]{64}", fullmatch=True)),
        ),
        training=TrainingConfig(
            sequence_length=draw(st.integers(2, 4096)),
            batch_size=draw(st.integers(1, 4096)),
            learning_rate=draw(positive | st.integers(1, 5)),
            warmup_steps=draw(st.integers(0, total_steps - 1)),
            total_steps=total_steps,
            weight_decay=draw(st.sampled_from([0, 0.0, -0.0, 1, 0.1])),
            local_balance_start=draw(st.none() | fraction),
            seed=draw(st.integers(0, 2**63 - 1)),
        ),
        round=RoundConfig(
            inner_steps=draw(st.integers(1, 1000)),
            codec=draw(st.sampled_from(["fp32", "fp16"])),
            window_s=draw(st.floats(1e-13, timeout_s)),
            stall_timeout_s=timeout_s,
            timeout_s=timeout_s,
            progress_ttl_s=lease_s,
            lease_s=lease_s,
            overlap=draw(st.booleans()),
        ),
        merge=MergeConfig(alpha=draw(fraction), steps=draw(st.integers(0, 99)), interval=draw(st.integers(0, 99))),
        experts_per_peer=draw(st.integers(1, num_experts)),
        evaluation=EvaluationConfig(every_rounds=draw(st.integers(0, 9))),
    )


@settings(max_examples=60, deadline=None)
@given(runs())
def test_round_trip(run: RunConfig) -> None:
    again = RunConfig.from_dict(run.to_dict(), "f")
    assert again == run
    assert again.digest == run.digest
    # Also through the bytes of a manifest, and between processes.
    through_json = RunConfig.from_dict(json.loads(canonical_json(run)), "f")
    assert through_json == run
    assert canonical_json(through_json) == canonical_json(run)
    assert pickle.loads(pickle.dumps(run)) == run


@given(
    st.builds(
        PeerConfig,
        experts=st.sampled_from(["auto", "3", "0,1"]),
        initial_peers=st.lists(st.sampled_from(["/ip4/1.2.3.4/tcp/1/p2p/Qm", "/dns/a/tcp/2"])),
        seed=st.none() | st.integers(0, 2**63 - 1),
        upload_mbps=st.none() | positive | st.integers(1, 9),
    )
)
def test_peer_round_trip(peer: PeerConfig) -> None:
    assert PeerConfig.from_dict(peer.to_dict(), "f") == peer
    assert PeerConfig.from_dict(json.loads(json.dumps(peer.to_dict())), "f") == peer


def test_to_dict_shares_nothing() -> None:
    run = RunConfig.from_dict(VALUES, "f")
    run.to_dict()["model"]["settings"]["hidden_size"] = 7
    assert run == RunConfig.from_dict(VALUES, "f")


# ------------------------------------------------------------------------------------------------ canonical JSON


def test_canonical_json_does_not_depend_on_order_or_on_how_numbers_are_written() -> None:
    run = RunConfig.from_dict(VALUES, "f")
    reversed_values = {key: VALUES[key] for key in reversed(VALUES)}
    reversed_values["model"] = {
        "settings": dict(reversed(VALUES["model"]["settings"].items())),
        "type": "olmoe",
    }
    assert canonical_json(RunConfig.from_dict(reversed_values, "f")) == canonical_json(run)
    as_int = RunConfig.from_dict(with_value("round.window_s", 7), "f")
    as_float = RunConfig.from_dict(with_value("round.window_s", 7.0), "f")
    assert canonical_json(as_int) == canonical_json(as_float)
    assert b'"window_s":7.0' in canonical_json(as_int)
    zero = RunConfig.from_dict(with_value("training.weight_decay", 0), "f")
    minus_zero = RunConfig.from_dict(with_value("training.weight_decay", -0.0), "f")
    assert canonical_json(zero) == canonical_json(minus_zero)


def test_canonical_json_is_ascii_sorted_and_without_spaces() -> None:
    run = RunConfig.from_dict(with_value("tokenizer.name", "größe/tök"), "f")
    data = canonical_json(run)
    assert data.isascii()
    assert b" " not in data
    expected = json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode()
    assert data == expected


def test_digest_is_the_same_in_another_process_and_changes_with_every_field() -> None:
    run = RunConfig.from_dict(VALUES, "f")
    code = (
        "import json, sys; from spes_swarm.config import RunConfig; "
        "print(RunConfig.from_dict(json.load(sys.stdin), 'f').digest)"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(VALUES), capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == run.digest
    changed = [
        dataclasses.replace(run, name="other"),
        dataclasses.replace(run, experts_per_peer=1),
        dataclasses.replace(run, training=dataclasses.replace(run.training, learning_rate=2e-3)),
        dataclasses.replace(run, tokenizer=TokenizerConfig(digest="0" * 64)),
    ]
    assert len({item.digest for item in (run, *changed)}) == 1 + len(changed)


# ----------------------------------------------------------------------------------------------------- YAML


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "1E-4", "0.0001", ".0001", "1.e-4", "1e-04", "+1e-4"])
def test_every_spelling_of_a_float_is_a_float(tmp_path: Path, text: str) -> None:
    assert load_config(yaml_file(tmp_path, f"peer: {{upload_mbps: {text}}}")).peer.upload_mbps == 1e-4


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("client_mode: yes", "peer.client_mode: found 'yes', expected true or false"),
        ("client_mode: 0", "peer.client_mode: found 0, expected true or false"),
        ("relay: on", "peer.relay: found 'on', expected auto or off"),
        ("{client_mode: true, assume_reachable: true}", "peer.assume_reachable: found true, expected false in client_"),
        ("keep_checkpoints: 2.0", "peer.keep_checkpoints: found 2.0, expected a whole number, at least 1"),
        ("keep_checkpoints: 1e3", "peer.keep_checkpoints: found 1000.0, "),
        ("keep_checkpoints: true", "peer.keep_checkpoints: found true, "),
        ("keep_checkpoints: 010", "peer.keep_checkpoints: found '010', "),  # not octal 8
        ("max_rounds: 1:30", "peer.max_rounds: found '1:30', "),  # not sexagesimal 90
        ("experts: 2", "peer.experts: found 2, expected a text"),
        ("upload_mbps: .inf", "peer.upload_mbps: found inf, expected a number"),
        ("upload_mbps: .nan", "peer.upload_mbps: found nan, expected a number"),
        ("initial_peers: /ip4/1.2.3.4", "peer.initial_peers: found '/ip4/1.2.3.4', expected a list"),
        ("initial_peers: [1]", "peer.initial_peers.0: found 1, expected a text"),
        ("device: gpu", "peer.device: found 'gpu', expected auto, cpu, cuda or cuda:N"),
        ("7: 8", "peer.7: unknown key"),
        ("<<: {seed: 1}", "peer.<<: unknown key"),
    ],
)
def test_yaml_traps(tmp_path: Path, text: str, found: str) -> None:
    assert yaml_error(tmp_path, f"peer:\n  {text}\n").startswith(found)


def test_words_stay_words(tmp_path: Path) -> None:
    # YAML 1.1 reads these as a bool and a date.
    text = "peer: {name: no, output_dir: 2024-01-01, experts: '3', identity: null, num_threads: ~}"
    peer = load_config(yaml_file(tmp_path, text)).peer
    assert (peer.name, peer.output_dir, peer.experts) == ("no", "2024-01-01", "3")
    assert (peer.identity, peer.num_threads) == (None, None)


@pytest.mark.parametrize("text", ["peer:\n  seed: 1\n  seed: 2\n", "peer: {}\nrun: {}\npeer: {}\n"])
def test_duplicate_keys_are_refused(tmp_path: Path, text: str) -> None:
    assert yaml_error(tmp_path, text).startswith("line 3: the key ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "found a list, expected the sections run: and peer:"),
        ("peers: {}", "peers: unknown key, did you mean peer?"),
        ("learning_rate: 1", "learning_rate: unknown key, did you mean "),
        ("experts: auto", "experts: unknown key, did you mean peer.experts?"),
        ("round: {}", "round: unknown key, did you mean run.round?"),
        ("peer: [", "line 1: "),
        ("peer: !!python/object/apply:os.system ['true']", "line 1: could not determine a constructor"),
        ("run: {name: x, model: {type: olmoe, settings: &a {b: *a}}}", ""),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    assert yaml_error(tmp_path, text).startswith(message)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.yaml: not UTF-8"):
        load_config(tmp_path / "binary.yaml")


def test_sections_are_optional(tmp_path: Path) -> None:
    for text in ("", "peer:\n", "run:\npeer: {}\n"):
        assert load_config(yaml_file(tmp_path, text)) == (None, PeerConfig())
    assert load_config(yaml_file(tmp_path, "peer: {seed: 3}")).peer.seed == 3


def test_default_config_is_the_quickstart() -> None:
    run, peer = load_config(default_config_path())
    assert run is not None
    assert run.name == "quickstart"
    assert peer == PeerConfig()


# ------------------------------------------------------------------------------------------ command line, experts


def test_override_applies_the_flags_that_were_given() -> None:
    peer = PeerConfig(experts="3", seed=5)
    changed = override(peer, experts=None, seed=6, initial_peers=["/ip4/1.2.3.4/tcp/5"], client_mode=True)
    assert changed == dataclasses.replace(peer, seed=6, initial_peers=("/ip4/1.2.3.4/tcp/5",), client_mode=True)
    with pytest.raises(ConfigError, match=r"^command line: peer\.wait_for_peers: found 0, expected a whole number"):
        override(peer, wait_for_peers=0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", "auto"),
        (" auto ", "auto"),
        ("1", 1),
        ("8", 8),
        ("0,3", (0, 3)),
        ("7, 2 ,5", (2, 5, 7)),
        ("3,", (3,)),
        ("0,1,2,3,4,5,6,7", tuple(range(8))),
    ],
)
def test_experts_are_parsed(text: str, expected: object) -> None:
    parsed = parse_experts(text, 8)
    assert parsed == expected
    assert type(parsed) is type(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected auto, a number of experts, or experts such as 0,3,5"),
        (",", "expected auto"),
        ("0,,1", "expected auto"),
        (",1", "expected auto"),
        ("-1", "expected auto"),
        ("1.5", "expected auto"),
        ("two", "expected auto"),
        ("AUTO", "expected auto"),
        ("auto,1", "expected auto"),
        ("٣", "expected auto"),
        ("²", "expected auto"),
        ("0", "expected 1 to 8 experts"),
        ("9", "expected 1 to 8 experts"),
        ("9" * 5000, "expected auto"),
        ("0,8", "expected experts from 0 to 7"),
        ("1,1", "expected each expert once (1 is repeated)"),
        ("1,01", "expected each expert once (1 is repeated)"),
    ],
)
def test_experts_that_cannot_be_meant(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_experts(text, 8)
    assert str(caught.value).startswith("experts: found ")
    assert message in str(caught.value)


@given(st.text(max_size=12), st.integers(1, 64))
def test_any_text_is_parsed_or_refused(text: str, num_experts: int) -> None:
    try:
        wanted = parse_experts(text, num_experts)
    except ConfigError:
        return
    if isinstance(wanted, tuple):
        assert wanted
        assert all(0 <= expert < num_experts for expert in wanted)
    else:
        assert wanted == "auto" or 1 <= wanted <= num_experts


@given(st.sets(st.integers(0, 63), min_size=1))
def test_chosen_experts_round_trip(experts: set[int]) -> None:
    assert parse_experts(",".join(map(str, experts)) + ",", 64) == tuple(sorted(experts))
