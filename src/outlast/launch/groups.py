"""One replica group as launch sees it, and what its process prints. Imports no torch."""

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outlast.config import Config
from outlast.launch.live import Lines
from outlast.launch.policy import Outcome


class Output:
    """What one process after another prints: to a log file, and with a prefix to the screen.

    Args:
        name: prefix.
        log: file to append to.
        say: prints a line; None: to the log alone.
    """

    def __init__(self, name: str, log: Path, say: Callable[[str], None] | None) -> None:
        self.name = name
        self.log = log
        self.fd = -1
        """Read end of the pipe of the present process."""
        self._say = say
        self._lines = Lines()

    def attach(self, fd: int) -> None:
        """Read from this pipe from now on."""
        os.set_blocking(fd, False)
        self.fd = fd

    def read(self) -> bool:
        """Take what is there. False at the end."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return True
        self._put(self._lines.feed(data) if data else self._lines.end())
        return bool(data)

    def finish(self) -> None:
        """Take the rest of a process that ended, without waiting for more, and close."""
        if self.fd < 0:
            return
        while True:
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                break
            self._put(self._lines.feed(data))
        self._put(self._lines.end())
        os.close(self.fd)
        self.fd = -1

    def _put(self, lines: list[str]) -> None:
        if not lines:
            return
        with contextlib.suppress(OSError), self.log.open("a") as log:  # a full disk doesn't end the run
            log.writelines(f"{line}\n" for line in lines)
        if self._say:
            for line in lines:
                self._say(f"[{self.name}] {line}")


@dataclass
class Member:
    """One rank of a group: at most one process at a time."""

    rank: int
    output: Output
    state: Literal["out", "forking", "running"] = "out"
    pid: int = 0
    pidfd: int = -1

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its process, never to another that got its number."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def runs(self, pid: int, pidfd: int) -> None:
        """Its process was made."""
        self.state, self.pid, self.pidfd = "running", pid, pidfd

    def ended(self) -> None:
        """Its process is gone, or will never be."""
        self.output.finish()
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.state, self.pidfd = "out", -1


@dataclass
class Group:
    """One replica group: its ranks live and die together."""

    number: int
    config: Config
    members: list[Member]
    state: Literal["waiting", "forking", "running", "out"] = "waiting"
    """"running": each rank has a process, or had one in this life."""
    due_s: float = 0.0
    """`waiting`: when to fork it (monotonic)."""
    outcome: Outcome = "restart"
    """What became of it; "restart" while it runs or will."""
    fruitless: int = 0
    """Deaths in a row in lives that committed nothing."""
    spawns: int = 0
    """Lives it had."""
    life: str = ""
    ends: list[tuple[int, int, str]] = field(default_factory=list)
    """Rank, exit code and what else is known of each process of this life that ended, in that order."""
    kill_at_s: float | None = None
    """When the ranks left of a life that has failed are killed (monotonic)."""
    swept: bool = False
    """They were: a SIGKILL from then on is ours, and says nothing."""
    killed: bool = False
    """Chaos killed this life; its end is still to be heard of."""
    terminate: bool = False
    """Asked to stop, or to be as soon as it has processes."""

    @property
    def name(self) -> str:
        """`g0`."""
        return f"g{self.number}"

    @property
    def pid(self) -> int:
        """Process id of rank 0."""
        return self.members[0].pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to each of its processes."""
        for member in self.members:
            member.signal(number)

    def begin(self, life: str) -> None:
        """Its processes are being made."""
        self.state, self.life, self.killed = "forking", life, False
        self.ends, self.kill_at_s, self.swept = [], None, False
        for member in self.members:
            member.state, member.pid = "forking", 0

    def is_up(self) -> bool:
        """Note, once, that the last of its processes was made. Whether it was just now."""
        up = self.state == "forking" and not any(m.state == "forking" for m in self.members)
        if up:
            self.state, self.spawns = "running", self.spawns + 1
        return up
