"""Virtual process groups: a meeting by (store, prefix), and exchanges that some may finish and others not."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.sim.edge import Edge
    from outlast.sim.world import World

_AGAIN_S = 0.25  # the network tries again this often while two members can't reach each other


class Failed:
    """An error, as a reply. `why` is for the trace."""

    def __init__(self, why: str) -> None:
        self.why = why


@dataclass
class Slot:
    """One member's entry in a store: who, which of its waits, under which quorum."""

    life: "Edge"
    ticket: int
    number: int
    gone: bool = False


class Meeting:
    """All that was ever written under one prefix of one store. A second use would find the first one's entries."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.slots: dict[int, Slot] = {}
        self.plane: Plane | None = None

    def arrive(self, rank: int, size: int, slot: Slot) -> None:
        """Write an entry, and meet if all are there."""
        old = {s.number for s in self.slots.values()} - {slot.number}
        if old:
            self.world.fail("store name", f"{slot.life.name} meets entries of quorums {sorted(old)} in {slot.number}")
        self.slots[rank] = slot
        self._match(size)

    def _match(self, size: int) -> None:
        slots = [self.slots[r] for r in range(size) if r in self.slots]
        if self.plane or len(slots) < size or any(s.gone or s.life.dead for s in slots):
            return  # who isn't met runs into its timeout
        lives = [s.life for s in slots]
        if self.world.any_cut(lives):
            self.world.after(_AGAIN_S, self._match, size)
            return
        self.plane = Plane(self.world, lives)
        for s in slots:
            s.life.member_of = self.plane
            bad = self.world.unlucky(self.world.scenario.plane_p)
            self.world.send(s.life, s.ticket, Failed("connection reset") if bad else self.plane)

    def leave(self, rank: int, slot: Slot) -> None:
        """Its wait is over without a process group."""
        slot.gone = True
        if self.slots.get(rank) is slot and self.plane:
            self.plane.leave(slot.life)


@dataclass
class Round:
    """One collective: what was put in, and who waits."""

    parts: dict[int, Any] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    done: bool = False


class Plane:
    """A process group that stands. `lives` in order of rank."""

    def __init__(self, world: "World", lives: "list[Edge]") -> None:
        self.world = world
        self.lives = lives
        self.left: set[int] = set()
        self.rounds: dict[int, Round] = {}
        self.at: dict[int, int] = {}

    def exchange(self, life: "Edge", ticket: int, part: Any) -> None:
        """Put a part into the next collective; the reply is the list of all parts, by rank, or `Failed`."""
        number = self.at[life.uid] = self.at.get(life.uid, -1) + 1
        r = self.rounds.setdefault(number, Round())
        r.parts[life.uid] = part
        r.waiting[life.uid] = ticket
        if any(o.uid not in r.parts and o.uid in self.left for o in self.lives):
            self._tell_gone(r, life)
        else:
            self._complete(r)

    def _complete(self, r: Round) -> None:
        if r.done or len(r.parts) < len(self.lives):
            return
        there = [life for life in self.lives if life.uid in r.waiting]
        if self.world.any_cut(there):
            self.world.after(_AGAIN_S, self._complete, r)
            return
        r.done = True
        parts = [r.parts[life.uid] for life in self.lives]
        lucky = [life for life in there if not self.world.unlucky(self.world.scenario.plane_p)]
        for life in there:
            if life in lucky:
                self.world.after(self.world.delay(), self._deliver, life, r.waiting[life.uid], parts)
            else:
                self.world.send(life, r.waiting[life.uid], Failed("connection reset"))
        if 0 < len(lucky) < len(there) and self.world.unlucky(0.5):  # a fault now, on who commits alone, matters most
            self.world.after(self.world.between(0.0, 0.05), self.world.strike, self.world.rng.choice(lucky))

    def _deliver(self, life: "Edge", ticket: int, parts: list[Any]) -> None:
        broken = bool(self.left) and self.world.rng.random() < 0.3
        self.world.send(life, ticket, Failed("broken at the end") if broken else parts, delay=0.0)

    def leave(self, life: "Edge") -> None:
        """A member is gone: those that wait for its part hear of it, those that have its part may yet succeed."""
        if life.uid in self.left:
            return
        self.left.add(life.uid)
        for r in self.rounds.values():
            r.waiting.pop(life.uid, None)
            if r.done:
                continue
            if life.uid in r.parts and self.world.rng.random() < 0.7:
                del r.parts[life.uid]
            if life.uid not in r.parts:
                for other in self.lives:
                    if other.uid in r.waiting:
                        self._tell_gone(r, other)
            else:
                self._complete(r)

    def _tell_gone(self, r: Round, life: "Edge") -> None:
        gone = [o for o in self.lives if o.uid in self.left and o.uid not in r.parts]
        if any(not self.world.is_cut(life, o) for o in gone):
            self.world.send(life, r.waiting[life.uid], Failed(f"{gone[0].name} is gone"))
