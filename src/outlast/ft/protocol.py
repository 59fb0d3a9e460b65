"""The step protocol of one group: a state machine without I/O.

What happened goes in (an answer of the lighthouse, a settled exchange, an error), the next thing to do comes
out. The shell (`ft/trainer.py`) and the simulator (`sim/`) drive the same object. `decide` is pure: every
member of a quorum comes from the same answer to the same plan.

The rules, and the failure each was bought with, are in `docs/architecture.md`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outlast.config import MAX_UNITS
from outlast.events import from_ranges, to_ranges
from outlast.ft.plan import accept_held, share

FORMAT = 1
WINDOW = 8  # commits whose lineage a member carries
MAX_HEALS = 3  # failed heals after which a group gives up, and the others stop waiting for it
MAX_FAILURES = 30  # failed attempts in a row after which a group gives up
START_ASKS = 20  # answers for which groups that have done nothing wait for the rest of the expected ones
LONG_PAUSE = 0.5  # seconds between the questions of a group that waits for others
LOST_ASKS = 60  # answers for which a fresh group waits for someone who holds the run's committed steps
ROOT = "0" * 16  # lineage of the initial weights


@dataclass(frozen=True)
class Rules:
    """What is fixed for one life of a group."""

    name: str  # unique to this life, `g{group}:{life}`
    units: int  # M, work units a step
    steps: int  # of the whole run
    num_groups: int  # expected
    min_groups: int  # commit nothing with fewer
    exact: bool  # sums are exact, so two lineages at one step mean that bits went wrong
    fingerprint: Mapping[str, str]  # what must be equal among members, field by field
    floor: int = 0  # the highest step that the run is known to have committed when this life began
    address: str = ""  # where this group's snapshots are served
    store: str = ""  # where its rendezvous store listens


@dataclass(frozen=True)
class Member:
    """One participant of a quorum, as it described itself."""

    name: str
    step: int
    nonce: int
    fingerprint: Mapping[str, str]
    window: Mapping[int, str]
    held: frozenset[int]
    live: str | None
    asks: int
    heals: int
    ran: bool
    floor: int
    address: str
    store: str

    @property
    def lineage(self) -> str:
        """Of its last commit."""
        return self.window[self.step]


@dataclass(frozen=True)
class Answer:
    """A quorum, as the lighthouse gave it: its unique key and its participants, unread."""

    key: str
    participants: Sequence["Participant"]


@dataclass(frozen=True)
class Participant:
    """One member's request in a quorum."""

    name: str
    step: int
    address: str
    store: str
    data: Mapping[str, Any]


# --- Actions: what to do next ----------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """Ask the lighthouse for a quorum. `cancel`: leave the process group first, at once. Then pause."""

    request: Participant
    cancel: bool
    pause_s: float
    why: str


@dataclass(frozen=True)
class Connect:
    """Meet the active members in a process group under this key. `size` 1: nobody to meet."""

    key: str
    store: str
    rank: int
    size: int


@dataclass(frozen=True)
class Compute:
    """Compute these units. `drop`: forget the sums first. `snapshot_for`: serve a snapshot to them first."""

    units: tuple[int, ...]
    drop: bool
    snapshot_for: tuple[str, ...]


@dataclass(frozen=True)
class Exchange:
    """Settle the sums with the active members, with this seal."""

    seal: int
    size: int


@dataclass(frozen=True)
class Commit:
    """Apply the update: each unit is in the sums exactly once."""

    key: str
    by: Mapping[str, frozenset[int]]
    lineage: str


@dataclass(frozen=True)
class Heal:
    """Leave the process group, take the whole state of (donor, step, lineage), then forget the sums."""

    donor: str
    address: str
    step: int
    lineage: str
    reason: str


@dataclass(frozen=True)
class Finish:
    """Every live group is at the last step. `first`: this group speaks for the run."""

    first: bool
    reason: str


@dataclass(frozen=True)
class Leave:
    """Stop, and say why. `again`: a new life may do better; else trying again can't help."""

    reason: str
    again: bool


