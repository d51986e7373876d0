"""A swarm in one process whose peers train one after the other, so that equal arguments give equal bits.

Real swarms with the same seed differ by a few per cent, because rounds come at different steps each time. Here the
caller decides how many steps each peer does before a round. Models, gradients, optimiser, statements, plans and the
bookkeeping of rounds are those of real peers. Processes, connections, signatures and the exchange of leases are left
out: a signature takes as long as a step of the smallest models.

Shapes: N elements of the flat vector, E experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

import msgpack
import numpy as np
import torch

from spes_swarm.base.arrays import FloatArray
from spes_swarm.config.round_clock import RoundClock
from spes_swarm.config.run import RunConfig
from spes_swarm.config.schedule import learning_rate
from spes_swarm.data.batch_source import BatchSource
from spes_swarm.data.sampler import Sampler, TokenStream
from spes_swarm.model.sparse_model import SparseModel, build_empty_model, build_model, flat_from_model, layout_of
from spes_swarm.protocol.averaging.commitments import Signer, SigningKey
from spes_swarm.protocol.bitmap import num_bitmap_bytes
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.consensus.reference import Reference
from spes_swarm.protocol.ownership.lease_table import reassign_group
from spes_swarm.protocol.ownership.reassignment import Rules, choose_experts
from spes_swarm.protocol.rounds.outcome import Bounds
from spes_swarm.protocol.rounds.own_statement import difference_rms
from spes_swarm.protocol.rounds.plan import Plan, common_lineage, make_plan
from spes_swarm.protocol.rounds.round_state import RoundState
from spes_swarm.protocol.rounds.statement import Group, Member, Statement
from spes_swarm.protocol.rounds.track_record import TrackRecords
from spes_swarm.training.gradients import Gradients, loss_weights
from spes_swarm.training.health.held_out import HeldOutText
from spes_swarm.training.live_weights import LiveWeights
from spes_swarm.training.optimiser.registry import make_optimiser
from spes_swarm.training.optimiser.warm_up import WarmUp

_RUN_ID = "sequential"
_KEY = SigningKey.generate()  # of all peers
_EVALUATION_BATCH = 16  # sequences
_SHORTENED = 0.99  # of its length; a contribution that keeps more counts as whole


class OuterStep(Protocol):
    """An optimiser of the reference, whose gradient is the mean of the contributions (DiLoCo)."""

    def step(self, before_N: FloatArray, averaged_N: FloatArray) -> FloatArray:
        """Returns the new reference (N,) from that before the round and the one with all averages applied."""


def own_orders(run: RunConfig, stream: TokenStream, peer_seeds: Iterable[int]) -> list[Sampler]:
    """Returns one sampler for each peer; its seed sets the order of its data."""
    training, holdout = run.training, run.evaluation.holdout_fraction
    return [
        Sampler(
            stream,
            sequence_length=training.sequence_length,
            run_seed=training.seed,
            peer_seed=peer_seed,
            holdout_fraction=holdout,
        )
        for peer_seed in peer_seeds
    ]


def initial_weights(run: RunConfig) -> FloatArray:
    """Returns the initial reference (N,) that a founder of this run draws."""
    model = run.model
    module = build_model(model.type, model.settings, run.training.seed, "cpu", init_cutoff=model.init_cutoff)
    return flat_from_model(module, layout_of(module))


def _evaluate(model: SparseModel, run: RunConfig, sampler: BatchSource) -> float:
    batches = list(sampler.evaluation_batches(run.evaluation.sequences, _EVALUATION_BATCH))
    return HeldOutText(batches, 1, torch.device("cpu"), nullcontext).measure(model.module).mean


class SequentialPeer:
    """One peer of a `SequentialSwarm`."""

    def __init__(
        self,
        run: RunConfig,
        name: str,
        sampler: BatchSource,
        reference: Reference,
        held: Sequence[int],
        *,
        room: int | None = None,
        foreign_form: str = "fp32",
    ) -> None:
        """Starts from a reference of its own; `room` is the most experts that it may hold (default: those it does)."""
        training = run.training
        self.run, self.name, self.sampler = run, name, sampler
        self.room = len(held) if room is None else room
        self._clock = RoundClock.of(run)
        self.model = SparseModel(build_empty_model(run.model.type, run.model.settings), held, foreign_form=foreign_form)
        self.reference = reference
        self.contribution_N = reference.values_N.copy()
        self.live = LiveWeights(self.model, reference.values_N, self.contribution_N, run)
        self.live.reset_to_reference()
        self.optimiser = make_optimiser(self.model, training)
        self.warm_up = WarmUp(run.ownership.warmup_steps)
        self._gradients = Gradients(
            self.model,
            loss_weights(training),
            training.batch_size,
            device=torch.device("cpu"),
            autocast=nullcontext,
            warn=lambda *_: None,
        )
        self.tracks, self.lineage = TrackRecords(), Lineage({})
        self.losses: list[float] = []  # of the steps since the last commit, in nats per target
        # Tokens since the last commit, all and by layer and expert; those of an expert since it took part in a round.
        num_experts = self.model.layout.num_experts
        self.tokens, self.routed_E = 0, np.zeros(num_experts, dtype=np.int64)
        self.routed_LE = np.zeros((len(self.model.layer_names), num_experts), dtype=np.int64)

    def train(self, steps: int) -> bool:
        """Does local steps after the last commit, and contributes the result; returns True if it is finite."""
        training, inner_steps = self.run.training, self._clock.inner_steps_after(self.reference.round)
        parameters = [parameter for _, parameter in self.model.trainable_parameters()]
        for step in range(steps):
            at = self._clock.step_of(self.reference.round) + min(step, inner_steps)
            self.optimiser.set_learning_rate(learning_rate(at, training))
            batch_BS = self.sampler.next_batch(training.batch_size)
            self.losses.append(self._gradients.compute(batch_BS, progress=min(1.0, at / training.total_steps)))
            torch.nn.utils.clip_grad_norm_(parameters, training.max_grad_norm)
            routed_LE = self.model.pop_routed_tokens()
            self.routed_LE += routed_LE
            self.routed_E += routed_LE.sum(axis=0)
            self.warm_up.step(self.model, self.optimiser.step)
            self.tokens += batch_BS.size
        return self.live.contribute()

    def committed(self, deferred: Collection[int]) -> None:
        """Notes that a round has taken its work, except that on the `deferred` experts."""
        self.tokens = 0
        self.losses = []
        self.routed_LE[:] = 0
        self.routed_E[[expert for expert in range(len(self.routed_E)) if expert not in deferred]] = 0

    def statement(self, number: int, *, leaving: bool = False) -> Statement:
        """Returns the statement for a round."""
        commits, marks = self.lineage.to_lists()
        held = self.model.held
        return Statement(
            round=number,
            held=list(held),
            tokens=self.tokens,
            routed=[int(self.routed_E[expert]) for expert in held],
            rms=difference_rms(self.reference, self.contribution_N, held),
            usual_rms=list(self.tracks.usual_rms),
            vouched=self.tracks.to_vouchers(number),
            bandwidth_mbps=100.0,
            reachable=True,
            versions=list(self.reference.versions),
            digests=list(self.reference.digests),
            commits=commits,
            marks=marks,
            room=self.room,
            fixed=False,
            leaving=leaving,
            leased=bytes(num_bitmap_bytes(self.model.layout.num_experts)),
            certificate=b"",
        )

    def set_held(self, held: Sequence[int]) -> None:
        """Changes its experts after a commit, as a trainer does; those that are new start without moments."""
        before, after = set(self.model.held), set(held)
        if before == after:
            return
        self.model.set_held(held, self.optimiser)
        layout = self.model.layout
        self.live.reset_to_reference(layout.expert_block(expert).index for expert in sorted(before ^ after))
        self.routed_E[sorted(before ^ after)] = 0
        self.warm_up.stop(before - after)
        self.warm_up.start(after - before)

    def eval_loss(self) -> float:
        """Returns the loss of its live weights on the run's held-out sequences, in nats per token."""
        return _evaluate(self.model, self.run, self.sampler)


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """What a round moved, and what its bounds did."""

    shortened: int  # contributions scaled below 0.99, by length or direction
    faults: int  # that name a member
    payload_bytes: int  # sent by all members together: contributions and results
    opposition: float  # the largest of a member, as a reducer saw it on average; see reducing.opposition
    ignored: int  # members whose work did not count


