"""The configuration of a run, the same for the whole swarm.

A RunConfig travels in the run's manifest, whose digest is part of the run id: a peer that joins builds exactly the
founder's model and schedule. Every section checks itself when it is created, wherever its values come from. Types are
strict; an int becomes a float where one is declared, so that equal configurations give equal bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from blake3 import blake3

from spes_swarm.base.errors import ConfigError
from spes_swarm.base.strict import Pattern, Range, Section, read_section, show
from spes_swarm.base.wording import one_to, plural
from spes_swarm.config.constraints import (
    DATE,
    BatchSize,
    Beta,
    Count,
    CountOrZero,
    Fraction,
    Hex64,
    NotNegative,
    Positive,
    Seed,
    Setting,
    Text,
)
from spes_swarm.config.data import DataConfig
from spes_swarm.config.model_settings import check_mixture, config_from_settings, no_mixture, repeatable
from spes_swarm.config.model_size import (
    EXPERTS_PER_TOKEN,
    NUM_EXPERTS,
    check_size,
    check_values,
    first_of,
    num_parameters,
)
from spes_swarm.protocol.consensus.codec import CODECS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The tokens of a local step are one array; a node's largest in the paper has 2**20.
_MAX_TOKENS_PER_STEP = 2**24
# A round is planned part by part; the largest model has 2**24 parts of the default size.
_MAX_PARTS = 2**24

_LEFT_OUT = (("admission", "open"), ("visible", "all"))
_LOCAL = re.compile(r"local:(?P<label>[^:]+):(?P<digest>[0-9a-f]{64})")


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelConfig(Section):
    """Which model the swarm trains."""

    check_is_slow = True  # it needs transformers
    type: Text  # transformers model_type of a mixture of experts: olmoe, qwen3_moe, mixtral, ...
    settings: dict[str, Setting] = field(default_factory=dict)  # arguments of that type's configuration class
    initial_weights: Hex64 | None = None  # digest of the initial weights, filled in by the founder; None = random
    # What else the initial model's config.json says. The founder fills it in, no peer interprets it, and exports repeat
    # it.
    extra_settings: dict[str, Setting] = field(default_factory=dict)
    generation: dict[str, Setting] = field(default_factory=dict)  # the same of its generation_config.json
    # Standard deviations beyond which a random initial weight is drawn again (the paper's runs: 3); None = never.
    init_cutoff: Annotated[float, Range(1, 100)] | None = None

    def _check(self) -> None:
        check_mixture(self.type)
        config = transformers_config(self)
        for name in ("extra_settings", "generation"):
            refused = getattr(self, name).keys() - repeatable(self.type, name, getattr(self, name)).keys()
            if refused:
                raise ConfigError(f"{name}.{min(refused)}: not allowed in a swarm's configuration, or too long")
        if first_of(config, NUM_EXPERTS) is None or first_of(config, EXPERTS_PER_TOKEN) is None:
            raise no_mixture(self.type)
        for names in (NUM_EXPERTS, EXPERTS_PER_TOKEN):
            if type(number := first_of(config, names)) is not int:  # transformers does not check its aliases
                raise ConfigError(f"settings: found {show(number)} as {names[0]}, expected a whole number")
        if not isinstance(first_of(config, ("vocab_size",)), int):
            raise ConfigError(f"type: found {self.type!r}, expected a text model (it has no vocab_size)")
        check_size(config)
        if self.num_experts < 1:
            raise ConfigError(f"settings: found a model with {self.num_experts} experts, expected at least 1")
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"settings: a token goes to {plural(self.experts_per_token, 'expert')}, "
                f"expected {one_to(self.num_experts, 'expert')} (all that the model has)"
            )
        check_values(config)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            number = first_of(config, (key,))
            if isinstance(number, int) and not 0 <= number < self.vocab_size:
                raise ConfigError(
                    f"settings.{key}: found {number}, expected below vocab_size ({self.vocab_size}), or null"
                )
        ends = first_of(config, ("eos_token_id",))
        if self.pad_token_id is not None and self.pad_token_id in (ends if isinstance(ends, list) else [ends]):
            raise ConfigError(frozen_embedding(self.pad_token_id, "the end of a document, eos_token_id"))
        if self.init_cutoff is not None and not (first_of(config, ("initializer_range",)) or 0) > 0:
            raise ConfigError(
                f"init_cutoff: found {self.init_cutoff:g}, expected null unless settings.initializer_range is above 0"
            )
        hidden, heads = first_of(config, ("hidden_size",)), first_of(config, ("num_attention_heads",))
        if hidden and heads and first_of(config, ("head_dim",)) is None and hidden % heads:
            raise ConfigError(f"settings.hidden_size: found {hidden}, expected a multiple of {heads} attention heads")
        groups = first_of(config, ("num_key_value_heads",))
        if heads and groups and heads % groups:
            raise ConfigError(
                f"settings.num_key_value_heads: found {groups}, expected a divisor of {heads} attention heads"
            )

    @property
    def num_experts(self) -> int:
        """Experts per layer, whatever the architecture calls them."""
        return int(first_of(_shared_config(self), NUM_EXPERTS))

    @property
    def experts_per_token(self) -> int:
        """Experts that process a token (top-k)."""
        return int(first_of(_shared_config(self), EXPERTS_PER_TOKEN))

    @property
    def num_parameters(self) -> int:
        """Approximate number of parameters; see model_size.py."""
        return num_parameters(_shared_config(self))

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; token ids are smaller."""
        return int(first_of(_shared_config(self), ("vocab_size",)))

    @property
    def pad_token_id(self) -> int | None:
        """The token whose embedding gets no gradient (torch's `padding_idx`); None if all embeddings are trained."""
        pad = first_of(_shared_config(self), ("pad_token_id",))
        return None if pad is None else int(pad)

    @property
    def max_sequence_length(self) -> int | None:
        """Longest sequence that has positions, in tokens; None if the architecture has no limit."""
        limit = first_of(_shared_config(self), ("max_position_embeddings",))
        return None if limit is None else int(limit)


