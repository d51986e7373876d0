"""`python -m spes_swarm.invite`: what it makes, lists and takes back, and what a peer's directory then has."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spes_swarm import invite
from spes_swarm.config.manifest import Manifest, found_run
from spes_swarm.protocol.admission.grants import Invitation, read_invitation
from spes_swarm.protocol.admission.membership import Membership
from spes_swarm.storage.acts_file import ActsFile
from spes_swarm.storage.run_directory import RunDirectory
from tests.helpers.lone_trainer import run_config
from tests.helpers.repository import ROOT
from tests.helpers.rounds import identity

FOUNDER, MEMBER, GUEST, OTHER = (identity(number) for number in range(4))
NOW = time.time()


def directory_of(path: Path, peer: int = 0, admission: str = "invite") -> RunDirectory:
    """The directory of a peer in a run of the founder."""
    path.mkdir(parents=True)
    directory = RunDirectory(path)
    directory.remember(found_run(run_config(admission=admission), "layout", FOUNDER))
    directory.identity.write_bytes(identity(peer).path.read_bytes())
    return directory


@pytest.fixture
def founder(tmp_path: Path) -> RunDirectory:
    return directory_of(tmp_path / "founder")


@pytest.fixture(autouse=True)
def _no_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def said(capsys: pytest.CaptureFixture[str], directory: RunDirectory, *arguments: str) -> str:
    assert invite.main(["--output-dir", str(directory.path), *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], directory: RunDirectory, *arguments: str) -> str:
    assert invite.main(["--output-dir", str(directory.path), *arguments]) == 2
    line = capsys.readouterr().err
    assert line.startswith("invite: ")
    assert line.count("\n") == 1
    return line


def word_in(text: str) -> Invitation:
    return read_invitation(text.split("--invitation ")[1])


def membership(directory: RunDirectory, policy: str = "invite") -> Membership:
    """What a peer of the run knows, from the acts of a directory."""
    manifest = directory.raw_manifest()
    assert manifest is not None
    known = Membership(manifest.run_id, manifest.founder, manifest.founder_key, policy)
    for act in ActsFile(directory.acts).read_new():
        known.add(act)
    return known


def test_the_line_that_is_printed_runs_with_the_same_python(
    founder: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/spes/bin/python3")
    assert "\n  /opt/spes/bin/python3 -m spes_swarm.join --initial-peers " in said(capsys, founder)


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_makes_no_invitation_for_anybody(
    founder: RunDirectory, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert "argument --for: the name is empty" in refused(capsys, founder, "--for", name)


def test_an_invitation_admits_on_its_terms(founder: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--for", "Anna", "--expires", "14d", "--experts", "2", "--weight", "0.1", "--no-publish")
    text = said(capsys, founder, *arguments)
    assert text.startswith("an invitation (for Anna: 1 peer, until 20")
    assert "at most 2 experts, at most 0.1 of an average, may not publish), with which others join:\n" in text
    known = membership(founder)
    known.learn(MEMBER.peer_id, word_in(text).admit(MEMBER.peer_id), NOW)
    terms = known.terms(MEMBER.peer_id, NOW)
    assert terms is not None
    assert (terms.name, terms.experts, terms.weight, terms.may_invite, terms.may_publish) == (
        "Anna", 2, 0.1, False, False
    )  # fmt: skip
    assert terms.expires is not None
    assert 13.9 < (terms.expires - NOW) / 86400 < 14.1
    known.learn(GUEST.peer_id, word_in(text).admit(GUEST.peer_id), NOW)
    assert known.admits(MEMBER.peer_id, NOW) != known.admits(GUEST.peer_id, NOW)  # it is for one peer
    (entry,) = json.loads(founder.invitations.read_text())
    assert (entry["name"], entry["word"]) == ("Anna", word_in(text).to_text())
    assert stat.S_IMODE(founder.invitations.stat().st_mode) == 0o600


def test_the_line_to_paste_has_the_address_of_the_last_session(
    founder: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    start = (
        "python -m spes_swarm.join --initial-peers {} --run-id "
        + found_run(run_config(admission="invite"), "layout", FOUNDER).run_id
    )
    assert start.format("ADDRESS_OF_A_PEER") in said(capsys, founder)
    maddr = f"/ip4/192.0.2.7/tcp/1/p2p/{FOUNDER.peer_id}"
    lines = [{"event": "listening", "maddrs": []}, {"event": "listening", "maddrs": [maddr]}, {"event": "leave"}]
    founder.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"event": "listening", "ma')
    assert start.format(maddr) in said(capsys, founder)


def test_the_same_unnamed_terms_are_the_same_invitation(
    founder: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    first = word_in(said(capsys, founder))
    assert word_in(said(capsys, founder)) == first
    assert word_in(said(capsys, founder, "--experts", "2")) != first
    ((_, prefix),) = re.findall(r"^(-) +([0-9a-f]{8})  any number of peers$", said(capsys, founder, "--list"), re.M)
    assert f"revoked {prefix}" in said(capsys, founder, "--revoke", prefix)
    assert word_in(said(capsys, founder)) != first


def test_revoking_a_name_takes_back_all_that_it_admitted(
    founder: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    anna, bob = (word_in(said(capsys, founder, "--for", name, "--uses", "2")) for name in ("Anna", "Bob"))
    known = membership(founder)
    known.learn(MEMBER.peer_id, anna.admit(MEMBER.peer_id), NOW)
    known.learn(GUEST.peer_id, bob.admit(GUEST.peer_id), NOW)
    for act in known.acts.values():
        ActsFile(founder.acts).append(act)
    text = said(capsys, founder, "--revoke", "Anna")
    assert re.fullmatch(
        rf"revoked Anna \([0-9a-f]{{8}}\): {MEMBER.peer_id}; it takes effect when this peer runs next\n", text
    )
    known = membership(founder)
    for peer, word in ((MEMBER, anna), (GUEST, bob)):  # they show theirs
        known.learn(peer.peer_id, word.admit(peer.peer_id), NOW)
    assert not known.admits(MEMBER.peer_id, NOW)
    assert known.admits(GUEST.peer_id, NOW)
    rows = said(capsys, founder, "--list")
    assert re.search(rf"^Anna +\w{{8}}  2 peers; used by {MEMBER.peer_id}; REVOKED$", rows, re.M)
    assert re.search(rf"^Bob +\w{{8}}  2 peers; used by {GUEST.peer_id}$", rows, re.M)
    assert re.search(r"^revoked  +invitation \w{8} on 20", rows, re.M)
    assert "any number" in said(capsys, founder, "--for", "Anna", "--delegate")  # the name is free again


def test_revoking_a_peer_excludes_it_alone(founder: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    word = word_in(said(capsys, founder))
    held = founder.prepare()  # as a peer that runs here
    try:
        text = said(capsys, founder, "--revoke", MEMBER.peer_id)
    finally:
        os.close(held)
    assert text == f"excluded {MEMBER.peer_id}; the running peer passes it on now\n"
    known = membership(founder)
    for peer in (MEMBER, GUEST):
        known.learn(peer.peer_id, word.admit(peer.peer_id), NOW)
    assert [known.admits(peer.peer_id, NOW) for peer in (MEMBER, GUEST)] == [False, True]
    assert f"peer {MEMBER.peer_id} on 20" in said(capsys, founder, "--list")


def test_a_delegate_invites_and_takes_back_its_own_only(
    founder: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    delegate = directory_of(tmp_path / "delegate", peer=1)
    assert "only the founder, or a peer invited with --delegate" in refused(capsys, delegate)
    delegate.remember_invitation(word_in(said(capsys, founder, "--for", "Mona")).to_text())
    assert "only the founder, or a peer invited with --delegate" in refused(capsys, delegate)
    delegate.remember_invitation(word_in(said(capsys, founder, "--for", "Deli", "--delegate")).to_text())
    guest = word_in(said(capsys, delegate, "--for", "Gus", "--experts", "1"))
    known = membership(delegate)
    known.learn(GUEST.peer_id, guest.admit(GUEST.peer_id), NOW)
    assert known.admits(GUEST.peer_id, NOW)
    for act in known.acts.values():
        ActsFile(delegate.acts).append(act)
        ActsFile(founder.acts).append(act)
    assert re.search(rf"Gus .* made by Deli; used by {GUEST.peer_id}", said(capsys, founder, "--list"))
    assert "this peer has not invited 'Deli'" in refused(capsys, delegate, "--revoke", "Deli")
    assert GUEST.peer_id in said(capsys, delegate, "--revoke", "Gus")
    assert not membership(delegate).admits(GUEST.peer_id, NOW)
    excluded = said(capsys, delegate, "--revoke", OTHER.peer_id)
    assert excluded.startswith(f"excluded {OTHER.peer_id}, if this peer has invited it; ")
    text = said(capsys, founder, "--revoke", "Deli")
    assert f": {GUEST.peer_id} and all others that it has admitted; " in text
    assert not membership(founder).admits(GUEST.peer_id, NOW)


def test_an_allow_list_admits_by_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    founder = directory_of(tmp_path / "listed", admission="allow-list")
    assert "give --peer ID" in refused(capsys, founder, "--for", "Anna")
    text = said(capsys, founder, "--peer", MEMBER.peer_id, "--for", "Anna")
    assert text == f"admitted {MEMBER.peer_id} (for Anna: no limits); it takes effect when this peer runs next\n"
    known = membership(founder, "allow-list")
    assert [known.admits(peer.peer_id, NOW) for peer in (MEMBER, GUEST)] == [True, False]
    assert MEMBER.peer_id in said(capsys, founder, "--revoke", "Anna")
    assert not membership(founder, "allow-list").admits(MEMBER.peer_id, NOW)


def test_mistakes_are_one_line(founder: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, founder, "--for", "Anna")
    for arguments, expected in (
        (["--for", "Anna"], "there is an invitation for 'Anna': take another name, or --revoke it first"),
        (["--revoke", "Bob"], "no invitation has the name or id 'Bob'"),
        (["--revoke", ""], "no invitation has the name or id ''"),
        (["--revoke", FOUNDER.peer_id], "the founder cannot be excluded"),
        (["--peer", "Qm123"], "found 'Qm123', expected a whole peer id"),
        (["--peer", GUEST.peer_id, "--delegate"], "leave out --delegate and --uses"),
        (["--list", "--revoke", "Anna"], "give either --list, or --revoke, or the terms of an invitation"),
        (["--list", "--for", "Bob"], "give either --list, or --revoke, or the terms of an invitation"),
        (["--uses", "0"], "uses"),
        (["--weight", "1.5"], "weight"),
        (["--for", "x" * 41], "name"),
        *((["--expires", text], "expected 14d, 12h, or a day to") for text in ("14", "0d", "2020-01-01", "x")),
    ):
        assert expected in refused(capsys, founder, *arguments), arguments
    open_run = directory_of(tmp_path / "open", admission="open")
    assert "is open, so nobody needs an invitation; python -m spes_swarm.join --private" in refused(capsys, open_run)
    assert "is not the output directory of a run" in refused(capsys, RunDirectory(tmp_path / "nowhere"))
    founder.invitations.write_text("[{")
    assert "is damaged: move it away" in refused(capsys, founder, "--list")


def test_text_from_others_cannot_control_the_terminal(
    founder: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = founder.manifest()
    assert isinstance(manifest, Manifest)
    word = word_in(said(capsys, founder, "--uses", "2"))
    known = membership(founder)
    known.learn("Qm\x1b[2J", word.admit("Qm\x1b[2J"), NOW)
    for act in known.acts.values():
        ActsFile(founder.acts).append(act)
    assert "used by Qm?[2J" in said(capsys, founder, "--list")


@pytest.mark.slow
def test_it_starts_without_heavy_libraries(founder: RunDirectory) -> None:
    code = "import runpy, sys\ntry:\n    runpy.run_module('spes_swarm.invite', run_name='__main__')\nfinally:\n"
    code += "    print(sorted({'torch', 'transformers', 'hivemind'} & set(sys.modules)))"
    command = [sys.executable, "-c", code, "--output-dir", str(founder.path), "--for", "Anna"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert "--invitation spes1." in done.stdout
    assert done.stdout.endswith("[]\n")
