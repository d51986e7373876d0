"""Every error that spes_swarm raises on purpose.

SwarmError
├── UserError             an error that the person at the keyboard can fix: one line on stderr, exit code 2
│   ├── ConfigError       unknown key, wrong type, impossible value
│   ├── AddressError      an address that cannot be parsed or announced
│   ├── BootstrapError    none of the initial peers could be reached, or none knows the run
│   ├── ManifestError     the run's description fails verification, or it is another run
│   ├── DataError         a token file, corpus or tokenizer that cannot be used
│   ├── CapacityError     what the run needs does not fit into this machine's memory
│   ├── CheckpointError   a checkpoint that is corrupt, foreign or cannot be written
│   ├── DivergenceError   training that has left the finite numbers and does not find back
│   ├── HubError          the Hub or the directory refuses, is full, or cannot be reached
│   │   └── SupersededError  what is published already is newer, or another state of the same round
│   └── PublicationError  what is published, or is to be, cannot be used: malformed, damaged, of another run or model
├── ProtocolError         a peer sent something that the protocol does not allow; the message is dropped
├── RoundError            a round could not be held; the reference and the live weights are unchanged
├── NetworkProcessError   the network process died or does not answer
└── LeftEarlyError        left before the first step (told to stop, or the run is over): nothing is to be saved
"""

from __future__ import annotations


class SwarmError(Exception):
    """Base class of all deliberate errors of this package."""


class UserError(SwarmError):
    """An error that the user can fix; the command line prints its message and exits with code 2."""


class ConfigError(UserError):
    """A configuration has an unknown key, a value of the wrong type or an impossible value."""


class AddressError(UserError):
    """A multiaddress cannot be parsed, or cannot be used for what it was given for."""


class BootstrapError(UserError):
    """No initial peer could be reached, or none of them takes part in the wanted run."""


class ManifestError(UserError):
    """The manifest of a run fails verification or describes another run."""


class DataError(UserError):
    """A token file, corpus or tokenizer is missing, corrupt or does not fit the model."""


class CapacityError(UserError):
    """What the run needs does not fit into the memory of this machine or of its GPU."""


class CheckpointError(UserError):
    """A checkpoint is corrupt, belongs to another run, or could not be written."""


class DivergenceError(UserError):
    """Losses are not finite, however often the peer begins again from the reference."""


class HubError(UserError):
    """A target or source refuses, is full, or cannot be reached; what was published before is still there."""


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
        """Errors travel between the processes of a peer; the default would call __init__ with the joined text."""
        return type(self), (self.kind, self.detail)


class RoundError(SwarmError):
    """A round could not be held; the reference and the live weights are unchanged."""


class NetworkProcessError(SwarmError):
    """The network process died or does not answer."""


class LeftEarlyError(SwarmError):
    """Left before the first step, told to stop or because the run is over: there is nothing to be saved."""
