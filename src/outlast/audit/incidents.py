"""What each disturbance of a run cost.

A group's death shows in three places: the launcher's events (the cause), the survivors' (when they noticed, when
they went on, how long they committed nothing) and the next life's (its heal).
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from outlast.audit.causes import Trouble
from outlast.audit.records import Commit, Exit, Heal, Plan, Quorum, R, Record, Retry, Start
from outlast.audit.run import Life, Run


@dataclass(frozen=True)
class Incident:
    """Something that disturbed the run. Times in seconds; None: doesn't apply, or wasn't seen.

    Attributes:
        kind: `kill` or `stop` (chaos), `crash`, `lighthouse`, `join`, or `failed attempt` (none of these explains it).
        group: that it happened to.
        step: in hand at that moment.
        at_s: since the run's first event.
        detect_s: until a survivor's event shows that the group is missed.
        reform_s: from then until a plan that goes on without it.
        heal_s: the group's next life (after a stop: the same) took to load a peer's state. None if it loaded a save.
        gap_s: longest time between two commits of a survivor while it lasted.
        redone_units: computed by the group in vain: of the step in hand, and of commits that nobody else had.
    """

    kind: str
    group: int | None
    step: int
    at_s: float
    detect_s: float | None = None
    reform_s: float | None = None
    heal_s: float | None = None
    gap_s: float | None = None
    redone_units: int | None = None


def find_incidents(run: Run, troubles: list[Trouble]) -> tuple[Incident, ...]:
    """All incidents of a run, in order of time."""
    if not run.lives:
        return ()
    began = run.records[0].t
    out: list[Incident] = []
    explained = [*_comings_and_goings(run)]
    for trouble in troubles:
        incident, until = (_join if trouble.kind == "join" else _loss)(run, trouble, troubles, began)
        explained.append((trouble.since, until))
        out.append(incident)
    out += _failed_attempts(run, explained, began)
    return tuple(sorted(out, key=lambda incident: incident.at_s))


def _comings_and_goings(run: Run) -> Iterator[tuple[float, float]]:
    """Spans in which a failed attempt is no surprise: a life finds its place, or leaves."""
    for life in run.lives:
        begin, end = life.records[0].t, life.records[-1].t
        yield begin, life.commits[0].t if life.commits else end
        done = life.first(Exit)
        if done is not None:
            yield life.commits[-1].t if life.commits else begin, _settled(run.lives, done.t)


def _join(run: Run, trouble: Trouble, troubles: list[Trouble], began: float) -> tuple[Incident, float]:
    life = _next_life(run, trouble)
    others = [x for x in run.lives if x.group != trouble.group]
    begin, until, gap = trouble.t, trouble.t, None
    if life is not None:
        begin = life.records[0].t
        until = life.commits[0].t if life.commits else life.records[-1].t
        gap, _ = _gap(others, begin, until)
    step = _step_in_hand(run, trouble)
    heal_s = _heal_s(life, begin, math.inf)
    return Incident("join", trouble.group, step, _s(trouble.t - began), heal_s=heal_s, gap_s=gap), until


def _loss(run: Run, trouble: Trouble, troubles: list[Trouble], began: float) -> tuple[Incident, float]:
    """The incident, and until when it explains failed attempts."""
    life, step = trouble.life, _step_in_hand(run, trouble)
    others = [x for x in run.lives if trouble.group is None or x.group != trouble.group]
    survivors = [x for x in others if life is None or _counts_on(x, trouble.since, life.name)]
    noticed = _noticed(trouble, survivors)
    again = _went_on(trouble, survivors, noticed) if noticed else None
    gap, until = _gap(others, trouble.since, again.t if again else trouble.t)
    if gap is None:  # nobody was left: until someone is back
        until = min((c.t for x in run.lives if (c := _first(x, Commit, trouble.t))), default=math.inf)
    patient = _next_life(run, trouble)
    if trouble.kind == "stop" and life is not None:
        patient = life
        if trouble.over < math.inf:
            back = _first(life, Commit, trouble.over)
            until = max(until, back.t if back else life.records[-1].t)
    next_death = (x.t for x in troubles if x.group == trouble.group and x.t > trouble.t and x.kind in ("kill", "crash"))
    incident = Incident(
        trouble.kind,
        trouble.group,
        step,
        at_s=_s(trouble.t - began),
        detect_s=_s(max(0.0, noticed.t - trouble.t)) if noticed else None,
        reform_s=_s(again.t - noticed.t) if noticed and again else None,
        heal_s=_heal_s(patient, trouble.t, min(next_death, default=math.inf)),
        gap_s=gap,
        redone_units=_computed_in_vain(run, trouble, step),
    )
    return incident, until


def _failed_attempts(run: Run, explained: list[tuple[float, float]], began: float) -> Iterator[Incident]:
    """Retries that nothing explains, one incident a step."""
    steps = run.reference.steps if run.reference else 0
    found: dict[int, list[Retry]] = {}
    for r in run.records:
        if isinstance(r, Retry) and r.step <= steps and not any(a <= r.t <= b for a, b in explained):
            found.setdefault(r.step, []).append(r)
    for step, retries in found.items():
        first, lives = retries[0], [run.by_name[name] for name in dict.fromkeys(r.life for r in retries)]
        again = next((p for p in lives[0].after(Plan, first.t) if p.exchange), None)
        yield Incident(
            "failed attempt",
            lives[0].group,
            step,
            at_s=_s(first.t - began),
            reform_s=_s(again.t - first.t) if again else None,
            gap_s=_gap(lives, first.t, again.t if again else first.t)[0],
            redone_units=sum(lost_units(run, life, step) for life in lives),
        )


# --- Parts of the cost -----------------------------------------------------------------------------


def lost_units(run: Run, life: Life, step: int) -> int:
    """Units of a step that a life computed, less those that the step's commit has from it."""
    computed = len(life.units.get(step, ()))
    commit = run.standing.get(step)
    return max(0, computed - len(commit.holders.get(life.name, ()))) if commit else computed


