"""Who may take part, as far as this peer knows: the admissions it was shown, and the acts of the run.

Times are the swarm's, in Unix seconds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable

from blake3 import blake3

from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.admission.acts import Act, Allow, Revoke, Use, act_id, open_act, use
from spes_swarm.protocol.admission.grants import ROOT, Chain, Terms, open_admission

MAX_ACTS = 4096
_MAX_ACTS_PER_GRANT = 256  # by the key of one grant; the founder has the rest
_MAX_ADMISSIONS = 4096
_ADMISSIONS_PER_PEER = 4
_ANYTHING = Terms(may_invite=True)


class Membership:
    """Decides who may take part in a run.

    More peers than an invitation allows may use it at the same time, at different places. Those whose use has settled
    (they have taken part in a commit, or this peer knew of them at its start) come first, then those with the smallest
    hashes. So peers agree once they know the same uses, and a late copy displaces nobody.
    """

    def __init__(self, run_id: str, founder: str, founder_key: bytes, policy: str) -> None:
        """`founder` is the founder's peer id, `founder_key` its public key in DER, `policy` the run's `admission`."""
        self.policy = policy
        self._run_id, self._founder, self._founder_key = run_id, founder, founder_key
        self._chains: OrderedDict[str, dict[bytes, Chain]] = (
            OrderedDict()
        )  # peer -> digest of an admission -> its chain
        self._allowed: dict[str, list[Chain]] = {}  # peer -> chains that name it
        self._acts: dict[bytes, bytes] = {}  # by id
        self._by_signer: Counter[bytes] = Counter()
        self._revoked_peers: dict[str, set[bytes]] = {}  # peer -> ids of the grants whose keys have revoked it
        self._revoked_grants: dict[bytes, set[bytes]] = {}
        self._users: dict[bytes, dict[str, bool]] = {}  # grant with a limit -> its users, and whether each has settled
        self.digest = b""  # of all acts; empty without any

    # Decisions.

    def admits(self, peer_id: str, now: float) -> bool:
        """Returns True if a peer may take part."""
        return self.terms(peer_id, now) is not None

    def terms(self, peer_id: str, now: float, *, shown: bytes = b"") -> Terms | None:
        """What a peer may do; None if it may not take part.

        `shown`: the admission that counts, so that all who see it come to the same terms. Without it, any does.
        """
        if self.policy == "open" or peer_id == self._founder:
            return _ANYTHING
        known = self._chains.get(peer_id, {})
        chains = [known[act_id(shown)]] if act_id(shown) in known else [*known.values()]
        chains += sorted(self._allowed.get(peer_id, []), key=lambda chain: chain.ids[-1])
        return next((chain.terms for chain in chains if self._is_valid(chain, peer_id, now)), None)

    def why_not(self, peer_id: str, now: float) -> str:
        """Why a peer that is not admitted is refused, in a few words for its user."""
        chains = [*self._allowed.get(peer_id, []), *self._chains.get(peer_id, {}).values()]
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
        """Returns True if a key that comes before what is revoked, in this chain, has revoked the peer or a grant."""
        ids = (ROOT, *chain.ids)
        if not self._revoked_peers.get(peer_id, set()).isdisjoint(ids):
            return True
        return any(not self._revoked_grants.get(one, set()).isdisjoint(ids[:i]) for i, one in enumerate(ids))

    def _is_used_up(self, chain: Chain, peer_id: str) -> bool:
        return any(
            grant.uses is not None and peer_id not in self._first_users(grant_id, grant.uses, peer_id)
            for grant_id, grant in zip(chain.ids, chain.grants, strict=True)
        )

    def _first_users(self, grant_id: bytes, uses: int, peer_id: str) -> Collection[str]:
        users = {peer_id: False} | self._users.get(grant_id, {})
        settled = [peer for peer, has_settled in users.items() if has_settled]
        fresh = sorted(users.keys() - settled, key=lambda peer: blake3(grant_id + peer.encode()).digest())
        return [*settled, *fresh][:uses]

    # Knowledge.

    def learn(self, peer_id: str, admission: bytes) -> None:
        """Takes in an admission that a peer has shown; it may not admit the peer any more.

        Raises:
            ProtocolError: as `open_admission`; (`admission`) this run admits peers by name only.
        """
        if self.policy == "open":
            return
        if self.policy == "allow-list":
            raise ProtocolError("admission", "this run admits peers by their ids only")
        if act_id(admission) in self._chains.get(peer_id, {}):
            self._chains.move_to_end(peer_id)
            return
        chain = open_admission(admission, peer_id, self._run_id, self._founder_key)
        if any(grant.uses is not None for grant in chain.grants):
            self.add(use(peer_id, admission))
        self._note(peer_id, admission, chain)

    def _note(self, peer_id: str, admission: bytes, chain: Chain) -> None:
        chains = self._chains.setdefault(peer_id, {})
        chains[act_id(admission)] = chain
        if len(chains) > _ADMISSIONS_PER_PEER:
            del chains[next(iter(chains))]
        self._chains.move_to_end(peer_id)
        while len(self._chains) > _MAX_ADMISSIONS:  # those that are still here show theirs again
            self._chains.popitem(last=False)

    def settle(self, peers: Iterable[str]) -> None:
        """Notes that these peers have taken part in a commit: nobody takes their place in an invitation any more."""
        for peer_id in sorted(peers):
            for chain in self._chains.get(peer_id, {}).values():
                for grant_id, grant in zip(chain.ids, chain.grants, strict=True):
                    if grant.uses is not None and peer_id in self._first_users(grant_id, grant.uses, peer_id):
                        self._users.setdefault(grant_id, {})[peer_id] = True

    # Acts.

    @property
    def acts(self) -> list[bytes]:
        """All acts, in the order in which they arrived."""
        return list(self._acts.values())

    @property
    def act_ids(self) -> list[bytes]:
        """The ids of all acts, in the same order."""
        return list(self._acts)

    def add(self, data: bytes, *, settled: bool = False) -> bool:
        """Takes in an act; returns True if it was not known and has an effect.

        `settled`: it is from this peer's own file, or from the first peers that it has met.

        Raises:
            ProtocolError: as `open_act`.
        """
        identifier = act_id(data)
        if self.policy == "open" or identifier in self._acts or len(self._acts) >= MAX_ACTS:
            return False
        act = open_act(data, self._run_id, self._founder_key)
        signer = _signer_of(act)
        if (signer != ROOT and self._by_signer[signer] >= _MAX_ACTS_PER_GRANT) or not self._apply(act, settled):
            return False
        self._by_signer[signer] += 1
        self._acts[identifier] = data
        self.digest = blake3(b"".join(sorted(self._acts))).digest()[:16]
        return True

    def _apply(self, act: Act, settled: bool) -> bool:
        match act:
            case Allow(chain):
                self._allowed.setdefault(chain.grants[-1].peer, []).append(chain)
            case Revoke(target, signer) if target.peer:
                self._revoked_peers.setdefault(target.peer, set()).add(signer)
            case Revoke(target, signer):
                self._revoked_grants.setdefault(target.grant, set()).add(signer)
            case Use(peer_id, chain, admission):
                if self._is_used_up(chain, peer_id):
                    return False
                self._note(peer_id, admission, chain)
                for grant_id, grant in zip(chain.ids, chain.grants, strict=True):
                    if grant.uses is not None:
                        users = self._users.setdefault(grant_id, {})
                        users[peer_id] = settled or users.get(peer_id, False)
        return True


def _signer_of(act: Act) -> bytes:
    """Id of the grant whose key has made an act; ROOT: the founder's."""
    match act:
        case Revoke(_, signer):
            return signer
        case Allow(chain):
            return chain.ids[-2] if len(chain.ids) > 1 else ROOT
        case Use(_, chain, _):
            return chain.ids[-1]
