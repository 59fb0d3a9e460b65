"""What the audit reads of a run's events, typed and checked.

Each class is one kind of event with the fields that the audit needs; kinds and fields it doesn't know are passed
over. An event of a known kind that lacks a field, or holds something else there, becomes one line in words.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from outlast.config import MAX_UNITS
from outlast.events import VERSION, from_ranges

# --- Readers: a JSON value in, a checked value out, or ValueError saying what was expected ----------


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a whole number, 0 or more")
    return value


def _num_units(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_UNITS:
        raise ValueError(f"a whole number, 0 to {MAX_UNITS}")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError("a whole number")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError("a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("a number of ordinary size") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("text")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a table")
    return value


def _span(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("[first, end)")
    return _count(value[0]), _count(value[1])


def _units(value: Any) -> frozenset[int]:
    try:
        return frozenset(from_ranges(_text(value), MAX_UNITS))
    except ValueError:
        raise ValueError('ranges of units, like "0-3,7"') from None


def _shares(value: Any) -> dict[str, frozenset[int]]:
    return {name: _units(units) for name, units in _table(value).items()}


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | dict) or not all(isinstance(name, str) for name in value):
        raise ValueError("names of members")
    return tuple(value)


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError("a list of numbers")
    return tuple(_count(v) for v in value)


def _or_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _is(read: Callable[[Any], Any], **default: Any) -> Any:
    """A field with its reader; without a default the event must have it."""
    return field(metadata={"read": read}, **default)


# --- Kinds -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Record:
    """One event. `life` is the member's name, `g{group}:{life}`, or "" for the launcher."""

    t: float = _is(_number)
    life: str = ""


@dataclass(frozen=True, kw_only=True)
class Start(Record):
    """A life is ready to train."""

    pid: int | None = _is(_or_none(_whole), default=None)
    step: int = _is(_count)
    steps: int = _is(_count)
    units: int = _is(_num_units)
    unit_samples: int = _is(_count)
    seq_len: int = _is(_count)
    trajectory: Mapping[str, Any] = _is(_table)


@dataclass(frozen=True, kw_only=True)
class Unit(Record):
    """One work unit was added to the sums."""

    step: int = _is(_count)
    unit: int = _is(_count)
    samples: tuple[int, int] = _is(_span)
    hash: str = _is(_text)
    seconds: float = _is(_number)


@dataclass(frozen=True, kw_only=True)
class Commit(Record):
    """A step was committed. `key`, `by` and `lineage` are None in a plain run."""

    step: int = _is(_count)
    loss: float = _is(_number)
    lr: float = _is(_number)
    grad_norm: float | None = _is(_or_none(_number))
    tokens: int = _is(_count)
    samples: tuple[int, int] = _is(_span)
    units: int = _is(_num_units)
    skipped: str | None = _is(_or_none(_text))
    key: str | None = _is(_or_none(_text), default=None)
    by: Mapping[str, frozenset[int]] | None = _is(_or_none(_shares), default=None)
    lineage: str | None = _is(_or_none(_text), default=None)

    @property
    def attempt(self) -> str:
        """What tells this commit's attempt from others at the same step."""
        return self.key if self.key is not None else f"{self.life}@{self.t}"

    @property
    def holders(self) -> Mapping[str, frozenset[int]]:
        """Member -> units it held; in a plain run this life held all."""
        return {self.life: frozenset(range(self.units))} if self.by is None else self.by


@dataclass(frozen=True, kw_only=True)
class Digest(Record):
    """SHA-256 over weights and optimizer state after a step."""

    step: int = _is(_count)
    sha256: str = _is(_text)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Record):
    """Something was done with a save."""

    action: str = _is(_text)
    step: int = _is(_count)


@dataclass(frozen=True, kw_only=True)
class Exit(Record):
    """A life ended in good order."""

    code: int = _is(_whole)


@dataclass(frozen=True, kw_only=True)
class Quorum(Record):
    """The lighthouse answered."""

    step: int = _is(_count)
    members: tuple[str, ...] = _is(_names)


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """What the members of a quorum do next."""

    step: int = _is(_count)
    active: tuple[str, ...] = _is(_names)
    held: frozenset[int] = _is(_units)
    drop: bool = _is(_flag)
    exchange: bool = _is(_flag)


