"""Exchanges of a few parts, made in one process by the classes that sign and average, with a reducer that may lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from spes_swarm.base.arrays import FloatArray
from spes_swarm.protocol.averaging.commitments import (
    CONTRIBUTION,
    KEY_BYTES,
    RESULT,
    Commitment,
    Credentials,
    Exchange,
    Opening,
    SigningKey,
    digest,
    in_place_of,
)
from spes_swarm.protocol.averaging.proof import (
    SignedContribution,
    forged_contribution,
    misquoted_contribution,
    two_results,
    wrong_result,
)
from spes_swarm.protocol.averaging.recipe import Recipe, Share, mean
from spes_swarm.protocol.averaging.signed_result import Head, SignedResult, contribution_leaf, head_of
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.members.identity import Identity
from tests.helpers.rounds import identity

RUN_ID = "test-run-0123456789abcdef"
EXCHANGE = Exchange(RUN_ID, 7, bytes(range(32)))

Lie = Callable[[FloatArray], FloatArray]
"""Returns what the reducer publishes in place of a mean."""


def honest(mean_N: FloatArray) -> FloatArray:
    """No lie."""
    return mean_N


@dataclass(frozen=True)
class Member:
    """A peer with the key of its process."""

    peer_id: str
    key: SigningKey
    credentials: Credentials

    @property
    def public(self) -> bytes:
        """Its public key."""
        return self.credentials.certificate[:KEY_BYTES]


@lru_cache(maxsize=256)
def member(number: int, key: int = 0, run_id: str = RUN_ID) -> Member:
    """The same for the same numbers: identities are slow to make. `key`: a peer can certify several."""
    del key  # keys are random
    who, signing = identity(number), SigningKey.generate()
    return Member(who.peer_id, signing, Credentials(who.public_key_der, signing.certificate(who, run_id)))


@dataclass(frozen=True)
class Reduced:
    """One part of an exchange, with all that an auditor gets."""

    exchange: Exchange
    reducer: Member
    contributors: Sequence[Member]
    recipe: Recipe
    result: bytes
    signed: SignedResult
    contributions: Sequence[SignedContribution]

    def wrong_result(self) -> bytes:
        """The proof that the result does not follow from the contributions, true or not."""
        return wrong_result(
            self.exchange, self.reducer.credentials, self.recipe, self.result, self.signed, self.contributions
        )

    def forged(self, index: int) -> bytes:
        """The proof that a contribution is forged, true or not."""
        who = self.contributors[index].credentials
        payload = self.signed.head.payload
        return forged_contribution(
            self.exchange, self.reducer.credentials, self.recipe, payload, self.signed, index, who
        )

    def misquoted(self, index: int, leaves: Sequence[bytes]) -> bytes:
        """The proof that a root has no contribution to the part, true or not; `leaves`: those under it."""
        who = self.contributors[index]
        instead = in_place_of(self.recipe.part, leaves)
        opening = who.key.commit(CONTRIBUTION, self.exchange, leaves)[list(leaves).index(instead)]
        digest, credentials = self.signed.head.payload, self.reducer.credentials
        return misquoted_contribution(
            self.exchange, credentials, self.recipe, digest, self.signed, index, instead, opening
        )

    def quoting(self, index: int, leaves: Sequence[bytes]) -> Reduced:
        """The same, if the reducer had quoted the contributor's root above these leaves."""
        opening = self.contributors[index].key.commit(CONTRIBUTION, self.exchange, leaves)[0]
        roots = list(self.signed.commitments)
        roots[index] = Commitment(opening.root(leaves[0]), opening.signature)
        head = head_of(self.recipe.part, self.recipe.digest, self.result, roots)
        opened = self.reducer.key.commit(RESULT, self.exchange, [head.leaf])[0]
        return replace(self, signed=SignedResult(head, opened, tuple(roots)))

    def two_results(self, other: tuple[Head, Opening]) -> bytes:
        """The proof that the reducer has signed another result, true or not."""
        own = self.signed.head, self.signed.opening
        return two_results(self.exchange, self.reducer.credentials, own, other)

    def sign_again(self, part: int, payload: bytes) -> tuple[Head, Opening]:
        """A head for another payload, signed by the reducer."""
        head = head_of(part, self.recipe.digest, payload, self.signed.commitments)
        return head, self.reducer.key.commit(RESULT, self.exchange, [head.leaf])[0]