def frozen_embedding(pad_token_id: int, meaning: str) -> str:
    """Returns the message about a pad token that occurs in the data; starts with the key below `model`."""
    return (
        f"settings.pad_token_id: found {pad_token_id}, which is {meaning}: the embedding of a pad token is never "
        "trained; expected null, as sequences are packed without padding"
    )


def transformers_config(model: ModelConfig) -> PreTrainedConfig:
    """Builds the transformers configuration of the model.

    Raises:
        ConfigError: its message starts with the key below `model`: `type` or `settings.KEY`.
    """
    return config_from_settings(model.type, model.settings)


def _shared_config(model: ModelConfig) -> PreTrainedConfig:
    """Returns a cached `transformers_config`, which callers must not change: a new one takes milliseconds."""
    return _config_of(model.type, json.dumps(model.settings))


@lru_cache(maxsize=4)
def _config_of(model_type: str, settings: str) -> PreTrainedConfig:
    return config_from_settings(model_type, json.loads(settings))


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenizerConfig(Section):
    """How text becomes token ids."""

    # "bytes", a tokenizer.json, or a directory or hub name (USER/REPO[@REVISION]) of a transformers tokenizer. In a
    # manifest, files of the founder have the name `local:LABEL:DIGEST`, which is neither a path nor a hub name.
    name: Text = "bytes"
    digest: Hex64 | None = None  # of the tokenizer's contents; filled in by the founder, compared by peers that join
    # What chat templates take for today: their clock stands still, so that all peers get the same tokens on any day.
    date: Annotated[str, Pattern(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", "a day, YYYY-MM-DD")] = DATE

    def _check(self) -> None:
        try:
            date.fromisoformat(self.date)
        except ValueError as exc:
            raise ConfigError(f"date: found {show(self.date)}, expected a day, YYYY-MM-DD") from exc

    @property
    def local(self) -> tuple[str, str] | None:
        """Label and digest of a founder's packed files (see data/run_tokenizer.py); None for any other tokenizer."""
        match = _LOCAL.fullmatch(self.name)
        return None if match is None else (match["label"], match["digest"])


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainingConfig(Section):
    """Optimisation: SPES' losses, AdamW or Muon, cosine schedule with warm-up on the swarm's progress."""

    sequence_length: Annotated[int, Range(2, 2**20)]  # tokens in each sequence
    batch_size: BatchSize  # sequences per local step, unless a peer overrides it
    learning_rate: Positive  # peak, after warm-up
    warmup_steps: CountOrZero  # inner steps of linear warm-up
    warmup_start_ratio: Fraction = 0.0  # where the warm-up begins, divided by the peak (the paper's runs: 0.1)
    total_steps: Count  # inner steps until the learning rate reaches its minimum
    # After total_steps, training continues at the minimum, or the run ends with a last checkpoint and publication.
    at_end: Literal["continue", "stop"] = "continue"
    min_learning_rate_ratio: Fraction = 0.1  # minimum divided by peak
    # Muon trains the matrices of hidden layers, and AdamW then trains the rest.
    optimiser: Literal["adamw", "muon"] = "adamw"
    muon_momentum: Beta = 0.95  # decay of Muon's moving average of gradients
    # Peak for what AdamW trains alongside Muon, on the same schedule; None = learning_rate.
    adamw_learning_rate: Positive | None = None
    adam_beta1: Beta = 0.9  # decay of the first moment
    adam_beta2: Beta = 0.95  # decay of the second moment
    adam_eps: Positive = 1e-8  # added to the square root of the second moment
    weight_decay: NotNegative = 0.1  # decoupled weight decay
    decay_norm_and_bias: bool = False  # whether norms and biases decay too (in the paper's runs they do)
    max_grad_norm: Positive = 1.0  # gradients with a larger norm are scaled down to it
    load_balance_weight: NotNegative = 0.01  # weight of the load-balancing loss
    router_z_weight: NotNegative = 0.001  # weight of the z-loss of router logits
    logit_z_weight: NotNegative = 1e-5  # weight of the z-loss of output logits
    local_balance_start: Fraction | None = None  # first factor on held experts' load (paper: 0.7); None = off
    local_balance_fraction: Annotated[float, Range(0, 1, open_low=True)] = 0.2  # share of training until it is 1
    seed: Seed = 0  # of the initial weights and the held-out split

    def _check(self) -> None:
        if self.warmup_steps >= self.total_steps:
            raise ConfigError(
                f"warmup_steps: found {self.warmup_steps}, expected fewer than total_steps ({self.total_steps})"
            )
        if self.optimiser == "adamw" and self.adamw_learning_rate is not None:
            raise ConfigError(
                f"adamw_learning_rate: found {self.adamw_learning_rate:g}, expected null with optimiser adamw "
                "(learning_rate is its peak)"
            )
        self.batch_size_of(None)

    def batch_size_of(self, own: int | None) -> int:
        """Returns the sequences per local step of a peer that asks for `own`; None asks for the run's.

        Raises:
            ConfigError: a step would have more than 2**24 tokens.
        """
        size = own if own is not None else self.batch_size
        if size * self.sequence_length > _MAX_TOKENS_PER_STEP:
            raise ConfigError(
                f"batch_size: found {size}, expected at most {_MAX_TOKENS_PER_STEP // self.sequence_length} "
                f"with sequences of {self.sequence_length} tokens"
            )
        return size


@dataclass(kw_only=True, slots=True, frozen=True)
class RoundConfig(Section):
    """When a sync round is due, how its data is encoded and bounded, and every deadline."""

    inner_steps: Count  # local steps per round (H)
    # Later values of H: pairs of an inner step of the run and H of the rounds that begin at or after it.
    inner_steps_later: tuple[tuple[Count, Count], ...] = ()
    # Rounds from one synchronisation of the experts to the next; the shared layers take part in all.
    expert_every: Count = 1
    codec: str = "fp16"  # encoding of differences to the reference: fp32, fp16, int8 or int4
    result_codec: str | None = None  # encoding of the averages of several contributions; None = `codec`
    part_elements: Annotated[int, Range(1, 2**20)] = 2**18  # values per part, the unit of transfer
    window_s: Positive = 10.0  # how long a rendezvous waits for live peers that have not arrived
    stall_timeout_s: Positive = 10.0  # a peer that sends no byte for this long counts as dead
    timeout_s: Positive = 300.0  # for a whole exchange; parts still missing stay at the old reference
    max_update_rms: Positive = 1.0  # largest root mean square of a part's difference that a reducer accepts
    clip: NotNegative = 1.5  # maximum norm of a member's update, as a multiple of the median member's; 0 disables
    progress_ttl_s: Positive = 30.0  # lifetime of a progress record; without a new one the peer counts as gone
    lease_s: Positive = 120.0  # lifetime of an expert lease: how long a dead holder keeps its experts
    overlap: bool = False  # keep training during the exchange

    def _check(self) -> None:
        for key, name in (("codec", self.codec), ("result_codec", self.codec_of_results)):
            if name not in CODECS:
                raise ConfigError(f"{key}: found {name!r}, expected one of {', '.join(CODECS)}")
        for index, ((before, _), (step, _)) in enumerate(pairwise(self.inner_steps_later), start=1):
            if step <= before:
                raise ConfigError(
                    f"inner_steps_later.{index}.0: found {step}, expected more than in the pair before ({before})"
                )
        for shorter, longer in (
            ("stall_timeout_s", "timeout_s"),
            ("window_s", "timeout_s"),
            # A lease is renewed with progress: a shorter one would lapse while its holder counts as alive.
            ("progress_ttl_s", "lease_s"),
        ):
            if getattr(self, shorter) > getattr(self, longer):
                raise ConfigError(
                    f"{shorter}: found {getattr(self, shorter):g}, "
                    f"expected at most {longer} ({getattr(self, longer):g})"
                )

    @property
    def codec_of_results(self) -> str:
        """Name of the codec for the averages of several contributions."""
        return self.codec if self.result_codec is None else self.result_codec


@dataclass(kw_only=True, slots=True, frozen=True)
class MergeConfig(Section):
    """Expert-merging warm-up (SPES, Eqs. 5-6); alpha 0 switches it off."""

    alpha: Fraction = 0.1  # alpha_0: how far an expert moves towards its neighbours
    steps: CountOrZero  # T_merge: inner steps over which alpha falls to 0
    # Inner steps between merges; 0 = never. The first commit at or past each multiple merges. The authors' server
    # merges only at steps that are multiples: the same where round.inner_steps divides the interval.
    interval: CountOrZero
    neighbours: Count = 4  # K: how many of the most similar experts are averaged


@dataclass(kw_only=True, slots=True, frozen=True)
class OwnershipConfig(Section):
    """Who trains which expert (see protocol/ownership/reassignment.py)."""

    replicas: Count | None = None  # target number of holders per expert; None = peers hold as many experts as they can
    rotate_every_rounds: Count = 10  # rounds between rotations when the swarm lacks room for all experts
    # Largest share of the experts that one peer holds while others can hold the rest, whatever it claims.
    max_share: Annotated[float, Range(0, 1, open_low=True)] = 0.5
    # Steps over which an adopted expert, which starts without moments, reaches the full step size; 0 = at once.
    warmup_steps: CountOrZero = 10


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluationConfig(Section):
    """Loss on held-out text."""

    holdout_fraction: Annotated[float, Range(0, 0.5)] = 0.02  # share of every data source
    every_rounds: CountOrZero = 5  # rounds between evaluations; all peers evaluate the same rounds; 0 = never
    sequences: Count = 128  # sequences per evaluation, spread over all held-out text

    def _check(self) -> None:
        if self.every_rounds and self.holdout_fraction == 0:
            raise ConfigError("holdout_fraction: found 0, expected more than 0 unless every_rounds is 0")


@dataclass(kw_only=True, slots=True, frozen=True)
class RunConfig(Section):
    """All settings that the peers of a run share."""

    check_is_slow = True  # it compares with the model
    # First part of run ids.
    name: Annotated[str, Pattern(r"[a-z0-9-]{1,40}", "1 to 40 of a-z, 0-9 and -")] = "quickstart"
    # Who may take part: everybody, those with an invitation, or peers that the founder names.
    admission: Literal["open", "invite", "allow-list"] = "open"
    visible: Literal["all", "members"] = "all"  # who may watch a private run
    model: ModelConfig  # what is trained
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)  # how text becomes token ids
    data: DataConfig = field(default_factory=DataConfig)  # what it trains on
    training: TrainingConfig  # optimisation
    round: RoundConfig  # synchronisation
    merge: MergeConfig  # expert-merging warm-up
    ownership: OwnershipConfig = field(default_factory=OwnershipConfig)  # leases and adoption
    experts_per_peer: Count  # how many experts a peer trains unless it asks otherwise
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)  # held-out loss

    def _check(self) -> None:
        model, length = self.model, self.training.sequence_length
        if self.experts_per_peer > model.num_experts:
            raise ConfigError(
                f"experts_per_peer: found {self.experts_per_peer}, "
                f"expected {one_to(model.num_experts, 'expert')} (all that the model has)"
            )
        if model.max_sequence_length is not None and length > model.max_sequence_length:
            raise ConfigError(
                f"training.sequence_length: found {length}, expected at most {model.max_sequence_length} "
                "(the model's max_position_embeddings)"
            )
        if model.num_parameters > _MAX_PARTS * self.round.part_elements:
            raise ConfigError(
                f"round.part_elements: found {self.round.part_elements}, "
                f"expected at least {model.num_parameters // _MAX_PARTS + 1} for a model of this size"
            )
        if self.tokenizer.name == "bytes" and model.vocab_size <= 256:
            raise ConfigError(
                f"model.settings.vocab_size: found {model.vocab_size}, expected at least 257 "
                "(the bytes tokenizer has 256 bytes and an end of document)"
            )
        if self.tokenizer.name == "bytes" and model.pad_token_id is not None and model.pad_token_id <= 256:
            raise ConfigError(f"model.{frozen_embedding(model.pad_token_id, 'a token of the bytes tokenizer')}")
        if self.visible == "members" and self.admission == "open":
            raise ConfigError("visible: found 'members', expected 'all' in an open run, in which everybody is a member")

    @property
    def most_of_newcomers(self) -> float:
        """The largest share of an average that new identities have together: in an open run these cost nothing."""
        return 1 / 3 if self.admission == "open" else 1.0

    def to_dict(self) -> dict[str, Any]:
        """As `Section.to_dict`, without the defaults of settings that older versions refuse as unknown."""
        values = Section.to_dict(self)
        return {key: value for key, value in values.items() if (key, value) not in _LEFT_OUT}

    @property
    def most_experts(self) -> int:
        """Most experts that one peer holds while others can hold the rest; at least `experts_per_peer`."""
        return max(self.experts_per_peer, int(self.ownership.max_share * self.model.num_experts))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str) -> Self:
        """Reads plain values that came from `source` (a file, a manifest).

        Raises:
            ConfigError: naming the source, the dotted key, what was found and what is expected.
        """
        return read_section(cls, values, f"{source}: ", "run")

    @property
    def digest(self) -> str:
        """Hex BLAKE3 of the canonical JSON."""
        return blake3(canonical_json(self)).hexdigest()


def canonical_json(run: RunConfig) -> bytes:
    """Returns the canonical encoding of a configuration: ASCII, sorted keys, no spaces, shortest round-trip floats."""
    return json.dumps(run.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
