"""The state of a run as plain values, the input of every view (terminal, web, Prometheus).

`schema.json` beside this file describes their JSON form, which `--once --json` and `/api/state` share. All lists are
sorted, so equal states give equal text. Names are sanitised (base/names.py); times are Unix seconds of the swarm's
clock.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, Literal, Protocol

SCHEMA_VERSION: Final = 1
# The JSON schema of `SwarmState.to_json`.
STATE_SCHEMA: Final[dict[str, Any]] = json.loads(
    (files("spes_swarm.monitor") / "schema.json").read_text(encoding="utf-8")
)
# The largest exact integer of JavaScript; larger claims of peers are clamped to it.
MAX_COUNT = (1 << 53) - 1
SHORT_ID_CHARS = 8

PeerActivity = Literal["training", "syncing", "waiting", "joining", "leaving", "late"]
# `live`: at least one peer is present; `no_peers`: none is; `replay`: read from a file.
Status = Literal["live", "no_peers", "replay"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What is being trained, from the run's manifest."""

    run_id: str
    name: str
    model: str  # its transformers type
    inner_steps: int  # local steps of each peer in a round
    num_experts: int
    experts_per_peer: int
    total_steps: int  # inner steps until the learning rate is at its minimum
    data: str | None = None  # description of the training data; None: not in the manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerState:
    """One peer with an unexpired record."""

    peer_id: str
    short_id: str  # last characters of the peer id
    name: str  # public nickname, sanitised; may be empty
    state: PeerActivity
    reachable: bool  # whether others can open connections to it
    experts: tuple[int, ...]  # that it trains now
    round: int  # last committed
    step: int  # local steps so far
    tokens_per_second: float
    loss: float | None  # of the last local step
    train_loss: float | None  # mean of the last round
    eval_loss: float | None  # on held-out text, at the last evaluation
    eval_loss_stderr: float | None = None  # its standard error
    total_tokens: int  # that it has trained on in this run
    bytes_sent: int  # payload of the last round
    bytes_received: int
    round_seconds: float  # how long its last round took
    age_s: float  # since its last record
    digest: str  # hex, of its whole reference
    agrees: bool  # False: it takes part in rounds, and its digest is not the most common one at its round


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertState:
    """One expert and its holders."""

    expert: int
    holders: tuple[str, ...]  # peer ids of present peers that train it
    reserved: tuple[str, ...]  # peer ids of absent peers with an unexpired lease on it
    age_rounds: int | None  # since a holder last committed; None: no commit seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Consensus:
    """Agreement of the peers' references."""

    digest: str | None  # hex; the most common one at the swarm's round
    agree: int  # peers at that round that have it
    differ: tuple[str, ...]  # peer ids of those that do not agree


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault reported by a peer."""

    time: float
    peer_id: str  # of the reporter
    kind: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmState:
    """The state of a run at one moment."""

    time: float
    status: Status
    silent_s: float | None  # with `no_peers`: since the last record of any peer; None: there never was one
    run: RunInfo
    round: int  # the newest that at least half of the peers have committed
    next_round_s: float | None  # estimated time to the next round; None: no peer trains
    round_progress: float  # 0 to 1
    tokens_total: int  # trained on by all peers ever seen
    tokens_per_second: float
    train_loss: float | None  # median over peers, of the newest round that reports it
    eval_loss: float | None
    eval_loss_stderr: float | None = None  # standard error of `eval_loss`, from the sequences evaluated
    experts_covered: int  # with at least one holder
    peers: tuple[PeerState, ...]
    experts: tuple[ExpertState, ...]  # every expert of the model, in order
    consensus: Consensus
    faults: tuple[Fault, ...]  # the newest last
    refused: dict[str, int]  # number of refused records, by kind
    join_command: str | None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values that follow schema.json."""
        return {"schema": SCHEMA_VERSION, **_plain(dataclasses.asdict(self))}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SwarmState:
        """The inverse of `to_json`, for values that this program has written.

        Raises:
            KeyError, TypeError: the values are malformed.
        """
        rest = {key: value for key, value in values.items() if key != "schema"}
        return cls(
            **{
                **rest,
                "run": RunInfo(**rest["run"]),
                "peers": tuple(PeerState(**{**peer, "experts": tuple(peer["experts"])}) for peer in rest["peers"]),
                "experts": tuple(
                    ExpertState(**{**e, "holders": tuple(e["holders"]), "reserved": tuple(e["reserved"])})
                    for e in rest["experts"]
                ),
                "consensus": Consensus(**{**rest["consensus"], "differ": tuple(rest["consensus"]["differ"])}),
                "faults": tuple(Fault(**fault) for fault in rest["faults"]),
            }
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryPoint:
    """A committed round. While peers still report it, a more complete point may replace this one."""

    round: int
    time: float
    tokens: int  # trained on by all peers so far
    train_loss: float | None  # median over the peers that reported it
    eval_loss: float | None
    eval_loss_stderr: float | None = None  # median over the peers; they measure the same sample
    tokens_per_second: float
    peers: int  # that reported the round
    experts_covered: int
    round_seconds: float  # median over peers
    bytes: int  # payload sent by all peers together

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values that follow schema.json (`#/$defs/history_point`)."""
        values: dict[str, Any] = _plain(dataclasses.asdict(self))
        return values


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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
