"""Every error that spes_swarm raises on purpose.

SwarmError
├── UserError             an error that the user can fix: one line on stderr, exit code 2
│   ├── ConfigError       unknown key, wrong type, impossible value
│   ├── AddressError      an address that cannot be parsed or announced
│   ├── BootstrapError    no initial peer could be reached, or none takes part in the run
│   ├── VersionError      the peers of the run speak another major version of the protocol
│   ├── InvitationError   an invitation to a private run is missing, damaged, of another run, or not accepted
│   ├── ManifestError     the run's manifest fails verification, or describes another run
│   ├── DataError         a token file, corpus, data set or tokenizer that cannot be used
│   │   └── DataStoppedError  waiting for data ended because the peer was told to leave
│   ├── CapacityError     the run does not fit into the memory of this machine or its GPU
│   ├── CheckpointError   a checkpoint that is corrupt, of another run, or cannot be written
│   ├── DivergenceError   the loss stays NaN or inf after several restarts from the reference
│   ├── HubError          the Hub or a directory refuses, is full, or cannot be reached
│   │   └── SupersededError  a newer round, or another state of this one, is already published
│   └── PublicationError  a publication that is malformed, damaged, or not of the expected run or model
├── ProtocolError         a peer sent something that the protocol does not allow; the message is dropped
├── RoundError            a round could not be held; the reference and the live weights are unchanged
│   └── NoLeaderError     nobody leads it
├── TransferError         no peer delivers the swarm's reference
├── NetworkProcessError   the network process died or does not answer
├── RankError             another rank of this peer died or does not answer
└── LeftEarlyError        the peer left before its first step (stopped, or the run is over): nothing to save
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SwarmError(Exception):
    """Base class of all deliberate errors of this package."""


class UserError(SwarmError):
    """An error that the user can fix; the command line prints its message and exits with code 2."""


class ConfigError(UserError):
    """A configuration has an unknown key, a value of the wrong type or an impossible value."""


class AddressError(UserError):
    """A multiaddress cannot be parsed, or is unsuitable for its purpose."""


class BootstrapError(UserError):
    """No initial peer could be reached, or none of them takes part in the run."""


class VersionError(UserError):
    """The peers of the run speak another major version of the protocol."""


class InvitationError(UserError):
    """An invitation to a private run is missing, damaged, of another run, or not accepted."""


class ManifestError(UserError):
    """The manifest of a run fails verification or describes another run."""


class DataError(UserError):
    """A token file, corpus, data set or tokenizer is missing, corrupt or does not fit the model."""


class DataStoppedError(DataError):
    """Waiting for data ended because the peer was told to leave."""


class CapacityError(UserError):
    """The run does not fit into the memory of this machine or its GPU."""


class CheckpointError(UserError):
    """A checkpoint is corrupt, belongs to another run, or could not be written."""


class DivergenceError(UserError):
    """The loss stays NaN or inf after several restarts from the reference."""


class HubError(UserError):
    """A target or source refuses, is full, or cannot be reached; earlier publications are intact."""


class SupersededError(HubError):
    """The target has a newer round, or another state of this one; nothing was published."""


class PublicationError(UserError):
    """A publication is malformed, damaged, or not of the expected run or model."""


class ProtocolError(SwarmError):
    """A peer sent something that the protocol does not allow.

    Attributes:
        kind: short machine-readable reason, the `kind` of the `fault` metric.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail

    def __reduce__(self) -> tuple[type[ProtocolError], tuple[str, str]]:
        """Makes the error picklable, as errors cross a peer's pipe; the default passes __init__ the joined text."""
        return type(self), (self.kind, self.detail)


class RoundError(SwarmError):
    """A round could not be held; the reference and the live weights are unchanged."""


class NoLeaderError(RoundError):
    """All peers that this one would follow to a round follow others themselves."""


class TransferError(SwarmError):
    """No peer delivers the swarm's reference; what has arrived is kept for the next attempt."""


class NetworkProcessError(SwarmError):
    """The network process died or does not answer."""


class RankError(SwarmError):
    """Another rank of this peer died or does not answer."""


class LeftEarlyError(SwarmError):
    """The peer left before its first step (stopped, or the run is over); there is nothing to save."""


@contextmanager
def os_errors_as(kind: type[UserError], problem: str, advice: str = "") -> Iterator[None]:
    """Maps OSErrors to one line for the user: `problem`, the system's reason, and `advice`.

    Raises:
        UserError: of type `kind`, in place of an OSError.
    """
    try:
        yield
    except OSError as exc:
        raise kind(f"{problem}: {exc.strerror or exc}{advice and '; '}{advice}") from exc
