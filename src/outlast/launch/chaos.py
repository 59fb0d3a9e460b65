"""Faults as data: a schedule of kills and stops that is parsed, printed, seeded and replayed.

Grammar, words separated by spaces, statements by `;`:

    statement = VERB [TARGET] clause...
    VERB      = kill (SIGKILL) | stop (SIGSTOP, later SIGCONT)
    TARGET    = gN        group N, all its ranks
              | gN.R      rank R of group N alone
              | N         N groups drawn among the live ones; left out: 1
              | rank      one rank drawn among those of the live groups
              | all       every group that has a process, once at least one is live
              | lighthouse
    clause    = every DURATION [times N]    again and again, the first after one DURATION
              | at step N                   once, when step N or a later one was committed
              | at DURATION                 once
              | for DURATION                `stop` only, and needed there: how long until it goes on
    DURATION  = 500ms | 1.5s | 2m | 1h      counted from the start of the launch

    kill every 5s times 3; kill g1 at step 30; kill all at step 40; kill lighthouse every 5s
    kill 2 at step 20; stop g2 for 3s at step 25; stop every 8s for 2s

A statement has exactly one of `every` and `at`. A group is *live* once its process is ready to train (it wrote
its `start` event). A statement that is due while its target isn't there waits for it; what was never done is
named at the end (`undone`).

`advance` is a pure function of the schedule, its state and what is seen of the world; a draw depends on the seed,
the statement and how often it fired, so the same history gives the same faults.

Imports no torch.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NoReturn

from outlast.errors import ConfigError

LIGHTHOUSE = "lighthouse"

# --- What was asked --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """Whom a statement hits: one group by number or one rank of it, `number` random groups, one random rank, all
    groups, or the lighthouse."""

    kind: Literal["random", "group", "one rank", "rank", "all", "lighthouse"] = "random"
    number: int = 1
    rank: int = 0

    def __str__(self) -> str:
        names = {"random": f"{self.number}", "group": f"g{self.number}", "one rank": f"g{self.number}.{self.rank}"}
        return names.get(self.kind, self.kind)


@dataclass(frozen=True)
class Every:
    """Again and again; `times` None: for as long as the run lasts."""

    period_s: float
    times: int | None = None

    def __str__(self) -> str:
        return f"every {self.period_s:.12g}s" + (f" times {self.times}" if self.times else "")


@dataclass(frozen=True)
class AtTime:
    """Once, so long after the start of the launch."""

    time_s: float

    def __str__(self) -> str:
        return f"at {self.time_s:.12g}s"


@dataclass(frozen=True)
class AtStep:
    """Once, as soon as this step or a later one was committed."""

    step: int

    def __str__(self) -> str:
        return f"at step {self.step}"


@dataclass(frozen=True)
class Statement:
    """One line of a schedule."""

    verb: Literal["kill", "stop"]
    target: Target
    when: Every | AtTime | AtStep
    for_s: float = 0.0
    """`stop`: seconds until it goes on."""

    def __str__(self) -> str:
        return f"{self.verb} {self.target} {self.when}" + (f" for {self.for_s:.12g}s" if self.verb == "stop" else "")


@dataclass(frozen=True)
class Schedule:
    """All statements, and the seed of their draws."""

    statements: tuple[Statement, ...] = ()
    seed: int = 0

    def __str__(self) -> str:
        return "; ".join(map(str, self.statements))


def parse(spec: str, seed: int = 0) -> Schedule:
    """Read a schedule.

    Args:
        spec: statements in the grammar above. Empty: no faults.
        seed: of the draws.

    Raises:
        ConfigError: naming the statement, what was found, what was expected, and an example.
    """
    texts = [text.strip() for text in spec.split(";")]
    return Schedule(tuple(_parse_statement(text) for text in texts if text), seed)


_COUNT = r"[1-9][0-9]{0,8}"
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def _parse_statement(text: str) -> Statement:
    words = text.lower().split()

    def refuse(found: str, expected: str) -> NoReturn:
        example = "stop g2 for 3s at step 25" if words[0] == "stop" else "kill g1 at step 30"
        raise ConfigError(f"chaos {text!r}: found {found}, expected {expected}; for example: {example}")

    def take(expected: str) -> str:
        if not rest:
            refuse("the end", expected)
        return rest.pop(0)

    def duration(after: str) -> float:
        expected = f"a duration after {after!r} (500ms, 10s, 2m)"
        word = take(expected)
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h)", word)
        if not match or not float(match[1]) > 0:
            refuse(repr(word), expected)
        return float(match[1]) * _UNITS_S[match[2]]

    def count(after: str) -> int:
        expected = f"a whole number above 0 after {after!r}"
        word = take(expected)
        if not re.fullmatch(_COUNT, word):
            refuse(repr(word), expected)
        return int(word)

    verb, rest = words[0], words[1:]
    if verb != "kill" and verb != "stop":
        refuse(repr(verb), "kill or stop")
    target = Target()
    if rest and rest[0] not in ("every", "at", "for"):
        target = _parse_target(rest[0]) or refuse(
            repr(rest[0]), "whom (g1, g1.0, 2, rank, all, lighthouse) or when (every 10s, at step 30, at 12s)"
        )
        rest.pop(0)
    when: Every | AtTime | AtStep | None = None
    for_s: float | None = None
    while rest:
        word = rest.pop(0)
        if word in ("every", "at") and when is not None:
            refuse(repr(word), f"one time only (after {str(when)!r})")
        if word == "every":
            when = Every(duration("every"))
        elif word == "times" and isinstance(when, Every) and when.times is None:
            when = replace(when, times=count("times"))
        elif word == "at" and rest[:1] == ["step"]:
            rest.pop(0)
            when = AtStep(count("at step"))
        elif word == "at":
            when = AtTime(duration("at"))
        elif word == "for" and verb == "stop" and for_s is None:
            for_s = duration("for")
        else:
            more = "every 10s [times 3], at step 30 or at 12s" + (", for 3s" if verb == "stop" else "")
            refuse(repr(word), more)
    if when is None:
        refuse("no time", "every 10s, at step 30 or at 12s")
    if verb == "stop" and for_s is None:
        refuse("no length", "how long it stops (for 3s)")
    return Statement(verb, target, when, for_s or 0.0)


def _parse_target(word: str) -> Target | None:
    if word == "all":
        return Target("all")
    if word == LIGHTHOUSE:
        return Target("lighthouse")
    if word == "rank":
        return Target("rank")
    if match := re.fullmatch(r"g([0-9]{1,9})(?:\.([0-9]{1,9}))?", word):
        return Target("one rank", int(match[1]), int(match[2])) if match[2] else Target("group", int(match[1]))
    return Target("random", int(word)) if re.fullmatch(_COUNT, word) else None


def doubts(schedule: Schedule, size: tuple[int, int], steps: int, has_lighthouse: bool = True) -> list[str]:
    """In words, each statement that can't be done as things stand at the start, with (groups, ranks of each)."""
    groups, ranks = size
    out = []
    for s in schedule.statements:
        if s.target.kind in ("group", "one rank") and s.target.number >= groups:
            out.append(f"'{s}' waits for g{s.target.number}: the groups are g0 to g{groups - 1}")
        elif s.target.kind == "one rank" and s.target.rank >= ranks:
            out.append(f"'{s}' can't be done: the ranks of a group are 0 to {ranks - 1}")
        if s.target.kind == "random" and s.target.number > groups:
            out.append(f"'{s}' waits for {s.target.number} live groups: there are {groups}")
        if s.target.kind == "lighthouse" and not has_lighthouse:
            out.append(f"'{s}' can't be done: the lighthouse isn't ours")
        if isinstance(s.when, AtStep) and s.when.step >= steps:
            out.append(f"'{s}' comes too late: the run ends with step {steps}")
    return out


