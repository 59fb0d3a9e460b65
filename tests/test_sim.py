"""The step protocol under seeded faults keeps its promises, and the simulator sees when it doesn't."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from outlast.ft import protocol
from outlast.ft.protocol import Action, Answer, Heal, Member, Protocol
from outlast.sim.life import Life, Waits
from outlast.sim.lighthouse import Lighthouse, quorum_members
from outlast.sim.model import Ledger, Piece, Snapshot
from outlast.sim.plane import Failed
from outlast.sim.run import Result, first_violation, simulate
from outlast.sim.world import World

MODES = pytest.mark.parametrize("exact", [True, False], ids=["exact", "float"])


# --- Planted bugs ----------------------------------------------------------------------------------


class KeepsHeld(Protocol):
    """`held` isn't emptied at a commit."""

    def committed(self, lineage: str) -> None:
        held = set(self.held)
        super().committed(lineage)
        self.held = held


class TakesAnyAnswer(Protocol):
    """An answer to an earlier request is taken for the one to this."""

    def answered(self, answer: Answer) -> Action:
        mine = self.rules.name
        participants = [
            replace(p, data={**p.data, "nonce": self.nonce}) if p.name == mine else p for p in answer.participants
        ]
        return super().answered(replace(answer, participants=participants))


class KeepsHalfUnits(Life):
    """An exception inside a unit clears nothing."""

    def broke(self) -> None:
        pass


class CommitsAnyway(Life):
    """A failed reduction counts as done."""

    def collect(self, part: Ledger | Piece, timeout_s: float) -> Waits:
        got = yield from super().collect(part, timeout_s)
        return [part] if isinstance(got, Failed) and isinstance(part, Piece) else got


class SnapshotsByStep(Life):
    """A snapshot is named by its step alone."""

    @staticmethod
    def key_of(snapshot: Snapshot) -> tuple[int, str]:
        return snapshot.step, ""

    @staticmethod
    def is_wanted(there: Snapshot, action: Heal) -> bool:
        return there.step == action.step


class StoreNamesRepeat(World):
    """The prefix in a store is the quorum's id, without its time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lighthouse = Lighthouse(self.scenario.min_groups, self.times.join, unique=False)


class NamesWithoutLife(World):
    """All lives of a group have one name."""

    def name_life(self, group: int, uid: int) -> str:
        return f"g{group}"


def accept_all(claims: Mapping[str, frozenset[int]]) -> dict[str, frozenset[int]]:
    """Sets that overlap count too."""
    return {name: held for name, held in claims.items() if held}


@dataclass(frozen=True)
class Bug:
    """A planted bug, and where it shows."""

    seeds: int
    """Within which it must be caught."""
    kinds: set[str]
    """Of the promises it breaks."""
    options: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True
    plant: Callable[[pytest.MonkeyPatch], None] = lambda monkeypatch: None


FORKS = {
    "unit_s": 1.0,
    "min_groups": 1,
    "plane_p": 0.3,
    "max_faults": 12,
    "rough_s": 60.0,
    "faults": {"freeze": 3.0, "cut lighthouse": 1.0, "crash": 1.0},
}
"""A world in which partial commits and overlapping sums are common."""

LOSSES = {"loss_p": 0.1, "late_p": 1.0, "fault_p": 0.1, "max_faults": 12, "faults": {"crash": 2.0, "isolate": 1.0}}
"""A world in which answers are lost and lives are short."""

TWINS = {"fault_p": 0.06, "max_faults": 8, "rough_s": 40.0, "faults": {"twin": 2.0, "crash": 1.0}}
"""A world in which groups are taken for dead, replaced, and go on."""

BUGS = {
    "heals by step number only": Bug(
        1000,
        {"attempt", "state", "lineage", "digest", "attempts"},
        {"life": SnapshotsByStep, **FORKS},
        exact=False,
        plant=lambda m: m.setattr(Member, "lineage", property(lambda self: "any")),
    ),
    "store names repeat": Bug(
        1000, {"store name"}, {"world": StoreNamesRepeat, "faults": {"lighthouse": 1.0, "freeze": 0.5}}
    ),
    "held is kept across a step": Bug(1000, {"sums"}, {"protocol": KeepsHeld}),
    "half a unit stays in the sums": Bug(1000, {"sums", "sum"}, {"life": KeepsHalfUnits}),
    "two holders of one unit": Bug(
        1000, {"units", "plan"}, FORKS, plant=lambda m: m.setattr(protocol, "accept_held", accept_all)
    ),
    "commits without the reduction": Bug(1000, {"sum"}, {"life": CommitsAnyway}),
    "an old answer is taken for the new one": Bug(1000, {"sums"}, {"protocol": TakesAnyAnswer, **LOSSES}),
    "names without the life": Bug(1000, {"sums"}, {"world": NamesWithoutLife, **TWINS}),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bug breaks a promise within a stated number of seeds; a healthy run of the same seeds doesn't."""
    bug = BUGS[name]
    bug.plant(monkeypatch)
    found = first_violation(range(bug.seeds), exact=bug.exact, **bug.options)
    print(name, found)
