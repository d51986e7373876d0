"""What the monitor knows of a run, as values; everything that shows a run (terminal, web, Prometheus) begins here.

The JSON form of these values is described by `schema.json` beside this file, and is the same for `--once --json` and
for `/api/state`. All lists are sorted, so that equal knowledge is equal text. Names have been made harmless (names.py);
times are Unix seconds of the swarm's clock.
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
# JavaScript has no larger exact integers; what peers claim beyond it is cut off.
MAX_COUNT = (1 << 53) - 1
SHORT_ID_CHARS = 8

PeerActivity = Literal["training", "syncing", "waiting", "joining", "leaving", "late"]
# `live`: somebody is there; `no_peers`: nobody is (any more); `replay`: read from a file.
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
    data: str | None = None  # what it trains on, in words; None: the manifest does not say


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerState:
    """One peer whose record has not run out."""

    peer_id: str
    short_id: str  # the end of the peer id
    name: str  # public nickname, harmless; may be empty
    state: PeerActivity
    reachable: bool  # whether others can open connections to it
    experts: tuple[int, ...]  # that it trains now
    round: int  # last committed
    step: int  # local steps so far
    tokens_per_second: float
    loss: float | None  # of the last local step
    train_loss: float | None  # mean of the last round
    eval_loss: float | None  # on held-out text, when it was last evaluated
    eval_loss_stderr: float | None = None  # its standard error
    total_tokens: int  # that it has trained on in this run
    bytes_sent: int  # payload of the last round
    bytes_received: int
    round_seconds: float  # how long its last round took
    age_s: float  # since its last record
    digest: str  # hex, of its whole reference
    agrees: bool  # False: it takes part, and its digest is not the one that most others have at its round


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertState:
    """Who trains an expert."""

    expert: int
    holders: tuple[str, ...]  # peer ids of peers that are there
    reserved: tuple[str, ...]  # peer ids of peers that are gone, but have a lease that has not run out
    age_rounds: int | None  # since a holder last committed; None: never, as far as the monitor has seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Consensus:
    """Whether all references are the same."""

    digest: str | None  # hex; what most peers at the newest round have
    agree: int  # peers of that round that have it
    differ: tuple[str, ...]  # peer ids of those that do not agree


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Something that went wrong, as told by a peer."""

    time: float
    peer_id: str  # who reports it
    kind: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmState:
    """Everything that the monitor knows now."""

    time: float
    status: Status
    silent_s: float | None  # with `no_peers`: since the last sign of anybody; None: there never was one
    run: RunInfo
    round: int  # that at least half of the peers have committed
    next_round_s: float | None  # estimated time to the next round; None: nobody trains
    round_progress: float  # 0 to 1
    tokens_total: int  # by all peers the monitor has ever seen
    tokens_per_second: float
    train_loss: float | None  # median over peers, of the newest round that has it
    eval_loss: float | None
    eval_loss_stderr: float | None = None  # of that round's eval loss, from the sample that it was measured on
    experts_covered: int  # that somebody holds
    peers: tuple[PeerState, ...]
    experts: tuple[ExpertState, ...]  # every expert of the model, in order
    consensus: Consensus
    faults: tuple[Fault, ...]  # the newest last
    refused: dict[str, int]  # records that the monitor did not accept, by kind
    join_command: str | None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values as in schema.json."""
        return {"schema": SCHEMA_VERSION, **_plain(dataclasses.asdict(self))}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SwarmState:
        """The inverse of `to_json`, for values that this program has written.

        Raises:
            KeyError, TypeError: it has not.
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
    """A committed round; while peers still report it, a point may be replaced by a fuller one."""

    round: int
    time: float
    tokens: int  # by all peers so far
    train_loss: float | None  # median over the peers that reported it
    eval_loss: float | None
    eval_loss_stderr: float | None = None  # median over the peers; they measure the same sample
    tokens_per_second: float
    peers: int  # that reported the round
    experts_covered: int
    round_seconds: float  # median over peers
    bytes: int  # payload sent by all peers together

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values as in schema.json (`#/$defs/history_point`)."""
        values: dict[str, Any] = _plain(dataclasses.asdict(self))
        return values


class StateSource(Protocol):
    """Where those who show a run get it from: a live collector, or a file."""

    def state(self) -> SwarmState:
        """What is known now."""

    def history(self) -> list[HistoryPoint]:
        """All rounds seen so far, in order; a fresh list."""

    async def wait_for_change(self, timeout_s: float) -> None:
        """Returns when state or history have changed since the call, at the latest after `timeout_s`."""


def to_text(state: SwarmState) -> str:
    """One line of JSON: stable, and without anything that JSON does not have."""
    return json.dumps(state.to_json(), sort_keys=True, allow_nan=False)


def short_id(peer_id: str) -> str:
    """The end of a peer id, which differs between peers; the beginning is the same for all."""
    return peer_id[-SHORT_ID_CHARS:]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
