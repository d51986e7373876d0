"""The state of a run as plain values, the input of every view (terminal, web, Prometheus).

The fields declare the metrics of a peer, a round and the swarm; see protocol/members/round_metrics.py. The schema of
their JSON form (of `--once --json` and `/api/state`) is in schema.py. All lists are sorted, so equal states give equal
text. Names are sanitised (base/names.py); times are Unix seconds of the swarm's clock.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import Field, TypeAdapter, ValidationError

from spes_swarm.base.decoding import first_complaint
from spes_swarm.base.names import FAULT_KIND, MAX_NAME_CHARS
from spes_swarm.protocol.members.round_metrics import Count, Metric, NotNegative, PeerMetrics, RoundMetrics, metrics_of

SCHEMA_VERSION: Final = 1
SHORT_ID_CHARS = 8
MAX_WHY_CHARS = 300

PeerActivity = Literal["training", "syncing", "waiting", "joining", "leaving", "left", "late"]
Status = Literal["live", "no_peers", "replay"]
RefusalKind = Literal["far_future", "forged", "malformed", "other_version", "oversized", "replayed"]

_Positive = Annotated[int, Field(ge=1)]
PEER_ID: Final = "^[1-9A-HJ-NP-Za-km-z]{1,64}$"
_PeerId = Annotated[str, Field(pattern=PEER_ID)]
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # hex
_PeerName = Annotated[str, Field(max_length=MAX_NAME_CHARS, pattern="^[^\\u0000-\\u001f\\u007f<>&\"'`\\\\\\[\\]]*$")]
_FaultKind = Annotated[str, Field(pattern=FAULT_KIND)]


def _median_length(seconds: Sequence[float]) -> float:
    """The median over peers that have taken part in a round; 0 without any."""
    return median([value for value in seconds if value > 0] or [0.0])


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What is being trained, from the run's manifest."""

    run_id: Annotated[str, Field(min_length=1)]
    name: str
    model: Annotated[str, Field(description="transformers type of the model")]
    inner_steps: Annotated[_Positive, Field(description="local steps of each peer in one of the first rounds")]
    num_experts: Annotated[_Positive, Metric("experts of the model", gauge="experts")]
    experts_per_peer: _Positive
    total_steps: Annotated[_Positive, Field(description="inner steps until the learning rate is at its minimum")]
    data: Annotated[str | None, Field(description="the training data; null: not in the run's manifest")] = None
    admission: Annotated[str, Field(description="who may take part: open, invite, allow-list")] = "open"
    inner_steps_later: Annotated[
        tuple[tuple[_Positive, _Positive], ...],
        Field(description="pairs: an inner step of the run, and the local steps in a round that begins then or later"),
    ] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerState(RoundMetrics, PeerMetrics):
    """One peer with an unexpired record; `left` for those that have announced that they are gone."""

    peer_id: _PeerId
    short_id: Annotated[str, Field(min_length=1, max_length=SHORT_ID_CHARS)]  # last characters of the peer id
    name: Annotated[_PeerName, Field(description="public nickname, sanitised; may be empty")]
    state: PeerActivity
    reachable: Annotated[bool, Field(description="whether others can open connections to it")]
    experts: Annotated[tuple[Count, ...], Metric("experts that the peer trains now", gauge="experts")]
    round: Annotated[Count, Metric("last round that the peer has committed", gauge="round")]
    tokens_per_second: Annotated[NotNegative, Metric("training speed of the peer", gauge="tokens_per_second")]
    age_s: Annotated[NotNegative, Metric("seconds since the peer's last record", gauge="record_age_seconds")]
    digest: Annotated[_Digest, Field(description="of its whole reference")]
    agrees: Annotated[
        bool,
        Field(description="false: it takes part in rounds, and its digest is not the most common one at its round"),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertState:
    """One expert and its holders."""

    expert: Count
    holders: Annotated[tuple[_PeerId, ...], Field(description="present peers that train it")]
    reserved: Annotated[tuple[_PeerId, ...], Field(description="absent peers with an unexpired lease on it")]
    age_rounds: Annotated[Count | None, Field(description="rounds since a holder last committed; null: no commit seen")]
    load: Annotated[
        NotNegative | None,
        Metric(
            "load of the expert as a multiple of its fair share, mean over layers, median over peers; null: not "
            "reported",
            gauge="expert_load",
        ),
    ] = None
    dead_layers: Annotated[
        tuple[Count, ...],
        Metric(
            "layers in which more than half of the reporting peers call the expert dead, among those with experts",
            gauge="expert_dead_layers",
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Consensus:
    """Agreement of the peers' references."""

    digest: Annotated[_Digest | None, Field(description="the most common one at the swarm's round")]
    agree: Annotated[
        Count, Metric("peers at the swarm's round with its most common digest", gauge="consensus_agree_peers")
    ]
    differ: Annotated[
        tuple[_PeerId, ...],
        Metric(
            "peers that take part in rounds, and whose digest is not the most common one at their round",
            gauge="consensus_differ_peers",
        ),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault reported by a peer."""

    time: NotNegative
    peer_id: Annotated[_PeerId, Field(description="of the reporter")]
    kind: _FaultKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Accused:
    """A peer that others have something against, and how many of them."""

    peer_id: _PeerId
    name: Annotated[_PeerName, Field(description="as last seen, sanitised; may be empty")]
    by: Annotated[_Positive, Field(description="present peers that say so")]
    of: Annotated[_Positive, Field(description="present peers that could")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Excluded(Accused):
    """A peer against which others say that they have the proof of a lie; see accusations.py."""

    since: Annotated[NotNegative, Field(description="when this monitor saw it first")]
    verified: Annotated[bool, Field(description="whether this monitor has verified a proof; false: it may be slander")]
    # What the proof shows; null without one.
    round: Count | None = None
    part: Count | None = None
    why: Annotated[str | None, Field(max_length=MAX_WHY_CHARS)] = None
    proof: Annotated[str | None, Field(description="the file of the proof; null: not saved")] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WithoutDuty(Accused):
    """A peer of which most others say that it has no duty: it reduces nothing and leads no round."""

    since: Annotated[Count, Field(description="round, lower median of what they say")]
    kinds: Annotated[tuple[_FaultKind, ...], Field(description="the faults that they have seen")]


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmState(RoundMetrics):
    """The state of a run at one moment. Each round metric is of the newest round that has it."""

    time: NotNegative
    status: Annotated[
        Status,
        Field(description="live: at least one peer is present; no_peers: none is, or all left; replay: from a file"),
    ]
    silent_s: Annotated[
        NotNegative | None,
        Field(description="with no_peers: seconds since the last record of any peer; null: there never was one"),
    ]
    run: RunInfo
    round: Annotated[Count, Metric("newest round that at least half of the peers have committed", gauge="round")]
    next_round_s: Annotated[
        NotNegative | None,
        Metric("estimated seconds to the next round; null: no peer trains", gauge="next_round_seconds"),
    ]
    round_progress: Annotated[
        float, Field(ge=0, le=1), Metric("fraction of the next round's work that is done", gauge="round_progress_ratio")
    ]
    tokens_total: Annotated[Count, Metric("tokens that all peers that the monitor has ever seen have trained on")]
    tokens_per_second: Annotated[NotNegative, Metric("training speed of all peers", gauge="tokens_per_second")]
    experts_covered: Annotated[Count, Metric("experts with at least one holder", gauge="experts_covered")]
    peers: Annotated[tuple[PeerState, ...], Field(description="sorted by peer_id")]
    experts: Annotated[tuple[ExpertState, ...], Field(description="every expert of the model, in order")]
    consensus: Consensus
    faults: Annotated[tuple[Fault, ...], Field(description="oldest first")]
    refused: Annotated[dict[RefusalKind, _Positive], Field(description="number of refused records, by kind")]
    join_command: Annotated[str | None, Field(description="the command that joins the run")]
    # Null in states that an older version has stored.
    steps: Annotated[Count | None, Metric("inner steps of the run that are done with this round", gauge="steps")] = None
    inner_steps: Annotated[_Positive | None, Field(description="local steps of each peer in the next round")] = None
    loss_round: Annotated[Count | None, Field(description="the round of train_loss; null: unknown")] = None
    eval_round: Annotated[Count | None, Field(description="the round of eval_loss; null: unknown")] = None
    # Empty in such states. Without a present peer, as of the last one.
    excluded: Annotated[
        tuple[Excluded, ...], Metric("peers that others call excluded, proven or not", gauge="excluded_peers")
    ] = ()
    without_duty: Annotated[
        tuple[WithoutDuty, ...],
        Metric("peers of which most others say that they have no duty", gauge="peers_without_duty"),
    ] = ()

    @property
    def num_peers(self) -> int:
        """The number of peers that have not left."""
        return sum(peer.state != "left" for peer in self.peers)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values that follow the schema."""
        values: dict[str, Any] = _adapter().dump_python(self, mode="json")
        return {"schema": SCHEMA_VERSION, **values}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SwarmState:
        """The inverse of `to_json`.

        Raises:
            ValueError: the values do not follow the schema.
        """
        try:
            return _adapter().validate_python({key: value for key, value in values.items() if key != "schema"})
        except ValidationError as exc:
            raise ValueError(first_complaint(exc)) from exc


@cache
def _adapter() -> TypeAdapter[SwarmState]:
    return TypeAdapter(SwarmState)


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryPoint(RoundMetrics):
    """A committed round that all its members have reported, as far as they were there to do so."""

    # These are the columns of the history file. A new one needs None as its default, its value in older files.
    round: Count
    time: NotNegative
    tokens: Annotated[Count, Metric("trained on by all peers so far")]
    tokens_per_second: Annotated[NotNegative, Metric("training speed of all peers", over_peers=sum)]
    peers: Annotated[Count, Metric("peers that reported the round")]
    experts_covered: Annotated[Count, Metric("experts that they have trained")]
    round_seconds: Annotated[NotNegative, Metric("how long it took, median over peers", over_peers=_median_length)]
    bytes: Annotated[Count, Metric("payload sent by all peers together", over_peers=sum, reported_as="bytes_sent")]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values that follow the schema (`#/$defs/history_point`)."""
        return dataclasses.asdict(self)


def newest_metrics(history: Sequence[RoundMetrics]) -> dict[str, Any]:
    """Each round metric as of the newest round that has it, and the rounds of the losses.

    An error is of the same round as its loss.
    """

    def newest(name: str, given: str) -> Any:
        return next((getattr(point, name) for point in reversed(history) if getattr(point, given) is not None), None)

    metrics = metrics_of(RoundMetrics)
    rounds = {"loss_round": newest("round", "train_loss"), "eval_round": newest("round", "eval_loss")}
    return {name: newest(name, metric.measured_with or name) for name, metric in metrics.items()} | rounds


class StateSource(Protocol):
    """Where views get a run from: a live collector or a file."""

    def state(self) -> SwarmState:
        """The latest state."""

    def history(self) -> list[HistoryPoint]:
        """All rounds seen so far, in order, as a new list."""

    async def wait_for_change(self, timeout_s: float) -> None:
        """Waits until state or history change after the call, for at most `timeout_s`."""


def to_text(state: SwarmState) -> str:
    """One line of JSON with sorted keys; NaN and inf raise ValueError."""
    return json.dumps(state.to_json(), sort_keys=True, allow_nan=False)


def short_id(peer_id: str) -> str:
    """The last characters of a peer id; its first characters are the same for all peers."""
    return peer_id[-SHORT_ID_CHARS:]
