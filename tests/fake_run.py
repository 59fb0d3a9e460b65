"""Events of runs that never ran, for the tests of what reads events."""

from typing import Any

from outlast.events import to_ranges

Event = dict[str, Any]


class FakeRun:
    """A run on a clock that only it moves: a unit takes 1 s, the groups compute side by side."""

    def __init__(self, units: int = 6, steps: int = 8, plain: bool = False, accumulation: str = "exact") -> None:
        self.units, self.steps, self.plain = units, steps, plain
        self.trajectory = {"optimizer.lr": 8e-4, "training.accumulation": accumulation}
        self.events: list[Event] = []
        self.t, self.step, self.keys, self.born = 100.0, 0, 0, 0
        self.life: dict[int, str] = {}
        self.held: dict[int, set[int]] = {}
        self.salt = 0.0
        """Float sums: added to the losses of an attempt that adds in another order."""

    def emit(self, kind: str, of: int | None = None, **fields: Any) -> None:
        who = {} if of is None else {"group": of, "life": self.life[of], "rank": 0}
        self.events.append({"v": 1, "t": round(self.t, 6), "kind": kind, **who, **fields})

    def name(self, group: int) -> str:
        return f"g{group}:{self.life[group]}"

    def start(self, *groups: int, step: int = 0) -> None:
        for g in groups:
            self.born += 1
            self.life[g], self.held[g] = f"life{self.born}", set()
            if step:
                self.emit("checkpoint", g, action="load", step=step, path="x", seconds=0.1)
            shape = {"steps": self.steps, "units": self.units, "unit_samples": 4, "seq_len": 8, "parameters": 10}
            self.emit("start", g, pid=self.born, step=step, trajectory=dict(self.trajectory), **shape)

    def quorum(self, exchange: bool = True) -> dict[int, set[int]]:
        """All that live take part. Units nobody holds go to whoever has least."""
        self.keys += 1
        by = {g: set(held) for g, held in sorted(self.held.items())}
        free = sorted(set(range(self.units)) - set().union(*by.values()))
        load = {g: len(by[g]) for g in by}
        for _ in free:
            load[min(load, key=lambda g: load[g])] += 1
        for g in by:
            while len(by[g]) < load[g]:
                by[g].add(free.pop(0))
        names = [self.name(g) for g in by]
        for g in () if self.plain else by:
            key, step = f"k{self.keys}", self.step + 1
            members = {name: [self.step, ""] for name in names}
            self.emit("quorum", g, step=step, key=key, members=members, seconds=0.01)
            mine, held = to_ranges(by[g] - self.held[g]), to_ranges(self.held[g])
            flags = {"drop": False, "connect": True, "exchange": exchange}
            self.emit("plan", g, step=step, key=key, active=names, units=mine, held=held, **flags, reason="")
        return by

    def compute(self, by: dict[int, set[int]], at_most: int = 100) -> None:
        """Each of its units that it doesn't hold, `at_most` a group."""
        todo = {g: sorted(by[g] - self.held[g])[:at_most] for g in by if g in self.life}
        for i in range(max(map(len, todo.values()))):
            self.t += 1
            for g in (g for g in todo if i < len(todo[g])):
                u, first = todo[g][i], (self.step * self.units + todo[g][i]) * 4
                data = f"data{first}"
                self.emit("unit", g, step=self.step + 1, unit=u, samples=[first, first + 4], hash=data, seconds=1.0)
                self.held[g].add(u)

    def commit(self, by: dict[int, set[int]], only: tuple[int, ...] | None = None) -> None:
        step, size = self.step + 1, self.units * 4
        fields: Event = {"loss": 5.0 / step + self.salt, "lr": 1e-3 / step, "grad_norm": 1.5, "tokens": size * 8}
        fields |= {"samples": [self.step * size, step * size], "units": self.units, "skipped": None, "seconds": 2.0}
        if not self.plain:
            shares = {self.name(g): to_ranges(by[g]) for g in by}
            fields |= {"key": f"k{self.keys}", "by": shares, "lineage": f"lineage{step}{self.salt or ''}"}
        for g in only or [g for g in by if g in self.life]:
            self.emit("commit", g, step=step, **fields)
            self.held[g].clear()
            if step % 2 == 0 and not only:
                self.emit("digest", g, step=step, sha256=f"bits{step}{self.salt or ''}")
        if not only:
            self.step = step

    def run(self, to: int) -> "FakeRun":
        while self.step < to:
            by = self.quorum()
            self.compute(by)
            self.commit(by)
        return self

    def kill(self, group: int, chaos: bool = True) -> None:
        pid = next(e["pid"] for e in self.events if e["kind"] == "start" and e["life"] == self.life[group])
        if chaos:
            self.emit("chaos", action="kill", target=f"g{group}", pid=pid)
        self.emit("died", group=group, pid=pid, code=-9, restart_in=0.0, reason="killed by SIGKILL")
        del self.life[group], self.held[group]

    def retry(self, cause: str = "the exchange failed") -> None:
        for g in self.life:
            held = to_ranges(self.held[g])
            self.emit("retry", g, step=self.step + 1, cause=cause, held=held, seconds=1.0)

    def join(self, group: int, seconds: float) -> None:
        """A fresh life heals while the others wait."""
        if self.step:
            self.quorum(exchange=False)
        self.start(group)
        self.t += seconds
        if self.step:
            healed = {"step": self.step, "from_step": 0, "donor": "g0:life1", "bytes": 9}
            self.emit("heal", group, **healed, seconds=seconds)

    def end(self) -> list[Event]:
        for g in list(self.life):
            self.emit("exit", g, code=0, step=self.step, reason="finished")
        return self.events


def killed_run() -> list[Event]:
    """Three groups, 8 steps of 2 s; g2 is killed in step 4 with one unit computed, and comes back by a heal."""
    run = FakeRun()
    run.start(0, 1, 2)
    run.run(to=3)  # at 106 s
    by = run.quorum()
    run.compute(by, at_most=1)
    run.kill(2)  # at 107 s
    run.compute(by)
    run.t = 109.5
    run.retry()
    run.t = 110.0
    by = run.quorum()
    run.compute(by)
    run.commit(by)  # at 111 s
    run.join(2, seconds=1.0)
    return run.run(to=8).end()  # at 120 s


def plain_run() -> list[Event]:
    run = FakeRun(plain=True)
    run.start(0)
    return run.run(to=8).end()


def pick(events: list[Event], kind: str, n: int = 0, **fields: Any) -> Event:
    """The n-th event of a kind with these fields."""
    return [e for e in events if e["kind"] == kind and fields.items() <= e.items()][n]
