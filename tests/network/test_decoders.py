"""Whatever arrives from a peer, decoders accept it or raise a ProtocolError; a change of what is signed is refused.

Openings, recipes, results and proofs of exchanges are mutated in `tests/protocol/test_averaging_*.py`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from random import Random

import msgpack
import numpy as np
import pytest
from pydantic import ValidationError

from spes_swarm.base.decoding import unpack
from spes_swarm.base.errors import InvitationError, ProtocolError
from spes_swarm.network.link.wire import read_hello
from spes_swarm.network.round.claims import read_seen
from spes_swarm.protocol.admission import acts
from spes_swarm.protocol.admission.grants import (
    Chain,
    Grant,
    Invitation,
    extend,
    new_key,
    open_admission,
    pack,
    read_invitation,
)
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.statement import Statement, open_statement
from spes_swarm.protocol.version import with_version
from tests.helpers.meeting import statement_fields
from tests.helpers.mutation import garbage, mutated
from tests.helpers.rounds import identity, sign_statement
from tests.helpers.signed_exchange import RUN_ID, hold_exchange

FOUNDER, KEY = identity(0), identity(0).public_key_der
ROUND, NUM_BLOCKS = 5, 3
NUM_INPUTS = 10_000


def grant(parent: tuple[Chain, bytes] | None = None, **terms: object) -> tuple[Chain, bytes]:
    """A chain by the founder, or one grant longer than `parent`, with the private key of its last grant."""
    secret, public = new_key()
    chain, signer = parent or (None, FOUNDER)
    return extend(chain, signer, RUN_ID, Grant.model_validate({"key": public, **terms})), secret


def invitations() -> list[Invitation]:
    chains = [grant(grant(may_invite=True)), grant(experts=2, expires=2e9), grant(uses=1, name="Ada")]
    return [Invitation(RUN_ID, chain.wire, secret) for chain, secret in chains]


def admissions() -> list[bytes]:
    return [each.admit(FOUNDER.peer_id) for each in invitations()]


def some_acts() -> list[bytes]:
    delegate, secret = grant(may_invite=True)
    return [
        acts.allow(extend(None, FOUNDER, RUN_ID, Grant(peer="a peer"))),
        acts.use(FOUNDER.peer_id, admissions()[-1]),
        acts.revoke(FOUNDER, None, RUN_ID, acts.Target(peer="a peer", at=1e9)),
        acts.revoke(secret, delegate, RUN_ID, acts.Target(peer="a peer", at=1e9)),
        acts.pardon(FOUNDER, RUN_ID, acts.Pardon(peer="a peer", round=7, at=1e9)),
    ]


def words() -> list[bytes]:
    return [pack([each.run_id, each.wire, each.secret]) for each in invitations()]


def read_word(data: bytes) -> object:
    try:
        return read_invitation("spes1." + base64.urlsafe_b64encode(data).decode().rstrip("="))
    except InvitationError as exc:
        raise ProtocolError("invitation", str(exc)) from exc


def statements() -> list[bytes]:
    statement = Statement.model_validate(statement_fields())
    return [sign_statement(identity(number), RUN_ID, statement) for number in range(2)]


def contents() -> list[bytes]:
    return [pack(statement_fields() | {"tokens": number}) for number in range(2)]


def read_content(data: bytes) -> object:
    """Reads a statement as `open_statement` does after its signature has been verified."""
    try:
        return Statement.model_validate(unpack(data))
    except ValidationError as exc:
        raise ProtocolError("schema", str(exc)) from exc


def hellos() -> list[bytes]:
    return [msgpack.packb(with_version(fields)) for fields in ({"group": bytes(32), "parts": b""}, {"culprit": "a"})]


def seen() -> list[bytes]:
    signed = [each.signed for each in hold_exchange(np.random.default_rng(0))]
    openings = [each.opening.wire for each in signed]
    return [bytes([len(o)]) + o + each.head.wire + o for o, each in zip(openings, signed, strict=True)]


@pytest.mark.parametrize(
    ("decoder", "make_valid", "is_signed"),
    [
        (lambda data: open_admission(data, FOUNDER.peer_id, RUN_ID, KEY), admissions, True),
        (lambda data: acts.open_act(data, RUN_ID, KEY), some_acts, True),
        (lambda data: open_statement(data, RUN_ID, ROUND, NUM_BLOCKS), statements, True),
        (read_content, contents, False),
        (read_word, words, False),
        (lambda data: read_hello(Frame(FrameKind.HELLO, payload=data), len(data)), hellos, False),
        (read_seen, seen, False),
    ],
    ids=["admission", "act", "statement", "content of a statement", "invitation", "hello", "audit"],
)
def test_no_input_fails_in_another_way(
    decoder: Callable[[bytes], object], make_valid: Callable[[], list[bytes]], is_signed: bool
) -> None:
    random, valid, accepted = Random(2), make_valid(), 0
    for message in valid:
        decoder(message)
    for number in range(NUM_INPUTS):
        data = garbage(random) if number % 3 == 0 else mutated(random, *random.sample(valid, 2))
        try:
            decoder(data)
            accepted += 1
        except ProtocolError:
            pass
    assert not (is_signed and accepted)
