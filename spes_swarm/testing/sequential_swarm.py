"""A swarm in one process whose peers train one after the other, so that equal arguments give equal bits.

Real swarms with the same seed differ by a few per cent, because rounds come at different steps each time. Here the
caller decides how many steps each peer does before a round. Models, gradients, statements, plans and the bookkeeping
of rounds are those of real peers, AdamW is torch's; processes, connections and leases are left out.

Shapes: N elements of the flat vector, E experts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.bitmap import num_bitmap_bytes
from spes_swarm.config.round_clock import RoundClock
from spes_swarm.config.run import RunConfig
from spes_swarm.config.schedule import learning_rate
from spes_swarm.data.sampler import Sampler, TokenStream
from spes_swarm.model.sparse_model import SparseModel, build_empty_model, build_model, flat_from_model, layout_of
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.consensus.reference import Reference
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.rounds.own_statement import difference_rms
from spes_swarm.protocol.rounds.plan import common_lineage, make_plan
from spes_swarm.protocol.rounds.round_state import Bounds, RoundState
from spes_swarm.protocol.rounds.statement import Statement, form_group, seal_statement
from spes_swarm.protocol.rounds.track_record import TrackRecords
from spes_swarm.training.gradients import Gradients, loss_weights
from spes_swarm.training.held_out import HeldOutText
from spes_swarm.training.live_weights import LiveWeights

_RUN_ID = "sequential"
_EVALUATION_BATCH = 16  # sequences
_SHORTENED = 0.99  # of its length; a contribution that keeps more counts as whole


def new_identities(count: int) -> list[Identity]:
    """Makes identities that are stored nowhere, in the order of their peer ids: member i of a group is peer i."""
    with tempfile.TemporaryDirectory(prefix="identities-") as name:
        made = [Identity.load_or_create(Path(name) / f"{number}.key") for number in range(count)]
    return sorted(made, key=lambda identity: identity.peer_id)


def initial_weights(run: RunConfig) -> FloatArray:
    """Returns the initial reference (N,) that a founder of this run draws."""
    model = run.model
    module = build_model(model.type, model.settings, run.training.seed, "cpu", init_cutoff=model.init_cutoff)
    return flat_from_model(module, layout_of(module))


def _evaluate(model: SparseModel, run: RunConfig, sampler: Sampler) -> float:
    batches = list(sampler.evaluation_batches(run.evaluation.sequences, _EVALUATION_BATCH))
    return HeldOutText(batches, 1, torch.device("cpu"), nullcontext).measure(model.module).mean


class SequentialPeer:
    """One peer of a `SequentialSwarm`."""

    def __init__(
        self,
        run: RunConfig,
        stream: TokenStream,
        identity: Identity,
        initial_N: FloatArray,
        held: Sequence[int],
        *,
        peer_seed: int,
        foreign_form: str = "fp32",
    ) -> None:
        """Starts from `initial_N`; `peer_seed` sets the order of its data, the others are those of a real peer."""
        training = run.training
        self.run, self.identity = run, identity
        self._clock = RoundClock.of(run)
        self.model = SparseModel(build_empty_model(run.model.type, run.model.settings), held, foreign_form=foreign_form)
        self.reference = Reference(self.model.layout, initial_N.copy())
        self.contribution_N = initial_N.copy()
        self.live = LiveWeights(self.model, self.reference.values_N, self.contribution_N, run)
        self.live.reset_to_reference()
        self.optimiser = torch.optim.AdamW(
            self.model.param_groups(training.weight_decay, training.decay_norm_and_bias),
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_eps,
        )
        self._gradients = Gradients(
            self.model,
            loss_weights(training),
            training.batch_size,
            device=torch.device("cpu"),
            autocast=nullcontext,
            warn=lambda *_: None,
        )
        self.sampler = Sampler(
            stream,
            sequence_length=training.sequence_length,
            run_seed=training.seed,
            peer_seed=peer_seed,
            holdout_fraction=run.evaluation.holdout_fraction,
        )
        self.tracks, self.lineage = TrackRecords(), Lineage({})
        # Tokens since the last commit, and those routed to each expert since it took part in a round.
        self.tokens, self.routed_E = 0, np.zeros(self.model.layout.num_experts, dtype=np.int64)

    def train(self, steps: int) -> None:
        """Does local steps after the last commit, and contributes the result."""
        training, inner_steps = self.run.training, self._clock.inner_steps_after(self.reference.round)
        parameters = [parameter for _, parameter in self.model.trainable_parameters()]
        for step in range(steps):
            at = self._clock.step_of(self.reference.round) + min(step, inner_steps)
            for group in self.optimiser.param_groups:
                group["lr"] = learning_rate(at, training)
            batch_BS = self.sampler.next_batch(training.batch_size)
            self._gradients.compute(batch_BS, progress=min(1.0, at / training.total_steps))
            torch.nn.utils.clip_grad_norm_(parameters, training.max_grad_norm)
            self.routed_E += self.model.pop_routed_tokens()
            self.optimiser.step()
            self.tokens += batch_BS.size
        self.live.contribute()

    def committed(self, deferred: Collection[int]) -> None:
        """Notes that a round has taken its work, except that on the `deferred` experts."""
        self.tokens = 0
        self.routed_E[[expert for expert in range(len(self.routed_E)) if expert not in deferred]] = 0

    def sealed_statement(self, number: int) -> bytes:
        """Returns the signed statement for a round."""
        commits, marks = self.lineage.to_lists()
        held = self.model.held
        statement = Statement(
            round=number,
            held=list(held),
            tokens=self.tokens,
            routed=[int(self.routed_E[expert]) for expert in held],
            rms=difference_rms(self.reference, self.contribution_N, held),
            usual_rms=list(self.tracks.usual_rms),
            vouched=self.tracks.to_vouchers(),
            bandwidth_mbps=100.0,
            reachable=True,
            versions=list(self.reference.versions),
            digests=list(self.reference.digests),
            commits=commits,
            marks=marks,
            room=len(held),
            fixed=False,
            leaving=False,
            leased=bytes(num_bitmap_bytes(self.model.layout.num_experts)),
        )
        return seal_statement(self.identity, _RUN_ID, statement)

    def eval_loss(self) -> float:
        """Returns the loss of its live weights on the run's held-out sequences, in nats per token."""
        return _evaluate(self.model, self.run, self.sampler)


