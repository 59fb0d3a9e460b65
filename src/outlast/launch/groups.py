"""One replica group as launch sees it, and what its process prints. Imports no torch."""

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
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
        say: prints a line.
    """

    def __init__(self, name: str, log: Path, say: Callable[[str], None]) -> None:
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
        for line in lines:
            self._say(f"[{self.name}] {line}")


@dataclass
class Group:
    """One replica group: at most one process at a time."""

    number: int
    config: Config
    output: Output
    state: Literal["waiting", "forking", "running", "out"] = "waiting"
    due_s: float = 0.0
    """`waiting`: when to fork it (monotonic)."""
    outcome: Outcome = "restart"
    """What became of it; "restart" while it runs or will."""
    fruitless: int = 0
    """Deaths in a row in lives that committed nothing."""
    spawns: int = 0
    """Processes it had."""
    life: str = ""
    pid: int = 0
    pidfd: int = -1
    killed: bool = False
    """Chaos killed this life; its end is still to be heard of."""
    terminate: bool = False
    """Asked to stop, or to be as soon as it has a process."""

    @property
    def name(self) -> str:
        """`g0`."""
        return f"g{self.number}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its process, never to another that got its number."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def runs(self, pid: int, pidfd: int) -> None:
        """Its process was made."""
        self.state, self.pid, self.pidfd, self.killed = "running", pid, pidfd, False
        self.spawns += 1

    def ended(self) -> None:
        """Its process is gone."""
        self.output.finish()
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.state, self.pid, self.pidfd = "out", 0, -1
