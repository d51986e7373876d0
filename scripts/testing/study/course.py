"""One run of a study: an arm with one seed, from the initial weights to the last round."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from scripts.testing.sequential_swarm import SequentialPeer, SequentialSwarm
from scripts.testing.study.arm import Arm, ArmConfig, ChurnConfig
from scripts.testing.study.momentum import share_momentum
from scripts.testing.study.outer import OuterNesterov
from scripts.testing.study.peers import JoinedSamplers, initial_holdings, peer_sampler, room_of, rules_of
from spes_swarm.config.run import RunConfig
from spes_swarm.data.batch_source import BatchSource
from spes_swarm.data.sampler import TokenStream
from spes_swarm.protocol.consensus.codec import get_codec


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run; losses in nats per token, of the reference in fp32 on held-out text."""

    seed: int
    loss: float | None  # at the end; None: weights became NaN or infinite
    curve: list[tuple[int, float]]  # (steps of the mean peer, loss)
    bytes_per_step: float  # payload that a peer sends, on average, for each of its steps
    holders: float  # of an expert, on average over experts and rounds
    tokens: int  # of all peers
    digest: str  # of the last reference, hex
    seconds: float  # CPU time


class _Pace:
    """How many steps each peer does before a round, so that the mean peer does those of the run.

    Fractions of a step add up.
    """

    def __init__(self, speeds: tuple[float, ...], num_peers: int) -> None:
        self._speeds = [speeds[number % len(speeds)] if speeds else 1.0 for number in range(num_peers)]
        self._owed = [0.0] * num_peers

    def steps(self, inner_steps: int, present: list[int]) -> list[int]:
        """Returns the steps of the peers at these places."""
        total = sum(self._speeds[place] for place in present)
        steps = []
        for place in present:
            owed = self._owed[place] + inner_steps * len(present) * self._speeds[place] / total
            steps.append(math.floor(owed + 1e-9))
            self._owed[place] = owed - steps[-1]
        return steps


class _Churn:
    """Replaces peers: a trace that depends only on the settings and the seed."""

    def __init__(self, config: ChurnConfig, num_places: int, seed: int) -> None:
        self._config, self._num_places = config, num_places
        self._rng = np.random.default_rng(seed)
        self._owed = 0.0
        self._back: dict[int, int] = {}  # place -> round after which a newcomer takes it

    def leaving(self, round_number: int, present: list[int]) -> list[int]:
        """Returns the places of the peers for which this round is the last; one peer always stays."""
        if not self._config.share or round_number % self._config.every_rounds:
            return []
        self._owed += self._config.share * self._num_places
        count = min(math.floor(self._owed + 1e-9), len(present) - 1)
        self._owed -= count
        places = sorted(int(place) for place in self._rng.choice(present, count, replace=False))
        self._back |= dict.fromkeys(places, round_number + self._config.absent_rounds)
        return places

    def arriving(self, round_number: int) -> list[int]:
        """Returns the places that newcomers take after this round."""
        places = sorted(place for place, after in self._back.items() if after <= round_number)
        for place in places:
            del self._back[place]
        return places


def run_arm(
    arm: Arm, seed: int, stream: TokenStream, evaluations: int, say: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Trains an arm with a seed. Equal arguments give equal bits on one machine."""
    started = time.process_time()
    config, run = arm.config, arm.with_seed(seed)
    swarm = _start(config, run, stream)
    places = {peer.name: number for number, peer in enumerate(swarm.peers)}
    pace = _Pace(config.speeds if len(swarm.peers) > 1 else (), config.peers)
    churn = _Churn(config.churn, config.peers, seed)
    num_arrived = config.peers
    every = max(1, round(config.steps / evaluations))
    curve: list[tuple[int, float]] = []
    done = num_bytes = peer_steps = tokens = holders = 0

    def end(loss: float | None) -> Outcome:
        return Outcome(
            seed=seed,
            loss=loss,
            curve=curve,
            bytes_per_step=num_bytes / max(1, peer_steps),
            holders=holders / max(1, swarm.round) / run.model.num_experts,
            tokens=tokens,
            digest=swarm.peers[0].reference.digest.hex(),
            seconds=time.process_time() - started,
        )

    while done < config.steps:
        inner_steps = min(swarm.inner_steps, config.steps - done)
        present = [places[peer.name] for peer in swarm.peers]
        steps = pace.steps(inner_steps, present)
        finite = swarm.train(steps)
        peer_steps += sum(steps)
        tokens += sum(peer.tokens for peer in swarm.peers)
        if not finite:
            return end(None)
        going = churn.leaving(swarm.round + 1, present)
        leaving = [peer for peer in swarm.peers if places[peer.name] in going]
        if config.churn.sudden:
            for peer in leaving:
                swarm.remove(peer)
            leaving = []
        holders += sum(len(peer.model.held) for peer in swarm.peers)
        is_last = done + inner_steps == config.steps
        num_bytes += swarm.hold_round(leaving, last=is_last).payload_bytes
        if config.share_momentum is not None:
            num_bytes += share_momentum(swarm.peers, get_codec(config.share_momentum))
        for place in churn.arriving(swarm.round):
            newcomer = _join(swarm, config, run, stream, num_arrived, place)
            places[newcomer.name] = place
            num_arrived += 1
        before, done = done, done + inner_steps
        if done == config.steps or done // every > before // every:
            curve.append((done, swarm.reference_loss()))
            say(f"{done:,} of {config.steps:,} steps, loss {curve[-1][1]:.4f}")
    return end(curve[-1][1])


def _join(
    swarm: SequentialSwarm, config: ArmConfig, run: RunConfig, stream: TokenStream, number: int, place: int
) -> SequentialPeer:
    # A multiple of the number of peers keeps the kind of text of the place.
    return swarm.join(peer_sampler(config, run, stream, number * config.peers + place))


def _start(config: ArmConfig, run: RunConfig, stream: TokenStream) -> SequentialSwarm:
    """Returns the swarm of an arm before its first step."""
    everything = tuple(range(run.model.num_experts))
    samplers = [peer_sampler(config, run, stream, number) for number in range(config.peers)]
    if config.mode == "lone":
        return SequentialSwarm(run, samplers[:1], [everything])
    if config.mode == "central":
        training = replace(run.training, batch_size=run.training.batch_size * config.peers)
        joined: BatchSource = JoinedSamplers(samplers)
        return SequentialSwarm(replace(run, training=training), [joined], [everything])
    if config.mode in ("fedavg", "diloco"):
        outer = OuterNesterov(config.outer) if config.mode == "diloco" else None
        return SequentialSwarm(run, samplers, [everything] * config.peers, outer=outer)
    room = room_of(run, config.peers)
    rules = rules_of(run, room)
    holdings = initial_holdings(run.model.num_experts, config.peers, room, rules)
    return SequentialSwarm(run, samplers, holdings, room=room, rules=rules)
