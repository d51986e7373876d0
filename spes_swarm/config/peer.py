"""The configuration of one peer, which never leaves its machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from spes_swarm.base.address import listen_addresses, peer_addresses
from spes_swarm.base.errors import ConfigError
from spes_swarm.base.log import LEVELS
from spes_swarm.base.strict import Pattern, Range, Section, read_section
from spes_swarm.config.constraints import BatchSize, Count, NotNegative, Positive, Seed, Text


@dataclass(kw_only=True, slots=True, frozen=True)
class PeerConfig(Section):
    """How this peer takes part in a run."""

    output_dir: Text = "runs/peer"  # checkpoints and metrics
    identity: Text | None = None  # file of the private key; None = inside output_dir
    experts: Text = "auto"  # "auto" (the run's experts_per_peer), "N" experts, or a list "i,j,k"
    data: Text | None = None  # source; None = that of the last session, or the standard library if the run uses it
    data_differs: bool = False  # train on data that is not the run's
    device: Annotated[str, Pattern(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N")] = "auto"  # where to train
    batch_size: BatchSize | None = None  # sequences per local step; None = the run's
    # Sequences of a local step that are computed at a time; auto: as many as fit. The step's gradients stay the same.
    micro_batch_size: Annotated[str, Pattern(r"auto|[1-9][0-9]{0,6}", "auto or a number of sequences")] = "auto"
    precision: Annotated[str, Pattern(r"auto|fp32|bf16", "auto, fp32 or bf16")] = "auto"  # auto: bf16 on a GPU
    # How experts of other peers are stored; auto: as the precision of this device. All but fp32 round.
    foreign_experts: Annotated[str, Pattern(r"auto|fp32|bf16|int8|int4", "auto, fp32, bf16, int8 or int4")] = "auto"
    # Where they are: on the device, or in host memory (beside a GPU).
    foreign_storage: Annotated[str, Pattern(r"device|host", "device or host")] = "device"
    # Which activations are computed again in backward instead of being kept.
    activation_checkpointing: Annotated[str, Pattern(r"none|layers|selective", "none, layers or selective")] = "none"
    compile: bool = False  # compile the decoder layers with torch.compile; the first steps are slow
    # Where the optimiser's moments are: on the device, or in host memory (beside a GPU).
    optimizer_states: Annotated[str, Pattern(r"device|host", "device or host")] = "device"
    # Where the reference and the contribution are; auto: on the disk of output_dir if memory is short.
    reference_storage: Annotated[str, Pattern(r"auto|memory|disk", "auto, memory or disk")] = "auto"
    # Where what takes back the last commit is: a second reference, and this peer's trained weights before it; auto: on
    # the disk if memory is short or the reference is there; none: other peers send it if need be, and as this peer
    # cannot show its work in audits, it will reduce nothing and lead no rounds.
    previous_reference: Annotated[str, Pattern(r"auto|memory|disk|none", "auto, memory, disk or none")] = "auto"
    # How the experts of a layer are computed.
    kernel: Annotated[str, Pattern(r"torch|megablocks|loop", "torch, megablocks or loop")] = "torch"
    num_threads: Annotated[int, Range(1, 2**12)] | None = None  # CPU threads of the trainer; None = torch decides
    seed: Seed | None = None  # of this peer's own order of token files; None = the peers divide one order
    initial_peers: tuple[str, ...] = ()  # multiaddresses of peers of the run; none = found a run
    run_id: Text | None = None  # the run to join; None = that of the initial peers
    invitation: Text | None = None  # to a private run: the word, or a file with it; None = that of the last session
    host_maddrs: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)  # multiaddresses to listen on
    announce_maddrs: tuple[str, ...] = ()  # multiaddresses to announce; none = those listened on
    client_mode: bool = False  # accept no connections; for peers that cannot be reached
    assume_reachable: bool = False  # do not check whether others can connect to this peer
    relay: Annotated[str, Pattern(r"auto|off", "auto or off")] = "auto"  # relay others' connections, and use relays
    wait_for_peers: Count = 1  # peers, this one included, that must be present before training starts
    max_rounds: Count | None = None  # rounds after which this peer leaves; None = never
    # A checkpoint is written after a round, at least every so many minutes, and more often while writing takes little
    # of the time; 0 = after every round, even if training must wait for the disk.
    checkpoint_minutes: NotNegative = 20.0
    keep_checkpoints: Count = 2  # how many of the newest checkpoints are kept
    profile_steps: Annotated[int, Range(1, 1000)] | None = None  # steps recorded for OUTPUT_DIR/trace.json.gz
    bootstrap_timeout_s: Positive = 60.0  # how long to try to reach an initial peer
    name: Annotated[str, Pattern(r"[^\x00-\x1f\x7f]{1,40}", "1 to 40 printable characters")] | None = None  # public
    upload_mbps: Positive | None = None  # declared upload bandwidth in Mbit/s; None = not declared
    initial_weights: Text | None = None  # model of a new run: directory or USER/REPO[@REVISION]; None = random weights
    publish_to: Text | None = None  # USER/REPO on the Hub, or file:DIRECTORY; None = this peer does not publish
    publish_every: Count = 100  # rounds between publications
    publish_mbps: Positive | None = None  # limit on publishing in Mbit/s; None = a tenth of upload_mbps, or 10 Mbit/s
    publish_keep: Count | None = None  # how many of the newest published rounds keep their tag; None = all
    from_hub: Text | None = None  # resume a run from its publication: USER/REPO[@REVISION] or file:DIRECTORY
    log: Annotated[str, Pattern(r"tensorboard|wandb|trackio", "tensorboard, wandb or trackio")] | None = None  # tracker
    log_level: Annotated[str, Pattern("|".join(LEVELS), "debug, info, warning or error")] = "info"  # of log.txt

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
