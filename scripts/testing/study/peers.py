"""What the peers of an arm start with: their data and their experts.

Peer i of a seed has the same order of data in every arm, whatever their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.testing.sequential_swarm import own_orders
from scripts.testing.study.arm import ArmConfig
from spes_swarm.base.errors import DataError
from spes_swarm.config.run import RunConfig
from spes_swarm.data.batch_source import BatchSource, Cursor
from spes_swarm.data.partition import Permutation
from spes_swarm.data.sampler import Sampler, TokenStream
from spes_swarm.protocol.ownership.reassignment import Holding, Rules, reassign


class JoinedSamplers(BatchSource):
    """The batches of several peers as one: first those of the first peer, and so on."""

    def __init__(self, samplers: Sequence[BatchSource]) -> None:
        self._samplers = samplers

    def next_batch(self, batch_size: int) -> NDArray[np.int64]:
        """Returns an equal number of sequences of each peer, int64 (B, S)."""
        assert batch_size % len(self._samplers) == 0
        each = batch_size // len(self._samplers)
        return np.concatenate([sampler.next_batch(each) for sampler in self._samplers])

    def state(self) -> Cursor:
        """See BatchSource."""
        raise NotImplementedError("runs of a study are not resumed in their middle")

    def restore(self, state: Mapping[str, Any]) -> bool:
        """See BatchSource."""
        raise NotImplementedError("runs of a study are not resumed in their middle")

    def evaluation_batches(self, num_sequences: int, batch_size: int) -> Iterator[NDArray[np.int64]]:
        """See BatchSource: those of the run."""
        return self._samplers[0].evaluation_batches(num_sequences, batch_size)


class ShardSampler(Sampler):
    """Draws training windows from one of several equal, contiguous parts of the stream.

    The files of a corpus are in the order of their paths, so neighbours are of one kind: the parts differ by package.
    The held-out windows are those of the whole stream.
    """

    def __init__(self, stream: TokenStream, run: RunConfig, peer_seed: int, shard: int, num_shards: int) -> None:
        self._shard, self._num_shards = shard, num_shards
        training = run.training
        super().__init__(
            stream,
            sequence_length=training.sequence_length,
            run_seed=training.seed,
            peer_seed=peer_seed,
            holdout_fraction=run.evaluation.holdout_fraction,
        )

    def _enter(self, epoch: int, position: int) -> None:
        super()._enter(epoch, position)
        first, after = ((self._shard + i) * self.split.num_training() // self._num_shards for i in range(2))
        if after == first:
            raise DataError(f"the data has fewer than {self._num_shards} windows: use more data or fewer peers")
        self._first, self._count = first, after - first
        self._order = Permutation(self._count, f"shard {self._key} {epoch}".encode())

    def _take(self, count: int) -> list[int]:
        starts: list[int] = []
        while len(starts) < count:
            if self.position == self._count:
                self._enter(self.epoch + 1, 0)
            stop = min(self.position + count - len(starts), self._count)
            order = self._first + self._order(np.arange(self.position, stop, dtype=np.int64))
            starts += [self.split.training_start(index, self._offset) for index in order.tolist()]
            self.position = stop
        return starts


def peer_sampler(config: ArmConfig, run: RunConfig, stream: TokenStream, number: int) -> BatchSource:
    """Returns the data of the peer that arrives as number `number`; a replacement has the kind of text of its place."""
    if config.data == "shards":
        return ShardSampler(stream, run, number, number % config.peers, config.peers)
    return own_orders(run, stream, [number])[0]


def room_of(run: RunConfig, num_peers: int) -> int:
    """Returns the most experts that a peer holds: what the target of replicas needs, else `experts_per_peer`."""
    replicas = run.ownership.replicas
    if replicas is None:
        return run.experts_per_peer
    return min(run.model.num_experts, -(-run.model.num_experts * replicas // num_peers))


def rules_of(run: RunConfig, room: int) -> Rules:
    """Returns the ownership rules of a run, which never keep a peer from using its room."""
    ownership = run.ownership
    return Rules(ownership.replicas, ownership.rotate_every_rounds, max(run.most_experts, room), run.round.expert_every)


def initial_holdings(num_experts: int, num_peers: int, room: int, rules: Rules) -> list[tuple[int, ...]]:
    """Shares the experts out by the rules of a swarm in which nobody holds any yet."""
    names = [f"peer-{number:06d}" for number in range(num_peers)]
    table = {name: Holding((), room) for name in names}
    held = reassign(table, num_experts, round_number=1, trained_in=[0] * num_experts, rules=rules)
    return [held[name] for name in names]
