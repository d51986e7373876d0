"""How peers divide data without negotiation: each piece belongs to one member, by rendezvous hash.

If a member joins or leaves, only its pieces change owners (Thaler and Ravishankar, "Using Name-Based Mappings to
Increase Hit Rates", 1998).
"""

from __future__ import annotations

from collections.abc import Collection

from blake3 import blake3


def owner_of(piece: bytes, members: Collection[str]) -> str:
    """Returns the member that trains on a piece, given by a name of its own; all members are equally likely."""
    return min(members, key=lambda member: blake3(piece + member.encode()).digest())
