"""The shell of one life of a group, in a virtual world: what `ft/trainer.py` does, action by action.

Its part of the network is in `sim/edge.py`.
"""

from outlast.ft.protocol import (
    Action,
    Ask,
    Commit,
    Compute,
    Connect,
    Exchange,
    Finish,
    Heal,
    Leave,
    Protocol,
    Rules,
)
from outlast.sim.edge import Edge, LifeEnds, Waits
from outlast.sim.model import FRESH, Snapshot, VirtualSums, add_ledgers, add_pieces, mix
from outlast.sim.plane import Failed


class Stopped(Exception):
    """Asked to stop, and there is no step in hand to finish."""


class RunDone(Exception):
    """The others have made the last step and gone."""


class Life(Edge):
    """One life of a group."""

    # The run ---------------------------------------------------------------------------------------

    def run(self) -> Waits:
        """From the start to the end."""
        w, c = self.world, self.world.scenario
        floor = w.committed if c.shared_folder else 0
        yield w.between(0.02, 0.5)
        saved = w.saved or FRESH
        self.step, self.state = saved.step, saved.state
        self.sums = VirtualSums(c.units)
        self.next_action: Action | None = None
        self.first = False
        self.unit_s = c.unit_s * c.speed[self.group]
        yield w.between(0.02, 0.5)
        rules = Rules(
            name=self.name,
            units=c.units,
            steps=c.steps,
            num_groups=c.groups,
            min_groups=c.min_groups,
            exact=c.exact,
            fingerprint={"config": "the same"},
            floor=floor,
            address=self.address,
            store=self.address,
        )
        self.protocol: Protocol = c.protocol(rules, saved.step, dict(saved.window))
        self.ready = True
        w.say(self, f"starts at step {self.step}, floor {floor}")
        try:
            while self.more():
                yield from self.train_step()
        except RunDone:
            return
        except Stopped:
            pass
        yield from self.finish()

    def more(self) -> bool:
        """Whether there is another step to make, or one that others count on."""
        return self.step < self.world.scenario.steps and (not self.stopping or bool(self.protocol.held))

    def train_step(self) -> Waits:
        """One attempt at the step."""
        action, self.next_action = self.next_action or self.protocol.begin(), None
        while not isinstance(action, Compute):
            action = yield from self.perform(action)
            if self.step == self.world.scenario.steps:  # it healed to the end
                self.next_action = action
                return
        yield from self.prepare(action)
        for unit in action.units:
            broke = yield from self.run_unit(unit)
            if broke:
                return
        self.next_action = self.protocol.units_done()
        if isinstance(self.next_action, Exchange):
            self.next_action = yield from self.settle(self.next_action)

    def run_unit(self, unit: int) -> Waits:
        """Compute one unit. An exception in it clears the sums; a life may die of it or go on."""
        w = self.world
        yield self.unit_s * w.between(0.7, 1.3)
        if w.unlucky(w.scenario.unit_p):
            w.say(self, f"exception inside unit {unit}")
            self.sums.add_half(self.state, self.step + 1, unit)
            self.broke()
            if w.rng.random() < 0.5:
                raise LifeEnds("an exception inside a unit", again=True)
            self.next_action = self.protocol.failed("an exception inside a unit")
            return True
        self.sums.add(self.state, self.step + 1, unit)
        w.seen["unit"] += 1
        self.protocol.unit_added(unit)
        return False

    def broke(self) -> None:
        """The sums may hold a part of a unit."""
        self.sums.clear()
        self.protocol.unit_broke()

    def settle(self, action: Exchange) -> Waits:
        """The exchange, its proof, and the commit. Returns the next action, None after a commit."""
        w = self.world
        run = self.protocol.run
        assert run is not None
        mine = sorted(run.by[self.name])
        if [u for u, n in enumerate(self.sums.counts) for _ in range(n)] != mine:
            w.fail("sums", f"{self.name} brings {self.sums.counts} to an exchange, planned was {mine}")
        got = yield from self.collect(self.sums.ledger(action.seal), self.arrival_s())
        if isinstance(got, Failed):
            return self.protocol.failed(got.why)
        ledger = add_ledgers(got)
        if any(n != 1 for n in ledger.counts):
            w.fail("units", f"{self.name}: the sums of {len(got)} members hold the units {ledger.counts} times")
            return self.protocol.failed("not whole")
        total, bits, skipped = 0, mix(*ledger.flags), any(ledger.flags)
        if not skipped:
            parts = yield from self.collect(self.sums.piece(), w.times.exchange)
            if isinstance(parts, Failed):
                return self.protocol.failed(parts.why)
            total, bits = add_pieces(parts, w.scenario.exact)
        committing = self.protocol.exchanged(ledger.seal, f"{bits:x}")
        if not isinstance(committing, Commit):
            w.fail("attempts", f"{self.name}: members of different attempts met in an exchange")
            return committing
        yield from self.commit(committing, total, bits, skipped)
        return None

    def arrival_s(self) -> float:
        """Longest wait for all to arrive: the slowest may have all units of the plan left."""
        run = self.protocol.run
        assert run is not None
        return self.world.times.exchange + 3 * max(map(len, run.by.values())) * self.unit_s

    def commit(self, action: Commit, total: int, bits: int, skipped: bool) -> Waits:
        """Say it, then apply it."""
        w = self.world
        w.committing(self, action, total, skipped)
        yield w.between(0.0, 0.01)
        if not skipped:
            self.state = mix(self.state, bits)
        self.sums.clear()
        self.step += 1
        self.protocol.committed(action.lineage)
        w.has_committed(self, action)
        every, last = w.scenario.save_every, self.step == w.scenario.steps
        if every and self.first and (last or self.step % every == 0):
            yield from self.save()

    def save(self) -> Waits:
        """Save the state; it is there whole or not at all."""
        taken = self.take()
        yield self.world.scenario.save_s * self.world.between(0.5, 2.0)
        self.world.keep(self, taken)

    def take(self) -> Snapshot:
        """A copy of the state."""
        return Snapshot(self.step, self.state, tuple(self.protocol.window.items()))

    def finish(self) -> Waits:
        """Stay a donor until every live group is at the last step; then leave in good order."""
        w = self.world
        if self.step == w.scenario.steps:
            try:
                yield from self.stay()
            except Stopped:
                pass
        if w.scenario.save_every and self.first and self.step and (w.saved is None or w.saved.step < self.step):
            yield from self.save()
        if self.step == w.scenario.steps and self.first:
            w.mark_done(self)

    def stay(self) -> Waits:
        """Serve whoever is behind."""
        w = self.world
        action, self.next_action = self.next_action or self.protocol.begin(), None
        deadline = w.now + w.times.ask
        while True:
            if isinstance(action, Compute):
                yield from self.prepare(action)
                action = self.protocol.units_done()
                deadline = w.now + w.times.ask
            elif isinstance(action, Finish):
                w.finished(self)
                self.first = action.first
                if self.first:
                    return
                until = w.now + w.times.ask
                while not w.done and w.now < until:
                    yield w.times.beat
                action = self.protocol.begin()
            elif w.done:
                return
            elif w.now > deadline:
                self.first = True
                return
            else:
                action = yield from self.perform(action)

    # Actions ---------------------------------------------------------------------------------------

    def perform(self, action: Action) -> Waits:
        """Do what the protocol says, and tell it how it went."""
        match action:
            case Ask():
                return (yield from self.ask(action))
            case Connect():
                return (yield from self.meet(action))
            case Heal():
                return (yield from self.heal(action))
            case Leave(reason, again):
                self.leave_plane()
                raise LifeEnds(reason, again)
            case _:
                self.world.fail("action", f"{self.name} at step {self.step} is told {action}")

    def ask(self, action: Ask) -> Waits:
        """One quorum call."""
        w = self.world
        if action.cancel:
            self.leave_plane()
        if self.stopping and not self.protocol.held and action.pause_s:
            raise Stopped
        if w.done and self.step < w.scenario.steps:
            raise RunDone
        w.say(self, f"asks at step {self.step}, holds {sorted(self.protocol.held)}: {action.why}")
        yield action.pause_s
        answer = yield from self.quorum(action.request)
        if isinstance(answer, Failed):
            w.say(self, f"no answer: {answer.why}")
            yield from self.wait_for_lighthouse()
            return self.protocol.lost(answer.why)
        self.number = answer.number
        decided = self.protocol.answered(answer)
        run = self.protocol.run
        if run is not None:
            self.first = run.active[0] == self.name
            w.seen["drop"] += run.drop
            w.seen["reuse"] += not run.connect
        if isinstance(decided, Heal):
            w.seen["heal same step"] += decided.step == self.step
        if w.trace is not None:
            members = ", ".join(f"{p.name} at {p.step} holding [{p.data['held']}]" for p in answer.participants)
            w.say(self, f"quorum {answer.key} of {members}: {run.reason if run else ''} {decided}")
        return decided

    def prepare(self, action: Compute) -> Waits:
        """What comes before the units: drop the sums, serve those who are behind."""
        w = self.world
        if action.drop:
            self.sums.clear()
        w.training(self)
        if not action.snapshot_for:
            self.snapshot = None
        elif self.snapshot is None or self.key_of(self.snapshot) != self.key_of(self.take()):
            yield w.scenario.heal_s * w.between(0.0, 0.3)
            self.snapshot = self.take()

    @staticmethod
    def key_of(snapshot: Snapshot) -> tuple[int, str]:
        """What a snapshot is asked for by."""
        return snapshot.step, snapshot.lineage

    def heal(self, action: Heal) -> Waits:
        """Take the whole state of a donor, or nothing."""
        w = self.world
        self.leave_plane()
        got = yield from self.fetch(action)
        if isinstance(got, Failed):
            w.say(self, f"heal failed: {got.why}")
            w.seen["heal failed"] += 1
            return self.protocol.heal_failed(got.why)
        self.sums.clear()
        self.state, self.step = got.state, got.step
        w.say(self, f"healed from {action.donor} to step {got.step}")
        return self.protocol.healed(got.step, dict(got.window))
