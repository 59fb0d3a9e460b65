"""The edge of a group: the lighthouse, the heartbeat, and the limits of an exchange.

Everything here touches sockets and clocks, and decides nothing.
"""

import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch

from outlast.accumulate import Wait
from outlast.config import host_and_port
from outlast.errors import EXIT_FAILED, ConfigError, UserError
from outlast.ft.protocol import Answer, Participant
from outlast.sockets import wait_for_listener
from outlast.times import Times

os.environ.setdefault("RUST_LOG", "error")  # torchft's client is chatty
try:
    from torchft.coordination import LighthouseClient

    from outlast.ft.plane import Plane
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
