"""How monitored metrics are declared: as annotated fields of the dataclasses that carry them.

The annotations say all that the others need: the JSON schema, the history file, Prometheus, the trackers and the signed
records (records.py) are derived from them. In records, metrics are *telemetry*: numbers by name, on which no decision
of a peer depends. Readers ignore names that they do not know, and known ones with impossible values.

The values come from training/rounds/commits.py (of a round) and network/announcer.py (of a peer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from functools import cache
from math import isfinite
from statistics import median, median_low
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from spes_swarm.protocol.members.routing_report import MAX_PAIRS

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
MAX_COUNT = (1 << 53) - 1  # the largest exact integer of JavaScript
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
OverPeers = Callable[[Sequence[float]], float | None]


@dataclass(frozen=True)
class Of:
    """The annotation of a field of an event (see metrics/events.py): what it is, and its unit."""

    help: str  # one phrase, lower case; in the reference, the JSON schema and Prometheus
    unit: str = ""
    _: KW_ONLY
    tracked: bool = False  # experiment trackers get it
    omitted: bool = False  # the event lacks the field while it is None

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Callable[[Any], dict[str, Any]]) -> Any:
        """Adds the description."""
        return {**handler(core_schema), "description": self.help}


@dataclass(frozen=True)
class Metric(Of):
    """The annotation that makes a field a metric."""

    _: KW_ONLY
    tracked: bool = True
    gauge: str | None = None  # its name in Prometheus, without prefix; None: not exported
    # For a metric of a round: how the figures that its peers report are combined, and the reported field if it has
    # another name. None: computed otherwise.
    over_peers: OverPeers | None = None
    reported_as: str | None = None
    measured_with: str | None = None  # the metric that it belongs to: a loss, for its error


@cache
def notes_of(carrier: type) -> dict[str, Of]:
    """The annotations of a dataclass by field, inherited ones included."""
    return {
        name: note
        for name, hint in get_type_hints(carrier, include_extras=True).items()
        for note in getattr(hint, "__metadata__", ())
        if isinstance(note, Of)
    }


@cache
def metrics_of(carrier: type) -> dict[str, Metric]:
    """The metrics of a dataclass by field, inherited ones included."""
    return {name: note for name, note in notes_of(carrier).items() if isinstance(note, Metric)}


def known_median(values: Sequence[float]) -> float | None:
    """The median; None without values. One peer's claim alone could move a mean."""
    return median(values) if values else None


