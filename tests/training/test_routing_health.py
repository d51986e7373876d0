"""What a peer measures of its routers, and when it says that an expert is dead."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spes_swarm.model.losses import LossWeights
from spes_swarm.model.merge import layer_similarities
from spes_swarm.model.sparse_model import SparseModel, build_model, flat_from_model
from spes_swarm.protocol.members.routing_report import DEAD_STEPS
from spes_swarm.training.gradients import Gradients
from spes_swarm.training.health.routing_health import DeadExperts, load_entropies, loads
from tests.helpers.lone_trainer import HELD, LoneTrainer, run_config

E, LAYERS, TOP_K = 8, 2, 2
STARVED = 1 * E + 3  # expert 3 of layer 1
DIED = "expert 3 of layer 1 is dead: less than 1% of its fair share of tokens"

Make = Callable[..., LoneTrainer]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes trainers whose files are closed when the test ends. An expert is dead after three of their rounds."""
    monkeypatch.setattr("spes_swarm.training.health.routing_health.DEAD_STEPS", 96)
    with ExitStack() as stack:

        def make_one(changes: dict[str, Any] | None = None, **setup: Any) -> LoneTrainer:
            # So slow that the load-balance loss revives no expert.
            # Just enough steps for a judgement in each round: the fair share of each is 32 copies.
            run = run_config(**{"training": {"learning_rate": 1e-7}, "round": {"inner_steps": 32}, **(changes or {})})
            peer = LoneTrainer(tmp_path, run, **setup)
            stack.callback(peer.close)
            return peer

        yield make_one


def tiny_model() -> Any:
    run = run_config()
    return build_model(run.model.type, run.model.settings, 0, "cpu")


def starve(peer: LoneTrainer) -> None:
    """Changes the weights so that the router of layer 1 never chooses expert 3.

    A large constant in one dimension of all embeddings survives the norms, so a weight on it is a bias.
    """
    module: Any = peer.model.module
    with torch.no_grad():
        module.model.embed_tokens.weight[:, 0] = 0.3
        for layer in module.model.layers:
            layer.mlp.gate.weight[:, 0] = 0.0
        module.model.layers[1].mlp.gate.weight[3, 0] = -5.0


def feed(peer: LoneTrainer) -> None:
    """Undoes `starve`: the bias now favours the expert."""
    module: Any = peer.model.module
    with torch.no_grad():
        module.model.layers[1].mlp.gate.weight[3, 0] = 5.0


# Measures.


def test_counts_and_entropies_of_each_layer_are_those_of_its_router() -> None:
    """Over two steps in micro-batches, against what hooks on the routers see."""
    model = SparseModel(tiny_model(), HELD)
    logits: dict[int, list[Tensor]] = {0: [], 1: []}
    for number, layer in enumerate(model.module.model.layers):  # type: ignore[union-attr, arg-type]
        layer.mlp.gate.weight.data *= 20.0 * (1 + number)  # so that the layers differ
    gradients = Gradients(
        model, LossWeights(), 2, device=torch.device("cpu"), autocast=nullcontext, warn=lambda kind, text: None
    )
    rng = np.random.default_rng(0)
    assert gradients.pop_router_entropy() is None
    gradients.compute(rng.integers(0, 256, (1, 32)), progress=0.5)  # the first one also tries the model's head
    gradients.pop_routed_tokens(), gradients.pop_router_entropy()
    for number, layer in enumerate(model.module.model.layers):  # type: ignore[union-attr, arg-type]
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out, n=number: logits[n].append(out[0].detach()))
    for _ in range(2):
        gradients.compute(rng.integers(0, 256, (3, 32)), progress=0.5)  # micro-batches of 64 and of 32 tokens
    counts_LE, entropy_L = gradients.pop_routed_tokens(), gradients.pop_router_entropy()
    assert entropy_L is not None
    for number, per_batch in logits.items():
        rows_TE = torch.cat(per_batch).double().numpy()
        assert len(rows_TE) == 2 * 3 * 32
        chosen = Counter(int(expert) for row in rows_TE for expert in sorted(range(E), key=lambda e: -row[e])[:TOP_K])
        assert counts_LE[number].tolist() == [chosen[expert] for expert in range(E)]
        entropies = []
        for row in rows_TE:
            odds = [math.exp(value) for value in row]
            entropies.append(-sum(odd / sum(odds) * math.log(odd / sum(odds)) for odd in odds))
        assert entropy_L[number] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)
    assert abs(entropy_L[0] - entropy_L[1]) > 0.01
    assert gradients.pop_router_entropy() is None
    assert not gradients.pop_routed_tokens().any()


