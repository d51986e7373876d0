"""Invitations to a private run in OUTPUT_DIR: those that this peer has made, and what its acts say of them."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from spes_swarm.base.errors import InvitationError, ProtocolError, UserError, os_errors_as
from spes_swarm.base.user_paths import user_path
from spes_swarm.config.manifest import Manifest, RawManifest
from spes_swarm.config.peer import PeerConfig
from spes_swarm.protocol.admission.acts import Act, Revoke, has_revoked_grant, open_act
from spes_swarm.protocol.admission.grants import (
    INVITATION,
    Chain,
    Grant,
    Invitation,
    extend,
    new_key,
    open_chain,
    read_invitation,
)
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.storage.acts_file import ActsFile
from spes_swarm.storage.run_directory import RunDirectory

ANY_KEY: Final = bytes(32)  # in a grant that is not made yet: `MadeInvitations.make` puts a new one in its place


def find_invitation(text: str) -> Invitation:
    """Reads an invitation: the word itself, or a file with it.

    Raises:
        InvitationError: it is neither, or the word is damaged.
    """
    if not text.strip().lower().startswith("spes1."):
        with os_errors_as(InvitationError, f"{text!r:.80} is neither an invitation (spes1. ...) nor a file with one"):
            text = user_path(text).read_text(encoding="utf-8", errors="replace")
        found = INVITATION.search(text)
        if found is not None and not INVITATION.fullmatch("".join(text.split())):  # else a long line may be broken
            text = found[0]
    return read_invitation(text)


def own_invitation(peer: PeerConfig, directory: RunDirectory) -> Invitation | None:
    """Returns the invitation with which a peer joins: the given one, or that of the last session or attempt to join.

    Raises:
        InvitationError: it is damaged, or to another run than the wanted one.
    """
    stored = directory.raw_manifest()
    if peer.invitation is None:
        if (word := directory.known_invitation()) is None:
            return None
        known = read_invitation(word)
        attempted = bool(peer.initial_peers) and peer.run_id in (None, known.run_id)
        return known if stored is not None or attempted else None
    invitation = find_invitation(peer.invitation)
    expected = peer.run_id or (stored.run_id if stored is not None else None)
    if expected not in (None, invitation.run_id):
        raise InvitationError(f"the invitation is to run {invitation.run_id}, not {expected}: ask for one to this run")
    return invitation


def opened(invitation: Invitation, manifest: Manifest | RawManifest) -> Chain:
    """Returns the verified chain of an invitation.

    Raises:
        InvitationError: it is to another run, or was not made by its founder or somebody whom the founder let invite.
    """
    if invitation.run_id != manifest.run_id:
        raise InvitationError(
            f"the invitation is to run {invitation.run_id}, not {manifest.run_id}: ask for one to this run"
        )
    try:
        return open_chain(invitation.wire, manifest.run_id, manifest.founder_key)
    except ProtocolError as exc:
        raise InvitationError(f"the invitation is not valid ({exc.detail}): ask for another one") from exc


def can_be_passed_on(invitation: Invitation) -> bool:
    """Returns True if any number of peers may use the invitation, and none of them may invite others."""
    grants = invitation.grants
    return all(grant.get("uses") is None for grant in grants) and not grants[-1].get("may_invite")


def read_acts(path: Path, manifest: Manifest | RawManifest) -> dict[bytes, Act]:
    """Returns the acts in the file of a run by their bytes, except those that do not verify."""
    return _verified(ActsFile(path).read_new(), manifest)


def add_acts(path: Path, acts: Iterable[bytes], manifest: Manifest | RawManifest) -> None:
    """Appends acts to the file of a run, except those that it has and those that do not verify.

    Raises:
        OSError: the file cannot be read or written.
    """
    file = ActsFile(path)
    known = set(file.read_new())
    for data in _verified(acts, manifest):
        if data not in known:
            file.append(data)


def publish_act(directory: RunDirectory, act: bytes) -> str:
    """Stores an act in a peer's directory, which the peer passes on; returns when, in words.

    Raises:
        UserError: it cannot be written.
    """
    with os_errors_as(UserError, f"{directory.acts} cannot be written"):
        ActsFile(directory.acts).append(act)
    return "the running peer passes it on now" if directory.is_in_use() else "it takes effect when this peer runs next"


def _verified(acts: Iterable[bytes], manifest: Manifest | RawManifest) -> dict[bytes, Act]:
    verified = {}
    for data in acts:
        with suppress(ProtocolError):
            verified[data] = open_act(data, manifest.run_id, manifest.founder_key)
    return verified


def is_revoked(chain: Chain, acts: Iterable[Act]) -> bool:
    """Returns True if these acts revoke a grant of the chain."""
    revoked: defaultdict[bytes, set[bytes]] = defaultdict(set)
    for act in acts:
        if isinstance(act, Revoke):
            revoked[act.target.grant].add(act.signer)
    return has_revoked_grant(chain, revoked)


@dataclass(frozen=True)
class MadeInvitation:
    """An invitation that was made."""

    name: str  # for whom; may be empty
    grant: str  # hex id
    word: str  # with the terms and the private key
    at: float  # Unix seconds


class MadeInvitations:
    """The invitations that this peer has made, in a file that only its user can read."""

    def __init__(self, directory: RunDirectory) -> None:
        """Reads them; without a file there are none.

        Raises:
            InvitationError: the file is damaged.
        """
        self._directory = directory
        try:
            stored = json.loads(directory.invitations.read_text(encoding="utf-8"))
            self.entries = [MadeInvitation(**entry) for entry in stored]
        except FileNotFoundError:
            self.entries = []
        except (OSError, ValueError, TypeError, RecursionError) as exc:
            raise InvitationError(
                f"{directory.invitations} is damaged: move it away (the invitations in it stay valid)"
            ) from exc

    def like(self, grant: Grant, manifest: Manifest | RawManifest, acts: Iterable[Act]) -> Invitation | None:
        """Returns an invitation on the terms of a grant that has not been revoked; None if there is none."""
        for entry in self.entries:
            invitation = read_invitation(entry.word)
            chain = opened(invitation, manifest)
            if chain.grants[-1].model_copy(update={"key": grant.key}) == grant and not is_revoked(chain, acts):
                return invitation
        return None

    def make(self, chain: Chain | None, signer: Identity | bytes, run_id: str, grant: Grant) -> Invitation:
        """Makes an invitation on the terms of a grant, whose key is replaced by a new one; see `extend`.

        Raises:
            ValueError: see `extend`.
            UserError: the file cannot be written.
        """
        secret, public = new_key()
        made = extend(chain, signer, run_id, grant.model_copy(update={"key": public}))
        invitation = Invitation(run_id, made.wire, secret)
        entry = MadeInvitation(grant.name, made.ids[-1].hex(), invitation.to_text(), time.time())
        self.entries.append(entry)
        entries = [asdict(entry) for entry in self.entries]
        self._directory.store(self._directory.invitations.name, json.dumps(entries, indent=1), mode=0o600)
        return invitation