Action = Ask | Connect | Compute | Exchange | Commit | Heal | Finish | Leave

# --- Decisions -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lost:
    """Nothing can be done with this quorum."""

    reason: str


@dataclass(frozen=True)
class Run:
    """Take part in an attempt at the next step."""

    active: tuple[str, ...]
    by: Mapping[str, frozenset[int]]
    drop: bool
    connect: bool
    exchange: bool
    joiners: tuple[str, ...]
    store: str
    reason: str


Decision = Lost | Run | Heal | Finish | Leave


def read_member(p: Participant) -> Member:
    """Read what a participant says, trusting nothing.

    Raises:
        ValueError: it isn't one of ours.
    """
    d = p.data
    try:
        if d["format"] != FORMAT:
            raise ValueError("another format")
        window = {int(s): str(h) for s, h in d["window"].items()}
        if p.step not in window or len(window) > WINDOW + 1:
            raise ValueError("its window doesn't fit its step")
        return Member(
            name=p.name,
            step=p.step,
            nonce=int(d["nonce"]),
            fingerprint={str(k): str(v) for k, v in d["fingerprint"].items()},
            window=window,
            held=frozenset(from_ranges(d["held"], MAX_UNITS)),
            live=None if d["live"] is None else str(d["live"]),
            asks=int(d["asks"]),
            heals=int(d["heals"]),
            ran=bool(d["ran"]),
            floor=int(d["floor"]),
            address=p.address,
            store=p.store,
        )
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as e:
        raise ValueError(f"{p.name}: {type(e).__name__}: {e}") from None


def live_key(key: str, active: Sequence[str]) -> str:
    """Identity of a process group: the quorum it was made under and who is in it."""
    return f"{key}/{hashlib.sha256(' '.join(active).encode()).hexdigest()[:12]}"


def next_lineage(previous: str, bits: str) -> str:
    """Lineage after a commit: a hash of the one before and of the bits that were committed."""
    return hashlib.sha256(f"{previous} {bits}".encode()).hexdigest()[:16]


def decide(me: Member, members: Sequence[Member], rules: Rules) -> Decision:
    """What the members of a quorum do next. Pure: all of them decide from the same values, `me` among `members`."""
    reference = _reference_fingerprint(members)
    if me.fingerprint != reference:
        return Leave(f"refused by the run: {_difference(me.fingerprint, reference)}", again=False)
    ours = [m for m in members if m.fingerprint == reference and m.step <= rules.steps]
    ours = [m for m in ours if all(unit < rules.units for unit in m.held)]

    credible = [m for m in ours if not _contradicted(m, ours)] if rules.exact else ours
    if me not in credible:
        return Leave(f"the bits of {me.name} at step {me.step} aren't those of the others", again=True)

    truth = max(m.step for m in credible)
    at_truth = [m for m in credible if m.step == truth]
    lineage = min(
        {m.lineage for m in at_truth},
        key=lambda h: (-sum(m.lineage == h for m in at_truth), min(m.name for m in at_truth if m.lineage == h)),
    )
    active = sorted((m for m in at_truth if m.lineage == lineage), key=lambda m: m.name)
    behind = sorted((m for m in credible if m not in active), key=lambda m: m.name)

    floor = max(m.floor for m in ours)
    if truth == 0 and floor > any(m.ran for m in ours):  # who has run may have missed the first commit, no more
        why = f"steps 1 to {floor} of this run were committed, and nobody here holds them"
        if max(m.asks for m in ours) > LOST_ASKS:
            return Leave(f"{why}; bring back a group that does, or start a new run folder", again=False)
        return Lost(why)
    if me not in active:
        donor = active[behind.index(me) % len(active)]
        reason = f"{donor.name} is at step {truth}, this group at {me.step}"
        return Heal(donor.name, donor.address, truth, lineage, reason)

    joiners = [m for m in behind if m.heals < MAX_HEALS]
    served = tuple(m.name for i, m in enumerate(behind) if active[i % len(active)] is me and m in joiners)
    present = len(active) + len(joiners)
    names = tuple(m.name for m in active)
    if truth == rules.steps and not joiners:
        return Finish(first=active[0] is me, reason=f"all {len(active)} live groups are at the last step")
    if truth < rules.steps and present < rules.min_groups:
        return Lost(f"{present} of at least {rules.min_groups} groups are here")
    if present < rules.num_groups and not any(m.ran or m.asks > START_ASKS for m in ours):
        return Lost(f"{present} of {rules.num_groups} groups have started; waiting a moment for the rest")

    accepted = accept_held({m.name: m.held for m in active})
    by = share(rules.units, accepted, names) if truth < rules.steps else dict.fromkeys(names, frozenset[int]())
    lives = {m.live for m in active}
    reuse = len(lives) == 1 and (live := lives.pop()) is not None and live.endswith(live_key("", names))
    return Run(
        active=names,
        by=by,
        drop=bool(me.held) and me.name not in accepted,
        connect=not reuse,
        exchange=not joiners,
        joiners=served,
        store=active[0].store,
        reason=f"{len(active)} at step {truth}"
        + (f", {len(joiners)} healing" if joiners else "")
        + (f", {sum(map(len, accepted.values()))} units kept" if accepted else ""),
    )


