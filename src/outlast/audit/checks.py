"""What a run promises, checked from its events."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from outlast.audit.records import Checkpoint, Commit, Digest, Heal, HealFailed, Plan, Refused, Retry, Start, Unit
from outlast.audit.run import Life, Run
from outlast.events import to_ranges

Promise = Literal["events", "config", "steps", "units", "samples", "bits", "digests"]

SCHEDULE = ("samples", "tokens", "units", "lr")
"""Fields of a commit that are equal in every attempt at a step, whatever the accumulation."""
BITS = ("loss", "grad_norm", "skipped", "lineage")
"""Fields that follow from the bits of the sums: equal in every attempt if those are exact."""


@dataclass(frozen=True)
class Finding:
    """Something that isn't as promised (or, as a note, that is legal and worth knowing).

    Attributes:
        step: where it shows; 0: of the whole run.
        promise: which one.
        text: what was found, in words.
    """

    step: int
    promise: Promise
    text: str


def broken_promises(run: Run) -> list[Finding]:
    """All that isn't as promised, in order of steps."""
    found = [Finding(0, "events", text) for text in run.unreadable]
    for check in (_config, _steps, _sequences, _shares, _unit_data, _samples, _same_bits, _digests):
        found += check(run)
    return sorted(found, key=lambda f: f.step)  # stable: within a step, the order of the checks


def legal_differences(run: Run) -> list[Finding]:
    """Different bits that float accumulation allows: attempts add the units in another order."""
    if run.exact:
        return []
    notes: list[Finding] = []
    for step, commits in run.commits.items():
        for field in BITS:
            other = _first_other(commits, field)
            if other is not None and other.attempt != commits[0].attempt:
                text = f"step {step}: {_differ(field, commits[0], other)}; float accumulation allows it"
                notes.append(Finding(step, "bits", text))
                break
    return notes


def digests(run: Run) -> dict[int, list[Digest]]:
    """Step -> all its digests, in order of time; steps ascend."""
    out: dict[int, list[Digest]] = {}
    for d in sorted((d for life in run.lives for d in life.all(Digest)), key=lambda d: (d.step, d.t)):
        out.setdefault(d.step, []).append(d)
    return out


def same(a: Any, b: Any) -> bool:
    """Whether two values of an event have the same bits. NaN equals itself, 0.0 isn't -0.0."""
    return repr(a) == repr(b)


