"""What a member brings to a round: a signed statement.

The plan of a round is a pure function of its members' statements, so they carry everything the plan depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from blake3 import blake3
from pydantic import Field, model_validator

from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.admission.exclusion import MARK_BYTES as CULPRIT_MARK_BYTES
from spes_swarm.protocol.admission.exclusion import MAX_MARKS
from spes_swarm.protocol.admission.grants import MAX_ADMISSION_BYTES
from spes_swarm.protocol.averaging.commitments import MAX_CERTIFICATE_BYTES, Credentials, Exchange, Signer
from spes_swarm.protocol.bitmap import num_bitmap_bytes
from spes_swarm.protocol.consensus.lineage import MARK_BYTES, MAX_COMMITS, Lineage
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.members.signed import SignedModel, seal, unseal, writer_key
from spes_swarm.protocol.rounds.vouchers import MAX_VOUCHED, VOUCHER_BYTES

KIND = "statement"
DIGEST_BYTES = 32
MAX_ROUND = 1 << 40
MAX_PACE = 1e9
MAX_RMS = 1e30  # of a difference: the squares of larger ones overflow
_MAX_TOKENS = 1 << 48
_MAX_EXPERTS = 1 << 20
NONCE_BYTES = 16
_NOBODY, _NO_CREDENTIALS = Signer("", b""), Credentials(b"", b"")

_Count = Annotated[int, Field(ge=0, le=_MAX_TOKENS)]
_Length = Annotated[float, Field(ge=0, le=MAX_RMS, allow_inf_nan=False)]
_Round = Annotated[int, Field(ge=0, lt=MAX_ROUND)]


class Statement(SignedModel):
    """One member's view of the reference and what it has trained since the last commit."""

    round: _Round  # the round to be committed
    held: list[Annotated[int, Field(ge=0)]]  # experts trained by this member, ascending
    tokens: _Count  # tokens trained on since the member's last commit
    # Tokens routed to each held expert (all layers together) since its last synchronisation.
    routed: list[_Count]
    # Root mean square of its differences to its own reference: of the shared block, then of each held expert. They
    # determine how large a difference may be; see clipping.py.
    rms: list[_Length]
    # Usual RMS of differences in the rounds that it remembers, of the shared block and of experts; 0 if none.
    usual_rms: Annotated[list[_Length], Field(min_length=2, max_length=2)]
    # What other members have delivered and earned in earlier commits; see vouchers.py.
    vouched: Annotated[bytes, Field(max_length=MAX_VOUCHED * VOUCHER_BYTES)]
    # Upload speed, as declared: it can only lower the share of the reducing that was measured.
    bandwidth_mbps: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
    reachable: bool  # False in client mode: others cannot open connections to it, so it reduces nothing
    versions: list[_Round]  # for each block, the round of its last change
    digests: list[Annotated[bytes, Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]]  # for each block
    # Which commits led to this member's reference (see lineage.py): rounds, ascending, and a mark for each of them.
    commits: Annotated[list[_Round], Field(max_length=MAX_COMMITS)]
    marks: Annotated[bytes, Field(max_length=MAX_COMMITS * MARK_BYTES)]
    # For ownership/reassignment.py, which derives from the group's statements what each member holds after the commit.
    room: Annotated[int, Field(ge=0, le=_MAX_EXPERTS)]  # the most experts that this member can hold
    fixed: bool  # its user has named its experts: it adopts no others
    leaving: bool  # this is its last round
    leased: bytes  # bitmap of the experts on which it sees others' unexpired leases
    # Seconds that the median member recently took for 10^6 values that it sends; 0 if unknown. See conduct.py.
    pace: Annotated[float, Field(ge=0, le=MAX_PACE, allow_inf_nan=False)] = 0.0
    # Whether its loss has risen since its last commit (None: it cannot tell), and the digest of the whole reference
    # before that commit, if it can go back there. See taking_back.py.
    loss_rose: bool | None = None
    before: Annotated[bytes, Field(max_length=DIGEST_BYTES)] = b""
    # Of the key that signs what it sends in the exchange; see protocol/averaging/commitments.py.
    certificate: Annotated[bytes, Field(max_length=MAX_CERTIFICATE_BYTES)]
    # Random, so that no two attempts at a round have the same group: a reducer signs one result of a part in each.
    nonce: Annotated[bytes, Field(max_length=NONCE_BYTES)] = b""
    # Whom it has proofs against; see protocol/admission/exclusion.py.
    proven: Annotated[bytes, Field(max_length=MAX_MARKS * CULPRIT_MARK_BYTES)] = b""
    # To a private run, so that all members of a group know each other; see protocol/admission/grants.py.
    admission: Annotated[bytes, Field(max_length=MAX_ADMISSION_BYTES)] = b""

    @model_validator(mode="after")
    def _consistent(self) -> Statement:
        if len(self.routed) != len(self.held):
            raise ValueError("routed must have one count for each held expert")
        if len(self.rms) != 1 + len(self.held):
            raise ValueError("rms must have one value for the shared block and one for each held expert")
        if len(self.vouched) % VOUCHER_BYTES:
            raise ValueError(f"vouched must have {VOUCHER_BYTES} bytes for each peer")
        if len(self.versions) != len(self.digests):
            raise ValueError("versions and digests must have one entry for each block")
        if max(self.versions, default=0) >= max(self.round, 1):
            raise ValueError("a block cannot have changed in a round that is yet to be committed")
        if self.held != sorted(set(self.held)):
            raise ValueError("held must be ascending without repetition")
        if self.held and self.held[-1] >= len(self.digests) - 1:
            raise ValueError("held names an expert that the model does not have")
        if len(self.leased) != num_bitmap_bytes(len(self.digests) - 1):
            raise ValueError("leased must have one bit for each expert")
        if len(self.before) not in (0, DIGEST_BYTES):
            raise ValueError("before must be a digest, or empty")
        if len(self.marks) != MARK_BYTES * len(self.commits):
            raise ValueError("there must be one mark for each commit")
        if self.commits != sorted(set(self.commits)) or (self.commits and self.commits[-1] >= self.round):
            raise ValueError("commits must be ascending without repetition, and before the round")
        return self

    @property
    def lineage(self) -> Lineage:
        """The commits that led to this member's reference."""
        return Lineage.from_lists(self.commits, self.marks)


