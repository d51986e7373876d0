"""Runs, honest and harmed ones, on which a peer's judge of commits (training/health/loss_watch.py) is measured.

They record what each peer's judge would be told, whatever it answers, so that any judge can be replayed on them. A
harmed commit is taken back by the next round, whether or not it was noticed: each one meets a healthy swarm. Only in
`creep` nothing is taken back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from scripts.testing.paper_config import paper_config_path
from scripts.testing.sequential_swarm import SequentialSwarm
from scripts.testing.study.arm import ArmConfig
from scripts.testing.study.peers import initial_holdings, peer_sampler, room_of, rules_of
from spes_swarm.base.arrays import FloatArray
from spes_swarm.config.data_source import STDLIB
from spes_swarm.config.file import default_config_path, load_config
from spes_swarm.config.round_clock import RoundClock
from spes_swarm.config.run import RunConfig
from spes_swarm.data.corpus import open_corpus
from spes_swarm.data.sampler import TokenStream
from spes_swarm.data.tokenizer import load_tokenizer
from spes_swarm.model.merge import merge_alpha, merge_due
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK
from spes_swarm.training.health.held_out import HeldOutLoss, HeldOutText

NUM_PEERS = 4
SPEEDS = (3, 4, 5, 8)  # fifths of the inner steps, in `speeds`
REPLACED_EVERY = 20  # rounds, in `newcomers`
SPLIT_EVERY, SPLIT_ROUNDS = 40, 10  # in `partition`
HARMED_SHARE = 0.2  # of the shared block's values: what one of five equal reducers sends to all
FIRST_HARMED = 20  # round

# What a peer followed before the steps of a window: its start, a commit, one with a merge of experts, the one that ends
# a partition, a harmed one, or the restored reference.
Kind = Literal["start", "commit", "merge", "reunion", "harmed", "return"]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What happens in a run."""

    paper: bool = False  # quickstart-paper.yaml instead of quickstart.yaml
    shards: bool = False  # each peer has text of its own
    warm_up: bool = True
    rate: float = 1.0  # factor on the learning rate
    batch: int | None = None  # sequences per step; None: the configuration's
    speeds: tuple[int, ...] = (5,) * NUM_PEERS
    newcomers: bool = False
    partitions: bool = False
    evaluated: bool = False  # after every commit
    harm: Literal["", "noise", "flip"] = ""
    factor: float = 0.0  # of the noise, times the RMS of the round's move
    harm_every: int = 5  # rounds; 1: the harm stays
    num_peers: int = NUM_PEERS


SCENARIOS = {
    "steady": Scenario(),
    "speeds": Scenario(speeds=SPEEDS),
    "newcomers": Scenario(newcomers=True),
    "rate": Scenario(warm_up=False),
    "rate-x3": Scenario(warm_up=False, rate=3.0),
    "paper": Scenario(paper=True),
    "own-data": Scenario(shards=True),
    "partition": Scenario(partitions=True),
    "evaluated": Scenario(evaluated=True),
    "batch-32": Scenario(batch=32),
    "pair": Scenario(num_peers=2, speeds=(5, 5)),
    "flip": Scenario(harm="flip"),
    "noise-3": Scenario(harm="noise", factor=3.0),
    "noise-10": Scenario(harm="noise", factor=10.0),
    "noise-20": Scenario(harm="noise", factor=20.0),
    "noise-30": Scenario(harm="noise", factor=30.0),
    "creep-3": Scenario(harm="noise", factor=3.0, harm_every=1),
    "creep-flip": Scenario(harm="flip", harm_every=1),
}


@dataclass(frozen=True, slots=True)
class Window:
    """What a peer's judge is told between two commits."""

    round: int  # the last committed
    side: int  # of a partition
    kind: Kind
    losses: list[float]  # of the steps after it, in nats per target
    evaluation: tuple[float, float | None] | None = None  # right after it: mean and standard error


@dataclass(frozen=True, slots=True)
class Record:
    """One run."""

    scenario: str
    seed: int
    rounds: int
    seconds: float
    peers: dict[str, list[Window]] = field(default_factory=dict)
    opposition: float | None = None  # the largest of a peer in a round; see RoundOutcome. None: not recorded
    ignored: int = 0  # members in rounds, added up; all are honest


