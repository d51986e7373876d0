"""The health of the routers: how evenly tokens spread over the experts, and which experts are dead.

A step only adds counts that the model already keeps; all else happens once per commit. What makes an expert dead is
defined in `protocol.members.routing_report`. A layer's number counts the layers with experts, from 0.

Suffixes: L layers with experts, E experts, P pairs of layer and expert.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spes_swarm.base.arrays import FloatArray
from spes_swarm.metrics import events
from spes_swarm.model.merge import layer_similarities
from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.port.commands import Port
from spes_swarm.protocol.members.routing_report import (
    ALIVE_LOAD,
    DEAD_LOAD,
    DEAD_STEPS,
    MAX_DEAD,
    NOTHING_REPORTED,
    RoutingReport,
    dead_by_majority,
    packed_loads,
)
from spes_swarm.training.gradients import GradientSource
from spes_swarm.training.setup import Reporter

_MIN_FAIR_SHARE = 1000  # tokens that an expert would get if loads were even, before it is judged
_SIMILARITY_ELEMENTS = 1 << 15  # of each expert and layer; the error of a cosine is about 0.006
_NAMED = 8  # dead experts in one message

LayerArray = npt.NDArray[np.float64]


def loads(routed_LE: npt.NDArray[np.int64]) -> LayerArray:
    """Returns each expert's load (L, E) as a multiple of its fair share, which is the mean over a layer's experts."""
    fair_L1 = routed_LE.mean(axis=1, keepdims=True)
    loads_LE: LayerArray = np.divide(routed_LE, fair_L1, out=np.ones(routed_LE.shape), where=fair_L1 > 0)
    return loads_LE


def load_entropies(load_LE: LayerArray) -> LayerArray:
    """Returns the entropy (L,) of each layer's loads, as a fraction of its maximum log E; 1 for a single expert."""
    E = load_LE.shape[1]
    if E == 1:
        return np.ones(len(load_LE))
    share_LE = load_LE / E
    log_LE = np.log(share_LE, out=np.zeros_like(share_LE), where=share_LE > 0)
    entropy_L: LayerArray = -(share_LE * log_LE).sum(axis=1) / math.log(E)
    return entropy_L


