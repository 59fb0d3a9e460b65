"""The verdict on a run, and on whether two runs are one trajectory. Pure: events in, values out."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outlast.audit.causes import Trouble, end_of_life, find_troubles
from outlast.audit.checks import broken_promises, digests, first_difference, identity, legal_differences, same
from outlast.audit.incidents import Incident, find_incidents
from outlast.audit.records import Commit
from outlast.audit.run import Run, read_run

COMPARED = ("samples", "data", "tokens", "lr", "loss", "grad_norm", "skipped")
"""Fields of a committed step that two runs of one trajectory share, bit for bit."""


@dataclass(frozen=True)
class Step:
    """A committed step. `data` is a hash over its units' tokens, in order of units."""

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens: int
    samples: tuple[int, int]
    skipped: str | None
    data: str


@dataclass(frozen=True)
class Audit:
    """What a run's events say of it.

    Attributes:
        steps: of the whole run; 0 if nothing ever started.
        committed_steps: distinct steps that were committed.
        finished: all of them were.
        groups, lives: how many there were.
        accumulation: `exact` or `float`.
        units_exactly_once: each committed step sums each of its units once.
        samples_exactly_once: so the samples: step after step, without overlap or hole.
        digests_equal: wherever groups logged a digest of the same step, it is the same.
        final_digest: after the last step committed, if one was logged.
        final_loss: of the last step committed.
        goodput: share of the groups' time that went into units that count.
        redone_units: units computed, less those that count.
        twice_committed: steps committed in more than one attempt. Legal if bit-equal.
        broken: each difference from what is promised, in words, in order of steps.
        notes: differences that float accumulation allows.
        incidents: in order of time.
        trajectory: all that decides the bits, as the run said at its start.
        history: committed steps, in order.
        digests: step -> digest.
    """

    steps: int
    committed_steps: int
    finished: bool
    groups: int
    lives: int
    accumulation: str
    units_exactly_once: bool
    samples_exactly_once: bool
    digests_equal: bool
    final_digest: str | None
    final_loss: float | None
    goodput: float | None
    redone_units: int
    twice_committed: tuple[int, ...]
    broken: tuple[str, ...]
    notes: tuple[str, ...]
    incidents: tuple[Incident, ...]
    trajectory: Mapping[str, Any]
    history: tuple[Step, ...]
    digests: Mapping[int, str]


@dataclass(frozen=True)
class Difference:
    """Where two runs part. `step` 0: their configs."""

    step: int
    field: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Comparison:
    """Whether two runs are one trajectory, as far as both went.

    Attributes:
        same: so it is, and they have at least a step in common.
        difference: the first, if any.
        common_steps, common_digests: what could be compared.
    """

    same: bool
    difference: Difference | None
    common_steps: int
    common_digests: int


def audit(events: Iterable[Mapping[str, Any]]) -> Audit:
    """Check a run's promises and count what it cost.

    Args:
        events: as `outlast.events.read_events` gives them.
    """
    run = read_run(events)
    found = broken_promises(run)
    promises = {f.promise for f in found}
    troubles = find_troubles(run)
    history = tuple(_history(run))
    logged = digests(run)
    steps = run.reference.steps if run.reference else 0
    last = history[-1].step if history else 0
    return Audit(
        steps=steps,
        committed_steps=len(history),
        finished=0 < steps == len(history) == last,
        groups=len({life.group for life in run.lives}),
        lives=len(run.lives),
        accumulation="exact" if run.exact else "float",
        units_exactly_once=not promises & {"steps", "units"},
        samples_exactly_once=not promises & {"steps", "units", "samples"},
        digests_equal=all(len({d.sha256 for d in same_step}) == 1 for same_step in logged.values()),
        final_digest=logged[last][-1].sha256 if last in logged else None,
        final_loss=history[-1].loss if history else None,
        goodput=_goodput(run, troubles),
        redone_units=_redone_units(run),
        twice_committed=tuple(s for s, commits in run.commits.items() if len({c.attempt for c in commits}) > 1),
        broken=tuple(f.text for f in found),
        notes=tuple(f.text for f in legal_differences(run)),
        incidents=find_incidents(run, troubles),
        trajectory=identity(run.reference) if run.reference else {},
        history=history,
        digests={step: same_step[-1].sha256 for step, same_step in logged.items()},
    )


def compare(a: Audit, b: Audit) -> Comparison:
    """Whether two runs are one trajectory: same config, and the same bits wherever both have been."""
    steps_a, steps_b = {s.step: s for s in a.history}, {s.step: s for s in b.history}
    common = sorted(steps_a.keys() & steps_b.keys())
    common_digests = a.digests.keys() & b.digests.keys()
    difference = _parted(a, b)
    if difference is None:
        pairs = [
            (step, name, getattr(steps_a[step], name), getattr(steps_b[step], name))
            for step in common
            for name in COMPARED
        ]
        pairs += [(step, "digest", a.digests[step], b.digests[step]) for step in common_digests]
        pairs.sort(key=lambda pair: pair[0])  # stable: a step's digest comes after what went into it
        difference = next((Difference(*pair) for pair in pairs if not same(pair[2], pair[3])), None)
    return Comparison(difference is None and bool(common), difference, len(common), len(common_digests))


def _parted(a: Audit, b: Audit) -> Difference | None:
    ours, theirs = dict(a.trajectory), dict(b.trajectory)
    key = first_difference(ours, theirs)
    return None if key is None else Difference(0, key, ours.get(key), theirs.get(key))


def _history(run: Run) -> Iterator[Step]:
    hashes: dict[int, dict[int, str]] = {}
    for life in run.lives:
        for step, units in life.units.items():
            hashes.setdefault(step, {}).update((u.unit, u.hash) for u in units)
    for c in run.standing.values():
        text = " ".join(f"{unit}:{value}" for unit, value in sorted(hashes.get(c.step, {}).items()))
        data = hashlib.sha256(text.encode()).hexdigest()[:16]
        yield Step(c.step, c.loss, c.lr, c.grad_norm, c.tokens, c.samples, c.skipped, data)


def _redone_units(run: Run) -> int:
    computed = [(u.step, u.unit) for life in run.lives for units in life.units.values() for u in units]
    return len(computed) - len({pair for pair in computed if pair[0] in run.standing})


def _goodput(run: Run, troubles: list[Trouble]) -> float | None:
    """Seconds of the units that count, over the seconds that groups were ready to train."""
    alive = math.fsum(
        max(0.0, end_of_life(life, troubles) - life.start.t) for life in run.lives if life.start is not None
    )
    useful = math.fsum(s for commit in run.standing.values() for s in _unit_seconds(run, commit))
    return round(useful / alive, 3) if alive > 0 else None


def _unit_seconds(run: Run, commit: Commit) -> Iterator[float]:
    for name, units in commit.holders.items():
        life = run.by_name.get(name)
        seconds = {u.unit: u.seconds for u in life.units.get(commit.step, ())} if life else {}
        yield from (seconds.get(unit, 0.0) for unit in units)
