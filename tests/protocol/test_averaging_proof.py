"""Proofs that a reducer has lied: which lies have one, and that nobody can make one about an honest reducer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random
from typing import Any

import msgpack
import numpy as np
import pytest
from blake3 import blake3

from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.averaging import proof as proof_module
from spes_swarm.protocol.averaging.commitments import CONTRIBUTION, RESULT, Commitment, Opening
from spes_swarm.protocol.averaging.proof import (
    Proof,
    SignedContribution,
    misquoted_contribution,
    open_proof,
    two_results,
    wrong_result,
)
from spes_swarm.protocol.averaging.signed_result import SignedResult, contribution_leaf, head_of
from spes_swarm.protocol.consensus.codec import CODECS, get_codec
from tests.helpers.mutation import garbage, mutated
from tests.helpers.signed_exchange import EXCHANGE, RUN_ID, Lie, Reduced, differences, hold_exchange, member


def flip(mean_N: np.ndarray) -> np.ndarray:
    return -mean_N


def lengthen(mean_N: np.ndarray) -> np.ndarray:
    return mean_N * np.float32(1.1)


def make_up(mean_N: np.ndarray) -> np.ndarray:
    return differences(np.random.default_rng(99), 1, len(mean_N))[0]


def exchange(seed: int = 0, **settings: Any) -> Reduced:
    """The second part of an exchange, so that it has siblings in the trees."""
    return hold_exchange(np.random.default_rng(seed), **settings)[1]


def another_result(reduced: Reduced) -> bytes:
    return reduced.two_results(reduced.sign_again(reduced.recipe.part, b"another payload"))


def other_leaves(seed: int, *parts: int) -> list[bytes]:
    """Of contributions to other parts."""
    return [contribution_leaf(part, b"payload %d" % (seed + part)) for part in parts]


def misquoting(seed: int) -> bytes:
    """The reducer quotes another root that the contributor has signed in this exchange."""
    leaves = other_leaves(seed, 3, 9, 20, 21)
    return exchange(seed).quoting(1, leaves).misquoted(1, leaves)


MAKERS: dict[str, Callable[[int], bytes]] = {
    "result": lambda seed: exchange(seed, lie=flip).wrong_result(),
    "forged": lambda seed: exchange(seed, forge=2).forged(2),
    "misquoted": lambda seed: misquoting(seed),
    "two-results": lambda seed: another_result(exchange(seed)),
}


def refused(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        open_proof(data)


# Lies are proven.


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("result", "the result differs from the mean of its contributions by 2 of its length"),
        ("forged", f"the result includes a contribution that {member(2).peer_id} has not signed"),
        (
            "misquoted",
            f"the result includes a contribution of {member(1).peer_id} that is not under the root it quotes",
        ),
        ("two-results", "it has signed two different results"),
    ],
)
def test_a_proof_says_who_lied_where_and_how(kind: str, what: str) -> None:
    data = MAKERS[kind](0)
    expected = Proof(kind, RUN_ID, 7, EXCHANGE.group_id, 8, member(0).peer_id, what, blake3(data).digest())
    assert open_proof(data) == expected


@pytest.mark.parametrize("lie", [flip, lengthen, make_up])
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_wrong_result_is_proven_in_all_codecs(codec: str, lie: Lie) -> None:
    for seed in range(5):
        lying = exchange(seed, codec=codec, result_codec=codec, lie=lie)
        assert open_proof(lying.wrong_result()).culprit == member(0).peer_id
        refused(exchange(seed, codec=codec, result_codec=codec).wrong_result(), "proof: the result follows")


def test_a_result_that_cannot_be_decoded_is_wrong() -> None:
    made = exchange()
    head, opening = made.sign_again(made.recipe.part, b"short")
    signed = SignedResult(head, opening, made.signed.commitments)
    data = wrong_result(EXCHANGE, made.reducer.credentials, made.recipe, b"short", signed, made.contributions)
    assert open_proof(data).what.startswith("the result cannot be decoded: shape: ")


def test_two_results_are_one_proof_in_either_order() -> None:
    made = exchange()
    one, two = (made.signed.head, made.signed.opening), made.sign_again(made.recipe.part, b"another payload")
    credentials = made.reducer.credentials
    assert two_results(EXCHANGE, credentials, one, two) == two_results(EXCHANGE, credentials, two, one)


def test_a_proof_has_a_limited_length(monkeypatch: pytest.MonkeyPatch) -> None:
    made = exchange(lie=flip)
    data = made.wrong_result()
    monkeypatch.setattr(proof_module, "MAX_PROOF_BYTES", len(data) - 1)
    refused(data, "oversized: ")
    with pytest.raises(ProtocolError, match="oversized: a proof of"):
        made.wrong_result()
    monkeypatch.setattr(proof_module, "MAX_PROOF_BYTES", len(data))
    monkeypatch.setattr(proof_module, "_MAX_VALUES", 599)
    refused(data, "oversized: contributions of more than 599 values")


# Nobody is framed.


def test_an_honest_reducer_is_proven_nothing() -> None:
    made = exchange()
    refused(made.wrong_result(), "proof: the result follows from its contributions")
    for i in range(3):
        refused(made.forged(i), f"proof: {member(i).peer_id} has signed the contribution")
    refused(made.two_results((made.signed.head, made.signed.opening)), "proof: not two results of one part")


@pytest.mark.parametrize("parts", [(3,), (20,), (1, 2), (30, 40), (7, 9), (1, 7, 9, 10, 11, 12, 13, 14)])
def test_a_root_has_a_contribution_to_a_part_or_can_be_shown_to_have_none(parts: tuple[int, ...]) -> None:
    made, others = exchange(), other_leaves(0, *parts)
    assert made.recipe.part not in parts
    assert open_proof(made.quoting(1, others).misquoted(1, others)).kind == "misquoted"
    own = contribution_leaf(made.recipe.part, made.contributions[1].payload)
    quoted = made.quoting(1, [own, *others[:7]])
    refused(quoted.misquoted(1, others), "proof: the root may have a contribution to the part")
    refused(quoted.misquoted(1, [own]), "proof: the root may have a contribution to the part")
    paths = dict(
        zip(
            [own, *others[:7]], made.contributors[1].key.commit(CONTRIBUTION, EXCHANGE, [own, *others[:7]]), strict=True
        )
    )
    for leaf, opening in paths.items():
        content = EXCHANGE, made.reducer.credentials, made.recipe, quoted.signed.head.payload, quoted.signed
        refused(misquoted_contribution(*content, 1, leaf, opening), "proof: the root may have")


def test_results_of_two_parts_or_exchanges_are_not_two_results() -> None:
    first, second, _ = hold_exchange(np.random.default_rng(0))
    refused(first.two_results((second.signed.head, second.signed.opening)), "proof: not two results of one part")
    for other in (EXCHANGE._replace(round=8), EXCHANGE._replace(group_id=bytes(32))):
        later = exchange(1, exchange=other)
        refused(second.two_results((later.signed.head, later.signed.opening)), "signature: ")


def test_a_contributor_with_two_keys_has_signed_with_the_one_that_the_recipe_names() -> None:
    made = exchange()
    other = member(2, key=1)
    assert other.peer_id == member(2).peer_id
    made = dataclasses.replace(made, contributors=[*made.contributors[:2], other])
    refused(made.forged(2), "proof: .* or this key of it, is not the contributor")
    by_other = dataclasses.replace(made.contributions[2], credentials=other.credentials)
    made = dataclasses.replace(made, contributions=[*made.contributions[:2], by_other])
    refused(made.wrong_result(), "proof: .* or this key of it, is not the contributor")


def _contradicted(made: Reduced, opening: Callable[[bytes, bytes], Opening]) -> None:
    """The last contributor shows others another contribution than it has sent to the reducer."""
    last = made.contributions[-1]
    other = get_codec(made.recipe.codec).encode(np.ones(made.recipe.num_elements, dtype=np.float32))
    leaves = [contribution_leaf(made.recipe.part, payload) for payload in (last.payload, other)]
    shown = SignedContribution(last.credentials, other, opening(*leaves))
    refused(
        dataclasses.replace(made, contributions=[*made.contributions[:-1], shown]).wrong_result(), "proof|signature"
    )


def test_a_contributor_that_contradicts_itself_frames_nobody() -> None:
    made = exchange()
    key = made.contributors[-1].key
    _contradicted(made, lambda sent, other: made.contributions[-1].opening)
    _contradicted(made, lambda sent, other: key.commit(CONTRIBUTION, EXCHANGE, [other])[0])


def test_nor_one_that_has_put_two_contributions_under_one_root() -> None:
    """The reducer has averaged the one that it was sent, and includes the root of both."""
    made = exchange()
    last = made.contributions[-1]
    part, key = made.recipe.part, made.contributors[-1].key
    other = get_codec(made.recipe.codec).encode(np.ones(made.recipe.num_elements, dtype=np.float32))
    sent, shown = (contribution_leaf(part, payload) for payload in (last.payload, other))
    for split in range(part - 1, part + 3):
        for left, right in ((sent, shown), (shown, sent)):
            bottoms = [blake3(b"\0" + leaf).digest() for leaf in (left, right)]
            mark = split.to_bytes(4, "big")
            root = blake3(b"\1" + mark + b"".join(bottoms)).digest()
            signature = key.private.sign(EXCHANGE.message(CONTRIBUTION, root))
            steps = {left: mark + bottoms[1], right: mark + bottoms[0]}
            openings = {leaf: Opening(signature, (step,)) for leaf, step in steps.items()}
            if openings[sent].root(sent) != root:
                continue  # the reducer has refused it
            commitments = (*made.signed.commitments[:-1], Commitment(root, signature))
            head = head_of(part, made.recipe.digest, made.result, commitments)
            signed = SignedResult(head, made.reducer.key.commit(RESULT, EXCHANGE, [head.leaf])[0], commitments)
            for payload, leaf in ((last.payload, sent), (other, shown)):
                given = [*made.contributions[:-1], SignedContribution(last.credentials, payload, openings[leaf])]
                framed = dataclasses.replace(made, signed=signed, contributions=given)
                refused(framed.wrong_result(), "signature: " if leaf == shown else "proof: the result follows")


def test_contributions_in_another_order_or_of_another_exchange_are_refused() -> None:
    made = exchange(lie=flip)
    swapped = [made.contributions[1], made.contributions[0], made.contributions[2]]
    refused(dataclasses.replace(made, contributions=swapped).wrong_result(), "proof: ")
    stale = exchange(0, exchange=EXCHANGE._replace(round=6))
    mixed = [*made.contributions[:2], stale.contributions[2]]
    refused(dataclasses.replace(made, contributions=mixed).wrong_result(), "signature: |proof: ")
    for fewer in ([], made.contributions[:2], [*made.contributions, made.contributions[0]]):
        refused(dataclasses.replace(made, contributions=fewer).wrong_result(), "malformed: ")


def test_an_honest_reducer_includes_no_contribution_that_is_not_finite() -> None:
    def poisoned(values: bytes) -> bytes:
        return values[:4] + b"\0\0\xc0\x7f" + values[8:]  # NaN

    made = exchange(codec="fp32", result_codec="fp32", lie=flip)
    who, part = made.contributors[2], made.recipe.part
    payload = poisoned(made.contributions[2].payload)
    (opening,) = who.key.commit(CONTRIBUTION, EXCHANGE, [leaf := contribution_leaf(part, payload)])
    commitments = (*made.signed.commitments[:2], Commitment(opening.root(leaf), opening.signature))
    head = head_of(part, made.recipe.digest, made.result, commitments)
    signed = SignedResult(head, made.reducer.key.commit(RESULT, EXCHANGE, [head.leaf])[0], commitments)
    given = [*made.contributions[:2], SignedContribution(who.credentials, payload, opening)]
    proof = open_proof(dataclasses.replace(made, signed=signed, contributions=given).wrong_result())
    assert proof.culprit == made.reducer.peer_id
    assert "cannot be decoded" in proof.what


def test_the_run_of_a_proof_cannot_contain_its_round() -> None:
    """What is signed separates its fields by zeros."""
    content = msgpack.unpackb(MAKERS["two-results"](0))
    for run_id, number, group_id in (
        (f"{RUN_ID}\x007", 7, EXCHANGE.group_id),
        ("", 7, EXCHANGE.group_id),
        (RUN_ID, True, EXCHANGE.group_id),
        (RUN_ID, -7, EXCHANGE.group_id),
        (RUN_ID, 7, EXCHANGE.group_id + b"\0"),
        (RUN_ID, 7, b""),
    ):
        refused(msgpack.packb([*content[:2], run_id, number, group_id, *content[5:]]), "malformed: not a proof")


# What is not a proof.


@pytest.mark.parametrize("kind", MAKERS)
def test_no_mutation_of_a_proof_proves_anything(kind: str) -> None:
    random = Random(kind)
    valid = [MAKERS[each](seed) for each in MAKERS for seed in (0, 1)]
    own, other = MAKERS[kind](2), [MAKERS[kind](3), *valid]
    for _ in range(2000):
        data = mutated(random, own, random.choice(other))
        if data not in other:
            with pytest.raises(ProtocolError):
                open_proof(data)


def test_garbage_is_refused() -> None:
    random = Random(6)
    for _ in range(3000):
        with pytest.raises(ProtocolError):
            open_proof(garbage(random))
    frame = ["spes_swarm proof 1", "result", "r", 1, bytes(32), [b"", b""], []]
    contents: list[Any] = [None, [], {}, 5, frame[:1], frame]
    for content in contents:
        with pytest.raises(ProtocolError):
            open_proof(msgpack.packb(content))


def test_another_encoding_of_a_proof_is_refused() -> None:
    data = MAKERS["two-results"](0)
    assert data[0] == 0x97  # a list of seven
    refused(b"\xdc\0\7" + data[1:], "malformed: not a proof")
    refused(data + b"\xc0", "malformed: not valid msgpack")


def test_what_has_no_signature_costs_no_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        pytest.fail("reached arithmetic")

    monkeypatch.setattr(proof_module, "fault_of", fail)
    made = exchange(lie=flip)
    opening = dataclasses.replace(made.contributions[2].opening, signature=bytes(64))
    unsigned = dataclasses.replace(made.contributions[2], opening=opening)
    refused(dataclasses.replace(made, contributions=[*made.contributions[:2], unsigned]).wrong_result(), "signature: ")
    stranger = dataclasses.replace(made, reducer=member(3))
    refused(stranger.wrong_result(), f"signature: a result that {member(3).peer_id} has not signed")
