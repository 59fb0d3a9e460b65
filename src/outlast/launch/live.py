"""What a launch shows: lines of its processes, and how far the run is, from the event files alone.

Imports no torch.
"""

import contextlib
import os
import sys
import time
from collections import deque
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from outlast.metrics import duration

PLAIN_EVERY_S = 10.0
"""Between lines of progress when the output isn't a terminal."""
WINDOW_S = 20.0
"""Rates are over this much of the past, so that a loss of groups shows."""


class Progress:
    """How far the run is. Feed it every event since the launch started; it has no clock of its own."""

    def __init__(self) -> None:
        self.step = 0
        """Committed, in the whole run."""
        self.committed_step = 0
        """The same since the launch; 0: nothing yet."""
        self.steps = 0
        self.loss: float | None = None
        self.groups = 0
        self.lives: dict[int, str] = {}
        """Group -> life, of those ready to train."""
        self.holders: dict[int, str] = {}
        """Group -> life, of those that hold weights which were trained."""
        self.committed: set[str] = set()
        """Lives that committed a step."""
        self.incident = ""
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=10_000)

    def add(self, event: dict[str, Any]) -> None:
        """Take note of one event."""
        kind = event["kind"]
        if kind in ("start", "commit", "heal"):
            group, life = event["group"], event["life"]
            if kind == "start":
                self.lives[group] = life
                self.steps = event["steps"]
                self.step = max(self.step, event["step"])
            if kind == "commit":
                self.committed.add(life)
                self._commit(event)
            if kind != "start" or event["step"] > 0:
                self.holders[group] = life
        elif kind == "launch":
            self.groups = event["groups"]
        elif kind == "join":
            self.groups += len(event["groups"])
        elif kind == "died":
            self.lives.pop(event["group"], None)
            self.holders.pop(event["group"], None)
        words = _incident(event)
        if words:
            self.incident = words

    def _commit(self, event: dict[str, Any]) -> None:
        self.committed_step = max(self.committed_step, event["step"])
        if event["step"] > self.step or not self._recent:  # each group says so; once is enough
            self.step = max(self.step, event["step"])
            self.loss = event["loss"] if isinstance(event["loss"], float) else None
            self._recent.append((event["t"], event["step"], event["tokens"]))

    def rates(self, now: float) -> tuple[float, float]:
        """Tokens and steps a second over the last `WINDOW_S` (Unix time `now`)."""
        while len(self._recent) > 2 and self._recent[1][0] < now - WINDOW_S:
            self._recent.popleft()
        if len(self._recent) < 2:
            return 0.0, 0.0
        seconds = max(now - self._recent[0][0], 1e-3)
        return sum(c[2] for c in list(self._recent)[1:]) / seconds, (self._recent[-1][1] - self._recent[0][1]) / seconds

    def line(self, now: float) -> str:
        """One line for a person (Unix time `now`)."""
        tokens_s, steps_s = self.rates(now)
        left_s = (self.steps - self.step) / steps_s if steps_s > 0 else None
        parts = [
            f"step {self.step}/{self.steps or '?'}",
            f"loss {self.loss:.4f}" if self.loss is not None else "",
            f"{tokens_s:,.0f} tokens/s" if tokens_s else "",
            f"groups {len(self.lives)}/{self.groups}",
            f"ETA {duration(left_s)}" if left_s is not None else "",
            f"last: {self.incident}" if self.incident else "",
        ]
        return "  ".join(p for p in parts if p)


def _incident(event: dict[str, Any]) -> str:
    kind, group = event["kind"], f"g{event.get('group')}"
    if kind == "died" and event["code"]:
        return f"{group} {event['reason']}"
    if kind == "lighthouse" and event["action"] == "died":
        return "lighthouse died"
    if kind == "heal":
        return f"{group} healed to step {event['step']} in {event['seconds']:.1f} s"
    if kind == "retry":
        return f"step {event['step']} tried again: {event['cause'].split('. ')[0][:80]}"
    if kind == "chaos" and event["action"] != "kill":
        return f"{event['target']} {'stopped' if event['action'] == 'stop' else 'goes on'}"
    return ""


class Screen:
    """Prints lines, and one live line below them on a terminal; a plain line now and then elsewhere.

    What reads the output may go away; the run doesn't end with it.
    """

    def __init__(self) -> None:
        self._live: Live | None = None
        self._open = True
        self._shown_at = time.monotonic()
        self._shown = ""
        if sys.stdout.isatty():
            # Without the thread that refreshes: children are made while this runs.
            self._live = Live(console=Console(highlight=False), auto_refresh=False, transient=True)
            self._live.start()

    def say(self, text: str) -> None:
        """Print one line."""
        if not self._open:
            return
        try:
            if self._live:
                self._live.console.print(text, markup=False, soft_wrap=True)
            else:
                print(text, flush=True)
        except OSError:
            self._open = False
            # What is still buffered must not fail again when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def show(self, progress: Progress) -> None:
        """Show how far the run is, if it is time to."""
        now = time.monotonic()
        if now - self._shown_at < (0.2 if self._live else PLAIN_EVERY_S):
            return
        self._shown_at = now
        line = progress.line(time.time())
        if self._live:
            if line != self._shown:
                self._shown = line
                with contextlib.suppress(OSError):
                    self._live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=True)
        elif (mark := f"{progress.step} {len(progress.lives)} {progress.incident}") != self._shown:
            self._shown = mark  # nothing new, nothing said
            self.say(line)

    def close(self) -> None:
        """Take the live line away."""
        if self._live:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None


class Lines:
    """Cuts the bytes of a pipe into lines."""

    MAX = 1 << 16
    """A longer line is cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Lines that are whole by now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self.MAX:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    def end(self) -> list[str]:
        """What is left, if the last line had no end."""
        lines, self._rest = ([self._rest] if self._rest else []), b""
        return [line.decode(errors="replace") for line in lines]
