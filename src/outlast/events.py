"""Events: typed JSON lines, the only interface of a running job to the outside.

Each process appends to a file of its own, `RUN/events/SOURCE.jsonl`; nobody else writes it. `audit`,
displays and benchmarks read nothing else. The kinds and their fields are in `docs/events.md`.

Imports no torch.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from outlast.errors import StorageError

VERSION = 1
HASH_BITS = 48
"""Of a sample's hash in events: sums of 32,768 samples' fit into 63 bits."""


class EventLog:
    """Appends events of one process.

    Args:
        run_dir: folder of the run.
        source: name of the file, unique to this process (`g0.3fa2`, `launch.1234`).
        common: fields that every event of this process carries.

    Raises:
        StorageError: the folder can't be made or written.
    """

    def __init__(self, run_dir: str | Path, source: str, **common: Any) -> None:
        self.path = Path(run_dir) / "events" / f"{source}.jsonl"
        self.common = common
        self._last = 0.0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as e:
            raise StorageError(
                f"events can't be written to {self.path}: {e.strerror}; free or choose a folder"
            ) from None

    def emit(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Write one event, whole, before returning it.

        Raises:
            StorageError: it couldn't be written (disk full, folder gone).
        """
        self._last = max(self._last, round(time.time(), 6))  # a clock set back must not reorder a life
        event = {"v": VERSION, "t": self._last, "kind": kind, **self.common, **fields}
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(28, "only a part of the line could be written")
        except OSError as e:
            raise StorageError(f"events can't be written to {self.path}: {e.strerror}") from None
        return event

    def close(self) -> None:
        """Nothing can be emitted after this."""
        os.close(self._fd)


class NoEvents(EventLog):
    """Of the ranks above 0: what rank 0 says, it says for its group."""

    def __init__(self, **common: Any) -> None:
        self.common = common

    def emit(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Write nothing."""
        return {"v": VERSION, "kind": kind, **self.common, **fields}

    def close(self) -> None:
        """Nothing is open."""


class EventTail:
    """Reads what was appended to a run's event files since the last look."""

    def __init__(self, run_dir: str | Path) -> None:
        self.folder = Path(run_dir) / "events"
        self._at: dict[Path, int] = {}

    def read(self) -> list[dict[str, Any]]:
        """New whole events of all files, in order of time."""
        out: list[dict[str, Any]] = []
        for path in sorted(self.folder.glob("*.jsonl")):
            at = self._at.get(path, 0)
            with path.open("rb") as f:
                f.seek(at)
                data = f.read()
            end = data.rfind(b"\n") + 1  # a line that is still being written waits for its end
            self._at[path] = at + end
            out += _parse(data[:end].splitlines())
        return sorted(out, key=lambda e: e["t"])


def read_events(run_dir: str | Path) -> list[dict[str, Any]]:
    """All events of a run, in order of time."""
    return EventTail(run_dir).read()


def last_commit(run_dir: str | Path) -> int:
    """The highest step that a run is known to have committed, 0 if none: from the ends of its event files."""
    last = 0
    for path in (Path(run_dir) / "events").glob("*.jsonl"):
        with path.open("rb") as f:
            f.seek(max(0, path.stat().st_size - _TAIL))
            steps = [e.get("step") for e in _parse(f.read().splitlines()) if e["kind"] == "commit"]
            last = max([last, *(s for s in steps if isinstance(s, int))])
    return last


_TAIL = 1 << 20


def _parse(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # a process died in the middle of a line
        if isinstance(event, dict) and isinstance(event.get("t"), int | float) and {"kind", "v"} <= event.keys():
            yield event


def since(started: float) -> float:
    """Seconds since a reading of `time.perf_counter`, to the microsecond."""
    return round(time.perf_counter() - started, 6)


def to_ranges(numbers: Iterable[int]) -> str:
    """`{0, 1, 2, 7}` -> `"0-2,7"`: compact, whatever the order."""
    out: list[str] = []
    first = last = None
    for n in sorted(numbers):
        if last is not None and n == last + 1:
            last = n
            continue
        if first is not None:
            out.append(f"{first}-{last}" if last != first else f"{first}")
        first = last = n
    if first is not None:
        out.append(f"{first}-{last}" if last != first else f"{first}")
    return ",".join(out)


def from_ranges(text: str, limit: int | None = None) -> set[int]:
    """The inverse of `to_ranges`.

    Args:
        text: ranges, as another process wrote them.
        limit: refuse numbers of this size and above, before making any.

    Raises:
        ValueError: not ranges of whole numbers, in order and below the limit.
    """
    out: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        if not first.isascii() or not first.isdigit() or (last and not (last.isascii() and last.isdigit())):
            raise ValueError(f"not a range of numbers: {part[:40]!r}")
        lo, hi = int(first), int(last or first)
        if hi < lo or (limit is not None and hi >= limit):
            raise ValueError(f"not a range below {limit}: {part[:40]!r}")
        out.update(range(lo, hi + 1))
    return out
