"""What the parts of a launch share: the descriptors waited on, the signals, the events, the screen.

Imports no torch.
"""

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from outlast.errors import StorageError
from outlast.events import EventLog, EventTail
from outlast.launch.live import Progress, Screen

READ_EVERY_S = 0.1
"""Between looks at the event files."""


class Hub:
    """One thread's view of everything outside it.

    Args:
        run_dir: folder of the run.
        screen: where to print.
    """

    def __init__(self, run_dir: Path, screen: Screen) -> None:
        self.run_dir = run_dir
        self.screen = screen
        self.progress = Progress()
        self.signals: list[int] = []
        """Signals that came and weren't handled."""
        self.events = EventLog(run_dir, f"launch.{os.getpid()}")
        self.tail = EventTail(run_dir)
        self._read_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._restore = self._take_signals()

    def watch(self, fd: int, action: Callable[[], None]) -> None:
        """Call this whenever the descriptor is readable."""
        self._selector.register(fd, selectors.EVENT_READ, action)

    def unwatch(self, fd: int) -> None:
        """Not any more; before the descriptor is closed."""
        if fd >= 0 and fd in self._selector.get_map():
            self._selector.unregister(fd)

    def wait(self, timeout_s: float) -> None:
        """Wait for descriptors, signals or the time, and do what was to be done about descriptors."""
        for key, _ in self._selector.select(timeout_s):
            if self._selector.get_map().get(key.fd) is key:  # not closed by what was done just before
                key.data()
        if time.monotonic() - self._read_at >= READ_EVERY_S:
            self.read_events()

    def say(self, text: str) -> None:
        """Print a line of launch's own."""
        self.screen.say(f"outlast launch: {text}")

    def emit(self, kind: str, **fields: Any) -> None:
        """Write an event. A full disk doesn't end the run: the groups may well go on."""
        try:
            self.events.emit(kind, **fields)
        except StorageError as e:
            self.say(str(e))
            self.progress.add({"kind": kind, "t": time.time(), **fields})

    def read_events(self) -> None:
        """Bring `progress` up to date."""
        self._read_at = time.monotonic()
        for event in self.tail.read():
            self.progress.add(event)

    def _take_signals(self) -> Callable[[], None]:
        """Have signals wake the loop. Returns what puts things back."""
        asleep, wake = socket.socketpair()
        for end in (asleep, wake):
            end.setblocking(False)

        def note(number: int, frame: FrameType | None) -> None:
            self.signals.append(number)

        def drain() -> None:
            with contextlib.suppress(BlockingIOError):
                asleep.recv(4096)

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            numbers.append(signal.SIGHUP)
        before = [(n, signal.signal(n, note)) for n in numbers]
        before_fd = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self.watch(asleep.fileno(), drain)

        def restore() -> None:
            signal.set_wakeup_fd(before_fd)
            for number, handler in before:
                signal.signal(number, handler)
            asleep.close()
            wake.close()

        return restore

    def close(self) -> None:
        """Nothing is waited on, caught or written after this."""
        self._restore()
        self._selector.close()
        self.events.close()
        self.screen.close()
