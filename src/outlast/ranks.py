"""The ranks of one replica group, and what they agree on.

Whatever a rank decides by what only it can see (a signal, a clock, a file, an error) it decides through
these calls, so that all ranks of a group always run the same next thing. Values travel as JSON, never pickled.
"""

import json
import os
import re
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from outlast.errors import ConfigError, StorageError
from outlast.seat import STORE, STORE_FD, Seat
from outlast.sockets import serve_store

T = TypeVar("T")


class Ranks:
    """This process' group. A group of one meets nobody and runs no collective.

    Args:
        seat: of this process.
        device: that its part of the model is on.
        wait_s: longest wait of a collective inside the group.

    Raises:
        StorageError: the others didn't come.
    """

    def __init__(self, seat: Seat | None = None, device: torch.device | None = None, wait_s: float = 600.0) -> None:
        self.rank, self.size = (seat.rank, seat.size) if seat else (0, 1)
        self.device = device or torch.device("cpu")
        self.mesh: DeviceMesh | None = None
        if self.size == 1:
            return
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(
                backend,
                store=_store(self.rank, self.size, wait_s),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=wait_s),
            )
            self.mesh = init_device_mesh(self.device.type, (self.size,), mesh_dim_names=("dp_shard",))
        except (RuntimeError, ValueError) as e:
            raise StorageError(f"the {self.size} ranks of this group didn't meet: {first_line(e)}") from None

    def sum_(self, tensor: Tensor) -> None:
        """Add a small int64 tensor over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        if self.size == 1:
            return flag
        count = torch.tensor([int(flag)])
        dist.all_reduce(count)
        return bool(count.item())

    def all(self, value: T) -> list[T]:
        """Every rank's value (of JSON), in order of ranks."""
        if self.size == 1:
            return [value]
        mine = _encode(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([mine.numel()]))
        longest = max(int(s.item()) for s in sizes)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, torch.nn.functional.pad(mine, (0, longest - mine.numel())))
        return [_decode(p[: int(s.item())]) for p, s in zip(parts, sizes, strict=True)]

    def error(self, text: str) -> str:
        """The first error that any rank has, or "". Each comes here, whatever happened to it."""
        return next((f"rank {r}: {e}" if self.size > 1 else e for r, e in enumerate(self.all(text)) if e), "")

    def first(self, value: T) -> T:
        """Rank 0's value (of JSON)."""
        return self.wait_first(lambda: value)

    def wait_first(
        self,
        call: Callable[[], T],
        beat_s: float = 1.0,
        patience: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> T:
        """What a call gives (of JSON) that rank 0 makes and that may take long.

        While it does, rank 0 says every `beat_s` that it is still there, so that no rank's collective times out.

        Args:
            call: made on rank 0 only; it must not raise.
            beat_s: between signs of life.
            patience: entered by the other ranks for each wait for one.
        """
        if self.size == 1:
            return call()
        if self.rank == 0:
            box: list[T] = []
            caller = threading.Thread(target=lambda: box.append(call()), daemon=True)
            caller.start()
            caller.join(beat_s)
            while caller.is_alive():
                dist.broadcast(torch.zeros(1, dtype=torch.int64), 0)
                caller.join(beat_s)
            text = _encode(box[0])
            dist.broadcast(torch.tensor([text.numel()]), 0)
            dist.broadcast(text, 0)
            return box[0]
        size = torch.zeros(1, dtype=torch.int64)
        while not size.item():
            with patience():
                dist.broadcast(size, 0)
        text = torch.zeros(int(size.item()), dtype=torch.uint8)
        dist.broadcast(text, 0)
        return _decode(text)

    def close(self) -> None:
        """Leave, once all ranks are done."""
        if self.size > 1:
            dist.barrier()
            dist.destroy_process_group()


def _store(rank: int, size: int, wait_s: float) -> Store:
    """Where the ranks meet, as torchrun or launch says."""
    if STORE_FD in os.environ:
        return serve_store(socket.socket(fileno=int(os.environ[STORE_FD])), wait_s)
    if STORE in os.environ:
        host, _, port = os.environ[STORE].rpartition(":")
        store = TCPStore(host, int(port), timeout=timedelta(seconds=wait_s))
        return PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    # torch's own way, which knows of torchrun's store and its restarts
    store, _, _ = next(iter(rendezvous("env://", rank, size, timeout=timedelta(seconds=wait_s))))
    return store


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """`training.device` -> this rank's device.

    Raises:
        ConfigError: a GPU is asked for that isn't there.
    """
    there = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cuda" and not there:
        raise ConfigError('training.device = "cuda", and torch sees no GPU; use "cpu" or "auto"')
    if not there:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % there)
    torch.cuda.set_device(device)
    return device


def first_line(error: BaseException) -> str:
    """Of a library's message, short and without its source path."""
    return re.sub(r"\[/\S+\]\s*", "", (str(error).splitlines() or [type(error).__name__])[0])[:200]


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: Tensor) -> Any:
    return json.loads(bytes(data.numpy()))