# --- What happens ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """What is seen now.

    Attributes:
        time_s: seconds since the launch started.
        step: highest step committed since then.
        live: name (`g0`, its rank `g0.1`, `lighthouse`) -> process id, of those that can be drawn.
        running: the same of all that have a process, live or still starting.
    """

    time_s: float
    step: int
    live: Mapping[str, int]
    running: Mapping[str, int]


@dataclass(frozen=True)
class Action:
    """Do this to that process now."""

    verb: Literal["kill", "stop", "continue"]
    target: str
    pid: int
    reason: str
    """The statement it comes from."""


@dataclass(frozen=True)
class Fired:
    """How far one statement is."""

    times: int = 0
    due_s: float = 0.0


@dataclass(frozen=True)
class Stopped:
    """A process that is stopped now."""

    target: str
    pid: int
    until_s: float
    reason: str


@dataclass(frozen=True)
class State:
    """How far a schedule is."""

    fired: tuple[Fired, ...] = ()
    stopped: tuple[Stopped, ...] = ()


def begin(schedule: Schedule) -> State:
    """The state in which nothing was done."""
    due = {Every: "period_s", AtTime: "time_s"}
    return State(tuple(Fired(0, getattr(s.when, due.get(type(s.when), ""), 0.0)) for s in schedule.statements))


def advance(schedule: Schedule, state: State, now: World) -> tuple[State, tuple[Action, ...]]:
    """What is to be done now, and the state after it."""
    actions: list[Action] = []
    live, running = dict(now.live), dict(now.running)
    stopped: list[Stopped] = []
    for stop in state.stopped:
        if running.get(stop.target) != stop.pid:
            continue  # it died meanwhile; its successor isn't stopped
        if now.time_s < stop.until_s:
            stopped.append(stop)
        else:
            actions.append(Action("continue", stop.target, stop.pid, stop.reason))
    fired: list[Fired] = []
    for index, (s, done) in enumerate(zip(schedule.statements, state.fired, strict=True)):
        names: list[str] = []
        if _due(s, done, now):
            # Who is stopped already, or was hit in this very moment, can't be stopped again.
            hit = {a.target for a in actions} | {x.target for x in stopped} if s.verb == "stop" else set()
            busy = {name for name in running if any(_overlap(name, other) for other in hit)}
            rng = random.Random(f"{schedule.seed}/{index}/{done.times}")
            names = _draw(s.target, live.keys() - busy, running.keys() - busy, rng)
        if not names:
            fired.append(done)
            continue
        for name in names:
            pid = running[name]
            actions.append(Action(s.verb, name, pid, str(s)))
            if s.verb == "kill":  # and its whole group ends
                gone = {other for other in running if _group(other) == _group(name)}
                live = {other: pid for other, pid in live.items() if other not in gone}
                running = {other: pid for other, pid in running.items() if other not in gone}
                stopped = [x for x in stopped if x.target not in gone]
            else:
                stopped.append(Stopped(name, pid, now.time_s + s.for_s, str(s)))
        fired.append(Fired(done.times + 1, _next_due(s, done, now)))
    return State(tuple(fired), tuple(stopped)), tuple(actions)


def _due(s: Statement, done: Fired, now: World) -> bool:
    if isinstance(s.when, Every):
        return now.time_s >= done.due_s and (s.when.times is None or done.times < s.when.times)
    if done.times:
        return False
    return now.step >= s.when.step if isinstance(s.when, AtStep) else now.time_s >= s.when.time_s


def _next_due(s: Statement, done: Fired, now: World) -> float:
    """The next beat; but a full period from now if this one waited past it, so that none come in a burst."""
    if not isinstance(s.when, Every):
        return done.due_s
    following = done.due_s + s.when.period_s
    return following if following > now.time_s else now.time_s + s.when.period_s


def _draw(target: Target, live: set[str], running: set[str], rng: random.Random) -> list[str]:
    groups = sorted((n for n in live if n.startswith("g") and "." not in n), key=_order)
    if target.kind == "random":
        return rng.sample(groups, target.number) if len(groups) >= target.number else []
    if target.kind == "rank":
        ranks = sorted((n for n in live if "." in n), key=_order)
        return [rng.choice(ranks)] if ranks else []
    if target.kind == "all":
        return sorted((n for n in running if n.startswith("g") and "." not in n), key=_order) if groups else []
    name = LIGHTHOUSE if target.kind == "lighthouse" else str(target)
    return [name] if name in live else []


def _order(name: str) -> tuple[int, ...]:
    """By number of group, then of rank."""
    return tuple(map(int, name[1:].split(".")))


def _group(name: str) -> str:
    return name.partition(".")[0]


def _overlap(a: str, b: str) -> bool:
    """Whether two names share a process: the same, or a group and a rank of it."""
    return a == b or (_group(a) == _group(b) and ("." in a) != ("." in b))


def undone(schedule: Schedule, state: State) -> list[str]:
    """In words, each statement that was not done, or not as often as asked."""
    out = []
    for s, done in zip(schedule.statements, state.fired, strict=True):
        wanted = (s.when.times or 1) if isinstance(s.when, Every) else 1
        if done.times < wanted:
            out.append(f"'{s}' was done {done.times} of {wanted} times" if done.times else f"'{s}' was never done")
    return out
