"""Which of a peer's ranks this process is, as torchrun says in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from spes_swarm.base.errors import ConfigError

_REQUIRED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One of several ranks of a peer, all on this machine. Rank 0 talks to the swarm."""

    rank: int
    world_size: int  # number of ranks, at least 2

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self | None:
        """Returns None if this process is the only rank.

        Raises:
            ConfigError: the ranks are not all on this machine, or the environment is not one that torchrun makes.
        """
        world_size = _number(environment, "WORLD_SIZE", default=1)
        if world_size == 1:
            return None
        for name in _REQUIRED:
            if not environment.get(name):
                raise ConfigError(
                    f"WORLD_SIZE is {world_size}, but {name} is not set: start the ranks with "
                    f"torchrun --standalone --nproc-per-node {world_size} -m spes_swarm.join, or unset WORLD_SIZE"
                )
        # One rank of each machine reports it; the others wait for rank 0 until torchrun ends them.
        is_first = _number(environment, "LOCAL_RANK") == 0
        if is_first and _number(environment, "LOCAL_WORLD_SIZE", default=world_size) != world_size:
            raise ConfigError(
                f"this machine has only some of the {world_size} ranks, but the GPUs of one machine are one peer: "
                "start one peer on each machine with torchrun --standalone, or all of them with scripts/slurm.sh"
            )
        return cls(rank=_number(environment, "RANK"), world_size=world_size)

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


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name) or (None if default is None else str(default))
    if text is None or not text.isascii() or not text.isdigit():
        raise ConfigError(f"environment variable {name} is {text!r}, not a number; unset it, or start with torchrun")
    return int(text)