def differences(rng: np.random.Generator, num_members: int, num_elements: int, rms: float = 1e-3) -> list[FloatArray]:
    """What members contribute: a common direction, and noise of their own."""
    common_N = rng.standard_normal(num_elements)
    members_MN = rms * (common_N + 0.7 * rng.standard_normal((num_members, num_elements)))
    return list(members_MN.astype(np.float32))


def hold_exchange(
    rng: np.random.Generator,
    *,
    exchange: Exchange = EXCHANGE,
    num_members: int = 3,
    num_elements: int = 200,
    num_parts: int = 3,
    codec: str = "int8",
    result_codec: str = "int8",
    free_rms: float = 1e-4,
    lie: Lie = honest,
    forge: int | None = None,
) -> list[Reduced]:
    """Holds an exchange in which member 0 reduces all parts.

    Args:
        rng: of the contributions.
        exchange: what is signed.
        num_members: all contribute.
        num_elements: of each part.
        num_parts: signed together; their numbers are not consecutive.
        codec: of the contributions.
        result_codec: of the results.
        free_rms: see Agreement.of.
        lie: what the reducer does to the mean.
        forge: index of a member whose root the reducer signs itself.
    """
    members = [member(i, run_id=exchange.run_id) for i in range(num_members)]
    parts = [3 * i + 5 for i in range(num_parts)]
    weights = rng.uniform(1.0, 2.0, num_members).tolist()
    values = {part: differences(rng, num_members, num_elements) for part in parts}
    payloads = {part: [get_codec(codec).encode(each) for each in values[part]] for part in parts}
    openings = []
    for i, who in enumerate(members):
        leaves = [contribution_leaf(part, payloads[part][i]) for part in parts]
        openings.append((members[0] if i == forge else who).key.commit(CONTRIBUTION, exchange, leaves))
    made = []
    for number, part in enumerate(parts):
        shares = tuple(
            Share(m.peer_id, m.public, w, 1.0, 1e3, full=False) for m, w in zip(members, weights, strict=True)
        )
        recipe = Recipe(part, num_elements, codec, result_codec, free_rms, 1.0, shares)
        decoded = [get_codec(codec).decode(payload, num_elements) for payload in payloads[part]]
        result = get_codec(result_codec).encode(lie(mean(decoded, weights, free_rms, 1.0)[0]))
        contributions = [
            SignedContribution(who.credentials, payload, opened[number])
            for who, payload, opened in zip(members, payloads[part], openings, strict=True)
        ]
        roots = tuple(
            Commitment(each.opening.root(contribution_leaf(part, each.payload)), each.opening.signature)
            for each in contributions
        )
        made.append((recipe, result, contributions, roots, head_of(part, recipe.digest, result, roots)))
    signed = members[0].key.commit(RESULT, exchange, [head.leaf for *_, head in made])
    return [
        Reduced(exchange, members[0], members, recipe, result, SignedResult(head, opening, roots), contributions)
        for (recipe, result, contributions, roots, head), opening in zip(made, signed, strict=True)
    ]


def proof_against(culprit: Identity, run_id: str = RUN_ID, round_number: int = 7) -> bytes:
    """The proof that a peer has signed two results of one part, in an exchange of its own making."""
    key, exchange = SigningKey.generate(), Exchange(run_id, round_number, bytes(range(32)))
    heads = [Head(5, digest(b"recipe"), digest(payload), digest(b"roots")) for payload in (b"one", b"two")]
    openings = [key.commit(RESULT, exchange, [head.leaf])[0] for head in heads]
    credentials = Credentials(culprit.public_key_der, key.certificate(culprit, run_id))
    return two_results(exchange, credentials, *zip(heads, openings, strict=True))
