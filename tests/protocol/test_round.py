"""One round against an independent computation in PyTorch, and what holds when messages are lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_swarm.model.merge import merged_slots
from spes_swarm.protocol.averaging.clipping import MAX_WEIGHT_RATIO
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.consensus.reference import Reference
from spes_swarm.protocol.rounds.plan import make_plan
from tests.helpers.rounds import FakePeer, form, hold_round, peer, small_layout


@st.composite
def swarms(draw: st.DrawFn) -> tuple[list[FakePeer], np.random.Generator]:
    """Random layouts, peers, token counts and holders; every peer has trained what it may."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_experts = draw(st.integers(1, 5))
    layout = small_layout(num_experts, draw(st.integers(2, 300)), draw(st.integers(3, 120)))
    start_N = rng.normal(0, 0.1, layout.num_elements).astype(np.float32)
    peers = []
    for _ in range(draw(st.integers(1, 5))):
        held = sorted(draw(st.sets(st.integers(0, num_experts - 1), max_size=num_experts)))
        tokens = draw(st.integers(1, 1000))
        routed = tuple(draw(st.integers(0, 1000)) for _ in held)
        member = peer(layout, start_N, held, tokens=tokens, routed=routed)
        for index in (0, *(1 + e for e in held)):
            block = layout.blocks[index]
            member.live_N[block.start : block.stop] += rng.normal(0, 0.01, block.size).astype(np.float32)
        peers.append(member)
    return peers, rng


def clipped(weights: list[int]) -> list[float]:
    """The documented bound on weights, transcribed: at most MAX_WEIGHT_RATIO times the lower median
    of the positive ones."""
    positive = sorted(w for w in weights if w > 0)
    if not positive:
        return [1.0] * len(weights)
    middle = len(positive) // 2
    median = positive[middle] if len(positive) % 2 else positive[middle - 1]
    return [min(w, MAX_WEIGHT_RATIO * median) for w in weights]


def expected_reference(peers: list[FakePeer]) -> torch.Tensor:
    """Token-weighted mean of the live shared weights; routed-token-weighted mean of each expert over its holders."""
    layout = peers[0].reference.layout
    new_N = torch.from_numpy(peers[0].reference.values_N.copy()).double()
    for block in layout.blocks:
        where = slice(block.start, block.stop)
        if block.expert is None:
            contributors, weights = peers, [p.tokens for p in peers]
        else:
            contributors = [p for p in peers if block.expert in p.held]
            weights = [p.routed[p.held.index(block.expert)] for p in contributors if p.routed is not None]
        if contributors:
            weight_V = torch.tensor(clipped(weights), dtype=torch.float64)
            live_VN = torch.stack([torch.from_numpy(p.live_N[where].copy()).double() for p in contributors])
            new_N[where] = (weight_V[:, None] * live_VN).sum(0) / weight_V.sum()
    return new_N


@pytest.mark.slow
@settings(max_examples=150)
@given(swarms())
def test_a_round_is_the_weighted_mean(swarm: tuple[list[FakePeer], np.random.Generator]) -> None:
    peers, _ = swarm
    expected_N = expected_reference(peers)
    hold_round(peers, 1)
    for p in peers:
        np.testing.assert_allclose(p.reference.values_N, expected_N.numpy(), rtol=0, atol=1e-6)
    assert len({p.reference.digest for p in peers}) == 1


@pytest.mark.slow
@settings(max_examples=50)
@given(swarms(), st.sampled_from(["fp32", "fp16", "int8", "int4"]))
def test_all_peers_stay_bit_identical_over_rounds(
    swarm: tuple[list[FakePeer], np.random.Generator], codec: str
) -> None:
    peers, rng = swarm
    for round_number in range(1, 4):
        hold_round(peers, round_number, codec=codec)
        first = peers[0].reference
        for p in peers:
            assert p.reference.values_N.tobytes() == first.values_N.tobytes()
            # The digest is kept up to date block by block; here it is computed from scratch.
            fresh = Reference(p.reference.layout, p.reference.values_N)
            assert fresh.digests == p.reference.digests
            p.live_N += rng.normal(0, 0.01, p.live_N.size).astype(np.float32)


