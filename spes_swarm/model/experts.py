"""Sparse experts: a peer trains the experts that it holds, and only evaluates the others.

Tensor suffixes: T tokens, K experts per token (top-k), D model dim, F expert ffn dim, E experts, H held experts, R rows
and C columns of either matrix of an expert.

The method is SPES (arXiv 2602.11543): gradients and optimiser state exist for the held experts only, while routing is
not masked, so frozen experts still process tokens. Here held experts are `nn.Parameter`s, and foreign experts are
buffers that autograd and optimisers never see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from spes_swarm.base.errors import ConfigError
from spes_swarm.model.expert_mlp import ExpertWeights, Routing, expert_mlp
from spes_swarm.model.foreign.frozen_stack import FrozenStack
from spes_swarm.model.foreign.storage import ForeignStorage
from spes_swarm.model.kernels import ExpertKernel, LoopKernel

# The two stacked parameters of a transformers v5 experts module: (E, 2F, D), gate rows first, and (E, D, F).
PROJECTIONS = ("gate_up_proj", "down_proj")
# Layout flags that transformers' `use_experts_implementation` sets, with the only values that are supported here.
SUPPORTED_FLAGS = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
    "_is_expert_parallel": False,
}


def is_experts_module(module: nn.Module) -> bool:
    """Returns True if a module stacks the matrices of several experts: its down projection has three dimensions."""
    down = getattr(module, "down_proj", None)
    return isinstance(down, nn.Parameter) and down.dim() == 3


def check_supported(name: str, module: nn.Module) -> None:
    """Refuses experts whose function is not `down(act(gate(x)) * up(x))` on the standard stacked layout.

    The flags and `_apply_gate` are what transformers itself dispatches on, so together they define the function.

    Raises:
        ConfigError: the message names the module and the first unsupported property.
    """
    where = f"experts module {name} ({type(module).__name__})"
    for flag, wanted in SUPPORTED_FLAGS.items():
        value = getattr(module, flag, None)
        if value is not wanted:
            raise ConfigError(f"{where} is not supported: {flag} is {value}, only {wanted} is")
    if getattr(type(module), "_apply_gate", None) is not moe._default_apply_gate:
        raise ConfigError(f"{where} is not supported: it has a custom gating function")
    gate_up, down = (getattr(module, projection, None) for projection in PROJECTIONS)
    if not isinstance(gate_up, nn.Parameter) or not isinstance(down, nn.Parameter):
        raise ConfigError(f"{where} is not supported: it has no parameters {' and '.join(PROJECTIONS)}")
    E, D, F = down.shape
    if tuple(gate_up.shape) != (E, 2 * F, D):
        raise ConfigError(f"{where} is not supported: gate_up_proj is {tuple(gate_up.shape)}, expected {(E, 2 * F, D)}")
    own = {key for key, _ in module.named_parameters()} - set(PROJECTIONS)
    if own:
        raise ConfigError(f"{where} is not supported: it has additional parameters {', '.join(sorted(own))}")


def check_held(held: Sequence[int], num_experts: int) -> tuple[int, ...]:
    """Returns the held experts in ascending order.

    Raises:
        ConfigError: an expert does not exist or is named twice.
    """
    if len(set(held)) != len(held) or any(not 0 <= expert < num_experts for expert in held):
        raise ConfigError(f"held experts must be distinct numbers from 0 to {num_experts - 1}, got {list(held)}")
    return tuple(sorted(held))


@dataclass(frozen=True)
class _Fetched:
    """Other peers' experts for one pass of a layer: the stack, values and scales of each projection."""

    stacks: Mapping[str, tuple[FrozenStack, Tensor, Tensor]]

    def matrices(self, projection: str, dtype: torch.dtype, slots: slice) -> Tensor:
        stack, values, scales = self.stacks[projection]
        return stack.expand(dtype, slots, (values, scales))


