"""What one simulated run is: how many groups, how long, and how rough. All drawn from its seed."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from outlast.ft.protocol import Protocol

FAULTS: Mapping[str, float] = {
    "crash": 4.0,  # a life ends without a word; a new one comes later
    "freeze": 3.0,  # as by SIGSTOP: nothing moves, not even the heartbeat
    "stall": 1.0,  # the training thread hangs; the heartbeat goes on for a while
    "cut lighthouse": 2.0,
    "cut peer": 2.0,
    "isolate": 1.0,  # from the lighthouse and all peers
    "lighthouse": 1.0,  # crashes, forgets all, comes back
    "twin": 0.5,  # frozen, taken for dead and replaced; then it goes on
    "stop": 0.5,  # asked to end in good order
    "blackout": 0.3,  # all groups crash at once
}
"""Kinds of faults and how often each is drawn."""


@dataclass(frozen=True)
class Times:
    """Every wait of the real shell (`ft/group.py`), in virtual seconds."""

    heartbeat: float = 0.5
    beat: float = 0.1
    join: float = 10.0
    ask: float = 15.0
    connect: float = 2.0
    exchange: float = 10.0
    phase: float = 120.0
    tick: float = 0.1
    lighthouse: float = 600.0


@dataclass(frozen=True)
class Scenario:
    """One simulated run.

    Attributes:
        exact: sums are exact; else they depend on who added what, as float rounding does.
        groups: expected; more may be there after a twin.
        min_groups: commit nothing with fewer.
        units: M.
        steps: of the run.
        save_every: steps between saves, 0 for none.
        shared_folder: a new life knows what others committed.
        unit_s: usual time of one unit.
        heal_s: usual time of one heal.
        save_s: usual time of one save.
        speed: unit time of each group, times this.
        fault_p: chance of a fault at each thing that a life does, while faults last.
        max_faults: then no more.
        loss_p: chance that a message to or from the lighthouse is lost.
        late_p: chance that a lost answer arrives as the answer to a later question.
        plane_p: chance that some members of an exchange or a meeting get an error.
        unit_p: chance of an exception inside a unit.
        rough_s: then all faults have ended, for good.
        faults: kind -> weight.
        protocol: what is driven.
    """

    exact: bool = True
    groups: int = 3
    min_groups: int = 1
    units: int = 6
    steps: int = 8
    save_every: int = 3
    shared_folder: bool = True
    unit_s: float = 0.1
    heal_s: float = 0.5
    save_s: float = 0.2
    speed: tuple[float, ...] = (1.0, 1.0, 1.0)
    fault_p: float = 0.02
    max_faults: int = 6
    loss_p: float = 0.01
    late_p: float = 0.5
    plane_p: float = 0.02
    unit_p: float = 0.003
    rough_s: float = 30.0
    faults: Mapping[str, float] = field(default_factory=lambda: FAULTS)
    protocol: type[Protocol] = Protocol
    times: Times = Times()

    @property
    def patience_s(self) -> float:
        """The promise of liveness: so long after the last fault the run has ended.

        Some of the longest waits one after the other (an answer that doesn't come, the 60 answers that a fresh
        group waits for one that holds the run), one wait for all to arrive, and all steps made by the slowest alone.
        """
        unit_s = self.unit_s * max(self.speed)
        step_s = self.units * unit_s + self.heal_s + 2 * self.save_s
        return 180.0 + 3 * self.units * unit_s + 1.3 * self.steps * step_s


def draw(rng: random.Random, exact: bool) -> Scenario:
    """A scenario of everyday size, more or less rough."""
    groups = rng.choice((2, 3, 3, 4))
    rough = rng.choice((0.0, 0.5, 1.0, 1.0, 2.0))
    return Scenario(
        exact=exact,
        groups=groups,
        min_groups=rng.choice((1, 1, 2, groups)),
        units=rng.randrange(groups, 9),
        steps=rng.randrange(4, 9),
        save_every=rng.choice((0, 1, 2, 3)),
        shared_folder=rng.random() < 0.8,
        unit_s=rng.choice((0.02, 0.1, 0.4, 2.0)),
        heal_s=rng.choice((0.05, 0.5, 3.0)),
        save_s=rng.choice((0.01, 0.3)),
        speed=tuple(rng.choice((1.0, 1.0, 1.3, 4.0)) for _ in range(groups)),
        fault_p=0.06 * rough,
        max_faults=rng.randrange(1, 12),
        loss_p=0.06 * rough * rng.random(),
        plane_p=rng.choice((0.0, 0.05, 0.1, 0.3)) * rough,
        unit_p=0.02 * rough * rng.random(),
        rough_s=rng.uniform(5.0, 60.0),
    )