def test_live_weights_after_a_round() -> None:
    layout = small_layout(3)
    rng = np.random.default_rng(0)
    start_N = rng.normal(0, 0.1, layout.num_elements).astype(np.float32)
    peers = [peer(layout, start_N, [0, 1]), peer(layout, start_N, [1]), peer(layout, start_N, [2])]
    for p in peers:
        p.live_N += rng.normal(0, 0.01, p.live_N.size).astype(np.float32)
    only_holder_N = peers[0].live_N[layout.expert_block(0).start : layout.expert_block(0).stop].copy()
    hold_round(peers, 1, codec="fp16")
    new_N = peers[0].reference.values_N
    shared, sole, both = layout.blocks[0], layout.expert_block(0), layout.expert_block(1)
    assert np.array_equal(peers[0].live_N[shared.start : shared.stop], new_N[shared.start : shared.stop])
    # The only holder keeps what it has: the codec's error stays in its next difference.
    assert np.array_equal(peers[0].live_N[sole.start : sole.stop], only_holder_N)
    assert not np.array_equal(new_N[sole.start : sole.stop], only_holder_N)
    # Replicas go on from their common average.
    for p in peers[:2]:
        assert np.array_equal(p.live_N[both.start : both.stop], new_N[both.start : both.stop])


def test_error_feedback_makes_up_for_the_codec() -> None:
    """With one holder and no further training, repeated rounds bring the reference to the live weights."""
    layout = small_layout(1)
    rng = np.random.default_rng(1)
    start_N = rng.normal(0, 0.1, layout.num_elements).astype(np.float32)
    peers = [peer(layout, start_N, [0]), peer(layout, start_N, [])]
    block = layout.expert_block(0)
    where = slice(block.start, block.stop)
    peers[0].live_N[where] += rng.normal(0, 0.05, block.size).astype(np.float32)
    errors = []
    for round_number in (1, 2):
        hold_round(peers, round_number, codec="fp16")
        errors.append(np.abs(peers[1].reference.values_N[where] - peers[0].live_N[where]).max())
    assert 0 < errors[0] < 1e-3
    assert errors[1] < errors[0] / 100


def test_a_lost_contribution_is_left_out_and_carried_over() -> None:
    layout = small_layout(2)
    start_N = np.zeros(layout.num_elements, np.float32)
    peers = [peer(layout, start_N, [0]), peer(layout, start_N, [1]), peer(layout, start_N, [])]
    shared = slice(layout.blocks[0].start, layout.blocks[0].stop)
    for value, p in zip((1.0, 2.0, 6.0), peers, strict=True):
        p.live_N[shared] = value
    hold_round(peers, 1, lose_push=lambda sender, frame: sender == 2)
    plan_parts = make_plan(form(peers, 2), layout, 64).parts
    assert plan_parts  # the swarm goes on
    new_N = peers[0].reference.values_N[shared]
    assert set(np.unique(new_N)) == {1.5, 3.0}  # parts that member 2 reduces itself have its contribution
    assert len({p.reference.digest for p in peers}) == 1
    # What was lost stays in member 2's live weights, as a difference to the new reference.
    lost_N = new_N == 1.5
    assert np.array_equal(peers[2].live_N[shared][lost_N], np.full(lost_N.sum(), 1.5 + 6.0, np.float32))


