"""Measures the cost of the bounds of a round for an honest swarm: the same training with and without them.

    .venv/bin/python scripts/bench_bounds.py --rounds 60 --seeds 3

Real swarms with the same seed differ by a few per cent, because rounds come at different steps each time. Here four
peers train in turn in one process, with the quickstart's model, schedule and data, and hold their rounds with the real
statements, plan and bookkeeping. The seed determines how many steps each peer does before a round: about the inner
steps; in every tenth round, as in one that is called early, three peers have only begun and one has done three times
its share. Both runs of a seed have the same steps on the same data. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from spes_swarm.base.bitmap import num_bitmap_bytes
from spes_swarm.config.file import default_config_path, load_config
from spes_swarm.config.run import RunConfig
from spes_swarm.config.schedule import learning_rate
from spes_swarm.data.corpus import STDLIB, open_corpus
from spes_swarm.data.sampler import Sampler, TokenStream
from spes_swarm.data.tokenizer import load_tokenizer
from spes_swarm.model.losses import LossWeights, cross_entropy_of_sequences, language_model_loss
from spes_swarm.model.sparse_model import SparseModel, build_model, flat_from_model
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.consensus.reference import Reference
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.rounds.own_statement import difference_rms
from spes_swarm.protocol.rounds.plan import common_lineage, make_plan
from spes_swarm.protocol.rounds.round_state import Bounds, RoundState
from spes_swarm.protocol.rounds.statement import Statement, form_group, seal_statement
from spes_swarm.protocol.rounds.track_record import TrackRecords
from spes_swarm.training.held_out import held_out_loss
from spes_swarm.training.live_weights import LiveWeights

RUN_ID = "bounds"
NUM_PEERS = 4
EARLY_EVERY = 10  # rounds
EVALUATION_BATCH = 16


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    seed: int
    bounded: bool
    eval_loss: float
    shortened: int  # contributions of a member to a round scaled below 0.99, by length or direction
    named: int  # faults that name a member


class Peer:
    """One peer; its rounds are held by `hold_round`."""

    def __init__(self, run: RunConfig, number: int, stream: TokenStream, identity: Identity) -> None:
        self.run, self.identity = run, identity
        model = run.model
        module = build_model(model.type, model.settings, run.training.seed, "cpu", init_cutoff=model.init_cutoff)
        experts = run.model.num_experts
        held = range(number * experts // NUM_PEERS, (number + 1) * experts // NUM_PEERS + 1)  # neighbours share one
        self.held = tuple(sorted({expert % experts for expert in held}))
        self.model = SparseModel(module, ())
        self.reference = Reference(self.model.layout, np.zeros(self.model.layout.num_elements, np.float32))
        fresh = build_model(model.type, model.settings, run.training.seed, "cpu", init_cutoff=model.init_cutoff)
        self.reference.values_N[:] = flat_from_model(fresh, self.model.layout)
        self.reference.finish(0, [])
        self.model.hold(self.held)
        self.contribution_N = self.reference.values_N.copy()
        self.live = LiveWeights(self.model, self.reference.values_N, self.contribution_N, run)
        self.optimiser = torch.optim.AdamW(
            self.model.param_groups(run.training.weight_decay, run.training.decay_norm_and_bias),
            betas=(run.training.adam_beta1, run.training.adam_beta2),
            eps=run.training.adam_eps,
        )
        self.weights = LossWeights(
            load_balance=run.training.load_balance_weight,
            router_z=run.training.router_z_weight,
            logit_z=run.training.logit_z_weight,
        )
        self.sampler = Sampler(
            stream,
            sequence_length=run.training.sequence_length,
            run_seed=run.training.seed,
            peer_seed=NUM_PEERS * run.training.seed + number,
            holdout_fraction=run.evaluation.holdout_fraction,
        )
        self.tracks, self.lineage = TrackRecords(), Lineage({})
        self.tokens, self.routed_E = 0, np.zeros(experts, dtype=np.int64)

    def train(self, steps: int) -> None:
        """Does local steps after the last commit."""
        training, inner_steps = self.run.training, self.run.round.inner_steps
        self.tokens, self.routed_E = 0, np.zeros_like(self.routed_E)
        parameters = dict(self.model.trainable_parameters())
        self.model.module.train()
        for step in range(steps):
            at = self.reference.round * inner_steps + min(step, inner_steps)
            for group in self.optimiser.param_groups:
                group["lr"] = learning_rate(at, training)
            ids_BS = torch.from_numpy(self.sampler.next_batch(training.batch_size))
            losses = language_model_loss(
                self.model.module, ids_BS, self.weights, self.held, min(1.0, at / training.total_steps)
            )
            self.optimiser.zero_grad(set_to_none=True)
            losses.total.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
            torch.nn.utils.clip_grad_norm_(parameters.values(), training.max_grad_norm)
            self.routed_E += self.model.pop_routed_tokens()
            self.optimiser.step()
            self.tokens += ids_BS.numel()
        self.live.contribute()

    def sealed_statement(self, number: int) -> bytes:
        """The statement for a round, signed."""
        commits, marks = self.lineage.to_lists()
        statement = Statement(
            round=number,
            held=list(self.held),
            tokens=self.tokens,
            routed=[int(self.routed_E[expert]) for expert in self.held],
            rms=difference_rms(self.reference, self.contribution_N, self.held),
            usual_rms=list(self.tracks.usual_rms),
            vouched=self.tracks.to_vouchers(),
            bandwidth_mbps=100.0,
            reachable=True,
            versions=list(self.reference.versions),
            digests=list(self.reference.digests),
            commits=commits,
            marks=marks,
            room=len(self.held),
            fixed=False,
            leaving=False,
            leased=bytes(num_bitmap_bytes(self.model.layout.num_experts)),
        )
        return seal_statement(self.identity, RUN_ID, statement)


def hold_round(peers: list[Peer], number: int) -> tuple[int, int]:
    """Holds a round without packet loss; returns (contributions shortened, faults)."""
    config, layout = peers[0].run.round, peers[0].model.layout
    group = form_group(RUN_ID, number, [p.sealed_statement(number) for p in peers], len(layout.blocks))
    plan = make_plan(group, layout, config.part_elements, clip=config.clip)
    codec, bounds = get_codec(config.codec), Bounds.of(config.clip, config.max_update_rms)
    states = [
        RoundState(group, plan, i, p.reference, p.contribution_N, codec, bounds, p.tracks) for i, p in enumerate(peers)
    ]
    for sender, state in enumerate(states):
        for reducer, target in enumerate(states):
            for part, contribution in plan.pushes(sender, reducer):
                target.accept(sender, state.push_frame(part, contribution))
    for receiver, state in enumerate(states):
        for index, part in state.wanted.items():
            frame = states[part.reducer].result_frame(index, receiver) if part.reducer != receiver else None
            if frame is not None:
                state.store_result(frame)
    shortened = {c.member for block in plan.blocks.values() for c in block.contributions if c.scale < 0.99}
    named = 0
    for state in states:
        shortened |= {member for member, left in state.deviations_left().items() if left < 0.99}
        named += len(state.refuse_excessive()) + len(state.clipped())
    lineage = common_lineage(group.members).after(group.round, group.id)
    for p, state in zip(peers, states, strict=True):
        report = state.commit()
        if report.parts_missing:
            raise SystemExit(f"round {number}: {report.parts_missing} parts are missing")
        state.record_commit(p.tracks)
        p.lineage = lineage
        p.live.follow(report.changed_blocks)
        p.live.merge_if_due(number)
    if len({p.reference.digest for p in peers}) > 1:
        raise SystemExit(f"round {number}: digests differ")
    return len(shortened), named


def steps_of_round(number: int, inner_steps: int, rng: np.random.Generator) -> list[int]:
    """Draws how many steps each peer does before a round."""
    if number % EARLY_EVERY == 0:
        steps = rng.integers(1, 4, NUM_PEERS)
        steps[rng.integers(NUM_PEERS)] = 3 * inner_steps
    else:
        steps = rng.integers(round(0.7 * inner_steps), round(1.7 * inner_steps), NUM_PEERS)
    return [int(count) for count in steps]


def train(run: RunConfig, rounds: int, stream: TokenStream, identities: list[Identity]) -> Outcome:
    """Trains one run and returns its result."""
    rng = np.random.default_rng(run.training.seed)
    peers = [Peer(run, i, stream, identity) for i, identity in enumerate(identities)]
    shortened = named = 0
    for number in range(1, rounds + 1):
        for peer, steps in zip(peers, steps_of_round(number, run.round.inner_steps, rng), strict=True):
            peer.train(steps)
        more = hold_round(peers, number)
        shortened, named = shortened + more[0], named + more[1]
    losses: list[float] = []
    for batch_BS in peers[0].sampler.evaluation_batches(run.evaluation.sequences, EVALUATION_BATCH):
        losses += cross_entropy_of_sequences(peers[0].model.module, torch.from_numpy(batch_BS)).tolist()
    return Outcome(run.training.seed, run.round.clip > 0, held_out_loss(losses).mean, shortened, named)


def main() -> int:
    """Runs each seed with the bounds and without."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("runs/bounds.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = load_config(default_config_path()).run
    assert run is not None
    stream = TokenStream(open_corpus(STDLIB, load_tokenizer(run.tokenizer.name)))
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="bounds-") as name:
        identities = [Identity.load_or_create(Path(name) / f"{i}.key") for i in range(NUM_PEERS)]
    identities.sort(key=lambda identity: identity.peer_id)
    print(f"{'seed':>4} {'without':>8} {'with':>8} {'change':>8} {'shortened':>10} {'named':>6}")
    steps = options.rounds * run.round.inner_steps
    for seed in range(options.seeds):
        training = replace(run.training, seed=seed, total_steps=steps)
        pair = [
            train(
                replace(run, training=training, round=replace(run.round, clip=clip)), options.rounds, stream, identities
            )
            for clip in (0.0, run.round.clip)
        ]
        outcomes += pair
        without, bounded = pair
        change = bounded.eval_loss / without.eval_loss - 1
        print(
            f"{seed:>4} {without.eval_loss:>8.4f} {bounded.eval_loss:>8.4f} {change:>+8.2%} "
            f"{bounded.shortened:>10} {bounded.named:>6}",
            flush=True,
        )
    without_mean, bounded_mean = (
        statistics.fmean(o.eval_loss for o in outcomes if o.bounded is bounded) for bounded in (False, True)
    )
    print(f"mean {without_mean:>8.4f} {bounded_mean:>8.4f} {bounded_mean / without_mean - 1:>+8.2%}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    content = {"rounds": options.rounds, "outcomes": [asdict(outcome) for outcome in outcomes]}
    options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
