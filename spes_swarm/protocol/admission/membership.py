"""Who may take part, as far as this peer knows: the admissions it was shown, and the acts of the run.

Times are the swarm's, in Unix seconds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from functools import lru_cache

from blake3 import blake3

from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.admission.acts import (
    Act,
    Allow,
    Pardon,
    Revoke,
    Use,
    act_id,
    has_revoked_grant,
    open_act,
    use,
)
from spes_swarm.protocol.admission.exclusion import Exclusions
from spes_swarm.protocol.admission.grants import ROOT, Chain, Terms, open_admission

MAX_ACTS = 4096  # of the founder; as many of all others together
_MAX_ACTS_PER_GRANT = 512  # that follow from one grant
_MAX_ADMISSIONS = 4096
_ADMISSIONS_PER_PEER = 4
_ANYTHING = Terms(may_invite=True)


@lru_cache(maxsize=1 << 14)
def _place(grant_id: bytes, peer_id: str) -> bytes:
    """Where a peer stands among those that use an invitation at the same time."""
    return blake3(grant_id + peer_id.encode()).digest()


class Membership:
    """Decides who may take part in a run.

    More peers than an invitation allows may use it at the same time, at different places. Those whose use has confirmed
    (they have taken part in a commit, or were first when this peer began to follow) come first, then those with the
    smallest hashes. So peers agree once they know the same uses, and a late copy displaces nobody.
    """

    def __init__(self, run_id: str, founder: str, founder_key: bytes, policy: str) -> None:
        """`founder` is the founder's peer id, `founder_key` its public key in DER, `policy` the run's `admission`."""
        self.policy = policy
        self.founder = founder
        self._run_id, self._founder_key = run_id, founder_key
        self._chains: OrderedDict[str, dict[bytes, Chain]] = OrderedDict()  # peer -> admission's digest -> chain
        self._allowed: dict[str, list[Chain]] = {}  # peer -> chains that name it
        self._acts: dict[bytes, tuple[bytes, Act]] = {}  # by id
        self._num_acts: Counter[bytes] = Counter()  # by grant that they follow from; ROOT: of the founder alone
        self._revoked_peers: dict[str, set[bytes]] = {}  # peer -> ids of the grants whose keys have revoked it
        self._revoked_grants: dict[bytes, set[bytes]] = {}
        # Grant with a limit -> its users, and whether each has been confirmed.
        self._users: dict[bytes, dict[str, bool]] = {}
        self._digest: bytes | None = b""  # None: to be computed
        self.exclusions = Exclusions()

    # Decisions.

    def admits(self, peer_id: str, now: float) -> bool:
        """Returns True if a peer may take part."""
        return peer_id not in self.exclusions and self.terms(peer_id, now) is not None

    def terms(self, peer_id: str, now: float, *, shown: bytes | None = None) -> Terms | None:
        """What a peer may do; None if it has not been admitted. An excluded peer may do nothing: see `admits`.

        `shown`: the admission in a statement, empty without one. It alone counts, besides an allowance, so that all who
        see the statement come to the same terms. None: any that this peer knows of counts.
        """
        if self.policy == "open" or peer_id == self.founder:
            return _ANYTHING
        valid = (chain for chain in self._chains_of(peer_id, shown) if self._is_valid(chain, peer_id, now))
        return next((chain.terms for chain in valid), None)

    def _chains_of(self, peer_id: str, shown: bytes | None = None) -> list[Chain]:
        known = self._chains.get(peer_id, {})
        chains = list(known.values()) if shown is None else [known[key] for key in {act_id(shown)} & known.keys()]
        return chains + sorted(self._allowed.get(peer_id, []), key=lambda chain: chain.ids[-1])

    def why_not(self, peer_id: str, now: float) -> str:
        """Why a peer that is not admitted is refused, in a few words for its user."""
        if peer_id in self.exclusions:
            lied = self.exclusions.lie_of(peer_id)
            return f"{peer_id} is excluded: a proof shows a lie in round {lied} (only the founder can pardon it)"
        chains = self._chains_of(peer_id)
        if any(self._is_revoked(chain, peer_id) for chain in chains):
            return "the invitation has been revoked"
        if any(self._has_expired(chain, now) for chain in chains):
            return "the invitation has expired"
        return "the invitation has been used by others already" if chains else "this run is private"

    def _is_valid(self, chain: Chain, peer_id: str, now: float) -> bool:
        return not (
            self._has_expired(chain, now) or self._is_revoked(chain, peer_id) or self._is_used_up(chain, peer_id)
        )

    @staticmethod
    def _has_expired(chain: Chain, now: float) -> bool:
        return chain.terms.expires is not None and now >= chain.terms.expires

    def _is_revoked(self, chain: Chain, peer_id: str) -> bool:
        """Returns True if the peer, or a grant of the chain, has been revoked by somebody with a right to do so."""
        by = self._revoked_peers.get(peer_id, set())
        return not by.isdisjoint((ROOT, *chain.ids)) or self._has_revoked_grant(chain)

    def _has_revoked_grant(self, chain: Chain) -> bool:
        return has_revoked_grant(chain, self._revoked_grants)

    def _is_used_up(self, chain: Chain, peer_id: str) -> bool:
        return any(peer_id not in self._first_users(grant_id, uses, peer_id) for grant_id, uses in chain.limits)

    def _first_users(self, grant_id: bytes, uses: int, also: str = "") -> list[str]:
        users = self._users.get(grant_id, {})
        confirmed = [peer for peer, has_settled in users.items() if has_settled]
        fresh = {*users, also}.difference(confirmed, {""})
        return [*confirmed, *sorted(fresh, key=lambda peer: _place(grant_id, peer))][:uses]

    def inviter(self, peer_id: str) -> str:
        """Who has invited a peer, in words; empty if this peer knows of no invitation."""
        for chain in self._chains_of(peer_id):
            name, before = chain.grants[-1].name, [grant.name for grant in chain.grants[:-1]]
            by = f"the holder of the invitation {before[-1] or chain.ids[-2].hex()[:8]!r}" if before else "the founder"
            return f"invited{f' as {name!r}' if name else ''} by {by}"
        return ""

    # Knowledge.

    def learn(self, peer_id: str, admission: bytes, now: float) -> bytes | None:
        """Takes in an admission that a peer has shown; it may not admit the peer any more.

        Returns:
            A new act, if this is the use of a limited invitation.

        Raises:
            ProtocolError: as `open_admission`; (`admission`) this run admits peers by name only.
        """
        if self.policy == "open":
            return None
        if self.policy == "allow-list":
            raise ProtocolError("admission", "this run admits peers by their ids only")
        if act_id(admission) in self._chains.get(peer_id, {}):
            self._chains.move_to_end(peer_id)
            return None
        chain = open_admission(admission, peer_id, self._run_id, self._founder_key)
        chains = self._chains.setdefault(peer_id, {})
        chains[act_id(admission)] = chain
        if len(chains) > _ADMISSIONS_PER_PEER:
            del chains[next(iter(chains))]
        self._chains.move_to_end(peer_id)
        while len(self._chains) > _MAX_ADMISSIONS:  # those that are still here show theirs again
            self._chains.popitem(last=False)
        act = use(peer_id, admission)
        is_new = bool(chain.limits) and self._is_valid(chain, peer_id, now) and self.add(act)
        return act if is_new else None

    def confirm(self, peers: Iterable[str] | None = None) -> None:
        """Notes that nobody takes the place of these peers, or of all that have one, in an invitation any more."""
        limits = {limit for _, act in self._acts.values() if isinstance(act, Allow | Use) for limit in act.chain.limits}
        confirmed = None if peers is None else set(peers)
        for grant_id, uses in limits:
            for peer in self._first_users(grant_id, uses):
                if confirmed is None or peer in confirmed:
                    self._users[grant_id][peer] = True

    # Acts.

    @property
    def acts(self) -> dict[bytes, bytes]:
        """All acts by id, in the order in which they arrived."""
        return {identifier: data for identifier, (data, _) in self._acts.items()}

    @property
    def digest(self) -> bytes:
        """Digest of all acts; empty without any."""
        if self._digest is None:
            self._digest = blake3(b"".join(sorted(self._acts))).digest()[:16] if self._acts else b""
        return self._digest

    def add(self, data: bytes) -> bool:
        """Takes in an act; returns True if it was not known and has an effect.

        Raises:
            ProtocolError: as `open_act`.
        """
        identifier = act_id(data)
        if identifier in self._acts:
            return False
        act = open_act(data, self._run_id, self._founder_key)
        if self.policy == "open" and not isinstance(act, Pardon):
            return False
        sources = _sources(act)
        if self._is_full(sources) or not self._apply(act):
            return False
        self._num_acts.update(sources)
        self._acts[identifier] = data, act
        self._digest = None
        self._drop_void_acts(self._touched(act))
        return identifier in self._acts

    def _is_full(self, sources: tuple[bytes, ...]) -> bool:
        """Returns True if no more acts are kept of their author: nobody can keep out those of the founder."""
        if sources == (ROOT,):
            return self._num_acts[ROOT] >= MAX_ACTS
        others = len(self._acts) - self._num_acts[ROOT]
        return others >= MAX_ACTS or any(self._num_acts[source] >= _MAX_ACTS_PER_GRANT for source in sources)

    def _apply(self, act: Act) -> bool:
        match act:
            case Pardon():
                self.exclusions.pardon(act.peer, act.round)
            case Revoke(target, signer) if target.peer:
                self._revoked_peers.setdefault(target.peer, set()).add(signer)
            case Revoke(target, signer):
                self._revoked_grants.setdefault(target.grant, set()).add(signer)
            case Allow(chain) | Use(_, chain, _):
                if self._is_void(act):
                    return False
                for grant_id, _ in chain.limits:
                    self._users.setdefault(grant_id, {}).setdefault(act.peer_id, False)
                if isinstance(act, Allow):
                    self._allowed.setdefault(act.peer_id, []).append(chain)
        return True

    def _is_void(self, act: Act) -> bool:
        """Returns True if an act will never have an effect. The use of a peer that is revoked counts as a use."""
        if not isinstance(act, Allow | Use):
            return False
        return self._has_revoked_grant(act.chain) or self._is_used_up(act.chain, act.peer_id)

    def _touched(self, act: Act) -> set[bytes]:
        """Returns the grants of which a new act may have made other acts void."""
        if isinstance(act, Revoke):
            return {act.target.grant} - {b""}
        if isinstance(act, Pardon):
            return set()
        return {grant_id for grant_id, uses in act.chain.limits if len(self._users[grant_id]) > uses}

    def _drop_void_acts(self, grants: set[bytes]) -> None:
        """Drops those acts of these grants that are void: in whatever order acts come, peers keep the same ones."""
        void = {
            identifier: act
            for identifier, (_, act) in (self._acts.items() if grants else ())
            if isinstance(act, Allow | Use) and not grants.isdisjoint(act.chain.ids) and self._is_void(act)
        }
        for identifier, act in void.items():
            del self._acts[identifier]
            self._num_acts.subtract(_sources(act))
            for grant_id, _ in act.chain.limits:
                self._users[grant_id].pop(act.peer_id, None)
            if isinstance(act, Allow):
                self._allowed[act.peer_id].remove(act.chain)


def _sources(act: Act) -> tuple[bytes, ...]:
    """Ids of the grants that an act follows from; ROOT alone for one of the founder."""
    match act:
        case Pardon():
            return (ROOT,)
        case Revoke(_, _, chain):
            return (ROOT,) if chain is None else chain.ids
        case Allow(chain):
            return chain.ids[:-1] or (ROOT,)
        case Use(_, chain, _):
            return chain.ids