def _reference_fingerprint(members: Sequence[Member]) -> Mapping[str, str]:
    """Whose config is the run's: who has run here, then the highest step, then the most, then the name."""

    def rank(m: Member) -> tuple[bool, int, int, str]:
        same = [o for o in members if o.fingerprint == m.fingerprint]
        return (not any(o.ran for o in same), -max(o.step for o in same), -len(same), min(o.name for o in same))

    return min(members, key=rank).fingerprint


def _difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    key = next(k for k in sorted({*mine, *theirs}) if mine.get(k) != theirs.get(k))
    return f"{key} is {mine.get(key, 'not set')} here and {theirs.get(key, 'not set')} there"


def _contradicted(m: Member, members: Sequence[Member]) -> bool:
    """Whether half or more of those who made one of a member's recent commits have other bits there."""
    for step, lineage in m.window.items():
        theirs = [o.window[step] for o in members if step in o.window]
        if 2 * theirs.count(lineage) <= len(theirs):
            return True
    return False


# --- The machine -----------------------------------------------------------------------------------


@dataclass
class Protocol:
    """One life of a group, between its shell and the others.

    Call `begin` for each step, then do what the returned action says and report back with the method of that
    name, until it is `Compute`; after its units `units_done`, and so on. Every method returns the next action.
    """

    rules: Rules
    step: int = 0  # updates committed
    window: dict[int, str] = field(default_factory=lambda: {0: ROOT})  # step -> lineage, the present one too
    held: set[int] = field(default_factory=set)  # units of the next step that this group's sums hold
    live: str | None = None  # identity of the connected process group
    run: Run | None = None
    key: str = ""
    nonce: int = 0
    asks: int = 0
    heals: int = 0
    failures: int = 0
    ran: bool = False

    def begin(self) -> Action:
        """Start on the next step."""
        return self._ask("next step", cancel=False)

    def _ask(self, why: str, cancel: bool, pause_s: float = 0.0) -> Ask:
        self.nonce += 1
        self.run = None
        if cancel:
            self.live = None
        return Ask(self.request(), cancel, pause_s, why)

    def request(self) -> Participant:
        """What this group says of itself."""
        r = self.rules
        data = {
            "format": FORMAT,
            "nonce": self.nonce,
            "fingerprint": dict(r.fingerprint),
            "window": {str(s): h for s, h in self.window.items()},
            "held": to_ranges(self.held),
            "live": self.live,
            "asks": self.asks,
            "heals": self.heals,
            "ran": self.ran,
            "floor": r.floor,
        }
        return Participant(r.name, self.step, r.address, r.store, data)

    def failed(self, why: str) -> Action:
        """The attempt failed: leave the process group at once, keep the sums, try again."""
        self.failures += 1
        if self.failures > MAX_FAILURES:
            return Leave(f"{MAX_FAILURES} attempts in a row failed, the last: {why}", again=True)
        return self._ask(why, cancel=True, pause_s=min(0.02 * 2 ** (self.failures - 1), 1.0))

    def answered(self, answer: Answer) -> Action:
        """The lighthouse answered."""
        members: list[Member] = []
        for p in answer.participants:
            try:
                members.append(read_member(p))
            except ValueError:
                continue  # not one of ours; the lighthouse lets anyone in
        me = next((m for m in members if m.name == self.rules.name), None)
        if me is None or me.nonce != self.nonce:
            return self.failed("the answer isn't to this request")
        self.asks += 1
        self.key = answer.key
        decision = decide(me, members, self.rules)
        match decision:
            case Lost(reason):
                return self._ask(reason, cancel=True, pause_s=0.1 if self.asks <= START_ASKS else LONG_PAUSE)
            case Heal():  # what is held stays until the state has come: there may be no donor any more
                self.live = None
                return decision
            case Run():
                self.run = decision
                self.ran = True
                if decision.connect and decision.exchange:
                    rank = decision.active.index(self.rules.name)
                    return Connect(answer.key, decision.store, rank, len(decision.active))
                return self._compute()
            case _:
                return decision

    def lost(self, why: str) -> Action:
        """The lighthouse didn't answer."""
        return self._ask(why, cancel=True, pause_s=0.05)

    def connected(self) -> Action:
        """The process group of `Connect` stands."""
        assert self.run is not None
        self.live = live_key(self.key, self.run.active)
        return self._compute()

    def _compute(self) -> Compute:
        assert self.run is not None
        if self.run.drop:  # only now: the shell clears the sums with the same action
            self.held.clear()
        mine = self.run.by[self.rules.name] - self.held
        return Compute(tuple(sorted(mine)), self.run.drop, self.run.joiners)

    def unit_added(self, unit: int) -> None:
        """A unit is in the sums, whole."""
        self.held.add(unit)

    def unit_broke(self) -> None:
        """An exception came out of a unit: the sums may hold a part of it, so they were cleared."""
        self.held.clear()

    def units_done(self) -> Action:
        """All units of `Compute` are in the sums."""
        assert self.run is not None
        if not self.run.exchange:  # someone is healing; by now it may be done
            return self._ask("a member was healing", cancel=False, pause_s=0.01)
        return Exchange(self.seal, len(self.run.active))

    @property
    def seal(self) -> int:
        """A number of this attempt; the sum over the members shows that all were in the same one."""
        return int.from_bytes(hashlib.sha256(self.key.encode()).digest()[:4], "big")

    def exchanged(self, seal: int, bits: str) -> Action:
        """The exchange succeeded, with each unit once: the sum of seals, and a hash that is equal where all is well."""
        assert self.run is not None
        if seal != self.seal * len(self.run.active):
            return self.failed("the exchange mixed two attempts")
        return Commit(self.key, self.run.by, next_lineage(self.window[self.step], bits))

    def committed(self, lineage: str) -> None:
        """The update was applied."""
        self.step += 1
        self.window[self.step] = lineage
        for old in [s for s in self.window if s <= self.step - WINDOW]:
            del self.window[old]
        self.held.clear()
        self.failures = self.heals = 0

    def healed(self, step: int, window: Mapping[int, str]) -> Action:
        """The whole state of a donor is in place."""
        self.step = step
        self.window = dict(window)
        self.held.clear()
        return self._ask("healed", cancel=True)

    def heal_failed(self, why: str) -> Action:
        """Nothing of the donor's state is in place."""
        self.heals += 1
        if self.heals >= MAX_HEALS:
            return Leave(f"{MAX_HEALS} heals failed, the last: {why}", again=True)
        return self._ask(why, cancel=True, pause_s=0.1)
