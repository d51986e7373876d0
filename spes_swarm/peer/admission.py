"""A peer's own admission to a private run, and what it tells others about joining."""

from __future__ import annotations

from dataclasses import dataclass

from spes_swarm.base.address import best_first
from spes_swarm.config.join_command import interpreter, join_command, join_note
from spes_swarm.config.manifest import Manifest
from spes_swarm.config.run import RunConfig
from spes_swarm.peer.panel import PeerConsole
from spes_swarm.protocol.admission.grants import Grant, Invitation
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.storage.invitations import ANY_KEY, MadeInvitations, can_be_passed_on, is_revoked, opened, read_acts
from spes_swarm.storage.run_directory import RunDirectory


def founding_line(run: RunConfig, output_dir: str) -> str:
    """Says which kind of run is founded, and how to have the other."""
    if run.admission == "open":
        return "founding a new run, open to anybody with its address; --private founds one by invitation"
    if run.admission == "invite":
        return "founding a private run, by invitation; without --private (run.admission) it is open to anybody"
    return (
        f"founding a private run; python -m spes_swarm.invite --output-dir {output_dir} --peer ID admits a peer; with "
        "run.admission: open it is open to anybody"
    )


@dataclass(frozen=True)
class PeerAdmission:
    """A peer's part in a run, private or not."""

    manifest: Manifest
    directory: RunDirectory
    identity: Identity
    invitation: Invitation | None  # verified

    @property
    def shown(self) -> bytes:
        """What this peer shows to others; empty without an invitation."""
        return b"" if self.invitation is None else self.invitation.admit(self.identity.peer_id)

    def remember(self) -> None:
        """Stores the invitation for the next start; a founder makes one to pass on, unless it has done so before.

        Raises:
            UserError: a file cannot be written, or that of made invitations is damaged.
        """
        if self.invitation is not None:
            self.directory.remember_invitation(self.invitation.to_text())
        if self.manifest.run.admission == "invite" and self.manifest.founder == self.identity.peer_id:
            made = MadeInvitations(self.directory)
            if not any(entry.name == "" for entry in made.entries):
                made.make(None, self.identity, self.manifest.run_id, Grant(key=ANY_KEY))

    def to_pass_on(self) -> str | None:
        """Returns an invitation for any number of peers: the founder's, or this peer's own; None if it has none."""
        acts = read_acts(self.directory.acts, self.manifest).values()
        own = self.invitation
        if self.manifest.founder == self.identity.peer_id:
            own = MadeInvitations(self.directory).like(Grant(key=ANY_KEY), self.manifest, acts)
        if own is None or not can_be_passed_on(own) or is_revoked(opened(own, self.manifest), acts):
            return None
        return own.to_text()

    def print_how_to_join(self, console: PeerConsole, maddrs: list[str], *, one_thread: bool) -> None:
        """Prints the command with which others join at one of these addresses."""
        run = self.manifest.run
        word = self.to_pass_on() if run.admission == "invite" else None
        console.say("others join with (on this machine, each with its own --output-dir):")
        address = best_first(maddrs)[0]
        command = join_command(self.manifest.run_id, run.data, address, interpreter(), one_thread=one_thread)
        console.command(command if word is None else f"{command} --invitation {word}")
        if run.admission == "invite" and word is None:
            console.say("and with --invitation: whoever may invite makes one with python -m spes_swarm.invite")
        if run.admission == "allow-list":
            console.say("once they are admitted by their ids: python -m spes_swarm.invite --peer ID")
        if (note := join_note(run.data)) is not None:
            console.say(note)
