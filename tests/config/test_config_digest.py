"""A run comes back as it was from dicts, JSON and other processes, and its digest stands for all of it."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import (
    EvaluationConfig,
    MergeConfig,
    ModelConfig,
    RoundConfig,
    RunConfig,
    TokenizerConfig,
    TrainingConfig,
    canonical_json,
)
from tests.helpers.config_values import VALUES, with_value

PEER = "QmcGbWygcjpFFa1Tmx6LRxgVbKtWvyn5nMKmaQJ8hKAzY7"

# ---------------------------------------------------------------------------------------------------- round trip

positive = st.floats(1e-12, 1e6, allow_subnormal=False)
fraction = st.floats(0, 1)
counts = st.integers(1, 10**6)


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
                "pad_token_id": None,
                "eos_token_id": draw(st.none() | st.lists(st.integers(0, 255), max_size=3)),
            },
            extra_settings=draw(
                st.dictionaries(st.sampled_from(["note", "mine"]), st.text() | st.lists(st.integers()))
            ),
            generation=draw(st.dictionaries(st.sampled_from(["top_k", "eos_token_id"]), st.integers() | st.none())),
            init_cutoff=draw(st.none() | st.floats(1, 100) | st.integers(1, 100)),
        ),
        tokenizer=TokenizerConfig(
            name=draw(st.sampled_from(["bytes", "bpe", "Qwen/Qwen2.5-0.5B"])),
            digest=draw(st.none() | st.from_regex(r"[0-9a-f]{64}", fullmatch=True)),
            date=draw(st.dates().map(str)),
        ),
        training=TrainingConfig(
            sequence_length=draw(st.integers(2, 4096)),
            batch_size=draw(st.integers(1, 4096)),
            learning_rate=draw(positive | st.integers(1, 5)),
            warmup_steps=draw(st.integers(0, total_steps - 1)),
            warmup_start_ratio=draw(fraction),
            total_steps=total_steps,
            weight_decay=draw(st.sampled_from([0, 0.0, -0.0, 1, 0.1])),
            decay_norm_and_bias=draw(st.booleans()),
            local_balance_start=draw(st.none() | fraction),
            seed=draw(st.integers(0, 2**63 - 1)),
        ),
        round=RoundConfig(
            inner_steps=draw(st.integers(1, 1000)),
            inner_steps_later=tuple(
                zip(sorted(draw(st.sets(counts, max_size=3))), draw(st.tuples(counts, counts, counts)), strict=False)
            ),
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
        admission=draw(st.sampled_from(["open", "invite", "allow-list"])),
    )


@pytest.mark.slow
@settings(max_examples=30)
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


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.builds(
        PeerConfig,
        experts=st.sampled_from(["auto", "3", "0,1"]),
        initial_peers=st.lists(st.sampled_from([f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}", f"/dns/a/tcp/2/p2p/{PEER}"])),
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


@pytest.mark.slow
def test_digest_is_the_same_in_another_process_and_changes_with_every_field() -> None:
    run = RunConfig.from_dict(VALUES, "f")
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).digest)"
    other = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(run), capture_output=True, check=True)
    assert other.stdout.decode().strip() == run.digest
    changed = [
        dataclasses.replace(run, name="other"),
        dataclasses.replace(run, experts_per_peer=1),
        dataclasses.replace(run, training=dataclasses.replace(run.training, learning_rate=2e-3)),
        dataclasses.replace(run, tokenizer=TokenizerConfig(digest="0" * 64)),
    ]
    assert len({item.digest for item in (run, *changed)}) == 1 + len(changed)
