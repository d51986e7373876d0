"""A member that trains like any other, and lies about its work or about the others.

`python -m tests.helpers.lying_contributor KIND ...` takes the arguments of `join` after the kind. Its results are
honest. So are its live weights: whatever it contributes, it trains on from the new reference, as the others do.

Instead of its work it contributes: `opposite`, the opposite of it; `tenfold`, ten times as much, stated as such;
`experts`, noise as long as it for the experts, and honest work for the shared layers; `idle`, no difference at all, for
a thousand times its tokens; `copied`, the mean by which the last round has moved the reference, so that it copies what
the others have done.

Or its work is honest, and its statements are not: `verdicts` says after every commit that its loss has risen.
`accusing` doubts all others, says that none of them may reduce, that all should rest and have a rate of 1 kbit/s, and
that it has a proof against each. `identities` contributes the opposite, vouches for the peers that the environment
variable ACCOMPLICES names, and doubts the rest.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from scripts.testing.forked_peer import ForkServer, Main
from spes_swarm import join
from spes_swarm.base.arrays import FloatArray
from spes_swarm.network import run_services
from spes_swarm.network.round.sync_round import SyncRounds
from spes_swarm.port.messages import RoundReport
from spes_swarm.protocol.admission.exclusion import Exclusions
from spes_swarm.protocol.consensus.layout import Block
from spes_swarm.protocol.rounds.statement import Statement
from spes_swarm.protocol.rounds.vouchers import MAX_EARNED_RATIO, vouchers
from tests.helpers.slow_join import PAUSE_S, sleeping_main

_ABOUT_OTHERS = ("verdicts", "accusing")  # whose work is honest
KINDS = ("opposite", "tenfold", "experts", "idle", "copied", *_ABOUT_OTHERS, "identities")
ACCOMPLICES = "ACCOMPLICES"  # peer ids, separated by spaces; its own may be among them
_CLAIMED = 1000  # times its tokens: ten times as many would be reported as absurd
_LEAST_MBPS = 1e-3


def launch_lying(kind: str) -> ForkServer:
    """Starts `join`, with a pause before each step, that lies from its first round on."""
    return ForkServer(main=partial(_lying_main, kind, main=partial(sleeping_main, PAUSE_S)))


@dataclass(eq=False)
class LyingRounds(SyncRounds):
    """The rounds of a liar: what it contributes is exchanged for the time of a round."""

    kind: str
    accomplices: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._moved_N: FloatArray = np.zeros_like(self.run_state.reference.values_N)  # by the last commit
        self._rng = np.random.default_rng(0)

    async def run(
        self, target_round: int, tokens: int, routed: tuple[int, ...], leaving: bool, loss_rose: bool | None = None
    ) -> RoundReport:
        """Like `SyncRounds.run`, with lies in place of the contribution, which the audits see, too."""
        if self.kind in _ABOUT_OTHERS:
            return await super().run(target_round, tokens, routed, leaving, self.kind == "verdicts" or loss_rose)
        reference, contribution_N = self.run_state.reference, self.run_state.contribution_N
        if self.kind == "idle":
            tokens, routed = _CLAIMED * tokens, tuple(_CLAIMED * count for count in routed)
        before_N, honest_N = reference.values_N.copy(), contribution_N.copy()
        for block in reference.layout.trained_blocks(self.run_state.leases.held):
            work_N = honest_N[block.where] - before_N[block.where]
            contribution_N[block.where] = before_N[block.where] + self._in_place_of(work_N, block)
        changed: tuple[int, ...] = ()
        try:
            report = await super().run(target_round, tokens, routed, leaving, loss_rose)
            changed = report.commit.changed_blocks
            self._moved_N = reference.values_N - before_N
            return report
        finally:
            contribution_N[:] = honest_N
            for index in changed:
                where = reference.layout.blocks[index].where
                contribution_N[where] = reference.values_N[where]

    def _in_place_of(self, work_N: FloatArray, block: Block) -> FloatArray:
        match self.kind:
            case "opposite" | "identities":
                return -work_N
            case "tenfold":
                return 10 * work_N
            case "experts" if block.expert is not None:
                rms = np.sqrt(np.mean(np.square(work_N, dtype=np.float64)))
                return self._rng.normal(0, rms, block.size).astype(np.float32)
            case "idle":
                return np.zeros_like(work_N)
            case "copied":
                return self._moved_N[block.where]
            case _:
                return work_N

    async def _statement(self, target_round: int, *work: Any) -> Statement:
        statement = await super()._statement(target_round, *work)
        if self.kind not in ("accusing", "identities"):
            return statement
        others = {view.peer_id for view in self.run_state.roster.present()}
        friends, victims = others & self.accomplices, others - self.accomplices
        slow = dict.fromkeys(victims, _LEAST_MBPS)
        trusted = dict.fromkeys(friends, MAX_EARNED_RATIO)
        said = vouchers(trusted, friends, target_round, doubted=victims, resting=victims, rates=slow)
        invented = Exclusions()
        for peer_id in victims:
            invented.note_lie(peer_id, target_round)
        return statement.model_copy(update={"vouched": said, "proven": invented.marks()})


def _lying_main(kind: str, arguments: list[str], main: Main = join.main) -> int:
    if kind not in KINDS:
        raise SystemExit(f"unknown kind {kind!r}; there are {', '.join(KINDS)}")
    lying = partial(LyingRounds, kind=kind, accomplices=frozenset(os.environ.get(ACCOMPLICES, "").split()))
    with mock.patch.object(run_services, "SyncRounds", lying):
        return main(arguments)


if __name__ == "__main__":
    sys.exit(_lying_main(sys.argv[1], sys.argv[2:]))
