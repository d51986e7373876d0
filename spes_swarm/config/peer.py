"""The configuration of one peer, which never leaves its machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from spes_swarm.base.address import listen_addresses, peer_addresses
from spes_swarm.base.errors import ConfigError
from spes_swarm.base.strict import Grammar, Pattern, Range, Section, read_section
from spes_swarm.config.command_line import setting
from spes_swarm.config.constraints import BatchSize, Count, NotNegative, Positive, Seed, Text
from spes_swarm.config.experts_wanted import EXPERTS_FORMS, ExpertsWanted

# How this peer computes, and where things are kept. `auto` is resolved when the peer starts.
Precision = Literal["auto", "fp32", "bf16"]
ForeignExperts = Literal["auto", "fp32", "bf16", "int8", "int4"]
OnDeviceOrHost = Literal["device", "host"]
Checkpointing = Literal["none", "layers", "selective"]
Storage = Literal["auto", "memory", "disk"]
StorageOrNone = Literal["auto", "memory", "disk", "none"]
Kernel = Literal["torch", "megablocks", "loop"]


@dataclass(kw_only=True, slots=True, frozen=True)
class PeerConfig(Section):
    """How this peer takes part in a run."""

    # The run.
    initial_peers: tuple[str, ...] = setting(
        (), "addresses of peers of the run; without any, a run is founded or continued", "MADDR", group="the run"
    )
    run_id: Text | None = setting(None, "refuse to join any other run", "ID")
    invitation: Text | None = setting(
        None, "join a private run with this invitation; an output directory remembers it", "WORD|FILE"
    )
    initial_weights: Text | None = setting(
        None,
        "found the run from this existing model: a directory, or a repository of the Hub",
        "DIR|USER/REPO[@REVISION]",
    )
    from_hub: Text | None = setting(
        None,
        "resume a run from its publication; with initial peers, take from there what has not changed since",
        "USER/REPO[@REVISION]|file:DIR",
    )
    wait_for_peers: Count = setting(1, "start once N peers are present, this one included", "N")
    max_rounds: Count | None = setting(None, "leave after N rounds", "N")

    # This peer.
    output_dir: Text = setting("runs/peer", "where checkpoints, metrics and the identity are", "DIR", group="this peer")
    identity: Text | None = setting(None, "file of the private key, if it is not in the output directory", "FILE")
    name: Annotated[str, Pattern(r"[^\x00-\x1f\x7f]{1,40}", "1 to 40 printable characters")] | None = setting(
        None, "public nickname, shown by monitors", "NAME"
    )
    experts: Annotated[ExpertsWanted, Grammar(ExpertsWanted.parse, EXPERTS_FORMS)] = setting(
        "auto",
        "how many experts to train, or which ones; auto: the run's number, or fewer if memory is short",
        "auto|N|i,j",
    )
    data: Text | None = setting(
        None,
        "training data: stdlib, token files, text, conversations, hf:NAME, or a mixture such as 0.7*A + 0.3*B; "
        "an output directory remembers it",
        "SOURCE",
    )
    data_differs: bool = setting(False, "train on data other than the run's")
    seed: Seed | None = setting(
        None, "go through all token files in an order of its own; otherwise peers divide them", "SEED"
    )
    checkpoint_minutes: NotNegative = setting(
        20.0,
        "write a checkpoint at least every M minutes, and more often while writing takes little of the time; "
        "0: after every round, even if training must wait for the disk",
        "M",
    )
    keep_checkpoints: Count = setting(2, "how many of the newest checkpoints are kept", "N")
    log: Literal["tensorboard", "wandb", "trackio"] | None = setting(None, "also send metrics to this tracker")
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "how much OUTPUT_DIR/log.txt contains")
    profile_steps: Annotated[int, Range(1, 1000)] | None = setting(
        None,
        "record N steps, and the rounds among them, in OUTPUT_DIR/trace.json.gz for Perfetto",
        "N",
        flag="--profile",
    )

    # Its steps.
    device: Annotated[str, Pattern(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N")] = setting(
        "auto", "where to train", "auto|cpu|cuda|cuda:N", group="its steps"
    )
    num_threads: Annotated[int, Range(1, 2**12)] | None = setting(
        None, "CPU threads, also for exchanges (at most 8); otherwise torch decides, and exchanges have 2", "N"
    )
    batch_size: BatchSize | None = setting(None, "sequences in a local step; otherwise the run's number", "N")
    micro_batch_size: Annotated[str, Pattern(r"auto|[1-9][0-9]{0,6}", "auto or a number of sequences")] = setting(
        "auto",
        "sequences computed at a time; auto: as many as fit. Any number is halved when memory runs out; the gradients "
        "stay those of the batch",
        "auto|N",
    )
    precision: Precision = setting("auto", "of matrix products; auto: bf16 on a GPU, fp32 on a CPU")
    kernel: Kernel = setting("torch", "how the experts of a layer are computed; megablocks needs bf16 on a GPU")
    compile: bool = setting(
        False,
        "compile the decoder layers with torch.compile: the first steps are slow, and it needs a C++ compiler "
        "(on a GPU: triton and a C compiler)",
    )

    # Its memory.
    activation_checkpointing: Checkpointing = setting(
        "none", "which activations are computed again instead of being kept", group="its memory"
    )
    optimizer_states: OnDeviceOrHost = setting("device", "where the optimiser's moments are; host: in host memory")
    foreign_experts: ForeignExperts = setting(
        "auto", "form in which other peers' experts are stored; auto: bf16 on a GPU, fp32 on a CPU"
    )
    foreign_storage: OnDeviceOrHost = setting(
        "device", "where other peers' experts are stored; host: in host memory next to a GPU, read one layer ahead"
    )
    reference_storage: Storage = setting(
        "auto",
        "where the swarm's weights are kept; auto: on the disk of the output directory if they would take more than "
        "half of the free memory",
    )
    previous_reference: StorageOrNone = setting(
        "auto",
        "where a peer keeps what takes back a round that did harm: the swarm's weights before it, and its own trained "
        "ones. auto: on the disk if memory is short or the reference is there; none: others send it if need be, but "
        "among three or more peers this peer's work soon does not count, since it cannot be shown to auditors",
    )

    # Its network.
    host_maddrs: tuple[str, ...] = setting(
        ("/ip4/0.0.0.0/tcp/0",), "addresses to listen on", "MADDR", group="its network"
    )
    announce_maddrs: tuple[str, ...] = setting((), "addresses to announce instead of these", "MADDR")
    client_mode: bool = setting(
        False,
        "only open connections, accept none (behind a strict firewall); selected automatically if other peers cannot "
        "connect. A founder must accept connections",
    )
    assume_reachable: bool = setting(False, "do not check whether others can open connections to this peer")
    relay: Literal["auto", "off"] = setting("auto", "relay connections between other peers, and use relays")
    upload_mbps: Positive | None = setting(
        None,
        "this peer's upload bandwidth in Mbit/s: can lower its share of the work in a round, and keeps its transfers "
        "from filling the line",
        "MBIT",
    )
    bootstrap_timeout_s: Positive = setting(
        60.0, "how long to try to reach an initial peer", "SECONDS", flag="--bootstrap-timeout"
    )

    # Publishing.
    publish_to: Text | None = setting(
        None, "publish the model there while training", "USER/REPO|file:DIR", group="publishing"
    )
    publish_every: Count = setting(100, "rounds between publications", "ROUNDS")
    publish_mbps: Positive | None = setting(
        None, "limit on publishing in Mbit/s; otherwise a tenth of --upload-mbps, or 10", "MBIT"
    )
    publish_keep: Count | None = setting(
        None, "how many of the newest published rounds keep their tag; otherwise all do", "N"
    )

    def _check(self) -> None:
        if self.client_mode and self.assume_reachable:
            raise ConfigError(
                "assume_reachable: found true, expected false in client_mode, which accepts no connections"
            )
        # Sections are frozen; only here do addresses get their normal form.
        for name, maddrs in (
            ("initial_peers", peer_addresses(self.initial_peers)),
            ("host_maddrs", listen_addresses(self.host_maddrs)),
            ("announce_maddrs", listen_addresses(self.announce_maddrs, announced=True)),
        ):
            object.__setattr__(self, name, maddrs)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str) -> Self:
        """Reads plain values that came from `source`; raises ConfigError as `RunConfig.from_dict` does."""
        # YAML reads `experts: 2` as a number, where text is declared because of "auto".
        text = {key: str(values[key]) for key in ("experts", "micro_batch_size") if type(values.get(key)) is int}
        return read_section(cls, {**values, **text}, f"{source}: ", "peer")


def override(peer: PeerConfig, **flags: Any) -> PeerConfig:
    """Applies command-line flags to a configuration; a flag that is None was not given.

    Raises:
        ConfigError: a value has the wrong type or is impossible.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    return PeerConfig.from_dict(peer.to_dict() | given, "command line")
