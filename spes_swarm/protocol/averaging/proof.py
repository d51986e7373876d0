"""Proofs that a reducer has lied: anybody can verify one, offline, without having taken part.

    result        the signed result does not follow from its contributions
    forged        the signed result includes a root that the member it is attributed to has not signed
    misquoted     the signed result includes a root under which there is no contribution to the part: nobody can show
                  the contribution that it is said to have, so without this kind, such results could say anything
    two-results   the reducer has signed two results of one part in one exchange

A proof shows only what its culprit has signed, so nobody else can make one about an honest peer:

- Certificates and signatures name the run, and signatures the exchange. They are good nowhere else.
- A contribution is the one that the reducer has included: its result names the root above it, under which there is one
  contribution to a part (see commitments.py).
- A contribution is a difference if the recipe says so: nothing is concluded from full values.
- A contributor's key is the one that the reducer's recipe names, whichever others that peer has certified.
- A result is wrong only if it is further from the mean than rounding, on whatever machine, can bring it (see
  recipe.py).

A proof is a msgpack list in its only valid encoding, and each byte of it is bound by a signature or a comparison.
Nothing of it is executed or unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from spes_swarm.base.decoding import unpack
from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.averaging.commitments import (
    CONTRIBUTION,
    DIGEST_BYTES,
    RESULT,
    Commitment,
    Credentials,
    Exchange,
    Opening,
    Signer,
    digest,
)
from spes_swarm.protocol.averaging.recipe import Recipe, Share, fault_of
from spes_swarm.protocol.averaging.signed_result import Head, SignedResult, contribution_leaf

MAX_PROOF_BYTES = 256 << 20
# Of all contributions together: an encoding is up to eight times smaller than its values.
_MAX_VALUES = MAX_PROOF_BYTES // 4
_MAX_RUN_ID_CHARS = 128
_MAX_ROUND = 1 << 40  # as in statements
_FORMAT: Final = "spes_swarm proof 1"
_WRONG: Final = "result"
_FORGED: Final = "forged"
_MISQUOTED: Final = "misquoted"
_TWO: Final = "two-results"


@dataclass(frozen=True, slots=True)
class SignedContribution:
    """A contribution to a part, with what shows whose it is."""

    credentials: Credentials
    payload: bytes  # encoded
    opening: Opening


@dataclass(frozen=True)
class Proof:
    """What a verified proof shows."""

    kind: str
    run_id: str
    round: int
    group_id: bytes
    part: int
    culprit: str  # peer id
    what: str  # one sentence
    id: bytes  # digest of the proof; one lie may have several proofs


@dataclass(frozen=True, slots=True)
class _Claim:
    """The content of a proof whose frame is valid."""

    exchange: Exchange
    reducer: Signer
    body: list[Any]


def wrong_result(
    exchange: Exchange,
    reducer: Credentials,
    recipe: Recipe,
    result: bytes,
    signed: SignedResult,
    contributions: Sequence[SignedContribution],
) -> bytes:
    """The proof that a result does not follow from its contributions, which are in the order of the recipe's shares.

    Raises:
        ProtocolError: (`oversized`) it would be too long.
    """
    parts = [[*each.credentials, each.payload, each.opening.wire] for each in contributions]
    return _sealed(_WRONG, exchange, reducer, [recipe.content, result, *_wires(signed), parts])


def forged_contribution(
    exchange: Exchange,
    reducer: Credentials,
    recipe: Recipe,
    payload_digest: bytes,
    signed: SignedResult,
    index: int,
    contributor: Credentials,
) -> bytes:
    """The proof that the contributor of a share, which has an index in the recipe, has not signed the root with it.

    Raises:
        ProtocolError: (`oversized`) it would be too long.
    """
    body = [recipe.content, payload_digest, *_wires(signed), index, list(contributor)]
    return _sealed(_FORGED, exchange, reducer, body)


def misquoted_contribution(
    exchange: Exchange,
    reducer: Credentials,
    recipe: Recipe,
    payload_digest: bytes,
    signed: SignedResult,
    index: int,
    leaf: bytes,
    opening: Opening,
) -> bytes:
    """The proof that there is no contribution to the part under the root of a share, which has an index in the recipe.

    The contributor can make it, which knows all leaves under its roots. `leaf`: the one that is there instead (see
    commitments.in_place_of), with its opening.

    Raises:
        ProtocolError: (`oversized`) it would be too long.
    """
    body = [recipe.content, payload_digest, *_wires(signed), index, leaf, b"".join(opening.path)]
    return _sealed(_MISQUOTED, exchange, reducer, body)


def two_results(
    exchange: Exchange, reducer: Credentials, first: tuple[Head, Opening], second: tuple[Head, Opening]
) -> bytes:
    """The proof that a reducer has signed two results of one part.

    Raises:
        ProtocolError: (`oversized`) it would be too long.
    """
    pairs = sorted((head.wire, opening.wire) for head, opening in (first, second))
    return _sealed(_TWO, exchange, reducer, [wire for pair in pairs for wire in pair])


def open_proof(data: bytes) -> Proof:
    """Verifies a proof.

    Raises:
        ProtocolError: (`malformed`, `oversized`) it is not a proof; (`signature`, `shape`, `nonfinite`, `proof`) it
            proves nothing.
    """
    content = unpack(data, MAX_PROOF_BYTES)
    match content:
        case [
            str(name),
            str(kind),
            str(run_id),
            int(number),
            bytes(group_id),
            [bytes(key), bytes(certificate)],
            list(),
        ]:
            exchange = Exchange(run_id, number, group_id)
            if name == _FORMAT and kind in _CHECKS and _is_plausible(exchange) and _pack(content) == data:
                reducer = Signer.of(Credentials(key, certificate), run_id)
                part, what = _CHECKS[kind](_Claim(exchange, reducer, content[-1]))
                return Proof(kind, *exchange, part, reducer.peer_id, what, digest(data))
    raise ProtocolError("malformed", "not a proof")


def _pack(content: object) -> bytes:
    return bytes(msgpack.packb(content, use_bin_type=True))


def _sealed(kind: str, exchange: Exchange, reducer: Credentials, body: list[Any]) -> bytes:
    data = _pack([_FORMAT, kind, *exchange, list(reducer), body])
    if len(data) > MAX_PROOF_BYTES:
        raise ProtocolError("oversized", f"a proof of {len(data)} bytes; at most {MAX_PROOF_BYTES} are allowed")
    return data


def _wires(signed: SignedResult) -> tuple[bytes, bytes]:
    return signed.opening.wire, b"".join(commitment.wire for commitment in signed.commitments)


def _is_plausible(exchange: Exchange) -> bool:
    """Returns True if no other exchange has the same signatures: what is signed separates its fields by zeros."""
    return (
        0 < len(exchange.run_id) <= _MAX_RUN_ID_CHARS
        and exchange.run_id.isprintable()
        and type(exchange.round) is int  # not True
        and 0 <= exchange.round < _MAX_ROUND
        and len(exchange.group_id) == DIGEST_BYTES
    )


def _check_result(claim: _Claim) -> tuple[int, str]:
    match claim.body:
        case [content, bytes(result), bytes(opening), bytes(roots), list(contributions)]:
            recipe = Recipe.from_content(content)
            commitments = _commitments(recipe, roots)
            if len(contributions) != len(commitments):
                raise ProtocolError("malformed", "a proof without all contributions")
            if recipe.num_elements * len(commitments) > _MAX_VALUES:
                raise ProtocolError("oversized", f"contributions of more than {_MAX_VALUES} values")
            _check_head(claim, recipe, digest(result), opening, roots)
            # All signatures come before arithmetic, which takes longer.
            payloads = [
                _check_contribution(claim.exchange, recipe.part, share, commitment, each)
                for share, commitment, each in zip(recipe.shares, commitments, contributions, strict=True)
            ]
            fault = fault_of(recipe, result, payloads)
            if fault is None:
                raise ProtocolError("proof", "the result follows from its contributions")
            return recipe.part, fault
    raise ProtocolError("malformed", "not a proof of a wrong result")


def _check_contribution(exchange: Exchange, part: int, share: Share, commitment: Commitment, content: Any) -> bytes:
    """Returns the payload of a contribution, which is that of a share and under a root."""
    match content:
        case [bytes(key), bytes(certificate), bytes(payload), bytes(opening)]:
            signer = _signer_of(share, Credentials(key, certificate), exchange)
            leaf = contribution_leaf(part, payload)
            if signer.commitment(CONTRIBUTION, exchange, leaf, Opening.from_wire(opening)) != commitment:
                raise ProtocolError("proof", f"the result does not include this contribution of {signer.peer_id}")
            return payload
    raise ProtocolError("malformed", "not a contribution")


def _check_forged(claim: _Claim) -> tuple[int, str]:
    match claim.body:
        case [content, bytes(payload), bytes(opening), bytes(roots), int(i), [bytes(key), bytes(certificate)]]:
            recipe, commitment = _check_index(claim, content, payload, opening, roots, i)
            signer = _signer_of(recipe.shares[i], Credentials(key, certificate), claim.exchange)
            if signer.has_signed(CONTRIBUTION, claim.exchange, commitment):
                raise ProtocolError("proof", f"{signer.peer_id} has signed the contribution")
            return recipe.part, f"the result includes a contribution that {signer.peer_id} has not signed"
    raise ProtocolError("malformed", "not a proof of a forged contribution")


def _check_misquoted(claim: _Claim) -> tuple[int, str]:
    match claim.body:
        case [content, bytes(payload), bytes(opening), bytes(roots), int(i), bytes(leaf), bytes(path)]:
            recipe, commitment = _check_index(claim, content, payload, opening, roots, i)
            found = Opening.from_wire(commitment.signature + path).root_without(recipe.part, leaf)
            if found != commitment.root:
                raise ProtocolError("proof", "the root may have a contribution to the part")
            peer_id = recipe.shares[i].peer_id
            return recipe.part, f"the result includes a contribution of {peer_id} that is not under the root it quotes"
    raise ProtocolError("malformed", "not a proof of a misquoted contribution")


def _check_index(
    claim: _Claim, content: Any, payload_digest: bytes, opening: bytes, roots: bytes, index: int
) -> tuple[Recipe, Commitment]:
    """Returns the recipe of a result that the reducer has signed, and the root of one of its shares."""
    recipe = Recipe.from_content(content)
    commitments = _commitments(recipe, roots)
    if len(payload_digest) != DIGEST_BYTES or type(index) is not int or not 0 <= index < len(commitments):
        raise ProtocolError("malformed", "not the digest of a result and the index of a contribution")
    _check_head(claim, recipe, payload_digest, opening, roots)
    return recipe, commitments[index]


def _check_two(claim: _Claim) -> tuple[int, str]:
    match claim.body:
        case [bytes(first), bytes(opening), bytes(second), bytes(other)] if len(first) == len(second) == Head.SIZE:
            one, two = Head.from_wire(first), Head.from_wire(second)
            if one.part != two.part or not first < second:
                raise ProtocolError("proof", "not two results of one part, in their order")
            for head, wire in ((one, opening), (two, other)):
                claim.reducer.commitment(RESULT, claim.exchange, head.leaf, Opening.from_wire(wire))
            return one.part, "it has signed two different results"
    raise ProtocolError("malformed", "not a proof of two results")


def _commitments(recipe: Recipe, roots: bytes) -> list[Commitment]:
    size = Commitment.SIZE
    if len(roots) != size * len(recipe.shares):
        raise ProtocolError("malformed", "not one signed root for each contribution")
    return [Commitment.from_wire(roots[i : i + size]) for i in range(0, len(roots), size)]


def _check_head(claim: _Claim, recipe: Recipe, payload_digest: bytes, opening: bytes, roots: bytes) -> None:
    """Raises ProtocolError unless the reducer has signed a result with these properties."""
    head = Head(recipe.part, recipe.digest, payload_digest, digest(roots))
    claim.reducer.commitment(RESULT, claim.exchange, head.leaf, Opening.from_wire(opening))


def _signer_of(share: Share, credentials: Credentials, exchange: Exchange) -> Signer:
    signer = Signer.of(credentials, exchange.run_id)
    if (signer.peer_id, signer.key) != (share.peer_id, share.key):
        raise ProtocolError("proof", f"{signer.peer_id}, or this key of it, is not the contributor")
    return signer


_CHECKS: Final = {_WRONG: _check_result, _FORGED: _check_forged, _MISQUOTED: _check_misquoted, _TWO: _check_two}
