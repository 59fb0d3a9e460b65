"""The plan and the decision are pure: every member of a quorum comes to the same, whatever it is told."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outlast.config import MAX_UNITS
from outlast.events import to_ranges
from outlast.ft import protocol
from outlast.ft.plan import accept_held, share
from outlast.ft.protocol import (
    MAX_HEALS,
    ROOT,
    START_ASKS,
    WINDOW,
    Answer,
    Ask,
    Commit,
    Compute,
    Connect,
    Decision,
    Exchange,
    Finish,
    Heal,
    Leave,
    Lost,
    Member,
    Participant,
    Protocol,
    Rules,
    Run,
    decide,
    next_lineage,
    read_member,
)

UNITS, STEPS = 8, 6
NAMES = tuple(f"g{i}:{c}" for i, c in enumerate("abcdef"))

units_of = st.integers(1, 40)
claims = st.dictionaries(st.sampled_from(NAMES), st.frozensets(st.integers(0, 11), max_size=12), max_size=6)


# --- The plan --------------------------------------------------------------------------------------


@given(claims, st.randoms())
def test_accepted_sets_are_whole_disjoint_and_the_same_in_any_order(
    held: dict[str, frozenset[int]], shuffle: Any
) -> None:
    accepted = accept_held(held)
    assert all(held[name] == units and units for name, units in accepted.items())
    assert sum(map(len, accepted.values())) == len(frozenset().union(*accepted.values()))
    turned = list(held.items())
    shuffle.shuffle(turned)
    assert accept_held(dict(turned)) == accepted
    taken = frozenset().union(*accepted.values())
    assert all(not units or units & taken for units in held.values()), "a set that overlaps none was refused"
    assert not any(held.values()) or max(map(len, accepted.values())) == max(map(len, held.values()))


@given(st.integers(12, 40), claims, st.sets(st.sampled_from(NAMES), min_size=1), st.randoms())
def test_every_unit_has_one_owner_and_loads_are_even(
    units: int, held: dict[str, frozenset[int]], others: set[str], shuffle: Any
) -> None:
    accepted = accept_held(held)
    names = sorted({*accepted, *others})
    by = share(units, accepted, names)
    assert by.keys() == set(names)
    assert sorted(u for mine in by.values() for u in mine) == list(range(units))
    assert all(accepted[name] <= by[name] for name in accepted)
    for name in names:
        if by[name] != accepted.get(name, frozenset()):  # it was given more, so nobody has less by two
            assert len(by[name]) <= 1 + min(map(len, by.values()))
    shuffle.shuffle(names)
    assert share(units, accepted, names) == by


# --- The decision ----------------------------------------------------------------------------------


def lineage(branch: int, step: int) -> str:
    """Of a step on one of several branches, all from the same initial weights."""
    return ROOT if step == 0 else f"{branch}:{step}"


def window(branch: int, step: int) -> dict[int, str]:
    """What a member on a branch carries."""
    return {s: lineage(branch, s) for s in range(max(0, step - WINDOW + 1), step + 1)}


def a_member(name: str, step: int = 0, branch: int = 0, **fields: Any) -> Member:
    """A member like any other, but for the fields given."""
    plain = Member(
        name=name,
        step=step,
        nonce=1,
        fingerprint={"seed": "1"},
        window=window(branch, step),
        held=frozenset(),
        live=None,
        asks=1,
        heals=0,
        ran=True,
        floor=0,
        address=f"host:{name}",
        store=f"store:{name}",
    )
    return replace(plain, **fields)


def rules_of(name: str, exact: bool = True, num_groups: int = 3, min_groups: int = 1) -> Rules:
    """The rules of a life."""
    return Rules(name, UNITS, STEPS, num_groups, min_groups, exact, {"seed": "1"})


@st.composite
def quorums(draw: st.DrawFn, branches: int = 2) -> tuple[Member, ...]:
    """Members in every state that one can be in."""
    lives = st.sampled_from([None, "1.1.1/x", "2.5.7/y"])
    out = []
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=6, unique=True)):
        step = draw(st.integers(0, STEPS))
        held = draw(st.frozensets(st.integers(0, UNITS - 1))) if step < STEPS else frozenset[int]()
        out.append(
            a_member(
                name,
                step,
                draw(st.integers(0, branches - 1)),
                held=held,
                live=draw(lives),
                asks=draw(st.integers(1, 30)),
                heals=draw(st.integers(0, MAX_HEALS)),
                ran=draw(st.booleans()),
                floor=draw(st.sampled_from([0, 0, 0, 3])),
                fingerprint={"seed": draw(st.sampled_from("1112"))},
            )
        )
    same = draw(st.sampled_from([None, None, "live"]))
    if same:  # all in one process group: then it may be used again
        names = sorted(m.name for m in out)
        out = [replace(m, live=protocol.live_key("7.7.7", names)) for m in out]
    return tuple(sorted(out, key=lambda m: m.name))


def decide_all(members: Sequence[Member], **rules: Any) -> dict[str, Decision]:
    """What each member decides."""
    return {m.name: decide(m, members, rules_of(m.name, **rules)) for m in members}


@settings(max_examples=400)
@given(quorums(), st.booleans(), st.integers(1, 4), st.integers(1, 4), st.randoms())
def test_all_members_come_to_the_same_plan(
    members: tuple[Member, ...], exact: bool, num_groups: int, min_groups: int, shuffle: Any
) -> None:
    decided = decide_all(members, exact=exact, num_groups=num_groups, min_groups=min_groups)
    by_name = {m.name: m for m in members}
    runs = {name: d for name, d in decided.items() if isinstance(d, Run)}
    heals = {name: d for name, d in decided.items() if isinstance(d, Heal)}
    others = {type(d) for d in decided.values()} - {Run, Heal, Leave}
    assert len(others) + bool(runs) <= 1, "some take part in what others don't see"

    for run in runs.values():
        first = next(iter(runs.values()))
        assert replace(run, drop=first.drop, joiners=first.joiners) == first
        assert run.active == tuple(sorted(runs)), "exactly those take part whom all believe to"
    for name, run in runs.items():
        me = by_name[name]
        assert run.drop or me.held <= run.by[name]
        assert len({(by_name[o].step, by_name[o].lineage) for o in run.active}) == 1
        if exact or not run.exchange:
            assert sorted(u for units in run.by.values() for u in units) in (list(range(UNITS)), [])
        assert run.exchange == (not [n for n in heals if by_name[n].heals < MAX_HEALS])
    if runs:
        kept = [u for name, run in runs.items() if not run.drop for u in by_name[name].held]
        assert len(kept) == len(set(kept)), "two members keep the same unit"
        for name, heal in heals.items():
            donor = by_name[heal.donor]
            assert (donor.step, donor.lineage, donor.address) == (heal.step, heal.lineage, heal.address)
            assert (name in runs[heal.donor].joiners) == (by_name[name].heals < MAX_HEALS)
        assert sorted(j for run in runs.values() for j in run.joiners) == sorted(
            n for n in heals if by_name[n].heals < MAX_HEALS
        )
    turned = list(members)
    shuffle.shuffle(turned)
    assert decide_all(turned, exact=exact, num_groups=num_groups, min_groups=min_groups) == decided


@given(quorums())
def test_the_highest_step_wins(members: tuple[Member, ...]) -> None:
    decided = decide_all(members, exact=False)
    for name, d in decided.items():
        ours = [m for m in members if not isinstance(decided[m.name], Leave)]
        top = max(m.step for m in ours)
        if isinstance(d, Run | Finish):
            assert next(m.step for m in members if m.name == name) == top
        if isinstance(d, Heal):
            assert d.step == top


@given(
    st.dictionaries(st.sampled_from(["seed", "lr", "corpus", "ranks"]), st.sampled_from("ab"), max_size=4), st.data()
)
def test_another_fingerprint_is_refused_and_the_difference_named(theirs: dict[str, str], data: st.DataObject) -> None:
    ours = {"seed": "a", "lr": "a", "corpus": "a"}
    if theirs == ours:
        return
    odd = a_member("g0:odd", data.draw(st.integers(0, 2)), fingerprint=theirs, ran=data.draw(st.booleans()))
    honest = [a_member(name, 3, fingerprint=ours) for name in NAMES[1:3]]
    decided = decide_all([odd, *honest])
    d = decided["g0:odd"]
    assert isinstance(d, Leave) and not d.again
    named = [k for k in {*ours, *theirs} if f"{k} is {theirs.get(k, 'not set')} here" in d.reason]
    assert any(ours.get(k) != theirs.get(k) for k in named)
    for m in honest:
        run = decided[m.name]
        assert isinstance(run, Run) and run.active == tuple(o.name for o in honest) and not run.joiners


@given(st.integers(1, STEPS), st.integers(0, STEPS), st.integers(2, 4), st.data())
def test_a_contradicted_member_is_never_a_donor(step: int, ahead: int, honest: int, data: st.DataObject) -> None:
    members = [a_member(name, step) for name in NAMES[:honest]]
    claimed = window(0, step + ahead)
    wrong = data.draw(st.sampled_from([s for s in claimed if 0 < s <= step]))
    bad = a_member("a:bad", step + ahead, window={**claimed, wrong: "noise"})
    decided = decide_all([bad, *members])
    assert isinstance(decided["a:bad"], Leave)
    for m in members:
        run = decided[m.name]
        assert isinstance(run, Run | Finish)
        assert not isinstance(run, Run) or "a:bad" not in (*run.active, *run.joiners)


def test_in_exact_sums_two_that_contradict_each_other_both_stop() -> None:
    decided = decide_all([a_member(NAMES[0], 3, 0), a_member(NAMES[1], 3, 1)])
    assert all(isinstance(d, Leave) and d.again for d in decided.values())


def test_in_float_sums_another_lineage_at_the_same_step_heals() -> None:
    members = [a_member(NAMES[0], 3, 1, held=frozenset({1})), a_member(NAMES[1], 3, 0), a_member(NAMES[2], 3, 0)]
    decided = decide_all(members, exact=False)
    heal = decided[NAMES[0]]
    assert isinstance(heal, Heal) and (heal.step, heal.lineage) == (3, lineage(0, 3))
    run = decided[NAMES[1]]
    assert isinstance(run, Run) and run.active == NAMES[1:3] and not run.exchange


def test_fresh_groups_never_start_over() -> None:
    members = [a_member(name, 0, ran=False, floor=9, asks=2) for name in NAMES[:3]]
    assert all(isinstance(d, Lost) and "steps 1 to 9" in d.reason for d in decide_all(members).values())
    late = [replace(m, asks=protocol.LOST_ASKS + 1) for m in members]
    assert all(isinstance(d, Leave) and not d.again for d in decide_all(late).values())


def test_the_start_waits_a_moment_for_all() -> None:
    members = [a_member(name, 0, ran=False, asks=1) for name in NAMES[:2]]
    assert all(isinstance(d, Lost) for d in decide_all(members).values())
    members[0] = replace(members[0], asks=START_ASKS + 1)
    assert all(isinstance(d, Run) for d in decide_all(members).values())


# --- What a member says ----------------------------------------------------------------------------


def a_protocol(name: str = NAMES[0], ran: bool = True, **rules: Any) -> Protocol:
    """A life at its start, whose first request is out."""
    p = Protocol(replace(rules_of(name), address="host", store="store", **rules))
    p.ran = ran
    p.begin()
    return p


def said(p: Protocol) -> Participant:
    """What a life says, after a trip as JSON."""
    r = p.request()
    return replace(r, data=json.loads(json.dumps(r.data)))


odd_values = st.sampled_from([float("inf"), float("nan"), 10**400, "0-1", "0-99999999", "9", "-1", "٣"])
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | odd_values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = tuple(Protocol(rules_of("x")).request().data)


@st.composite
def participants(draw: st.DrawFn) -> Participant:
    """Something that came in a quorum: a member with a few fields gone or replaced, or anything."""
    if draw(st.integers(0, 4)) == 0:
        return Participant("stranger", draw(st.integers()), "", "", draw(json_values))
    data = dict(said(a_protocol("g5:s")).data)
    for key in draw(st.sets(st.sampled_from(FIELDS), max_size=2)):
        data[key] = draw(odd_values | json_values)
    for key in draw(st.sets(st.sampled_from(FIELDS), max_size=1)):
        data.pop(key)
    if draw(st.booleans()):
        data["window"] = draw(
            st.dictionaries(st.sampled_from(["0", "1", "-1", "x", "1.5", ""]), odd_values, max_size=4)
        )
    return Participant("stranger", draw(st.sampled_from([0, 0, 0, 1, -1, 2**63 - 1])), "", "", data)


@settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow], report_multiple_bugs=False)
@given(participants())
def test_a_malformed_participant_raises_nothing_but_value_error(p: Participant) -> None:
    try:
        m = read_member(p)
    except ValueError as e:
        assert p.name in str(e)
        return
    assert m.step in m.window and len(m.window) <= WINDOW + 1
    assert all(0 <= u < MAX_UNITS for u in m.held)


@pytest.mark.parametrize("field", FIELDS)
@given(value=odd_values | json_values)
def test_a_malformed_participant_never_takes_part(field: str, value: Any) -> None:
    mates = [a_protocol(name) for name in NAMES[:2]]
    good = [said(p) for p in mates]
    odd = replace(good[1], name="g2:odd", data={**good[1].data, field: value})
    try:
        read_member(odd)
    except (ValueError, OverflowError):
        pass
    else:
        return
    for p in mates:
        try:
            action = p.answered(Answer("1.2.3", [*good, odd]))
        except OverflowError:
            return  # the test above is about that
        assert isinstance(action, Connect) and action.size == 2
        assert p.run is not None and p.run.active == NAMES[:2]


@given(st.integers(0, STEPS), st.frozensets(st.integers(0, UNITS - 1)), st.sampled_from([None, "1.2.3/abc"]))
def test_what_a_member_says_is_read_as_it_was(step: int, held: frozenset[int], live: str | None) -> None:
    p = a_protocol()
    p.step, p.window, p.held, p.live = step, window(0, step), set(held), live
    m = read_member(said(p))
    assert (m.step, m.window, m.held, m.live) == (step, window(0, step), held, live)
    assert (m.fingerprint, m.address, m.store, m.lineage) == (p.rules.fingerprint, "host", "store", lineage(0, step))


def test_a_thousand_groups_with_ten_thousand_units_stay_below_four_mebibytes() -> None:
    """Rule 15: gRPC's limit, with sets that several failed attempts have broken into pieces."""
    units, groups = 10_000, 1000
    fingerprint = {f"section.some_field_{i}": f"value-{i:08}" for i in range(35)}
    names = [f"g{i}:{i:08x}" for i in range(groups)]
    held: Mapping[str, frozenset[int]] = {}
    for dead in (names[::7], names[3::5], names[2::3]):  # each leaves holes that others fill
        by = share(units, held, names)
        held = {name: mine for name, mine in by.items() if name not in dead}
    total = 0
    for name in names:
        rules = replace(rules_of(name), units=units, fingerprint=fingerprint)
        p = Protocol(rules, 1_000_000, {1_000_000 - i: next_lineage("a", str(i)) for i in range(WINDOW)})
        p.held = set(held.get(name, ()))
        p.live = protocol.live_key("1000000.1790000000.999999999", names)
        r = replace(p.request(), address="192.168.100.100:65535", store="192.168.100.100:65535")
        total += len(json.dumps(dict(r.data))) + len(r.name) + len(r.address) + len(r.store) + 32
    assert total < 4 << 20, f"{total / 2**20:.2f} MiB"
    worst = sum(len(to_ranges(range(i, units, 2 * groups))) for i in range(groups))
    assert total + worst < 4 << 20


