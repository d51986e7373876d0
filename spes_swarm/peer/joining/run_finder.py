"""Finds the run to take part in: a new one, that of the output directory, or that of the initial peers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from spes_swarm.base import log
from spes_swarm.base.address import usable_peer_addresses
from spes_swarm.base.errors import (
    BootstrapError,
    CheckpointError,
    ConfigError,
    InvitationError,
    ManifestError,
    UserError,
    os_errors_as,
)
from spes_swarm.base.strict import differences
from spes_swarm.base.wording import plural
from spes_swarm.config.admission import check_admission
from spes_swarm.config.manifest import Manifest, found_run
from spes_swarm.config.run import RunConfig
from spes_swarm.data.run_tokenizer import TokenizerPlaces, founded_tokenizer, is_same_tokenizer
from spes_swarm.model.initial_weights import load_initial_reference, with_repeated
from spes_swarm.model.sparse_model import build_model, layout_of
from spes_swarm.peer.admission import PeerAdmission, founding_line
from spes_swarm.peer.initial_model import InitialModel
from spes_swarm.peer.joining.context import SessionContext
from spes_swarm.peer.run_data import same_run_data
from spes_swarm.port.commands import COMMAND_TIMEOUT_S, Commands
from spes_swarm.publishing.publisher import check_target
from spes_swarm.publishing.source import PublicationSource, open_source
from spes_swarm.publishing.target import parse_location
from spes_swarm.storage.invitations import add_acts, opened, own_invitation

_KNOWN_PEERS_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class FoundRun:
    """The run that this peer takes part in."""

    manifest: Manifest
    admission: PeerAdmission
    source: PublicationSource | None  # named by --from-hub
    # Addresses of peers of the run: those given, or those of an earlier session if any answers now.
    initial_peers: list[str]
    connected: list[str]  # ids of those that answer
    # Addresses of an earlier session, where nobody answers: peers that start at the same time may miss each other.
    known_peers: list[str]


def find_run(context: SessionContext) -> FoundRun:
    """Finds the run that the user wants, and asks whether this peer may publish where the user wants.

    Raises:
        UserError: as RunFinder.find; its data are obviously not this peer's, or this peer may not publish there.
    """
    found = RunFinder(context).find()
    log.context.run = found.manifest.run_id
    context.data.choose(found.manifest.run.data)  # obviously different data fails before more is asked of other peers
    if (target := context.peer.publish_to) is not None:
        if parse_location(target).repo_id is not None:
            context.console.say(f"asking the Hub whether this peer may publish to {target}")
        if (unknown := check_target(target, found.manifest.run_id)) is not None:
            context.console.say(f"{unknown}; training starts, and publishing is tried when a round is due")
    return found


def tokenizer_places(
    context: SessionContext, run: RunConfig, source: PublicationSource | None = None, connected: Sequence[str] = ()
) -> TokenizerPlaces:
    """Returns where the files of the run's tokenizer can be: with this peer, in its publication, with other peers.

    Raises:
        DataError: this peer's data are obviously not those of the run.
    """

    def ask_peers(digest: str) -> bytes | None:
        return context.ask(Commands.fetch_tokenizer, None, peers=list(connected), digest=digest)

    return TokenizerPlaces(
        packed=context.directory.tokenizer,
        folders=context.data.folders(run.data),
        published=source.tokenizer if source is not None else lambda: None,
        ask_peers=ask_peers,
    )


class RunFinder:
    """Finds the run."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._peer, self._directory, self._console = context.peer, context.directory, context.console
        self._invitation = own_invitation(context.peer, context.directory)
        self._initial_peers = list(context.peer.initial_peers)
        self._connected: list[str] = []
        self._known_peers: list[str] = []
        self._source: PublicationSource | None = None

    def find(self) -> FoundRun:
        """Finds the run that the user wants, and verifies its manifest.

        Raises:
            UserError: there is no such run, it differs from what the user has asked for, or does not admit this peer.
        """
        manifest, invitation, identity = self._find(), self._invitation, self._context.identity
        if invitation is not None and self._peer.invitation is None and invitation.run_id != manifest.run_id:
            invitation = None  # of an earlier attempt to join another run
        if invitation is not None:
            terms = opened(invitation, manifest).terms
            if self._peer.publish_to is not None and not terms.may_publish:
                raise InvitationError("the invitation does not include the right to publish: leave out --publish-to")
            if terms.experts is not None:
                self._console.say(f"the invitation allows at most {plural(terms.experts, 'expert')}")
        admission = PeerAdmission(manifest, self._directory, identity, invitation)
        check_admission(manifest, identity.peer_id, admission.shown, time.time())
        if self._source is not None:
            with os_errors_as(UserError, f"{self._directory.acts}"):
                add_acts(self._directory.acts, self._source.publication.decoded_acts, manifest)
        return FoundRun(manifest, admission, self._source, self._initial_peers, self._connected, self._known_peers)

    def _find(self) -> Manifest:
        stored = self._directory.manifest()
        peer = self._peer
        if peer.from_hub is not None:
            self._source = open_source(peer.from_hub, peer.run_id)
            published = self._source.manifest.run_id
            if stored is not None and published != stored.run_id:
                raise UserError(
                    f"{self._belongs_to(stored)}, but --from-hub {peer.from_hub} has run {published}: choose another "
                    "--output-dir, or leave out --from-hub"
                )
            self._console.say(f"round {self._source.publication.round} of {published} is published")
        if not peer.initial_peers and stored is None:
            if self._source is not None:
                return self._expected(self._source.manifest)
            return self._found()
        if stored is not None:
            self._check_weights(stored)
        if not peer.initial_peers and stored is not None:
            if differing := _differences(self._context.run, stored.run):
                raise UserError(
                    f"{self._belongs_to(stored)}, whose configuration differs from the given one in {differing}: "
                    "choose another --output-dir, or leave out --config to continue the run"
                )
            self._console.say("continuing the run of this output directory")
            self._initial_peers = self._reach_known_peers()
            return stored
        self._console.say(f"connecting to {plural(len(peer.initial_peers), 'initial peer')}")
        timeout_s, maddrs = peer.bootstrap_timeout_s, list(peer.initial_peers)
        deadline = time.monotonic() + timeout_s
        self._connected = self._context.ask(Commands.bootstrap, timeout_s + 30.0, maddrs=maddrs, timeout_s=timeout_s)
        expected = peer.run_id or (stored.run_id if stored is not None else None)
        if self._source is not None:
            expected = self._source.manifest.run_id
        if expected is None and self._invitation is not None and self._peer.invitation is not None:
            expected = self._invitation.run_id
        try:
            manifest = self._ask_for_manifest(expected, deadline - time.monotonic())
        except ManifestError as exc:
            if stored is not None and peer.run_id is None:
                raise UserError(f"{self._belongs_to(stored)}: {exc}; choose another --output-dir") from exc
            raise
        return self._expected(manifest)

    def _ask_for_manifest(self, expected: str | None, timeout_s: float) -> Manifest:
        shown = b""
        if self._invitation is not None:
            shown = self._invitation.admit(self._context.identity.peer_id)
            if self._directory.raw_manifest() is None:
                # From now on it may be this peer's alone, so another attempt needs the same identity.
                self._directory.remember_invitation(self._invitation.to_text())
        wait_s = COMMAND_TIMEOUT_S + max(0.0, timeout_s)
        return self._context.ask(
            Commands.fetch_manifest,
            wait_s,
            peers=self._connected,
            run_id=expected,
            timeout_s=timeout_s,
            admission=shown,
        )

    def _belongs_to(self, stored: Manifest) -> str:
        return f"output directory {self._directory.path} belongs to run {stored.run_id}"

    def _expected(self, manifest: Manifest) -> Manifest:
        """Refuses the manifest of a run that is joined if it is not configured as expected."""
        if differing := _differences(self._context.run, manifest.run):
            raise ConfigError(
                f"the `run` section of the configuration differs from that of {manifest.run_id} in {differing}; a "
                "joiner takes the run's settings from the swarm: leave the section out"
            )
        return manifest

    def _check_weights(self, stored: Manifest) -> None:
        """Refuses initial weights other than those from which this peer founded the run of its output directory."""
        name = self._peer.initial_weights
        if name is None or stored.founder != self._context.identity.peer_id:
            return
        model = InitialModel.find(name)
        if self._directory.knows_weights(model.absolute_name, model.file_stamps()):
            return
        self._console.say("comparing the initial weights with those of the run")
        try:
            self._read_weights(model, stored.run)
        except (CheckpointError, ConfigError) as exc:
            raise UserError(
                f"{self._belongs_to(stored)}, but {exc}: choose another --output-dir to found a run from this model, "
                "or leave out --initial-weights to continue the run"
            ) from exc

    def _reach_known_peers(self) -> list[str]:
        """Returns the known addresses of an earlier session if any answers: the run may have continued meanwhile.

        Otherwise a founder that comes back would continue alone, next to the swarm that it founded.
        """
        known = usable_peer_addresses(self._directory.known_peers())
        if not known:
            return []
        try:
            self._connected = self._context.ask(
                Commands.bootstrap, COMMAND_TIMEOUT_S, maddrs=known, timeout_s=_KNOWN_PEERS_TIMEOUT_S
            )
        except BootstrapError:
            if not self._peer.client_mode:
                self._console.say(
                    "no peer of the last session answers: this peer starts alone, and others can join it; if one of "
                    "them has gone further, its later rounds may not count"
                )
            self._known_peers = known
            return []
        with suppress(BootstrapError, ManifestError):  # whatever they answer, unless it is that the swarm has upgraded
            self._ask_for_manifest(None, 0.0)
        return known

    def _found(self) -> Manifest:
        run = self._context.run
        assert run is not None  # preflight.check_run has rejected that
        tokenizer, described = founded_tokenizer(run, tokenizer_places(self._context, run))
        if described.local is not None:
            self._console.say(f"tokenizer {tokenizer.name} is local; other peers get it from the swarm")
        run = dataclasses.replace(run, tokenizer=described)
        run = dataclasses.replace(run, data=self._context.data.found(run.data, tokenizer))
        model = build_model(run.model.type, run.model.settings, run.training.seed, "meta", on_meta=True)
        layout = layout_of(model)
        run = self._with_initial_weights(run)
        self._console.say(founding_line(run, self._peer.output_dir))
        return found_run(run, layout.digest, self._context.identity)

    def _with_initial_weights(self, run: RunConfig) -> RunConfig:
        """Returns the configuration with the digest of the initial weights that the user has named."""
        name, expected = self._peer.initial_weights, run.model.initial_weights
        if name is None:
            if expected is not None:
                raise ConfigError("run.model.initial_weights names weights to start from: give --initial-weights MODEL")
            return run
        self._console.say("reading the initial weights")
        initial = InitialModel.find(name)
        model = dataclasses.replace(run.model, initial_weights=self._read_weights(initial, run))
        model, lost = with_repeated(model, initial.configuration())
        if lost:
            self._console.say(f"exports will not repeat {', '.join(lost)[:200]} of the model's configuration")
        return dataclasses.replace(run, model=model)

    def _read_weights(self, model: InitialModel, run: RunConfig) -> str:
        """Returns the digest of initial weights, which must be those of the run if it names any."""
        directory, stamps = model.weights(self._console.say), model.file_stamps()
        empty = build_model(run.model.type, run.model.settings, run.training.seed, "meta", on_meta=True)
        layout = layout_of(empty)
        digest = load_initial_reference(directory, layout, np.empty(layout.num_elements, dtype=np.float32), empty)
        if run.model.initial_weights not in (None, digest):
            raise ConfigError(f"--initial-weights: {model.name} does not have the weights that the run starts from")
        self._directory.remember_weights(model.absolute_name, stamps)
        return digest


def _differences(given: RunConfig | None, run: RunConfig) -> str:
    """Lists the settings in which a run is not configured as expected; "" if there is none.

    The founder has filled in digests. None expects nothing.
    """
    if given is None:
        return ""
    tokenizer = run.tokenizer if is_same_tokenizer(given.tokenizer, run.tokenizer) else given.tokenizer
    weights = given.model.initial_weights or run.model.initial_weights
    model = dataclasses.replace(
        given.model,
        initial_weights=weights,
        extra_settings=given.model.extra_settings or run.model.extra_settings,
        generation=given.model.generation or run.model.generation,
    )
    data = run.data if same_run_data(given.data, run.data) else given.data
    expected = dataclasses.replace(given, tokenizer=tokenizer, model=model, data=data)
    return "" if expected == run else differences(expected.to_dict(), run.to_dict(), "run")
