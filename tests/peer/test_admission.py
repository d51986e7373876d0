"""A peer's admission to a private run: what it asks for, shows and stores, and what it tells others."""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spes_swarm.base.errors import ConfigError, InvitationError, UserError
from spes_swarm.base.log import redacted
from spes_swarm.config.manifest import Manifest, found_run
from spes_swarm.config.peer import PeerConfig
from spes_swarm.join import parse_arguments
from spes_swarm.monitor.options import parse_options
from spes_swarm.peer.admission import PeerAdmission, founding_line
from spes_swarm.peer.join_request import DraftRequest, read_request
from spes_swarm.peer.joining.run_finder import RunFinder
from spes_swarm.peer.panel import PeerConsole
from spes_swarm.port.commands import Commands
from spes_swarm.protocol.admission.acts import Target, revoke
from spes_swarm.protocol.admission.grants import Grant, Invitation, extend, new_key, open_chain, read_invitation
from spes_swarm.protocol.admission.membership import Membership
from spes_swarm.storage.acts_file import ActsFile
from spes_swarm.storage.invitations import find_invitation, own_invitation
from spes_swarm.storage.run_directory import RunDirectory
from tests.helpers.joining import joining_context
from tests.helpers.lone_trainer import run_config
from tests.helpers.rounds import identity

FOUNDER, MEMBER = identity(0), identity(1)
MADDR = f"/ip4/192.0.2.7/tcp/1/p2p/{FOUNDER.peer_id}"


def private_run(admission: str = "invite") -> Manifest:
    return found_run(run_config(admission=admission), "layout", FOUNDER)


def invitation(manifest: Manifest, signer: Any = FOUNDER, **terms: Any) -> Invitation:
    secret, public = new_key()
    chain = extend(None, signer, manifest.run_id, Grant(key=public, **terms))
    return Invitation(manifest.run_id, chain.wire, secret)


# ------------------------------------------------------------------------------------------------- what is asked for


def request(out: Path, *arguments: str) -> DraftRequest:
    return read_request(parse_arguments(["--output-dir", str(out), *arguments]))


def test_one_flag_founds_a_private_run(tmp_path: Path) -> None:
    for flags, admission in (([], None), (["--private"], "invite")):
        run = request(tmp_path / "out", *flags).file.run
        assert run is not None
        assert run.get("admission") == admission
    config = tmp_path / "mine.yaml"
    config.write_text("base: quickstart.yaml\nrun: {admission: allow-list}\n")
    run = request(tmp_path / "out", "--private", "--config", str(config)).file.run
    assert run is not None
    assert run["admission"] == "allow-list"  # which is private, too


def test_private_founds_or_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--private founds a run, but --initial-peers joins one"):
        request(tmp_path / "out", "--private", "--initial-peers", MADDR)
    with pytest.raises(ConfigError, match="--private founds a run, but --from-hub resumes one"):
        request(tmp_path / "out", "--private", "--from-hub", "you/model")
    (tmp_path / "out").mkdir()
    RunDirectory(tmp_path / "out").remember(private_run())
    assert request(tmp_path / "out", "--private").peer.output_dir == str(tmp_path / "out")  # the same command again
    RunDirectory(tmp_path / "out").remember(private_run("open"))
    with pytest.raises(ConfigError, match="belongs to an open one: choose another --output-dir to found a private"):
        request(tmp_path / "out", "--private")


def test_an_invitation_is_a_word_or_a_file_with_it(tmp_path: Path) -> None:
    manifest = private_run()
    word, file = invitation(manifest).to_text(), tmp_path / "mail.txt"
    broken = f"{word[:70]}\n{word[70:140]}\n{word[140:]}\n"
    for text in (word, broken, f"Dear Anna,\nuse {word}\nsoon\n"):
        file.write_text(text)
        request(tmp_path / "out", "--initial-peers", MADDR, "--invitation", str(file))
        assert find_invitation(str(file)).to_text() == word
    file.write_text("Dear Anna")
    other = found_run(run_config(name="other"), "layout", FOUNDER).run_id
    for given, why in (
        ([word[:-30]], "damaged"),
        ([str(file)], "not an invitation: paste the whole word"),
        (["nothing.txt"], "'nothing.txt' is neither an invitation"),
        ([word, "--run-id", other], f"the invitation is to run {manifest.run_id}, not {other}"),
    ):
        with pytest.raises(InvitationError, match=why):
            request(tmp_path / "out", "--initial-peers", MADDR, "--invitation", *given)
    with pytest.raises(ConfigError, match="--invitation is for joining a private run, which needs --initial-peers"):
        request(tmp_path / "out", "--invitation", word)


