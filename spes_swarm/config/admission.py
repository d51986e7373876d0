"""What the manifest of a run says about who may take part."""

from __future__ import annotations

from typing import Final

from spes_swarm.base.errors import InvitationError, ProtocolError
from spes_swarm.config.manifest import Manifest
from spes_swarm.protocol.admission.membership import Membership

ADVICE: Final = "ask one of its members for an invitation, and give it with --invitation"


def membership_of(manifest: Manifest) -> Membership:
    """What the manifest of a run alone says about who may take part."""
    return Membership(manifest.run_id, manifest.founder, manifest.founder_key, manifest.run.admission)


def check_admission(manifest: Manifest, peer_id: str, admission: bytes, now: float) -> None:
    """Checks this peer's own admission, before anything is asked of other peers.

    Raises:
        InvitationError: the run is private and does not admit this peer; one that admits peers by name may do so.
    """
    members = membership_of(manifest)
    if members.policy == "allow-list" or members.admits(peer_id, now):
        return
    try:
        if not admission:
            raise InvitationError(f"run {manifest.run_id} is private: {ADVICE}")
        members.learn(peer_id, admission, now)
    except ProtocolError as exc:
        raise InvitationError(f"the invitation is not valid for run {manifest.run_id} ({exc.detail})") from exc
    if not members.admits(peer_id, now):
        raise InvitationError(f"{members.why_not(peer_id, now)}: {ADVICE}")