# --- The machine -----------------------------------------------------------------------------------


def an_attempt(p: Protocol, mates: Sequence[Protocol], key: str = "1.2.3") -> Any:
    """The lighthouse answers a life with the present requests of all of these."""
    return p.answered(Answer(key, [said(m) for m in (p, *mates)]))


def test_one_step_of_two() -> None:
    a, b = a_protocol(NAMES[0], num_groups=2), a_protocol(NAMES[1], num_groups=2)
    for p, mate in ((a, b), (b, a)):
        assert isinstance(an_attempt(p, [mate]), Connect)
    for p in (a, b):
        work = p.connected()
        assert isinstance(work, Compute)
        for unit in work.units:
            p.unit_added(unit)
    assert sorted(a.held | b.held) == list(range(UNITS)) and not a.held & b.held
    for p in (a, b):
        settle = p.units_done()
        assert isinstance(settle, Exchange) and settle.size == 2
        commit = p.exchanged(2 * settle.seal, "bits")
        assert isinstance(commit, Commit) and commit.lineage == next_lineage(ROOT, "bits")
        p.committed(commit.lineage)
        assert (p.step, p.held, p.live) == (1, set(), a.live)
    for p in (a, b):
        p.begin()
    again = an_attempt(a, [b], "1.2.4")
    assert isinstance(again, Compute), "nobody left, so the process group is used again"


