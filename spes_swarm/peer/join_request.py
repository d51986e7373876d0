"""What the user asks of a session: settings, in `join` also the command line, validated before anything starts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spes_swarm.base.errors import ConfigError
from spes_swarm.config.data_source import HF_PREFIX
from spes_swarm.config.file import RawConfigFile, continued_config_path, default_config_path, read_config_file
from spes_swarm.config.peer import PeerConfig, override
from spes_swarm.config.run import RunConfig
from spes_swarm.storage.invitations import own_invitation
from spes_swarm.storage.run_directory import RunDirectory


@dataclass(frozen=True)
class DraftRequest:
    """A request of `join` validated except for the model, which needs transformers."""

    peer: PeerConfig
    file: RawConfigFile
    run_is_explicit: bool  # the user passed --config

    def build_run(self) -> RunConfig | None:
        """Builds the run of a Session; imports transformers, which takes seconds.

        Raises:
            UserError: its model cannot be built, or the initial weights do not supply one.
        """
        # The packaged configurations are only for founding: nothing is expected of a run that is joined or continued.
        if not self.run_is_explicit and not founds_run(self.peer):
            return None
        if self.file.lacks_model and not founds_run(self.peer):
            return _with_known_model(self.file, self.peer)
        return self.founded_run()

    def founded_run(self, *, with_tokenizer: bool = True) -> RunConfig | None:
        """Builds the run of a peer that founds one; None without a `run` section. Imports transformers.

        Args:
            with_tokenizer: see `InitialModel.describe_run`.

        Raises:
            UserError: as `build_run`.
        """
        if not self.file.lacks_model:
            return self.file.build_run()
        assert self.file.run is not None
        assert self.peer.initial_weights is not None  # else read_config_file has refused it
        from spes_swarm.peer.initial_model import InitialModel

        model = InitialModel.find(self.peer.initial_weights)
        adapt = not self.run_is_explicit
        return model.describe_run(self.file.run, self.file.source, adapt=adapt, with_tokenizer=with_tokenizer)


def _with_known_model(file: RawConfigFile, peer: PeerConfig) -> RunConfig | None:
    """Completes a `run` section without a model from the manifest of the output directory, if it has one."""
    stored = RunDirectory(Path(peer.output_dir)).raw_manifest()
    return None if stored is None else RunConfig.from_dict({**stored.run, **(file.run or {})}, file.source)


def founds_run(peer: PeerConfig) -> bool:
    """Returns True if the peer would found a run, rather than join or continue one."""
    if peer.initial_peers or peer.from_hub is not None:
        return False
    return RunDirectory(Path(peer.output_dir)).raw_manifest() is None


def read_request(options: argparse.Namespace) -> DraftRequest:
    """Reads the configuration and applies the flags.

    Raises:
        ConfigError: the configuration or a flag is invalid.
        AddressError: an address is invalid.
        InvitationError: the invitation is damaged, or to another run.
    """
    flags = dict(vars(options))
    config_path, private = flags.pop("config", None), flags.pop("private", False)
    draft = draft_request(config_path, flags.get("initial_weights"), lambda peer: override(peer, **flags))
    own_invitation(draft.peer, RunDirectory(Path(draft.peer.output_dir)))
    _check_effects(flags | {"private": True} if private else flags, draft.peer)
    run = draft.file.run
    if private and run is not None and run.get("admission", "open") == "open":
        draft = replace(draft, file=replace(draft.file, run={**run, "admission": "invite"}))
    return draft


def _check_effects(flags: Mapping[str, Any], peer: PeerConfig) -> None:
    """Refuses flags that would have no effect.

    Settings of a configuration file may have none: several peers can share the file.
    """
    directory = RunDirectory(Path(peer.output_dir))
    stored, founds = directory.raw_manifest(), founds_run(peer)
    known_data = directory.known_data()
    has_data = peer.data is not None or (known_data is not None and known_data.differs)
    listens = (not peer.client_mode, "is for a peer that accepts connections: leave out --client-mode")
    needs_publishing = (peer.publish_to is not None, "requires --publish-to")
    is_open = stored is not None and stored.run.get("admission", "open") == "open"
    elsewhere = "choose another --output-dir to found a private one, or leave out --private"
    joining = "--from-hub resumes" if not peer.initial_peers else "--initial-peers joins"
    for flag, (has_effect, why) in (
        ("publish_every", needs_publishing),
        ("publish_mbps", needs_publishing),
        ("publish_keep", needs_publishing),
        ("announce_maddrs", listens),
        ("host_maddrs", listens),
        ("seed", (not (peer.data or "").startswith(HF_PREFIX), "is the order of token files, but --data streams")),
        ("bootstrap_timeout_s", (bool(peer.initial_peers), "is for --initial-peers, of which there are none")),
        ("initial_weights", (founds or stored is not None, f"founds a run, but {joining} one: leave out one of them")),
        ("private", (not is_open, f"founds a private run, but {directory.path} belongs to an open one: {elsewhere}")),
        ("private", (founds or stored is not None, f"founds a run, but {joining} one: leave out one of them")),
        ("invitation", (not founds, "is for joining a private run, which needs --initial-peers")),
        ("data_differs", (not founds, "is for joiners: the data of a founder are those of the run")),
        ("data_differs", (has_data, "is for data other than the run's: name them with --data")),
    ):
        if flag in flags and not has_effect:
            raise ConfigError(f"--{flag.removesuffix('_s').replace('_', '-')} {why}")


def draft_request(
    config: Path | str | None, initial_weights: str | None, change: Callable[[PeerConfig], PeerConfig]
) -> DraftRequest:
    """Reads a configuration, by default one of the packaged ones, and changes its peer.

    Raises:
        ConfigError: the configuration is invalid.
    """
    default = default_config_path() if initial_weights is None else continued_config_path()
    file = read_config_file(config or default, initial_weights)
    return DraftRequest(change(file.peer), file, config is not None)
