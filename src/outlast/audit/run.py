"""A run as the audit sees it: its lives, each with its records, and what the launcher did."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, cast

from outlast.audit.records import Commit, R, Record, Start, Unit, read_record


@dataclass(frozen=True)
class Life:
    """One life of one group, with its records in the order it wrote them."""

    name: str
    group: int
    records: tuple[Record, ...]

    @cached_property
    def _kinds(self) -> dict[type[Record], list[Record]]:
        out: dict[type[Record], list[Record]] = {Record: list(self.records)}
        for r in self.records:
            out.setdefault(type(r), []).append(r)
        return out

    @cached_property
    def _times(self) -> dict[type[Record], list[float]]:
        return {kind: [r.t for r in records] for kind, records in self._kinds.items()}

    def all(self, kind: type[R]) -> list[R]:
        """Its records of one kind; of `Record`: all."""
        return cast("list[R]", self._kinds.get(kind, []))

    def times(self, kind: type[Record]) -> list[float]:
        """When they were written."""
        return self._times.get(kind, [])

    def first(self, kind: type[R]) -> R | None:
        """Its first record of one kind."""
        return next(iter(self.all(kind)), None)

    def after(self, kind: type[R], t: float) -> Iterator[R]:
        """Its records of one kind written later than a time."""
        return islice(self.all(kind), bisect_right(self.times(kind), t), None)

    def latest(self, kind: type[R], t: float) -> R | None:
        """Its last record of one kind written until a time."""
        n = bisect_right(self.times(kind), t)
        return self.all(kind)[n - 1] if n else None

    @cached_property
    def start(self) -> Start | None:
        """When it was ready to train."""
        return self.first(Start)

    @cached_property
    def commits(self) -> list[Commit]:
        """In order."""
        return self.all(Commit)

    @cached_property
    def units(self) -> dict[int, list[Unit]]:
        """Step -> the units it computed, in order."""
        out: dict[int, list[Unit]] = {}
        for u in self.all(Unit):
            out.setdefault(u.step, []).append(u)
        return out


@dataclass(frozen=True)
class Run:
    """All that is known of a run.

    Attributes:
        lives: in the order of their first event.
        launcher: its records, in order of time.
        unreadable: events that can't be what they say, each in words.
    """

    lives: tuple[Life, ...]
    launcher: tuple[Record, ...]
    unreadable: tuple[str, ...]

    @cached_property
    def by_name(self) -> dict[str, Life]:
        """Member's name -> its life."""
        return {life.name: life for life in self.lives}

    @cached_property
    def reference(self) -> Start | None:
        """The start of the first life that committed, else of the first that started."""
        started = [life for life in self.lives if life.start is not None]
        first = next((life for life in started if life.commits), started[0] if started else None)
        return first.start if first else None

    @cached_property
    def commits(self) -> dict[int, list[Commit]]:
        """Step -> all its commits, in order of time; steps ascend."""
        out: dict[int, list[Commit]] = {}
        for c in sorted((c for life in self.lives for c in life.commits), key=lambda c: (c.step, c.t)):
            out.setdefault(c.step, []).append(c)
        return out

    @cached_property
    def standing(self) -> dict[int, Commit]:
        """Step -> the commit that the run went on from: an abandoned one is always the earlier."""
        return {step: commits[-1] for step, commits in self.commits.items()}

    @property
    def exact(self) -> bool:
        """Whether the sums of all attempts at a step have the same bits."""
        return self.reference is None or self.reference.trajectory.get("training.accumulation", "exact") == "exact"

    @cached_property
    def records(self) -> list[Record]:
        """Everyone's records, in order of time."""
        return sorted([r for life in self.lives for r in life.records] + list(self.launcher), key=lambda r: r.t)


def read_run(events: Iterable[Mapping[str, Any]]) -> Run:
    """Sort a run's events into its lives.

    Args:
        events: as `outlast.events.read_events` gives them.
    """
    lives: dict[str, tuple[int, list[Record]]] = {}
    launcher: list[Record] = []
    unreadable: list[str] = []
    for event in events:
        try:
            found = read_record(event)
        except ValueError as e:
            whose = f" of g{event['group']}:{event['life']}" if {"group", "life"} <= event.keys() else ""
            at = f" at step {event['step']}" if "step" in event else f" at time {event.get('t')}"
            unreadable.append(f"the {event['kind']} event{whose}{at} {e}")
            continue
        if found is None:
            continue
        record, group = found
        (lives.setdefault(record.life, (group, []))[1] if record.life else launcher).append(record)
    sorted_lives = sorted(
        (Life(name, group, tuple(r)) for name, (group, r) in lives.items()), key=lambda x: x.records[0].t
    )
    return Run(tuple(sorted_lives), tuple(launcher), tuple(unreadable))