class DeadExperts:
    """Decides which experts are dead on this peer's tokens; an expert of a layer is `layer * E + expert`.

    Attributes:
        dead: those that are dead.
        judged: True after the first judgement.
        low_steps_P: for each, the local steps with a load below `DEAD_LOAD` since it last was at least `ALIVE_LOAD`.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.dead: frozenset[int] = frozenset()
        self.judged = False
        self.low_steps_P = np.zeros(num_layers * num_experts, dtype=np.int64)
        self._routed_LE = np.zeros((num_layers, num_experts), dtype=np.int64)  # since the last judgement
        self._steps = 0

    def judge(self, routed_LE: npt.NDArray[np.int64], steps: int) -> bool:
        """Takes the routed tokens (L, E) of some steps. Returns False if they are too few to tell, and adds them up."""
        self._routed_LE += routed_LE
        self._steps += steps
        if self._routed_LE.mean(axis=1).min() < _MIN_FAIR_SHARE:
            return False
        load_P = loads(self._routed_LE).reshape(-1)
        self.low_steps_P[load_P < DEAD_LOAD] += self._steps
        self.low_steps_P[load_P >= ALIVE_LOAD] = 0
        self._routed_LE[:] = 0
        self._steps = 0
        self.dead = frozenset(np.flatnonzero(self.low_steps_P >= DEAD_STEPS).tolist())
        self.judged = True
        return True


class RoutingHealth:
    """Collects the routers' choices between commits, judges them at each, and warns once when an expert dies."""

    def __init__(
        self, model: SparseModel, reference_N: FloatArray, gradients: GradientSource, network: Port, reporter: Reporter
    ) -> None:
        self._model = model
        self._reference_N = reference_N
        self._gradients = gradients
        self._network = network
        self._reporter = reporter
        shape = len(model.layer_names), model.layout.num_experts
        self._routed_LE = np.zeros(shape, dtype=np.int64)  # since the last commit
        self._held_copies = 0  # of these, routed to held experts
        self._steps = 0
        self._own = DeadExperts(*shape)
        self._dead_in_swarm: frozenset[int] = frozenset()
        self.report = NOTHING_REPORTED  # for this peer's record

    def add_step(self, routed_LE: npt.NDArray[np.int64], held: Sequence[int]) -> None:
        """Adds the routed copies of a step's tokens (L, E); `held` are the experts that it trained."""
        self._routed_LE += routed_LE
        self._steps += 1
        self._held_copies += int(routed_LE[:, list(held)].sum())

    def commit(self, round_number: int, *, evaluated: bool) -> dict[str, Any]:
        """Judges the steps since the last commit; returns fields of `RoundMetrics`, those that are known.

        With `evaluated`, the experts of the reference are compared, too. Writes a `routing` event then, and whenever an
        expert dies or recovers.
        """
        entropy_L = self._gradients.pop_router_entropy()
        copies = int(self._routed_LE.sum())
        if copies == 0:
            return {}
        load_LE, E = loads(self._routed_LE), self._routed_LE.shape[1]
        figures: dict[str, Any] = {
            "load_entropy": _fraction(float(load_entropies(load_LE).mean())),
            "least_load": float(load_LE.min()),
            "held_share": self._held_copies / copies,
        }
        details: dict[str, Any] = {
            "load": load_LE.round(3).tolist(),
            "load_entropy": load_entropies(load_LE).round(4).tolist(),
            "held_share": figures["held_share"],
        }
        if entropy_L is not None and np.isfinite(entropy_L).all() and E > 1:
            relative_L = entropy_L / math.log(E)
            figures["router_entropy"] = _fraction(float(relative_L.mean()))
            details["router_entropy"] = relative_L.round(4).tolist()
        if evaluated:
            mean_L, max_L = self._similarities()
            figures["expert_similarity"] = _fraction(float(mean_L.mean()))
            figures["expert_similarity_max"] = _fraction(float(max_L.max()))
            details |= {"similarity_mean": mean_L.round(4).tolist(), "similarity_max": max_L.round(4).tolist()}
        changed = self._judge()
        self._routed_LE[:] = 0
        self._held_copies = self._steps = 0
        dead = self._own.dead
        self.report = RoutingReport(
            loads=packed_loads(load_LE.mean(axis=0).tolist()),
            dead=tuple(sorted(dead)[:MAX_DEAD]),
            num_dead=len(dead) if self._own.judged else None,
        )
        figures["dead_experts"] = self.report.num_dead
        if evaluated or changed:
            details["dead"] = [divmod(pair, E) for pair in sorted(dead)]
            details["dead_in_swarm"] = [divmod(pair, E) for pair in sorted(self._dead_in_swarm)]
            self._reporter.metrics.write(events.Routing(round=round_number, **details))
        return figures

    def _judge(self) -> bool:
        """Finds out which experts are dead, here and in the swarm; returns True if any has died or recovered."""
        before = self._own.dead, self._dead_in_swarm
        if not self._own.judge(self._routed_LE, self._steps):
            return False
        view = self._network.view
        votes, others = (Counter(view.dead_votes), view.routing_reports) if view is not None else (Counter[int](), 0)
        votes.update(self._own.dead)
        self._dead_in_swarm = frozenset(dead_by_majority(votes, others + 1))
        self._report_changes(self._dead_in_swarm - before[1], before[1] - self._dead_in_swarm)
        return before != (self._own.dead, self._dead_in_swarm)

    def _report_changes(self, died: Collection[int], recovered: Collection[int]) -> None:
        if died:
            verb, whose = ("is", "its") if len(died) == 1 else ("are", "their")
            named = self._named(died)
            self._reporter.warn(
                "dead_expert", f"{named} {verb} dead: less than {DEAD_LOAD:.0%} of {whose} fair share of tokens"
            )
        if recovered:
            self._reporter.say(f"{self._named(recovered)} {'gets' if len(recovered) == 1 else 'get'} tokens again")

    def _named(self, pairs: Collection[int]) -> str:
        E = self._routed_LE.shape[1]
        named = [f"expert {pair % E} of layer {pair // E}" for pair in sorted(pairs)[:_NAMED]]
        return ", ".join(named) + (f" and {len(pairs) - _NAMED} more" if len(pairs) > _NAMED else "")

    def _similarities(self) -> tuple[LayerArray, LayerArray]:
        """Mean and maximum (L,) over pairs of different experts of the reference; 0 for a single expert."""
        model, means, maxima = self._model, [], []
        found = layer_similarities(self._reference_N, model.layout, _SIMILARITY_ELEMENTS)
        for name in model.layer_names:
            cosines = found[name][np.triu_indices(len(found[name]), 1)]
            means.append(float(cosines.mean()) if cosines.size else 0.0)
            maxima.append(float(cosines.max()) if cosines.size else 0.0)
        return np.array(means), np.array(maxima)


def _fraction(value: float) -> float:
    """Removes rounding errors from a value between 0 and 1; a negative cosine counts as 0."""
    return min(1.0, max(0.0, value))