@dataclass(frozen=True, kw_only=True)
class BoundsOfRound:
    """What the bounds did in a round."""

    shortened: int  # contributions scaled below 0.99, by length or direction
    faults: int  # that name a member


class SequentialSwarm:
    """Peers that hold these experts, and the rounds between them.

    Attributes:
        peers: in the order of their identities.
        round: the last committed round.
    """

    def __init__(
        self,
        run: RunConfig,
        stream: TokenStream,
        identities: Sequence[Identity],
        holdings: Sequence[Sequence[int]],
        *,
        initial_N: FloatArray | None = None,
        foreign_form: str = "fp32",
    ) -> None:
        """Starts all peers from `initial_N` (default: the run's initial weights)."""
        start_N = initial_weights(run) if initial_N is None else initial_N
        self._run, self._clock = run, RoundClock.of(run)
        self.round = 0
        self.peers = [
            SequentialPeer(
                run,
                stream,
                identity,
                start_N,
                held,
                peer_seed=len(identities) * run.training.seed + number,
                foreign_form=foreign_form,
            )
            for number, (identity, held) in enumerate(zip(identities, holdings, strict=True))
        ]

    def train(self, steps: Sequence[int]) -> None:
        """Lets each peer do so many steps, one peer after the other."""
        for peer, count in zip(self.peers, steps, strict=True):
            peer.train(count)

    def hold_round(self, *, last: bool = False) -> BoundsOfRound:
        """Holds a round in which no message is lost. The `last` one of a run synchronises the experts in any case.

        Raises:
            RuntimeError: a part is missing, or the peers end with different references.
        """
        number = self.round + 1
        config, layout = self._run.round, self.peers[0].model.layout
        sealed = [peer.sealed_statement(number) for peer in self.peers]
        group = form_group(_RUN_ID, number, sealed, len(layout.blocks))
        experts = last or self._clock.synchronises_experts(number)
        plan = make_plan(group, layout, config.part_elements, clip=config.clip, experts=experts)
        codec, bounds = get_codec(config.codec), Bounds.of(config.clip, config.max_update_rms)
        states = [
            RoundState(group, plan, index, peer.reference, peer.contribution_N, codec, bounds, peer.tracks)
            for index, peer in enumerate(self.peers)
        ]
        _exchange(states)
        shortened = {c.member for block in plan.blocks.values() for c in block.contributions if c.scale < _SHORTENED}
        faults = 0
        for state in states:
            shortened |= {member for member, left in state.deviations_left().items() if left < _SHORTENED}
            faults += len(state.refuse_excessive()) + len(state.clipped())
        lineage = common_lineage(group.members).after(group.round, group.id)
        for peer, state in zip(self.peers, states, strict=True):
            report = state.commit()
            if report.parts_missing:
                raise RuntimeError(f"round {number}: {report.parts_missing} parts are missing")
            state.record_commit(peer.tracks)
            peer.lineage = lineage
            peer.committed(plan.deferred)
            peer.live.follow(report.changed_blocks)
            peer.live.merge_if_due(number)
        if len({peer.reference.digest for peer in self.peers}) > 1:
            raise RuntimeError(f"round {number}: digests differ")
        self.round = number
        return BoundsOfRound(shortened=len(shortened), faults=faults)

    @property
    def inner_steps(self) -> int:
        """The local steps of each peer that belong to the next round; `train` takes any number."""
        return self._clock.inner_steps_after(self.round)

    def reference_loss(self) -> float:
        """Returns the loss of the reference, in fp32, on the run's held-out sequences, in nats per token."""
        first, model = self.peers[0], self._run.model
        whole = SparseModel(build_empty_model(model.type, model.settings), ())
        for block in whole.layout.blocks:
            whole.write_block(block.index, first.reference.values_N[block.start : block.stop])
        return _evaluate(whole, self._run, first.sampler)


def _exchange(states: Sequence[RoundState]) -> None:
    """Brings every contribution to its reducer, and every result to the members that want it."""
    for sender, state in enumerate(states):
        for reducer, target in enumerate(states):
            for part, contribution in state.plan.pushes(sender, reducer):
                target.accept(sender, state.push_frame(part, contribution))
    for receiver, state in enumerate(states):
        for index, part in state.wanted.items():
            frame = states[part.reducer].result_frame(index, receiver) if part.reducer != receiver else None
            if frame is not None:
                state.store_result(frame)
