"""A transformers MoE as a peer trains it: with sparse experts, and addressed in blocks of the flat reference.

Tensor suffixes: N elements of the flat vector (or of one block of it), L layers with experts, E experts, H held
experts.

Parameter names are those of the untouched transformers model, e.g. `model.layers.0.mlp.experts.gate_up_proj`; they name
the slots of `Layout`. A `SparseModel` maps slots to live storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ConfigError
from spes_swarm.config.model_settings import config_from_settings, refusals
from spes_swarm.model.experts import PROJECTIONS, SparseExperts, check_held, check_supported, is_experts_module
from spes_swarm.model.foreign.storage import ForeignStorage
from spes_swarm.model.kernels import load_kernel
from spes_swarm.model.norm import replace_norms
from spes_swarm.model.truncation import redraw_tails
from spes_swarm.protocol.consensus.layout import Layout, TensorSlot


def build_model(
    model_type: str,
    settings: Mapping[str, Any],
    seed: int,
    device: torch.device | str,
    on_meta: bool = False,
    init_cutoff: float | None = None,
) -> PreTrainedModel:
    """Builds a freshly initialised causal language model in fp32: equal arguments give equal bits (on one machine).

    `settings` are fields of the configuration of a transformers type, e.g. "olmoe". Weights are always drawn on the
    CPU, so they do not depend on `device`; the global random state is unchanged. Attention is "sdpa" where the
    architecture supports it, else "eager". With `on_meta` there are shapes without memory (seed, device and init_cutoff
    are unused). `init_cutoff`: see `ModelConfig`.

    Raises:
        ConfigError: as `config_from_settings`, or transformers cannot build a causal language model from these.
    """
    config = config_from_settings(model_type, settings)
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise ConfigError(f"{model_type} has no causal language model in transformers")
    attention = "sdpa" if mapping[type(config)]._supports_sdpa else "eager"
    with torch.random.fork_rng(devices=[]), torch.device("meta" if on_meta else "cpu"):
        if not on_meta:
            torch.default_generator.manual_seed(seed)
        with refusals(f"transformers cannot build {model_type}"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
            )
        if init_cutoff is not None and not on_meta:
            redraw_tails(model.parameters(), config.initializer_range, init_cutoff)
    return model if on_meta or torch.device(device).type == "cpu" else model.to(device)


def build_empty_model(model_type: str, settings: Mapping[str, Any]) -> PreTrainedModel:
    """Builds the same model on the CPU with arbitrary weights, which must all be written before it is used.

    That takes next to no time, and no memory for a weight that is never written, e.g. one that is replaced first.

    Raises:
        ConfigError: as `build_model`.
    """
    with no_init_weights():
        model = build_model(model_type, settings, seed=0, device="cpu")
    model.tie_weights()  # a part of what was left out
    return model


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Returns every experts module of an untouched model by name, in layer order.

    Raises:
        ConfigError: there is none, or one has a layout that sparse experts do not support.
    """
    found = {name: module for name, module in model.named_modules() if is_experts_module(module)}
    if not found:
        raise ConfigError(f"{type(model).__name__} has no experts module: it is not a Mixture-of-Experts")
    for name, module in found.items():
        check_supported(name, module)
    return found


def replace_experts(
    model: nn.Module,
    held: Sequence[int],
    kernel: str = "torch",
    foreign_form: str = "fp32",
    foreign_storage: ForeignStorage | None = None,
) -> list[SparseExperts]:
    """Replaces every experts module in place (peak memory: one layer more than the model); returns the new ones.

    Raises:
        ConfigError: no experts module, an unsupported one, an unknown kernel, or an invalid `held`.
    """
    expert_kernel = load_kernel(kernel)
    replaced: list[SparseExperts] = []
    found = find_experts(model)
    names = list(found)
    while names:
        name = names.pop(0)
        # Popping the only other reference lets each old layer be freed as soon as it is copied.
        experts: Any = found.pop(name)
        sparse = SparseExperts(
            experts.gate_up_proj,
            experts.down_proj,
            experts.act_fn,
            held,
            expert_kernel,
            foreign_form,
            foreign_storage,
        )
        sparse.train(experts.training)
        model.set_submodule(name, sparse)
        replaced.append(sparse)
    return replaced