@dataclass(frozen=True)
class Member:
    """A verified statement with its writer."""

    peer_id: str
    statement: Statement
    most_weight: float = 1.0  # the largest share of a block's average that it may have
    signer: Signer = _NOBODY  # of what it sends in the exchange
    credentials: Credentials = _NO_CREDENTIALS  # which show that it is the signer

    @property
    def vouched(self) -> bytes:
        """What counts of `Statement.vouched`: before a run's first commit nobody has delivered anything."""
        return self.statement.vouched if self.statement.round > 1 else b""


@dataclass(frozen=True)
class Group:
    """The members of one round, ordered by peer id, the same on every peer."""

    run_id: str
    round: int
    members: tuple[Member, ...]
    sealed: tuple[bytes, ...]  # the signed statements, in the order of the members

    @cached_property
    def id(self) -> bytes:
        """Digest of the signed statements: identifies the group in every message of its exchange."""
        hasher = blake3(f"{self.run_id}|{self.round}".encode())
        for data in self.sealed:
            hasher.update(blake3(data).digest())
        return hasher.digest()

    @property
    def exchange(self) -> Exchange:
        """What the signatures of its exchange are good for."""
        return Exchange(self.run_id, self.round, self.id)

    def index_of(self, peer_id: str) -> int | None:
        """Position of a peer among the members, None if it is not one."""
        return next((i for i, member in enumerate(self.members) if member.peer_id == peer_id), None)


def seal_statement(identity: Identity, run_id: str, statement: Statement) -> bytes:
    """Signs a statement."""
    return seal(identity, KIND, run_id, statement)


Vet = Callable[[str, Statement], float]
"""Returns `Member.most_weight`; raises ProtocolError if a peer may not be a member of a group."""


def _admit_all(peer_id: str, statement: Statement) -> float:
    del peer_id, statement
    return 1.0


def open_statement(data: bytes, run_id: str, round_number: int, num_blocks: int, vet: Vet = _admit_all) -> Member:
    """Verifies a signed statement for a given round.

    Raises:
        ProtocolError: a signature or the schema is invalid; (`round`) another round; (`shape`) another number of
            blocks; (`stranger`, `terms`) the run is private, and the peer may not take part with such a statement.
    """
    peer_id, statement = unseal(data, KIND, run_id, Statement)
    if statement.round != round_number:
        raise ProtocolError("round", f"statement of {peer_id} is for round {statement.round}, not {round_number}")
    if len(statement.digests) != num_blocks:
        raise ProtocolError("shape", f"statement of {peer_id} has {len(statement.digests)} blocks, not {num_blocks}")
    credentials = Credentials(writer_key(data), statement.certificate)
    return Member(peer_id, statement, vet(peer_id, statement), Signer.of(credentials, run_id), credentials)


def form_group(
    run_id: str, round_number: int, sealed: Iterable[bytes], num_blocks: int, vet: Vet = _admit_all
) -> Group:
    """Verifies the statements that a leader gathered and puts them in the canonical order.

    Raises:
        ProtocolError: a statement fails verification, or (`duplicate`) a peer appears twice.
    """
    entries: Sequence[tuple[Member, bytes]] = sorted(
        ((open_statement(data, run_id, round_number, num_blocks, vet), data) for data in sealed),
        key=lambda entry: entry[0].peer_id,
    )
    members = tuple(member for member, _ in entries)
    if len({member.peer_id for member in members}) != len(members):
        raise ProtocolError("duplicate", "a peer appears twice in the group")
    return Group(run_id, round_number, members, tuple(data for _, data in entries))
