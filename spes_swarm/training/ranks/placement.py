"""Which of a peer's ranks this process is, as torchrun says in the environment."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from spes_swarm.base.errors import ConfigError

_REQUIRED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
_NAMES = ("WORLD_SIZE", *_REQUIRED)
_MAX_DIGITS = 6
_DIAL_S = 10.0  # torchrun is on this machine, but may be busy


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One of several ranks of a peer, all on this machine. Rank 0 talks to the swarm."""

    rank: int
    world_size: int  # number of ranks, at least 2

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self | None:
        """Returns None if this process is the only rank.

        Raises:
            ConfigError: the ranks are not all on this machine, or the environment is not one that torchrun makes, or
                that torchrun no longer runs.
        """
        world_size = _number(environment, "WORLD_SIZE", default=1)
        if world_size == 1:
            if not environment.get("WORLD_SIZE") and environment.get("RANK", "0") != "0":
                raise ConfigError(f"RANK is set, but WORLD_SIZE is not: {_advice(environment, 2)}")
            return None
        for name in _REQUIRED:
            if not environment.get(name):
                raise ConfigError(
                    f"WORLD_SIZE is {world_size}, but {name} is not set, so torchrun has not started this process: "
                    f"{_advice(environment, world_size)}"
                )
        rank = _number(environment, "RANK")
        if rank >= world_size or not 0 < _number(environment, "MASTER_PORT") < 1 << 16:
            raise ConfigError(
                f"RANK={rank}, WORLD_SIZE={world_size} and MASTER_PORT={environment['MASTER_PORT']} are not what "
                f"torchrun sets: {_advice(environment, world_size)}"
            )
        # One rank of each machine reports it; the others wait for rank 0 until torchrun ends them.
        is_first = _number(environment, "LOCAL_RANK") == 0
        if is_first and _number(environment, "LOCAL_WORLD_SIZE", default=world_size) != world_size:
            raise ConfigError(
                f"this machine has only some of the {world_size} ranks, but the GPUs of one machine are one peer: "
                "start one peer on each machine with torchrun --standalone, or all of them with scripts/slurm.sh"
            )
        if has_torchruns_store(environment):
            _check_torchrun_runs(environment)
        return cls(rank=rank, world_size=world_size)

    def check_batch(self, batch_size: int) -> None:
        """Refuses a batch that cannot be divided evenly among the ranks.

        Raises:
            ConfigError: the message says which batches can.
        """
        if batch_size % self.world_size:
            raise ConfigError(
                f"a batch of {batch_size} cannot be divided evenly among {self.world_size} ranks: "
                f"give a --batch-size that is a multiple of {self.world_size}, or start fewer ranks"
            )

    def share(self, batch_size: int) -> slice:
        """Returns which sequences of a batch this rank computes."""
        each = batch_size // self.world_size
        return slice(self.rank * each, (self.rank + 1) * each)


def has_torchruns_store(environment: Mapping[str, str]) -> bool:
    """Returns True if torchrun has opened the store of the ranks, at MASTER_ADDR; otherwise rank 0 opens it."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _check_torchrun_runs(environment: Mapping[str, str]) -> None:
    host, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    try:
        socket.create_connection((host, int(port)), _DIAL_S).close()
    except OSError as exc:
        raise ConfigError(
            "the environment says that torchrun has started this process, but none is running at "
            f"{host}:{port}: {left_over(environment)}"
        ) from exc


def left_over(environment: Mapping[str, str]) -> str:
    """Returns the command that removes torchrun's variables from the environment of a shell."""
    return f"unset {' '.join(name for name in environment if name in _NAMES or name.startswith('TORCHELASTIC_'))}"


def _advice(environment: Mapping[str, str], world_size: int) -> str:
    torchrun = f"torchrun --standalone --nproc-per-node {max(world_size, 2)} -m spes_swarm.join"
    return f"{left_over(environment)}, or start the ranks with {torchrun}"


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name) or (None if default is None else str(default))
    if text is None or not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS:
        raise ConfigError(
            f"environment variable {name} is {text!r:.40}, not a number of ranks or one of them: "
            f"{_advice(environment, 2)}"
        )
    return int(text)
