"""The edge of a group: the lighthouse, the heartbeat, and the process group that carries sums.

Everything here touches sockets and clocks, and decides nothing.
"""

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
from torch._C._distributed_c10d import AllreduceOptions, AllToAllOptions, ReduceOp, Work

from outlast.accumulate import Wait
from outlast.config import host_and_port
from outlast.errors import EXIT_FAILED, ConfigError, UserError
from outlast.ft.protocol import Answer, Participant
from outlast.ranks import first_line
from outlast.sockets import has_peer, open_sockets, shut_down, wait_for_listener
from outlast.times import Times

os.environ.setdefault("RUST_LOG", "error")  # torchft's client is chatty
try:
    from torchft.coordination import LighthouseClient
    from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL
except ImportError as e:
    raise ConfigError(
        f"fault tolerance needs torchft, which can't be imported ({e}); it has wheels for Linux x86-64 only: "
        "`pip install torchft` there, or train with one group"
    ) from None


class Pulse:
    """Heartbeats, from a thread, and only while the trainer makes progress.

    Each phase says how long it may take. Past that the beat stops, and the lighthouse lets the others go on. Where
    ranks wait for each other one that is stuck holds all: past `stuck` the process ends, and its group starts anew.
    """

    def __init__(self, address: str, name: str, times: Times) -> None:
        self.name = name
        self._address, self._times = address, times
        self._until, self._stuck = 0.0, math.inf
        self._stop = threading.Event()
        self._beaten = threading.Condition()
        self.beats = 0  # that the lighthouse heard
        self._thread: threading.Thread | None = None

    def start(self, beats: bool = True) -> None:
        """Begin; the trainer is ready to take part. `beats`: tell the lighthouse, else only look for a stuck phase."""
        self._thread = threading.Thread(target=self._run, args=(beats,), name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Fall silent for good."""
        self._stop.set()
        if self._thread:
            self._thread.join(self._times.heartbeat)

    @contextmanager
    def phase(self, seconds: float, stuck: float = math.inf) -> Iterator[None]:
        """What follows may take this long, and must not take `stuck` longer. Outside any phase `times.phase` holds."""
        self.expect(seconds, stuck)
        try:
            yield
        finally:
            self.expect(self._times.phase, math.inf)

    def expect(self, seconds: float, stuck: float) -> None:
        """Progress was made; what comes next may take this long, counted from now."""
        self._until, self._stuck = time.monotonic() + seconds, stuck

    def wait_beats(self, count: int, seconds: float) -> bool:
        """Wait until the lighthouse has heard this group `count` more times."""
        with self._beaten:
            goal = self.beats + count
            return self._beaten.wait_for(lambda: self.beats >= goal, seconds)

    def _run(self, beats: bool) -> None:
        client, late = None, 0
        while not self._stop.wait(self._times.beat):
            if time.monotonic() > self._until:
                late += 1  # counted, not timed: a process that was paused as a whole isn't stuck
                if late * self._times.beat > self._stuck:
                    os.write(2, f"outlast: no progress for {self._stuck:g} s more than expected: stuck\n".encode())
                    os._exit(EXIT_FAILED)
                continue
            late = 0
            if not beats:
                continue
            try:
                client = client or LighthouseClient(self._address, timedelta(seconds=self._times.heartbeat))
                client.heartbeat(self.name, timedelta(seconds=self._times.heartbeat))
                with self._beaten:
                    self.beats += 1
                    self._beaten.notify_all()
            except (RuntimeError, TimeoutError, OSError):
                client = None  # it may be starting again; the trainer's own calls find out


class Lighthouse:
    """Quorum calls."""

    def __init__(self, address: str, times: Times) -> None:
        self.address = address
        self._times = times
        self._client: LighthouseClient | None = None
        self._last: tuple[int, list[str]] = (0, [])

    def wait_until_there(self) -> None:
        """Wait until something accepts connections there.

        Raises:
            UserError: nothing does, for the time that a quorum may take.
        """
        if why := wait_for_listener(host_and_port(self.address), self._times.ask, self._times.beat):
            raise UserError(
                f"no lighthouse at {self.address} after {self._times.ask:g} s ({why}); start one, or set "
                "TORCHFT_LIGHTHOUSE or fault_tolerance.lighthouse"
            )

    def quorum(self, request: Participant, ranks: int) -> Answer:
        """Ask for a quorum, and wait for it.

        Raises:
            RuntimeError, TimeoutError: no answer.
        """
        if self._client is None:
            self._client = LighthouseClient(self.address, timedelta(seconds=self._times.connect))
        try:
            q = self._client.quorum(
                request.name,
                timedelta(seconds=self._times.ask),
                request.address,
                request.store,
                request.step,
                ranks,
                False,
                {**request.data},
            )
        except Exception:
            self._client = None
            raise
        before, self._last = self._last, (int(q.quorum_id), [m.replica_id for m in q.participants])
        if self._last[0] <= before[0] and self._last[1] != before[1]:  # its count of changes started from 0
            raise RuntimeError("it has started anew, and may not have heard of everyone yet")
        members = []
        for m in q.participants:
            data = {str(k): v for k, v in (m.data or {}).items()}
            members.append(Participant(m.replica_id, m.step, m.address, m.store_address, data))
        return Answer(f"{q.quorum_id}.{q.created.seconds}.{q.created.nanos}", members)


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


class Meeting:
    """One exchange of sums: the plane, with the limits of this attempt. The first to arrive wait for the last.

    Args:
        plane: connected.
        pulse: is told how long each part may take.
        times: limits.
        arrival_s: until all are there, after which each part may take `times.exchange`.
    """

    def __init__(self, plane: Plane, pulse: Pulse, times: Times, arrival_s: float) -> None:
        self._plane, self._pulse, self._times, self._arrival_s = plane, pulse, times, arrival_s
        self.rank, self.size = plane.rank, plane.size

    def add(self, tensor: torch.Tensor) -> None:
        """Wait for all to arrive."""
        self._plane.add(tensor, self._limit(self._arrival_s))

    def swap(self, give: Sequence[torch.Tensor], take: Sequence[torch.Tensor]) -> Wait:
        """As the plane's."""
        return self._plane.swap(give, take, self._limit(self._times.exchange))

    def _limit(self, seconds: float) -> float:
        self._pulse.expect(seconds + 2 * self._times.exchange, stuck=self._times.exchange)
        return seconds