def _computed_in_vain(run: Run, trouble: Trouble, step: int) -> int | None:
    life = trouble.life
    if trouble.kind == "lighthouse":
        return sum(lost_units(run, x, step) for x in run.lives)
    if life is None:
        return None
    lost, made = lost_units(run, life, step), {c.step: c for c in life.commits if c.t <= trouble.t}
    while (step := step - 1) in made and made[step].attempt != run.standing[step].attempt:
        lost += lost_units(run, life, step)
    return lost


def _step_in_hand(run: Run, trouble: Trouble) -> int:
    lives = run.lives if trouble.life is None else (trouble.life,)
    places = [p for life in lives for kind in (Start, Heal, Commit) if (p := life.latest(kind, trouble.t))]
    by = (lambda p: p.step) if trouble.life is None else (lambda p: p.t)
    at = max(places, key=by).step if places else 0
    return min(at + 1, run.reference.steps) if run.reference else at + 1


def _noticed(trouble: Trouble, survivors: list[Life]) -> Record | None:
    """The first event of a survivor that shows the trouble."""
    life = trouble.life
    if trouble.kind == "lighthouse":
        shows, until = (lambda r: isinstance(r, Retry)), _settled(survivors, trouble.over)
    elif life is not None:
        back = _first(life, Commit, trouble.over)  # after a stop that nobody noticed
        shows, until = (lambda r: _misses(r, life.name)), back.t if back else math.inf
    else:
        return None
    seen = (next((r for r in x.after(Record, trouble.since) if r.t >= until or shows(r)), None) for x in survivors)
    return min((r for r in seen if r and r.t < until), key=lambda r: r.t, default=None)


def _counts_on(life: Life, t: float, name: str) -> bool:
    """Whether a life's last plan before `t` has a member in it."""
    plan = life.latest(Plan, t)
    return plan is not None and name in plan.active


def _misses(r: Record, name: str) -> bool:
    match r:
        case Retry():
            return True
        case Quorum():
            return name not in r.members
        case Plan():
            return name not in r.active
        case _:
            return False


def _went_on(trouble: Trouble, survivors: list[Life], noticed: Record) -> Plan | None:
    """The first plan to exchange without the group, or at all after the lighthouse is back."""
    name = trouble.life.name if trouble.life else ""
    since = max(noticed.t, trouble.over) if trouble.kind == "lighthouse" else noticed.t
    since = math.nextafter(since, -math.inf)  # what shows it may be that very plan
    plans = (next((p for p in x.after(Plan, since) if p.exchange and name not in p.active), None) for x in survivors)
    return min((p for p in plans if p), key=lambda p: p.t, default=None)


def _gap(lives: Iterable[Life], begin: float, end: float) -> tuple[float | None, float]:
    """The longest time between two commits of one life that meets [begin, end], and when the last of them ended."""
    longest, until = None, -math.inf
    for life in lives:
        times = life.times(Commit)
        for i in range(max(1, bisect_right(times, begin)), len(times)):
            if times[i - 1] > begin and times[i - 1] >= end:
                break
            longest = max(longest or 0.0, times[i] - times[i - 1])
            until = max(until, times[i])
    return (None if longest is None else _s(longest)), until


def _settled(lives: Iterable[Life], t: float) -> float:
    """When all lives that commit after `t` have done so."""
    return max((c.t for life in lives if (c := _first(life, Commit, t))), default=math.inf)


def _next_life(run: Run, trouble: Trouble) -> Life | None:
    return next((x for x in run.lives if x.group == trouble.group and x.records[0].t >= trouble.t), None)


def _heal_s(life: Life | None, after: float, before: float) -> float | None:
    healed = _first(life, Heal, after) if life else None
    return _s(healed.seconds) if healed and healed.t <= before else None


def _first(life: Life, kind: type[R], after: float) -> R | None:
    return next(life.after(kind, after), None)


def _s(seconds: float) -> float:
    return round(seconds, 3)