def layout_of(model: nn.Module) -> Layout:
    """Returns the layout of an untouched transformers model, which may be on the meta device.

    Stacked expert parameters go to the experts' blocks, all others to the shared one; tied weights count once, under
    the first of their names.

    Raises:
        ConfigError: no experts module, an unsupported one, or layers that differ in their number of experts.
    """
    stacked_names = {f"{name}.{projection}" for name in find_experts(model) for projection in PROJECTIONS}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    try:
        return Layout.build(
            shared={name: shape for name, shape in shapes.items() if name not in stacked_names},
            stacked={name: shape for name, shape in shapes.items() if name in stacked_names},
        )
    except ValueError as error:
        raise ConfigError(f"{type(model).__name__} cannot be laid out: {error}") from error


def flat_from_model(model: nn.Module, layout: Layout, out_N: FloatArray | None = None) -> FloatArray:
    """Returns the flat fp32 vector (N,) of an untouched model: the initial reference. `out_N` receives it, if given."""
    parameters = dict(model.named_parameters())
    flat_N = out_N if out_N is not None else np.empty(layout.num_elements, dtype=np.float32)
    for block in layout.blocks:
        for slot in block.slots:
            tensor = parameters[slot.name].detach()
            _as_tensor(flat_N, slot, 0).copy_(tensor if slot.expert is None else tensor[slot.expert])
    return flat_N


def _as_tensor(array_N: FloatArray, slot: TensorSlot, array_start: int) -> Tensor:
    """Returns a CPU tensor of the part of `array_N` that belongs to `slot`: a view where `array_N` is writable."""
    start = slot.start - array_start
    piece_N = array_N[start : start + slot.size]
    if not piece_N.flags.writeable:
        # torch has no read-only tensors and warns about such arrays; one slot's copy is small.
        piece_N = piece_N.copy()
    return torch.from_numpy(piece_N).view(slot.shape)


