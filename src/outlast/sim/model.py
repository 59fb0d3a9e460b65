"""A virtual training state and virtual sums: integers that a wrong sum, order or state would change."""

from dataclasses import dataclass

from outlast.ft.protocol import ROOT

_MASK = (1 << 61) - 1
INITIAL = 1
"""The state that the seed's initial weights stand for."""


def mix(*numbers: int) -> int:
    """A number that hangs on all of these; the same in every process."""
    return hash(numbers) & _MASK


def gradient(state: int, step: int, unit: int) -> int:
    """What one unit adds to the sums of a step. A function of the weights it was computed with."""
    return mix(state, step, unit, 1)


def is_bad(state: int, step: int, unit: int) -> bool:
    """Whether a unit flags itself, so that everyone skips the step's update."""
    return mix(state, step, unit, 2) % 97 == 0


def whole_sum(state: int, step: int, units: int) -> int:
    """What the sums of a step must be: each unit that isn't flagged, once."""
    return sum(gradient(state, step, u) for u in range(units) if not is_bad(state, step, u))


@dataclass(frozen=True)
class Ledger:
    """What travels first: how often each unit was added, its flag, and the attempt's seal."""

    counts: tuple[int, ...]
    flags: tuple[int, ...]
    seal: int


@dataclass(frozen=True)
class Piece:
    """What travels next: the sums, and for float sums the order in which they were made."""

    total: int
    order: tuple[int, ...]


class VirtualSums:
    """`accumulate.Sums` of one group, in integers."""

    def __init__(self, units: int) -> None:
        self.units = units
        self.clear()

    def clear(self) -> None:
        """Forget all units."""
        self.counts = [0] * self.units
        self.flags = [0] * self.units
        self.total = 0
        self.order: list[int] = []

    def add(self, state: int, step: int, unit: int) -> None:
        """Add a unit, whole."""
        bad = is_bad(state, step, unit)
        self.counts[unit] += 1
        self.flags[unit] += int(bad)
        if not bad:
            self.total += gradient(state, step, unit)
            self.order.append(unit)

    def add_half(self, state: int, step: int, unit: int) -> None:
        """Add a part of a unit, as an exception in the middle would."""
        self.total += gradient(state, step, unit) // 2

    def ledger(self, seal: int) -> Ledger:
        """A copy of the ledger, sealed."""
        return Ledger(tuple(self.counts), tuple(self.flags), seal)

    def piece(self) -> Piece:
        """A copy of the sums."""
        return Piece(self.total, tuple(self.order))


def add_ledgers(parts: list[Ledger]) -> Ledger:
    """The sum of the members' ledgers."""
    counts = tuple(map(sum, zip(*(p.counts for p in parts), strict=True)))
    flags = tuple(map(sum, zip(*(p.flags for p in parts), strict=True)))
    return Ledger(counts, flags, sum(p.seal for p in parts))


def add_pieces(parts: list[Piece], exact: bool) -> tuple[int, int]:
    """The sum of the members' sums.

    Returns:
        The true total, and a number for the bits that come out: in float sums they hang on the grouping and
        the order too.
    """
    total = sum(p.total for p in parts)
    if exact:
        return total, mix(total, 3)
    return total, mix(total, 4, *(mix(5, *p.order) for p in parts if p.order))


@dataclass(frozen=True)
class Snapshot:
    """A training state at a commit: what a save or a donor holds."""

    step: int
    state: int
    window: tuple[tuple[int, str], ...]

    @property
    def lineage(self) -> str:
        """Of its last commit."""
        return dict(self.window)[self.step]


FRESH = Snapshot(0, INITIAL, ((0, ROOT),))
