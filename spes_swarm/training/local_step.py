"""A local step: gradients of one batch, clipped, and an optimiser step if they are finite.

Shapes: B sequences, S tokens, L layers with experts, E experts.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch

from spes_swarm.config.round_clock import RoundClock
from spes_swarm.config.run import RunConfig
from spes_swarm.config.schedule import learning_rate
from spes_swarm.data.batch_source import BatchSource
from spes_swarm.metrics import events
from spes_swarm.model.flops import ModelFlops
from spes_swarm.port.commands import Port
from spes_swarm.training.gradients import Gradients, GradientSource, loss_weights
from spes_swarm.training.health.routing_health import RoutingHealth
from spes_swarm.training.learner import Learner
from spes_swarm.training.profiling import span
from spes_swarm.training.ranks.shared_gradients import SharedGradients
from spes_swarm.training.saving import CheckpointSaver
from spes_swarm.training.setup import Compute, Reporter
from spes_swarm.training.throughput import Throughput, peak_flops


@dataclass(eq=False)
class LocalSteps:
    """Takes the local steps of a peer."""

    run: RunConfig
    compute: Compute
    learner: Learner
    sampler: BatchSource
    network: Port
    saver: CheckpointSaver
    reporter: Reporter
    loss: float | None = field(default=None, init=False)  # of the last step; may be NaN or infinite

    def __post_init__(self) -> None:
        compute, training, num_ranks = self.compute, self.run.training, 1
        self.tokens = compute.batch_size * training.sequence_length  # of one step
        own = Gradients(
            compute.model,
            loss_weights(training),
            compute.micro_batch_size or compute.batch_size,
            device=compute.device,
            autocast=compute.autocast,
            warn=self.reporter.warn,
        )
        self.gradients: GradientSource = own
        if compute.ranks is not None:
            self.gradients = SharedGradients(compute.ranks, compute.model, own, compute.device)
            num_ranks = compute.ranks.placement.world_size
        self.routing = RoutingHealth(compute.model, compute.reference_N, self.gradients, self.network, self.reporter)
        self.throughput = Throughput(peak_flops(compute.device, compute.precision), num_ranks)
        self._clock = RoundClock.of(self.run)
        self._flops = ModelFlops.of(compute.model, training.sequence_length)

    def take(self) -> bool:
        """Trains on the next batch. Returns False if the live weights are to be given up.

        Raises:
            DataError: the data could not be read.
            DivergenceError: see `DivergenceGuard`.
            MemoryError, RuntimeError: see `is_out_of_memory`.
            RankError: another rank of this peer has ended.
        """
        started = time.monotonic()
        learner, model, training = self.learner, self.learner.model, self.run.training
        in_round = min(learner.work.steps, self._clock.inner_steps_after(learner.round))
        global_step = self._clock.step_of(learner.round) + in_round
        rate = learning_rate(global_step, training)
        learner.optimiser.set_learning_rate(rate)
        with span("data"):
            batch_BS = self.sampler.next_batch(self.compute.batch_size)
        self.loss = self.gradients.compute(batch_BS, progress=min(1.0, global_step / training.total_steps))
        parameters = [parameter for _, parameter in model.trainable_parameters()]
        norm = torch.nn.utils.clip_grad_norm_(parameters, training.max_grad_norm)
        self.saver.before_step()
        routed_LE = self.gradients.pop_routed_tokens()
        if not (math.isfinite(self.loss) and math.isfinite(float(norm))):
            self.reporter.note_fault("nonfinite", "skipped a step with a NaN or infinite loss or gradient")
            return not learner.skip_step()
        routed_E = routed_LE.sum(axis=0)
        learner.take_step(self.tokens, routed_E, self.loss)
        self.routing.add_step(routed_LE, model.held)
        flops = self._flops.step(self.tokens, int(routed_E[list(model.held)].sum()))
        self.throughput.add(self.tokens, flops.model, time.monotonic() - started)
        self._write_event(self.loss, rate)
        return True

    def _write_event(self, loss: float, rate: float) -> None:
        self.reporter.metrics.write(
            events.Step(
                round=self.learner.round,
                step=self.learner.step,
                loss=loss,
                tokens=self.tokens,
                tokens_per_second=self.throughput.tokens_per_second,
                teraflops=self.throughput.teraflops,
                mfu=self.throughput.mfu,
                lr=rate,
                data=self.sampler.positions() or None,
            )
        )
