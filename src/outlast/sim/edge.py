"""The edge of one virtual life: what `ft/group.py` does in the real world. It decides nothing.

A life is a generator. Each `yield` waits: it says how long at most, and gets what the world sent meanwhile, or
`TIMEOUT`. A life that is frozen isn't resumed; one that crashed never is.
"""

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from outlast.ft.protocol import Connect, Heal, Participant, Protocol
from outlast.sim.lighthouse import Quorum
from outlast.sim.model import Ledger, Piece, Snapshot
from outlast.sim.plane import Failed, Plane, Slot

if TYPE_CHECKING:
    from outlast.sim.world import World

Waits = Generator[float, Any, Any]
TIMEOUT = Failed("timeout")


class LifeEnds(Exception):
    """The process exits. `again`: whoever launched it starts another."""

    def __init__(self, reason: str, again: bool) -> None:
        super().__init__(reason)
        self.again = again


class Edge:
    """A life's place in the world.

    Args:
        world: it lives in.
        group: number of its group.
        uid: unique among all lives.
        name: unique to this life, if the shell does it right.
    """

    protocol: Protocol
    state: int

    def __init__(self, world: "World", group: int, uid: int, name: str) -> None:
        self.world, self.group, self.uid, self.name = world, group, uid, name
        self.ticket = 0
        """Number of the present wait; what is sent to an earlier one is lost."""
        self.dead = self.ready = self.stopping = self.stalled = False
        self.step = 0
        self.number = 0
        """Of the last quorum."""
        self.member_of: Plane | None = None
        """The last process group that it was put into, whether it knows or not."""
        self.frozen_until = 0.0
        self.inbox: list[Any] = []
        self.beat_from = 0.0
        self.last: tuple[int, list[str]] = (0, [])
        """Number of the last membership, by the lighthouse's count, and its names."""
        self.late: Quorum | None = None
        """An answer that was lost on the way, and may yet arrive."""
        self.address = f"{uid}"
        self.plane: Plane | None = None
        self.snapshot: Snapshot | None = None
        self.body = self.run()

    def run(self) -> Waits:
        """All that it does."""
        raise NotImplementedError

    def leave_plane(self) -> None:
        """Leave the process group at once."""
        if self.plane is not None:
            self.plane.leave(self)
        self.plane = None

    def quorum(self, request: Participant) -> Waits:
        """The call itself."""
        w = self.world
        if self.late is not None and w.rng.random() < 0.5:
            late, self.late = self.late, None
            w.say(self, f"a late answer arrives: {late.key}")
            yield w.delay()
            return late
        w.ask_lighthouse(self, self.ticket, request)
        answer = yield w.times.ask
        if isinstance(answer, Quorum):
            number, members = int(answer.key.split(".")[0]), [p.name for p in answer.participants]
            before, self.last = self.last, (number, members)
            if number <= before[0] and members != before[1]:
                return Failed("it has started anew, and may not have heard of everyone yet")
        return answer

    def wait_for_lighthouse(self) -> Waits:
        """Until it has heard this group a few times."""
        w = self.world
        heard, since = 0, w.now
        while heard < 3:
            if w.now - since > w.times.lighthouse:
                raise LifeEnds("no lighthouse", again=True)
            yield w.times.beat
            heard += int(w.beats(self))

    def meet(self, action: Connect) -> Waits:
        """Connect to the active groups."""
        w = self.world
        self.leave_plane()
        if action.size == 1:
            return self.protocol.connected()
        yield w.delay()
        meeting = w.meeting(self, action)
        if meeting is None:
            yield w.between(0.0, w.times.connect)
            return self.protocol.failed("the store can't be reached")
        slot = Slot(self, self.ticket, self.number)
        meeting.arrive(action.rank, action.size, slot)
        got = yield w.times.connect
        if not isinstance(got, Plane):
            meeting.leave(action.rank, slot)
            return self.protocol.failed(f"meeting: {got.why}")
        self.plane = got
        return self.protocol.connected()

    def collect(self, part: Ledger | Piece, timeout_s: float) -> Waits:
        """One collective: everyone's parts."""
        if self.plane is None:
            return [part]
        self.plane.exchange(self, self.ticket, part)
        return (yield timeout_s)

    def fetch(self, action: Heal) -> Waits:
        """A snapshot's manifest and chunks, one after the other; it must still be there for each."""
        w = self.world
        donor = w.by_address(action.address)
        got: Snapshot | None = None
        until = w.now + w.times.exchange  # the donor got its answer when this life did; it takes its copy now
        while not donor.dead and w.now < until and not (donor.snapshot and self.is_wanted(donor.snapshot, action)):
            yield w.times.beat
        for _ in range(3):
            yield w.scenario.heal_s * w.between(0.1, 0.6)
            silent = w.silence(self, donor)
            yield min(silent, w.times.exchange)
            if silent > w.times.exchange:
                return Failed("the donor is silent")
            if donor.dead:
                return Failed("the donor is gone")
            there = donor.snapshot
            if there is None or not self.is_wanted(there, action):
                return Failed("no such snapshot now")
            got = got or there
        assert got is not None
        return got

    @staticmethod
    def is_wanted(there: Snapshot, action: Heal) -> bool:
        """Whether a donor's snapshot is the one that is asked for."""
        return (there.step, there.lineage) == (action.step, action.lineage)
