"""Statements and groups without signatures, for machines that meet without a network."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.rounds.statement import Group, Member, Statement

RUN_ID = "checked"


@cache
def statement(number: int, reference: int = 0, life: int = 0) -> Statement:
    """A statement for a round, of a peer with a reference; each of its processes has another signing key."""
    digests, certificate = [reference.to_bytes(32)], bytes(life)
    return Statement.model_construct(round=number, held=[0], versions=[0], digests=digests, certificate=certificate)


def seal(name: str, number: int, reference: int = 0, life: int = 0, nonce: int = 0) -> bytes:
    """What a peer would sign."""
    return f"{name}|{number}|{reference}|{life}|{nonce}".encode()


@cache
def _open(sealed: bytes) -> Member:
    name, number, reference, life, _ = sealed.decode().split("|")
    return Member(name, statement(int(number), int(reference), int(life)))


def form(number: int, sealed: Iterable[bytes]) -> Group:
    """A group of statements; see form_group.

    Raises:
        ProtocolError: a statement is malformed or of another round, or a peer has two.
    """
    try:
        opened = sorted(((_open(item), item) for item in sealed), key=lambda entry: entry[0].peer_id)
    except ValueError as exc:
        raise ProtocolError("malformed", "no statement") from exc
    members = tuple(member for member, _ in opened)
    if any(member.statement.round != number for member in members):
        raise ProtocolError("round", "a statement of another round")
    if len({member.peer_id for member in members}) != len(members):
        raise ProtocolError("duplicate", "a peer appears twice in the group")
    return Group(RUN_ID, number, members, tuple(item for _, item in opened))