def settings(scenario: Scenario, seed: int) -> RunConfig:
    """Returns the settings of a run."""
    run = load_config(paper_config_path() if scenario.paper else default_config_path()).run
    assert run is not None
    training = replace(
        run.training,
        seed=seed,
        learning_rate=run.training.learning_rate * scenario.rate,
        warmup_steps=run.training.warmup_steps if scenario.warm_up else 0,
        batch_size=scenario.batch or run.training.batch_size,
    )
    return replace(run, training=training)


class _Course:
    """A swarm on its way through a scenario."""

    def __init__(self, scenario: Scenario, seed: int, stream: TokenStream) -> None:
        run = settings(scenario, seed)
        self._scenario, self._run, self._stream = scenario, run, stream
        self._arm = ArmConfig(peers=scenario.num_peers, data="shards" if scenario.shards else "iid")
        self._clock = RoundClock.of(run)
        self._rng = np.random.default_rng(seed)
        room = room_of(run, scenario.num_peers)
        rules = rules_of(run, room)
        holdings = initial_holdings(run.model.num_experts, scenario.num_peers, room, rules)
        samplers = [peer_sampler(self._arm, run, stream, number) for number in range(scenario.num_peers)]
        self._held_out = list(samplers[0].evaluation_batches(run.evaluation.sequences, 16))
        self.swarm = SequentialSwarm(run, samplers, holdings, room=room, rules=rules)
        self._num_arrived = scenario.num_peers
        self._speeds = {peer.name: scenario.speeds[i] for i, peer in enumerate(self.swarm.peers)}
        self._kinds: dict[str, Kind] = {peer.name: "start" for peer in self.swarm.peers}
        self._evaluation: HeldOutLoss | None = None
        self.windows: dict[str, list[Window]] = {peer.name: [] for peer in self.swarm.peers}
        self._side = 0
        self.opposition, self.ignored = 0.0, 0  # the largest so far, and all so far
        self._before_N: FloatArray | None = None  # the reference before a harmed commit
        self._contributed: dict[str, FloatArray] = {}  # what each peer took part in it with

    def hold_round(self) -> None:
        """Trains and commits, or takes the harmed commit before back."""
        self._train()
        if self._before_N is not None and self._scenario.harm_every > 1:
            self._take_back(self._before_N)
            self._before_N = None
            return
        number = self.swarm.round + 1
        harmed = self._scenario.harm != "" and number >= FIRST_HARMED and number % self._scenario.harm_every == 0
        before_N = self.swarm.peers[0].reference.values_N.copy()
        if harmed:
            for peer in self.swarm.peers:  # what a peer does not train now would begin at the reference
                self._contributed[peer.name] = before_N.copy()
                peer.live.read_trained(self._contributed[peer.name])
        self._hold_round()
        kind: Kind = "merge" if self._merges(number) else "commit"
        if harmed:
            self._do_harm(before_N)
            kind, self._before_N = "harmed", before_N
        self._kinds.update((peer.name, kind) for peer in self.swarm.peers)
        if self._scenario.evaluated:
            first = self.swarm.peers[0]
            measured = HeldOutText(self._held_out, 1, torch.device("cpu"), nullcontext)
            self._evaluation = measured.measure(first.model.module)
        if self._scenario.newcomers and number % REPLACED_EVERY == 0:
            self._replace()

    def part(self) -> None:
        """Holds the rounds of two halves that do not see each other, and the round in which they meet again."""
        peers, number = list(self.swarm.peers), self.swarm.round
        for side in (1, 2):
            self._side, self.swarm.peers, self.swarm.round = side, peers[side - 1 :: 2], number
            for _ in range(SPLIT_ROUNDS):
                self.hold_round()
            self._train()
        self.swarm.peers, self._side = peers, 0
        self._hold_round()
        self._kinds.update((peer.name, "reunion") for peer in peers)

    def _hold_round(self) -> None:
        outcome = self.swarm.hold_round()
        self.opposition = max(self.opposition, outcome.opposition)
        self.ignored += outcome.ignored

    def _train(self) -> None:
        peers = self.swarm.peers
        if not self.swarm.train([self._speeds[peer.name] * self.swarm.inner_steps // 5 for peer in peers]):
            raise RuntimeError("a weight is NaN or infinite")
        seen = self._evaluation
        for peer in peers:
            losses = [round(loss, 4) for loss in peer.losses]
            evaluation = None if seen is None else (seen.mean, seen.stderr)
            window = Window(self.swarm.round, self._side, self._kinds[peer.name], losses, evaluation)
            self.windows[peer.name].append(window)

    def _merges(self, number: int) -> bool:
        merge, now = self._run.merge, self._clock.step_of(number)
        due = merge_due(self._clock.step_of(number - 1), now, merge.interval)
        return due and merge_alpha(now, merge.alpha, merge.steps) > 0

    def _do_harm(self, before_N: FloatArray) -> None:
        """Changes a fifth of the shared values of all peers, as a reducer does whose results nobody checks."""
        first = self.swarm.peers[0].reference
        block = first.layout.blocks[SHARED_BLOCK]
        where = slice(block.start, block.start + int(block.size * HARMED_SHARE))
        move_N = first.values_N[where] - before_N[where]
        if self._scenario.harm == "flip":
            change_N = -2 * move_N
        else:
            scale = self._scenario.factor * float(np.sqrt(np.mean(np.square(move_N))))
            change_N = (scale * self._rng.standard_normal(len(move_N))).astype(np.float32)
        for peer in self.swarm.peers:
            peer.reference.values_N[where] += change_N
            peer.contribution_N[where] += change_N
            peer.reference.finish(self.swarm.round, [(SHARED_BLOCK, self.swarm.round)])
            peer.live.follow([SHARED_BLOCK])

    def _take_back(self, before_N: FloatArray) -> None:
        """Restores the reference of before the harmed commit, and to each peer the weights that it contributed."""
        number = self.swarm.round = self.swarm.round + 1
        for peer in self.swarm.peers:
            blocks = [block.index for block in peer.reference.layout.blocks]
            peer.reference.values_N[:] = before_N
            peer.reference.finish(number, [(index, number) for index in blocks])
            peer.contribution_N[:] = self._contributed[peer.name]
            peer.live.follow(blocks)
            peer.committed(())
            self._kinds[peer.name] = "return"

    def _replace(self) -> None:
        gone = self.swarm.peers[0]
        self.swarm.remove(gone)
        newcomer = self.swarm.join(peer_sampler(self._arm, self._run, self._stream, self._num_arrived))
        self._num_arrived += 1
        self._speeds[newcomer.name] = self._speeds[gone.name]
        self._kinds[newcomer.name] = "start"
        self.windows[newcomer.name] = []


def record(name: str, seed: int, rounds: int, until: float, data: str = STDLIB) -> Record:
    """Makes one run of a scenario, of this many rounds or until this time (seconds since the epoch).

    Raises:
        DataError: see open_corpus.
        RuntimeError: a weight is NaN or infinite.
    """
    torch.set_num_threads(1)
    started = time.monotonic()
    scenario = SCENARIOS[name]
    stream = TokenStream(open_corpus(data, load_tokenizer("bytes")))
    course = _Course(scenario, seed, stream)
    while course.swarm.round < rounds and time.time() < until:
        if scenario.partitions and course.swarm.round % SPLIT_EVERY == SPLIT_EVERY - SPLIT_ROUNDS:
            course.part()
        else:
            course.hold_round()
    seconds = time.monotonic() - started
    opposition = round(course.opposition, 3)
    return Record(name, seed, course.swarm.round, round(seconds, 1), course.windows, opposition, course.ignored)


def rises(peers: Sequence[list[Window]], kind: Kind, commits: int = 1) -> list[float]:
    """Returns by how much the mean loss after commits of this kind lies above that so many commits before, in nats."""
    found = []
    for windows in peers:
        for before, after in zip(windows, windows[commits:], strict=False):
            if after.kind == kind and before.kind != "start" and before.losses and after.losses:
                found.append(float(np.mean(after.losses) - np.mean(before.losses)))
    return found