@dataclass(frozen=True, kw_only=True)
class Retry(Record):
    """An attempt failed."""

    step: int = _is(_count)
    held: frozenset[int] = _is(_units)


@dataclass(frozen=True, kw_only=True)
class Heal(Record):
    """A peer's whole state is in place."""

    step: int = _is(_count)
    seconds: float = _is(_number)


@dataclass(frozen=True, kw_only=True)
class HealFailed(Record):
    """Nothing of a peer's state is in place."""


@dataclass(frozen=True, kw_only=True)
class Refused(Record):
    """The run didn't let this life take part."""


@dataclass(frozen=True, kw_only=True)
class Died(Record):
    """The launcher saw a group's process end."""

    group: int = _is(_count)
    pid: int | None = _is(_or_none(_whole), default=None)
    code: int = _is(_whole)


@dataclass(frozen=True, kw_only=True)
class Chaos(Record):
    """The launcher is about to disturb a process."""

    action: str = _is(_text)
    target: str = _is(_text)
    pid: int | None = _is(_or_none(_whole), default=None)

    @property
    def group(self) -> int | None:
        """The group it is done to, all of it (g1) or a rank (g1.0); or None: the lighthouse."""
        number = self.target[1:].partition(".")[0]
        return int(number) if self.target[:1] == "g" and number.isdecimal() else None


@dataclass(frozen=True, kw_only=True)
class Lighthouse(Record):
    """The lighthouse started or died."""

    action: str = _is(_text)


@dataclass(frozen=True, kw_only=True)
class Join(Record):
    """Groups were added."""

    groups: tuple[int, ...] = _is(_numbers)


OF_A_LIFE: dict[str, type[Record]] = {
    "start": Start,
    "unit": Unit,
    "commit": Commit,
    "digest": Digest,
    "checkpoint": Checkpoint,
    "exit": Exit,
    "quorum": Quorum,
    "plan": Plan,
    "retry": Retry,
    "heal": Heal,
    "heal_failed": HealFailed,
    "refused": Refused,
}
OF_THE_LAUNCHER: dict[str, type[Record]] = {"died": Died, "chaos": Chaos, "lighthouse": Lighthouse, "join": Join}
KINDS = OF_A_LIFE | OF_THE_LAUNCHER

R = TypeVar("R", bound=Record)

# --- Reading ---------------------------------------------------------------------------------------


def read_record(event: Mapping[str, Any]) -> tuple[Record, int] | None:
    """Read one event.

    Returns:
        The record and the number of its group (-1: of the launcher), or None if the audit doesn't need it.

    Raises:
        ValueError: it isn't what its kind says; in words that go on after "the event".
    """
    kind = event.get("kind")
    if event.get("rank", 0) != 0 or not isinstance(kind, str) or kind not in KINDS:
        return None  # the first rank speaks for its group
    if event.get("v") != VERSION:
        raise ValueError(f"has format {event.get('v')!r}; this outlast reads {VERSION}")
    if kind in OF_THE_LAUNCHER:
        return _read(OF_THE_LAUNCHER[kind], event, ""), -1
    group, life = _field(event, "group", _count), _field(event, "life", _text)
    return _read(OF_A_LIFE[kind], event, f"g{group}:{life}"), group


def _read(kind: type[R], event: Mapping[str, Any], life: str) -> R:
    values: dict[str, Any] = {"life": life}
    for f in dataclasses.fields(kind):
        if f.name == "life" or (f.name not in event and f.default is not dataclasses.MISSING):
            continue
        values[f.name] = _field(event, f.name, f.metadata["read"])
    return kind(**values)


def _field(event: Mapping[str, Any], name: str, read: Callable[[Any], Any]) -> Any:
    if name not in event:
        raise ValueError(f"has no {name}")
    try:
        return read(event[name])
    except ValueError as e:
        raise ValueError(f"has {name} = {str(event[name])[:60]!r}; expected {e}") from None
