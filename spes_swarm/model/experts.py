"""Sparse experts: a peer trains the experts that it holds, and only evaluates the others.

Tensor suffixes: T tokens, K experts per token (top-k), S = T * K routed copies of tokens, D model dim, F expert ffn
dim, E experts, H held experts, G groups of one pass (H held, or E - H foreign).

The method is SPES (arXiv 2602.11543): gradients and optimiser state exist for the held experts only, while routing is
not masked, so frozen experts still process tokens. Here held experts are `nn.Parameter`s and foreign experts are
buffers. Nothing else is needed: autograd and optimisers never see a foreign expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from spes_swarm.base.errors import ConfigError
from spes_swarm.model.kernels import ExpertKernel

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


class SparseExperts(nn.Module):
    """Drop-in replacement for one layer's experts module; any subset of the experts may be held.

    Slots order the experts: held ones first (ascending), then foreign ones (ascending). Tokens are sorted by slot, so
    the held rows come first, and two grouped passes cover all experts without concatenating weights.

    Attributes:
        gate_up_proj, down_proj: parameters (H, 2F, D) and (H, D, F) of the held experts.
        foreign_gate_up_proj, foreign_down_proj: buffers of the others, in `foreign_dtype`.
        held: the held experts, in slot order.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    foreign_gate_up_proj: Tensor
    foreign_down_proj: Tensor
    slot_of_expert: Tensor
    routed_tokens: Tensor

    def __init__(
        self,
        gate_up_EFD: Tensor,
        down_EDF: Tensor,
        act_fn: Callable[[Tensor], Tensor],
        held: Sequence[int],
        kernel: ExpertKernel,
        foreign_dtype: torch.dtype | None = None,
    ) -> None:
        """Copies the stacked weights (E, 2F, D), gate rows first, and (E, D, F) into held and foreign storage.

        `foreign_dtype` (default: that of the weights) is the dtype of foreign experts. bfloat16 halves their memory and
        saves a cast per step under bf16 autocast, but rounds: after `hold` has made such an expert a parameter, write
        its block from the reference.

        Raises:
            ConfigError: `held` names an expert twice or one that does not exist.
        """
        super().__init__()
        self.num_experts = down_EDF.shape[0]
        self.act_fn = act_fn
        self.kernel = kernel
        self.held = check_held(held, self.num_experts)
        for projection, stacked in zip(PROJECTIONS, (gate_up_EFD, down_EDF), strict=True):
            self._store(projection, stacked.detach().unbind(0), down_EDF.dtype, foreign_dtype or down_EDF.dtype)
        device = down_EDF.device
        self.register_buffer("slot_of_expert", self._slot_table(device), persistent=False)
        self.register_buffer(
            "routed_tokens", torch.zeros(self.num_experts, dtype=torch.int64, device=device), persistent=False
        )

    @property
    def foreign(self) -> tuple[int, ...]:
        """Experts that are not held, in slot order."""
        return tuple(expert for expert in range(self.num_experts) if expert not in self.held)

    def _slot_table(self, device: torch.device) -> Tensor:
        # argsort of the slot order is its inverse; built on the host because the table is tiny.
        return torch.argsort(torch.tensor(self.held + self.foreign, dtype=torch.int64)).to(device)

    def _store(
        self, projection: str, tensors: Sequence[Tensor], dtype: torch.dtype, foreign_dtype: torch.dtype
    ) -> None:
        """Makes the parameter and the buffer of one projection from one tensor per expert, in expert order."""
        shape, device = tensors[0].shape, tensors[0].device
        held = torch.empty((len(self.held), *shape), dtype=dtype, device=device)
        foreign = torch.empty((len(self.foreign), *shape), dtype=foreign_dtype, device=device)
        for stack, experts in ((held, self.held), (foreign, self.foreign)):
            for slot, expert in enumerate(experts):
                stack[slot].copy_(tensors[expert])
        self.register_parameter(projection, nn.Parameter(held))
        self.register_buffer(f"foreign_{projection}", foreign, persistent=False)

    def expert_tensor(self, name: str, expert: int) -> Tensor:
        """Returns one expert's `gate_up_proj` (2F, D) or `down_proj` (D, F): a detached view into live storage."""
        if name not in PROJECTIONS:
            raise ValueError(f"no such projection: {name}")
        if expert in self.held:
            parameter: Tensor = getattr(self, name)
            return parameter.detach()[self.held.index(expert)]
        buffer: Tensor = getattr(self, f"foreign_{name}")
        return buffer[self.foreign.index(expert)]

    def hold(self, held: Sequence[int]) -> None:
        """Changes which experts are held; all keep their values (foreign ones are rounded to `foreign_dtype`).

        The parameters become new objects without gradients. If `held` is unchanged, nothing happens.

        Raises:
            ConfigError: `held` names an expert twice or one that does not exist.
        """
        held = check_held(held, self.num_experts)
        if held == self.held:
            return
        current = {
            projection: [self.expert_tensor(projection, expert) for expert in range(self.num_experts)]
            for projection in PROJECTIONS
        }
        dtype, foreign_dtype = self.down_proj.dtype, self.foreign_down_proj.dtype
        self.held = held
        for projection in PROJECTIONS:
            self._store(projection, current.pop(projection), dtype, foreign_dtype)
        self.slot_of_expert = self._slot_table(self.slot_of_expert.device)

    def pop_routed_tokens(self) -> Tensor:
        """Returns the routed copies of tokens per expert (E,), int64, since the last call; counted in training only."""
        counts_E = self.routed_tokens.clone()
        self.routed_tokens.zero_()
        return counts_E

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the weighted sum of the chosen experts' outputs (T, D) for inputs (T, D), choices and weights (T, K).

        Gradients flow to the input and the routing weights through held and foreign experts alike.
        """
        x_TD = hidden_states
        T, K = top_k_index.shape
        H = len(self.held)
        slots_S, order_S = torch.sort(self.slot_of_expert[top_k_index.reshape(-1)], stable=True)
        every_slot_E = torch.arange(self.num_experts, device=slots_S.device)
        ends_E = torch.searchsorted(slots_S, every_slot_E, right=True, out_int32=True)
        self._count(ends_E)
        # The only device synchronisation per layer: where the held rows end.
        num_held_rows = int(ends_E[H - 1]) if H > 0 else 0
        x_SD = x_TD[order_S // K]
        outputs: list[Tensor] = []
        if H > 0:
            # Even without rows: held parameters then get a gradient of zeros, as in the untouched model.
            outputs.append(self._pass(x_SD[:num_held_rows], self.gate_up_proj, self.down_proj, ends_E[:H]))
        if num_held_rows < T * K:
            outputs.append(
                self._pass(
                    x_SD[num_held_rows:], self.foreign_gate_up_proj, self.foreign_down_proj, ends_E[H:] - num_held_rows
                )
            )
        y_SD = torch.cat(outputs) if outputs else x_SD
        # Back to token order. This is a permutation, so index_select's backward accumulates nothing.
        place_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(T * K, device=order_S.device))
        y_TKD = y_SD.index_select(0, place_S).view(T, K, x_TD.shape[1])
        # Summing over K keeps the order of additions fixed, where an index_add would race on CUDA.
        return (y_TKD * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)

    def _pass(self, x_TD: Tensor, gate_up_GFD: Tensor, down_GDF: Tensor, ends_G: Tensor) -> Tensor:
        gate_TF, up_TF = self.kernel(x_TD, gate_up_GFD, ends_G).chunk(2, dim=-1)
        return self.kernel(self.act_fn(gate_TF) * up_TF, down_GDF, ends_G)

    @torch.no_grad()
    def _count(self, ends_E: Tensor) -> None:
        # Activation checkpointing runs forward again inside backward; that second pass routes no new tokens.
        if not self.training or torch._C._current_graph_task_id() != -1:
            return
        counts_E = torch.diff(ends_E.to(torch.int64), prepend=ends_E.new_zeros(1, dtype=torch.int64))
        self.routed_tokens += counts_E[self.slot_of_expert]