def test_a_word_that_was_shown_in_vain_is_for_another_attempt_only(tmp_path: Path) -> None:
    manifest, directory = private_run(), RunDirectory(tmp_path)
    directory.remember_invitation(invitation(manifest).to_text())
    again = PeerConfig(output_dir=str(tmp_path), initial_peers=(MADDR,))
    for peer, is_used in (
        (again, True),
        (replace(again, run_id=manifest.run_id), True),
        (replace(again, run_id="other-" + "0" * 24), False),
        (replace(again, initial_peers=()), False),  # founds a run
    ):
        known = own_invitation(peer, directory)
        assert (known is not None) is is_used
    directory.remember(manifest)
    assert own_invitation(replace(again, initial_peers=()), directory) is not None


def test_a_monitor_takes_the_same_invitation(tmp_path: Path) -> None:
    word, file = invitation(private_run()).to_text(), tmp_path / "word"
    file.write_text(word)
    assert parse_options(["--initial-peers", MADDR, "--invitation", str(file)]).invitation == word
    assert parse_options(["--initial-peers", MADDR]).invitation is None
    with pytest.raises(ConfigError, match="--invitation cannot be combined with --replay"):
        parse_options(["--replay", "run.sqlite", "--invitation", word])


def test_invitations_are_not_logged() -> None:
    word = invitation(private_run()).to_text()
    assert redacted(f"join --invitation {word} now") == "join --invitation (secret) now"


# ------------------------------------------------------------------------------------------------- finding the run


def finder(directory: RunDirectory, ask: Callable[..., Any], peer: PeerConfig, by: Any = MEMBER) -> RunFinder:
    directory.path.mkdir(exist_ok=True)
    return RunFinder(joining_context(directory, ask, by, peer))


def asked(manifest: Manifest, shown: list[tuple[str | None, bytes]], refusal: str = "") -> Callable[..., Any]:
    """Peers that answer with a manifest, or refuse, and note what they were shown."""

    def ask(command: Any, wait_s: float, **arguments: Any) -> Any:
        if command is Commands.bootstrap:
            return [FOUNDER.peer_id]
        assert command is Commands.fetch_manifest
        shown.append((arguments["run_id"], arguments["admission"]))
        if refusal:
            raise InvitationError(refusal)
        return manifest

    return ask


def test_a_joiner_shows_its_admission_and_expects_the_run_of_its_invitation(tmp_path: Path) -> None:
    manifest = private_run()
    word, shown = invitation(manifest), list[tuple[str | None, bytes]]()
    directory = RunDirectory(tmp_path / "out")
    peer = PeerConfig(output_dir=str(tmp_path / "out"), initial_peers=(MADDR,), invitation=word.to_text())
    found = finder(directory, asked(manifest, shown), peer).find()
    assert found.manifest == manifest
    ((run_id, admission),) = shown
    assert run_id == manifest.run_id
    members = Membership(manifest.run_id, manifest.founder, manifest.founder_key, "invite")
    members.learn(MEMBER.peer_id, admission, 0.0)
    assert members.admits(MEMBER.peer_id, 0.0)
    assert found.admission.shown == admission
    # Stored for the next start, which needs no flag, and replaced by a new one.
    found.admission.remember()
    directory.remember(manifest)
    assert stat.S_IMODE((directory.path / "invitation").stat().st_mode) == 0o600
    again = finder(directory, asked(manifest, shown), PeerConfig(output_dir=peer.output_dir, initial_peers=(MADDR,)))
    again.find()
    assert shown[-1] == (manifest.run_id, admission)
    new = invitation(manifest, uses=1)
    newer = PeerConfig(output_dir=peer.output_dir, initial_peers=(MADDR,), invitation=new.to_text())
    replaced = finder(directory, asked(manifest, shown), newer).find()
    replaced.admission.remember()
    assert directory.known_invitation() == new.to_text()