def test_an_answer_to_another_request_is_no_answer() -> None:
    a, b = a_protocol(NAMES[0]), a_protocol(NAMES[1])
    old = Answer("1.2.3", [said(a), said(b)])
    assert isinstance(a.lost("timeout"), Ask)
    late = a.answered(old)
    assert isinstance(late, Ask) and late.cancel and a.run is None


def test_a_mixed_exchange_commits_nothing() -> None:
    a, b = a_protocol(NAMES[0]), a_protocol(NAMES[1])
    an_attempt(a, [b])
    a.connected()
    action = a.exchanged(a.seal + 1, "bits")
    assert isinstance(action, Ask) and action.cancel and a.step == 0


def test_what_is_held_survives_a_failure_and_nothing_survives_a_broken_unit() -> None:
    a, b = a_protocol(NAMES[0]), a_protocol(NAMES[1])
    an_attempt(a, [b])
    a.connected()
    a.unit_added(0)
    failed = a.failed("a peer is gone")
    assert isinstance(failed, Ask) and failed.cancel and failed.request.data["held"] == "0" and a.live is None
    a.unit_broke()
    assert a.held == set()


def test_a_group_gives_up_after_too_many_failures() -> None:
    a = a_protocol()
    for _ in range(protocol.MAX_FAILURES):
        assert isinstance(a.failed("no"), Ask)
    last = a.failed("no")
    assert isinstance(last, Leave) and last.again and "no" in last.reason