def test_a_part_that_nobody_has_stays_at_the_old_reference_everywhere() -> None:
    layout = small_layout(2)
    start_N = np.zeros(layout.num_elements, np.float32)
    peers = [peer(layout, start_N, [0]), peer(layout, start_N, [1]), peer(layout, start_N, [])]
    for p in peers:
        p.live_N += 1.0
    plan, _ = hold_round(peers[:], 1)
    lost = {part.index for part in plan.parts if part.reducer == 2}
    assert lost
    peers = [peer(layout, start_N, [0]), peer(layout, start_N, [1]), peer(layout, start_N, [])]
    for p in peers:
        p.live_N += 1.0
    plan, _ = hold_round(peers, 1, lose_result=lambda receiver, frame: frame.part in lost)
    survivors = peers[:2]
    assert len({p.reference.digest for p in survivors}) == 1
    for part in plan.parts:
        values_N = survivors[0].reference.values_N[part.start : part.start + part.size]
        assert (values_N == (0.0 if part.index in lost else 1.0)).all()
    assert survivors[0].reports[0].parts_missing == len(lost)
    # The work on lost parts is not forgotten: it is still in the live weights.
    assert (survivors[0].live_N[: layout.blocks[0].stop] == 1.0).all()


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8", "int4"])
def test_a_peer_with_another_base_heals_in_one_round(codec: str) -> None:
    layout = small_layout(4)
    rng = np.random.default_rng(2)
    start_N = rng.normal(0, 0.1, layout.num_elements).astype(np.float32)
    peers = [peer(layout, start_N, [e]) for e in range(4)]
    for round_number in (1, 2):  # member 3 misses two rounds
        for p in peers[:3]:
            p.live_N += rng.normal(0, 0.01, p.live_N.size).astype(np.float32)
        hold_round(peers[:3], round_number, codec=codec)
    assert peers[3].reference.digest != peers[0].reference.digest
    behind_N = peers[3].live_N.copy()
    peers[3].live_N[: layout.blocks[0].stop] += 0.5  # its work since then
    before_N = peers[0].reference.values_N.copy()
    hold_round(peers, 3, codec=codec)
    assert len({p.reference.digest for p in peers}) == 1
    # Its work counts, its stale weights do not.
    shared = slice(0, layout.blocks[0].stop)
    moved_N = peers[0].reference.values_N[shared] - before_N[shared]
    np.testing.assert_allclose(moved_N, 0.5 / 4, atol=2e-3)
    assert not np.allclose(behind_N[shared], before_N[shared], atol=1e-4)