def test_the_id_of_a_peer_that_is_refused_stays_as_it_may_be_admitted_by_it(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "out")
    peer = PeerConfig(output_dir=str(tmp_path / "out"), initial_peers=(MADDR,))

    def join() -> None:
        with directory.held(directory.identity):
            directory.identity.write_bytes(MEMBER.path.read_bytes())
            finder(directory, asked(private_run(), [], "this run is private"), peer).find()

    with pytest.raises(InvitationError, match="run is private"):
        join()
    assert [path.name for path in directory.path.iterdir()] == ["identity.key"]
    with pytest.raises(UserError), directory.held(directory.identity):
        raise UserError("anything else")
    assert directory.identity.exists()  # it was there before


def test_an_invitation_by_somebody_else_is_refused(tmp_path: Path) -> None:
    manifest = private_run()
    forged = invitation(manifest, signer=identity(2)).to_text()
    peer = PeerConfig(output_dir=str(tmp_path / "out"), initial_peers=(MADDR,), invitation=forged)
    with pytest.raises(InvitationError, match="the invitation is not valid"):
        finder(RunDirectory(tmp_path / "out"), asked(manifest, []), peer).find()


# ------------------------------------------------------------------------------------------------- what others are told


def told(admission: PeerAdmission, capsys: pytest.CaptureFixture[str]) -> str:
    admission.print_how_to_join(PeerConsole(), [MADDR], one_thread=False)
    return capsys.readouterr().out


def test_founding_says_which_run_it_is() -> None:
    kinds = ("open", "invite", "allow-list")
    lines = {admission: founding_line(private_run(admission).run, "out") for admission in kinds}
    assert "open to anybody" in lines["open"]
    assert "--private founds one" in lines["open"]
    assert lines["invite"].startswith("founding a private run, by invitation; without --private")
    assert "python -m spes_swarm.invite --output-dir out --peer ID" in lines["allow-list"]


def test_the_founder_prints_its_own_invitation_until_it_is_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, directory = private_run(), RunDirectory(tmp_path)
    admission = PeerAdmission(manifest, directory, FOUNDER, None)
    admission.remember()
    word = admission.to_pass_on()
    assert word is not None
    assert told(admission, capsys).rstrip().endswith(f" --invitation {word}")
    again = PeerAdmission(manifest, directory, FOUNDER, None)
    again.remember()
    assert again.to_pass_on() == word
    (grant,) = (Grant(**grant) for grant in read_invitation(word).grants)
    assert (grant.name, grant.uses, grant.may_invite) == ("", None, False)
    chain = open_chain(read_invitation(word).wire, manifest.run_id, manifest.founder_key)
    target = Target(grant=chain.ids[-1], at=1.0)
    ActsFile(directory.acts).append(revoke(FOUNDER, None, manifest.run_id, target))
    again.remember()
    assert "--invitation " not in told(again, capsys).replace("with --invitation:", "")


@pytest.mark.parametrize(
    ("terms", "passes_on"), [({}, True), ({"expires": 1e12}, True), ({"uses": 3}, False), ({"may_invite": True}, False)]
)
def test_a_member_passes_on_an_unlimited_invitation_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], terms: dict[str, Any], passes_on: bool
) -> None:
    manifest = private_run()
    own = invitation(manifest, **terms)
    text = told(PeerAdmission(manifest, RunDirectory(tmp_path), MEMBER, own), capsys)
    assert (own.to_text() in text) == passes_on
    assert ("makes one with python -m spes_swarm.invite" in text) != passes_on


def test_an_open_run_has_no_invitations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    admission = PeerAdmission(private_run("open"), RunDirectory(tmp_path), FOUNDER, None)
    admission.remember()
    assert "nvit" not in told(admission, capsys)
    assert not list(tmp_path.iterdir())
    assert admission.shown == b""
