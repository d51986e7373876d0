"""Invites peers to a private run, and takes invitations back.

    python -m spes_swarm.invite --output-dir runs/me --for Anna --expires 14d --experts 2
    python -m spes_swarm.invite --output-dir runs/me --list
    python -m spes_swarm.invite --output-dir runs/me --revoke Anna

The founder can invite, and so can a peer whose own invitation was made with --delegate. The peer may be running.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import base58
from pydantic import ValidationError

from spes_swarm.base.address import best_first
from spes_swarm.base.arguments import end_program, exit_code
from spes_swarm.base.decoding import first_complaint
from spes_swarm.base.errors import ConfigError, InvitationError
from spes_swarm.base.strict import read_section
from spes_swarm.base.wording import plural, two_columns
from spes_swarm.config.command_line import command_parser
from spes_swarm.config.data import DataConfig
from spes_swarm.config.join_command import interpreter, join_command, join_note
from spes_swarm.config.manifest import RawManifest
from spes_swarm.protocol.admission.acts import Allow, Pardon, Revoke, Target, Use, allow, revoke
from spes_swarm.protocol.admission.grants import Chain, Grant, extend, read_invitation
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.storage.invitations import ANY_KEY, MadeInvitations, is_revoked, opened, publish_act, read_acts
from spes_swarm.storage.run_directory import RunDirectory

_ID_CHARS = 8  # of a grant's id, in what is printed
_TERMS = ("name", "uses", "expires", "experts", "weight", "delegate", "no_publish", "peer")
_LAST_DAY = 253402300799  # that a date can have


def main(arguments: list[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    return exit_code("invite", lambda: _run(_parse(arguments)))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_parser("invite", __doc__)
    add = parser.add_argument
    add("--output-dir", type=Path, default=Path("runs/peer"), metavar="DIR", help="of a peer in the run")
    add("--identity", metavar="FILE", help="identity file of that peer, if it is not in its directory")
    add("--for", dest="name", type=_name, metavar="NAME", help="for whom it is; then it is for one peer")
    add("--uses", type=int, metavar="N", help="how many peers may use it (default: any number; with --for, one)")
    add("--expires", type=_time, metavar="14d|12h|2026-12-31", help="when taking part ends")
    add("--experts", type=int, metavar="N", help="the most experts that a peer may hold")
    add("--weight", type=float, metavar="SHARE", help="a peer's largest share of an average, such as 0.1")
    add("--delegate", action="store_true", help="include the right to invite others, any number of them")
    add("--no-publish", action="store_true", help="do not include the right to publish")
    add("--peer", type=_peer_id, metavar="ID", help="admit the peer with this id, which needs no invitation")
    add("--list", action="store_true", help="list invitations, who has used those with limits, and revocations")
    add("--revoke", metavar="NAME|ID", help="take back invitations (a name, or their id), or exclude a peer (its id)")
    options = parser.parse_args(arguments)
    if options.list + (options.revoke is not None) + any(getattr(options, key) for key in _TERMS) > 1:
        raise ConfigError("give either --list, or --revoke, or the terms of an invitation")
    if options.peer and (options.delegate or options.uses):
        raise ConfigError("--peer admits one peer, which cannot invite others: leave out --delegate and --uses")
    return options


def _name(text: str) -> str:
    if not text.strip():  # maybe an empty variable of a shell: without a name anybody could use the invitation
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def _time(text: str) -> float:
    match = re.fullmatch(r"(\d{1,5})([dh])", text)
    at = 0.0
    with suppress(ValueError, OverflowError):
        if match is not None:
            at = time.time() + int(match[1]) * {"d": 86400, "h": 3600}[match[2]]
        else:  # the end of that day
            at = (datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC) + timedelta(days=1)).timestamp()
    if at <= time.time():
        raise argparse.ArgumentTypeError(f"found {text!r:.40}, expected 14d, 12h, or a day to come such as 2026-12-31")
    return at


def _is_peer_id(text: str) -> bool:
    with suppress(ValueError):
        multihash = base58.b58decode(text)
        return len(multihash) == 34 and multihash.startswith(b"\x12\x20")
    return False


def _peer_id(text: str) -> str:
    if not _is_peer_id(text):
        raise argparse.ArgumentTypeError(f"found {text!r:.80}, expected a whole peer id, which begins with Qm")
    return text


def _run(options: argparse.Namespace) -> None:
    directory = RunDirectory(options.output_dir)
    manifest = directory.require_run()
    admission = manifest.run.get("admission", "open")
    if admission == "open":
        raise InvitationError(
            f"run {manifest.run_id} is open, so nobody needs an invitation; python -m spes_swarm.join --private with "
            "another --output-dir founds a private one"
        )
    if admission == "allow-list" and options.revoke is None and not (options.peer or options.list):
        raise ConfigError("this run admits peers by their ids: give --peer ID, which a peer that is refused is told")
    office = _Office(directory, manifest, directory.identity_file(options.identity))
    if options.revoke is not None:
        lines = office.revoke(options.revoke)
    else:
        lines = office.list() if options.list else office.invite(options)
    for line in lines:  # names and ids are from others
        print("".join(c if c.isprintable() else "?" for c in line))


class _Office:
    """Invites on behalf of a peer, given its directory."""

    def __init__(self, directory: RunDirectory, manifest: RawManifest, identity: Path) -> None:
        self._directory, self._manifest, self._identity = directory, manifest, identity
        self._made = MadeInvitations(directory)
        self._acts = list(read_acts(directory.acts, manifest).values())
        # Chains of invitations (with "") and of peers that they have admitted (with their ids).
        self._known = [(opened(read_invitation(entry.word), manifest), "") for entry in self._made.entries]
        self._known += [(act.chain, act.chain.grants[-1].peer) for act in self._acts if isinstance(act, Allow)]
        self._known += [(act.chain, act.peer_id) for act in self._acts if isinstance(act, Use)]

    def _right(self) -> tuple[Identity | bytes, Chain | None]:
        """Returns what this peer signs with, and the chain that lets it invite; the founder needs none."""
        if self._identity.exists() and (own := Identity.load(self._identity)).peer_id == self._manifest.founder:
            return own, None
        if (word := self._directory.known_invitation()) is not None:
            invitation = read_invitation(word)
            chain = opened(invitation, self._manifest)
            if chain.grants[-1].may_invite and not is_revoked(chain, self._acts):
                return invitation.secret, chain
        raise InvitationError("only the founder, or a peer invited with --delegate, can do this: ask one of them")

    def _publish(self, act: bytes) -> str:
        return publish_act(self._directory, act)

    # Commands; each yields the lines to print.

    def invite(self, options: argparse.Namespace) -> Iterator[str]:
        """Makes an invitation, or admits a peer by its id."""
        signer, chain = self._right()
        grant, run_id = _grant(options), self._manifest.run_id
        in_use = (known.grants[-1].name for known, _ in self._known if not is_revoked(known, self._acts))
        if grant.name and grant.name in in_use:
            raise ConfigError(f"there is an invitation for {grant.name!r}: take another name, or --revoke it first")
        terms = f"{f'for {grant.name}: ' if grant.name else ''}{_limits(grant)}"
        try:
            if grant.peer:
                if any(isinstance(act, Revoke) and act.target.peer == grant.peer for act in self._acts):
                    raise ConfigError(f"{grant.peer} has been revoked, which cannot be undone: it needs a new identity")
                when = self._publish(allow(extend(chain, signer, run_id, grant)))
                yield f"admitted {grant.peer} ({terms}); {when}"
                return
            made = self._made.like(grant, self._manifest, self._acts) if grant.uses is None else None
            invitation = made or self._made.make(chain, signer, run_id, grant)
        except ValueError as exc:
            raise InvitationError(str(exc)) from exc
        yield f"an invitation ({terms}), with which others join:"
        data = read_section(DataConfig, self._manifest.run.get("data", {}), "", "run.data")
        command = join_command(run_id, data, self._address(), interpreter())
        yield f"  {command} --invitation {invitation.to_text()}"
        if (note := join_note(data)) is not None:
            yield note

    def _address(self) -> str:
        """Returns an address of this peer as of its last session, else of another one that it knows."""
        maddrs = self._directory.known_peers()
        with suppress(OSError), self._directory.metrics.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if '"listening"' in line:
                    with suppress(ValueError, KeyError, TypeError):
                        maddrs = json.loads(line)["maddrs"] or maddrs
        return best_first(maddrs)[0] if maddrs else "ADDRESS_OF_A_PEER"

    def list(self) -> Iterator[str]:
        """Lists invitations and revocations."""
        if not self._known and not self._acts:
            yield "no invitations yet"
            return
        users: dict[bytes, dict[str, None]] = {chain.ids[-1]: {} for chain, _ in self._known}
        for chain, peer in self._known:
            users[chain.ids[-1]] |= {peer: None} if peer else {}
        rows = [("NAME", f"{'ID':<{_ID_CHARS}}  LIMITS; USED BY")]
        for identifier, chain in {chain.ids[-1]: chain for chain, _ in self._known}.items():
            grant, expires, peers = chain.grants[-1], chain.terms.expires, " ".join(users[identifier])
            words = [_limits(grant)]
            words += [f"made by {chain.grants[-2].name or _short(chain.ids[-2])}"] if len(chain.grants) > 1 else []
            words += [f"{'admits' if grant.peer else 'used by'} {peers}"] if peers else []
            words += ["EXPIRED"] if expires is not None and expires <= time.time() else []
            words += ["REVOKED"] if is_revoked(chain, self._acts) else []
            rows.append((grant.name or "-", f"{_short(identifier)}  {'; '.join(words)}"))
        for act in self._acts:
            if isinstance(act, Revoke):
                what = f"peer {act.target.peer}" if act.target.peer else f"invitation {_short(act.target.grant)}"
                rows.append(("revoked", f"{what} on {_day(act.target.at)}"))
            elif isinstance(act, Pardon):
                rows.append(("pardoned", f"peer {act.peer} up to round {act.round} on {_day(act.at)}"))
        yield from two_columns(rows).splitlines()

    def revoke(self, whom: str) -> Iterator[str]:
        """Takes invitations back, or excludes a peer."""
        signer, own = self._right()
        run_id, now = self._manifest.run_id, time.time()
        if _is_peer_id(whom):
            if whom == self._manifest.founder:
                raise InvitationError("the founder cannot be excluded from its run")
            when = self._publish(revoke(signer, own, run_id, Target(peer=whom, at=now)))
            yield f"excluded {whom}{'' if own is None else ', if this peer has invited it'}; {when}"
            return
        found = self._grants(whom)
        before = [chain.ids[: chain.ids.index(one)] for one, chain in found.items()]
        if own is not None and any(own.ids[-1] not in ids for ids in before):
            raise InvitationError(f"this peer has not invited {whom!r}: only the founder can take this back")
        whens = [self._publish(revoke(signer, own, run_id, Target(grant=one, at=now))) for one in found]
        hit = [*{peer: None for chain, peer in self._known if peer and not found.keys().isdisjoint(chain.ids)}]
        grants = [chain.grants[chain.ids.index(one)] for one, chain in found.items()]
        if any(grant.uses is None and not grant.peer for grant in grants):
            hit.append("all others that it has admitted")
        yield f"revoked {whom} ({', '.join(map(_short, found))}): {' and '.join(hit) or 'no peer'}; {whens[-1]}"

    def _grants(self, whom: str) -> dict[bytes, Chain]:
        """Returns the grants with a name, else the one whose id begins like this, each with a chain that has it."""
        chains = {one: chain for chain, _ in self._known for one in chain.ids}
        found = {one: chain for one, chain in chains.items() if chain.grants[chain.ids.index(one)].name == whom != ""}
        if not found and len(whom) >= 4:
            found = {one: chain for one, chain in chains.items() if one.hex().startswith(whom)}
            if len(found) > 1:
                raise ConfigError(f"several invitations have ids that begin with {whom}: give more of it")
        if not found:
            raise ConfigError(f"no invitation has the name or id {whom!r:.60}; see --list, or give a whole peer id")
        return found


def _grant(options: argparse.Namespace) -> Grant:
    name, peer = options.name or "", options.peer or ""
    one = name and not peer and not options.delegate
    try:
        return Grant(
            name=name,
            expires=options.expires,
            experts=options.experts,
            weight=options.weight,
            may_invite=options.delegate,
            may_publish=not options.no_publish,
            key=b"" if peer else ANY_KEY,
            peer=peer,
            uses=1 if one and options.uses is None else options.uses,
        )
    except ValidationError as exc:
        raise ConfigError(first_complaint(exc)) from exc


def _limits(grant: Grant) -> str:
    words = ["any number of peers" if grant.uses is None else plural(grant.uses, "peer")] if not grant.peer else []
    words += [f"until {_day(grant.expires)}"] if grant.expires is not None else []
    words += [f"at most {plural(grant.experts, 'expert')}"] if grant.experts is not None else []
    words += [f"at most {grant.weight:g} of an average"] if grant.weight is not None else []
    words += ["may invite others"] if grant.may_invite else []
    words += ["may not publish"] if not grant.may_publish else []
    return ", ".join(words) or "no limits"


def _day(at: float) -> str:
    return f"{datetime.fromtimestamp(min(at, _LAST_DAY), UTC):%Y-%m-%d %H:%M} UTC"


def _short(identifier: bytes) -> str:
    return identifier.hex()[:_ID_CHARS]


if __name__ == "__main__":
    end_program(main())