class SparseModel:
    """A transformers MoE whose experts modules are sparse, addressed in blocks of the flat layout.

    Attributes:
        module: the transformers model; call it to compute. Its experts modules and norms have been replaced.
        layout: layout of the untouched model.
        held: the experts that this peer trains, ascending.
        foreign_storage: where the other experts are kept.
        revision: counts writes of weights, and changes of the held experts; optimisers write past it.
    """

    def __init__(
        self,
        model: nn.Module,
        held: Sequence[int],
        kernel: str = "torch",
        foreign_form: str = "fp32",
        foreign_storage: ForeignStorage | None = None,
    ) -> None:
        """Takes over an untouched model on any device and replaces its experts and norms in place; see `SparseExperts`.

        Raises:
            ConfigError: the model is not a supported MoE, or `kernel` or `held` is invalid.
        """
        self.layout = layout_of(model)
        self.held = check_held(held, self.layout.num_experts)
        self.foreign_storage = foreign_storage or ForeignStorage()
        replace_experts(model, self.held, kernel, foreign_form, self.foreign_storage)
        replace_norms(model)
        self.module = model
        self.revision = 0
        self._experts = {name: m for name, m in model.named_modules() if isinstance(m, SparseExperts)}
        self._shared = {
            name: parameter
            for name, parameter in model.named_parameters()
            if name.rpartition(".")[0] not in self._experts
        }

    # Blocks of the flat vector

    def _copy(self, slot: TensorSlot, out: Tensor) -> None:
        if slot.expert is None:
            out.copy_(self._shared[slot.name].detach())
            return
        experts, _, projection = slot.name.rpartition(".")
        out.copy_(self._experts[experts].read(projection, slot.expert))

    def _write(self, slot: TensorSlot, values: Tensor) -> None:
        self.revision += 1
        if slot.expert is None:
            self._shared[slot.name].detach().copy_(values)
            return
        experts, _, projection = slot.name.rpartition(".")
        self._experts[experts].write(projection, slot.expert, values)

    def read_block(self, block_index: int, out_N: FloatArray) -> None:
        """Copies the live weights of a block into `out_N`: fp32, of the block's size; it may be strided.

        Raises:
            ValueError: `out_N` has the wrong size or dtype, or is read-only.
        """
        block = self.layout.blocks[block_index]
        _check_array(out_N, block.size)
        if not out_N.flags.writeable:
            raise ValueError("out_N is read-only")
        for slot in block.slots:
            self._copy(slot, _as_tensor(out_N, slot, block.start))

    def write_block(self, block_index: int, in_N: FloatArray) -> None:
        """Overwrites the live weights of a block (shared, held or foreign) with `in_N`: fp32, of the block's size.

        Raises:
            ValueError: `in_N` has the wrong size or dtype.
        """
        block = self.layout.blocks[block_index]
        _check_array(in_N, block.size)
        for slot in block.slots:
            self._write(slot, _as_tensor(in_N, slot, block.start))

    def write_slot(self, slot: TensorSlot, values: FloatArray) -> None:
        """Overwrites one tensor, e.g. of a merged expert, with `values` (fp32, `slot.size` elements in any shape).

        Raises:
            ValueError: `values` has the wrong size or dtype.
        """
        flat_N = values.reshape(-1)
        _check_array(flat_N, slot.size)
        self._write(slot, _as_tensor(flat_N, slot, slot.start))

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The names of the experts modules, in the order of their layers."""
        return tuple(self._experts)

    # Training

    def set_held(self, held: Sequence[int], optimiser: torch.optim.Optimizer | None = None) -> None:
        """Changes the held experts; all weights keep their values, as far as `SparseExperts.hold` does.

        The experts' parameters become new objects, so the optimiser of this model must be passed here. Its
        parameters are swapped, the state rows of experts that stay held are kept, and those of new experts start at
        zero. Its step count is per tensor, so Adam's bias correction is already over for a new expert.

        Raises:
            ConfigError: `held` names an expert twice or one that does not exist; nothing has changed then.
        """
        held = check_held(held, self.layout.num_experts)
        if held == self.held:
            return
        self.revision += 1
        swapped: dict[nn.Parameter, nn.Parameter] = {}
        for experts in self._experts.values():
            old = [getattr(experts, projection) for projection in PROJECTIONS]
            experts.set_held(held)
            swapped.update(zip(old, (getattr(experts, projection) for projection in PROJECTIONS), strict=True))
        if optimiser is not None:
            _swap_parameters(optimiser, swapped, self.held, held)
        self.held = held

    def trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the names and parameters that are trained: shared ones and the held experts' stacks (H, ...)."""
        for name, parameter in self.module.named_parameters():
            if parameter.numel() > 0:
                yield name, parameter

    def param_groups(self, weight_decay: float, decay_vectors: bool = False) -> list[dict[str, Any]]:
        """Returns two groups for an optimiser: matrices with weight decay; vectors (norms, biases) only if told to.

        Empty stacks (nothing held) are included, so that `hold` can swap them for others later.
        """
        matrices = [parameter for parameter in self.module.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in self.module.parameters() if parameter.dim() <= 1]
        return [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": weight_decay if decay_vectors else 0.0},
        ]

    def expert_stacks(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Returns the stacks of the held experts, of all layers: gate and up in one (H, 2F, D), and down (H, D, F).

        They are empty if nothing is held, and other objects after `hold`.
        """
        layers = self._experts.values()
        return [experts.gate_up_proj for experts in layers], [experts.down_proj for experts in layers]

    def pop_routed_tokens(self) -> npt.NDArray[np.int64]:
        """Returns the routed copies of tokens (L, E) per layer with experts since the last call; training only."""
        counts = [experts.pop_routed_tokens() for experts in self._experts.values()]
        counts_LE: npt.NDArray[np.int64] = torch.stack(counts).cpu().numpy()
        return counts_LE


def _check_array(array_N: FloatArray, size: int) -> None:
    if array_N.dtype != np.float32 or array_N.shape != (size,):
        raise ValueError(f"expected float32 of shape ({size},), got {array_N.dtype} of shape {array_N.shape}")


def _swap_parameters(
    optimiser: torch.optim.Optimizer,
    swapped: Mapping[nn.Parameter, nn.Parameter],
    held_before: Sequence[int],
    held_after: Sequence[int],
) -> None:
    """Replaces old stacks by new ones, and keeps the state rows of experts that are in both."""
    kept = [(held_before.index(e), row) for row, e in enumerate(held_after) if e in held_before]
    for group in optimiser.param_groups:
        group["params"] = [swapped.get(parameter, parameter) for parameter in group["params"]]
    for old, new in swapped.items():
        if old not in optimiser.state:
            continue
        state = optimiser.state.pop(old)
        for key, value in state.items():
            # A step count has no rows; moments have one per expert.
            if isinstance(value, Tensor) and value.dim() > 0:
                shape = (len(held_after), *value.shape[1:])
                moved = torch.zeros(shape, dtype=value.dtype, device=value.device, pin_memory=value.is_pinned())
                for row_before, row_after in kept:
                    moved[row_after].copy_(value[row_before])
                state[key] = moved
        optimiser.state[new] = state
