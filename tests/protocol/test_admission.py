"""Who may take part in a private run: chains of grants, admissions, and the acts that all members share."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from spes_swarm.base.errors import InvitationError, ProtocolError
from spes_swarm.protocol.admission import acts
from spes_swarm.protocol.admission.grants import (
    MAX_ADMISSION_BYTES,
    MAX_GRANTS,
    Chain,
    Grant,
    Invitation,
    extend,
    new_key,
    open_admission,
    open_chain,
    read_invitation,
    signed_bytes,
)
from spes_swarm.protocol.admission.membership import Membership
from tests.helpers.rounds import identity

RUN = "run-1"
FOUNDER, KEY = identity(0), identity(0).public_key_der
NOW = 1_000_000.0


def made(parent: tuple[Chain, bytes] | None = None, **terms: Any) -> tuple[Chain, bytes]:
    """A chain by the founder, or one grant longer than `parent`, with the private key of its last grant."""
    secret, public = new_key()
    chain, signer = parent if parent is not None else (None, FOUNDER)
    return extend(chain, signer, RUN, Grant(key=public, **terms)), secret


def invitation(parent: tuple[Chain, bytes] | None = None, **terms: Any) -> Invitation:
    chain, secret = made(parent, **terms)
    return Invitation(RUN, chain.wire, secret)


def membership(policy: str = "invite") -> Membership:
    return Membership(RUN, FOUNDER.peer_id, KEY, policy)


def refused(kind: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ProtocolError) as caught:
        call()
    assert caught.value.kind == kind


# Chains and words.


def test_an_invitation_survives_being_pasted() -> None:
    sent = invitation(name="Ada", experts=2)
    word = sent.to_text()
    assert word.startswith("spes1.")
    assert len(word) < 700  # one line of a message
    broken = "\n".join(word[i : i + 60] for i in range(0, len(word), 60))
    assert read_invitation(word) == read_invitation(f"  {broken}\n") == sent
    assert sent.grants[0]["name"] == "Ada"


@pytest.mark.parametrize("word", ["", "spes1.", "hello", "spes1." + "A" * 200, "spes2." + "A" * 200])
def test_another_word_is_refused(word: str) -> None:
    with pytest.raises(InvitationError):
        read_invitation(word)


def test_every_part_of_a_word_matters() -> None:
    word = invitation().to_text()
    for end in range(len(word) - 1, 6, -7):
        with pytest.raises(InvitationError):
            read_invitation(word[:end])


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("other", [1 << 40, 3, None, "text", [1, 2]])
def test_a_word_of_other_types_is_damaged(place: int, other: object) -> None:
    """No number becomes so many bytes of memory."""
    sent = invitation()
    parts: list[Any] = [sent.run_id, *sent.wire[0], sent.secret]
    parts[place] = other if (place, type(other)) != (0, str) else b"text"
    run_id, payload, signature, secret = parts
    word = Invitation(run_id, ((payload, signature),), secret).to_text()
    with pytest.raises(InvitationError, match="the invitation is damaged"):
        read_invitation(word)


def test_an_admission_is_of_one_peer_and_one_run() -> None:
    sent = invitation(name="Ada")
    admission = sent.admit("peer-a")
    assert open_admission(admission, "peer-a", RUN, KEY).terms.name == "Ada"
    assert len(admission) < MAX_ADMISSION_BYTES / 3
    refused("signature", lambda: open_admission(admission, "peer-b", RUN, KEY))
    refused("signature", lambda: open_admission(admission, "peer-a", "run-2", KEY))
    refused("signature", lambda: open_admission(admission, "peer-a", RUN, identity(1).public_key_der))


def test_what_is_signed_is_plain_ed25519() -> None:
    sent = invitation()
    chain, signature = msgpack.unpackb(sent.admit("peer-a"))
    payload = msgpack.unpackb(chain[0][0])
    grant_id = open_chain(chain, RUN, KEY).ids[-1]
    signed = b"spes_swarm\0admission\0run-1\0" + grant_id + b"\0peer-a"
    Ed25519PublicKey.from_public_bytes(payload["key"]).verify(signature, signed)


def test_only_the_founder_begins_a_chain_and_only_an_inviter_continues_it() -> None:
    own = Grant(key=new_key()[1])
    refused("signature", lambda: open_chain(extend(None, identity(1), RUN, own).wire, RUN, KEY))
    chain, secret = made(name="no inviter")
    with pytest.raises(ValueError, match="right to invite"):
        made((chain, secret))
    inviter, key = made(may_invite=True)
    # A grant that another key than the inviter's has signed; one below a grant without that right.
    forged = extend(inviter, new_key()[0], RUN, own)
    refused("signature", lambda: open_chain(forged.wire, RUN, KEY))
    plain, plain_key = made((inviter, key))
    pretending = Chain((plain.grants[0], plain.grants[0]), plain.ids, plain.wire)  # its own reader lets it go on
    below = extend(pretending, plain_key, RUN, own)
    refused("admission", lambda: open_chain(below.wire, RUN, KEY))


def test_a_chain_ends_after_four_grants_and_after_a_peer() -> None:
    chain, key = made(may_invite=True)
    for _ in range(MAX_GRANTS - 1):
        chain, key = made((chain, key), may_invite=True)
    assert len(open_chain(chain.wire, RUN, KEY).grants) == MAX_GRANTS == 4
    with pytest.raises(ValueError, match="at most 4"):
        made((chain, key))
    refused("malformed", lambda: open_chain([*chain.wire, chain.wire[0]], RUN, KEY))
    named = extend(None, FOUNDER, RUN, Grant(peer="peer-a", may_invite=True))
    refused("admission", lambda: open_chain([*named.wire, named.wire[0]], RUN, KEY))


def test_the_strictest_terms_of_a_chain_hold() -> None:
    first = made(may_invite=True, expires=500.0, experts=2, may_publish=False, weight=0.5)
    chain, _ = made(first, expires=900.0, experts=8, weight=0.1, name="Bob")
    terms = chain.terms
    assert (terms.expires, terms.experts, terms.weight) == (500.0, 2, 0.1)
    assert (terms.may_publish, terms.may_invite, terms.name) == (False, False, "Bob")
    assert made(first)[0].terms.weight == 0.5


@pytest.mark.parametrize(
    "grant",
    [
        {},
        {"key": b"1" * 31},
        {"key": b"1" * 32, "peer": "p"},
        {"key": b"1" * 32, "uses": 0},
        {"key": b"1" * 32, "weight": 1.0},
        {"key": b"1" * 32, "name": "a\nb"},
        {"key": b"1" * 32, "expires": float("inf")},
        {"key": b"1" * 32, "from_a_later_version": 1},
    ],
)
def test_a_grant_with_impossible_terms_admits_nobody(grant: dict[str, Any]) -> None:
    payload = msgpack.packb(grant, use_bin_type=True)
    signature = FOUNDER.sign(b"spes_swarm\0grant\0run-1\0" + bytes(32) + b"\0" + payload)
    refused("schema", lambda: open_chain([[payload, signature]], RUN, KEY))


# Members.


def test_a_private_run_admits_its_founder_and_those_who_are_invited() -> None:
    members = membership()
    assert members.admits(FOUNDER.peer_id, NOW)
    assert not members.admits("peer-a", NOW)
    members.learn("peer-a", invitation().admit("peer-a"), NOW)
    assert members.admits("peer-a", NOW)
    assert not members.admits("peer-b", NOW)
    assert membership("open").admits("anybody", NOW)


def test_an_invitation_ends_participation_when_it_expires() -> None:
    members = membership()
    members.learn("peer-a", invitation(expires=NOW).admit("peer-a"), NOW)
    assert members.admits("peer-a", NOW - 1)
    assert not members.admits("peer-a", NOW)
    assert members.why_not("peer-a", NOW) == "the invitation has expired"
    members.learn("peer-a", invitation().admit("peer-a"), NOW)  # a new one
    assert members.admits("peer-a", NOW)


def test_an_allow_list_admits_by_name_alone() -> None:
    members = membership("allow-list")
    refused("admission", lambda: members.learn("peer-a", invitation().admit("peer-a"), NOW))
    assert members.add(acts.allow(extend(None, FOUNDER, RUN, Grant(peer="peer-a", experts=1))))
    assert members.admits("peer-a", NOW)
    terms = members.terms("peer-a", NOW)
    assert terms is not None
    assert terms.experts == 1
    assert not members.admits("peer-b", NOW)
    refused("signature", lambda: members.add(acts.allow(extend(None, identity(1), RUN, Grant(peer="peer-b")))))
    assert not members.admits("peer-b", NOW)


def revocation(by: tuple[Chain, bytes] | None, **target: Any) -> bytes:
    chain, signer = by if by is not None else (None, FOUNDER)
    return acts.revoke(signer, chain, RUN, acts.Target(at=NOW, **target))


def test_a_founder_revokes_a_peer_or_all_that_an_invitation_admitted() -> None:
    members = membership()
    delegate = made(may_invite=True)
    below = invitation(delegate)
    for peer in ("a", "b"):
        members.learn(peer, below.admit(peer), NOW)
    members.learn("c", invitation().admit("c"), NOW)
    assert members.add(revocation(None, peer="a"))
    assert [members.admits(peer, NOW) for peer in "abc"] == [False, True, True]
    assert members.why_not("a", NOW) == "the invitation has been revoked"
    assert members.add(revocation(None, grant=delegate[0].ids[0]))
    assert [members.admits(peer, NOW) for peer in "abc"] == [False, False, True]
    members.learn("d", below.admit("d"), NOW)  # whoever still has the word
    assert not members.admits("d", NOW)


def test_a_delegate_revokes_only_what_follows_from_its_own_invitation() -> None:
    members = membership()
    delegate, other = made(may_invite=True), made(may_invite=True)
    members.learn("mine", invitation(delegate).admit("mine"), NOW)
    members.learn("theirs", invitation(other).admit("theirs"), NOW)
    for target in ({"peer": "mine"}, {"peer": "theirs"}, {"peer": FOUNDER.peer_id}, {"grant": other[0].ids[0]}):
        members.add(revocation(delegate, **target))
    members.add(revocation(delegate, grant=delegate[0].ids[0]))  # its own, which its inviter has made
    assert [members.admits(peer, NOW) for peer in ("mine", "theirs", FOUNDER.peer_id)] == [False, True, True]
    members.learn("another", invitation(delegate).admit("another"), NOW)
    assert members.admits("another", NOW)


def test_a_revocation_by_somebody_else_has_no_effect() -> None:
    members = membership()
    plain = made(name="may not invite")
    members.learn("a", invitation().admit("a"), NOW)
    refused("admission", lambda: members.add(revocation(plain, peer="a")))
    refused("signature", lambda: members.add(acts.revoke(identity(1), None, RUN, acts.Target(at=NOW, peer="a"))))
    forged = acts.revoke(new_key()[0], made(may_invite=True)[0], RUN, acts.Target(at=NOW, peer="a"))
    refused("signature", lambda: members.add(forged))
    assert members.admits("a", NOW)
    assert members.digest == b""


def test_peers_end_with_the_same_acts_in_whatever_order() -> None:
    sent = invitation(uses=2)
    known = [acts.use(peer, sent.admit(peer)) for peer in ("a", "b")]
    known += [revocation(None, peer="c"), acts.allow(extend(None, FOUNDER, RUN, Grant(peer="d")))]
    digests = set()
    for order in permutations(known):
        members = membership()
        assert [members.add(act) for act in (*order, order[0])] == [True] * 4 + [False]
        digests.add(members.digest)
        for peer in "ab":
            members.learn(peer, sent.admit(peer), NOW)
        assert [members.admits(peer, NOW) for peer in "abcd"] == [True, True, False, True]
    assert len(digests) == 1


def test_an_invitation_for_one_is_refused_to_a_second_peer() -> None:
    members, sent = membership(), invitation(name="Ada", uses=1)
    members.learn("first", sent.admit("first"), NOW)
    assert members.admits("first", NOW)
    members.confirm(["first"])  # its work is in a commit
    for copy in map(str, range(20)):  # whatever their hashes
        members.learn(copy, sent.admit(copy), NOW)
        assert not members.admits(copy, NOW)
    assert members.why_not("0", NOW) == "the invitation has been used by others already"
    assert members.admits("first", NOW)
    # It is one of a peer's own acts, so it survives a restart.
    again = membership()
    for act in members.acts.values():
        again.add(act)
    again.confirm()
    for peer in ("0", "first"):  # they show theirs again
        again.learn(peer, sent.admit(peer), NOW)
    assert (again.admits("first", NOW), again.admits("0", NOW)) == (True, False)


def test_peers_agree_on_who_was_first_when_an_invitation_is_used_twice_at_once() -> None:
    sent = invitation(uses=1)
    here, there = membership(), membership()
    here.learn("a", sent.admit("a"), NOW)
    there.learn("b", sent.admit("b"), NOW)
    assert here.admits("a", NOW)
    assert there.admits("b", NOW)
    for members, peer in ((here, "b"), (there, "a")):
        members.learn(peer, sent.admit(peer), NOW)
    admitted = [[members.admits(peer, NOW) for peer in "ab"] for members in (here, there)]
    assert admitted[0] == admitted[1]
    assert sum(admitted[0]) == 1


def test_the_limit_of_an_invitation_counts_those_whom_its_delegates_admit() -> None:
    members = membership()
    first = made(may_invite=True, uses=2)
    for peer in "abc":
        members.learn(peer, invitation(first).admit(peer), NOW)
        members.confirm([peer])
    assert [members.admits(peer, NOW) for peer in "abc"] == [True, True, False]


def test_whoever_is_first_is_first_after_a_restart_too() -> None:
    """Ada's first start failed before its first commit: the file has the uses in their order, displaced ones too."""
    file: list[bytes] = []
    while len(file) < 2:  # with some keys, nobody is displaced
        live, sent = membership(), invitation(uses=1)
        file = [act for peer in "abcdef" if (act := live.learn(peer, sent.admit(peer), NOW)) is not None]
    again = membership()
    for act in file:
        again.add(act)
    again.confirm()
    for peer in "abcdef":
        again.learn(peer, sent.admit(peer), NOW)
    admitted = [[members.admits(peer, NOW) for peer in "abcdef"] for members in (live, again)]
    assert admitted[0] == admitted[1]
    assert sum(admitted[0]) == 1
    assert live.digest == again.digest


