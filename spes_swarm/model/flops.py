"""How many floating-point operations the matrix products of a training step take.

A multiplication and an addition are two operations. What is left out (norms, activation functions, softmaxes, routing)
takes time, but less than a hundredth of the operations. Attention counts every pair of positions of a sequence, also
those that a causal mask hides, as is usual for figures of MFU (PaLM, arXiv 2204.02311, appendix B).

A sparse peer computes the output and the gradient of the input of every matrix, but the gradient of the weight only of
shared matrices and held experts: its step is cheaper than that of a peer that trains the whole model.

Shapes: D model dim, F expert ffn dim, K experts per token (top-k), S positions of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from spes_swarm.config.model_size import EXPERTS_PER_TOKEN, first_of
from spes_swarm.model.experts import SparseExperts
from spes_swarm.model.sparse_model import SparseModel


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """Operations of one step."""

    forward: int
    input_gradients: int
    weight_gradients: int

    @property
    def model(self) -> int:
        """What the step has to compute, without what backward computes again: the numerator of MFU."""
        return self.forward + self.input_gradients + self.weight_gradients


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """Operations of a model's forward pass, by what their number depends on.

    Exact for the architectures of `tests/model/test_flops.py`. Where heads of queries and values differ in size, or
    layers have anything other than softmax attention over the whole sequence, attention's share is an estimate.
    """

    dense_per_token: int  # matrices that every token meets, in the layers
    head_per_token: int
    attention_per_token: int  # products of queries, keys and values
    expert_per_row: int  # a row: one token in one expert of one layer
    rows_per_token: int

    @classmethod
    def of(cls, model: SparseModel, sequence_length: int) -> Self:
        """Counts the operations of a model on sequences of this length."""
        module: Any = model.module
        config = module.config.get_text_config()
        experts = [each for each in module.modules() if isinstance(each, SparseExperts)]
        D, F = experts[0].down_proj.shape[1:]
        embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
        matrices = [parameter for parameter in _shared(module) if parameter.dim() == 2]
        dense = sum(parameter.numel() for parameter in matrices if parameter is not embedding and parameter is not head)
        top_k = first_of(config, EXPERTS_PER_TOKEN)
        assert isinstance(top_k, int)  # checked with the run's configuration
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            dense_per_token=2 * dense,
            head_per_token=2 * head.numel(),
            # Queries with keys, and probabilities with values.
            attention_per_token=2
            * 2
            * config.num_hidden_layers
            * config.num_attention_heads
            * head_dim
            * sequence_length,
            expert_per_row=2 * 3 * D * F,
            rows_per_token=len(experts) * top_k,
        )

    def step(self, tokens: int, held_rows: int) -> StepFlops:
        """Returns the operations of a step.

        Args:
            tokens: of the whole batch, in sequences of the length that this was made for.
            held_rows: how many of the `tokens * rows_per_token` rows held experts had.
        """
        attention = tokens * self.attention_per_token
        weighted = tokens * (self.dense_per_token + self.head_per_token)
        experts = tokens * self.rows_per_token * self.expert_per_row
        forward = weighted + attention + experts
        return StepFlops(
            forward=forward,
            # Both operands of a product of attention are inputs.
            input_gradients=forward + attention,
            weight_gradients=weighted + held_rows * self.expert_per_row,
        )


def _shared(module: nn.Module) -> list[nn.Parameter]:
    """Returns all parameters but those of experts."""
    of_experts = {id(p) for each in module.modules() if isinstance(each, SparseExperts) for p in each.parameters()}
    return [parameter for parameter in module.parameters() if id(parameter) not in of_experts]
