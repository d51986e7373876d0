"""The events of a peer's metrics.jsonl; docs/events.md lists them.

An event is one dataclass here and one call of `Metrics.write`. Its name in the file is that of its class in snake case.
Those that happen in the network process reach the trainer as they are (`port.commands.Notification`).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from spes_swarm.base.address import tcp_endpoint
from spes_swarm.base.wording import plural
from spes_swarm.protocol.members.round_metrics import Of, RoundMetrics, notes_of


class Event:
    """Something that happens to a peer. The docstring of each event says when it is written."""

    __slots__ = ()
    event_name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.event_name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def _values(self) -> Iterator[tuple[str, Of, Any]]:
        kind: type = type(self)  # to mypy, type[Event] is not hashable
        return ((name, note, getattr(self, name)) for name, note in notes_of(kind).items())

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as the file has them."""
        return {name: value for name, note, value in self._values() if value is not None or not note.omitted}

    def figures(self) -> dict[str, float]:
        """Returns what experiment trackers get of it, as far as it is known."""
        return {name: float(value) for name, note, value in self._values() if value is not None and note.tracked}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach(Event):
    """Written when the peer joins, and when a later check of whether others can connect to it gives another result."""

    reachable: Annotated[bool | None, Of("whether others can open connections to it; null: not known", "boolean")]
    address: Annotated[str | None, Of("the address that was tried; null: none", "multiaddr")] = None
    via: Annotated[Sequence[str], Of("the peers that tried it", "peer ids")] = ()

    def describe(self) -> list[str]:
        """Returns lines for the user; none if there is nothing to report, as for peers on one machine."""
        endpoint = None if self.address is None else tcp_endpoint(self.address)
        if endpoint is None or ipaddress.ip_address(endpoint[0]).is_loopback:
            return []
        asked = plural(len(self.via), "peer")
        if self.reachable:
            return [f"reachable at {self.address} (tried by {asked})"]
        host, port = endpoint
        return [
            f"not reachable from outside: {host} accepts no connections on TCP port {port} (tried by {asked}); "
            "taking part as a client, whose parts other peers average",
            f"to be reachable, open TCP port {port} in the router or firewall (--host-maddrs chooses the port), or use "
            "--announce-maddrs",
        ]


