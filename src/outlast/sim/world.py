"""The virtual world of a run: its clock, network, launcher and folder, and the checks on all that is committed."""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from outlast.ft.protocol import Commit, Connect, Participant
from outlast.sim.edge import TIMEOUT, Edge, LifeEnds
from outlast.sim.faults import strike
from outlast.sim.life import Life
from outlast.sim.lighthouse import Lighthouse, Quorum, Waiter
from outlast.sim.model import INITIAL, Snapshot, whole_sum
from outlast.sim.plane import Failed, Meeting
from outlast.sim.scenario import Scenario


class Violation(Exception):
    """A promise was broken.

    Attributes:
        kind: one word for which.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class World:
    """One run, from its first life to its last.

    Args:
        scenario: what happens in it.
        rng: all chance comes from here.
        trace: lines of what happened are appended, if given.
        life: the shell.
    """

    def __init__(
        self, scenario: Scenario, rng: random.Random, trace: list[str] | None = None, life: type[Life] = Life
    ) -> None:
        self.scenario, self.rng, self.trace, self.life_type = scenario, rng, trace, life
        self.times = scenario.times
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.serial = 0
        self.lives: list[Edge] = []
        self.alive: list[Edge] = []
        self.launching = [0] * scenario.groups
        self.lighthouse = Lighthouse(scenario.min_groups, self.times.join)
        self.ticking = False
        self.cuts: dict[tuple[int, int], float] = {}
        """Pairs of lives (-1: the lighthouse) that can't reach each other, and until when."""
        self.meetings: dict[tuple[str, str], Meeting] = {}
        self.faults_left = scenario.max_faults

        self.saved: Snapshot | None = None
        self.committed = 0
        """The highest step of any commit's event."""
        self.done = False
        self.history: dict[int, int] = {0: INITIAL}
        self.states: dict[str, int] = {}
        self.attempts: dict[int, tuple[int, int, str, object]] = {}
        self.sums: dict[tuple[int, int], int] = {}
        self.finals: dict[int, int] = {}
        self.refused: list[str] = []
        self.commits = self.faults = 0
        self.seen: Counter[str] = Counter()
        """Things that are rare; that they happen at all shows that the world is rough enough."""

    # Clock and messages ----------------------------------------------------------------------------

    def after(self, seconds: float, what: Callable[..., None], *args: Any) -> None:
        """Do something later."""
        self.serial += 1
        heapq.heappush(self.events, (self.now + seconds, self.serial, what, args))

    def between(self, low: float, high: float) -> float:
        """A random number."""
        return low + (high - low) * self.rng.random()

    def delay(self) -> float:
        """Of one message: short, now and then long."""
        r = self.rng.random()
        return 0.0005 + 0.002 * r if r < 0.97 or not self.rough else self.rng.random() * 0.5

    @property
    def rough(self) -> bool:
        """Whether faults still happen."""
        return self.now < self.scenario.rough_s

    def unlucky(self, p: float) -> bool:
        """Whether something of this probability goes wrong; nothing does when the faults are over."""
        return p > 0 and self.rough and self.rng.random() < p

    def send(self, life: Edge, ticket: int, value: Any, delay: float | None = None) -> None:
        """Send to a wait of a life; lost if that is over when it comes."""
        self.after(self.delay() if delay is None else delay, self._deliver, life, ticket, value)

    def _deliver(self, life: Edge, ticket: int, value: Any) -> None:
        if life.dead or ticket != life.ticket:
            return
        if life.frozen_until > self.now:
            life.inbox.append(value)
            return
        self.resume(life, value)

    def resume(self, life: Edge, value: Any) -> None:
        """Let a life go on with what its wait got."""
        life.ticket += 1
        life.inbox.clear()
        try:
            timeout_s = life.body.send(value)
        except StopIteration:
            return self._ended(life, "finished" if self.done else "stopped")
        except LifeEnds as e:
            return self._ended(life, "again" if e.again else "refused", str(e))
        self.after(timeout_s, self._deliver, life, life.ticket, TIMEOUT)
        if self.faults_left and self.unlucky(self.scenario.fault_p):
            self.after(self.rng.choice((0.0, 0.0, 0.3)) * self.rng.random(), self.strike)
        return None

    def run(self) -> None:
        """To the end.

        Raises:
            Violation: a promise was broken.
        """
        for group in range(self.scenario.groups):
            self.launch_after(self.between(0.0, 0.5), group)
        end = self.scenario.rough_s + self.scenario.patience_s
        while self.alive or any(self.launching):
            at, _, what, args = heapq.heappop(self.events)
            if at > end:
                waiting = ", ".join(f"{life.name} at step {life.step}" for life in self.alive if life.ready)
                self.fail("liveness", f"no faults for {self.scenario.patience_s:g} s, and still there: {waiting}")
            self.now = at
            what(*args)
        if not self.refused and not self.done:
            self.fail("liveness", "all have gone, and the run isn't done")
        if self.done and self.scenario.save_every and (not self.saved or self.saved.step < self.scenario.steps):
            self.fail("durable", "the run is marked as done, and its last step isn't saved")

    # Groups ----------------------------------------------------------------------------------------

    def launch_after(self, seconds: float, group: int) -> None:
        """Start a life of a group later."""
        self.launching[group] += 1
        self.after(seconds, self._launch, group)

    def _launch(self, group: int) -> None:
        self.launching[group] -= 1
        uid = len(self.lives)
        life = self.life_type(self, group, uid, self.name_life(group, uid))
        life.beat_from = self.now
        self.lives.append(life)
        self.alive.append(life)
        self.resume(life, None)

    def name_life(self, group: int, uid: int) -> str:
        """A name never used before."""
        return f"g{group}:{uid}"

    def _ended(self, life: Edge, how: str, why: str = "") -> None:
        self.say(life, f"ends: {how} {why}")
        self.bury(life)
        if how == "again" or how == "stopped":
            self.launch_after(self.between(0.1, 2.0), life.group)
        elif how == "refused":
            if self.saved or any(o.step > 0 for o in self.alive):  # too hasty; someone will bring it back
                self.seen["hasty refusal"] += 1
                return self.launch_after(5.0, life.group)
            self.refused.append(why)
            groups = {o.group for o in self.alive} | {g for g, n in enumerate(self.launching) if n}
            if len(groups) < self.scenario.min_groups:  # whoever launched them sees that this can't become a run
                for other in list(self.alive):
                    self.bury(other)
        return None

    def bury(self, life: Edge) -> None:
        """A life is over; its peers and the lighthouse may hear of it."""
        self.last_beat(life, self.now)
        life.dead = True
        life.body.close()
        self.alive.remove(life)
        if life.member_of is not None:
            life.member_of.leave(life)
        for w in self.lighthouse.waiters:
            if w.request.name == life.name and self.rng.random() < 0.7:
                w.until = 0.0  # its connection was closed; else the lighthouse doesn't hear of it

    # Lighthouse ------------------------------------------------------------------------------------

    def beats(self, life: Edge) -> bool:
        """Whether the lighthouse hears a life now."""
        return (
            life.ready
            and not life.dead
            and life.frozen_until <= self.now
            and life.beat_from <= self.now
            and self.lighthouse.up
            and not self.is_cut(life, None)
        )

    def last_beat(self, life: Edge, at: float) -> None:
        """It falls silent; this is the last that is heard of it."""
        if self.beats(life) or self.lighthouse.heard.get(life.name, 0.0) > at:
            self.lighthouse.heard[life.name] = at

    def ask_lighthouse(self, life: Edge, ticket: int, request: Participant) -> None:
        """Send a quorum call."""
        if not self.lighthouse.up:
            return self.send(life, ticket, Failed("connection refused"))
        if self.is_cut(life, None) or self.unlucky(self.scenario.loss_p):
            return self._lose(life, ticket)
        waiter = Waiter(
            request,
            reply=partial(self._reply, life, ticket),
            fail=partial(self.send, life, ticket),
            until=self.now + self.times.ask,
        )
        self.after(self.delay(), self._asked, self.lighthouse.life, waiter)
        return None

    def _lose(self, life: Edge, ticket: int) -> None:
        """A message is lost: the caller hears of a broken connection, or nothing until its timeout."""
        if self.rng.random() < 0.5:
            self.send(life, ticket, Failed("connection reset"))

    def _asked(self, process: int, waiter: Waiter) -> None:
        if self.lighthouse.up and self.lighthouse.life == process:
            self.lighthouse.ask(waiter, self.now)
            self._tick()

    def _tick(self) -> None:
        light = self.lighthouse
        if not light.up or not light.joined:
            return
        self.rng.shuffle(light.waiters)
        names = [life.name for life in self.alive if self.beats(life)]
        healthy = {*names, *(n for n, at in light.heard.items() if self.now - at < self.times.heartbeat)}
        light.tick(self.now, healthy)
        if light.joined and not self.ticking:
            self.ticking = True
            self.after(self.times.tick, self._tick_again)

    def _tick_again(self) -> None:
        self.ticking = False
        self._tick()

    def _reply(self, life: Edge, ticket: int, answer: Quorum) -> None:
        if self.is_cut(life, None) or self.unlucky(self.scenario.loss_p):
            if self.rng.random() < self.scenario.late_p:
                life.late = answer
            return self._lose(life, ticket)
        return self.send(life, ticket, answer)

    # Network ---------------------------------------------------------------------------------------

    def is_cut(self, one: Edge, other: Edge | None) -> bool:
        """Whether two can't reach each other now; None is the lighthouse."""
        return bool(self.cuts) and self.now < self._cut_until(one, other)

    def _cut_until(self, one: Edge, other: Edge | None) -> float:
        a, b = one.uid, -1 if other is None else other.uid
        return self.cuts.get((a, b) if a < b else (b, a), 0.0)

    def any_cut(self, lives: list[Edge]) -> bool:
        """Whether any two of these can't reach each other now."""
        return bool(self.cuts) and any(self.is_cut(a, b) for i, a in enumerate(lives) for b in lives[:i])

    def silence(self, reader: Edge, donor: Edge) -> float:
        """Seconds until a donor can be heard again."""
        frozen = 0.0 if donor.stalled or donor.dead else donor.frozen_until - self.now
        return max(0.0, frozen, self._cut_until(reader, donor) - self.now)

    def meeting(self, life: Edge, action: Connect) -> Meeting | None:
        """The entries under a prefix of a store, None if the store can't be reached."""
        owner = self.by_address(action.store)
        if owner.dead or self.is_cut(life, owner):
            return None
        return self.meetings.setdefault((action.store, action.key), Meeting(self))

    def by_address(self, address: str) -> Edge:
        """Who serves there."""
        return self.lives[int(address)]

    # Checks ----------------------------------------------------------------------------------------

    def fail(self, kind: str, message: str) -> NoReturn:
        """A promise is broken."""
        raise Violation(kind, message)

    def training(self, life: Edge) -> None:
        """A life is about to compute: its state must be a whole one, and the one that its lineage names."""
        p = life.protocol
        if (p.step, self.states.setdefault(p.window[p.step], life.state)) != (life.step, life.state):
            self.fail("state", f"{life.name} computes step {life.step + 1} on a state that isn't its lineage's")

    def committing(self, life: Edge, action: Commit, total: int, skipped: bool) -> None:
        """A commit's event: the sum must be each unit's gradient, once, on this very state."""
        self.commits += 1
        key = life.state, life.step + 1
        if key not in self.sums:
            self.sums[key] = whole_sum(*key, self.scenario.units)
        if not skipped and total != self.sums[key]:
            self.fail("sum", f"{life.name} commits step {life.step + 1} with a sum that isn't each unit once")
        if sorted(u for units in action.by.values() for u in units) != list(range(self.scenario.units)):
            self.fail("plan", f"{life.name} commits step {life.step + 1}, planned as {action.by}")
        self.committed = max(self.committed, life.step + 1)

    def has_committed(self, life: Edge, action: Commit) -> None:
        """A commit was applied: the digest must be that of all others of this step, or in float sums attempt."""
        self.say(life, f"has committed step {life.step} in {action.key}, lineage {action.lineage[:6]}")
        mine = life.step, life.state, action.lineage, action.by
        if self.attempts.setdefault(life.number, mine) != mine:
            self.fail("attempt", f"{life.name} commits another step {life.step} than others in {action.key}")
        if self.scenario.exact and self.history.setdefault(life.step, life.state) != life.state:
            self.fail("digest", f"{life.name} commits step {life.step} with another digest than others did")
        if self.states.setdefault(action.lineage, life.state) != life.state:
            self.fail("lineage", f"{life.name} has another state at step {life.step} under the same lineage")

    def keep(self, life: Edge, snapshot: Snapshot) -> None:
        """A save is there."""
        self.say(life, f"has saved step {snapshot.step}")
        if self.saved is None or self.saved.step <= snapshot.step:
            self.saved = snapshot

    def finished(self, life: Edge) -> None:
        """It and all live groups are at the last step, equal."""
        if self.finals.setdefault(life.number, life.state) != life.state:
            self.fail("final", f"{life.name} finishes with another digest than others")

    def mark_done(self, life: Edge) -> None:
        """The marker of a run that made its last step."""
        self.say(life, "marks the run as done")
        if self.scenario.exact and life.state != self.history[life.step]:
            self.fail("final", f"{life.name} ends with another digest than was committed")
        self.done = True

    def say(self, life: Edge | None, text: str) -> None:
        """A line of the trace."""
        if self.trace is not None:
            self.trace.append(f"{self.now:9.4f} {life.name if life else '-':>6} {text}")

    def strike(self, victim: Edge | None = None) -> None:
        """The next fault, if any are left, on this life or on whoever is drawn."""
        if self.faults_left and self.rough:
            self.faults_left -= 1
            self.faults += 1
            strike(self, victim)