def test_window_keeps_the_last_commits() -> None:
    a = a_protocol()
    for i in range(20):
        a.committed(f"{i}")
        assert a.step in a.window and len(a.window) <= WINDOW
        read_member(said(a))


def test_dropped_sums_are_dropped_even_if_the_next_meeting_fails() -> None:
    a, b = a_protocol(NAMES[0]), a_protocol(NAMES[1])
    a.held, b.held = {0, 1}, {1, 2, 3}  # b's set is larger, so a must drop its own
    for p in (a, b):
        p.begin()
    assert isinstance(an_attempt(a, [b]), Connect)
    assert isinstance(a.failed("not all met"), Ask)
    b.begin()
    assert isinstance(an_attempt(a, [b], "1.2.4"), Connect)
    work = a.connected()
    assert isinstance(work, Compute) and work.drop and not {1, 2, 3} & set(work.units)


def test_an_outage_of_the_lighthouse_doesnt_use_up_the_patience() -> None:
    a = a_protocol(ran=False, floor=3)
    for _ in range(protocol.LOST_ASKS + 1):
        a.lost("connection refused")
    assert isinstance(an_attempt(a, []), Ask), "gives up at the first answer, before anyone else could be in it"


def test_a_group_with_fewer_units_never_trains_beside_the_others() -> None:
    ours, theirs = {"units": "16"}, {"units": "8"}
    mates = [a_protocol(name, units=16, fingerprint=ours) for name in NAMES[:2]]
    mates[0].held, mates[1].held = {12, 13}, {9}
    odd = a_protocol(NAMES[2], units=8, fingerprint=theirs, ran=False)
    odd.asks = START_ASKS + 1
    for p in (*mates, odd):
        p.begin()
    assert isinstance(an_attempt(odd, mates), Leave)