def known_low_median(values: Sequence[float]) -> float | None:
    """The lower median, for alarms; None without values. Of two peers, neither can raise one alone."""
    return median_low(values) if values else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundMetrics:
    """What peers measure of a round: for one peer its own values, for a round or the swarm medians over peers."""

    train_loss: Annotated[
        NotNegative | None,
        Metric(
            "training loss, mean over the steps of a round",
            "nats per target",
            gauge="train_loss",
            over_peers=known_median,
        ),
    ] = None
    eval_loss: Annotated[
        NotNegative | None,
        Metric(
            "loss on held-out text; null: not evaluated",
            "nats per target",
            gauge="eval_loss",
            over_peers=known_median,
        ),
    ] = None
    eval_loss_stderr: Annotated[
        NotNegative | None,
        Metric(
            "standard error of eval_loss, from the sequences evaluated; null: not known",
            "nats per target",
            gauge="eval_loss_stderr",
            over_peers=known_median,
            measured_with="eval_loss",
        ),
    ] = None
    # Routing health, as measured by training/health/routing_health.py; unknown before the first commit of a session.
    load_entropy: Annotated[
        Share | None,
        Metric(
            "entropy of the experts' load as a fraction of its maximum, mean over layers; 1: all have the same",
            "fraction",
            gauge="load_entropy_ratio",
            over_peers=known_median,
        ),
    ] = None
    least_load: Annotated[
        NotNegative | None,
        Metric(
            "load of the least used expert of any layer, as a multiple of its fair share",
            "fair shares",
            gauge="least_expert_load",
            over_peers=known_median,
        ),
    ] = None
    router_entropy: Annotated[
        Share | None,
        Metric(
            "entropy of the router's probabilities for a token as a fraction of its maximum, mean over tokens and "
            "layers; 0: certain",
            "fraction",
            gauge="router_entropy_ratio",
            over_peers=known_median,
        ),
    ] = None
    held_share: Annotated[
        Share | None,
        Metric(
            "fraction of the routed tokens that went to experts that the peer holds",
            "fraction",
            gauge="held_experts_token_ratio",
            over_peers=known_median,
        ),
    ] = None
    dead_experts: Annotated[
        Annotated[int, Field(ge=0, le=MAX_PAIRS)] | None,
        Metric(
            "dead experts, which get less than 1 % of their fair share of tokens, counted in each layer",
            "dead experts",
            gauge="dead_experts",
            over_peers=known_low_median,
        ),
    ] = None
    expert_similarity: Annotated[
        Share | None,
        Metric(
            "cosine of two experts' gate projections, mean over pairs and layers, at least 0; null: not evaluated",
            "cosine",
            gauge="expert_similarity",
            over_peers=known_median,
        ),
    ] = None
    expert_similarity_max: Annotated[
        Share | None,
        Metric(
            "largest cosine of two experts' gate projections in any layer, at least 0; null: not evaluated",
            "cosine",
            gauge="expert_similarity_max",
            over_peers=known_median,
            measured_with="expert_similarity",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PeerMetrics:
    """What a peer reports of the moment."""

    step: Annotated[Count, Metric("local steps of the peer so far", "steps")] = 0
    loss: Annotated[
        NotNegative | None, Metric("loss of the peer's last local step", "nats per target", gauge="loss")
    ] = None
    total_tokens: Annotated[Count, Metric("what the peer has trained on in this run", "tokens")] = 0
    bytes_sent: Annotated[Count, Metric("payload sent in its last round", "bytes", gauge="bytes_sent")] = 0
    bytes_received: Annotated[Count, Metric("payload received in its last round", "bytes", gauge="bytes_received")] = 0
    round_seconds: Annotated[
        NotNegative, Metric("how long the peer's last round took", "seconds", gauge="round_seconds")
    ] = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundFigures(RoundMetrics):
    """What a peer reports of a round that it has committed."""

    round: int
    time: NotNegative = 0.0  # of the commit, swarm time
    peers: Count = 0  # members of the commit; 0: unknown, as below
    experts_covered: Count = 0
    swarm_tokens: Count = 0  # of all peers, in the commits up to this one
    tokens_per_second: NotNegative = 0.0  # of this peer
    round_seconds: NotNegative = 0.0
    bytes_sent: Count = 0  # payload that this peer sent


# Telemetry.

MetricName = Annotated[str, Field(pattern="^[a-z][a-z0-9_]{0,39}$")]
Number = int | Annotated[float, Field(allow_inf_nan=False)]
Carrier = TypeVar("Carrier", PeerMetrics, RoundFigures)


def telemetry_of(metrics: PeerMetrics | RoundFigures) -> dict[str, int | float]:
    """The metrics of a dataclass that are known and finite."""
    return {name: value for name, value in asdict(metrics).items() if value is not None and isfinite(value)}


def read_telemetry(carrier: type[Carrier], values: Mapping[str, object]) -> Carrier:
    """The metrics of a dataclass, as reported; those that are not, or have an impossible value, have their default."""
    reader = _reader(carrier)  # type: ignore[arg-type]  # a class is hashable, whatever its instances are
    try:
        metrics: Carrier = reader.validate_python(values)
    except ValidationError as exc:
        wrong = {error["loc"][0] for error in exc.errors()}
        metrics = reader.validate_python({name: value for name, value in values.items() if name not in wrong})
    return metrics


@cache
def _reader(carrier: type) -> TypeAdapter[Any]:
    return TypeAdapter(carrier)