def test_loads_are_multiples_of_the_fair_share() -> None:
    routed_LE = np.array([[30, 10, 0, 0], [5, 5, 5, 5], [0, 0, 0, 0]])
    assert loads(routed_LE).tolist() == [[3, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    entropy_L = load_entropies(loads(routed_LE))
    assert entropy_L == pytest.approx([-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4), 1.0, 1.0])
    assert load_entropies(loads(np.array([[0, 7, 0, 0]]))).tolist() == [0.0]
    assert load_entropies(loads(np.array([[7]]))).tolist() == [1.0]


@pytest.mark.parametrize("max_elements", [1 << 16, 256])
def test_experts_are_as_similar_as_their_gate_projections(max_elements: int) -> None:
    untouched = tiny_model()
    experts = [layer.mlp.experts for layer in untouched.model.layers]
    with torch.no_grad():
        experts[1].gate_up_proj[5] = 3.0 * experts[1].gate_up_proj[2]
    model = SparseModel(untouched, HELD)
    stacks = [experts[n].gate_up_proj.detach().double() for n in range(LAYERS)]  # (E, 2F, D), gate rows first
    reference_N = flat_from_model(tiny_model(), model.layout)
    for block in model.layout.blocks:
        model.read_block(block.index, reference_N[block.start : block.stop])
    found = layer_similarities(reference_N, model.layout, max_elements)
    assert tuple(found) == tuple(sorted(model.layer_names))
    stride = 1 if max_elements > 1024 else 4  # of 32 rows with 32 elements
    for number, name in enumerate(model.layer_names):
        gates = stacks[number][:, : stacks[number].shape[1] // 2 : stride].flatten(1)
        expected = torch.nn.functional.cosine_similarity(gates[:, None], gates[None], dim=-1)
        np.testing.assert_allclose(found[name], expected.numpy(), atol=1e-9)
    assert found[model.layer_names[1]][5, 2] == pytest.approx(1.0)


# The rule.


def judged(share_of_last: Sequence[float], steps: int = 5) -> list[bool]:
    """Whether an expert with these loads, in rounds of 1,280 tokens an expert, is dead after each round."""
    rule = DeadExperts(1, 4)
    found = []
    for load in share_of_last:
        copies = round(load * 1280)
        rest = (4 * 1280 - copies) // 3
        assert rule.judge(np.array([[rest, rest, rest, copies]]), steps)
        found.append(rule.dead == {3})
    return found


def test_an_expert_is_dead_once_it_was_low_for_as_many_steps_as_the_rule_says() -> None:
    rounds = DEAD_STEPS // 5
    assert judged([1.0] + [0.0] * rounds) == [False] * rounds + [True]
    assert judged([0.0] * 5, steps=DEAD_STEPS // 3 + 1) == [False, False, True, True, True]  # longer rounds, fewer
    assert judged([0.004] * rounds)[-1]


def test_loads_that_swing_as_in_healthy_runs_are_no_alarm() -> None:
    """The worst that was seen in the quickstart, an expert that is low for 16 rounds of 5 steps, again and again."""
    assert not any(judged(([0.0] * 16 + [0.05]) * 30))


def test_noise_around_the_limit_neither_hides_a_dead_expert_nor_revives_it() -> None:
    rounds = DEAD_STEPS // 5
    noisy = judged([0.002, 0.002, 0.002, 0.015] * rounds)
    assert noisy[-1]
    assert noisy == sorted(noisy)  # dead once and for all
    assert judged([0.0] * rounds + [0.019, 0.03, 0.0])[-4:] == [True, True, False, False]


# What a trainer writes.


def test_a_healthy_peer_writes_its_figures_and_no_warning(make: Make) -> None:
    peer = make(max_rounds=3, evaluation=[np.arange(128, dtype=np.int64).reshape(2, 64)])
    peer.trainer.run()
    for event in peer.events("round"):
        assert 0.5 < event["load_entropy"] <= 1.0
        assert 0.9 < event["router_entropy"] <= 1.0  # a fresh router chooses at random
        assert 0.0 < event["held_share"] < 1.0
        assert event["dead_experts"] == 0
        assert event["least_load"] > 0.01
        assert 0.0 <= event["expert_similarity"] <= event["expert_similarity_max"] < 0.5
    events = peer.events("routing")  # it evaluates in every round
    assert [event["round"] for event in events] == [1, 2, 3]
    for event in events:
        assert np.shape(event["load"]) == (LAYERS, E)
        assert np.mean(event["load"], axis=1) == pytest.approx([1.0, 1.0], abs=1e-3)
        assert event["dead"] == event["dead_in_swarm"] == []
        for name in ("load_entropy", "router_entropy", "similarity_mean", "similarity_max"):
            assert len(event[name]) == LAYERS
    held_share = sum(sum(layer[expert] for expert in HELD) for layer in events[0]["load"]) / (LAYERS * E)
    assert peer.events("round")[0]["held_share"] == pytest.approx(held_share, abs=1e-3)
    assert peer.events("fault") == []


def test_an_expert_that_dies_is_told_once_and_so_is_its_recovery(make: Make) -> None:
    peer = make(max_rounds=6)
    starve(peer)
    # After the commit, which sets the shared block to what was contributed.
    peer.network.on_traffic = lambda: feed(peer) if peer.network.reference.round == 4 else None
    peer.trainer.run()
    assert [event["dead_experts"] for event in peer.events("round")] == [0, 0, 1, 1, 0, 0]
    (fault,) = peer.events("fault")
    assert (fault["kind"], fault["detail"]) == ("dead_expert", DIED)
    assert peer.said == [DIED, "expert 3 of layer 1 gets tokens again"]
    died, recovered = peer.events("routing")
    assert (died["round"], died["dead"], died["dead_in_swarm"]) == (3, [[1, 3]], [[1, 3]])
    assert died["load"][1][3] == 0.0
    assert (recovered["round"], recovered["dead"], recovered["dead_in_swarm"]) == (5, [], [])
    assert peer.trainer._steps.routing.report.dead == ()


def test_an_expert_is_dead_if_more_than_half_of_the_peers_say_so(make: Make) -> None:
    peer = make(max_rounds=5)
    starve(peer)
    # What others say after these rounds. Neither of two peers can raise the alarm alone, nor two of four.
    answers: dict[int, tuple[int, dict[int, int]]] = {0: (1, {}), 3: (3, {STARVED: 1}), 4: (2, {STARVED: 1})}

    def answer() -> None:
        if (said := answers.get(peer.network.reference.round)) is not None:
            peer.network.routing_reports, peer.network.dead_votes = said

    answer()
    peer.network.on_traffic = answer
    peer.trainer.run()
    found = [(event["round"], event["dead"], event["dead_in_swarm"]) for event in peer.events("routing")]
    assert found == [(3, [[1, 3]], []), (5, [[1, 3]], [[1, 3]])]  # it says so itself from the third round on
    assert peer.trainer._steps.routing.report.dead == (STARVED,)
    assert [event["detail"] for event in peer.events("fault")] == [DIED]


def test_what_most_others_call_dead_is_dead_although_this_peer_disagrees(make: Make) -> None:
    peer = make(max_rounds=2)
    peer.network.routing_reports, peer.network.dead_votes = 2, {STARVED: 2, 0: 1}
    peer.trainer.run()
    assert [event["dead_experts"] for event in peer.events("round")] == [0, 0]
    assert [event["detail"] for event in peer.events("fault")] == [DIED]


def test_rounds_that_are_too_short_to_judge_are_added_up(make: Make) -> None:
    peer = make({"round": {"inner_steps": 16}}, max_rounds=7)
    starve(peer)
    peer.trainer.run()
    assert [event["dead_experts"] for event in peer.events("round")] == [None, 0, 0, 0, 0, 1, 1]
    assert peer.events("round")[0]["load_entropy"] is not None


def test_an_expert_without_tokens_now_and_then_is_not_dead(make: Make) -> None:
    peer = make(max_rounds=6)
    starve(peer)
    acts = {1: feed, 2: starve, 3: feed, 4: starve}  # of the rounds 2 to 5, and 6 as 5
    peer.network.on_traffic = lambda: acts.get(peer.network.reference.round, lambda _: None)(peer)
    peer.trainer.run()
    assert [event["least_load"] < 0.01 for event in peer.events("round")] == [True, False, True, False, True, True]
    assert [event["dead_experts"] for event in peer.events("round")] == [0] * 6
    assert peer.events("fault") == []
