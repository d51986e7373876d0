"""The ranks of a peer as a process group: orders from rank 0, and tensors in both directions.

All ranks are on one machine, so everything goes through its loopback interface, or from GPU to GPU. The kernel closes
the connections of a process that has ended, however it ended: the others notice at once, in whatever they wait for.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from spes_swarm.base.errors import ConfigError, LeftEarlyError, RankError
from spes_swarm.base.wording import plural, said_if_slow
from spes_swarm.training.out_of_memory import is_out_of_memory
from spes_swarm.training.ranks.buckets import transfer
from spes_swarm.training.ranks.orders import Order, Stop, decode_order, encode_order
from spes_swarm.training.ranks.placement import Placement, has_torchruns_store, left_over

_START_S = 600.0  # until all ranks have started: importing torch on a busy machine takes most of it
# Until the next order: rank 0 may have to tokenise a corpus and to download the model before it gives the first.
_ORDER_S = 30 * 24 * 3600.0
_STEP_S = 3600.0  # by which one rank may finish its share of a step after another, or hear the next order
_POLL_S = 0.1
_DIAL_S = 5.0
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renames it
_tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch does not list it
_LOST = "another rank of this peer has ended"


class RankGroup:
    """The connection of one rank to the others; unusable after a RankError."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.rank = placement.rank
        self.world_size = placement.world_size
        self._data: dist.ProcessGroup | None = None  # for tensors; the default group is for orders
        self._usable = False

    def connect(self, say: Callable[[str], None], stop: threading.Event | None = None) -> None:
        """Waits for all ranks of the peer; the network process must be forked before this.

        Calls `say` if this takes more than a few seconds.

        Raises:
            ConfigError: another process is this rank.
            LeftEarlyError: `stop` was set.
            RankError: a rank has not started in time.
        """
        rank, world_size = self.placement.rank, self.placement.world_size
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        waiting = f"rank {rank} of this peer is waiting for {plural(world_size - 1, 'other rank')}"
        text = f"{waiting}; if torchrun is not running, stop and {left_over(os.environ)}"
        with said_if_slow(text, say), _as_rank_error("the ranks of this peer cannot connect to each other"):
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # some versions keep an earlier store
            store = PrefixStore(f"spes_swarm/{attempt}", _open_store(self.placement, stop))
            started = [f"started/{other}" for other in range(world_size)]
            if store.add(started[rank], 1) > 1:
                raise ConfigError(f"torchrun has started another process as rank {rank}: {left_over(os.environ)}")
            _poll(lambda: store.check(started), f"some of the {world_size} ranks of this peer have not started", stop)
            timeout = timedelta(seconds=_ORDER_S)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            self._data = dist.new_group(backend=backend, timeout=timedelta(seconds=_STEP_S))
        self._usable = True

    def own_device(self, chosen: torch.device) -> torch.device:
        """Returns the device of this rank, given the one that the user has chosen for all.

        Raises:
            ConfigError: this machine has fewer GPUs than ranks.
        """
        if chosen.type != "cuda":
            return chosen
        if str(chosen) != chosen.type:
            raise ConfigError(f"--device {chosen}: each rank uses the GPU of its own number; give --device cuda")
        num_devices, world_size = torch.cuda.device_count(), self.placement.world_size
        if num_devices < world_size:
            raise ConfigError(
                f"this machine has {plural(num_devices, 'CUDA device')} for {world_size} ranks: "
                f"start torchrun with --nproc-per-node {num_devices}, or use --device cpu"
            )
        device = torch.device("cuda", self.placement.rank)
        torch.cuda.set_device(device)
        return device

    def send_order(self, order: Order) -> None:
        """Sends an order to all other ranks; called on rank 0.

        Raises:
            RankError: a rank has ended.
        """
        encoded = encode_order(order)
        with self._exchange():
            for message in (torch.tensor([len(encoded)]), torch.frombuffer(bytearray(encoded), dtype=torch.uint8)):
                sent = dist.broadcast(message, src=0, async_op=True)
                assert sent is not None
                sent.wait(timedelta(seconds=_STEP_S))  # only the others must be able to wait longer

    def next_order(self) -> Order:
        """Waits for the next order of rank 0.

        Raises:
            RankError: a rank has ended.
        """
        size = torch.empty(1, dtype=torch.int64)
        with self._exchange():
            dist.broadcast(size, src=0)
            encoded = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(encoded, src=0)
        return decode_order(encoded.numpy().tobytes())

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copies the contents of rank 0's tensors to all ranks.

        Raises:
            RankError: a rank has ended.
        """
        with self._exchange():
            transfer(tensors, self._broadcast, received=self.placement.rank != 0)

    def _broadcast(self, x_N: Tensor) -> None:
        # Bytes, because gloo lacks some dtypes of the forms in which experts are stored.
        dist.broadcast(x_N.view(torch.uint8), src=0, group=self._data)

    def gather(self, own: Tensor) -> Tensor:
        """Returns the tensors of all W ranks (W, ...), which must have the same shape.

        Raises:
            RankError: a rank has ended.
        """
        all_ranks = own.new_empty((self.world_size, *own.shape))
        with self._exchange():
            _all_gather(all_ranks.view(-1), own.reshape(-1), group=self._data)
        return all_ranks

    def reduce(self, tensors: Iterable[Tensor]) -> None:
        """Replaces rank 0's tensors by the sums over all ranks; those of other ranks are undefined afterwards.

        The order of summation is the library's: always the same, but for more than two ranks not that of one rank
        that computes all shares.

        Raises:
            RankError: a rank has ended.
        """
        with self._exchange():
            transfer(tensors, lambda x_N: dist.reduce(x_N, dst=0, group=self._data), received=self.placement.rank == 0)

    def all_reduce(self, values: Tensor) -> None:
        """Replaces the values, in host memory, by the sums over all ranks, on all ranks.

        Raises:
            RankError: a rank has ended.
        """
        with self._exchange():
            dist.all_reduce(values, group=self._data)

    def abandon(self) -> None:
        """Makes `close` tell the others nothing: they wait for something else, and notice the end of this process."""
        self._usable = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Closes the connection. A rank that has ended already matters only if there was no other error."""
        try:
            self.close()
        except RankError:
            if error is None:
                raise

    def close(self) -> None:
        """Ends the connection; rank 0 tells the others to end, if they can still hear it.

        Raises:
            RankError: called on rank 0, and another rank has ended already.
        """
        if not self._usable:
            return
        if self.placement.rank == 0:
            self.send_order(Stop())
        self._usable = False
        dist.destroy_process_group()

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Wraps what all ranks must do together: whatever interrupts it, even a signal, ends the connection."""
        usable, self._usable = self._usable, False
        if not usable:
            raise RankError(_LOST)
        with _as_rank_error(_LOST):
            yield
        self._usable = True


def _open_store(placement: Placement, stop: threading.Event | None) -> Store:
    """Opens the store through which the ranks find each other: torchrun's, or else that of rank 0.

    Unlike torch's own rendezvous, it does not wait inside the library, which handles no signals there.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_server = placement.rank == 0 and not has_torchruns_store(os.environ)

    def answers() -> bool:
        try:
            socket.create_connection((host, port), _DIAL_S).close()
        except OSError:
            return False
        return True

    if not is_server:
        _poll(answers, f"rank 0 of this peer has not started: nothing listens on {host}:{port}", stop)
    store: Store = _tcp_store(
        host,
        port,
        placement.world_size,
        is_master=is_server,
        timeout=timedelta(seconds=_START_S),
        wait_for_workers=False,
        multi_tenant=True,
    )
    return store


def _poll(condition: Callable[[], bool], problem: str, stop: threading.Event | None) -> None:
    deadline = time.monotonic() + _START_S
    while not condition():
        if stop is not None and stop.is_set():
            raise LeftEarlyError("stopped while joining")
        if time.monotonic() > deadline:
            raise RankError(problem)
        time.sleep(_POLL_S)


@contextmanager
def _as_rank_error(problem: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as exc:  # as are all errors of gloo, NCCL and the store
        if is_out_of_memory(exc):
            raise
        raise RankError(problem) from exc