def first_difference(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    """The first key at which two tables differ, or None."""
    return next((k for k in sorted({*a, *b}) if k not in a or k not in b or not same(a[k], b[k])), None)


def identity(start: Start) -> dict[str, Any]:
    """All that decides the bits, as a life said when it started."""
    shape = {k: getattr(start, k) for k in ("steps", "units", "unit_samples", "seq_len")}
    return {**shape, **start.trajectory}


def _config(run: Run) -> Iterator[Finding]:
    reference = run.reference
    for life in run.lives:
        if life.start is None:
            if life.commits:
                yield Finding(life.commits[0].step, "config", f"{life.name} committed without a start event")
            continue
        assert reference is not None
        if not life.commits and life.first(Refused):
            continue  # found out at the door: nothing of it came into the run
        ours, its = identity(reference), identity(life.start)
        key = first_difference(ours, its)
        if key is not None:
            text = (
                f"{life.name} ran with {key} = {its.get(key, 'not set')!r}, "
                f"{reference.life} with {ours.get(key, 'not set')!r}"
            )
            yield Finding(0, "config", text)


def _steps(run: Run) -> Iterator[Finding]:
    last = 0
    for step in run.commits:  # ascending
        if step > last + 1:
            which = f"step {last + 1} was" if step == last + 2 else f"steps {last + 1} to {step - 1} were"
            yield Finding(last + 1, "steps", f"{which} never committed, but step {step} was")
        last = step
    if run.reference and last > run.reference.steps:
        yield Finding(last, "steps", f"step {last} was committed; the run has {run.reference.steps}")


def _sequences(run: Run) -> Iterator[Finding]:
    for life in run.lives:
        yield from _sequence(life)


def _sequence(life: Life) -> Iterator[Finding]:
    """Live a life again: its steps go up by one, and its sums hold what its commits say."""
    at: int | None = None
    held: set[int] = set()
    for r in life.records:
        match r:
            case Start() | Heal():
                at = r.step
                held.clear()
            case Checkpoint(action="load"):
                at = r.step
                held.clear()
            case HealFailed():
                held.clear()  # the sums were given up before the heal began
            case Plan():
                held &= frozenset() if r.drop else r.held
            case Retry():
                held &= r.held
            case Unit():
                if at is not None and r.step != at + 1:
                    text = f"{life.name} computed unit {r.unit} of step {r.step} with {at} steps committed"
                    yield Finding(r.step, "steps", text)
                elif r.unit in held:
                    text = f"{life.name} added unit {r.unit} of step {r.step} to its sums twice"
                    yield Finding(r.step, "units", text)
                held.add(r.unit)
            case Commit():
                if at is not None and r.step != at + 1:
                    text = f"{life.name} committed step {r.step} with {at} steps committed: expected step {at + 1}"
                    yield Finding(r.step, "steps", text)
                elif held != (said := r.holders.get(life.name, frozenset())):
                    text = (
                        f"{life.name} committed step {r.step} with units {_ranges(held)} in its sums, "
                        f"the commit says {_ranges(said)}"
                    )
                    yield Finding(r.step, "units", text)
                at = r.step
                held.clear()
            case _:
                pass


def _shares(run: Run) -> Iterator[Finding]:
    """Each unit of a commit counts once, and whoever held it had computed it."""
    for step, commits in run.commits.items():
        done: set[str] = set()
        for c in commits:
            if run.reference and c.units != run.reference.units:
                text = f"{c.life} committed step {step} of {c.units} units; a step has {run.reference.units}"
                yield Finding(step, "units", text)
            if c.by is None or c.attempt in done:
                continue
            done.add(c.attempt)
            counts = Counter(u for units in c.by.values() for u in units)
            wanted = set(range(c.units))
            for what, units in [
                ("in no member's sums", wanted - counts.keys()),
                ("in the sums of more than one member", {u for u, n in counts.items() if n > 1}),
                (f"not of the step's {c.units}", counts.keys() - wanted),
            ]:
                if units:
                    yield Finding(step, "units", f"{c.life} committed step {step} with units {_ranges(units)} {what}")
            # In the member's own order of events: clocks of several machines can't be compared so finely.
            for name, units in c.by.items():
                life = run.by_name.get(name)
                missing = units - ({u.unit for u in life.units.get(step, ())} if life else set())
                if missing:
                    text = f"{c.life} committed step {step} with units {_ranges(missing)} by {name}, "
                    text += "which never computed them" if life else "which has no events"
                    yield Finding(step, "units", text)


def _unit_data(run: Run) -> Iterator[Finding]:
    """A unit's samples and tokens follow from (step, unit), whoever computes it."""
    if run.reference is None:
        return
    m, size = run.reference.units, run.reference.unit_samples
    first: dict[tuple[int, int], Unit] = {}
    for life in run.lives:
        for u in (u for units in life.units.values() for u in units):
            if u.unit >= m:
                yield Finding(u.step, "units", f"{u.life} computed unit {u.unit} of step {u.step}; a step has {m}")
                continue
            begin = ((u.step - 1) * m + u.unit) * size
            if u.samples != (begin, begin + size):
                text = (
                    f"{u.life} computed unit {u.unit} of step {u.step} on samples {_interval(u.samples)}: "
                    f"expected {_interval((begin, begin + size))}"
                )
                yield Finding(u.step, "samples", text)
            other = first.setdefault((u.step, u.unit), u)
            if other.hash != u.hash:
                text = f"unit {u.unit} of step {u.step} had other tokens: {other.hash} in {other.life}, {u.hash} in "
                yield Finding(u.step, "samples", text + u.life)


def _samples(run: Run) -> Iterator[Finding]:
    """The commits' ranges lie end to end in the global order."""
    if run.reference is None:
        return
    size = run.reference.units * run.reference.unit_samples
    for step, commits in run.commits.items():
        wanted = ((step - 1) * size, step * size)
        for c in commits:
            if c.samples == wanted:
                continue
            why = "more or fewer than a step's"
            if c.samples[0] != wanted[0]:
                why = "an overlap with the step before" if c.samples[0] < wanted[0] else "a hole after the step before"
            text = (
                f"{c.life} committed step {step} with samples {_interval(c.samples)}, {why}: "
                f"expected {_interval(wanted)}"
            )
            yield Finding(step, "samples", text)
            break


def _same_bits(run: Run) -> Iterator[Finding]:
    """Commits of one attempt agree on everything; attempts at one step on all that their sums decide."""
    for step, commits in run.commits.items():
        attempts: dict[str, list[Commit]] = {}
        for c in commits:
            attempts.setdefault(c.attempt, []).append(c)
        firsts = [members[0] for members in attempts.values()]
        said: set[str] = set()
        for group, fields in [
            *((members, ("by", *SCHEDULE, *BITS)) for members in attempts.values()),
            (firsts, (*SCHEDULE, *BITS) if run.exact else SCHEDULE),
        ]:
            for field in fields:
                other = _first_other(group, field)
                if other is not None and field not in said:
                    said.add(field)
                    promise: Promise = "units" if field == "by" else "samples" if field == "samples" else "bits"
                    yield Finding(step, promise, f"step {step}: {_differ(field, group[0], other)}")


def _first_other(commits: list[Commit], field: str) -> Commit | None:
    """The first commit whose field differs from the first commit's."""
    a = _value(commits[0], field)
    for c in commits[1:]:
        b = _value(c, field)
        if field == "lineage" and None in (a, b):
            continue  # a plain life has none
        if not same(a, b):
            return c
    return None


def _value(commit: Commit, field: str) -> Any:
    if field == "by":  # a spare may be named or not
        return {name: to_ranges(units) for name, units in sorted((commit.by or {}).items()) if units}
    return getattr(commit, field)


def _differ(field: str, a: Commit, b: Commit) -> str:
    return f"{field} is {_value(a, field)!r} in {a.life}'s commit and {_value(b, field)!r} in {b.life}'s"


def _digests(run: Run) -> Iterator[Finding]:
    for step, found in digests(run).items():
        alike: dict[str | None, Digest] = {}
        for d in found:
            # Without exact sums, only those that made the same commits must hold the same bits.
            lineage = None if run.exact else _lineage(run.by_name[d.life], d)
            if not run.exact and lineage is None:
                continue
            other = alike.setdefault(lineage, d)
            if other.sha256 != d.sha256:
                text = (
                    f"digest after step {step} is {other.sha256[:16]} in {other.life} and {d.sha256[:16]} in {d.life}"
                )
                yield Finding(step, "digests", text)
                break


def _lineage(life: Life, digest: Digest) -> str | None:
    made = [c for c in life.commits if c.step == digest.step and c.t <= digest.t]
    return made[-1].lineage if made else None


def _ranges(units: set[int] | frozenset[int]) -> str:
    return to_ranges(units) or "none"


def _interval(samples: tuple[int, int]) -> str:
    return f"[{samples[0]}, {samples[1]})"