def test_nobody_takes_the_place_of_a_peer_that_was_there_at_the_start() -> None:
    sent = invitation(uses=1)
    members = membership()
    members.learn("me", sent.admit("me"), NOW)
    members.confirm()
    for copy in map(str, range(20)):
        members.learn(copy, sent.admit(copy), NOW)
    assert [peer for peer in ("me", *map(str, range(20))) if members.admits(peer, NOW)] == ["me"]


def test_an_allowance_is_a_use_of_the_invitations_before_it() -> None:
    members, (chain, key) = membership(), made(may_invite=True, uses=2)
    for peer in "abc":
        members.add(acts.allow(extend(chain, key, RUN, Grant(peer=peer))))
        members.confirm()
    assert [members.admits(peer, NOW) for peer in "abc"] == [True, True, False]


def test_an_excluded_peer_has_used_its_invitation() -> None:
    members, sent = membership(), invitation(uses=1)
    members.learn("ada", sent.admit("ada"), NOW)
    members.confirm()
    members.add(revocation(None, peer="ada"))
    members.learn("again", sent.admit("again"), NOW)
    assert not members.admits("ada", NOW)
    assert not members.admits("again", NOW)


def test_a_statement_counts_with_the_admission_that_it_shows() -> None:
    members = membership()
    light, heavy = invitation(weight=0.1).admit("a"), invitation(weight=0.5).admit("a")
    for admission in (light, heavy):
        members.learn("a", admission, NOW)
    shown = [members.terms("a", NOW, shown=admission) for admission in (light, heavy, b"", b"garbage")]
    assert [terms.weight if terms else None for terms in shown] == [0.1, 0.5, None, None]
    assert members.admits("a", NOW)
    members.add(acts.allow(extend(None, FOUNDER, RUN, Grant(peer="b"))))
    assert members.terms("b", NOW, shown=b"") is not None


