"""The losses of SPES: next-token cross-entropy, load balance, and two z-losses.

Tensor suffixes: B sequences, S positions, T = B * S tokens, N rows of logits (tokens), V vocabulary, L layers with
experts, E experts, K experts per token.

Sources: SPES (arXiv 2602.11543) and its code (zjr2000/SPES: spes/decayed_load_balance_loss.py, spes/train.py), which
uses the definitions of megablocks: load balance as in Switch Transformer (arXiv 2101.03961, Eqs. 4-6), router z-loss as
in ST-MoE (arXiv 2202.08906, Eq. 5), logit z-loss as in PaLM (arXiv 2204.02311, section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spes_swarm.base.errors import ConfigError
from spes_swarm.model.output_head import IGNORED_TARGET, linear_loss, linear_nats, output_head

ENTROPY_TOKENS = 256  # of a micro-batch, from which the entropy of its routers is estimated


@dataclass(kw_only=True, slots=True, frozen=True)
class LossWeights:
    """Factors of the auxiliary losses; that of the cross-entropy is 1. Defaults are those of SPES."""

    load_balance: float = 0.01
    """Factor of the load-balance loss."""
    router_z: float = 0.001
    """Factor of the router z-loss."""
    logit_z: float = 1e-5
    """Factor of the logit z-loss."""
    decayed_balance: bool = False
    """Whether the load of the held experts counts less at first (SPES's "decayed balance loss")."""
    decayed_balance_start: float = 0.7
    """Factor of the held experts' load at the start of training."""
    decayed_balance_fraction: float = 0.2
    """Fraction of training after which the held experts' load counts in full."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LossParts:
    """The loss and its parts; the parts are not multiplied by their weights."""

    total: Tensor
    """Scalar to differentiate: cross_entropy + the weighted auxiliary losses, each times its share of the batch."""
    cross_entropy: Tensor
    """Detached scalar: mean over targets, in nats; 0 without any."""
    load_balance: Tensor
    """Detached scalar: 1 if the load of every layer is even, E if one expert gets all tokens."""
    router_z: Tensor
    """Detached scalar: sum over layers of mean squared log-sum-exp of the router logits."""
    logit_z: Tensor
    """Detached scalar: mean squared log-sum-exp of the logits."""
    router_entropy: Tensor | None
    """Detached (L,), see `router_entropy`; None if no auxiliary loss needs the router logits."""


@dataclass(kw_only=True, slots=True, frozen=True)
class BatchShare:
    """What share of a step's batch some samples are: means over them, times these, add up to means over the batch."""

    targets: float = 1.0
    """Of its targets."""
    tokens: float = 1.0
    """Of its tokens."""


WHOLE_BATCH = BatchShare()


def token_ids(samples_BS: Tensor) -> Tensor:
    """Returns the token ids (B, S) of samples, in which a token that is not a target is the complement of its id."""
    return torch.where(samples_BS < 0, ~samples_BS, samples_BS)


def next_tokens(samples_BS: Tensor) -> Tensor:
    """Returns the targets (B, S): the token after each, or `IGNORED_TARGET` if it is not a target or does not exist.

    The last position is masked rather than sliced off, because slicing would copy the hidden states. SPES's own code
    divides its loss by B * S instead of the B * (S - 1) predictions.

    Raises:
        ValueError: sequences are shorter than two tokens.
    """
    if samples_BS.shape[1] < 2:
        raise ValueError("a sequence needs at least two tokens to predict one")
    targets_BS = torch.full_like(samples_BS, IGNORED_TARGET)
    targets_BS[:, :-1] = samples_BS[:, 1:].masked_fill(samples_BS[:, 1:] < 0, IGNORED_TARGET)
    return targets_BS


def balance_factor(weights: LossWeights, progress: float) -> float:
    """Returns the factor of the held experts' load at `progress` (fraction of training done, 0 to 1).

    It rises linearly from `decayed_balance_start` to 1 over the first `decayed_balance_fraction`; 1 when disabled.
    """
    if not weights.decayed_balance or progress >= weights.decayed_balance_fraction:
        return 1.0
    start = weights.decayed_balance_start
    return start + (1.0 - start) * progress / weights.decayed_balance_fraction


def load_balance_loss(
    router_logits: Sequence[Tensor], top_k: int, held: Sequence[int] = (), held_factor: float = 1.0
) -> Tensor:
    """Load balance: E * sum_e c_e * f_e * P_e per layer, averaged over layers.

    f_e is the fraction of a layer's T * K choices that fall on expert e (no gradient), P_e the mean over tokens of the
    router's softmax over all experts, and c_e is `held_factor` for held experts and 1 for others. If f and P are even
    and c is 1, the loss is 1. This is Switch Transformer Eqs. 4-6 for K choices, as in SPES and megablocks.
    (transformers' own function is K times as large and pools layers before multiplying.)

    Args:
        router_logits: per layer (T, E).
        top_k: K.
        held: experts whose load is multiplied by `held_factor`.
        held_factor: see `balance_factor`.
    """
    per_layer: list[Tensor] = []
    for logits_TE in router_logits:
        T, E = logits_TE.shape
        probabilities_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
        with torch.no_grad():
            # The same operation on the same numbers as in the routers, so these are the routers' choices.
            chosen_S = probabilities_TE.topk(top_k, dim=-1).indices.reshape(-1)
            load_E = torch.zeros(E, device=logits_TE.device)
            load_E.scatter_add_(0, chosen_S, torch.ones_like(chosen_S, dtype=torch.float32))
            load_E /= T * top_k
            if held_factor != 1.0:
                load_E[list(held)] *= held_factor
        per_layer.append(E * (load_E * probabilities_TE.mean(dim=0)).sum())
    return torch.stack(per_layer).mean()


def router_z_loss(router_logits: Sequence[Tensor]) -> Tensor:
    """Router z-loss: the squared log-sum-exp of the logits (T, E), averaged over tokens and summed over layers.

    SPES and megablocks (`batched_router_zloss`) use the sum over layers, not the mean, with factor 0.001.
    """
    return torch.stack([torch.logsumexp(x_TE.float(), dim=-1).square().mean() for x_TE in router_logits]).sum()


@torch.no_grad()
def router_entropy(router_logits: Sequence[Tensor]) -> Tensor:
    """Returns the entropy (L,) in nats of each router's softmax over the experts, averaged over a sample of tokens.

    It is 0 if the routers are certain, and log E if all experts are equally likely. The tokens are `ENTROPY_TOKENS` or
    somewhat more, at equal distances; all layers are computed at once, because a GPU would otherwise spend more time on
    launching kernels than on computing.

    Args:
        router_logits: per layer (T, E), of the same tokens.
    """
    stride = max(1, len(router_logits[0]) // ENTROPY_TOKENS)
    logits_LTE = torch.stack([logits_TE[::stride] for logits_TE in router_logits])
    # Not torch.special.entr: CUDA compiles it when it is first called, and warns if it may not cache the result.
    logs_LTE = torch.log_softmax(logits_LTE, dim=-1, dtype=torch.float32)
    return -(logs_LTE.exp() * logs_LTE).sum(dim=-1).mean(dim=-1)


def language_model_loss(
    model: nn.Module,
    samples_BS: Tensor,
    weights: LossWeights,
    held: Sequence[int],
    progress: float,
    share: BatchShare = WHOLE_BATCH,
) -> LossParts:
    """Runs the model on packed sequences and returns SPES's training loss.

    Documents are packed without an attention mask. The loss itself does not synchronise with the device.

    Args:
        model: a transformers causal language model (`SparseModel.module` or an untouched one).
        samples_BS: token ids, int64; the complement `~id` of a token that is not a target.
        weights: factors of the auxiliary losses.
        held: experts trained here; used only with `weights.decayed_balance`.
        progress: fraction of the whole training that is done, 0 to 1.
        share: of the batch, if these samples are a part of it.

    Raises:
        ConfigError: the model does not report router logits.
        ValueError: sequences are shorter than two tokens.
    """
    wants_router = weights.load_balance != 0.0 or weights.router_z != 0.0
    targets_N = next_tokens(samples_BS).reshape(-1)
    output, rows_NX, weight_VD = _last_layer(model, token_ids(samples_BS), output_router_logits=wants_router)
    total, cross_entropy, logit_z = linear_loss(rows_NX, weight_VD, targets_N, weights.logit_z)
    total = total * share.targets
    load_balance = router_z = torch.zeros_like(cross_entropy)
    entropy_L: Tensor | None = None
    if wants_router:
        router_logits = getattr(output, "router_logits", None)
        if not router_logits:
            raise ConfigError(f"{type(model).__name__} does not report router logits, which the auxiliary losses need")
        config: Any = model.config
        factor = balance_factor(weights, progress)
        load_balance = load_balance_loss(router_logits, config.num_experts_per_tok, held, factor)
        router_z = router_z_loss(router_logits)
        entropy_L = router_entropy(router_logits)
        total = total + share.tokens * (weights.load_balance * load_balance + weights.router_z * router_z)
    return LossParts(
        total=total,
        cross_entropy=cross_entropy,
        load_balance=load_balance.detach(),
        router_z=router_z.detach(),
        logit_z=logit_z,
        router_entropy=entropy_L,
    )


@torch.no_grad()
def cross_entropy_of_sequences(model: nn.Module, samples_BS: Tensor) -> Tensor:
    """Returns the mean next-token cross-entropy (B,) of each sequence in nats, without gradients, in evaluation mode.

    It is NaN for a sequence without a target. The model's mode is restored afterwards. Evaluation does not count routed
    tokens.

    Raises:
        ValueError: sequences are shorter than two tokens.
    """
    targets_BS = next_tokens(samples_BS)
    was_training = model.training
    model.eval()
    try:
        _, rows_NX, weight_VD = _last_layer(model, token_ids(samples_BS))
    finally:
        model.train(was_training)
    nats_BS = linear_nats(rows_NX, weight_VD, targets_BS.reshape(-1)).view(targets_BS.shape)
    return nats_BS.sum(dim=1) / (targets_BS != IGNORED_TARGET).sum(dim=1)


def _last_layer(model: nn.Module, input_ids_BS: Tensor, **options: Any) -> tuple[Any, Tensor, Tensor | None]:
    """Runs the model; returns its output, rows of hidden states (N, D), and the weight (V, D) of the logits.

    A model whose logits are not such a product is run as a whole: then the rows are logits, and there is no weight.
    """
    head = output_head(model)
    if head is None:
        output = model(input_ids=input_ids_BS, use_cache=False, **options)
        return output, output.logits.flatten(0, 1), None
    base: Any = model.base_model
    output = base(input_ids=input_ids_BS, use_cache=False, **options)
    return output, output.last_hidden_state.flatten(0, 1), head.weight