class SequentialSwarm:
    """Peers that hold these experts, and the rounds between them.

    Attributes:
        peers: in the order of their names, which is that of their arrival.
        round: the last committed round.
    """

    def __init__(
        self,
        run: RunConfig,
        samplers: Sequence[BatchSource],
        holdings: Sequence[Sequence[int]],
        *,
        room: int | None = None,
        rules: Rules | None = None,
        outer: OuterStep | None = None,
        initial_N: FloatArray | None = None,
        foreign_form: str = "fp32",
    ) -> None:
        """Starts all peers from `initial_N` (default: the run's initial weights).

        Args:
            run: its settings.
            samplers: the data of each peer.
            holdings: the experts of each peer.
            room: the most experts that a peer may hold; None: as many as it starts with.
            rules: by which experts change hands after each commit; None: they never do.
            outer: an optimiser of the reference; None: the reference takes over the averages.
            initial_N: the first reference (N,).
            foreign_form: in which peers store the experts that they do not hold.
        """
        start_N = initial_weights(run) if initial_N is None else initial_N
        self._run, self._room, self._rules, self._outer = run, room, rules, outer
        self._clock = RoundClock.of(run)
        self._foreign_form = foreign_form
        self._num_arrived = 0
        self._whole: SparseModel | None = None
        self.round = 0
        self.peers: list[SequentialPeer] = []
        layout = layout_of(build_empty_model(run.model.type, run.model.settings))
        for sampler, held in zip(samplers, holdings, strict=True):
            self._add(sampler, Reference(layout, start_N.copy()), held)

    def _add(self, sampler: BatchSource, reference: Reference, held: Sequence[int]) -> SequentialPeer:
        name = f"peer-{self._num_arrived:06d}"
        self._num_arrived += 1
        peer = SequentialPeer(
            self._run, name, sampler, reference, held, room=self._room, foreign_form=self._foreign_form
        )
        self.peers.append(peer)
        return peer

    def join(self, sampler: BatchSource) -> SequentialPeer:
        """Adds a peer that has the reference and chooses its experts, as one that joins a real swarm does."""
        first = self.peers[0]
        reference = Reference(first.reference.layout, first.reference.values_N.copy())
        reference.adopt(first.reference.round, first.reference.versions)
        num_experts = first.model.layout.num_experts
        holdings = {peer.name: peer.model.held for peer in self.peers}
        want = self._room if self._room is not None else self._run.experts_per_peer
        held = choose_experts(holdings, f"peer-{self._num_arrived:06d}", num_experts, want, self._rules)
        peer = self._add(sampler, reference, held)
        peer.lineage = first.lineage
        peer.live.merge_if_due(self.round)
        peer.warm_up.start(held)
        return peer

    def remove(self, peer: SequentialPeer) -> None:
        """Removes a peer without notice; the work since the last commit and its moments are lost."""
        self.peers.remove(peer)

    def train(self, steps: Sequence[int]) -> bool:
        """Trains each peer for its number of steps, one after the other; returns True if all weights are finite."""
        finite = [peer.train(count) for peer, count in zip(self.peers, steps, strict=True)]
        return all(finite)

    def hold_round(self, leaving: Collection[SequentialPeer] = (), *, last: bool = False) -> RoundOutcome:
        """Holds a round in which no message is lost; it is the last one of the peers that are `leaving`.

        The `last` round of a run synchronises the experts in any case.

        Raises:
            RuntimeError: a part is missing, or the peers end with different references.
        """
        number = self.round + 1
        config, layout = self._run.round, self.peers[0].model.layout
        group = _unsigned_group(
            number, {peer.name: peer.statement(number, leaving=peer in leaving) for peer in self.peers}
        )
        experts = last or self._clock.synchronises_experts(number)
        plan = make_plan(
            group,
            layout,
            config.part_elements,
            clip=config.clip,
            most_of_newcomers=self._run.most_of_newcomers,
            experts=experts,
        )
        codec, result_codec = get_codec(config.codec), get_codec(config.codec_of_results)
        bounds = Bounds.of(config.clip, config.max_update_rms)
        states = [
            RoundState(
                group, plan, index, peer.reference, peer.contribution_N, codec, bounds, _KEY, peer.tracks, result_codec
            )
            for index, peer in enumerate(self.peers)
        ]
        payload_bytes = _exchange(states)
        shortened = {c.member for block in plan.blocks.values() for c in block.contributions if c.scale < _SHORTENED}
        faults = 0
        for state in states:
            shortened |= {
                member for member, left in state.reduction.agreements.deviations_left().items() if left < _SHORTENED
            }
            faults += len(state.results.refuse_excessive()) + len(state.reduction.clipped())
        self._commit(group, states)
        if self._rules is not None:
            held = reassign_group(group, plan, layout.num_experts, self._rules)
            for peer in self.peers:
                if peer not in leaving:
                    peer.set_held(held[peer.name])
        for peer in leaving:
            self.remove(peer)
        seen = [found for state in states for found in state.reduction.agreements.opposition(plan.claims).values()]
        opposition = max([0.0, *map(fmean, seen)])
        return RoundOutcome(
            shortened=len(shortened),
            faults=faults,
            payload_bytes=payload_bytes,
            opposition=opposition,
            ignored=len(plan.ignored),
        )

    def _commit(self, group: Group, states: Sequence[RoundState]) -> None:
        lineage = common_lineage(group.members).after(group.round, group.id)
        before_N = self.peers[0].reference.values_N.copy() if self._outer is not None else None
        stepped_N: FloatArray | None = None
        for peer, state in zip(self.peers, states, strict=True):
            report = state.commit()
            if report.parts_missing:
                raise RuntimeError(f"round {group.round}: {report.parts_missing} parts are missing")
            state.record_commit(peer.tracks)
            peer.lineage = lineage
            peer.committed(state.plan.deferred)
            if self._outer is not None and before_N is not None:
                if stepped_N is None:
                    stepped_N = self._outer.step(before_N, peer.reference.values_N)
                peer.reference.values_N[:] = peer.contribution_N[:] = stepped_N
                peer.reference.finish(group.round, [(block, group.round) for block in report.changed_blocks])
            peer.live.follow(report.changed_blocks)
            peer.live.merge_if_due(group.round)
        if len({peer.reference.digest for peer in self.peers}) > 1:
            raise RuntimeError(f"round {group.round}: digests differ")
        self.round = group.round

    @property
    def inner_steps(self) -> int:
        """The local steps of each peer that belong to the next round; `train` takes any number."""
        return self._clock.inner_steps_after(self.round)

    def reference_loss(self) -> float:
        """Returns the loss of the reference, in fp32, on the run's held-out sequences, in nats per token."""
        first, model = self.peers[0], self._run.model
        if self._whole is None:
            self._whole = SparseModel(build_empty_model(model.type, model.settings), ())
        for block in self._whole.layout.blocks:
            self._whole.write_block(block.index, first.reference.values_N[block.start : block.stop])
        return _evaluate(self._whole, self._run, first.sampler)


def _unsigned_group(number: int, statements: Mapping[str, Statement]) -> Group:
    members = tuple(Member(name, statements[name], signer=Signer(name, _KEY.public)) for name in sorted(statements))
    encoded = tuple(bytes(msgpack.packb([m.peer_id, m.statement.model_dump()])) for m in members)
    return Group(_RUN_ID, number, members, encoded)


def _exchange(states: Sequence[RoundState]) -> int:
    """Brings every contribution to its reducer, and every result to the members that want it; returns the bytes."""
    plan: Plan = states[0].plan
    num_bytes = 0
    for part in plan.parts:
        reduction = states[part.reducer].reduction
        for contribution in plan.block_of(part).contributions:
            if contribution.member == part.reducer:
                reduction.accept_own(part, contribution)
            else:
                frame = states[contribution.member].contributions.push_frame(part)
                reduction.accept(contribution.member, frame)
                num_bytes += len(frame.payload)
        reduction.complete(part.index)  # it may have no contributions
    for receiver, state in enumerate(states):
        for index, part in state.results.wanted.items():
            result = states[part.reducer].results.frame(index, receiver) if part.reducer != receiver else None
            if result is not None:
                state.results.store(result)
                num_bytes += len(result.payload)
    return num_bytes
