"""What disturbed a run: chaos, deaths, the lighthouse's absence, new groups."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from outlast.audit.records import Chaos, Died, Exit, Join, Lighthouse
from outlast.audit.run import Life, Run
from outlast.errors import EXIT_OK, EXIT_STOPPED

Kind = Literal["kill", "stop", "crash", "lighthouse", "join"]


@dataclass
class Trouble:
    """A disturbance whose cause is known.

    Attributes:
        kind: `kill` or `stop` (chaos), `crash`, `lighthouse` or `join`.
        t: when, Unix seconds.
        group: that it happened to.
        life: the life that it happened to, if it had written anything.
        since: from when it may show: a crash may show before the launcher sees it.
        over: when the cause was gone (a stopped group goes on, the lighthouse is back), or infinity.
    """

    kind: Kind
    t: float
    group: int | None = None
    life: Life | None = None
    since: float = math.inf
    over: float = math.inf

    def __post_init__(self) -> None:
        self.since = min(self.since, self.t)


def find_troubles(run: Run) -> list[Trouble]:
    """Everything with a known cause, in order of time."""
    out: list[Trouble] = []
    killed: set[int] = set()
    gone: set[str] = set()

    def add(kind: Kind, t: float, group: int, pid: int | None) -> None:
        life = _latest_life(run, group, t, pid)
        if life is not None and (life.name in gone or (kind != "crash" and _exited(life, t))):
            life = None  # the one that it happened to had written nothing yet
        since = life.records[-1].t if life and kind == "crash" else t
        out.append(Trouble(kind, t, group, life, since))
        if life is not None and kind != "stop":
            gone.add(life.name)

    for r in run.launcher:
        match r:
            case Chaos(action="kill", group=int(group)):
                add("kill", r.t, group, r.pid)
                killed.add(group)
            case Chaos(action="stop", group=int(group)):
                add("stop", r.t, group, r.pid)
            case Chaos(action="continue", group=int(group)):
                _end(out, r.t, lambda t, group=group: t.kind == "stop" and t.group == group)
            case Chaos(action="kill" | "stop") | Lighthouse(action="died"):
                if not any(t.kind == "lighthouse" and t.over == math.inf for t in out):
                    out.append(Trouble("lighthouse", r.t))
            case Chaos(action="continue") | Lighthouse(action="start"):
                _end(out, r.t, lambda t: t.kind == "lighthouse")
            case Died() if r.group in killed:
                killed.discard(r.group)
            case Died() if r.code not in (EXIT_OK, EXIT_STOPPED):
                add("crash", r.t, r.group, r.pid)
            case Join():
                out += [Trouble("join", r.t, group) for group in r.groups]
            case _:
                pass
    out += _unseen_deaths(run, gone)
    return sorted(out, key=lambda t: t.t)


def end_of_life(life: Life, troubles: Iterable[Trouble]) -> float:
    """When a life ended: its exit, else what ended it, else its last event."""
    done = life.first(Exit)
    if done is not None:
        return done.t
    return next((t.t for t in troubles if t.life is life and t.kind in ("kill", "crash")), life.records[-1].t)


def _latest_life(run: Run, group: int, t: float, pid: int | None) -> Life | None:
    lives = [x for x in run.lives if x.group == group and x.records[0].t <= t]
    of_pid = [x for x in lives if x.start is not None and pid is not None and x.start.pid == pid]
    return (of_pid or lives or [None])[-1]


def _exited(life: Life, t: float) -> bool:
    done = life.first(Exit)
    return done is not None and done.t <= t


def _end(troubles: Iterable[Trouble], t: float, which: Callable[[Trouble], bool]) -> None:
    for trouble in troubles:
        if which(trouble) and trouble.over == math.inf:
            trouble.over = t


def _unseen_deaths(run: Run, gone: set[str]) -> Iterator[Trouble]:
    """Lives that no launcher saw end: without an exit, and followed by another life of their group."""
    for i, life in enumerate(run.lives):
        followed = any(later.group == life.group for later in run.lives[i + 1 :])
        if followed and life.name not in gone and not life.first(Exit):
            yield Trouble("crash", life.records[-1].t, life.group, life)
