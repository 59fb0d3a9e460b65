"""The process group that carries sums between groups, made to be left at any moment."""

import os
import socket
from collections.abc import Callable, Sequence
from concurrent import futures
from datetime import timedelta
from functools import partial

import torch
from torch._C._distributed_c10d import AllreduceOptions, AllToAllOptions, ReduceOp, Work

from outlast.accumulate import Wait
from outlast.config import host_and_port
from outlast.ranks import first_line
from outlast.sockets import has_peer, open_sockets, shut_down
from outlast.times import Times

os.environ.setdefault("RUST_LOG", "error")  # torchft's client is chatty
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL


class PlaneError(Exception):
    """Sums couldn't be carried between the groups."""


class Plane:
    """The process group between groups. It can be left at any moment, and then really is left.

    Args:
        name: of this member.
        times: its limits.
        kind: `fault_tolerance.process_group`.
        device: of the sums.
    """

    def __init__(self, name: str, times: Times, kind: str = "gloo", device: torch.device | None = None) -> None:
        self._name, self._times, self._nccl = name, times, kind == "nccl"
        self._device = device if self._nccl else torch.device("cpu")
        self._group: ProcessGroupGloo | ProcessGroupNCCL | None = None
        self._sockets: dict[int, str] = {}
        # Works are waited for in a thread, each once, so that this one sees signals.
        self._waiter = futures.ThreadPoolExecutor(1, "exchange")
        self._flying: list[futures.Future[None]] = []
        self._swaps = 0
        self.rank, self.size = 0, 1

    def connect(self, store: str, prefix: str, rank: int, size: int, others: set[int]) -> None:
        """Meet `size` members (1: nobody) at a store, under a prefix never used before.

        `others`: ports of this process' connections that don't belong to the process group.

        Raises:
            PlaneError: they didn't all come in time.
        """
        self.cancel()
        self.rank, self.size, self._swaps = rank, size, 0
        if size == 1:
            return
        try:  # else the store's client would wait for a dead host, and twice as long as it was told
            socket.create_connection(host_and_port(f"http://{store}"), self._times.connect).close()
        except OSError as e:
            raise PlaneError(f"the first of {size} groups isn't there: {e.strerror or e}") from None
        before = open_sockets()
        self._group = (ProcessGroupNCCL if self._nccl else ProcessGroupGloo)(timedelta(seconds=self._times.connect))
        try:
            self._group.configure(f"{store}/{prefix}", self._name, rank, size)
        except Exception as e:
            raise PlaneError(f"not all {size} groups met within {self._times.connect:g} s: {first_line(e)}") from None
        finally:
            now = open_sockets().items()
            self._sockets = {fd: link for fd, link in now if before.get(fd) != link and has_peer(fd, others)}

    def add(self, tensor: torch.Tensor, timeout_s: float) -> None:
        """Add a tensor over the members, in place."""
        if (group := self._group) is None:
            return
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.SUM)
        options.timeout = timedelta(seconds=timeout_s)
        there = tensor.to(self._device)  # the same tensor, if it lies there
        self._carry([lambda: group.allreduce([there], options)], timeout_s)()
        if there is not tensor:
            tensor.copy_(there)

    def swap(self, give: Sequence[torch.Tensor], take: Sequence[torch.Tensor], timeout_s: float) -> Wait:
        """Begin to send `give[r]` to each other member r, and to receive `take[r]` from it."""
        group, me = self._group, self.rank
        assert group is not None
        others = [(me + i) % self.size for i in range(1, self.size)]
        sent = [t.to(self._device) for t in give]
        if self._nccl:  # its sends would wait for each other
            sizes = [[0 if r == me else len(t) for r, t in enumerate(ts)] for ts in (take, give)]
            out, goes = take[me].new_empty(sum(sizes[0])), torch.cat([t for r, t in enumerate(sent) if r != me])
            begins = [partial(group.alltoall_base, out, goes, *sizes, AllToAllOptions())]
            came = list(out.split(sizes[0]))
        else:
            # A number that no other message has: one that is late can't take the place of another.
            self._swaps = tag = self._swaps + 1
            came = [t if t.device == self._device else torch.empty_like(t, device=self._device) for t in take]
            begins = [partial(group.recv, [came[r]], r, tag) for r in others]  # first: data can go right there
            begins += [partial(group.send, [sent[r]], r, tag) for r in others]
        wait = self._carry(begins, timeout_s)

        def wait_and_put() -> None:
            wait()
            for r in others:
                if came[r] is not take[r]:
                    take[r].copy_(came[r])

        return wait_and_put

    def _carry(self, begins: Sequence[Callable[[], Work]], timeout_s: float) -> Wait:
        """Begin some works; the result waits for all of them."""
        works: list[Work] = []
        error = ""
        try:
            for begin in begins:
                works.append(begin())
        except RuntimeError as e:
            error = first_line(e)
        future = self._waiter.submit(self._wait, works, timedelta(seconds=timeout_s), error)
        self._flying.append(future)

        def wait() -> None:
            try:
                future.result()
            except RuntimeError as e:
                raise PlaneError(first_line(e)) from None
            self._flying.remove(future)

        return wait

    def _wait(self, works: Sequence[Work], limit: timedelta, error: str) -> None:
        """Wait for works, each once, also after an error.

        Raises:
            RuntimeError: the first error.
        """
        for work in works:
            try:
                work.wait(limit)
            except RuntimeError as e:
                error = error or str(e)
        if self._nccl and not error and self._group:
            torch.cuda.synchronize(self._device)
            error = str(self._group.errored() or "")
        if error:
            raise RuntimeError(error)

    def cancel(self) -> None:
        """Leave at once: what is in flight ends with an error, here and at the other members.

        Gloo's own abort waits for a late peer. Shutting the connected sockets down doesn't; the listener must
        be left alone. A buffer is free only when the wait for it has returned, so all are waited for.
        """
        if self._nccl and self._group:
            self._group.abort()
        shut_down(self._sockets)
        futures.wait(self._flying)
        self._flying, self._sockets, self._group = [], {}, None
        self.rank, self.size = 0, 1