class SparseExperts(nn.Module):
    """Drop-in replacement for one layer's experts module; any subset of the experts may be held.

    Slots order the experts: held ones first (ascending), then foreign ones (ascending). Tokens are sorted by slot, so
    the held rows come first, and two grouped passes cover all experts without concatenating weights.

    Attributes:
        gate_up_proj, down_proj: parameters (H, 2F, D) and (H, D, F) of the held experts.
        foreign: stacks of the same matrices of the others, by projection.
        held: the held experts, in slot order.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    slot_of_expert: Tensor
    routed_tokens: Tensor

    def __init__(
        self,
        gate_up_EFD: Tensor,
        down_EDF: Tensor,
        act_fn: Callable[[Tensor], Tensor],
        held: Sequence[int],
        kernel: ExpertKernel,
        foreign_form: str = "fp32",
        foreign_storage: ForeignStorage | None = None,
    ) -> None:
        """Copies the stacked weights (E, 2F, D), gate rows first, and (E, D, F) into held and foreign storage.

        `foreign_form` is one of `frozen_stack.FORMS`. All but fp32 round: after `hold` has made such an expert a
        parameter, write its block from the reference. `foreign_storage` is that of the whole model; None: the device.

        Raises:
            ConfigError: `held` names an expert twice or one that does not exist.
        """
        super().__init__()
        self.num_experts = down_EDF.shape[0]
        self.act_fn = act_fn
        self.kernel = kernel
        # Replaced by memory plans, which have no data to sort.
        self.route: Callable[[Tensor, int, int], Routing] = partial(Routing.of, dispatch=kernel.dispatch)
        self.held = check_held(held, self.num_experts)
        self.foreign = nn.ModuleDict()
        self._storage = foreign_storage or ForeignStorage()
        device = down_EDF.device
        for projection, stacked in zip(PROJECTIONS, (gate_up_EFD, down_EDF), strict=True):
            self._store(projection, stacked.detach().unbind(0), stacked.dtype, foreign_form, device)
        self.register_buffer("slot_of_expert", self._slot_table(device), persistent=False)
        self.register_buffer(
            "routed_tokens", torch.zeros(self.num_experts, dtype=torch.int64, device=device), persistent=False
        )

    @property
    def others(self) -> tuple[int, ...]:
        """Experts that are not held, in slot order."""
        return tuple(expert for expert in range(self.num_experts) if expert not in self.held)

    def _slot_table(self, device: torch.device) -> Tensor:
        # argsort of the slot order is its inverse; built on the host because the table is tiny.
        return torch.argsort(torch.tensor(self.held + self.others, dtype=torch.int64)).to(device)

    def _store(
        self, projection: str, tensors: Sequence[Tensor], dtype: torch.dtype, form: str, device: torch.device
    ) -> None:
        """Makes the parameter and the frozen stack of one projection from one tensor per expert, in expert order."""
        R, C = tensors[0].shape
        held_HRC = torch.empty((len(self.held), R, C), dtype=dtype, device=device)
        for slot, expert in enumerate(self.held):
            held_HRC[slot].copy_(tensors[expert])
        frozen = FrozenStack((len(self.others), R, C), form, device, self._storage)
        for slot, expert in enumerate(self.others):
            frozen.write(slot, tensors[expert])
        self.register_parameter(projection, nn.Parameter(held_HRC))
        self.foreign[projection] = frozen

    def _frozen(self, projection: str) -> FrozenStack:
        frozen = self.foreign[projection]
        assert isinstance(frozen, FrozenStack)
        return frozen

    def read(self, projection: str, expert: int) -> Tensor:
        """Returns one expert's `gate_up_proj` (2F, D) or `down_proj` (D, F), detached."""
        if expert in self.held:
            parameter: Tensor = getattr(self, projection)
            return parameter.detach()[self.held.index(expert)]
        return self._frozen(projection).read(self.others.index(expert))

    def write(self, projection: str, expert: int, matrix: Tensor) -> None:
        """Overwrites one expert's `gate_up_proj` (2F, D) or `down_proj` (D, F); others' experts are rounded."""
        if expert in self.held:
            parameter: Tensor = getattr(self, projection)
            parameter.detach()[self.held.index(expert)].copy_(matrix)
        else:
            self._frozen(projection).write(self.others.index(expert), matrix)

    def set_held(self, held: Sequence[int]) -> None:
        """Changes which experts are held; all keep their values, rounded if they have ever been in a frozen stack.

        The parameters become new objects without gradients. If `held` is unchanged, nothing happens.

        Raises:
            ConfigError: `held` names an expert twice or one that does not exist.
        """
        held = check_held(held, self.num_experts)
        if held == self.held:
            return
        self._storage.before_write()
        current = {
            projection: [self.read(projection, expert) for expert in range(self.num_experts)]
            for projection in PROJECTIONS
        }
        self.held = held
        device = self.slot_of_expert.device
        for projection in PROJECTIONS:
            form = self._frozen(projection).form
            self._store(projection, current.pop(projection), self.down_proj.dtype, form, device)
        self.slot_of_expert = self._slot_table(device)

    def pop_routed_tokens(self) -> Tensor:
        """Returns the routed copies of tokens per expert (E,), int64, since the last call; counted in training only."""
        counts_E = self.routed_tokens.clone()
        self.routed_tokens.zero_()
        return counts_E

    def fetch(self) -> ExpertWeights:
        """Fetches the experts that are not held; see `expert_mlp.ForeignExperts`."""
        fetched = iter(self._storage.fetch(self.foreign))
        return _Fetched({name: (self._frozen(name), next(fetched), next(fetched)) for name in PROJECTIONS})

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the weighted sum of the chosen experts' outputs (T, D) for inputs (T, D), choices and weights (T, K).

        Gradients flow to the input and the routing weights through held and foreign experts alike.
        """
        routing = self.route(self.slot_of_expert[top_k_index], self.num_experts, len(self.held))
        self._count(routing.ends_E)
        held = self.gate_up_proj, self.down_proj
        return expert_mlp(hidden_states, top_k_weights, held, self, routing, self.kernel, self.act_fn)

    @torch.no_grad()
    def _count(self, ends_E: Tensor) -> None:
        # Activation checkpointing runs forward again inside backward; that second pass routes no new tokens.
        if not self.training or torch._C._current_graph_task_id() != -1:
            return
        counts_E = torch.diff(ends_E.to(torch.int64), prepend=ends_E.new_zeros(1, dtype=torch.int64))
        self.routed_tokens += counts_E[self.slot_of_expert]


@contextmanager
def kernel_of_any_dtype(model: nn.Module) -> Iterator[None]:
    """Computes the experts of a model with the loop inside: some kernels multiply in bf16 only."""
    before = [(module, module.kernel, module.route) for module in model.modules() if isinstance(module, SparseExperts)]
    try:
        for module, *_ in before:
            module.kernel, module.route = LoopKernel(), Routing.of
        yield
    finally:
        for module, kernel, route in before:
            module.kernel, module.route = kernel, route