def test_payload_bytes_follow_the_formula() -> None:
    layout = small_layout(8, shared=64_000, expert=6_000)
    start_N = np.zeros(layout.num_elements, np.float32)
    peers = [peer(layout, start_N, [2 * i, 2 * i + 1]) for i in range(4)]
    for p in peers:
        p.live_N += 1.0
    _, states = hold_round(peers, 1, part_elements=1 << 16)
    shared_bytes, expert_bytes = 4 * 64_000, 4 * 8 * 6_000
    formula = 3 / 4 * (2 * shared_bytes + expert_bytes)
    for state in states:
        assert state.payload_bytes_sent == pytest.approx(formula, rel=0.05)
        assert state.payload_bytes_received == pytest.approx(formula, rel=0.05)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 6),
    st.integers(1, 4),
    st.floats(0.0, 0.5),
    st.integers(1, 6),
)
def test_a_round_and_the_merge_after_it(
    seed: int, num_experts: int, num_peers: int, alpha: float, num_neighbours: int
) -> None:
    """Weighted mean of shared, each expert from its owner, then SPES Eqs. 5-6, all recomputed in PyTorch, float64."""
    rng = np.random.default_rng(seed)
    hidden, ffn, layers = (int(n) for n in rng.integers(1, 6, 3))
    stacked = {f"{i}.gate_up_proj": (num_experts, 2 * ffn, hidden) for i in range(layers)}
    stacked |= {f"{i}.down_proj": (num_experts, hidden, ffn) for i in range(layers)}
    layout = Layout.build({"embed": (7, hidden)}, stacked)
    start_N = rng.normal(0, 0.1, layout.num_elements).astype(np.float32)
    peers = []
    for i in range(num_peers):
        held = range(i, num_experts, num_peers)
        routed = tuple(int(count) for count in rng.integers(1, 100, len(held)))
        peers.append(peer(layout, start_N, held, tokens=int(rng.integers(1, 100)), routed=routed))
    for p in peers:
        p.live_N += rng.normal(0, 0.01, p.live_N.size).astype(np.float32)
    expected_N = expected_reference(peers)
    tensors = {
        name: torch.stack(
            [
                expected_N[slot.start : slot.start + slot.size].view(slot.shape)
                for block in layout.blocks[1:]
                for slot in block.slots
                if slot.name == name
            ]
        )
        for name in stacked
    }
    for i in range(layers):
        gate_EP = tensors[f"{i}.gate_up_proj"][:, :ffn].reshape(num_experts, -1)
        cosine_EE = torch.nn.functional.cosine_similarity(gate_EP[:, None], gate_EP[None], dim=-1)
        before = {kind: tensors[f"{i}.{kind}"].clone() for kind in ("gate_up_proj", "down_proj")}
        for j in range(num_experts):
            others = sorted((k for k in range(num_experts) if k != j), key=lambda k: -float(cosine_EE[j, k]))
            donors = others[:num_neighbours]
            for kind, pre in before.items():
                step = sum(pre[k] - pre[j] for k in donors) / len(donors)
                tensors[f"{i}.{kind}"][j] = pre[j] + alpha * step
    hold_round(peers, 1)
    for p in peers:
        for slot, merged in merged_slots(p.reference.values_N, layout, alpha, num_neighbours):
            assert slot.expert is not None
            np.testing.assert_allclose(merged, tensors[slot.name][slot.expert].numpy(), rtol=0, atol=1e-6)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_after_a_partition_both_sides_work_counts(seed: int, ours: int, theirs: int, three_to_one: bool) -> None:
    """Each side commits some rounds alone, not the same number; then all meet, with work since their last commits."""
    rng = np.random.default_rng(seed)
    layout = small_layout(4)
    start_N = rng.normal(0, 0.1, layout.num_elements).astype(np.float32)
    holdings = [(0, 1), (2, 3), (0, 1), (2, 3)]
    # All different: the two sides use the same identities here, and must not write the same statements.
    tokens = [1 + int(count) for count in rng.permutation(8)[:4]]
    peers = [peer(layout, start_N, held, tokens=t, routed=(t, t)) for held, t in zip(holdings, tokens, strict=True)]

    def train(some: list[FakePeer]) -> None:
        for who in some:
            for index in (0, *(1 + e for e in who.held)):
                block = layout.blocks[index]
                who.live_N[block.start : block.stop] += rng.normal(0, 0.01, block.size).astype(np.float32)

    train(peers)
    hold_round(peers, 1)
    sides = (peers[:3], peers[3:]) if three_to_one else (peers[:2], peers[2:])
    for side, num_rounds in zip(sides, (ours, theirs), strict=True):
        for number in range(num_rounds):
            train(side)
            hold_round(side, 2 + number)
    train(peers)
    expected_N = expected_reference(peers)  # of the live weights: everything that either side has learnt
    hold_round(peers, 2 + max(ours, theirs))
    for who in peers:
        np.testing.assert_allclose(who.reference.values_N, expected_N, atol=1e-6)
        assert who.reference.digest == peers[0].reference.digest
        assert who.lineage == peers[0].lineage


def test_a_late_peer_brings_its_work_and_not_its_stale_weights() -> None:
    layout = small_layout(4)
    rng = np.random.default_rng(0)
    start_N = rng.normal(0, 0.1, layout.num_elements).astype(np.float32)
    late, *others = (peer(layout, start_N, held) for held in [(0, 1), (2, 3), (0, 1)])
    shared = layout.blocks[0]
    hold_round([late, *others], 1)
    for number in (2, 3):
        for who in others:
            who.live_N[: shared.stop] += 0.5
        hold_round(others, number)
    late.live_N[: shared.stop] += 0.25
    hold_round([late, *others], 4)
    # Two rounds of 0.5, then a third of the late one's 0.25; its old weights pull nothing back.
    np.testing.assert_allclose(late.reference.values_N[: shared.stop], start_N[: shared.stop] + 1 + 0.25 / 3, atol=1e-6)