UNKNOWN_REACH = Reach(reachable=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Data(Event):
    """Written once, when the peer has opened its data. Paths are not in it."""

    kind: Annotated[str | None, Of("stdlib, corpus, hf, mixture, or own if each peer brings its own data", "name")]
    name: Annotated[str | None, Of("label of a corpus; of hf: USER/NAME on the Hub, or that of a directory", "name")]
    digest: Annotated[
        str | None, Of("digest of a corpus's tokens, or of an hf data set's files and column", "hex BLAKE3")
    ]
    python_version: Annotated[str | None, Of("the Python whose standard library is the text", "version")]
    config: Annotated[str | None, Of("configuration of an hf data set; null: the default one", "name")]
    split: Annotated[str | None, Of("split of an hf data set; null: train", "name")]
    revision: Annotated[str | None, Of("revision of an hf data set; null: a directory", "commit")]
    sources: Annotated[Sequence[Mapping[str, Any]], Of("of a mixture: weight and the fields above", "sources")]
    shards: Annotated[int, Of("token files that this peer has", "shards")]
    shards_total: Annotated[int, Of("token files of the whole data", "shards")]
    differs: Annotated[bool, Of("whether these are not the run's data", "boolean")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Listening(Event):
    """Written once, when others can join through this peer, which is before `--wait-for-peers` waits."""

    run_id: Annotated[str, Of("the run", "run id")]
    maddrs: Annotated[Sequence[str], Of("this peer's addresses; empty: others cannot connect to it", "multiaddrs")]


@dataclass(frozen=True, kw_only=True, slots=True)
class FromHub(Event):
    """Written when the peer has read its reference from a publication, as no other peer has a newer one."""

    round: Annotated[int, Of("the published round", "round")]
    digest: Annotated[str, Of("digest of the whole reference", "hex BLAKE3")]
    seconds: Annotated[float, Of("how long reading and verifying it took", "seconds")]


@dataclass(frozen=True, kw_only=True, slots=True)
class HubBlocks(Event):
    """Written when the peer has fetched those blocks from a publication that have not changed since."""

    blocks: Annotated[Sequence[int], Of("the blocks that were fetched", "block indices")]
    payload_bytes: Annotated[int, Of("their size", "bytes")]
    seconds: Annotated[float, Of("how long fetching them took", "seconds")]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncProgress(Event):
    """Written about once a second while the peer fetches the reference from others."""

    round: Annotated[int, Of("the round that is fetched", "round")]
    done_bytes: Annotated[int, Of("what is in place and verified", "bytes")]
    total_bytes: Annotated[int, Of("size of the whole reference", "bytes")]
    payload_bytes: Annotated[int, Of("all that donors have sent", "bytes")]
    chunks_by_donor: Annotated[Mapping[str, int], Of("chunks in place, by the peer that sent them", "chunks")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync(Event):
    """Written when the peer has fetched the reference from others: at joining; or in place of a round, with `why`."""

    round: Annotated[int, Of("the round that was fetched", "round")]
    seconds: Annotated[float, Of("how long fetching it took", "seconds")]
    payload_bytes: Annotated[int, Of("all that donors have sent, including discarded bytes", "bytes")]
    why: Annotated[str | None, Of("why it fetched it in place of a round", "text", omitted=True)] = None
    digest: Annotated[str | None, Of("digest of the whole reference", "hex BLAKE3", omitted=True)] = None
    refetched_bytes: Annotated[int | None, Of("sent, but unfinished, twice or corrupt", "bytes", omitted=True)] = None
    superseded_bytes: Annotated[int | None, Of("sent, but changed by the swarm since", "bytes", omitted=True)] = None
    resumed_bytes: Annotated[int | None, Of("what an earlier attempt left on disk", "bytes", omitted=True)] = None
    outdated_blocks: Annotated[int | None, Of("blocks that were older than the swarm's", "blocks", omitted=True)] = None
    donors: Annotated[Mapping[str, int] | None, Of("chunks received, by donor", "chunks", omitted=True)] = None
    moved_on: Annotated[Mapping[str, int] | None, Of("chunks a donor no longer had", "chunks", omitted=True)] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Join(Event):
    """Written once, when the peer has joined the run and begins to train."""

    run_id: Annotated[str, Of("the run", "run id")]
    maddrs: Annotated[Sequence[str], Of("this peer's addresses, as in `listening`", "multiaddrs")]
    experts: Annotated[Sequence[int], Of("the experts that it holds", "expert indices")]
    round: Annotated[int, Of("the round that it starts from", "round")]
    seconds: Annotated[float, Of("time since the command was started", "seconds")]
    ranks: Annotated[int, Of("processes of this peer that compute gradients", "ranks")]
    kernel: Annotated[str, Of("the expert kernel, see `peer.kernel`", "name")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease(Event):
    """Written when the experts that the peer holds change: at joining, and after a commit."""

    gained: Annotated[Sequence[int], Of("experts that it holds from now on", "expert indices")]
    lost: Annotated[Sequence[int], Of("experts that it gives up", "expert indices")]
    round: Annotated[int | None, Of("the commit that changed them; absent at joining", "round", omitted=True)] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Link(Event):
    """Written when a connection to another peer was made."""

    peer: Annotated[str, Of("the other peer", "peer id")]
    relayed: Annotated[bool, Of("whether it leads through a third peer", "boolean")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(Event):
    """Written after each local step, unless its loss or a gradient was NaN or infinite."""

    round: Annotated[int, Of("the newest round of this peer", "round")]
    step: Annotated[int, Of("local steps of this peer in the run, this one included", "steps")]
    loss: Annotated[float, Of("mean cross-entropy of the batch", "nats per target", tracked=True)]
    tokens: Annotated[int, Of("tokens in the batch", "tokens")]
    tokens_per_second: Annotated[float, Of("training speed of this peer, moving average", "tokens/s", tracked=True)]
    teraflops: Annotated[float, Of("operations that steps need, moving average", "TFLOP/s", tracked=True)]
    mfu: Annotated[float | None, Of("model FLOPs utilisation; null: peak not known", "fraction", tracked=True)]
    lr: Annotated[float, Of("learning rate", "dimensionless", tracked=True)]
    data: Annotated[
        Sequence[int] | None,
        Of("position in each data set that the peers divide; absent if they divide none", "positions", omitted=True),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Group(Event):
    """Written when the group of a round has formed, and the exchange begins."""

    round: Annotated[int, Of("the round in progress", "round")]
    peers: Annotated[int, Of("members of the group, this one included", "peers")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Round(RoundMetrics, Event):
    """Written once per committed round, when its traffic is known, at the latest when the next one is committed."""

    round: Annotated[int, Of("the committed round", "round", tracked=True)]
    peers: Annotated[int, Of("members of the commit", "peers", tracked=True)]
    experts_covered: Annotated[int, Of("experts that some member trains", "experts", tracked=True)]
    swarm_tokens: Annotated[int, Of("tokens of all peers, in all commits up to this one", "tokens")]
    group_seconds: Annotated[float, Of("how long the group took to form", "seconds", tracked=True)]
    exchange_seconds: Annotated[float, Of("how long the exchange took", "seconds", tracked=True)]
    apply_seconds: Annotated[float, Of("how long applying it to the live weights took", "seconds")]
    evaluate_seconds: Annotated[float, Of("how long measuring loss and routing took", "seconds")]
    standstill_seconds: Annotated[
        float | None, Of("time without local steps since the previous event; null: no step followed", "seconds")
    ] = None
    parts_total: Annotated[int, Of("parts into which the exchange was divided", "parts")]
    parts_missing: Annotated[int, Of("parts that no peer delivered, which keep the old reference", "parts")]
    digest: Annotated[str, Of("digest of the whole reference", "hex BLAKE3")]
    experts_held: Annotated[Sequence[int], Of("experts that this peer holds from now on", "expert indices")]
    merge_alpha: Annotated[float | None, Of("weight of the expert merge; null: none", "fraction", tracked=True)]
    loss_rose: Annotated[
        bool | None,
        Of("whether this peer's loss had risen since the commit before; null: not known", "boolean"),
    ] = None
    taken_back: Annotated[
        int | None, Of("the round that this one takes back, as most peers' loss had risen", "round", omitted=True)
    ] = None
    payload_bytes_sent: Annotated[int | None, Of("payload sent; null: not known", "bytes", tracked=True)] = None
    payload_bytes_received: Annotated[int | None, Of("payload received; null: not known", "bytes", tracked=True)] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing(Event):
    """Written after each evaluation, and when an expert dies or recovers. Layers with experts are numbered from 0."""

    round: Annotated[int, Of("the committed round", "round")]
    load: Annotated[Sequence[Sequence[float]], Of("load of each expert, for each layer", "fair shares")]
    load_entropy: Annotated[Sequence[float], Of("entropy of each layer's load over its maximum", "fraction")]
    held_share: Annotated[float, Of("routed tokens that went to experts of this peer", "fraction")]
    router_entropy: Annotated[
        Sequence[float] | None, Of("entropy of each layer's router over its maximum", "fraction", omitted=True)
    ] = None
    similarity_mean: Annotated[
        Sequence[float] | None,
        Of("similarity of two experts, mean over each layer; absent if not evaluated", "cosine", omitted=True),
    ] = None
    similarity_max: Annotated[Sequence[float] | None, Of("the largest of each layer", "cosine", omitted=True)] = None
    dead: Annotated[Sequence[tuple[int, int]], Of("experts that are dead on this peer's tokens", "[layer, expert]")]
    dead_in_swarm: Annotated[Sequence[tuple[int, int]], Of("experts that most peers call dead", "[layer, expert]")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault(Event):
    """Written when another peer does something wrong, or something fails here that does not end this peer."""

    kind: Annotated[str, Of("what is wrong, one word for scripts", "name")]
    peer: Annotated[str, Of("the peer whose fault it is, which may be this one", "peer id")]
    detail: Annotated[str, Of("the reason", "text")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint(Event):
    """Written when a checkpoint is on the disk."""

    round: Annotated[int, Of("the round of its reference", "round")]
    seconds: Annotated[float, Of("how long it took, mostly in the background", "seconds")]
    pause_s: Annotated[float, Of("how long training waited for it", "seconds")]
    bytes_written: Annotated[int, Of("what was written", "bytes")]
    bytes_linked: Annotated[int, Of("what it shares with the previous checkpoint", "bytes")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Publish(Event):
    """Written when this peer has published a round."""

    round: Annotated[int, Of("the published round", "round")]
    digest: Annotated[str | None, Of("digest of the whole reference", "hex BLAKE3")]
    revision: Annotated[str | None, Of("name to read it by: a commit, or a directory", "name")]
    bytes_sent: Annotated[int | None, Of("bytes sent to the target; null: not known", "bytes")]
    seconds: Annotated[float | None, Of("how long publishing took", "seconds")]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleEnd(Event):
    """Written once, when the schedule is complete."""

    round: Annotated[int, Of("the newest round of this peer", "round")]
    steps: Annotated[int, Of("inner steps of all rounds up to this one", "steps")]
    total_steps: Annotated[int, Of("length of the schedule, `training.total_steps`", "steps")]
    at_end: Annotated[str, Of("what follows, `training.at_end`", "name")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave(Event):
    """Written when a peer that had joined leaves."""

    round: Annotated[int, Of("the newest round of this peer", "round")]