def test_nobody_fills_the_memory_for_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_swarm.protocol.admission.membership._MAX_ACTS_PER_GRANT", 3)
    members, delegate = membership(), made(may_invite=True)
    below = [made(delegate, may_invite=True) for _ in range(5)]  # its own, however many
    assert [members.add(revocation(one, peer=str(i))) for i, one in enumerate(below)] == [True] * 3 + [False] * 2
    monkeypatch.setattr("spes_swarm.protocol.admission.membership.MAX_ACTS", 4)
    others = [made(may_invite=True) for _ in range(3)]
    assert [members.add(revocation(one, peer="x")) for one in others] == [True, False, False]
    assert members.add(revocation(None, peer="x"))  # there is room for the founder
    refused("admission", lambda: members.add(acts.use("a", invitation().admit("a"))))  # nobody needs to know of it


def test_an_act_is_not_compared_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of acts, as after a restart, would take minutes."""
    looks: list[acts.Act] = []
    is_void = Membership._is_void

    def look(self: Membership, act: acts.Act) -> bool:
        looks.append(act)
        return is_void(self, act)

    monkeypatch.setattr(Membership, "_is_void", look)
    members, sent = membership(), invitation(uses=40)
    for number in range(40):
        members.add(acts.use(str(number), sent.admit(str(number))))
        members.add(revocation(None, peer=f"other {number}"))
    assert len(members.acts) == 80
    assert len(looks) <= 80


def test_the_uses_of_an_invitation_that_is_taken_back_need_no_memory() -> None:
    grant = made(uses=3)
    sent = Invitation(RUN, grant[0].wire, grant[1])
    uses = [acts.use(peer, sent.admit(peer)) for peer in "abc"]
    taken_back = revocation(None, grant=grant[0].ids[0])
    digests = set()
    for order in permutations([*uses, taken_back]):
        members = membership()
        for act in order:
            members.add(act)
        assert list(members.acts.values()) == [taken_back]
        assert members.learn("d", sent.admit("d"), NOW) is None
        digests.add(members.digest)
    assert len(digests) == 1


def test_one_act_has_one_encoding() -> None:
    """Otherwise anybody could make any number of acts from one, and fill the memory of all peers."""
    sent = invitation(uses=1)
    for act in (revocation(None, peer="c"), acts.use("a", sent.admit("a"))):
        content = msgpack.unpackb(act)
        longer = b"\xdc" + len(content).to_bytes(2, "big") + act[1:]  # the length of the list in two bytes
        assert msgpack.unpackb(longer) == content
        refused("malformed", lambda data=longer: acts.open_act(data, RUN, KEY))  # type: ignore[misc]
    admission = sent.admit("a")
    refused("malformed", lambda: open_admission(b"\xdc\0\2" + admission[1:], "a", RUN, KEY))


def test_other_content_is_no_act() -> None:
    for other in (b"", b"\xc0", msgpack.packb(["use", "a"]), msgpack.packb({"allow": []}), b"\x91" * 50):
        with pytest.raises(ProtocolError):
            acts.open_act(other, RUN, KEY)


# Exclusion and pardons.


@pytest.mark.parametrize("policy", ["open", "invite", "allow-list"])
def test_a_proof_excludes_on_whatever_terms_until_the_founder_pardons(policy: str) -> None:
    here = membership(policy)
    chain = extend(None, FOUNDER, RUN, Grant(peer=identity(1).peer_id))
    here.add(acts.allow(chain))
    assert here.admits(identity(1).peer_id, NOW)
    for peer in (identity(1), FOUNDER):
        here.exclusions.note_lie(peer.peer_id, 5)
        assert not here.admits(peer.peer_id, NOW)
        assert here.why_not(peer.peer_id, NOW).startswith(f"{peer.peer_id} is excluded: a proof shows a lie in")
        assert here.terms(peer.peer_id, NOW) is not None  # for groups that others have closed
        pardon = acts.pardon(FOUNDER, RUN, acts.Pardon(peer=peer.peer_id, round=5, at=NOW))
        assert here.add(pardon)
        assert not here.add(pardon)
        assert here.admits(peer.peer_id, NOW)
    assert {pardon} <= set(here.acts.values())


def test_in_an_open_run_no_other_acts_count() -> None:
    here = membership("open")
    assert not here.add(acts.allow(extend(None, FOUNDER, RUN, Grant(peer=identity(1).peer_id))))
    assert not here.add(revocation(None, peer=identity(1).peer_id))
    assert here.admits(identity(1).peer_id, NOW)
    assert not here.acts
    assert here.digest == b""


def test_only_the_founder_pardons_and_only_in_its_run() -> None:
    here, content = membership("open"), acts.Pardon(peer=identity(1).peer_id, round=5, at=NOW)
    here.exclusions.note_lie(identity(1).peer_id, 5)
    refused("signature", lambda: here.add(acts.pardon(identity(1), RUN, content)))
    refused("signature", lambda: here.add(acts.pardon(FOUNDER, "another run", content)))
    payload = msgpack.packb({**content.model_dump(), "round": -1})
    signed = signed_bytes(b"pardon", RUN, bytes(32), payload)
    refused("schema", lambda: here.add(msgpack.packb(["pardon", payload, FOUNDER.sign(signed)])))
    refused("malformed", lambda: here.add(msgpack.packb(["pardon", "text", b""])))
    assert not here.admits(identity(1).peer_id, NOW)


def test_a_peer_knows_who_has_invited_another() -> None:
    here, guest = membership(), identity(1).peer_id
    assert here.inviter(guest) == ""
    here.learn(guest, invitation(name="Anna").admit(guest), NOW)
    assert here.inviter(guest) == "invited as 'Anna' by the founder"
    delegate = made(name="Lab", may_invite=True)
    here.learn(identity(2).peer_id, invitation(delegate).admit(identity(2).peer_id), NOW)
    assert here.inviter(identity(2).peer_id) == "invited by the holder of the invitation 'Lab'"
