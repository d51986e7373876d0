"""What rank 0 tells the other ranks to do, as JSON: nothing that a rank receives is unpickled."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

from spes_swarm.model.activation_checkpointing import checkpoint_activations
from spes_swarm.model.compilation import compile_layers
from spes_swarm.model.foreign.storage import new_storage
from spes_swarm.model.losses import LossWeights
from spes_swarm.model.sparse_model import SparseModel, build_empty_model


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Build the model that all ranks have, and be ready to compute gradients; weights follow with the first step."""

    model_type: str  # of transformers
    settings: dict[str, Any]  # fields of its configuration
    held: tuple[int, ...]  # the experts that the peer trains
    kernel: str
    foreign_experts: str  # form of the others: one of `frozen_stack.FORMS`
    foreign_storage: str = "device"  # where they are: see `new_storage`
    output_dir: str = "."  # of the peer
    log: tuple[str, str, str] | None = None  # run, peer and level of the log in output_dir; None: the rank writes none
    activation_checkpointing: str
    compile: bool  # the layers
    precision: str  # of matrix products: "fp32", or "bf16" by autocast
    micro_batch_size: int  # most sequences at a time
    num_threads: int | None  # None: torch decides
    losses: LossWeights
    device_type: str  # "cpu" or "cuda"

    def build(self, device: torch.device) -> SparseModel:
        """Returns the model without its weights. No device ever holds the whole of it in fp32.

        Raises:
            ConfigError: as `build_model` and `SparseModel`, or the architecture does not support one of the settings.
        """
        empty = build_empty_model(self.model_type, self.settings)
        storage = new_storage(self.foreign_storage, device)
        sparse = SparseModel(empty, self.held, self.kernel, self.foreign_experts, storage)
        checkpoint_activations(sparse.module, self.activation_checkpointing)
        if self.compile:
            compile_layers(sparse.module)
        sparse.module.to(device)
        return sparse

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Reads what JSON has made of the fields."""
        return cls(**{**fields, "held": tuple(fields["held"]), "losses": LossWeights(**fields["losses"])})


@dataclass(frozen=True, kw_only=True)
class Step:
    """Receive weights and a batch, and compute the gradients of a share of it."""

    held: tuple[int, ...]
    all_weights: bool  # or only the trained ones: the others have not changed since the last step
    batch_shape: tuple[int, int]  # sequences and tokens
    progress: float  # fraction of the whole training that is done

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Reads what JSON has made of the fields."""
        sequences, tokens = fields["batch_shape"]
        return cls(**{**fields, "held": tuple(fields["held"]), "batch_shape": (sequences, tokens)})


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The peer has left the swarm: end."""

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Reads what JSON has made of the fields."""
        return cls(**fields)


Order = Replica | Step | Stop
_KINDS: dict[str, type[Order]] = {kind.__name__: kind for kind in (Replica, Step, Stop)}


def encode_order(order: Order) -> bytes:
    """Returns an order as JSON."""
    return json.dumps({"order": type(order).__name__, "fields": asdict(order)}).encode()


def decode_order(encoded: bytes) -> Order:
    """Inverse of `encode_order`."""
    read = json.loads(encoded)
    return _KINDS[read["order"]].from_fields(read["fields"])
