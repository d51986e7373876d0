"""Peer-to-peer training of Mixture-of-Experts language models by sparse expert synchronisation (SPES).

The public interface: settings (`RunConfig`, `PeerConfig`, `load_config`), one session of a peer in a run (`Session`),
the export of its model (`export_model`), and the errors that these raise. (The function is not called `export` because
the command `spes_swarm.export` is a module of that name.)

`import spes_swarm` is quick. torch, transformers and hivemind are imported with the first name that needs them.

Where to look first:

- how a peer joins, step by step: `peer/joining/join.py`; its loop: `training/trainer.py`
- the states of a round at a peer: `training/rounds/life.py`; its phases: `network/round/sync_round.py`
- how the group of a round forms: `protocol/meeting/meeting.py`
- who averages what: `protocol/rounds/plan.py`; what a member does with it: `protocol/rounds/round_state.py`
- who trains which expert: `protocol/ownership/reassignment.py`
- settings and flags: `config/run.py` of the swarm, `config/peer.py` of a peer
- events of metrics.jsonl: `metrics/events.py`; metrics: `protocol/members/round_metrics.py`
- hivemind: `network/transport` alone

docs/architecture.md is a tour, and has a glossary.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spes_swarm.base.errors import (
    AddressError,
    BootstrapError,
    CapacityError,
    CheckpointError,
    ConfigError,
    DataError,
    DivergenceError,
    HubError,
    InvitationError,
    LeftEarlyError,
    ManifestError,
    NetworkProcessError,
    PublicationError,
    SupersededError,
    SwarmError,
    UserError,
    VersionError,
)
from spes_swarm.base.version import __version__

if TYPE_CHECKING:
    from spes_swarm.config.file import ConfigFile, load_config
    from spes_swarm.config.peer import PeerConfig
    from spes_swarm.config.run import RunConfig
    from spes_swarm.export import export_model
    from spes_swarm.peer.session import Session, SessionResult

__all__ = [
    "AddressError",
    "BootstrapError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "ConfigFile",
    "DataError",
    "DivergenceError",
    "HubError",
    "InvitationError",
    "LeftEarlyError",
    "ManifestError",
    "NetworkProcessError",
    "PeerConfig",
    "PublicationError",
    "RunConfig",
    "Session",
    "SessionResult",
    "SupersededError",
    "SwarmError",
    "UserError",
    "VersionError",
    "__version__",
    "export_model",
    "load_config",
]

_MODULES = {
    "ConfigFile": "spes_swarm.config.file",
    "PeerConfig": "spes_swarm.config.peer",
    "RunConfig": "spes_swarm.config.run",
    "Session": "spes_swarm.peer.session",
    "SessionResult": "spes_swarm.peer.session",
    "export_model": "spes_swarm.export",
    "load_config": "spes_swarm.config.file",
}

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
