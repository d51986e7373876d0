"""The model that a peer trains, and what must change along with its weights.

Shape: E experts.
"""

from __future__ import annotations

from spes_swarm.config.run import RunConfig
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK
from spes_swarm.protocol.consensus.reference import ReferenceTable
from spes_swarm.protocol.ownership.lease_table import ExpertChange
from spes_swarm.protocol.rounds.outcome import CommitReport
from spes_swarm.storage.checkpoint import Checkpoint
from spes_swarm.training.health.divergence import DivergenceGuard
from spes_swarm.training.health.loss_watch import LossWatch
from spes_swarm.training.live_weights import LiveWeights
from spes_swarm.training.local_work import CountArray, LocalWork, TakenWork
from spes_swarm.training.optimiser.registry import make_optimiser
from spes_swarm.training.optimiser.saved_state import load_optimiser_arrays
from spes_swarm.training.optimiser.warm_up import WarmUp
from spes_swarm.training.setup import Compute


class Learner:
    """The model, its optimiser, and what is known of the steps since the last commit.

    Attributes:
        round: the commit that the weights follow.
        step: the optimiser steps of this peer, also those before a restart.
    """

    def __init__(self, run: RunConfig, compute: Compute) -> None:
        self.round = 0
        self.step = 0
        self.model = compute.model
        self.optimiser = make_optimiser(compute.model, run.training, form=compute.optimizer_states)
        self.live = LiveWeights(compute.model, compute.reference_N, compute.contribution_N, run)
        self.work = LocalWork(compute.model.layout.num_experts)
        self.warm_up = WarmUp(run.ownership.warmup_steps)
        self.watch = LossWatch()
        self.divergence = DivergenceGuard()

    def load_reference(self, table: ReferenceTable) -> None:
        """Starts from the reference, as a newcomer, and applies the merge that the others applied to it."""
        self.round = table.round
        self.reset()

    def reset(self) -> None:
        """Resets the weights to the reference, with fresh moments."""
        self.watch.restart()
        self.live.reset_to_reference()
        self.live.merge_if_due(self.round)
        self.optimiser.state.clear()

    def restart(self) -> None:
        """Begins again from the reference: the work since the last commit is lost."""
        self.reset()
        self.warm_up.start(self.model.held)
        self.work.discard()

    def restore(self, checkpoint: Checkpoint, table: ReferenceTable) -> None:
        """Starts from a checkpoint, except what the swarm's reference, of `table`, outdates.

        The contribution is overwritten.
        """
        model, live, meta = self.model, self.live, checkpoint.meta
        layout, held, late = model.layout, model.held, table.round > meta.round
        self.round, self.step = table.round, meta.step
        # The saved optimiser state is that of the experts held then; those that are held again keep their moments.
        model.set_held(meta.held, self.optimiser)
        load_optimiser_arrays(self.optimiser, dict(model.trainable_parameters()), checkpoint.optimiser())
        model.set_held(held, self.optimiser)
        # Only now: an expert that was not held then may have been rounded.
        live.reset_to_reference()
        if not late:  # the saved blocks, written below, are merged already
            live.merge_if_due(table.round)
        checkpoint.live(layout, live.contribution_N)
        behind = table.digest.hex() != meta.reference_digest
        routed = [0] * layout.num_experts
        for block in layout.trained_blocks(expert for expert in held if expert in meta.held):
            # Shared weights move in every round, so the saved ones are useful only if no round was missed.
            # An expert that no other peer has trained meanwhile continues from its saved weights.
            unchanged = block.index != SHARED_BLOCK and table.versions[block.index] == meta.versions[block.index]
            if not behind or unchanged:
                model.write_block(block.index, live.contribution_N[block.where])
                if block.expert is not None:
                    routed[block.expert] = meta.routed[block.expert]
        if late:
            live.merge_if_due(table.round, meta.round)
        self.work.restore(*((0, 0) if behind else (meta.steps_in_round, meta.tokens)), routed)

    def take_step(self, tokens: int, routed_E: CountArray, loss: float) -> None:
        """Takes an optimiser step with gradients of so many tokens, of which `routed_E` copies went to the experts."""
        self.divergence.stepped()
        self.watch.add_step(loss)
        self.warm_up.step(self.model, self.optimiser.step)
        self.work.add_step(tokens, routed_E, loss)
        self.step += 1

    def skip_step(self) -> bool:
        """Skips a step whose loss or gradients are NaN or infinite. Returns True if the weights are to be given up.

        Raises:
            DivergenceError: see `DivergenceGuard`.
        """
        self.watch.add_bad_step()
        return self.divergence.record_bad_step()

    def follow(self, commit: CommitReport, taken: TakenWork) -> float | None:
        """Applies a commit to the weights and the work; returns the mean loss of the steps taken, None if unknown."""
        self.round = commit.round
        returned = commit.taken_back is not None
        self.live.follow(commit.changed_blocks, entirely=returned and not commit.keeps_work)
        train_loss = None
        if not returned:
            train_loss = self.work.commit(taken, commit.deferred_experts)
        elif not commit.keeps_work:
            experts = (self.model.layout.blocks[index].expert for index in commit.changed_blocks)
            self.work.take_back(expert for expert in experts if expert is not None)
        self.divergence.committed()
        return train_loss

    def catch_up(self, round_number: int) -> None:
        """Adopts a reference that was fetched in place of a round; the work since the last commit is kept."""
        previous, self.round = self.round, round_number
        self.live.follow_all()
        self.live.merge_if_due(self.round, previous)
        self.watch.restart()
        self.watch.committed(judged=False)

    def change_experts(self, change: ExpertChange) -> None:
        """Gives up and adopts experts, as a commit has decided."""
        self.model.set_held(change.held, self.optimiser)
        changed = [*change.gained, *change.lost]
        self.live.reset_to_reference(self.model.layout.expert_block(expert).index for expert in changed)
        self.work.forget_experts(changed)
        self.warm_up.stop(change.lost)
        self.warm_up.start(change.gained)
